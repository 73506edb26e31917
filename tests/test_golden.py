"""Golden vectors: written independently of this library, float64, with automatic gradients (tests/data)."""

from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from cases import CONFORMANCE, CORE, FEWER, conformance
from reference import gradients
from tolerances import FLOAT32, FLOAT64, assert_close

from qdelta_jax import RULES

DATA = Path(__file__).parent / "data"
CHUNK_SIZE = {"T1": 64, "T130": 16, "grouped": 16}


@cache
def load(name: str) -> dict[str, dict[str, np.ndarray]]:
    """{case: {array name: array}}; retnet is mamba2 with a decay that does not depend on the input."""
    cases: dict[str, dict[str, np.ndarray]] = {}
    with np.load(DATA / f"{'mamba2' if name == 'retnet' else name}.npz") as file:
        for key in file.files:
            case, array = key.split("/")
            cases.setdefault(case, {})[array] = file[key]
    return cases


def inputs_of(name: str, case: dict) -> dict:
    return {
        **{x: case[x] for x in ("q", "k", "v", "initial_state")},
        "gates": {g: case[g] for g in RULES[name].gates},
    }


def wanted_of(name: str, case: dict) -> dict:
    grads = ("q", "k", "v", "initial_state", *RULES[name].gates)
    return {n: case[n] for n in ("output", "final_state", *(f"grad_{x}" for x in grads))}


@pytest.mark.parametrize("case_name", CHUNK_SIZE)
@conformance
def test_each_case_alone(name, implementation, case_name, x64):
    if case_name != "grouped" and name not in CORE:
        pytest.skip("alone for three rules; in the batch below for all")
    case = load(name)[case_name]
    got = gradients(
        name,
        inputs_of(name, case),
        (case["cot_output"], case["cot_final_state"]),
        implementation=implementation,
        chunk_size=CHUNK_SIZE[case_name],
        scale=float(case["scale"]),
    )
    assert_close(got, wanted_of(name, case), FLOAT64, f"{name} {case_name} ")


def one_batch(name: str) -> tuple[dict, np.ndarray]:
    """The cases with a head for every value head as rows of one batch: heads become rows, shorter ones are padded.

    Returns:
        the batch of every array, and segment ids that say what is padding.
    """
    cases = [x for n, x in load(name).items() if n != "grouped"]
    rows = [{n: x for n, x in case.items() if n != "scale"} for case in cases]
    rows = [{n: _heads_to_rows(n, x) for n, x in case.items()} for case in rows]
    longest = max(x["q"].shape[1] for x in rows)
    widest = max(x["v"].shape[-1] for x in rows)
    ids = np.concatenate([np.repeat(np.arange(longest)[None] < x["q"].shape[1], len(x["q"]), 0) for x in rows])
    value = {"v", "output", "write", "cot_output", "initial_state", "final_state", "cot_final_state"}
    batch = {}
    for n in rows[0]:
        length = None if "state" in n else longest
        width = widest if n.removeprefix("grad_") in value else None
        batch[n] = np.concatenate([_pad(x[n], length, width) for x in rows])
    return batch, ids.astype(np.int32)


def _heads_to_rows(name: str, x: np.ndarray) -> np.ndarray:
    x = x if "state" in name else np.moveaxis(x, 2, 1)
    x = x.reshape(-1, *x.shape[2:])
    return x[:, None] if "state" in name else x[:, :, None]


def _pad(x: np.ndarray, length: int | None, width: int | None) -> np.ndarray:
    widths = [(0, 0)] * x.ndim
    if length is not None:
        widths[1] = (0, length - x.shape[1])
    if width is not None:
        widths[-1] = (0, width - x.shape[-1])
    return np.pad(x, widths)


ONE_BATCH = [
    pytest.param(*case.values, *how, marks=case.marks)
    for cases, how in ((CONFORMANCE, (jnp.float64, FLOAT64, 16)), (FEWER, (jnp.float32, FLOAT32, 64)))
    for case in cases
]


@pytest.mark.parametrize(("name", "implementation", "dtype", "tolerance", "chunk_size"), ONE_BATCH)
def test_all_cases_as_one_padded_batch(name, implementation, dtype, tolerance, chunk_size, x64):
    """Also T63, strong (log_decay to -8) and beta2 (beta or erase to 2); values are padded with zero channels."""
    batch, ids = one_batch(name)
    scales = {float(x["scale"]) for n, x in load(name).items() if n != "grouped"}
    assert len(scales) == 1
    got = gradients(
        name,
        inputs_of(name, batch),
        (batch["cot_output"], batch["cot_final_state"]),
        ids,
        implementation=implementation,
        chunk_size=chunk_size,
        scale=scales.pop(),
        dtype=dtype,
    )
    assert_close(got, wanted_of(name, batch), tolerance, f"{name} ")
