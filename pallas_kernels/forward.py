"""The forward pass of a rule on a GPU: arrays in, arrays out."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import states
from pallas_kernels.layout import Layout
from pallas_kernels.prepare import prepare
from pallas_kernels.problem import Problem
from pallas_kernels.rule import TiledRule, Unsupported
from pallas_kernels.scores import LOG2_E, floor
from pallas_kernels.states import Scan
from pallas_kernels.tiles import C, Numbers

MOST = 256
"""Largest K and V."""

DTYPES = tuple(jnp.dtype(x) for x in (jnp.bfloat16, jnp.float16, jnp.float32))


class Forward(NamedTuple):
    """out [B, T, HV, V]; end [B, HV, K, V] float32; states [chunks, B, HV, K, V] before each chunk, or None."""

    out: Array
    end: Array
    states: Array | None


def _multiple(n: int, of: int) -> int:
    return -(-n // of) * of


def make_problem(
    rule: TiledRule,
    q: Any,
    v: Any,
    *,
    scale: float,
    accurate: bool,
    masked: bool,
    segmented: bool,
    interpret: bool,
) -> Problem:
    """Sizes as the kernels see them: K and V multiples of 64."""
    erases = "e" not in rule.absent
    # Keys of unit norm keep what the delta rules multiply small, and float16 has three bits more; a memory that only
    # adds up may grow past float16's range.
    dtype = jnp.float16 if erases else jnp.bfloat16
    decay = rule.decay_axis
    if decay is None and segmented:
        decay = "head"
    return Problem(
        batch=q.shape[0],
        length=_multiple(q.shape[1], 8),
        value_heads=v.shape[2],
        key_dim=_multiple(q.shape[3], C),
        value_dim=_multiple(v.shape[3], C),
        scale=scale,
        numbers=Numbers(dtype, 2 if accurate else 1, interpret),
        dtype=jnp.dtype(q.dtype),
        erases=erases,
        decay=decay,
        masked=masked or q.shape[1] % C != 0,
        segmented=segmented,
    )


def stretches(problem: Problem, processors: int = 132) -> int:
    """How many parts of a sequence run at the same time: 1 unless that leaves most of the chip idle.

    Each part costs its share of the chunks twice (first for its transition and the state it adds, then for the
    outputs), and the parts are joined one after the other, for the time of about four chunks each.
    """
    tiles = problem.batch * problem.value_heads * problem.value_pieces
    extra = problem.batch * problem.value_heads * (problem.key_pieces if problem.erases else 0)

    def cost(count: int) -> float:
        each = -(-problem.chunks // count)
        rounds = each * max(1.0, tiles * count / processors / 2)
        if count == 1:
            return rounds
        first = each * max(1.0, tiles * (count - 1) / processors / 2)
        if extra and count > 2:
            first += each * max(1.0, extra * (count - 2) / processors / 2)
        return rounds + first + 4.0 * count

    options = [1 << i for i in range(7) if 1 << i <= max(1, problem.chunks // 4)]
    return min(options, key=cost)


def _pad_last(x: Array, to: int) -> Array:
    return x if x.shape[-1] == to else jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, to - x.shape[-1])])


def _per_token(x: Array, tokens: int) -> Array:
    """[B, T, ...] -> [B, ..., T'], zeros behind the end."""
    x = jnp.moveaxis(x, 1, -1)
    return _pad_last(x, tokens)


def _masks(problem: Problem, valid: Array | None, reset: Array | None) -> dict[str, Array]:
    """valid, runs [B, T'] and what the resets cut: into, out_of [B, T'], through [B, chunks], zeros and ones."""
    tokens = problem.chunks * C
    out: dict[str, Array] = {}
    if problem.masked:
        ones = jnp.ones((problem.batch, problem.length), jnp.float32)
        out["valid"] = _per_token(ones if valid is None else jnp.where(valid, ones, 0), tokens)
    if problem.segmented:
        assert reset is not None
        counts = _per_token(reset.astype(jnp.int32), tokens).reshape(problem.batch, problem.chunks, C)
        runs = jnp.cumsum(counts, axis=-1, dtype=jnp.int32)
        last = runs[..., -1:]
        flat = (problem.batch, tokens)
        out["runs"] = out["runs_again"] = runs.reshape(flat)
        out["into"] = (runs == 0).astype(jnp.float32).reshape(flat)
        out["out_of"] = (runs == last).astype(jnp.float32).reshape(flat)
        out["through"] = (last[..., 0] == 0).astype(jnp.float32)
    return out


def _head_decay(problem: Problem, log_decay: Array, masks: Mapping[str, Array]) -> dict[str, Array]:
    """What a decay per head [B, H, T'] becomes: sums inside each chunk (log2), and factors to and from its ends."""
    batch, heads, tokens = log_decay.shape
    chunked = jnp.maximum(log_decay * LOG2_E, floor(2)).reshape(batch, heads, problem.chunks, C)
    prefix = jnp.cumsum(chunked, axis=-1)
    total = prefix[..., -1:]
    flat = (batch, heads, tokens)
    out = {"prefix": prefix.reshape(flat), "into": jnp.exp2(prefix).reshape(flat)}
    out["out_of"] = jnp.exp2(total - prefix).reshape(flat)
    out["carry"] = jnp.exp2(total[..., 0])
    if problem.segmented:
        out["into"] *= masks["into"][:, None]
        out["out_of"] *= masks["out_of"][:, None]
        out["carry"] *= masks["through"][:, None]
    out["prefix_again"] = out["prefix"]
    return out


def _inputs(
    problem: Problem, rule: TiledRule, function: Callable[..., Any], tensors: Mapping[str, Array],
    valid: Array | None, reset: Array | None,
) -> dict[str, Array]:
    """The arrays that the kernels read, by name (see `prepare`)."""
    tokens = problem.chunks * C
    width = {"key": problem.key_dim, "value": problem.value_dim}
    used = {n for arguments in rule.arguments.values() for n in arguments} | {"q", "k", "v"}
    inputs = {n: _pad_last(x, width[rule.axis[n]]) for n, x in tensors.items() if rule.axis[n] != "head" and n in used}
    heads = {n: x.astype(jnp.float32) for n, x in tensors.items() if rule.axis[n] == "head"}
    masks = _masks(problem, valid, reset)
    head_decay = problem.decay == "head"
    for output in ("k", "e", "z", *(() if head_decay else ("log_decay",))):
        for name in rule.arguments.get(output, ()):
            if name in heads:
                inputs[name] = _per_token(heads[name], tokens)
    if "valid" in masks:
        inputs["valid"] = masks["valid"]
    if problem.segmented:
        inputs |= {n: masks[n] for n in ("runs", "runs_again")}
    if problem.decay == "key" and problem.segmented:
        inputs |= {n: masks[n] for n in ("into", "out_of", "through")}
    if head_decay:
        log_decay = _head_log_decay(problem, rule, function, heads, valid)
        inputs |= _head_decay(problem, _per_token(log_decay, tokens), masks)
    return inputs


def _head_log_decay(
    problem: Problem, rule: TiledRule, function: Callable[..., Any], heads: Mapping[str, Array], valid: Array | None
) -> Array:
    """log_decay [B, T, heads] float32 of the rule; 0 where a token is not valid."""
    names = rule.arguments["log_decay"]
    shape = (problem.batch, problem.length, heads[names[0]].shape[2] if names else 1)
    if rule.decay_axis is None:
        return jnp.zeros(shape, jnp.float32)
    most = max([heads[n].shape[2] for n in names], default=1)
    given = {}
    for name in rule.names:
        x = heads[name] if name in names else jnp.zeros((problem.batch, problem.length, most), jnp.float32)
        if valid is not None:
            x = jnp.where(valid[..., None], x, 0)
        given[name] = jnp.repeat(x, most // x.shape[2], axis=2)[..., None]
    log_decay = tuple(function(given.pop("q"), given.pop("k"), given.pop("v"), **given))[3][..., 0]
    return log_decay if valid is None else jnp.where(valid[..., None], log_decay, 0)


def _join(start: Array, ends: Array, moves: Array | None) -> Array:
    """States before each stretch [B, HV, stretches, K, V], in float32: `ends`' first, then S <- M S + end.

    start: before the first stretch. ends [B, HV, stretches - 1, K, V]: after the first stretch, and what each later
    one adds. moves: transitions of the second stretch and later, [.., stretches - 2, K, K], or [.., K, 1] where nothing
    is erased.
    """
    before = [start, ends[:, :, 0]]
    for index in range(1, ends.shape[2]):
        assert moves is not None
        move, state = moves[:, :, index - 1], before[-1]
        moved = move * state if move.shape[-1] == 1 else jnp.matmul(move, state, precision=lax.Precision.HIGHEST)
        before.append(moved + ends[:, :, index])
    return jnp.stack(before, axis=2)


def _carried(problem: Problem, prepared: Mapping[str, Array], count: int) -> Array:
    """The decay across each stretch but the first and last where nothing is erased, [B, HV, count - 2, K or 1, 1]."""
    each = -(-problem.chunks // count)
    if problem.decay is None:
        return jnp.ones((problem.batch, problem.value_heads, count - 2, 1, 1), jnp.float32)
    x = prepared["gamma"] if problem.decay == "key" else prepared["carry"][..., None]
    x = jnp.repeat(x, problem.value_heads // x.shape[1], axis=1)[:, :, each : each * (count - 1)]
    x = jnp.pad(x, ((0, 0), (0, 0), (0, each * (count - 2) - x.shape[2]), (0, 0)), constant_values=1)
    return jnp.prod(x.reshape(*x.shape[:2], count - 2, each, -1), axis=3)[..., None]


def run(
    problem: Problem,
    rule: TiledRule,
    inputs: Mapping[str, Array],
    state: Array,
    *,
    save_states: bool = False,
    count: int | None = None,
    layout: tuple[int, int] | None = None,
    workers: int | None = None,
    interpret: Any = None,
) -> dict[str, Array]:
    """The kernels, one after the other; `count`, `layout` and `workers` override what the shapes choose."""
    inputs = dict(inputs)
    carry = inputs.pop("carry", None)
    prepared = prepare(problem, rule, inputs, workers, interpret)
    if carry is not None:
        prepared["carry"] = carry
    count = stretches(problem) if count is None else count
    warpgroups, depth = layout or states.choose(problem, count)
    how = Scan(count, warpgroups, depth, save_states=save_states)
    start = state[:, :, None]
    if count > 1:
        part = replace(how, outputs=False, save_states=False, last=count - 1)
        rest = jnp.zeros((*state.shape[:2], count - 2, *state.shape[2:]), state.dtype)
        ends = states.scan(problem, part, prepared, jnp.concatenate([start, rest], axis=2), interpret)["end"]
        moves = None
        if problem.erases and count > 2:
            narrow = warpgroups if problem.key_pieces % warpgroups == 0 else 1
            part = replace(part, warpgroups=narrow, identity=True, first=1)
            moves = states.scan(problem, part, prepared, None, interpret)["end"]
        elif count > 2:
            moves = _carried(problem, prepared, count)
        start = _join(state, ends, moves)
    return states.scan(problem, how, prepared, start, interpret)


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
    save_states: bool = False,
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
        save_states: also return the state before each chunk of 64 tokens.
        interpret: `plgpu.InterpretGPUParams` to run on a CPU.
    Raises:
        NotImplementedError: `supports` gives a reason.

    Source: chunked WY form, arXiv 2406.06484 and 2412.06464; docs/kernels.md.
    """
    accurate = q.dtype == jnp.float32 if accurate is None else accurate
    options = dict(masked=valid is not None, segmented=reset is not None)
    reason = unsupported(function, axes, q, v, gates, accurate=accurate, **options)
    if reason is not None:
        raise NotImplementedError(reason)
    rule = _tiled(function, axes)
    length = q.shape[1]
    problem = make_problem(
        rule, q, v, scale=scale, accurate=accurate, interpret=interpret is not None, **options
    )
    behind = -q.shape[1] % 8
    if behind:
        # The copy engine wants whole rows of its tiles.
        pad = lambda x: jnp.pad(x, [(0, 0), (0, behind)] + [(0, 0)] * (x.ndim - 2))  # noqa: E731
        q, k, v, gates = jax.tree.map(pad, (q, k, v, dict(gates)))
        valid = pad(jnp.ones((q.shape[0], length), bool) if valid is None else valid)
        reset = None if reset is None else pad(reset)
    inputs = _inputs(problem, rule, function, {"q": q, "k": k, "v": v, **gates}, valid, reset)
    padded = jnp.pad(
        state,
        ((0, 0), (0, 0), (0, problem.key_dim - state.shape[2]), (0, problem.value_dim - state.shape[3])),
    )
    made = run(problem, rule, inputs, padded, save_states=save_states, interpret=interpret, **overrides)
    key_dim, value_dim = q.shape[-1], v.shape[-1]
    out = made["out"][:, :length, :, :value_dim]
    if valid is not None:
        out = jnp.where(valid[:, :length, None, None], out, 0)
    saved = made["states"][..., :key_dim, :value_dim] if save_states else None
    return Forward(out, made["end"][..., :key_dim, :value_dim], saved)


def _tiled(function: Callable[..., Any], axes: Mapping[str, str]) -> TiledRule:
    return TiledRule(function, axes)


def unsupported(
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
    """Why these inputs cannot run, whatever the machine; None if they can."""
    key_dim, value_dim = q.shape[-1], v.shape[-1]
    if jnp.dtype(q.dtype) not in DTYPES:
        return f"q has dtype {q.dtype}; the kernels take bfloat16, float16 and float32"
    if max(key_dim, value_dim) > MOST:
        return f"K = {key_dim} and V = {value_dim}; the kernels go up to {MOST}"
    try:
        rule = _tiled(function, axes)
    except Unsupported as error:
        return f"the rule cannot run inside a kernel: {error}"
    problem = make_problem(
        rule, q, v, scale=1.0, accurate=accurate, masked=masked, segmented=segmented, interpret=False
    )
    dtypes = {"q": q.dtype, "k": q.dtype, "v": v.dtype} | {
        n: x.dtype for n, x in gates.items() if rule.axis[n] != "head"
    }
    if Layout(problem, rule, dtypes).workers == 0 or states.choose(problem, 1) is None:
        return f"K = {key_dim} and V = {value_dim} in {q.dtype} need more shared memory than a multiprocessor has"
    return None
