"""The kernel benchmark counts bytes, measures errors, resumes and makes tables as it says."""

import importlib
import json
import re
import runpy
from dataclasses import fields, replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import bench_kernels, plot_kernels
from experiments.bench_gradients import errors, flat
from experiments.bench_kernels import Bench, Store, build, floor, make_arguments, numbers, reference
from experiments.bench_peer import PEERS
from experiments.device_time import kernel_time, repeats_for
from qdelta_jax import RULES
from tests.cases import KERNEL_SHAPES, SHAPES, every_rule, every_structure, make_inputs
from tests.tolerances import BF16, FLOAT32, FLOAT32_DECAY

ODD = SHAPES["odd"]
CELL = {
    **{"rule": "kda", "shape": "odd", "dtype": "float32", "implementation": "xla", "chunk_size": 16},
    "residuals": "recompute",
}


@pytest.mark.parametrize(
    ("name", "wanted"), [("gated_delta_net", 1030), ("q_delta", 1032), ("kda", 1538), ("gated_delta_net2", 2048)]
)
@pytest.mark.parametrize("shape", list(KERNEL_SHAPES))
def test_floor(name, wanted, shape):
    """Bytes per token and head at K = V = 128 in bfloat16, log_decay in float32."""
    shape = KERNEL_SHAPES[shape]
    arguments = jax.eval_shape(lambda: make_arguments(name, shape, "bfloat16"))
    least = floor(arguments, bandwidth=4.8)
    tokens = shape.batch * shape.length * shape.heads
    assert least["floor_bytes"] == wanted * tokens
    assert least["state_bytes"] == shape.batch * shape.heads * 128 * 128 * 4
    assert least["floor_ms"] == pytest.approx(wanted * tokens / 4.8e12 * 1e3)


@every_rule
def test_arguments_are_like_those_of_the_tests(name):
    q, k, v, gates = make_arguments(name, ODD, "bfloat16")
    want = make_inputs(name, ODD)
    assert [x.shape for x in (q, k, v)] == [want[x].shape for x in "qkv"]
    assert {n: x.shape for n, x in gates.items()} == {n: x.shape for n, x in want["gates"].items()}
    assert {x.dtype for x in (q, k, v)} == {jnp.dtype("bfloat16")}
    np.testing.assert_allclose(jnp.linalg.norm(k.astype(jnp.float32), axis=-1), 1, atol=1e-2)
    for gate, x in gates.items():
        assert x.dtype == ("float32" if gate == "log_decay" else "bfloat16")
        low, high = (-1.5, 0) if gate == "log_decay" else (0, 1)
        assert low <= x.min() < x.max() <= high


@every_structure
@pytest.mark.parametrize(
    ("dtype", "output", "state"), [("float32", FLOAT32, FLOAT32), ("bfloat16", BF16["output"], BF16["state"])]
)
def test_error_against_float64(name, dtype, output, state):
    """The chunked form passes, grouped values included; a changed number shows."""
    bench = Bench(dtype=dtype, chunk_size=16)
    programs = {"xla": build(name, "xla", ODD, bench)}
    arguments = make_arguments(name, ODD, dtype)
    want = reference(build(name, "reference", ODD, bench), arguments)
    cell = {**CELL, "rule": name, "dtype": dtype}
    found = numbers(cell, programs, arguments, want)
    assert 0 < found["output_error"] <= output
    assert 0 < found["state_error"] <= state
    assert found["call_ms"] > 0
    wrong = numbers(cell, programs, arguments, (1.1 * want[0], 0.9 * want[1]))
    assert wrong["output_error"] == pytest.approx(1 / 11, abs=0.01)
    assert wrong["state_error"] == pytest.approx(1 / 9, abs=0.01)


def test_a_failure_becomes_text():
    programs = {"xla": NotImplementedError("K = 7"), "mosaic": RuntimeError("no")}
    want = np.ones((1, 1, 1)), np.ones((1, 1, 1))
    assert numbers(CELL, programs, (), want) == {"reason": "K = 7"}
    assert numbers({**CELL, "implementation": "mosaic"}, programs, (), want) == {"error": "RuntimeError: no"}


