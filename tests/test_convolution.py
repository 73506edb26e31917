"""The short convolution against a loop over tokens: packing, padding, caches, gradients."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads
from tolerances import FLOAT64, SAME, assert_close

from qdelta_jax.layers.convolution import ShortConvolution, short_convolution


def loop(x, kernel, cache, ids):
    """The definition, token by token in numpy: y and the new cache."""
    y, after = np.zeros_like(x), np.zeros_like(cache)
    width = kernel.shape[0]
    for b in range(x.shape[0]):
        history, last = list(cache[b]), None
        for t in range(x.shape[1]):
            if ids[b, t] == 0:
                continue
            if last is not None and ids[b, t] != last:
                history = [np.zeros(x.shape[2])] * (width - 1)
            last = ids[b, t]
            history.append(x[b, t])
            y[b, t] = sum(kernel[width - 1 - j] * history[-1 - j] for j in range(width))
            history = history[1:]
        after[b] = np.array(history).reshape(after[b].shape)
    return y, after


convolve = jax.jit(short_convolution)


def draw(rng, batch, length, width, channels=3):
    x = rng.normal(size=(batch, length, channels))
    return x, rng.normal(size=(width, channels)), rng.normal(size=(batch, width - 1, channels))


@pytest.mark.parametrize(("width", "length"), [(4, 1), (4, 2), (4, 9), (1, 5), (2, 7)])
def test_is_the_loop(x64, width, length):
    """Random ids 0, 1, 2: left, right and inner padding, segments of a few tokens, NaN in all padding."""
    rng = np.random.default_rng(length)
    x, kernel, cache = draw(rng, 40, length, width)
    ids = rng.integers(0, 3, size=(40, length))
    want = loop(x, kernel, cache, ids)
    x = np.where(ids[:, :, None] == 0, np.nan, x)
    got = convolve(jnp.asarray(x), jnp.asarray(kernel), cache=jnp.asarray(cache), segment_ids=jnp.asarray(ids))
    assert_close(got, want, FLOAT64)


def test_without_segments_is_the_loop_and_numpys_convolution(x64):
    x, kernel, cache = draw(np.random.default_rng(0), 2, 9, 4)
    got = convolve(jnp.asarray(x), jnp.asarray(kernel), cache=jnp.asarray(cache))
    assert_close(got, loop(x, kernel, cache, np.ones((2, 9), int)), FLOAT64)
    y, after = convolve(jnp.asarray(x), jnp.asarray(kernel))
    assert_close(y[0, :, 1], np.convolve(x[0, :, 1], kernel[::-1, 1])[:9], FLOAT64)
    assert_close(after, x[:, -3:], 0.0)


@pytest.mark.parametrize("split", [2, 6])
def test_split_with_its_cache_is_the_whole(x64, split):
    """Cut anywhere, through segments and padding."""
    rng = np.random.default_rng(split)
    x, kernel, cache = map(jnp.asarray, draw(rng, 4, 8, 4))
    ids = jnp.asarray([[1] * 8, [0, 0, 0, 0, 0, 0, 1, 1], [1, 1, 0, 1, 0, 0, 0, 1], [1, 0, 0, 0, 0, 0, 0, 0]])
    whole, end = convolve(x, kernel, cache=cache, segment_ids=ids)
    first, middle = convolve(x[:, :split], kernel, cache=cache, segment_ids=ids[:, :split])
    second, after = convolve(x[:, split:], kernel, cache=middle, segment_ids=ids[:, split:])
    assert_close((jnp.concatenate([first, second], 1), after), (whole, end), FLOAT64)


def test_gradients(x64):
    """First and second derivatives against differences, and none at padding."""
    x, kernel, cache = map(jnp.asarray, draw(np.random.default_rng(5), 2, 6, 3))
    ids = jnp.asarray([[0, 1, 1, 0, 1, 2], [3, 4, 4, 4, 0, 0]])

    def run(*arrays):
        x, kernel, cache = map(jnp.asarray, arrays)
        return convolve(x, kernel, cache=cache, segment_ids=ids)

    check_grads(run, (x, kernel, cache), order=2, modes=["fwd", "rev"], rtol=1e-6)
    poisoned = jnp.where((ids == 0)[:, :, None], jnp.nan, x)
    gradients = jax.grad(lambda *a: sum(jnp.sum(y**2) for y in run(*a)), argnums=(0, 1, 2))(poisoned, kernel, cache)
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in gradients)
    assert float(jnp.max(jnp.abs(jnp.where((ids == 0)[:, :, None], gradients[0], 0)))) == 0.0


def test_zeros_last_moves_nothing_and_changes_nothing(x64):
    """Where padding is last, and 0, and its gradient, too: values, gradients and the cache after it."""
    x, kernel, _ = map(jnp.asarray, draw(np.random.default_rng(6), 3, 9, 4))
    ids = jnp.asarray([[1] * 9, [2, 2, 2, 1, 1, 0, 0, 0, 0], [0] * 9])
    valid = (ids != 0)[:, :, None]
    x = jnp.where(valid, x, 0)

    def numbers(zeros_last):
        f = lambda x, kernel: short_convolution(x, kernel, segment_ids=ids, zeros_last=zeros_last)  # noqa: E731
        (y, after), pull_back = jax.vjp(f, x, kernel)
        made = str(jax.make_jaxpr(f)(x, kernel))
        return (y, after, *pull_back((jnp.where(valid, jnp.cos(y), 0), jnp.zeros_like(after)))), made

    (want, moved), (got, not_moved) = numbers(False), numbers(True)
    assert_close(got, want, FLOAT64)
    assert "unique_indices=True" in moved
    assert "unique_indices=True" not in not_moved


def test_module():
    """SiLU and bias, zero at padding, half precision in and out, caches of their own dtype."""
    layer = ShortConvolution(3, 4, use_bias=True, rngs=nnx.Rngs(0))
    assert float(jnp.max(jnp.abs(layer.kernel.get_value()))) <= 0.5
    layer.bias.set_value(jnp.asarray([1.0, 2.0, 3.0]))
    x = jax.random.normal(jax.random.key(0), (2, 5, 3))
    ids = jnp.asarray([[1, 1, 1, 0, 0], [0, 0, 2, 2, 1]])
    y, none = layer(x, segment_ids=ids)
    assert none is None
    raw, _ = convolve(x, layer.kernel.get_value(), segment_ids=ids)
    want = jnp.where((ids != 0)[:, :, None], jax.nn.silu(raw + jnp.asarray([[[1.0, 2.0, 3.0]]])), 0)
    assert_close(y, want, SAME)

    cache = layer.init_cache(2)
    assert cache.shape == (2, 3, 3)
    half, after = layer(x.astype(jnp.bfloat16), segment_ids=ids, cache=cache)
    assert (half.dtype, after.dtype) == (jnp.bfloat16, cache.dtype)
    assert_close(half, y, 1e-2)


REFUSED = [
    ({"norm_eps": 0.0}, "norm_eps: got 0.0, want a number above 0"),
    ({"norm_eps": 1e-40}, "norm_eps: got 1e-40, want a number above 0, 1e-24"),
    ({"norm_eps": 10**400}, "norm_eps: got 1000.*, want a number above 0"),
    ({"norm_eps": True}, "norm_eps: got True"),
    ({"use_bias": "no"}, "use_bias: got 'no', want True or False"),
    ({"dtype": jnp.int32}, "dtype: got .*int32.*, want a floating dtype, or None"),
    ({"dtype": "junk"}, "dtype: got 'junk', want a floating dtype, or None"),
    ({"param_dtype": None}, "param_dtype: got None, want a floating dtype"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_bad_options(options, message):
    """Without the annotation checks of this suite, which would raise first."""
    unchecked = nnx.eval_shape(lambda: ShortConvolution(3, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(ShortConvolution.__init__)(unchecked, 3, **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("channels", "options", "message"),
    [
        (128, {"width": 6}, "the kernel has 6 taps, want 1 to 5"),
        (96, {}, "x has 96 channels, want a multiple of 128"),
        (128, {"use_bias": True}, "there is a bias"),
        (128, {"dtype": jnp.float64}, "the result has dtype float64, want bfloat16, float16 or float32"),
    ],
)
def test_a_kernel_that_can_never_run_is_refused_at_once(channels, options, message):
    with pytest.raises(NotImplementedError, match=f"implementation='mosaic' of a short .* cannot run: {message}"):
        nnx.eval_shape(lambda: ShortConvolution(channels, **options, implementation="mosaic", rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ([0.0], r"cache: got list, want an array \[B,W-1,C\] = \(1, 3, 3\)"),
        (np.zeros((1, 3, 3), int), "cache: got dtype int64, want a floating dtype"),
        (np.zeros((1, 3, 3), bool), "cache: got dtype bool, want a floating dtype"),
        (np.zeros((1, 3, 3), complex), "cache: got dtype complex128, want a floating dtype"),
    ],
)
def test_bad_caches(cache, message):
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(short_convolution)(np.ones((1, 5, 3)), np.ones((4, 3)), cache=cache)


@pytest.mark.parametrize("norm_size", [None, 2])
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4)])
def test_nothing_in_is_nothing_out(shape, norm_size):
    """With and without segments; a cache stays what it is."""
    layer = ShortConvolution(4, norm_size=norm_size, rngs=nnx.Rngs(0))
    x, ids, cache = jnp.ones(shape), jnp.ones(shape[:2], jnp.int32), jnp.ones((shape[0], 3, 4))
    for options in ({}, {"segment_ids": ids}, {"segment_ids": ids, "zeros_last": True}):
        assert jax.eval_shape(lambda x, o=options: layer(x, **o)[0], x).shape == shape
    if not shape[1]:
        for options in ({}, {"segment_ids": ids}):
            assert_close(layer(x, cache=cache, **options)[1], cache, 0.0)


def test_refusals():
    for given, message in (((3, 0), "width: got 0"), ((0, 2), "channels: got 0, want")):
        with pytest.raises(ValueError, match=message):
            ShortConvolution(*given, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"x: got shape \(1, 5, 3\) and dtype int32, want floating"):
        inspect.unwrap(ShortConvolution.__call__)(ShortConvolution(3, rngs=nnx.Rngs(0)), jnp.ones((1, 5, 3), jnp.int32))
    with pytest.raises(ValueError, match=r"cache: got shape \(1, 2, 3\), want \[B,W-1,C\] = \(1, 3, 3\)"):
        short_convolution(jnp.ones((1, 5, 3)), jnp.ones((4, 3)), cache=jnp.ones((1, 2, 3)))
