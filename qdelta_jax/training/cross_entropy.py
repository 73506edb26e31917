"""The loss of a linear readout, a chunk of tokens at a time: the logits of all tokens never exist at once."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from qdelta_jax.layers.linear import product, widened, wider
from qdelta_jax.layers.partitioning import constrain, divisions

__all__ = ["CHUNK_LOGITS", "summed_cross_entropy"]

CHUNK_LOGITS = 2**26
"""Logits of a chunk on one device, at most: 256 MiB in float32."""


def summed_cross_entropy(
    x: Float[Array, "batch time width"],
    kernel: Float[Array, "rows columns"],
    targets: Any,
    counted: Any,
    *,
    axis: int = 0,
    chunk: int | None = None,
) -> Float[Array, ""]:
    """sum over counted tokens t of w_t (log(sum_v exp(x_t W_v)) - x_t W_target(t)), w_t = 1 unless weights are given.

    Logits are products in the dtype of x, summed in float32, and exist for one chunk of tokens at a time. A
    gradient is made in the same pass, while a chunk's logits are there: the sum's derivative by the logits,
    softmax - onehot, needs nothing from behind, so nothing is kept or computed twice. It is rounded to the dtype
    of x for its two products; the sum over tokens that is W's gradient is float32. Derivatives in reverse mode only
    (`jax.jvp` of the loss itself is refused).

    Args:
        x: features.
        kernel: W [width, vocab], or [vocab, width] with `axis` 1 (an embedding).
        targets: integers [B, T] within 0 .. vocab - 1; a counted token with another makes the loss NaN.
        counted: booleans [B, T]; where False (padding) a token adds nothing and gets no gradient, whatever its
            features are. Or floating weights w [B, T], of which 0 is False; constants, with a gradient of 0.
        axis: of the kernel, the one that the features meet.
        chunk: tokens of a chunk on each device, at most; by default as many as have `CHUNK_LOGITS` logits. It
            changes memory, not the loss.
    Returns:
        The sum in float32 (float64 for float64 features).
    Raises:
        ValueError: shapes or dtypes that do not fit, or a chunk of no token.

    >>> x, embedding = jnp.zeros((2, 5, 3)), jnp.ones((7, 3))
    >>> targets, counted = jnp.zeros((2, 5), jnp.int32), jnp.ones((2, 5), bool)
    >>> float(jnp.exp(summed_cross_entropy(x, embedding, targets, counted, axis=1, chunk=4) / 10)).__round__(3)
    7.0
    """
    if axis not in (0, 1) or kernel.ndim != 2 or kernel.shape[axis] != x.shape[-1]:
        raise ValueError(f"kernel: got shape {kernel.shape}, want width {x.shape[-1]} along its axis {axis} of 2")
    kinds: dict[str, tuple] = {"integer": (jnp.integer,), "bool or floating": (jnp.bool_, jnp.floating)}
    for name, value, kind in (("targets", targets, "integer"), ("counted", counted, "bool or floating")):
        if value.shape != x.shape[:2] or not any(jnp.issubdtype(value.dtype, k) for k in kinds[kind]):
            raise ValueError(f"{name}: got {value.dtype} {value.shape}, want {kind} [B,T] = {x.shape[:2]}")
    if 0 in (*x.shape, *kernel.shape):
        raise ValueError(f"x, kernel: got shapes {x.shape} and {kernel.shape}, want no axis of length 0")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk: got {chunk}, want at least 1 token")
    # A narrow type could not count the vocabulary.
    targets = targets.astype(jnp.int32)
    if counted.dtype != jnp.bool_:
        counted = jnp.asarray(counted, wider(x.dtype, jnp.float32))
    return _sum(x, kernel, targets, counted, axis, chunk or max(1, CHUNK_LOGITS // kernel.shape[1 - axis]))


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _sum(x: Array, kernel: Array, targets: Array, counted: Array, axis: int, chunk: int) -> Array:
    weight = _whole(kernel, x.dtype, axis)
    items = _cut(x, targets, counted, chunk)

    def one(_: None, item: tuple[Array, Array, Array]) -> tuple[None, Array]:
        return None, _losses(weight, axis, *item)[0]

    return jnp.sum(lax.scan(one, None, items, unroll=len(items[0]) == 1)[1])


def _forward(x: Array, kernel: Array, targets: Array, counted: Array, axis: int, chunk: int) -> tuple[Array, Any]:
    weight, wide = _whole(kernel, x.dtype, axis), wider(x.dtype, jnp.float32)
    items = _cut(x, targets, counted, chunk)
    names = ("embed", "vocab") if axis == 0 else ("vocab", "embed")
    # Each device adds up a gradient of its own, of the whole width: one sum over devices, behind the last chunk.
    local = ("batch", *(None if name == "embed" else name for name in names))

    def one(total: Array, item: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        losses, slope, hidden = _losses(weight, axis, *item, gradient=True)
        pair = (hidden, slope) if axis == 0 else (slope, hidden)
        # [parts, tokens, ..] twice: one product for each part of the batch.
        grown = lax.dot_general(*pair, (((1,), (1,)), ((0,), (0,))), preferred_element_type=wide)
        back = product(slope, weight, axis=1 - axis, out_dtype=wide).astype(x.dtype)
        return constrain(total + grown, local), (losses, back)

    start = constrain(jnp.zeros((items[0].shape[1], *kernel.shape), wide), local)
    total, (losses, back) = lax.scan(one, start, items, unroll=len(items[0]) == 1)
    # `where` and not a product: weights that are not finite stay out of padding too.
    slope_x = jnp.where(counted.astype(jnp.bool_)[:, :, None], _join(back, x.shape), 0)
    return jnp.sum(losses), (slope_x, constrain(jnp.sum(total, axis=0), names).astype(kernel.dtype))


def _backward(axis: int, chunk: int, slopes: tuple[Array, Array], g: Array) -> tuple[Array, Array, None, None]:
    x, kernel = ((widened(slope) * g.astype(wider(slope.dtype, g.dtype))).astype(slope.dtype) for slope in slopes)
    return x, kernel, None, None


_sum.defvjp(_forward, _backward)


def _losses(
    weight: Array, axis: int, x: Array, targets: Array, counted: Array, *, gradient: bool = False
) -> tuple[Array, Array, Array]:
    """A chunk's losses [parts, tokens], their derivative by the logits [parts, tokens, vocab], and its features.

    The two last have the dtype of x and are zero where tokens are not counted.
    """
    weights = None if counted.dtype == jnp.bool_ else counted
    counted = counted.astype(jnp.bool_)
    x = jnp.where(counted[..., None], x, 0)
    logits = product(x, weight, axis=axis, out_dtype=wider(x.dtype, jnp.float32))
    logits = constrain(logits, ("batch", None, "vocab"))
    norm = jax.nn.logsumexp(logits, axis=-1)
    losses = norm - jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]
    known = (targets >= 0) & (targets < logits.shape[-1])
    losses = jnp.where(known, losses, jnp.nan)
    losses = jnp.where(counted, losses if weights is None else weights * losses, 0)
    if not gradient:
        return losses, losses, x
    # A comparison and not a scatter: it is part of one elementwise pass.
    hit = lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
    slope = jnp.exp(logits - norm[..., None]) - hit.astype(logits.dtype)
    slope = slope if weights is None else weights[..., None] * slope
    return losses, jnp.where(counted[..., None], slope, 0).astype(x.dtype), x


def _whole(kernel: Array, dtype: Any, axis: int) -> Array:
    """The kernel as every chunk's product takes it: cast and, where the mesh cuts the width, gathered just once."""
    return constrain(kernel.astype(dtype), (None, "vocab") if axis == 0 else ("vocab", None))


