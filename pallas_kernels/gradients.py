"""The gradients of q, k, v and the gates, all chunks at once, from what reverse.py and the forward pass leave of each:
the state S before it and the gradient D of the state after it, U, dZ and the gradient dO of the output.

    dP = dO U^T        dL = -dZ U^T        dQ = dO S^T        dY = -dZ S^T        dK = U D^T

(dP where j <= i, dL where j < i), then through the decays to q, e and k, and through the rule's own function.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.channel_gradients import ChannelGradients
from pallas_kernels.layout import channel_gates, head_gates
from pallas_kernels.linear import keeps_keys
from pallas_kernels.pages import Pages, Taken, memory, pages_of
from pallas_kernels.problem import Problem
from pallas_kernels.rule import OUTPUTS, TiledRule
from pallas_kernels.scores import SCALE, selections
from pallas_kernels.tiles import C


class Layout:
    """Pages of one chunk, by name: (first page, step from piece to piece)."""

    def __init__(self, problem: Problem, rule: TiledRule, dtypes: Mapping[str, Any]) -> None:
        parts, taken = problem.numbers.parts, Taken()
        even = parts == 2

        def operands(count: int) -> tuple[int, int]:
            return taken.take(count * parts, even), parts

        self.values = {name: operands(problem.value_pieces) for name in ("d_out", "u", "d_z")}
        # A float32 tile on its way out, or two parts of one in a product.
        self.spare = taken.take(2, True)
        self.keys = {name: operands(problem.key_pieces) for name in ("q", "k", *(("e",) if problem.erases else ()))}
        self.gates: dict[str, tuple[int, int]] = {}
        if not keeps_keys(rule):
            # The rule's function is evaluated again, on k as it came.
            size = pages_of(dtypes["k"])
            self.gates["k"] = (taken.take(size * problem.key_pieces, size > 1), size)
        for name in channel_gates(rule, "k", "e", "log_decay"):
            size = pages_of(dtypes[name])
            self.gates[name] = (taken.take(size * problem.key_pieces, size > 1), size)
        self.state, self.after = operands(1)[0], operands(1)[0]
        self.d_p, self.d_l = operands(1)[0], operands(1)[0]
        if problem.decay == "key":
            self.logs, self.scaled = operands(1)[0], self.spare
            # dO and U have been used when the only tile of keys comes to its levels.
            alone = problem.key_pieces == 1
            self.level_p, self.level_l = (self.values[n][0] if alone else operands(1)[0] for n in ("d_out", "u"))
        # v and its gates land where q, k, e and theirs were, and further on: all that is done with by then.
        late = Taken()
        self.late: dict[str, tuple[int, int]] = {}
        for name in ("v", *channel_gates(rule, "z")):
            size = pages_of(dtypes[name])
            self.late[name] = (self.keys["q"][0] + late.take(size * problem.value_pieces, size > 1), size)
        self.count = max(taken.count, self.keys["q"][0] + late.count)
        self.count += self.count % 2


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
    layout = Layout(problem, rule, {n: x.dtype for n, x in inputs.items()})
    channels = channel_gates(rule, "k", "e", "log_decay", "z")
    vectors = head_gates(rule, "k", "e", "z", *(("log_decay",) if problem.decay == "key" else ()))
    vectors += ["valid"] if problem.masked else []
    vectors += ["runs", "runs_again"] if problem.segmented else []
    if problem.decay == "head":
        vectors += ["prefix", "prefix_again"]
    if problem.decay == "head" or (problem.decay == "key" and problem.segmented):
        vectors += ["into", "out_of"]
    used = {n: inputs[n] for n in dict.fromkeys(["q", "k", "v", *channels, *vectors])}
    if problem.decay == "key":
        if problem.segmented:
            used["through"] = inputs["through"]
        used["select"] = jnp.asarray(selections(numbers.parts))
        used["spread"] = jnp.asarray(SCALE * np.swapaxes(selections(numbers.parts), 1, 2), jnp.bfloat16)
    given = {**used, **saved}
    out = _outputs(problem, rule, used)
    dtypes = list(dict.fromkeys(jnp.dtype(x.dtype) for x in (*given.values(), *out.values()) if x.ndim >= 4))
    dtypes += [x for x in map(jnp.dtype, (numbers.dtype, jnp.bfloat16, jnp.float16)) if x not in dtypes]

    def body(*refs: Any) -> None:
        arrays = dict(zip(given, refs, strict=False))
        results = dict(zip(out, refs[len(given) :], strict=False))
        views, *barriers = refs[len(given) + len(out) :]
        place = (lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("chunk"))
        pages = Pages(views, 0, dtypes)
        ChannelGradients(problem, rule, layout, arrays, results, pages, tuple(barriers), place).run()

    copies = problem.key_pieces * (2 + len(channel_gates(rule, "k", "e", "log_decay")))
    copies += problem.value_pieces * (1 + 2 * numbers.parts)
    late = problem.value_pieces * len(layout.late)
    made = plgpu.kernel(
        body,
        out_type=list(out.values()),
        grid=(problem.batch, problem.value_heads, problem.chunks),
        grid_names=("batch", "head", "chunk"),
        scratch_types=[
            memory(1, layout.count, dtypes, numbers.interpret),
            plgpu.Barrier(num_arrivals=copies),
            plgpu.Barrier(num_arrivals=2 * numbers.parts),
            plgpu.Barrier(num_arrivals=late),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=numbers.parts == 1,
            reduction_scratch_bytes=1024,
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
        out["pairs"] = jax.ShapeDtypeStruct((*heads, tokens), jnp.float32)
        out["carry"] = jax.ShapeDtypeStruct((*heads, problem.chunks, problem.key_dim), jnp.float32)
    return out
