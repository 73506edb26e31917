"""The kernels of the short convolution against the definition in float64, and in a layer."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kernels import INTERPRET, ON_GPU, any_machine, run_kernels
from tolerances import FLOAT32, FLOAT64, KERNEL, assert_close, relative_error

import pallas_kernels
from qdelta_jax import l2_normalize
from qdelta_jax.layers.convolution import ShortConvolution, short_convolution
from qdelta_jax.layers.mixer import Mixer, MixerConfig

SHAPES = [(2, 130, 128, 4), (1, 67, 256, 2), (1, 5, 128, 5), (1, 70, 512, 1)]
"""B, T, C, W: blocks that are not full, 1, 2 and 4 channels for each thread."""
if ON_GPU:
    SHAPES += [(3, 2000, 1536, 4), (1, 4096, 2048, 3)]

NORMED = [((2, 130, 512, 4), 128), ((1, 67, 256, 2), 64), ((1, 5, 512, 5), 32), ((1, 70, 256, 1), 16)]
"""The same with heads that are normed: one or several of a warp, 2 and 4 channels for each thread."""
if ON_GPU:
    NORMED += [((3, 2000, 1536, 4), 128), ((1, 4096, 2048, 3), 64)]

CASES = [(shape, None) for shape in SHAPES] + NORMED


def draw(shape, dtype=jnp.float32):
    batch, length, channels, width = shape
    rng = np.random.default_rng(length)
    x, d_y = (jnp.asarray(rng.normal(size=(batch, length, channels)), dtype) for _ in range(2))
    return x, jnp.asarray(rng.normal(size=(width, channels)), jnp.float32), d_y, rng


def reference(x, kernel, ids, d_y, layer):
    """The value and both gradients in float64, of the definition that test_convolution.py tests."""

    def f(x, kernel):
        y = short_convolution(x, kernel, segment_ids=ids)[0]
        y = jax.nn.silu(y) if layer.activation else y
        if layer.norm_size is None:
            return y
        return l2_normalize(y.reshape(*y.shape[:2], -1, layer.norm_size), layer.norm_eps).reshape(y.shape)

    with jax.enable_x64(True):
        x, kernel, d_y = (jnp.asarray(np.asarray(a.astype(jnp.float32)), jnp.float64) for a in (x, kernel, d_y))
        y, pull_back = jax.vjp(jax.jit(f), x, kernel)
        return y, *pull_back(d_y)


def errors(layer, x, ids, d_y):
    kernel = layer.kernel.get_value()
    graph, state = nnx.split(layer)

    @jax.jit
    def run(x, kernel, d_y):
        def f(x, kernel):
            made = nnx.merge(graph, jax.tree.map(lambda _: kernel, state))  # its only parameter
            return made(x, segment_ids=ids)[0]

        y, pull_back = jax.vjp(f, x, kernel)
        return y, *pull_back(d_y)

    with run_kernels():
        got = run(x, kernel, d_y)
    want = reference(x, kernel, ids, d_y, layer)
    return [relative_error(a.astype(jnp.float32), b) for a, b in zip(got, want, strict=True)], got


def layer_of(kernel, activation="silu", **options):
    layer = ShortConvolution(
        kernel.shape[1], kernel.shape[0], activation=activation, implementation="mosaic", rngs=nnx.Rngs(0), **options
    )
    layer.kernel.set_value(kernel)
    return layer


@pytest.mark.parametrize(("shape", "head"), CASES)
def test_value_and_gradients(shape, head):
    """With the activation where there is more than one tap."""
    x, kernel, d_y, _ = draw(shape)
    found, _ = errors(layer_of(kernel, "silu" if shape[3] > 1 else None, norm_size=head), x, None, d_y)
    assert max(found) <= FLOAT32, found


@pytest.mark.parametrize(("shape", "head"), [CASES[0], NORMED[1]])
def test_without_activation(shape, head):
    """Of several taps; with another eps, which small inputs feel."""
    x, kernel, d_y, _ = draw(shape)
    found, _ = errors(layer_of(kernel, None, norm_size=head, norm_eps=1e-3), 1e-2 * x, None, d_y)
    assert max(found) <= FLOAT32, found


@pytest.mark.parametrize(("shape", "head"), [x for x in CASES if x[0][1] not in (130, 70)])
def test_segments_and_padding(shape, head):
    """Short segments, padding anywhere with NaN in it."""
    x, kernel, d_y, rng = draw(shape)
    ids = jnp.asarray(np.repeat(rng.integers(0, 3, (shape[0], shape[1] // 3 + 1)), 3, axis=1)[:, : shape[1]])
    x = jnp.where(ids[:, :, None] == 0, jnp.nan, x)
    found, (y, d_x, _) = errors(layer_of(kernel, norm_size=head), x, ids, d_y)
    assert max(found) <= FLOAT32, found
    assert np.all(np.asarray(y)[np.asarray(ids) == 0] == 0)
    assert np.all(np.asarray(d_x)[np.asarray(ids) == 0] == 0)


@pytest.mark.parametrize("head", [64] + [None] * ON_GPU)
def test_zeros_last(head):
    """Padding behind the tokens, zeros in it and in its gradient: nothing is moved or cleared, and nothing changes."""
    x, kernel, d_y, _ = draw(SHAPES[1])
    ids = jnp.asarray(np.repeat([[3, 1, 4, 0]], [20, 1, 30, 16], axis=1))
    x, d_y = (jnp.where((ids == 0)[:, :, None], 0, a) for a in (x, d_y))
    layer = layer_of(kernel, norm_size=head)
    with run_kernels():
        want, got = (jax.vjp(lambda x, z=z: layer(x, segment_ids=ids, zeros_last=z)[0], x) for z in (False, True))
        assert_close((got[0], got[1](d_y)), (want[0], want[1](d_y)), FLOAT64)


@pytest.mark.parametrize(
    ("shape", "head", "dtype"),
    [(*CASES[0], jnp.bfloat16), (*CASES[0], jnp.float16), *((*x, jnp.bfloat16) for x in NORMED[: 4 if ON_GPU else 1])],
)
def test_16_bit_inputs(shape, head, dtype):
    """Sums are in float32, the kernel's gradient among them."""
    x, kernel, d_y, _ = draw(shape, dtype)
    found, (y, d_x, _) = errors(layer_of(kernel, norm_size=head), x, None, d_y)
    assert y.dtype == d_x.dtype == dtype
    assert max(found[:2]) <= KERNEL[jnp.dtype(dtype).name], found
    assert found[2] <= FLOAT32, found


