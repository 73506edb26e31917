"""The gradient of a rule on a GPU: arrays in, arrays out."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import gradient_layout, joins, states
from pallas_kernels import layout as prepare_layout
from pallas_kernels.forward import MOVES, PREPARED, START, STATES, U, starts, stretches
from pallas_kernels.gradients import gradients
from pallas_kernels.inputs import (
    check_arrays,
    chunk_sums,
    head_log_decay,
    landing_dtypes,
    make_inputs,
    make_problem,
    pad_tokens,
    tiled,
    unsupported,
)
from pallas_kernels.prepare import prepare
from pallas_kernels.problem import Problem
from pallas_kernels.pull_back import pull_back
from pallas_kernels.rule import GATE, TiledRule, Unsupported, apart, gates_apart
from pallas_kernels.states import Scan
from pallas_kernels.tiles import PROCESSORS, C


class Backward(NamedTuple):
    """Gradients: q, k, v, gates by name, each like what it is of, and the first state's [B, HV, K, V] float32."""

    q: Array
    k: Array
    v: Array
    gates: dict[str, Array]
    state: Array


def backward_unsupported(
    function: Callable[..., Any],
    axes: Mapping[str, str],
    q: Any,
    v: Any,
    gates: Mapping[str, Any],
    *,
    accurate: bool,
    masked: bool,
    segmented: bool,
) -> str | None:
    """Why `backward` cannot take such arrays or such a rule, which `forward` can; None if it can."""
    function, axes, gates = apart(function, tuple(axes)), gates_apart(axes), gates_apart(gates)
    options = {"accurate": accurate, "masked": masked, "segmented": segmented}
    reason = unsupported(function, axes, q, v, gates, **options)
    if reason is not None:
        return reason
    rule = tiled(function, axes, q, v)
    try:
        pull_back(rule)
    except Unsupported as error:
        return f"the rule cannot run inside a kernel: {error}".replace(GATE, "")
    problem = make_problem(rule, q, v, scale=1.0, interpret=False, gradients=True, **options)
    kinds = {n: x.dtype for n, x in {"q": q, "k": q, "v": v, **gates}.items()}
    dtypes = landing_dtypes(problem, rule, kinds, gradients=True)
    fits = gradient_layout.choose(problem, rule, dtypes) and prepare_layout.Layout(problem, rule, dtypes).workers
    if not fits or states.choose(problem, rule, dtypes, 1, reverse=True) is None:
        return f"K = {q.shape[-1]} and V = {v.shape[-1]} in {q.dtype} need more shared memory than there is"
    return None


def backward(
    function: Callable[..., Any],
    axes: Mapping[str, str],
    q: Array,
    k: Array,
    v: Array,
    gates: Mapping[str, Array],
    state: Array,
    valid: Array | None,
    reset: Array | None,
    d_out: Array,
    d_end: Array,
    *,
    scale: float,
    accurate: bool | None = None,
    saved: Mapping[str, Array] | None = None,
    interpret: Any = None,
    **overrides: Any,
) -> Backward:
    """Gradients of `forward`'s q, k, v, gates and state from those of its output and of its final state.

    Args:
        d_out: [B, T, HV, V]; d_end: [B, HV, K, V] float32; the others as in `forward`.
        saved: what `forward` saved of the same inputs, for less to be computed again.
    Raises:
        ValueError: an array does not fit; the message names it.
        NotImplementedError: the kernels cannot take such arrays or such a rule; the message says why.

    Source: the WY form's gradient, docs/derivation.md.
    """
    if state is None:
        raise ValueError("state: got None, want [B, HV, K, V] float32")
    check_arrays(axes, q, k, v, gates, state, valid, reset)
    for name, x, like in (("d_out", d_out, v), ("d_end", d_end, state)):
        shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
        if shape != like.shape or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"{name}: got shape {shape} and dtype {dtype}, want {like.shape} of floating numbers")
    accurate = bool(q.dtype == jnp.float32 if accurate is None else accurate)
    options = {"masked": valid is not None, "segmented": reset is not None}
    reason = backward_unsupported(function, axes, q, v, gates, accurate=accurate, **options)
    if reason is not None:
        raise NotImplementedError(reason)
    d_end = d_end.astype(jnp.float32)
    function, axes, gates = apart(function, tuple(axes)), gates_apart(axes), gates_apart(gates)
    rule = tiled(function, axes, q, v)
    options |= {"accurate": accurate, "interpret": interpret is not None}
    tensors = {"q": q, "k": k, "v": v, **gates}

    def given(gradients: bool) -> tuple[Problem, dict[str, Array]]:
        """As the forward pass has it, and as the gradients do."""
        problem = make_problem(rule, q, v, scale=scale, gradients=gradients, **options)
        landing = landing_dtypes(problem, rule, {n: x.dtype for n, x in tensors.items()}, gradients)
        cast = {n: x.astype(landing[n]) for n, x in tensors.items()}
        return problem, make_inputs(problem, rule, function, cast, valid, reset)

    problem, inputs = given(True)
    wide = lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, problem.value_dim - x.shape[-1])])  # noqa: E731
    high = lambda x: jnp.pad(wide(x), ((0, 0), (0, 0), (0, problem.key_dim - x.shape[2]), (0, 0)))  # noqa: E731
    d_out = wide(pad_tokens(d_out.astype(jnp.float32 if problem.numbers.parts == 2 else jnp.bfloat16), problem))
    arguments = rule, high(state), d_out, high(d_end), saved or {}
    made, d_state = _run(given(False), (problem, inputs), *arguments, interpret=interpret, **overrides)
    found = _assemble(rule, tensors, made)
    if rule.decay_axis == "head":
        d_log_decay = _log_decay(problem, made, inputs["carry"])
        heads = {n: tensors[n].astype(jnp.float32) for n in rule.arguments["log_decay"]}
        through = jax.vjp(lambda x: head_log_decay(rule, function, x, valid, (problem.batch, q.shape[1])), heads)
        d_log_decay = _sum_heads(jnp.swapaxes(d_log_decay, 1, 2)[:, : q.shape[1]], through[0].shape[2])
        for name, x in through[1](d_log_decay)[0].items():
            found[name] = (found[name].astype(jnp.float32) + x).astype(found[name].dtype)
    grads = {n.removeprefix(GATE): found[n] for n in axes}
    return Backward(found["q"], found["k"], found["v"], grads, d_state[:, :, : q.shape[-1], : v.shape[-1]])


