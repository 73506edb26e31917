"""What the kernels need to know before they run: whether they can, sizes, and the arrays they read."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels import states
from pallas_kernels.layout import Layout
from pallas_kernels.linear import terms
from pallas_kernels.problem import Problem, contracts
from pallas_kernels.rule import GATE, TiledRule, Unsupported
from pallas_kernels.scores import LOG2_E, floor
from pallas_kernels.tiles import C, Numbers

MOST = 256
"""Largest K and V."""

DTYPES = tuple(jnp.dtype(x) for x in (jnp.bfloat16, jnp.float16, jnp.float32))


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
    gradients: bool = False,
) -> Problem:
    """Sizes as the kernels see them: K and V multiples of 64. gradients: may have any size.

    Raises:
        ValueError: scale is not a number that is known when the kernels are built.
    """
    if not isinstance(scale, int | float | np.number):
        raise ValueError(f"scale: got {type(scale).__name__}, want a number that is known when the kernel is built")
    erases = "e" not in rule.absent
    # I - beta k k^T with a key of unit norm and beta in [0, 2] lengthens nothing, and float16 has three bits more. Of
    # any other e the products of I - k e^T may grow, and a memory that only adds up may, past float16's range. Two
    # parts have the digits, and bfloat16 the range of float32.
    factors = terms(rule)
    narrow = contracts(factors) and not accurate and not gradients
    dtype = jnp.float16 if narrow else jnp.bfloat16
    decay = rule.decay_axis
    if decay is None and segmented:
        decay = "head"
    return Problem(
        batch=q.shape[0],
        length=_multiple(q.shape[1], 8),
        value_heads=v.shape[2],
        key_dim=_multiple(q.shape[3], C),
        value_dim=_multiple(v.shape[3], C),
        true_key_dim=q.shape[3],
        true_value_dim=v.shape[3],
        scale=scale,
        numbers=Numbers(dtype, 2 if accurate else 1, interpret),
        dtype=jnp.dtype(q.dtype),
        erases=erases,
        terms=factors,
        decay=decay,
        masked=masked or q.shape[1] % C != 0,
        segmented=segmented,
    )


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


def chunk_sums(x: Array, picks: np.ndarray) -> Array:
    """[.., n] -> [.., m], sums of what a matrix [m, n] of zeros and ones picks: one product, where jnp.cumsum is
    several small kernels on a GPU."""
    return jnp.matmul(x, jnp.asarray(picks.T, x.dtype), precision=lax.Precision.HIGHEST)


def _head_decay(problem: Problem, log_decay: Array, masks: Mapping[str, Array]) -> dict[str, Array]:
    """What a decay per head [B, H, T'] becomes: sums inside each chunk (log2), and factors to and from its ends."""
    batch, heads, tokens = log_decay.shape
    chunked = jnp.maximum(log_decay * LOG2_E, floor(2)).reshape(batch, heads, problem.chunks, C)
    prefix = chunk_sums(chunked, np.tri(C))
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


def check_arrays(
    axes: Mapping[str, str],
    q: Any,
    k: Any,
    v: Any,
    gates: Mapping[str, Any],
    state: Any = None,
    valid: Any = None,
    reset: Any = None,
) -> None:
    """Shapes and types of the arguments of `forward`.

    Raises:
        ValueError: naming the argument, what came and what is wanted.
    """

    def check(name: str, x: Any, shapes: list[tuple[int, ...]], kind: Any) -> None:
        if getattr(x, "shape", None) not in shapes or not jnp.issubdtype(x.dtype, kind):
            got = f"shape {x.shape} and dtype {x.dtype}" if hasattr(x, "shape") else type(x).__name__
            wanted = " or ".join(map(str, shapes))
            raise ValueError(f"{name}: got {got}, want shape {wanted} and dtype {getattr(kind, '__name__', kind)}")

    for name, given in (("axes", axes), ("gates", gates)):
        if not isinstance(given, Mapping):
            raise ValueError(f"{name}: got {type(given).__name__}, want a mapping from names of gates")
    for name, x in (("q", q), ("v", v)):
        if getattr(x, "ndim", None) != 4 or 0 in x.shape:
            raise ValueError(f"{name}: got shape {getattr(x, 'shape', None)}, want four axes, none of them empty")
    batch, length, heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    if value_heads % heads:
        raise ValueError(f"v: got {value_heads} heads, want a multiple of the {heads} heads of q and k")
    check("k", k, [q.shape], q.dtype)
    check("v", v, [(batch, length, value_heads, value_dim)], q.dtype)
    if set(gates) != set(axes):
        raise ValueError(f"gates: got {sorted(gates)}, want {sorted(axes)}, the names in axes")
    for name, axis in axes.items():
        last = {"head": (), "key": (key_dim,), "value": (value_dim,)}.get(axis)
        if last is None:
            raise ValueError(f"axes[{name!r}]: got {axis!r}, want 'head', 'key' or 'value'")
        shapes = [(batch, length, n, *last) for n in dict.fromkeys((heads, value_heads))]
        check(f"gates[{name!r}]", gates[name], shapes, jnp.floating)
    if state is not None:
        check("state", state, [(batch, value_heads, key_dim, value_dim)], jnp.float32)
    for name, x in (("valid", valid), ("reset", reset)):
        if x is not None:
            check(name, x, [(batch, length)], jnp.bool_)


def landing_dtypes(
    problem: Problem, rule: TiledRule, dtypes: Mapping[str, Any], gradients: bool = False
) -> dict[str, Any]:
    """The types in which the tensors reach the kernels.

    With 16-bit operands nothing is gained by tiles of 32 bits, and they take twice the memory; log_decay alone, whose
    sums need the digits, keeps them.
    """
    kept = dict(dtypes)
    if problem.numbers.parts == 1:
        decays = rule.arguments.get("log_decay", ())
        for name, dtype in dtypes.items():
            if rule.axis[name] != "head" and name not in decays and jnp.dtype(dtype).itemsize > 2:
                kept[name] = problem.numbers.dtype if name in ("q", "k", "v") else jnp.float16
        if gradients:
            # They are operands as they land.
            kept |= {n: jnp.dtype(problem.numbers.dtype) for n in ("q", "k", "v")}
    return kept


def make_inputs(
    problem: Problem,
    rule: TiledRule,
    function: Callable[..., Any],
    tensors: Mapping[str, Array],
    valid: Array | None,
    reset: Array | None,
) -> dict[str, Array]:
    """The arrays that the kernels read, by name (see `prepare`).

    tensors: in the types of `landing_dtypes`, with the sequence's own length: the copy engine wants whole rows of its
        tiles, 8 tokens, and what is added is not valid.
    """
    if valid is None and problem.masked:
        valid = jnp.ones(tensors["q"].shape[:2], bool)
    tensors = {n: pad_tokens(x, problem) for n, x in tensors.items()}
    valid, reset = (None if x is None else pad_tokens(x, problem) for x in (valid, reset))
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
        log_decay = head_log_decay(rule, function, heads, valid, (problem.batch, problem.length))
        inputs |= _head_decay(problem, _per_token(log_decay, tokens), masks)
    return inputs


def pad_tokens(x: Array, problem: Problem) -> Array:
    """[B, T, ..] with zeros (False) up to the length that the kernels see."""
    return jnp.pad(x, [(0, 0), (0, problem.length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def head_log_decay(
    rule: TiledRule,
    function: Callable[..., Any],
    heads: Mapping[str, Array],
    valid: Array | None,
    shape: tuple[int, int],
) -> Array:
    """log_decay [B, T, heads] float32 of the rule; 0 where a token is not valid. shape: B and T."""
    names = rule.arguments["log_decay"]
    if rule.decay_axis is None:
        return jnp.zeros((*shape, 1), jnp.float32)
    most = max([heads[n].shape[2] for n in names], default=1)
    given = {}
    for name in rule.names:
        x = heads[name] if name in names else jnp.zeros((*shape, most), jnp.float32)
        if valid is not None:
            x = jnp.where(valid[..., None], x, 0)
        given[name] = jnp.repeat(x, most // x.shape[2], axis=2)[..., None]
    log_decay = tuple(function(given.pop("q"), given.pop("k"), given.pop("v"), **given))[3][..., 0]
    return log_decay if valid is None else jnp.where(valid[..., None], log_decay, 0)


def tiled(function: Callable[..., Any], axes: Mapping[str, str], q: Any, v: Any) -> TiledRule:
    """The rule on tiles: one object for each rule and sizes, so that it is traced once, and its gradients are."""
    return _tiled(function, tuple(axes.items()), q.shape[-1], v.shape[-1])


@lru_cache(maxsize=64)
def _tiled(function: Callable[..., Any], axes: tuple[tuple[str, str], ...], key_dim: int, value_dim: int) -> TiledRule:
    return TiledRule(function, dict(axes), key_dim, value_dim)


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
        rule = tiled(function, axes, q, v)
    except Unsupported as error:
        return f"the rule cannot run inside a kernel: {error}".replace(GATE, "")
    problem = make_problem(
        rule, q, v, scale=1.0, accurate=accurate, masked=masked, segmented=segmented, interpret=False
    )
    dtypes = {"q": q.dtype, "k": q.dtype, "v": v.dtype} | {n: x.dtype for n, x in gates.items()}
    dtypes = landing_dtypes(problem, rule, dtypes)
    if Layout(problem, rule, dtypes).workers == 0 or states.choose(problem, rule, dtypes, 1) is None:
        return f"K = {key_dim} and V = {value_dim} in {q.dtype} need more shared memory than a multiprocessor has"
    return None
