"""The forward pass of a rule on a GPU: arrays in, arrays out."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels import joins, states
from pallas_kernels.inputs import check_arrays, landing_dtypes, make_inputs, make_problem, tiled, unsupported
from pallas_kernels.prepare import prepare
from pallas_kernels.problem import Problem
from pallas_kernels.rule import TiledRule, apart, gates_apart
from pallas_kernels.states import Scan
from pallas_kernels.tiles import PROCESSORS

START, MOVES, U, STATES, PREPARED = "saved start", "saved moves", "saved u", "saved states", "saved prepared "
"""Names of what is saved for `backward`: the state before each stretch and the transitions across them, and P and A of
what `prepare` returns; to keep more, all of that, and U and the state before each chunk as operands."""


def batch_axis(name: str) -> int:
    """Which axis of an array that is saved under this name counts sequences."""
    return {START: 0, PREPARED + "gamma": 0, STATES: 2}.get(name, 1)


class Forward(NamedTuple):
    """out [B, T, HV, V]; end [B, HV, K, V] float32; states [chunks, B, HV, K, V] before each chunk, or None; saved: by
    name, what `backward` takes, or nothing."""

    out: Array
    end: Array
    states: Array | None
    saved: dict[str, Array]


def stretches(problem: Problem) -> int:
    """How many parts of a sequence run at the same time: 1 unless that leaves most of the chip idle.

    Each part costs its share of the chunks three times (for the state it adds, for its transition, and for the
    outputs), and the last one joins the others first, for the time of two chunks each.
    """
    tiles = problem.batch * problem.value_heads * problem.value_pieces
    extra = problem.batch * problem.value_heads * (problem.key_pieces if problem.erases else 0)

    def cost(count: int) -> float:
        each = -(-problem.chunks // count)
        rounds = each * max(1.0, tiles * count / PROCESSORS / 2)
        if count == 1:
            return rounds
        first = each * max(1.0, tiles * (count - 1) / PROCESSORS / 2)
        if extra and count > 2:
            first += each * max(1.0, extra * (count - 2) / PROCESSORS / 2)
        return rounds + first + 1.9 * count

    options = [1 << i for i in range(7) if 1 << i <= max(1, problem.chunks // 4)]
    return min(options, key=cost)


def run(
    problem: Problem,
    rule: TiledRule,
    inputs: Mapping[str, Array],
    state: Array,
    *,
    save: str | None = None,
    count: int | None = None,
    layout: tuple[int, int] | None = None,
    workers: int | None = None,
    processors: int = PROCESSORS,
    interpret: Any = None,
) -> dict[str, Array]:
    """The kernels, one after the other.

    count, layout, workers, processors: override what the shapes and the chip choose, for tests.
    """
    prepared = prepare(problem, rule, inputs, workers, interpret, processors)
    count = stretches(problem) if count is None else count
    chosen = layout or states.choose(problem, rule, {n: x.dtype for n, x in inputs.items()}, count)
    assert chosen is not None, "`unsupported` has looked for room"
    how = Scan(count, *chosen, save_states=save == "states", keep=save == "keep")
    start, moves = starts(problem, rule, how, prepared, inputs, state, interpret)
    made = states.scan(problem, rule, how, prepared, inputs, start, interpret)
    if save in ("recompute", "keep"):
        made[START] = start
        if moves is not None:
            made[MOVES] = moves
    if save in ("recompute", "keep"):
        made |= {PREPARED + name: x for name, x in prepared.items() if save == "keep" or name in ("p", "a")}
    if save == "keep":
        made |= {U: made["kept_u"], STATES: made["kept_states"]}
    return made


def starts(
    problem: Problem,
    rule: TiledRule,
    how: Scan,
    prepared: Mapping[str, Array],
    inputs: Mapping[str, Array],
    state: Array,
    interpret: Any,
) -> tuple[Array, Array | None]:
    """The states before each stretch, [B, HV, stretches, K, V], and the transitions of all but the first and last."""
    count = how.stretches
    if count == 1:
        return state[:, :, None], None
    part = replace(how, outputs=False, save_states=False, keep=False, last=count - 1)
    rest = jnp.zeros((*state.shape[:2], count - 2, *state.shape[2:]), state.dtype)
    start = jnp.concatenate([state[:, :, None], rest], axis=2)
    ends = states.scan(problem, rule, part, prepared, inputs, start, interpret)["end"]
    if count == 2 or not problem.erases:
        return joins.decayed(problem, {**inputs, **prepared}, state, ends), None
    narrow = how.warpgroups if problem.key_pieces % how.warpgroups == 0 else 1
    part = replace(part, warpgroups=narrow, identity=True, first=1)
    moves = states.scan(problem, rule, part, prepared, inputs, None, interpret)["end"]
    return joins.join(problem, state, ends, moves, interpret), moves


def forward(
    function: Callable[..., Any],
    axes: Mapping[str, str],
    q: Array,
    k: Array,
    v: Array,
    gates: Mapping[str, Array],
    state: Array,
    valid: Array | None = None,
    reset: Array | None = None,
    *,
    scale: float,
    accurate: bool | None = None,
    save: str | None = None,
    interpret: Any = None,
    **overrides: Any,
) -> Forward:
    """S_t = (I - k_t e_t^T) Diag(exp(log_decay_t)) S_{t-1} + k_t z_t^T;  o_t = scale * S_t^T q_t, on a Hopper GPU.

    Args:
        function: the rule, (q, k, v, **gates) -> (k, e or None, z, log_decay or None), element by element; it is
            evaluated inside the kernel.
        axes: for each gate "head", "key" or "value": what its last axis is.
        q, k: [B, T, H, K]; v: [B, T, HV, V]; one of bfloat16, float16, float32.
        gates: [B, T, heads] or [B, T, heads, K or V], heads H or HV.
        state: [B, HV, K, V] float32.
        valid: [B, T] bool, False for padding (no output, the state untouched); reset: [B, T] bool, True where the
            state is cleared before a token.
        scale: of the output.
        accurate: products in float32 accuracy (two 16-bit parts for every number) instead of 16-bit operands with
            float32 sums; by default for float32 inputs.
        save: "states": also return the state before each chunk of 64 tokens. "recompute", "keep": what `backward` makes
            use of, little or all.
        interpret: `plgpu.InterpretGPUParams` to run on a CPU.
        overrides: for tests; see `run`.
    Raises:
        ValueError: an array does not fit; the message names it.
        NotImplementedError: the kernels cannot take such arrays or such a rule; the message says why. Whether they run
            on this machine is for `supports` to say.

    Source: chunked WY form, arXiv 2406.06484 and 2412.06464; docs/kernels.md.
    """
    if save not in (None, "states", "recompute", "keep"):
        raise ValueError(f"save: got {save!r}, want None, 'states', 'recompute' or 'keep'")
    if state is None:
        raise ValueError("state: got None, want [B, HV, K, V] float32")
    check_arrays(axes, q, k, v, gates, state, valid, reset)
    function, axes, gates = apart(function, tuple(axes)), gates_apart(axes), gates_apart(gates)
    accurate = q.dtype == jnp.float32 if accurate is None else accurate
    options = {"masked": valid is not None, "segmented": reset is not None}
    reason = unsupported(function, axes, q, v, gates, accurate=accurate, **options)
    if reason is not None:
        raise NotImplementedError(reason)
    rule = tiled(function, axes, q, v)
    options |= {"accurate": bool(accurate), "interpret": interpret is not None}
    problem = make_problem(rule, q, v, scale=scale, **options)
    tensors = {"q": q, "k": k, "v": v, **gates}
    landing = landing_dtypes(problem, rule, {n: x.dtype for n, x in tensors.items()})
    tensors = {n: x.astype(landing[n]) for n, x in tensors.items()}
    inputs = make_inputs(problem, rule, function, tensors, valid, reset)
    padded = jnp.pad(
        state,
        ((0, 0), (0, 0), (0, problem.key_dim - state.shape[2]), (0, problem.value_dim - state.shape[3])),
    )
    made = run(problem, rule, inputs, padded, save=save, interpret=interpret, **overrides)
    key_dim, value_dim = q.shape[-1], v.shape[-1]
    out = made["out"][:, : q.shape[1], :, :value_dim]
    before = made["states"][..., :key_dim, :value_dim] if save == "states" else None
    saved = {n: x for n, x in made.items() if n.startswith("saved ")}
    return Forward(out, made["end"][..., :key_dim, :value_dim], before, saved)
