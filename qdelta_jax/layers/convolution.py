"""Causal depthwise short convolution over packed and padded sequences, with a cache for decoding."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int, Shaped

import pallas_kernels
from qdelta_jax.checks import check_count, check_segment_ids
from qdelta_jax.kept import activation
from qdelta_jax.layers.inputs import (
    check_array,
    check_conv_implementation,
    check_dtype,
    check_dtypes,
    check_flag,
    check_number,
)
from qdelta_jax.layers.linear import Initializer, widened
from qdelta_jax.layers.partitioning import partitioned
from qdelta_jax.mosaic import interpreted
from qdelta_jax.normalize import l2_normalize
from qdelta_jax.segments import padding_last, reordered, segment_runs

__all__ = ["ShortConvolution", "short_convolution"]


def short_convolution(
    x: Float[Array, "b t c"],
    kernel: Float[Array, "w c"],
    *,
    cache: Float[Array, "b n c"] | None = None,
    segment_ids: Int[Array, "b t"] | None = None,
    zeros_last: bool = False,
) -> tuple[Float[Array, "b t c"], Float[Array, "b n c"]]:
    """y_t = sum_j kernel[W-1-j] x_{t-j}, j = 0 .. W-1, over the tokens of t's own segment.

    Padding (segment id 0) is skipped: it gets y = 0 and is no one's x_{t-j}, so that a segment goes on over
    padding inside it as the recurrence does. Tokens before the first are those of the cache for the first
    segment of a row, and zeros for every other segment. Sums are in float32.

    Args:
        x: [B, T, C], any T >= 1.
        kernel: [W, C]; the last row meets the token itself.
        cache: [B, W-1, C], the W - 1 tokens before the first one; zeros by default.
        segment_ids: [B, T], as in `qdelta_jax.delta_rule`.
        zeros_last: the caller knows that padding stands behind the tokens of its row, that x is 0 there, and that the
            gradient of y will be: nothing is moved or cleared then.
    Returns:
        y [B, T, C] in float32 (float64 for float64 inputs), and the new cache: the last W - 1 real tokens of
        the row's last segment, in the dtype of the old one.
    Raises:
        ValueError: a cache of another shape, or no floating array.
    """
    batch, length, channels = x.shape
    width = kernel.shape[0]
    before_shape = (batch, width - 1, channels)
    if cache is not None:
        check_array("cache", cache, "[B,W-1,C]", before_shape)
    before = jnp.zeros(before_shape, x.dtype) if cache is None else cache.astype(x.dtype)
    if segment_ids is None:
        x = jnp.concatenate([before, x], axis=1)
        return _taps(x, kernel, length), x[:, length:].astype(before.dtype if cache is None else cache.dtype)

    x, valid, runs, undo = _real_first(x, segment_ids, zeros_last)
    x = jnp.concatenate([before, x], axis=1)
    padded = jnp.pad(runs, ((0, 0), (width - 1, 0)))
    y = undo(_taps(x, kernel, length, padded))

    count = jnp.sum(valid, axis=1, dtype=jnp.int32)
    index = count[:, None] + jnp.arange(width - 1, dtype=jnp.int32)[None]
    # A row of padding alone leaves the first segment's tokens where they are.
    last = jnp.max(runs, axis=1, keepdims=True, initial=0)
    own = jnp.take_along_axis(padded, index, axis=1) == last
    after = jnp.where(own[:, :, None], jnp.take_along_axis(x, index[:, :, None], axis=1), 0)
    return y, after.astype(x.dtype if cache is None else cache.dtype)


def _real_first(x: Array, segment_ids: Array, zeros_last: bool) -> tuple[Array, Array, Array, Callable[[Array], Array]]:
    """x with its real tokens first, in their order, and zeros behind them; which are real, in the given order; the
    number of each token's segment in the new one, -1 in padding; and what undoes that order."""
    valid = segment_ids != 0
    runs = jnp.where(valid, segment_runs(segment_ids), -1)
    if zeros_last:
        return x, valid, runs, lambda y: y
    x = jnp.where(valid[:, :, None], x, 0)
    order, back = padding_last(valid)
    x, runs = reordered((x, runs), order)
    return x, valid, runs, lambda y: jnp.where(valid[:, :, None], reordered(y, back), 0)


