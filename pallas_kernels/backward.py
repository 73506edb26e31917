"""The gradient of a rule on a GPU: arrays in, arrays out."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import joins, states
from pallas_kernels import layout as prepare_layout
from pallas_kernels.forward import starts, stretches
from pallas_kernels.gradients import Layout, gradients
from pallas_kernels.inputs import check_arrays, landing_dtypes, make_inputs, make_problem, tiled, unsupported
from pallas_kernels.layout import RESERVED
from pallas_kernels.pages import PAGE
from pallas_kernels.prepare import prepare
from pallas_kernels.problem import Problem
from pallas_kernels.pull_back import pull_back
from pallas_kernels.rule import GATE, TiledRule, Unsupported, apart, gates_apart
from pallas_kernels.states import Scan
from pallas_kernels.tiles import PROCESSORS, SMEM_LIMIT, C


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
    problem = _problem(rule, q, v, scale=1.0, interpret=False, **options)
    dtypes = _landing(problem, rule, {"q": q, "k": q, "v": v, **gates})
    room = SMEM_LIMIT - RESERVED
    fits = Layout(problem, rule, dtypes).count * PAGE <= room and prepare_layout.Layout(problem, rule, dtypes).workers
    if not fits or states.choose(problem, rule, dtypes, 1, reverse=True) is None:
        return f"K = {q.shape[-1]} and V = {v.shape[-1]} in {q.dtype} need more shared memory than there is"
    return None


def _problem(rule: TiledRule, q: Any, v: Any, **options: Any) -> Problem:
    """Gradients have any size: bfloat16 has the range for them."""
    problem = make_problem(rule, q, v, **options)
    return replace(problem, numbers=replace(problem.numbers, dtype=jnp.bfloat16))


def _landing(problem: Problem, rule: TiledRule, tensors: Mapping[str, Any]) -> dict[str, Any]:
    landing = landing_dtypes(problem, rule, {n: x.dtype for n, x in tensors.items()})
    if problem.numbers.parts == 1:
        landing |= {n: jnp.dtype(jnp.bfloat16) for n in ("q", "k", "v")}
    return landing


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
    interpret: Any = None,
    **overrides: Any,
) -> Backward:
    """Gradients of `forward`'s q, k, v, gates and state from those of its output and of its final state.

    Args:
        d_out: [B, T, HV, V]; d_end: [B, HV, K, V] float32; the others as in `forward`.
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
    length = q.shape[1]
    problem = _problem(rule, q, v, scale=scale, accurate=accurate, interpret=interpret is not None, **options)
    shapes = {"q": q, "k": k, "v": v, **gates}
    behind = -length % 8
    if behind:
        pad = lambda x: jnp.pad(x, [(0, 0), (0, behind)] + [(0, 0)] * (x.ndim - 2))  # noqa: E731
        q, k, v, d_out, gates = jax.tree.map(pad, (q, k, v, d_out, dict(gates)))
        valid = pad(jnp.ones((q.shape[0], length), bool) if valid is None else valid)
        reset = None if reset is None else pad(reset)
    tensors = {"q": q, "k": k, "v": v, **gates}
    landing = _landing(problem, rule, tensors)
    tensors = {n: x.astype(landing[n]) for n, x in tensors.items()}
    inputs = make_inputs(problem, rule, function, tensors, valid, reset)
    wide = lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, problem.value_dim - x.shape[-1])])  # noqa: E731
    high = lambda x: jnp.pad(wide(x), ((0, 0), (0, 0), (0, problem.key_dim - x.shape[2]), (0, 0)))  # noqa: E731
    d_out = wide(d_out.astype(jnp.float32 if problem.numbers.parts == 2 else jnp.bfloat16))
    made, d_state = _run(problem, rule, inputs, high(state), d_out, high(d_end), interpret=interpret, **overrides)
    if rule.decay_axis == "head":
        made["log_decay in all"] = head_log_decay(problem, made, inputs["carry"])
    return _assemble(problem, rule, function, axes, shapes, valid, made, d_state, length)


