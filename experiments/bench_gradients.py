"""Forward and backward together, for `bench_kernels --gradients`: time, memory and the error of every gradient.

Cotangents reach the output and the final state. The error is against the chunked form in float64 (which equals the
token-by-token definition to 1e-10, tests/test_golden.py) on the same rounded inputs, first sequence and first heads:
the worst gradient's, and log_decay's apart. Memory is what the call needs besides its inputs: temporaries and results.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import qdelta_jax as qd
from experiments.bench import timed
from experiments.device_time import device_time, repeats_for
from qdelta_jax.mosaic import kernel_settings
from tests.cases import Shape

MIB = 2**20


def make_cotangents(shape: Shape, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Of the output, in dtype, and of the final state."""
    batch, length, _, heads, key_dim, value_dim = shape
    keys = jax.random.split(jax.random.key(1))
    d_out = jax.random.normal(keys[0], (batch, length, heads, value_dim), jnp.float32).astype(dtype)
    return d_out, 0.1 * jax.random.normal(keys[1], (batch, heads, key_dim, value_dim), jnp.float32)


def first_heads(cotangents: tuple[jax.Array, jax.Array], heads: int) -> tuple[jax.Array, jax.Array]:
    """Those of the first sequence and its first value heads, in float64."""
    d_out, d_end = cotangents
    return d_out[:1, :, :heads].astype(jnp.float64), d_end[:1, :heads].astype(jnp.float64)


def build(rule: str, arguments: Any, cotangents: Any, gradients: str, **options: Any) -> Any:
    """The compiled (q, k, v, gates), cotangents -> output, final state and gradients, or the exception.

    arguments, cotangents: shapes and dtypes. gradients: "xla" or "kernels", for "mosaic".
    """

    def call(arguments: Any, cotangents: Any) -> Any:
        out, pull_back = jax.vjp(lambda q, k, v, gates: qd.delta_rule(q, k, v, rule, gates, **options), *arguments)
        return out, pull_back(cotangents)

    try:
        with kernel_settings(gradients=gradients):
            return jax.jit(call).lower(arguments, cotangents).compile()
    except Exception as error:  # Kept: it becomes the text of a cell.
        return error


def flat(gradients: Any, like: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """By name, in float64; like: only as many sequences and heads as these have."""
    q, k, v, gates = gradients
    found = {"q": q, "k": k, "v": v, **gates}
    if like is not None:
        found = {n: x[:1, :, : like[n].shape[2]] for n, x in found.items()}
    return {n: np.asarray(x, np.float64) for n, x in found.items()}


def errors(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> dict[str, float]:
    """The worst gradient's, log_decay's apart."""
    found = {n: float(np.linalg.norm(got[n] - x) / np.linalg.norm(x)) for n, x in want.items()}
    decay = {"decay_gradient_error": found.pop("log_decay")} if "log_decay" in found else {}
    return {"gradient_error": max(found.values()), **decay}


def measure(program: Any, arguments: Any, cotangents: Any, want: dict[str, np.ndarray]) -> dict[str, Any]:
    """Times, memory and errors of a program of `build`."""
    if isinstance(program, Exception):
        raise program
    found = errors(flat(program(arguments, cotangents)[1], want), want)
    both = (arguments, cotangents)
    repeats = repeats_for(timed(program, both, 1))
    memory = program.memory_analysis()
    return {
        "both_ms": device_time(program, both, repeats)[0],
        "both_call_ms": timed(program, both, repeats),
        "both_mib": (memory.temp_size_in_bytes + memory.output_size_in_bytes) / MIB,
        **found,
    }


def measure_peer(
    call: Callable[[], tuple[Any, Any]],
    inputs: list[Any],
    names: list[str],
    cotangents: Any,
    want: Any,
    clock: Callable,
) -> dict[str, Any]:
    """The same of a peer's call on torch tensors that want gradients; clock: its device time in ms and who took it."""
    import torch

    def both() -> Any:
        return torch.autograd.grad(call(), inputs, grad_outputs=list(cotangents))

    gradients = dict(zip(names, both(), strict=True))
    found = {}
    if want:
        first = {n: gradients[n][:1, :, : x.shape[2]].double().cpu().numpy() for n, x in want.items()}
        found = errors(first, want)
    del gradients

    def blocked() -> None:
        both()
        torch.cuda.synchronize()

    repeats = repeats_for(timed(blocked, (), 1))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    blocked()
    extra = (torch.cuda.max_memory_allocated() - before) / MIB
    return {"both_ms": clock(both, repeats), "both_call_ms": timed(blocked, (), repeats), "both_mib": extra, **found}
