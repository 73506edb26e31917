"""The gradients of a rule's own function inside a kernel: `jax.vjp` of each output, evaluated on tiles as it is."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax
from jax import Array

from pallas_kernels.rule import OUTPUTS, TiledRule, Unsupported, check, evaluate


class PullBack:
    """From the gradient of an output to those of what it is made of.

    Raises:
        Unsupported: a derivative uses an operation that the kernels do not have; the message names it.
    """

    def __init__(self, rule: TiledRule) -> None:
        self.rule = rule
        self.jaxprs = {output: self._trace(output) for output in OUTPUTS if rule.arguments.get(output)}

    def _trace(self, output: str) -> Any:
        rule, names = self.rule, self.rule.arguments[output]
        index = OUTPUTS.index(output)

        def gradients(cotangent: Array, *args: Array) -> tuple[Array, ...]:
            given = dict(zip(rule.names, args, strict=True))

            def part(read: dict[str, Array]) -> Array:
                all_of = {**given, **read}
                return tuple(rule.function(all_of.pop("q"), all_of.pop("k"), all_of.pop("v"), **all_of))[index]

            (made,) = jax.vjp(part, {n: given[n] for n in names})[1](cotangent)
            return tuple(made[n] for n in names)

        cotangent = rule.jaxprs[output].out_avals[0]
        try:
            closed = jax.make_jaxpr(gradients)(cotangent, *rule.shapes)
        except (TypeError, ValueError) as error:
            raise Unsupported(f"its {output} cannot be differentiated: {str(error).splitlines()[0]}") from error
        check(closed.jaxpr, f"gradient of {output}", sums=True)
        return closed

    def __call__(
        self, output: str, cotangent: Array, tiles: Mapping[str, Array], keep: Array | None = None
    ) -> dict[str, Array]:
        """By name: [C, width] tiles, and vectors [C] for gates with one number per head, summed over these channels.

        keep: a mask of the channels that count.
        """
        closed = self.jaxprs[output]
        made = evaluate(closed.jaxpr, closed.consts, [cotangent, *(tiles.get(n) for n in self.rule.names)], keep)
        return dict(zip(self.rule.arguments[output], made, strict=True))


@lru_cache(maxsize=64)
def pull_back(rule: TiledRule) -> PullBack:
    return PullBack(rule)
