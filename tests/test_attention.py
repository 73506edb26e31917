"""Softmax attention: full and windowed, packed and padded, cached, on grouped heads."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tolerances import SAME, assert_close, relative_error

from qdelta_jax.layers.attention import Attention, AttentionConfig
from qdelta_jax.layers.softmax import resolve_attention

WIDTH = 16
CONFIGS = {
    "full": AttentionConfig(WIDTH, heads=2, head_dim=8),
    "grouped": AttentionConfig(WIDTH, heads=4, head_dim=4, kv_heads=2, qk_norm=True),
    "window": AttentionConfig(WIDTH, heads=2, head_dim=8, window=5),
    "window1": AttentionConfig(WIDTH, heads=2, head_dim=8, kv_heads=1, window=1),
}
every_config = pytest.mark.parametrize("name", ["grouped", "window"])


def build(name, **options):
    return Attention(CONFIGS[name], rngs=nnx.Rngs(0), **options)


def inputs(length, batch=2, seed=1):
    return jax.random.normal(jax.random.key(seed), (batch, length, WIDTH))


@nnx.jit
def run(module, x, segment_ids=None, cache=None):
    return module(x, segment_ids=segment_ids, cache=cache)


def reference(module, x):
    """One row, one segment, one query at a time, in float64."""
    c = module.config
    w = {name: np.asarray(getattr(module, name).kernel[...], np.float64) for name in ("q", "k", "v", "out")}
    x = np.asarray(x, np.float64)

    def heads(name):
        return (x @ w[name]).reshape(len(x), -1, c.head_dim)

    def norm(y):
        return y / np.sqrt((y * y).mean(-1, keepdims=True) + c.norm_eps) if c.qk_norm else y

    def rotate(y):
        half = c.head_dim // 2
        angle = np.arange(len(x))[:, None] * c.rope_theta ** (-np.arange(half) / half)
        turned = (y[..., :half] + 1j * y[..., half:]) * np.exp(1j * angle)[:, None]
        return np.concatenate([turned.real, turned.imag], -1)

    q, k, v = rotate(norm(heads("q"))), rotate(norm(heads("k"))), heads("v")
    out = np.zeros_like(q)
    for t in range(len(x)):
        first = 0 if c.window is None else max(0, t - c.window + 1)
        for h in range(c.heads):
            g = h // (c.heads // c.groups)
            scores = k[first : t + 1, g] @ q[t, h] / np.sqrt(c.head_dim)
            weights = np.exp(scores - scores.max())
            out[t, h] = weights @ v[first : t + 1, g] / weights.sum()
    return out.reshape(len(x), -1) @ w["out"]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("length", [1, 23])
def test_matches_one_query_at_a_time(name, length):
    module, x = build(name), inputs(length, batch=1)
    y, cache = run(module, x)
    assert cache is None
    assert_close(y[0], reference(module, x[0]), SAME)


@every_config
def test_packed_is_separate_and_padding_is_nothing(name):
    """Segments of 1 to 13 tokens with NaN in the padding between, before and inside them."""
    module = build(name)
    ids = np.array([[0, 0, 1, 1, 0, 1, 2, 0, 0] + [3] * 13 + [4] * 3, [5] * 24 + [0]])
    x = np.array(inputs(ids.shape[1]))
    x[ids == 0] = np.nan
    y, _ = run(module, jnp.array(x), jnp.array(ids))
    assert np.all(np.asarray(y)[ids == 0] == 0)
    for row, segment in [(0, 1), (0, 2), (0, 3), (0, 4), (1, 5)]:
        alone = ids[row] == segment
        assert_close(y[row, alone], reference(module, x[row, alone]), SAME, f"segment {segment}")


@every_config
def test_nan_in_padding_reaches_no_gradient(name):
    module = build(name)
    ids = jnp.array([[0, 1, 1, 0, 1, 1, 1, 1, 2, 2, 0], [0] * 11])

    def loss(module, x):
        return jnp.sum(jnp.sin(module(x, segment_ids=ids)[0]))

    clean = jnp.where(ids[:, :, None] == 0, 0, inputs(11))
    dirty = jnp.where(ids[:, :, None] == 0, jnp.nan, clean)
    gradient = nnx.jit(nnx.grad(loss, argnums=(0, 1)))
    want, got = gradient(module, clean), gradient(module, dirty)
    assert_close(jax.tree.leaves(got), jax.tree.leaves(want), 0.0)
    assert np.all(np.asarray(got[1])[np.asarray(ids) == 0] == 0)


@every_config
def test_causal(name):
    """By gradient, and bit for bit when the future changes."""
    module, x = build(name), inputs(12, batch=1)
    gradient = nnx.jit(nnx.grad(lambda x, module: module(x)[0][0, 6].sum()))(x, module)
    seen = np.any(np.asarray(gradient[0]) != 0, axis=-1)
    first = 0 if module.config.window is None else 7 - module.config.window
    assert seen.tolist() == [first <= t <= 6 for t in range(12)]
    changed = x.at[:, 7:].add(1)
    np.testing.assert_array_equal(run(module, x)[0][:, :7], run(module, changed)[0][:, :7])


@every_config
def test_cache_continues(name):
    """Any cut of a sequence, with left padding in one row and NaN in it, gives the whole."""
    module, x = build(name), inputs(23)
    whole, _ = run(module, x)
    cache = module.init_cache(2, 23)
    shapes = jax.tree.map(jnp.shape, cache)
    for start, stop in pairwise([0, 1, 2, 8, 20, 23]):
        padded = jnp.pad(x[:, start:stop], ((0, 0), (2, 0), (0, 0)), constant_values=jnp.nan)
        # The second row has its padding on the right.
        padded = padded.at[1].set(jnp.roll(padded[1], -2, axis=0))
        ids = jnp.ones(padded.shape[:2], int).at[0, :2].set(0).at[1, -2:].set(0)
        y, cache = run(module, padded, ids, cache)
        assert_close(y[0, 2:], whole[0, start:stop], SAME, f"row 0, {start}")
        assert_close(y[1, :-2], whole[1, start:stop], SAME, f"row 1, {start}")
        assert jax.tree.map(jnp.shape, cache) == shapes


@every_config
def test_decode_leaves_padded_rows_alone(name):
    module, x = build(name), inputs(9)
    _, cache = run(module, x[:, :8], cache=module.init_cache(2, 9))
    ids = jnp.array([[1], [0]])
    y, after = run(module, x[:, 8:], ids, cache)
    assert_close(y[0, 0], run(module, x)[0][0, 8], SAME)
    assert np.all(np.asarray(y[1]) == 0)
    assert_close(jax.tree.map(lambda a: a[1], after), jax.tree.map(lambda a: a[1], cache), 0.0)


@every_config
def test_a_new_segment_starts_the_cache_afresh(name):
    """The first segment continues the cache; the cache then holds the last one, also if that is short."""
    module, x = build(name), inputs(20)
    _, cache = run(module, x[:, :4], cache=module.init_cache(2, 30))
    ids = jnp.array([[9] * 3 + [8] * 9, [9] * 12])
    y, cache = run(module, x[:, 4:16], ids, cache)
    late, _ = run(module, x[:, 16:], cache=cache)
    first, _ = run(module, x)
    second, _ = run(module, x[:, 7:])
    assert_close(y[0, :3], first[0, 4:7], SAME)
    assert_close(y[0, 3:], second[0, :9], SAME)
    assert_close(late[0], second[0, 9:], SAME)
    assert_close(y[1], first[1, 4:16], SAME)
    assert_close(late[1], first[1, 16:], SAME)


def test_positions_shift_nothing_but_count_when_given():
    module, x = build("full"), inputs(6)
    positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
    y, _ = module(x)
    assert_close(module(x, positions=positions + 100)[0], y, SAME * 10)
    assert relative_error(module(x, positions=3 * positions)[0], y) > 1e-3


def test_window_memory_is_linear():
    """No array of the windowed program grows with T squared, forward or backward; full attention's does."""

    def largest(name, length):
        module = build(name)
        ids = jnp.ones((1, length), jnp.int32)

        def loss(x):
            return module(x, segment_ids=ids)[0].sum()

        compiled = jax.jit(jax.grad(loss)).lower(inputs(length, batch=1)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = largest("window", 512), largest("window", 2048)
    assert long < 4.5 * short
    assert largest("full", 2048) > 8 * largest("full", 512)
    assert long < 2048 * 2048


def test_bfloat16_stays_bfloat16():
    module = build("window", dtype=jnp.bfloat16)
    x = inputs(12)
    y, cache = run(module, x.astype(jnp.bfloat16), cache=module.init_cache(2, 12))
    assert y.dtype == jnp.bfloat16
    assert cache.keys.dtype == jnp.bfloat16
    assert relative_error(y.astype(jnp.float32), run(build("window"), x)[0]) < 2e-2


def test_an_explicit_implementation_does_not_fall_back():
    if jax.default_backend() == "gpu":
        pytest.skip("cudnn runs here")
    assert resolve_attention(None, jnp.dtype(jnp.bfloat16), 64, 100) == "xla"
    config = AttentionConfig(WIDTH, heads=2, head_dim=8, implementation="cudnn")
    with pytest.raises(NotImplementedError, match="'cudnn' cannot run attention here: the backend is 'cpu'"):
        Attention(config, rngs=nnx.Rngs(0))(inputs(4))


@pytest.mark.gpu
@every_config
@pytest.mark.parametrize("packed", [False, True])
def test_cudnn_matches_xla(name, packed):
    """On bfloat16 inputs, odd lengths, output and input gradient."""
    from dataclasses import replace

    config = replace(CONFIGS[name], width=64, head_dim=64, implementation="cudnn", window=CONFIGS[name].window and 33)
    ids = jnp.array([[1] * 40 + [2] * 50 + [0] * 9, [3] * 99]) if packed else None
    x = jax.random.normal(jax.random.key(3), (2, 99, 64), jnp.bfloat16)

    def value(config):
        module = Attention(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)

        def loss(x):
            y = module(x, segment_ids=ids)[0].astype(jnp.float32)
            return jnp.sum(jnp.sin(y)), y

        gradient, y = jax.jit(jax.grad(loss, has_aux=True))(x)
        return y, gradient.astype(jnp.float32)

    assert resolve_attention(None, x.dtype, 64, 99) == "cudnn"
    assert_close(value(config), value(replace(config, implementation="xla")), 2e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 0}, "heads: got 0"),
        ({"kv_heads": 3}, "kv_heads: got 3, want a divisor of the 2 heads"),
        ({"head_dim": 7}, "head_dim: got 7, want an even number"),
        ({"window": 0}, "window: got 0"),
        ({"implementation": "flash"}, "implementation: got 'flash'"),
    ],
)
def test_bad_config(change, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**{"width": 16, "heads": 2, "head_dim": 8, **change})