def test_resume(tmp_path, capsys, monkeypatch):
    """A second run measures nothing; another version, another cell or --again is measured."""
    bench = Bench(("delta_net",), ("odd",), ("xla", "peer"), "float32", 16, out=str(tmp_path))
    first = bench_kernels.main(bench)
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text()) == first
    (cell,) = first["cells"]
    assert cell["output_error"] <= FLOAT32
    assert "nothing is left" in capsys.readouterr().out

    calls = []
    monkeypatch.setattr(bench_kernels, "numbers", lambda cell, *_: calls.append(cell["chunk_size"]) or {"call_ms": 1.0})
    assert bench_kernels.main(bench)["cells"] == [cell]
    assert not calls
    late = Bench(("delta_net",), ("odd",), ("xla",), "float32", 32, minutes=0.0, out=str(tmp_path))
    assert bench_kernels.main(late)["cells"] == [cell]
    assert "1 cells are left" in capsys.readouterr().out
    other = Bench(("delta_net",), ("odd",), ("xla",), "float32", 32, out=str(tmp_path))
    assert len(bench_kernels.main(other)["cells"]) == 2
    again = Bench(("delta_net",), ("odd",), ("xla",), "float32", 16, again=True, out=str(tmp_path))
    assert len(bench_kernels.main(again)["cells"]) == 2
    assert calls == [32, 16]
    monkeypatch.setattr(bench_kernels, "jax_versions", lambda _: {"jax": "another"})
    assert len(bench_kernels.main(bench)["cells"]) == 2
    assert calls == [32, 16, 16]


def test_forward_and_backward(tmp_path):
    """Measured again with gradients; every gradient counts, and a table is made."""
    bench = Bench(("kda",), ("odd",), ("xla",), "float32", 16, gradients="xla", out=str(tmp_path))
    (cell,) = bench_kernels.main(bench)["cells"]
    assert 0 < cell["gradient_error"] <= FLOAT32
    assert 0 < cell["decay_gradient_error"] <= FLOAT32_DECAY
    assert cell["both_call_ms"] > 0
    assert cell["both_mib"] > 0
    assert cell["versions"]["gradients"] == "xla, recompute"
    (path,) = tmp_path.iterdir()
    plot_kernels.main(path)
    assert "| odd | kda | float32 | xla |  |" in path.with_suffix(".md").read_text().split("Forward and backward")[1]

    made = (
        *(np.full((2, 3, heads, 5), x) for heads, x in ((4, 1.0), (4, 1.0), (8, 1.0))),
        {"log_decay": np.full((2, 3, 8), 2.0)},
    )
    want = {n: np.full((1, 3, heads, 5), 1.25) for n, heads in (("q", 2), ("k", 2), ("v", 4))}
    want["log_decay"] = np.full((1, 3, 4), 4.0)
    found = errors(flat(made, want), want)
    assert found == {"gradient_error": pytest.approx(0.2), "decay_gradient_error": pytest.approx(0.5)}


@pytest.mark.filterwarnings("ignore:.* found in sys.modules")
@pytest.mark.parametrize(
    ("module", "options"),
    [
        *(("bench", "Bench"), ("bench_kernels", "Bench"), ("bench_training", "Bench")),
        *(("mqar", "Mqar"), ("language_model", "Language"), ("niah", "Niah")),
    ],
)
def test_help_keeps_lines_and_says_what_each_option_is(module, options, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [module, "--help"])
    with pytest.raises(SystemExit):
        runpy.run_module(f"experiments.{module}", run_name="__main__")
    shown = capsys.readouterr().out.splitlines()
    made = importlib.import_module(f"experiments.{module}")
    assert {f" {line}" for line in made.__doc__.strip().splitlines() if line} <= set(shown)
    options = getattr(made, options)
    assert re.findall(r"^ {8}(\w+): ", options.__doc__, re.MULTILINE) == [x.name for x in fields(options)]


def test_store_keeps_the_file_whole(tmp_path):
    store = Store(tmp_path / "new" / "kernels.json", {"device": "x"}, again=False)
    cell = {**CELL, "versions": {"jax": "1"}}
    assert not store.has(cell)
    store.put(cell)
    store.put({**cell, "versions": {"jax": "2"}})
    assert store.has({**cell, "versions": {"jax": "2"}})
    assert not store.has(cell)
    assert [x.name for x in store.path.parent.iterdir()] == ["kernels.json"]


@pytest.mark.parametrize(
    ("failure", "done"),
    [({"error": "XlaRuntimeError: .."}, False), ({"both_error": ".."}, False), ({"error": "out of memory"}, True)],
)
def test_what_failed_is_tried_again(tmp_path, failure, done):
    store = Store(tmp_path / "kernels.json", {}, again=False)
    cell = {**CELL, "versions": {"jax": "1"}}
    store.put({**cell, **failure})
    assert store.has(cell) == done


