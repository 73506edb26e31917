"""The Kimi Delta Attention layer of Kimi Linear (transformers' `KimiLinearDeltaAttention`) as a Mixer."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from qdelta_jax.interop.weights import as_arrays, depthwise, fill_mixer
from qdelta_jax.layers.mixer import Mixer, MixerConfig

__all__ = ["kda_from_kimi_linear"]

DENSE = {
    "q_proj.weight": "q_proj.kernel",
    "k_proj.weight": "k_proj.kernel",
    "v_proj.weight": "v_proj.kernel",
    "b_proj.weight": "gates.projections.beta.projection.kernel",
    "forget_gate.f_a_proj.weight": "gates.projections.log_decay.projection.down.kernel",
    "forget_gate.f_b_proj.weight": "gates.projections.log_decay.projection.up.kernel",
    "g_a_proj.weight": "gate_proj.down.kernel",
    "g_b_proj.weight": "gate_proj.up.kernel",
    "o_proj.weight": "out_proj.kernel",
}
OTHERS = ("conv1d.weight", "forget_gate.A_log", "forget_gate.dt_bias", "o_norm.weight")


def kda_from_kimi_linear(
    weights: Mapping[str, Any], *, norm_eps: float = 1e-5, chunk_size: int = 64, **options: Any
) -> Mixer:
    """A kda Mixer that computes what the released layer does with these weights.

    Args:
        weights: the layer's parameters by their released names, in torch layouts (numpy, JAX or CPU torch
            arrays). All sizes follow from their shapes.
        norm_eps: `rms_norm_eps` of the released configuration.
        chunk_size: as in `qdelta_jax.delta_rule`.
        options: `dtype`, `param_dtype` of the Mixer.
    Raises:
        ValueError: a weight is missing, unknown or of a shape that does not fit the others.

    Differentiable in the weights: their gradients come in the released layout.

    Source: arXiv 2510.26692.
    """
    w = as_arrays(weights, (*DENSE, *OTHERS))
    key_width, width = w["q_proj.weight"].shape
    heads, value_dim = w["forget_gate.A_log"].size, w["o_norm.weight"].shape[0]
    if key_width % heads:
        raise ValueError(f"weights: got {key_width} rows in q_proj.weight, want a multiple of {heads} heads")
    config = MixerConfig(
        width=width,
        rule="kda",
        heads=heads,
        key_dim=key_width // heads,
        value_dim=value_dim,
        conv_width=w["conv1d.weight"].shape[-1],
        norm_eps=norm_eps,
        output_gate="sigmoid",
        gate_low_rank=True,
        chunk_size=chunk_size,
    )
    conv_q, conv_k, conv_v = jnp.split(depthwise(w["conv1d.weight"]), (key_width, 2 * key_width), axis=1)
    parameters = {ours: w[theirs].T for theirs, ours in DENSE.items()} | {
        "convolutions.q.kernel": conv_q,
        "convolutions.k.kernel": conv_k,
        "convolutions.v.kernel": conv_v,
        "gates.projections.log_decay.decay.A_log": w["forget_gate.A_log"].reshape(-1),
        "gates.projections.log_decay.decay.dt_bias": w["forget_gate.dt_bias"],
        "norm.scale": w["o_norm.weight"],
    }
    return fill_mixer(config, parameters, **options)