@pytest.mark.parametrize(("channels", "head"), [(128, None), (256, 64)])
def test_extreme_inputs(channels, head):
    """silu of +-1e4 and its derivative, where exponentials over- and underflow; a whole head of zeros."""
    x, kernel, d_y, _ = draw((1, 64, channels, 1))
    x = (jnp.sign(x) * 1e4).at[:, ::3, : channels // 4].set(0)
    found, got = errors(layer_of(jnp.ones_like(kernel), norm_size=head), x, None, d_y)
    assert all(bool(jnp.all(jnp.isfinite(a))) for a in got)
    assert max(found) <= FLOAT32, found


LOWERED = [(jnp.bfloat16, 2048, head) for head in (None, 128, 64, 32, 16)]
LOWERED += [(jnp.float16, 256, 64), (jnp.bfloat16, 256, 16), (jnp.float32, 2048, 128), (jnp.float32, 256, 32)]


@pytest.mark.parametrize(("dtype", "channels", "head"), LOWERED)
@pytest.mark.parametrize("segmented", [False, True])
def test_lowers_for_cuda_and_under_vmap(segmented, dtype, channels, head):
    x = jax.ShapeDtypeStruct((2, 8, 4096, channels), dtype)
    kernel = jax.ShapeDtypeStruct((4, channels), jnp.float32)
    runs = jax.ShapeDtypeStruct((8, 4096), jnp.int32)

    def gradient(x, kernel, runs):
        f = lambda *a: pallas_kernels.convolution(*a, runs if segmented else None, head=head)  # noqa: E731
        return jax.vjp(f, x, kernel)[1](x)

    with any_machine():
        made = jax.jit(jax.vmap(gradient, in_axes=(0, None, None))).trace(x, kernel, runs)
    assert made.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu") >= 1


def test_vmap_is_a_loop():
    x, kernel, _, _ = draw((2, 20, 128, 3))
    f = lambda x: pallas_kernels.convolution(x[None], kernel, None, interpret=INTERPRET)[0]  # noqa: E731
    assert_close(jax.vmap(f)(x), jnp.stack([f(x[0]), f(x[1])]), 0.0 if not ON_GPU else FLOAT64)


def test_a_mixer_with_it_is_the_mixer():
    def build(conv_implementation):
        options = {"rule": "linear_attention", "heads": 2, "key_dim": 64, "value_dim": 64, "implementation": "xla"}
        config = MixerConfig(width=16, conv_implementation=conv_implementation, **options)
        return Mixer(config, rngs=nnx.Rngs(0))

    x = jax.random.normal(jax.random.key(0), (1, 20, 16))
    want = build("xla")(x)[0]
    with run_kernels():
        for implementation in ("mosaic", None):
            assert_close(nnx.jit(build(implementation))(x)[0], want, FLOAT32)


@pytest.mark.parametrize(("heads", "key_dim"), [(4, 64)] + [(1, 128)] * ON_GPU)
def test_a_mixer_with_normed_heads_is_the_mixer(heads, key_dim):
    """Values and gradients, also where the heads do not fit the kernel: then XLA norms what it makes."""
    built = {}
    for implementation in ("xla", "mosaic"):
        options = {"rule": "delta_net", "heads": heads, "key_dim": key_dim, "value_dim": 256 // heads}
        options |= {"conv_implementation": implementation, "implementation": "xla", "normalize_eps": 1e-3}
        built[implementation] = Mixer(MixerConfig(width=16, **options), rngs=nnx.Rngs(0))
    x, d_y = (jax.random.normal(jax.random.key(i), (1, 20, 16)) for i in (0, 1))
    ids = jnp.asarray(np.repeat([[0, 3, 5]], [3, 11, 6], axis=1))

    @nnx.jit
    def run(mixer, x):
        loss = lambda mixer, x: jnp.sum(d_y * mixer(x, segment_ids=ids)[0])  # noqa: E731
        inputs = mixer.project(x, segment_ids=ids)
        return inputs.q, inputs.k, nnx.grad(loss, argnums=(0, 1))(mixer, x)

    want = run(built["xla"], x)
    assert_close(jnp.sum(want[0] ** 2, -1).max(), 1.0, 1e-2)
    with run_kernels():
        assert_close(run(built["mosaic"], x), want, FLOAT32)


@pytest.mark.parametrize(
    ("implementation", "channels", "marks"), [("mosaic", 256, 1), ("mosaic", 128, 3), ("xla", 256, 2)]
)
def test_what_is_marked_as_an_activation(implementation, channels, marks):
    """Heads of 64: y alone where one kernel makes it; s, r and y where XLA norms what it makes; XLA alone: r, y."""
    layer = ShortConvolution(channels, implementation=implementation, norm_size=64, rngs=nnx.Rngs(0))
    with run_kernels():
        assert str(jax.make_jaxpr(lambda x: layer(x)[0])(jnp.ones((1, 5, channels)))).count("name=activation") == marks


BAD = [
    ((1, 6, 128), (4, 256), None, None, r"kernel: got \(4, 256\), want \[W, C\] with C = 128"),
    ((1, 6, 256), (4, 128), None, None, r"kernel: got \(4, 128\)"),
    ((1, 6, 128), (128,), None, None, r"kernel: got \(128,\)"),
    ((6, 128), (4, 128), None, None, r"x: got \(6, 128\), want \[B, T, C\]"),
    ((1, 0, 128), (4, 128), None, None, r"x: got \(1, 0, 128\).*no axis empty"),
    ((2, 6, 128), (4, 128), (1, 6), None, r"runs: got \(1, 6\) int32, want None or .* integers \[B, T\] = \(2, 6\)"),
    ((2, 6, 128), (4, 128), None, jnp.int8, "dtype: got .*int8.*, want None or a floating dtype"),
    ((2, 6, 128), (4, 128), None, "junk", "dtype: got 'junk', want None or a floating dtype"),
]


@pytest.mark.parametrize(("x", "kernel", "runs", "dtype", "message"), BAD)
def test_bad_arguments(x, kernel, runs, dtype, message):
    runs = None if runs is None else jnp.zeros(runs, jnp.int32)
    with pytest.raises(ValueError, match=message):
        pallas_kernels.convolution(jnp.ones(x), jnp.ones(kernel), runs, True, dtype, INTERPRET)


X, TAPS = np.ones((1, 6, 256), np.float32), np.ones((4, 256), np.float32)


@pytest.mark.parametrize("eps", [-1.0, 0, 1e-40, np.float16(0), float("nan"), float("inf"), 10**400, True, "1", 1j])
def test_bad_eps(eps):
    with pytest.raises(ValueError, match=re.escape(f"eps: got {eps!r}, want a number above 0, 1e-24")):
        pallas_kernels.convolution(X, TAPS, head=64, eps=eps)


@pytest.mark.parametrize("head", [0, 48, 64.0, True, "64", np.float32(64), np.array([64])])
def test_bad_heads(head):
    """The call and the question whether it can be made say the same."""
    for ask in (pallas_kernels.convolution, pallas_kernels.convolution_unsupported):
        with pytest.raises(ValueError, match=re.escape(f"head: got {head!r}, want None or an integer that divides")):
            ask(X, TAPS, head=head)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"silu": "no"}, "silu: got 'no', want True or False"),
        ({"runs": [[1] * 6]}, r"runs: got list, want None or an array of integers \[B, T\] = \(1, 6\)"),
        ({"runs": np.ones((1, 6), bool)}, r"runs: got \(1, 6\) bool, want None or an array of integers"),
        ({"dtype": "float64"}, "the result has dtype float64, want bfloat16, float16 or float32"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        pallas_kernels.convolution(X, TAPS, **options)


def test_a_dtype_that_the_kernel_cannot_write_is_left_to_xla():
    layer = ShortConvolution(128, dtype=jnp.float64, rngs=nnx.Rngs(0))
    with run_kernels(), jax.enable_x64(True):
        assert jax.eval_shape(lambda x: layer(x)[0], X[:, :, :128]).dtype == jnp.float64


@pytest.mark.skipif(ON_GPU, reason="of a machine without a GPU")
def test_no_gpu():
    with pytest.raises(NotImplementedError, match="convolution with interpret=None: the kernels are for Hopper GPUs"):
        pallas_kernels.convolution(X, TAPS)


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_bad_inputs_of_the_layer(implementation):
    layer = ShortConvolution(128, implementation=implementation, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"x: got shape \(2, 9, 256\) and dtype float32, want floating \[B,T,C\] with C = 128"
    ):
        layer(jnp.ones((2, 9, 256)))


REFUSED = r"do not go through pallas_kernels.convolution.*\(reverse mode, once\) only: use implementation='xla'"


def test_forward_mode_is_refused_by_name():
    x, kernel, _, _ = draw((1, 9, 128, 4))
    layer = layer_of(kernel)
    with run_kernels(), pytest.raises(NotImplementedError, match=REFUSED):
        jax.jvp(lambda x: layer(x)[0], (x,), (x,))


TWICE = lambda f, x: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))(x)  # noqa: E731


