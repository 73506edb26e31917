"""The short convolution with its activation and a norm in one pass over memory, its gradient in one more, on a GPU.

    p_t = sum_j w[W-1-j] x_{t-j}        s_t = p_t sigmoid(p_t), or p_t       y_t = s_t r_t, or s_t
    ds_t = r_t (dy_t - y_t <dy_t, y_t>), or dy_t                             d_t = ds_t s'(p_t)
    dx_t = sum_j w[W-1-j] d_{t+j}       dw[W-1-j] = sum_t d_t x_{t-j}

with j = 0 .. W-1, over tokens of one segment, r_t = (<s_t, s_t> + eps)^-1/2, and < , > over the channels of one head.
A block walks along some tokens of some channels and keeps what the next ones need in registers: XLA reads each input
once for each tap, and the gradient's intermediates from memory.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.inputs import DTYPES
from pallas_kernels.mesh import without_axes
from pallas_kernels.refusals import no_derivative, reverse_mode_only
from pallas_kernels.supports import machine

TOKENS = 64
"""Of a block; the gradient computes W - 1 more, which belong to the next."""

TOGETHER = 4
"""Tokens that are loaded before the first of them is needed."""

WARPS, LANES = 4, 32
"""Of a warpgroup, which is a block: each thread has 4, 2 or 1 channels, next to each other."""

THREADS = WARPS * LANES

HEADS = (16, 32, 64, 128)
"""Sizes of heads that a norm can be over."""

EPS = (1e-24, float(jnp.finfo(jnp.float32).max))
"""Least and most that can stand under a root: eps^(-3/2), which gradients have, is a number of float32, too."""

REFUSED = (
    "second derivatives and forward-mode derivatives do not go through pallas_kernels.convolution, which has gradients "
    "(reverse mode, once) only: use implementation='xla' of a ShortConvolution, conv_implementation='xla' of a layer "
    "or model"
)


class _How(NamedTuple):
    """silu: or no activation. dtype: of the result. head: channels of each norm, None for none; eps: of the norms."""

    silu: bool
    dtype: Any
    interpret: Any
    head: int | None
    eps: float


def _check(x: Any, kernel: Any, dtype: Any, head: Any) -> None:
    """
    Raises:
        ValueError: naming the argument, what came and what is wanted.
    """

    def shape(array: Any) -> Any:
        return getattr(array, "shape", type(array).__name__)

    if getattr(x, "ndim", None) != 3 or 0 in x.shape:
        raise ValueError(f"x: got {shape(x)}, want [B, T, C], no axis empty")
    if getattr(kernel, "ndim", None) != 2 or kernel.shape[0] < 1 or kernel.shape[1] != x.shape[2]:
        raise ValueError(f"kernel: got {shape(kernel)}, want [W, C] with C = {x.shape[2]} as x has it")
    try:
        floating = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except (TypeError, ValueError):  # no dtype at all
        floating = False
    if not floating:
        raise ValueError(f"dtype: got {dtype!r}, want None or a floating dtype")
    whole = isinstance(head, int | np.integer) and not isinstance(head, bool)
    if head is not None and (not whole or head < 1 or x.shape[2] % head):
        raise ValueError(f"head: got {head!r}, want None or an integer that divides the {x.shape[2]} channels of x")


def _check_more(x: Any, runs: Any, silu: Any, eps: Any) -> None:
    """The same for what counts in a call only."""
    array = hasattr(runs, "shape") and hasattr(runs, "dtype")
    if runs is not None and not (array and runs.shape == x.shape[:2] and jnp.issubdtype(runs.dtype, jnp.integer)):
        got = f"{runs.shape} {runs.dtype}" if array else type(runs).__name__
        raise ValueError(f"runs: got {got}, want None or an array of integers [B, T] = {x.shape[:2]}")
    if not isinstance(silu, bool | np.bool_):
        raise ValueError(f"silu: got {silu!r}, want True or False")
    real = isinstance(eps, int | float | np.integer | np.floating) and not isinstance(eps, bool)
    number = eps.item() if isinstance(eps, np.generic) else eps  # Python's compare as they are, whatever their size
    if not real or not EPS[0] <= number <= EPS[1]:
        raise ValueError(f"eps: got {eps!r}, want a number above 0, {EPS[0]:.3g} .. {EPS[1]:.3g}")


def convolution_unsupported(x: Any, kernel: Any, *, head: int | None = None, dtype: Any = None) -> str | None:
    """Why `convolution` cannot take such arrays, heads and dtype of the result, whatever the machine; None if it can.

    Raises:
        ValueError: an argument would not fit on any machine; the message names it.
    """
    _check(x, kernel, dtype, head)
    for name, given in (("x", x.dtype), ("the kernel", kernel.dtype), ("the result", dtype or x.dtype)):
        if jnp.dtype(given) not in DTYPES:
            return f"{name} has dtype {jnp.dtype(given)}, want bfloat16, float16 or float32"
    if not 1 <= kernel.shape[0] <= TOGETHER + 1:
        return f"the kernel has {kernel.shape[0]} taps, want 1 to {TOGETHER + 1}"
    if x.shape[2] % THREADS:
        return f"x has {x.shape[2]} channels, want a multiple of {THREADS}"
    if x.size >= 1 << 31:
        return f"x has {x.size} elements, want fewer than 2^31: its offsets are 32 bits wide"
    if head is not None and head not in HEADS:
        return f"the norm is over heads of {head} channels, want {', '.join(map(str, HEADS[:-1]))} or {HEADS[-1]}"
    if head is not None and not _each(x.shape[2], head):
        least = THREADS * max(2, head // LANES)
        return f"x has {x.shape[2]} channels in heads of {head} with a norm, want a multiple of {least}"
    return None


def _each(channels: int, head: int | None) -> int:
    """Channels of a thread; a warp then has whole heads. 0: it cannot."""
    if head is None:
        return next(n for n in (4, 2, 1) if channels % (n * THREADS) == 0)
    return next((n for n in (4, 2) if channels % (n * THREADS) == 0 and n * LANES % head == 0), 0)


def convolution(
    x: Array,
    kernel: Array,
    runs: Array | None = None,
    silu: bool = True,
    dtype: Any = None,
    interpret: Any = None,
    *,
    head: int | None = None,
    eps: float = 1e-6,
) -> Array:
    """y_t = s_t rsqrt(sum_head(s_t^2) + eps), s_t = silu(sum_j kernel[W-1-j] x_{t-j}), j = 0 .. W-1, over t's own run.

    Sums are in float32, and nothing is rounded before y. Gradients are for reverse mode, once.

    Args:
        x: [B, T, C] in bfloat16, float16 or float32, C a multiple of 128; zeros stand before the first token.
        kernel: [W, C], W at most 5; the last row meets the token itself.
        runs: [B, T] integers, equal for tokens of one segment, which lie together; None: a row is one segment.
        silu: False: no activation.
        dtype: of the result, one of the same; x's by default.
        interpret: `plgpu.InterpretGPUParams` to run on a CPU.
        head: so many neighbouring channels are normed together: 16, 32 or 64, C a multiple of 256, or 128, C one of
            512; None: no norm, y = s.
        eps: under the root, at least 1e-24.
    Returns:
        y [B, T, C].
    Raises:
        ValueError: an argument does not fit; the message names it.
        NotImplementedError: such arrays cannot be taken (`convolution_unsupported` says why), the device is no Hopper
            GPU, or it is differentiated twice, or in forward mode.

    Source: arXiv 2312.00752, the convolution before the recurrence.
    """
    reason = convolution_unsupported(x, kernel, head=head, dtype=dtype)
    _check_more(x, runs, silu, eps)
    if reason is not None:
        raise NotImplementedError(reason)
    reason = machine(x) if interpret is None else None
    if reason is not None:
        raise NotImplementedError(f"convolution with interpret=None: {reason}")
    x, kernel = reverse_mode_only((x, kernel), REFUSED)
    how = _How(bool(silu), dtype, interpret, None if head is None else int(head), float(eps))
    return _differentiable(how, x, kernel, runs)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(how: _How, x: Array, kernel: Array, runs: Array | None) -> Array:
    return _run(how, x, kernel, runs)


def _run(how: _How, x: Array, kernel: Array, runs: Array | None) -> Array:
    x, kernel = no_derivative((x, kernel), REFUSED)
    out = jax.ShapeDtypeStruct(x.shape, how.dtype or x.dtype)
    return without_axes(lambda *a: _call(_forward_block, how, [out], *a), x, kernel, runs)[0]


def _forward(how: _How, x: Array, kernel: Array, runs: Array | None) -> tuple[Array, tuple[Array, Array, Array | None]]:
    return _run(how, x, kernel, runs), (x, kernel, runs)


def _backward(how: _How, saved: tuple[Array, Array, Array | None], d_y: Array) -> tuple[Array, Array, None]:
    x, kernel, runs = saved
    x, kernel, d_y = no_derivative((x, kernel, d_y), REFUSED)
    batch, length, channels = x.shape
    parts = jax.ShapeDtypeStruct((batch, pl.cdiv(length, TOKENS), kernel.shape[0], channels), jnp.float32)
    out = [jax.ShapeDtypeStruct(x.shape, x.dtype), parts]
    d_x, d_kernel = without_axes(lambda *a: _call(_backward_block, how, out, *a), x, kernel, runs, d_y)
    return d_x, jnp.sum(d_kernel, axis=(0, 1)).astype(kernel.dtype), None


_differentiable.defvjp(_forward, _backward)


def _call(body: Any, how: _How, out: list[Any], x: Array, kernel: Array, runs: Array | None, *more: Array) -> Any:
    """The arrays `out` that the blocks make. Channels reach them as one axis or, with norms, as [heads, head]."""
    batch, length, channels = x.shape
    last = (channels,) if how.head is None else (channels // how.head, how.head)
    tile = _tile(channels, how.head)
    pieces, parts = last[0] // tile.shape[0], pl.cdiv(length, TOKENS)
    arrays = [a.reshape(*a.shape[:-1], *last) for a in (x, kernel, *more)]
    made = plgpu.kernel(
        lambda *refs: body(_Block(length, tile, pieces, parts), how, runs is not None, *refs),
        out_type=[jax.ShapeDtypeStruct((*a.shape[:-1], *last), a.dtype) for a in out],
        grid=(batch * parts * pieces,),
        grid_names=("task",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=x.dtype != jnp.float32,
            unsafe_no_auto_barriers=True,  # no thread reads what another has written
        ),
        interpret=how.interpret,
    )(*arrays[:2], *(() if runs is None else (runs,)), *arrays[2:])
    return [a.reshape(b.shape) for a, b in zip(made, out, strict=True)]


class _Tile(NamedTuple):
    """Which channels of a token a block has, and which of them each thread has."""

    shape: tuple[int, ...]
    layout: Any


def _tile(channels: int, head: int | None) -> _Tile:
    """[width], or with norms [heads, head], whole heads for each warp: then shuffles within warps make the sums."""
    each = _each(channels, head)
    if head is None:
        return _Tile((each * THREADS,), plgpu.Layout.WG_STRIDED((each * THREADS,), each))
    heads = each * LANES // head  # of a warp
    shape = (WARPS * heads, head)
    options: dict[str, Any] = {"warp_dims": (-3,), "lane_dims": (-2,)}
    tiles: list[tuple[int, ...]] = [shape, (each,)]  # warp, lane, channel
    if heads > 1:
        options = {"warp_dims": (-5,), "lane_dims": (-3, -2)}
        tiles = [shape, (heads, head), (each,)]  # warp, 1, head and lane, channel
    return _Tile(shape, plgpu.Layout.TILED(plgpu.Tiling(tuple(tiles)), vector_dim=-1, **options))


class _Block:
    """Some channels of a row, and what one token after the other has there."""

    def __init__(self, length: int, tile: _Tile, pieces: int, parts: int) -> None:
        task = lax.axis_index("task")
        rest, piece = lax.div(task, pieces), lax.rem(task, pieces)
        self.batch, self.part = lax.div(rest, parts), lax.rem(rest, parts)
        self.length, self.first = length, self.part * TOKENS
        self.channels = pl.ds(piece * tile.shape[0], tile.shape[0])
        self.shape, self.layout = tile

    def zeros(self) -> Array:
        return plgpu.layout_cast(jnp.zeros(self.shape, jnp.float32), self.layout)

    def along(self, x: Array) -> Array:
        """[heads] -> [heads, head]."""
        return plgpu.layout_cast(lax.broadcast_in_dim(x, self.shape, (0,)), self.layout)

    def place(self, token: Any) -> Any:
        """A token of the row."""
        return jnp.clip(token, 0, self.length - 1)

    def load(self, ref: Any, token: Any) -> Array:
        """float32; 0 before the row and behind it."""
        x = plgpu.load(ref.at[self.batch, self.place(token), self.channels], layout=self.layout, optimized=False)
        return jnp.where((token >= 0) & (token < self.length), x.astype(jnp.float32), 0.0)

    def store(self, ref: Any, token: Any, x: Array) -> None:
        @pl.when((token >= self.first) & (token < jnp.minimum(self.first + TOKENS, self.length)))
        def _() -> None:
            ref.at[self.batch, self.place(token), self.channels][...] = x.astype(ref.dtype)

    def taps(self, ref: Any) -> list[Array]:
        refs = [ref.at[tap, self.channels] for tap in range(ref.shape[0])]
        return [plgpu.load(x, layout=self.layout, optimized=False).astype(jnp.float32) for x in refs]

    def run(self, ref: Any, token: Any) -> Any:
        """The number of a token's run; outside of the row the nearest token's, where all else is 0."""
        return ref[self.batch, self.place(token)]


def _summed(taps: list[Array], rows: list[Array], same: list[Any]) -> Array:
    """sum_i taps[i] rows[i], where the same run says so."""
    terms = [tap * _kept(row, alike) for tap, row, alike in zip(taps, rows, same, strict=True)]
    return sum(terms[1:], terms[0])


def _kept(x: Array, alike: Any) -> Array:
    return x if alike is True else jnp.where(alike, x, 0.0)


def _sigmoid(x: Array) -> Array:
    """A division takes a dozen instructions."""
    root = lax.rsqrt(1 + jnp.exp(-x))
    return root * root


def _inverse_norm(s: Array, eps: float) -> Array:
    """[heads] of s [heads, head]."""
    return lax.rsqrt(jnp.sum(s * s, axis=1) + eps)


def _alike(runs: list[Any], one: int, others: range) -> list[Any]:
    return [True if not runs else runs[one] == runs[other] for other in others]


def _forward_block(block: _Block, how: _How, segmented: bool, x: Any, kernel: Any, *rest: Any) -> None:
    *runs, out = rest
    taps = block.taps(kernel)
    before = len(taps) - 1

    def step(number: Any, carry: tuple[list[Array], list[Any]]) -> tuple[list[Array], list[Any]]:
        start = block.first + number * TOGETHER
        rows = [*carry[0], *(block.load(x, start + i) for i in range(TOGETHER))]
        marks = [*carry[1], *(block.run(runs[0], start + i) for i in range(TOGETHER) if segmented)]
        for i in range(TOGETHER):
            near = range(i, i + before + 1)
            p = _summed(taps, [rows[n] for n in near], _alike(marks, i + before, near))
            y = p * _sigmoid(p) if how.silu else p
            if how.head is not None:
                y = y * block.along(_inverse_norm(y, how.eps))
            block.store(out, start + i, y)
        return rows[TOGETHER:], marks[TOGETHER:]

    tokens = range(-before, 0)
    rows = [block.load(x, block.first + i) for i in tokens]
    marks = [block.run(runs[0], block.first + i) for i in tokens if segmented]
    lax.fori_loop(0, TOKENS // TOGETHER, step, (rows, marks))


def _before(block: _Block, how: _How, d: Array, convolved: Callable[[], Array]) -> Array:
    """The gradient of the convolution p from that of y."""
    if not how.silu and how.head is None:
        return d
    p = convolved()
    gate = _sigmoid(p) if how.silu else None
    if how.head is not None:
        s = p if gate is None else p * gate
        # Neither sum waits for the other.
        r, dot = _inverse_norm(s, how.eps), jnp.sum(d * s, axis=1)
        d = block.along(r) * (d - s * block.along(r * (r * dot)))
    return d if gate is None else d * gate * (1 + p * (1 - gate))


def _backward_block(block: _Block, how: _How, segmented: bool, x: Any, kernel: Any, *rest: Any) -> None:
    *runs, d_y, d_x, d_kernel = rest
    taps = block.taps(kernel)
    before = len(taps) - 1

    def step(number: Any, carry: tuple[list[Array], ...]) -> tuple[list[Array], ...]:
        start = block.first + number * TOGETHER
        rows, later, marks, sums = carry
        rows = [*rows, *(block.load(x, start + i) for i in range(TOGETHER))]
        grads = [block.load(d_y, start + i) for i in range(TOGETHER)]
        marks = [*marks, *(block.run(runs[0], start + i) for i in range(TOGETHER) if segmented)]
        later, sums = list(later), list(sums)
        for i in range(TOGETHER):
            near = range(i, i + before + 1)
            alike = _alike(marks, i + before, near)
            d = _before(block, how, grads[i], partial(_summed, taps, [rows[n] for n in near], alike))
            later.append(d)
            # What is behind the block is the next one's.
            mine = jnp.where(start + i < block.first + TOKENS, d, 0.0)
            for tap, n in enumerate(near):
                sums[tap] = sums[tap] + mine * _kept(rows[n], alike[tap])
            # All that the first of these tokens has reached is known.
            back = _summed(taps[::-1], later[i : i + before + 1], _alike(marks, i, near))
            block.store(d_x, start + i - before, back)
        return rows[TOGETHER:], later[TOGETHER:], marks[TOGETHER:], sums

    tokens = range(-before, 0)
    rows = [block.load(x, block.first + i) for i in tokens]
    marks = [block.run(runs[0], block.first + i) for i in tokens if segmented]
    zero = block.zeros()
    steps = pl.cdiv(TOKENS + before, TOGETHER)
    *_, sums = lax.fori_loop(0, steps, step, (rows, [zero] * before, marks, [zero] * len(taps)))
    for tap, made in enumerate(sums):
        d_kernel.at[block.batch, block.part, tap, block.channels][...] = made