def _run(
    problem: Problem,
    rule: TiledRule,
    inputs: Mapping[str, Array],
    state: Array,
    d_out: Array,
    d_end: Array,
    *,
    count: int | None = None,
    layout: tuple[int, int] | None = None,
    workers: int | None = None,
    processors: int = PROCESSORS,
    interpret: Any = None,
) -> tuple[dict[str, Array], Array]:
    """What `gradients` returns, and the gradient of the first state; overrides as in `forward.run`."""
    prepared = prepare(problem, rule, inputs, workers, interpret, processors)
    count = stretches(problem) if count is None else count
    given = {**inputs, "d_out": d_out}
    dtypes = {n: x.dtype for n, x in given.items()}
    # Forward again, for U and the states, then back.
    chosen = layout or states.choose(problem, rule, dtypes, count)
    assert chosen is not None, "`unsupported` has looked for room"
    how = Scan(count, *chosen, keep=True, outputs=False)
    start, moves = starts(problem, rule, how, prepared, inputs, state, interpret)
    kept = states.scan(problem, rule, how, prepared, inputs, start, interpret)
    chosen = layout or states.choose(problem, rule, dtypes, count, reverse=True)
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
            after = joins.decayed(problem, {**inputs, **prepared}, d_end, ends, reverse=True)
        else:
            after = joins.join(problem, d_end, ends, moves, interpret, reverse=True)
    back = states.scan(problem, rule, how, prepared, given, after, interpret)
    saved = {"d_out": d_out, "u": kept["kept_u"], "d_z": back["d_z"]}
    saved |= {"states": kept["kept_states"], "d_states": back["d_states"]}
    return gradients(problem, rule, inputs, saved, interpret), back["end"]


def head_log_decay(problem: Problem, made: Mapping[str, Array], carry: Array) -> Array:
    """d log_decay [B, HV, T'] with a decay per head, from its parts: between tokens, to and from a chunk's ends."""
    shape = (problem.batch, problem.value_heads, problem.chunks, C)
    pairs, into, out_of = (made[n].reshape(shape) for n in ("pairs", "into", "out_of"))
    from_here = jnp.cumsum(into[..., ::-1], axis=-1)[..., ::-1]
    before = jnp.cumsum(out_of, axis=-1) - out_of
    carry = jnp.repeat(carry, problem.value_heads // carry.shape[1], axis=1)
    whole = carry * jnp.sum(made["carry"], axis=-1)
    return (pairs + from_here + before + whole[..., None]).reshape(*shape[:2], -1)


def _assemble(
    problem: Problem,
    rule: TiledRule,
    function: Callable[..., Any],
    axes: Mapping[str, str],
    shapes: Mapping[str, Array],
    valid: Array | None,
    made: Mapping[str, Array],
    d_state: Array,
    length: int,
) -> Backward:
    """Channels and tokens that were added are cut, and heads that share are summed."""
    found: dict[str, Array] = {}
    for name, like in shapes.items():
        if name not in made:
            found[name] = jnp.zeros(like.shape, like.dtype)
            continue
        x = jnp.swapaxes(made[name], 1, 2) if rule.axis[name] == "head" else made[name][..., : like.shape[-1]]
        x = x[:, :length]
        heads = like.shape[2]
        x = x.astype(jnp.float32).reshape(*x.shape[:2], heads, -1, *x.shape[3:]).sum(axis=3)
        found[name] = x.astype(like.dtype)
    if rule.decay_axis == "head":
        d_log_decay = jnp.swapaxes(made["log_decay in all"], 1, 2)[:, :length]
        for name, x in _head_gates(rule, function, shapes, d_log_decay, valid, length).items():
            found[name] = (found[name].astype(jnp.float32) + x).astype(found[name].dtype)
    key_dim, value_dim = shapes["q"].shape[-1], shapes["v"].shape[-1]
    grads = {n.removeprefix(GATE): found[n] for n in axes}
    return Backward(found["q"], found["k"], found["v"], grads, d_state[:, :, :key_dim, :value_dim])


def _head_gates(
    rule: TiledRule,
    function: Callable[..., Any],
    shapes: Mapping[str, Array],
    d_log_decay: Array,
    valid: Array | None,
    length: int,
) -> dict[str, Array]:
    """Gradients of the gates that make up a log_decay with one number per head."""
    names = rule.arguments["log_decay"]
    heads = d_log_decay.shape[2]

    def log_decay(given: dict[str, Array]) -> Array:
        zero = jnp.zeros((*d_log_decay.shape, 1), jnp.float32)
        wide = {n: jnp.repeat(x, heads // x.shape[2], axis=2)[..., None] for n, x in given.items()}
        all_of = {n: wide.get(n, zero) for n in rule.names}
        return tuple(function(all_of.pop("q"), all_of.pop("k"), all_of.pop("v"), **all_of))[3][..., 0]

    given = {n: shapes[n].astype(jnp.float32) for n in names}
    if valid is not None:
        keep = valid[:, :length, None]
        given = {n: jnp.where(keep, x, 0) for n, x in given.items()}
        d_log_decay = jnp.where(keep, d_log_decay, 0)
    (made,) = jax.vjp(log_decay, given)[1](d_log_decay)
    return made if valid is None else {n: jnp.where(keep, x, 0) for n, x in made.items()}