@pytest.mark.parametrize("which", [TWICE, jax.jit(TWICE, static_argnums=0), lambda f, x: jax.hessian(f)(x)])
@pytest.mark.parametrize("of_kernel", [False, True])
def test_second_derivatives_are_refused_by_name(which, of_kernel):
    x, kernel, _, _ = draw((1, 9, 128, 4))

    def f(changed):
        inputs = (x, changed) if of_kernel else (changed, kernel)
        return jnp.sum(pallas_kernels.convolution(*inputs, None, interpret=INTERPRET))

    with pytest.raises(NotImplementedError, match=REFUSED):
        jax.eval_shape(lambda x: which(f, x), kernel if of_kernel else x)


def test_what_it_cannot_do():
    x, kernel, _, _ = draw((1, 9, 128, 4))
    layer = layer_of(kernel)
    with any_machine(), jax.enable_x64(True), pytest.raises(NotImplementedError, match="x has dtype float64, want"):
        layer(x.astype(jnp.float64))
    with pytest.raises(ValueError, match=r"x: got \(1, 0, 128\).*no axis empty"):
        layer(x[:, :0])
    assert layer(x[:, :1], cache=layer.init_cache(1))[0].shape == (1, 1, 128)
    for channels, head, reason in (
        (768, 48, "the norm is over heads of 48 channels, want 16, 32, 64 or 128"),
        (512, 256, "heads of 256 channels"),
        (768, 128, "x has 768 channels in heads of 128 with a norm, want a multiple of 512"),
        (128, 32, "x has 128 channels in heads of 32 with a norm, want a multiple of 256"),
    ):
        x, kernel, _, _ = draw((1, 9, channels, 4))
        assert reason in pallas_kernels.convolution_unsupported(x, kernel, head=head)
        with pytest.raises(NotImplementedError, match=reason):
            pallas_kernels.convolution(x, kernel, head=head)
    if not ON_GPU:
        with pytest.raises(NotImplementedError, match="cannot run: the kernels are for Hopper GPUs"):
            layer(draw((1, 9, 128, 4))[0])
    with pytest.raises(ValueError, match="implementation: got 'cuda', want None, 'xla' or 'mosaic'"):
        ShortConvolution(128, implementation="cuda", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"norm_eps: got -1.0, want a number above 0"):
        ShortConvolution(128, norm_size=64, norm_eps=-1.0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="norm_size: got 48, want a number that divides channels = 128"):
        ShortConvolution(128, norm_size=48, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="conv_implementation: got 'cuda'"):
        MixerConfig(width=8, heads=1, key_dim=8, value_dim=8, conv_implementation="cuda")