def test_names_are_checked(tmp_path):
    for name in ("rules", "shapes", "implementations", "peers"):
        with pytest.raises(ValueError, match=rf"{name}: got \['foo'\]"):
            bench_kernels.main(replace(Bench(out=str(tmp_path)), **{name: ("foo",)}))


STORED = {
    "device": "NVIDIA H200",
    "cells": [
        {**CELL, "implementation": "mosaic", "reason": "no | kernel", "floor_ms": 0.1},
        {**CELL, "device_ms": 4.0, "call_ms": 4.5, "floor_ms": 0.1, "output_error": 2e-3, "state_error": 1e-3},
        {**CELL, "implementation": "fla", "chunk_size": None, "device_ms": 0.5, "do_bench_ms": 0.75, "floor_ms": 0.1},
        {**CELL, "implementation": "fla safe_gate", "chunk_size": None, "device_ms": 0.25, "floor_ms": 0.1},
        {**CELL, "rule": "gla", "implementation": "mosaic", "device_ms": 0.2, "floor_ms": 0.1},
        {**CELL, "rule": "gla", "implementation": "fla", "chunk_size": None, "device_ms": 0.6, "floor_ms": 0.1},
        {
            **CELL,
            "rule": "q_delta",
            "implementation": "official",
            "chunk_size": None,
            "device_ms": 0.7,
            "floor_ms": 0.1,
            "note": "another recurrence",
        },
    ],
}


def test_table_from_a_stored_file(tmp_path, capsys):
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps(STORED))
    plot_kernels.main(path)
    text = path.with_suffix(".md").read_text()
    assert text.strip() in capsys.readouterr().out
    assert "| odd | kda | float32 | 0.1 |  | 4 | 0.25 |  |  |" in text
    assert "| odd | gla | float32 | 0.1 | 0.2 |  | 0.6 | 2.00 | 3.00 |" in text
    assert "| odd | kda | float32 | xla (chunks of 16) | 4 | 4.5 | 0.1 | 40.00 | 2.0e-03 | 1.0e-03 |  |" in text
    assert "| mosaic (chunks of 16) |  |  | 0.1 |  |  |  | no / kernel |" in text
    assert "| odd | q_delta | float32 | 0.1 |  |  | 0.7* |  |  |" in text
    assert "| odd | q_delta | float32 | official | 0.7 |  | 0.1 | 7.00 |  |  | another recurrence |" in text
    assert "| Triton's do_bench 0.75 ms |" in text
    widths = {line.count("|") for line in text.splitlines() if "odd" in line}
    assert widths == {10, 12}
    assert path.with_suffix(".png").stat().st_size > 10_000


def test_time_in_kernels():
    def line(name, *events):
        return SimpleNamespace(name=name, events=[SimpleNamespace(name=n, duration_ns=d) for n, d in events])

    gpu = SimpleNamespace(
        name="/device:GPU:0",
        lines=[line("Stream #1", ("fusion", 2e6), ("MemcpyD2D", 9e6)), line("XLA Modules", ("jit_call", 5e6))],
    )
    host = SimpleNamespace(name="/host:CPU", lines=[line("Stream #1", ("fusion", 7e6))])
    assert kernel_time(SimpleNamespace(planes=[gpu, host])) == 2.0
    assert [repeats_for(x) for x in (0.1, 30.0, 1e4)] == [20, 10, 3]


def test_peers_take_our_gates():
    assert set(PEERS) <= set(RULES)
    for name, peers in PEERS.items():
        assert len({peer.label for peer in peers}) == len(peers)
        for peer in peers:
            assert set(peer.gates) == set(RULES[name].gates)


@pytest.mark.filterwarnings("ignore:.* found in sys.modules")
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("bench_kernels --rules foo", r"rules: got \['foo'\], want some of .*"),
        ("bench_kernels --shapes", "shapes: got none, want some of .*"),
        ("bench_kernels --chunk-size 0", "chunk_size: got 0, want a number above 0"),
        ("bench_kernels --minutes -1", "minutes: got -1.0, want 0 or more"),
        ("bench --rules foo", r"rules: got \['foo'\], want some of .*"),
        ("bench --rules", "rules: got none, want some of .*"),
        ("bench --shape foo", r"shape: got \['foo'\], want some of .*"),
        ("bench --lengths 8 0", r"lengths: got \(8, 0\), want numbers above 0"),
        ("bench --repeats 0", "repeats: got 0, want numbers above 0"),
    ],
)
def test_bad_options_end_in_one_line(command, message, monkeypatch):
    monkeypatch.setattr("sys.argv", command.split())
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"experiments.{command.split()[0]}", run_name="__main__")
    assert re.fullmatch(message, ended.value.code)
