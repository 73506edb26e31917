"""Segment ids alone: masks, runs, and ids from cumulative lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qdelta_jax import segment_ids_from_cu_seqlens, segment_masks, segment_runs
from qdelta_jax.segments import padding_last, reordered


def by_hand(row) -> tuple[list[bool], list[bool], list[int]]:
    valid, reset, runs, last, run = [], [], [], None, 0
    for x in row:
        new = x != 0 and last not in (None, x)
        run += new
        last = x if x != 0 else last
        valid.append(x != 0)
        reset.append(new)
        runs.append(run)
    return valid, reset, runs


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint8, np.uint32, np.int64])
def test_masks_and_runs(dtype, x64):
    rows = np.random.default_rng(0).choice([0, 1, 2, 100], size=(50, 12), p=[0.4, 0.3, 0.2, 0.1]).astype(dtype)
    rows[0], rows[1] = 0, 5
    valid, reset = segment_masks(jnp.asarray(rows))
    runs = segment_runs(jnp.asarray(rows))
    assert valid.dtype == reset.dtype == bool
    for b, row in enumerate(rows):
        want = by_hand(row)
        assert (valid[b].tolist(), reset[b].tolist(), runs[b].tolist()) == want


def test_padding_goes_last_and_back():
    """Tokens and padding keep their order; derivatives go the same way, and gradients the way back."""
    valid = jnp.asarray(np.random.default_rng(0).integers(0, 2, (20, 9)).astype(bool))
    valid = jnp.concatenate([valid, jnp.ones((1, 9), bool)])
    order, back = padding_last(valid)
    np.testing.assert_array_equal(order, np.argsort(~np.asarray(valid), axis=1, stable=True))
    np.testing.assert_array_equal(back, np.argsort(order, axis=1))
    x = jax.random.normal(jax.random.key(0), (21, 9, 2))
    np.testing.assert_array_equal(reordered(reordered(x, order), back), x)
    f = lambda x: reordered(x, order)  # noqa: E731
    y, pull_back = jax.vjp(f, x)
    np.testing.assert_array_equal(y, np.take_along_axis(np.asarray(x), np.asarray(order)[:, :, None], axis=1))
    np.testing.assert_array_equal(pull_back(y)[0], x)
    np.testing.assert_array_equal(jax.jvp(f, (x,), (x,))[1], y)


def test_negative_ids_are_segments():
    valid, reset = segment_masks(jnp.array([[-1, -1, 0, -1, 1]]))
    assert valid.tolist() == [[True, True, False, True, True]]
    assert reset.tolist() == [[False, False, False, False, True]]


def test_one_token():
    for value, valid in ((0, False), (3, True)):
        got = segment_masks(jnp.array([[value]]))
        assert [x.tolist() for x in got] == [[[valid]], [[False]]]


@pytest.mark.parametrize("jit", [False, True])
def test_cu_seqlens(jit):
    f = lambda c: segment_ids_from_cu_seqlens(c, 8)  # noqa: E731
    f = jax.jit(f) if jit else f
    assert f(jnp.array([0, 3, 3, 3, 4, 8])).tolist() == [[1, 1, 1, 4, 5, 5, 5, 5]]
    assert f(jnp.array([0, 1])).tolist() == [[1, 0, 0, 0, 0, 0, 0, 0]]
    assert f(jnp.array([2, 4, 6])).tolist() == [[0, 0, 1, 1, 2, 2, 0, 0]]
    assert f(jnp.array([0, 0, 0])).tolist() == [[0] * 8]
    assert f(np.array([0, 8], np.int32)).dtype == jnp.int32


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_ids_that_jax_would_cut_are_refused(dtype):
    ids = np.array([[0, 1, 2]], dtype) << dtype(32)
    with pytest.raises(ValueError, match=r"segment_ids: got u?int64 values 0 .. 8589934592, want them within"):
        segment_masks(ids)
    assert segment_masks(np.array([[0, 5]], dtype))[0].tolist() == [[False, True]]


@pytest.mark.parametrize("ids", [jnp.ones((3,), jnp.int32), jnp.ones((2, 3)), [[1, 2]]])
def test_masks_refuse(ids):
    with pytest.raises(ValueError, match=r"segment_ids: got .*want"):
        segment_masks(ids)
