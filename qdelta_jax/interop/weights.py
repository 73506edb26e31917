"""Named arrays of another library into a module of this one."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from qdelta_jax.layers.mixer import Mixer, MixerConfig
from qdelta_jax.layers.partitioning import constrain


def as_arrays(weights: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Array]:
    """The weights as JAX arrays; numpy, JAX and CPU torch arrays go.

    Raises:
        ValueError: a name is missing, or one is not known.
    """
    missing, unknown = sorted(set(names) - set(weights)), sorted(set(weights) - set(names))
    if missing or unknown:
        raise ValueError(f"weights: want exactly {list(names)}; missing: {missing}; unknown: {unknown}")
    return {name: x if isinstance(x, Array) else jnp.asarray(np.asarray(x)) for name, x in weights.items()}


def fill_mixer(config: MixerConfig, parameters: Mapping[str, Array], **options: Any) -> Mixer:
    """A Mixer whose parameters are these, by dotted path, cast to the parameters' dtypes.

    Works on tracers, so that gradients reach the arrays given.

    Raises:
        ValueError: a parameter is missing, not known, or of another shape.
    """
    model = nnx.eval_shape(lambda: Mixer(config, rngs=nnx.Rngs(0), **options))
    graph, state = nnx.split(model)
    wanted = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    if set(wanted) != set(parameters):
        raise ValueError(f"parameters: got {sorted(parameters)}, want {sorted(wanted)}")
    for name, variable in wanted.items():
        value, target = parameters[name], variable.get_value()
        if value.shape != target.shape:
            raise ValueError(f"parameter {name!r}: got shape {value.shape}, want {target.shape}")
        variable.set_value(constrain(value.astype(target.dtype), variable.get_metadata("out_sharding")))
    return nnx.merge(graph, state)


def depthwise(weight: Array) -> Array:
    """A torch depthwise kernel [C, 1, W] as [W, C]."""
    return jnp.transpose(weight[:, 0, :])