def _by_kernel(x: Array, kernel: Array, segment_ids: Array | None, zeros_last: bool, **options: Any) -> Array:
    """silu(short_convolution(x, kernel)), normed where the options say so, in one pass over memory."""
    run: Callable[..., Array] = partial(pallas_kernels.convolution, interpret=interpreted(), **options)
    if segment_ids is None:
        return run(x, kernel, None)
    x, _, runs, undo = _real_first(x, segment_ids, zeros_last)
    return undo(run(x, kernel, runs))


def _taps(x: Array, kernel: Array, length: int, runs: Array | None = None) -> Array:
    """The convolution of x [B, W-1+T, C]; runs [B, W-1+T] numbers the segments, if there is more than one."""
    width = kernel.shape[0]
    x, kernel = widened(x), widened(kernel)
    y = jnp.zeros((x.shape[0], length, x.shape[2]), x.dtype)
    for tap in range(width):
        term = x[:, tap : tap + length] * kernel[tap][None, None, :].astype(x.dtype)
        if runs is not None:
            same = runs[:, tap : tap + length] == runs[:, width - 1 :]
            term = jnp.where(same[:, :, None], term, 0)
        y = y + term
    return y


def _raise_if(reason: str | None) -> None:
    if reason is not None:
        raise NotImplementedError(
            f"implementation='mosaic' of a short convolution (conv_implementation of a layer or model) cannot run: "
            f"{reason}"
        )


