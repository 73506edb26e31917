"""The chunked form: nothing depends on how a sequence is cut into chunks and groups, or how states are carried."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SMALL, every_core_rule, make_cotangents, make_inputs
from reference import cast_inputs, gradients
from tolerances import FLOAT32, FLOAT64, assert_close

from qdelta_jax import RULES, delta_rule, segment_masks
from qdelta_jax.chunked import ChunkOptions, chunked

SHAPE = SMALL._replace(batch=2, length=130)


@cache
def wanted(name):
    return gradients(name, make_inputs(name, SHAPE), make_cotangents(SHAPE), implementation="scan")


@pytest.mark.parametrize("chunk_size", [1, 48])
@every_core_rule
def test_chunk_size_does_not_matter(name, chunk_size, x64):
    """48 may be rounded to what suits the solver. (Every rule at 16 and 64: test_golden.)"""
    inputs = make_inputs(name, SHAPE)
    got = gradients(name, inputs, make_cotangents(SHAPE), implementation="xla", chunk_size=chunk_size)
    assert_close(got, wanted(name), FLOAT64)


CUTS = {
    # chunks of 8 tokens, 17 in all; a group counts tokens times batch times heads
    "one group, one after the other": {"group_tokens": 10**6, "parallel_states": False},
    "one group, as a tree": {"group_tokens": 10**6, "parallel_states": True},
    "a chunk a group": {"group_tokens": 1, "parallel_states": False},
    "five chunks a group, as trees": {"group_tokens": 5 * 8 * 4, "parallel_states": True},
    "two groups, as trees, kept": {"group_tokens": 9 * 8 * 4, "parallel_states": True, "residuals": "keep"},
    "four chunks a group": {"group_tokens": 4 * 8 * 4, "parallel_states": False, "residuals": "keep"},
}


@partial(jax.jit, static_argnums=(0, 1))
def run(name, options, inputs, cotangents, ids):
    masks = (None, None) if ids is None else segment_masks(ids)

    def f(x):
        return chunked(RULES[name], options, *(x[n] for n in "qkv"), x["gates"], x["initial_state"], *masks)

    (out, state), pull_back = jax.vjp(f, inputs)
    return {"output": out, "final_state": state, **pull_back(cotangents)[0]}


def options_of(cut: str) -> ChunkOptions:
    return ChunkOptions(scale=8**-0.5, chunk_size=8, precision=jax.lax.Precision.HIGHEST, **CUTS[cut])


@pytest.mark.parametrize(
    ("name", "cut"), [*(("q_delta", cut) for cut in CUTS), *(("gla", cut) for cut in CUTS if "as trees" in cut)]
)
def test_groups_do_not_matter(name, cut, x64):
    inputs = cast_inputs(make_inputs(name, SHAPE), jnp.float64)
    cotangents = tuple(map(jnp.asarray, make_cotangents(SHAPE)))
    got = run(name, options_of(cut), inputs, cotangents, None)
    want = wanted(name)
    for n, x in {**got, **got["gates"]}.items():
        if n != "gates":
            assert_close(x, want[n if n in want else f"grad_{n}"], FLOAT64, f"{cut}: {n}")


@pytest.mark.parametrize(
    ("cut", "dtype", "tolerance"),
    [
        ("one group, as a tree", jnp.float64, FLOAT64),
        ("a chunk a group", jnp.float64, FLOAT64),
        ("two groups, as trees, kept", jnp.float32, FLOAT32),
    ],
)
def test_groups_do_not_matter_to_segments(cut, dtype, tolerance, x64):
    """Resets and whole chunks of padding at the seams, full resets by decay."""
    name = "q_delta2"
    inputs, cotangents = make_inputs(name, SHAPE), make_cotangents(SHAPE)
    inputs["gates"]["log_decay"][:, 50:53] = -np.inf
    inputs["gates"]["log_decay"][:, 71:90, :, :3] = -400
    ids = np.random.default_rng(2).choice([1, 1, 1, 1, 0, 2], size=SHAPE[:2]).astype(np.int32)
    ids[0, 30:66] = 0
    ids[1, 64:] = 7
    want = gradients(name, inputs, cotangents, ids, implementation="scan")
    given = cast_inputs(inputs, dtype)
    got = run(name, options_of(cut), given, tuple(jnp.asarray(x, dtype) for x in cotangents), ids)
    for n, x in {**got, **got["gates"]}.items():
        if n != "gates":
            assert_close(x, want[n if n in want else f"grad_{n}"], tolerance, f"{cut}: {n}")


@every_core_rule
def test_kept_residuals_are_more_than_recomputed_ones(name):
    """What the two save between forward and backward, in numbers."""
    inputs = cast_inputs(make_inputs(name, SHAPE), jnp.float32)

    def saved(residuals):
        f = lambda x: delta_rule(  # noqa: E731
            *(x[n] for n in "qkv"), name, x["gates"], implementation="xla", chunk_size=16, residuals=residuals
        )
        pull_back = jax.eval_shape(lambda x: jax.vjp(f, x)[1], inputs)
        return sum(x.size for x in jax.tree.leaves(pull_back))

    given = sum(x.size for x in jax.tree.leaves(inputs))
    states = 9 * inputs["initial_state"].size
    assert saved("recompute") <= given + states + SHAPE.batch * SHAPE.length * 2
    assert saved("keep") > saved("recompute")
