"""Flax NNX layers, each in its module: `from qdelta_jax.layers.mixer import Mixer, MixerConfig`."""