def _run(
    before: tuple[Problem, dict[str, Array]],
    here: tuple[Problem, dict[str, Array]],
    rule: TiledRule,
    state: Array,
    d_out: Array,
    d_end: Array,
    saved: Mapping[str, Array],
    *,
    count: int | None = None,
    layout: tuple[int, int] | None = None,
    workers: int | None = None,
    processors: int = PROCESSORS,
    interpret: Any = None,
) -> tuple[dict[str, Array], Array]:
    """What `gradients` returns, and the gradient of the first state; overrides as in `forward.run`.

    before, here: the forward pass and the gradients, their problems and inputs. The forward pass keeps its own type of
    operands, which may have more digits: what it leaves is rounded where it is used.
    """
    (forward, inputs), (problem, rounded) = before, here
    known = {n.removeprefix(PREPARED): x for n, x in saved.items() if n.startswith(PREPARED)}
    prepared = prepare(forward, rule, inputs, workers, interpret, processors, known)
    count = stretches(problem) if count is None else count
    count = saved[START].shape[2] if START in saved else count
    moves, kept = saved.get(MOVES), saved
    if U not in saved:
        # Forward again, for U and the states.
        chosen = layout or states.choose(forward, rule, {n: x.dtype for n, x in inputs.items()}, count)
        assert chosen is not None, "`unsupported` has looked for room"
        how = Scan(count, *chosen, keep=True, outputs=False)
        start = saved.get(START)
        if start is None:
            start, moves = starts(forward, rule, how, prepared, inputs, state, interpret)
        made = states.scan(forward, rule, how, prepared, inputs, start, interpret)
        kept = {U: made["kept_u"], STATES: made["kept_states"]}
    # Then back.
    given = {**rounded, "d_out": d_out}
    chosen = layout or states.choose(problem, rule, {n: x.dtype for n, x in given.items()}, count, reverse=True)
    assert chosen is not None, "`unsupported` has looked for room"
    how = Scan(count, *chosen, reverse=True)
    after = d_end[:, :, None]
    if count > 1:
        part = replace(how, outputs=False, first=1)
        rest = jnp.zeros((*d_end.shape[:2], count - 2, *d_end.shape[2:]), d_end.dtype)
        ends = states.scan(problem, rule, part, prepared, given, jnp.concatenate([rest, after], axis=2), interpret)[
            "end"
        ]
        if moves is None:
            after = joins.decayed(problem, {**rounded, **prepared}, d_end, ends, reverse=True)
        else:
            after = joins.join(problem, d_end, ends, moves, interpret, reverse=True)
    back = states.scan(problem, rule, how, prepared, given, after, interpret)
    given = {"d_out": d_out, "u": kept[U], "d_z": back["d_z"], "states": kept[STATES], "d_states": back["d_states"]}
    return gradients(problem, rule, rounded, given, interpret), back["end"]


def _log_decay(problem: Problem, made: Mapping[str, Array], carry: Array) -> Array:
    """d log_decay [B, HV, T'] with a decay per head, from its parts: between tokens, to and from a chunk's ends."""
    shape = (problem.batch, problem.value_heads, problem.chunks, C)
    pairs, into, out_of = (made[n].reshape(shape) for n in ("pairs", "into", "out_of"))
    # Of tokens from here on, and of those before.
    picks = np.concatenate([np.tri(C).T, np.tri(C, k=-1)], axis=1)
    within = chunk_sums(jnp.concatenate([into, out_of], axis=-1), picks)
    carry = jnp.repeat(carry, problem.value_heads // carry.shape[1], axis=1)
    whole = carry * jnp.sum(made["carry"], axis=-1)
    return (pairs + within + whole[..., None]).reshape(*shape[:2], -1)


def _assemble(rule: TiledRule, tensors: Mapping[str, Array], made: Mapping[str, Array]) -> dict[str, Array]:
    """By name, each like its tensor: channels and tokens that were added are cut, and heads that share are summed."""
    found: dict[str, Array] = {}
    for name, like in tensors.items():
        if name not in made:
            found[name] = jnp.zeros(like.shape, like.dtype)
            continue
        x = jnp.swapaxes(made[name], 1, 2) if rule.axis[name] == "head" else made[name][..., : like.shape[-1]]
        found[name] = _sum_heads(x[:, : like.shape[1]], like.shape[2]).astype(like.dtype)
    return found


def _sum_heads(x: Array, heads: int) -> Array:
    """[B, T, HV, ..] -> [B, T, heads, ..], in float32."""
    return x.astype(jnp.float32).reshape(*x.shape[:2], heads, -1, *x.shape[3:]).sum(axis=3)