class ShortConvolution(nnx.Module):
    """y_t = silu(sum_j kernel[W-1-j] x_{t-j} + bias), depthwise and causal, inside each segment.

    With norm_size each head of y_t is l2_normalize'd: y_t rsqrt(sum_head(y_t^2) + norm_eps).

    Args:
        channels: C.
        width: W, the number of taps.
        activation: "silu" or None.
        use_bias: adds `bias` [C], zero at first.
        implementation: "xla"; "mosaic", one GPU kernel for the convolution with its activation, and one for the
            gradient (a Hopper GPU, no bias, a multiple of 128 channels, at most 5 taps, no float64; derivatives in
            reverse mode, once); or None, "mosaic" where that can run. With a cache it is always "xla". The norm is a
            part of the kernels where `pallas_kernels.convolution_unsupported` has nothing against such heads.
        norm_size: L2 norm over each head of so many channels after the activation; None: no norm. The kernels norm
            before they round to the dtype, "xla" after it.
        norm_eps: of that norm, at least 1e-24.
        kernel_init: initializer (key, shape, dtype) -> array; uniform in +-W^-0.5 by default.
        dtype: of the result; None for the input's.
        param_dtype: of the parameters.
        rngs: the stream `params` is used.
    Raises:
        ValueError: width below 1, an unknown activation or implementation, heads that do not divide the channels, a
            dtype that is not floating.
        NotImplementedError: "mosaic" cannot run; the message says why. Where x or the machine is the reason, at the
            call.

    Source: arXiv 2312.00752, the convolution before the recurrence.
    """

    def __init__(
        self,
        channels: int,
        width: int = 4,
        *,
        activation: str | None = "silu",
        use_bias: bool = False,
        implementation: str | None = None,
        norm_size: int | None = None,
        norm_eps: float = 1e-6,
        kernel_init: Initializer | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_count("channels", channels)
        check_count("width", width)
        if activation not in ("silu", None):
            raise ValueError(f"activation: got {activation!r}, want 'silu' or None")
        check_conv_implementation(implementation, "implementation")
        check_flag("use_bias", use_bias)
        check_dtypes(dtype, param_dtype)
        self.channels, self.width, self.activation, self.dtype = channels, width, activation, dtype
        self.implementation = implementation
        self.norm_size = None if norm_size is None else check_count("norm_size", norm_size)
        if self.norm_size is not None and channels % self.norm_size:
            raise ValueError(f"norm_size: got {norm_size}, want a number that divides channels = {channels}")
        self.norm_eps = check_number("norm_eps", norm_eps, positive=True)
        # fan_in of a [W, C] kernel is W: +-sqrt(3 * (1/3) / W).
        kernel_init = kernel_init or nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        kernel = partitioned(kernel_init, (None, "heads"))
        self.kernel = nnx.Param(kernel(rngs.params(), (width, channels), param_dtype))
        zeros = partitioned(nnx.initializers.zeros, ("heads",))
        self.bias = nnx.Param(zeros(rngs.params(), (channels,), param_dtype)) if use_bias else None
        if implementation == "mosaic":
            _raise_if(self._unsupported(jax.ShapeDtypeStruct((1, 1, channels), jnp.float32)))

    def init_cache(self, batch_size: int, dtype: Any = None) -> Shaped[Array, "b n c"]:
        """[B, W-1, C] zeros: nothing before the first token."""
        dtype = dtype or self.dtype or self.kernel.get_value().dtype
        check_dtype("dtype", dtype, "a floating dtype, or None")
        return jnp.zeros((batch_size, self.width - 1, self.channels), dtype)

    def _kernel_runs(self, x: Array) -> bool:
        """
        Raises:
            NotImplementedError: it is asked for and cannot.
        """
        if self.implementation == "xla" or (self.implementation is None and x.size == 0):
            return False
        reason = self._unsupported(x) or (pallas_kernels.machine(x) if interpreted() is None else None)
        if self.implementation == "mosaic":
            _raise_if(reason)
        return reason is None

    def _unsupported(self, x: Any) -> str | None:
        """Why the kernels cannot take x, whatever the machine."""
        if self.bias is not None:
            return "there is a bias"
        return pallas_kernels.convolution_unsupported(x, self.kernel.get_value(), dtype=self.dtype)

    def __call__(
        self,
        x: Float[Array, "b t c"],
        *,
        segment_ids: Int[Array, "b t"] | None = None,
        cache: Float[Array, "b n c"] | None = None,
        zeros_last: bool = False,
    ) -> tuple[Float[Array, "b t c"], Float[Array, "b n c"] | None]:
        """y [B, T, C] and the new cache, None without one. Arguments as in `short_convolution`."""
        if getattr(x, "ndim", None) != 3 or x.shape[2] != self.channels or not jnp.issubdtype(x.dtype, jnp.floating):
            got = f"shape {x.shape} and dtype {x.dtype}" if hasattr(x, "dtype") else type(x).__name__
            raise ValueError(f"x: got {got}, want floating [B,T,C] with C = {self.channels}")
        if segment_ids is not None:
            check_segment_ids(segment_ids, x.shape[:2])
        kernel = self.kernel.get_value()
        if cache is None and self._kernel_runs(x):
            options: dict[str, Any] = {"silu": self.activation == "silu", "dtype": jnp.dtype(self.dtype or x.dtype)}
            inside = not pallas_kernels.convolution_unsupported(x, kernel, head=self.norm_size)
            options |= {"head": self.norm_size, "eps": self.norm_eps} if inside else {}
            y = activation(_by_kernel(x, kernel, segment_ids, zeros_last, **options))
            return y if inside else self._normed(y), None
        y, after = short_convolution(x, kernel, cache=cache, segment_ids=segment_ids, zeros_last=zeros_last)
        if self.bias is not None:
            y = y + jnp.broadcast_to(self.bias.get_value().astype(y.dtype), y.shape)
        if self.activation == "silu":
            y = jax.nn.silu(y)
        if segment_ids is not None and self.bias is not None:
            y = jnp.where((segment_ids != 0)[:, :, None], y, 0)
        y = y.astype(self.dtype or x.dtype)
        # The gradient of the norm has no need of it in memory: that of the activation makes it again anyway.
        y = activation(y) if self.norm_size is None else self._normed(y)
        return y, None if cache is None else after

    def _normed(self, y: Array) -> Array:
        if self.norm_size is None:
            return y
        heads = self.channels // self.norm_size  # -1 would not do where x is empty
        return l2_normalize(y.reshape(*y.shape[:2], heads, self.norm_size), self.norm_eps).reshape(y.shape)