def _cut(x: Array, targets: Array, counted: Array, chunk: int) -> tuple[Array, Array, Array]:
    """Chunks [chunks, parts, tokens, ..]: each has an equal share of every part of the batch on the mesh.

    The chunks are as even as can be; the last is filled up with tokens that are not counted.
    """
    parts = divisions("batch", len(x))
    tokens = x.shape[0] * x.shape[1] // parts
    chunks = -(-tokens // chunk)
    length = -(-tokens // chunks)

    def cut(a: Array) -> Array:
        a = a.reshape(parts, tokens, *a.shape[2:])
        a = jnp.pad(a, ((0, 0), (0, chunks * length - tokens), *((0, 0) for _ in a.shape[2:])))
        a = jnp.moveaxis(a.reshape(parts, chunks, length, *a.shape[2:]), 1, 0)
        return constrain(a, (None, "batch", *(None for _ in a.shape[2:])))

    return cut(x), cut(targets), cut(counted)


def _join(chunks: Array, shape: tuple[int, ...]) -> Array:
    """What `_cut` cut, in this shape [B, T, ..] again."""
    count, parts, length = chunks.shape[:3]
    flat = jnp.moveaxis(chunks, 0, 1).reshape(parts, count * length, *chunks.shape[3:])
    return constrain(flat[:, : shape[0] * shape[1] // parts].reshape(shape), ("batch", None, None))
