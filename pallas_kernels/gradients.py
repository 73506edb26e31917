"""The gradients of q, k, v and the gates, all chunks at once, from what reverse.py and the forward pass leave of each:
the state S before it and the gradient D of the state after it, U, dZ and the gradient dO of the output.

    dP = dO U^T        dL = -dZ U^T        dQ = dO S^T        dY = -dZ S^T        dK = U D^T

(dP where j <= i, dL where j < i), then through the decays to q, e and k, and through the rule's own function.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.channel_gradients import ChannelGradients
from pallas_kernels.gradient_layout import choose
from pallas_kernels.gradient_tiles import ONES, Barriers, column_name
from pallas_kernels.layout import channel_gates, head_gates
from pallas_kernels.pages import Pages, memory
from pallas_kernels.problem import Problem
from pallas_kernels.rule import OUTPUTS, TiledRule
from pallas_kernels.tiles import C


def gradients(
    problem: Problem,
    rule: TiledRule,
    inputs: Mapping[str, Array],
    saved: Mapping[str, Array],
    interpret: Any = None,
) -> dict[str, Array]:
    """Gradients by name, [B, T', HV, K or V] in the type of the input for tensors with one number per channel, and
    [B, HV, T'] float32 for gates with one number per head.

    inputs: as `prepare` takes them. saved: d_out [B, T, HV, V]; u, d_z [parts, B, HV, T', V]; states, d_states
        [parts, chunks, B, HV, K, V].
    Returns besides, with a decay per head: pairs, into, out_of [B, HV, T'] and carry [B, HV, chunks, K], the gradients
        of log_decay by what it stands between (`backward._log_decay`).
    """
    numbers = problem.numbers
    layout = choose(problem, rule, {n: x.dtype for n, x in inputs.items()})
    assert layout is not None, "`backward_unsupported` has looked for room"
    channels = channel_gates(rule, "k", "e", "log_decay", "z")
    vectors = head_gates(rule, "k", "e", "z", *(("log_decay",) if problem.decay == "key" else ()))
    vectors += ["valid"] if problem.masked else []
    vectors += ["runs", "runs_again"] if problem.segmented else []
    if problem.decay == "head":
        vectors += ["prefix", "prefix_again"]
    if problem.decay == "head" or (problem.decay == "key" and problem.segmented):
        vectors += ["into", "out_of"]
    used = {n: inputs[n] for n in dict.fromkeys(["q", "k", "v", *channels, *vectors])}
    if problem.decay == "key" and problem.segmented:
        used["through"] = inputs["through"]
    used["numbers"] = jnp.arange(C, dtype=jnp.int32)
    used |= {column_name(kind): (jnp.arange(C, dtype=jnp.float32) * one).astype(kind) for kind, one in ONES.items()}
    given = {**used, **saved}
    out = _outputs(problem, rule, used)
    dtypes = list(dict.fromkeys(jnp.dtype(x.dtype) for x in (*given.values(), *out.values()) if x.ndim >= 4))
    dtypes += [x for x in map(jnp.dtype, (numbers.dtype, jnp.bfloat16, jnp.float16, jnp.float32)) if x not in dtypes]

    def body(*refs: Any) -> None:
        arrays = dict(zip(given, refs, strict=False))
        results = dict(zip(out, refs[len(given) :], strict=False))
        views, *columns, values, keys, states, late, met = refs[len(given) + len(out) :]
        pages = Pages(views, 0, dtypes)
        barriers = Barriers(values, keys, states, late, met)
        memory = dict(zip(ONES, columns, strict=True))
        place, me = lax.axis_index("task"), lax.axis_index("warpgroup")
        ChannelGradients(problem, rule, layout, arrays, results, pages, memory, barriers, place, me).run()

    of_keys = problem.key_pieces * (2 + len(channel_gates(rule, "k", "e", "log_decay")))
    landing_u = saved["u"].shape[0] if layout.u_low is not None else numbers.parts
    of_values = problem.value_pieces * (1 + landing_u + numbers.parts) + len(ONES)
    warpgroups = layout.warpgroups
    made = plgpu.kernel(
        body,
        out_type=list(out.values()),
        grid=(problem.batch * problem.value_heads * problem.chunks,),
        grid_names=("task",),
        scratch_types=[
            memory(1, layout.count, dtypes, numbers.interpret),
            *(plgpu.SMEM((C,), kind) for kind in ONES),
            plgpu.Barrier(num_arrivals=of_values),
            plgpu.Barrier(num_arrivals=of_keys),
            plgpu.Barrier(num_arrivals=2 * numbers.parts, num_barriers=2 * warpgroups),
            plgpu.Barrier(num_arrivals=len(layout.late), num_barriers=warpgroups),
            plgpu.Barrier(num_arrivals=warpgroups),
        ],
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=numbers.parts == 1,
            reduction_scratch_bytes=0,  # sums are over columns only
            unsafe_no_auto_barriers=True,  # see `tiles.sync`
        ),
        interpret=interpret,
    )(*given.values())
    results: dict[str, Array] = {}
    for name, x in zip(out, made, strict=True):
        base, _, side = name.partition(" ")
        x = jnp.sum(x, axis=0) if side else x
        results[base] = results[base] + x if base in results else x
    return results


def _outputs(problem: Problem, rule: TiledRule, used: Mapping[str, Any]) -> dict[str, Any]:
    tokens = problem.chunks * C
    width = {"key": problem.key_dim, "value": problem.value_dim}
    sides = {"keys": problem.key_pieces, "values": problem.value_pieces}
    heads = (problem.batch, problem.value_heads)
    out: dict[str, Any] = {}

    def vectors(name: str, side: str) -> None:
        out[f"{name} {side}"] = jax.ShapeDtypeStruct((sides[side], *heads, tokens), jnp.float32)

    for output in OUTPUTS:
        if output == "log_decay" and problem.decay != "key":
            continue
        for name in rule.arguments[output]:
            if rule.axis[name] == "head":
                vectors(name, "values" if output == "z" else "keys")
    for name in used:
        if name in rule.axis and rule.axis[name] != "head":
            shape = (problem.batch, tokens, problem.value_heads, width[rule.axis[name]])
            out[name] = jax.ShapeDtypeStruct(shape, used[name].dtype)
    if problem.decay == "head":
        vectors("into", "keys")
        vectors("out_of", "keys")
        scores = 2 if problem.erases else 1
        out["pairs scores"] = jax.ShapeDtypeStruct((scores, *heads, tokens), jnp.float32)
        out["carry"] = jax.ShapeDtypeStruct((*heads, problem.chunks, problem.key_dim), jnp.float32)
    return out
