"""Running the GPU kernels in tests: on a GPU as they are, on a CPU in Pallas's interpreter or by a stand-in."""

import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Shape, make_inputs, round_to
from jax.experimental.pallas import mosaic_gpu as plgpu
from reference import call, cast, cast_inputs, gradients, loop
from tolerances import KERNEL, KERNEL_GRADIENT, relative_error

import pallas_kernels
from qdelta_jax.chunked import ChunkOptions, _forward
from qdelta_jax.mosaic import kernel_settings
from qdelta_jax.rules import Gate, Rule

ON_GPU = jax.default_backend() == "gpu"

if ON_GPU and pallas_kernels.machine(None) is not None:
    pytest.skip(pallas_kernels.machine(None), allow_module_level=True)

INTERPRET = None if ON_GPU else plgpu.InterpretGPUParams(detect_races=True)

QUICK = {} if ON_GPU else {"workers": 1, "processors": 1}
"""The interpreter compiles each worker of a block. One worker alone takes all chunks in turn, as each does on a GPU."""


def run_kernels(**overrides):
    """For calls of `delta_rule` inside: the kernels, and what they would choose otherwise. Gradients run through XLA,
    as where the kernels for them do not fit; test_kernel_gradients.py has those."""
    return kernel_settings(interpret=INTERPRET, **{"gradients": "xla", **QUICK, **overrides})


@contextmanager
def run_stand_in(**overrides):
    """The same for what is around the kernels: on a CPU the chunked form takes their place, which compiles faster,
    and which `jax.checkpoint` and a mesh of several devices can do with, unlike the interpreter."""
    if ON_GPU:
        with kernel_settings(**overrides):
            yield
        return
    with mock.patch.object(pallas_kernels, "forward", stand_in), kernel_settings(interpret="stand-in", gradients="xla"):
        yield


@contextmanager
def any_machine():
    """No question is asked about the device: for programs that are not run."""
    with ExitStack() as stack:
        for module in ("pallas_kernels", *(f"pallas_kernels.{x}" for x in ("supports", "inverse", "convolution"))):
            stack.enter_context(mock.patch.object(sys.modules[module], "machine", return_value=None))
        yield


