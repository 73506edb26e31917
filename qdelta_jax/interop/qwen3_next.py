"""The linear-attention layer of Qwen3-Next (transformers' `Qwen3NextGatedDeltaNet`) as a Mixer."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from qdelta_jax.interop.weights import as_arrays, depthwise, fill_mixer
from qdelta_jax.layers.mixer import Mixer, MixerConfig

__all__ = ["gated_delta_net_from_qwen3_next"]

NAMES = (
    "in_proj_qkvz.weight",
    "in_proj_ba.weight",
    "conv1d.weight",
    "dt_bias",
    "A_log",
    "norm.weight",
    "out_proj.weight",
)


def gated_delta_net_from_qwen3_next(
    weights: Mapping[str, Any], *, heads: int, norm_eps: float = 1e-6, chunk_size: int = 64, **options: Any
) -> Mixer:
    """A gated_delta_net Mixer that computes what the released layer does with these weights.

    The released layer projects once, with [q, k, v of its value heads, z of the same] side by side for each
    key head and [b, a of its value heads] likewise; here each part has its own projection.

    Args:
        weights: the layer's parameters by their released names, in torch layouts (numpy, JAX or CPU torch
            arrays).
        heads: key heads, `linear_num_key_heads` of the released configuration; all other sizes follow from
            shapes.
        norm_eps: `rms_norm_eps` there.
        chunk_size: as in `qdelta_jax.delta_rule`.
        options: `dtype`, `param_dtype` of the Mixer.
    Raises:
        ValueError: a weight is missing, unknown, or its shape does not fit `heads`.

    Differentiable in the weights: their gradients come in the released layout.

    Source: arXiv 2412.06464.
    """
    w = as_arrays(weights, NAMES)
    width = w["in_proj_qkvz.weight"].shape[1]
    value_heads, value_dim = w["A_log"].shape[0], w["norm.weight"].shape[0]
    key_width = (w["conv1d.weight"].shape[0] - value_heads * value_dim) // 2
    if heads < 1 or value_heads % heads or key_width % heads:
        raise ValueError(
            f"heads: got {heads}, want a divisor of {value_heads} value heads and {key_width} key channels"
        )
    group, key_dim = value_heads // heads, key_width // heads
    config = MixerConfig(
        width=width,
        rule="gated_delta_net",
        heads=heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_width=w["conv1d.weight"].shape[-1],
        norm_eps=norm_eps,
        output_gate="silu",
        chunk_size=chunk_size,
    )
    grouped = group * value_dim
    q, k, v, z = _split(w["in_proj_qkvz.weight"], heads, (key_dim, key_dim, grouped, grouped))
    b, a = _split(w["in_proj_ba.weight"], heads, (group, group))
    conv_q, conv_k, conv_v = jnp.split(depthwise(w["conv1d.weight"]), (key_width, 2 * key_width), axis=1)
    parameters = {
        "q_proj.kernel": q,
        "k_proj.kernel": k,
        "v_proj.kernel": v,
        "gate_proj.kernel": z,
        "gates.projections.beta.projection.kernel": b,
        "gates.projections.log_decay.projection.kernel": a,
        "gates.projections.log_decay.decay.A_log": w["A_log"],
        "gates.projections.log_decay.decay.dt_bias": w["dt_bias"],
        "convolutions.q.kernel": conv_q,
        "convolutions.k.kernel": conv_k,
        "convolutions.v.kernel": conv_v,
        "norm.scale": w["norm.weight"],
        "out_proj.kernel": w["out_proj.weight"].T,
    }
    return fill_mixer(config, parameters, **options)


def _split(weight: Array, heads: int, sizes: tuple[int, ...]) -> list[Array]:
    """Rows grouped by head, of `sizes` within a head, as one kernel [width, heads * size] for each size."""
    rows = weight.reshape(heads, -1, weight.shape[1])
    if rows.shape[1] != sum(sizes):
        raise ValueError(f"weights: got {weight.shape[0]} rows in a fused projection, want {heads} x {sum(sizes)}")
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return [part.reshape(-1, weight.shape[1]).T for part in jnp.split(rows, ends, axis=1)]