def stand_in(function, axes, q, k, v, gates, state, valid, reset, *, scale, accurate, save, interpret):
    rule = Rule("stand_in", function, {name: Gate(axis) for name, axis in axes.items()})
    precision = jax.lax.Precision.HIGHEST if accurate else None
    options = ChunkOptions(scale, chunk_size=64, precision=precision)
    (out, end), (states, _) = _forward(rule, options, q, k, v, gates, state, valid, reset)
    states = states.reshape(-1, *states.shape[2:])[: -(-q.shape[1] // 64)]
    return pallas_kernels.Forward(out, end, states if save == "states" else None, {})


SMALL = Shape(1, 65, 1, 1, 16, 24)
"""Two chunks, the last one not full; K != V, neither a multiple of 64."""


def rounded(inputs: dict, dtype) -> dict:
    """Inputs that dtype can hold; the state is float32 in any case."""
    return {**round_to(inputs, dtype), "initial_state": inputs["initial_state"]}


def check_values(name, inputs, dtype, ids=None, *, tolerance=None, **overrides) -> None:
    """Output and final state against the definition in float64 on the same rounded inputs."""
    inputs = rounded(inputs, dtype)
    with run_kernels(**overrides):
        out, state = call(name, cast_inputs(inputs, dtype), ids, implementation="mosaic")
    assert out.dtype == dtype
    assert state.dtype == np.float32
    want_out, want_state = loop(name, inputs, segment_ids=ids)
    tolerance = KERNEL[np.dtype(dtype).name] if tolerance is None else tolerance
    errors = relative_error(out, want_out), relative_error(state, want_state)
    assert max(errors) <= tolerance, errors
    if ids is not None:
        assert np.all(np.asarray(out)[np.asarray(ids) == 0] == 0)


def check_gradients(
    name,
    inputs,
    cotangents,
    ids=None,
    *,
    tolerance=KERNEL_GRADIENT,
    how=run_kernels,
    dtype=jnp.float32,
    of_decay=None,
    **options,
) -> None:
    """Values and every gradient against those of the definition in float64 on the same rounded inputs. of_decay: the
    tolerance of log_decay's, if another. options: of `delta_rule`."""
    if dtype != jnp.float32:
        inputs, cotangents = rounded(inputs, dtype), (round_to(cotangents[0], dtype), cotangents[1])
    with jax.enable_x64(True):
        want = gradients(name, inputs, cotangents, ids, implementation="scan")

    @jax.jit
    def run(x, cotangents):
        out, pull_back = jax.vjp(lambda x: call(name, x, ids, implementation="mosaic", **options), x)
        return out, pull_back(cotangents)[0]

    given = cast(cotangents[0], dtype), cast(cotangents[1], jnp.float32)
    with how():
        (out, state), found = run(cast_inputs(inputs, dtype), given)
    got = {"output": out, "final_state": state, **{f"grad_{n}": x for n, x in (found | found.pop("gates")).items()}}
    errors = {n: relative_error(x, want[n]) for n, x in got.items()}
    assert set(got) == set(want)
    limits = {"grad_log_decay": tolerance if of_decay is None else of_decay}
    assert all(x <= limits.get(n, tolerance) for n, x in errors.items()), errors


SEGMENTED = SMALL._replace(length=80)


def segments(shape: Shape) -> np.ndarray:
    """Resets inside a chunk and at its edge, padding inside a segment and at both ends."""
    ids = np.full(shape[:2], 3, np.int32)
    ids[:, :5] = 0
    ids[:, 30:40] = 0
    ids[:, 50:] = 4
    ids[:, 64:] = 1
    ids[:, 70:75] = 0
    ids[:, -3:] = 0
    return ids


def growing(name: str, length: int) -> dict:
    """Two keys in turn whose transitions multiply a direction by 1.118 ("q_delta") or 1.109 a token: no decay, gates in
    [0, 1]. From 1 it is past float16's 65504 after 110 tokens; everything else is as in tests/cases.py."""
    inputs = make_inputs(name, Shape(1, length, 1, 1, 16, 24))
    odd = np.arange(length) % 2
    q, k = (np.zeros((1, length, 1, 16)) for _ in range(2))
    gates = {n: np.ones_like(x) for n, x in inputs["gates"].items()}
    gates["log_decay"][:] = 0.0
    if name == "q_delta":
        root = 1.25**0.5
        k[0, :, 0, :2] = np.array([[1, 0], [1 / root, 0.5 / root]])[odd]
        q[0, :, 0, :2] = np.array([[0, 1], [0.5 / root, -1 / root]])[odd]
        gates["feedback"][:] = 0.5
    else:
        k[0, :, 0, :2] = np.array([[0.5, 0.75**0.5], [0.75**0.5, 0.5]])[odd]
        q = np.asarray(inputs["q"], np.float64)
        gates["erase"][0, :, 0, :2] = np.array([[1, 0], [0, 1]])[odd]
    return {**inputs, "q": q, "k": k, "gates": gates}


def poisoned(inputs: dict, ids: np.ndarray) -> dict:
    """NaN wherever there is padding."""
    poison = lambda x: np.where((ids == 0).reshape(*ids.shape, *[1] * (x.ndim - 2)), np.nan, x)  # noqa: E731
    gates = {n: poison(x) for n, x in inputs["gates"].items()}
    return {**{n: poison(inputs[n]) for n in "qkv"}, "gates": gates, "initial_state": inputs["initial_state"]}


LENGTH, HEADS = 1 << 22, 5
"""More tokens than 65,535 chunks hold, and with 128 channels more than 2^31 numbers; a head alone has fewer."""


@partial(jax.jit, static_argnums=(0, 1))
def one_head(name, index):
    """The numbers of tests/cases.py for a few tokens, over and over, in another order for each head."""
    inputs = cast_inputs(rounded(make_inputs(name, Shape(1, 509, 1, 1, 128, 128)), jnp.bfloat16), jnp.bfloat16)
    tokens = (jnp.arange(LENGTH) * (index + 1)) % 509
    along = lambda x: x[:, tokens]  # noqa: E731
    return {
        **{n: along(inputs[n]) for n in "qkv"},
        "gates": {n: along(x) for n, x in inputs["gates"].items()},
        "initial_state": inputs["initial_state"],
    }


def all_heads(name):
    parts = [one_head(name, index) for index in range(HEADS)]
    state = jnp.concatenate([x.pop("initial_state") for x in parts], 1)
    return {**jax.tree.map(lambda *x: jnp.concatenate(x, 2), *parts), "initial_state": state}
