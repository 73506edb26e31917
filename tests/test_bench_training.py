"""The training benchmark counts operations, falls back when memory ends, resumes and makes tables as it says."""

import json
import os
import re
import runpy
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from flax import nnx

from experiments import bench_training, bench_training_peer, plot_training
from experiments.bench_training import Bench, Unpacked, is_out_of_memory, make_batch
from experiments.store import arguments
from experiments.training_models import FAMILIES, TINY, TRANSFORMER, erases, make_config, step_flops
from qdelta_jax import RULES
from qdelta_jax.models import LanguageModel, count_parameters, named

MODELS = ("linear_attention", "delta_net", TRANSFORMER)
TOY = Bench(MODELS, ("tiny",), (8,), tokens=16, sides=("ours",), remat=("none",), implementation="scan", steps=1)
NUMBERS = {"step_ms": 10.0, "parameters": 7000, "loss": 4.0}


def stub(monkeypatch, fits=lambda config, cell: True, error="RESOURCE_EXHAUSTED: no"):
    """Nothing is trained; returns what was tried."""
    tried = []

    def run(config, cell, steps):
        tried.append((cell["model"], cell["length"], config.remat))
        if not fits(config, cell):
            raise RuntimeError(error)
        return NUMBERS

    monkeypatch.setattr(bench_training, "run", run)
    return tried


@pytest.mark.parametrize(
    ("model", "size", "family"),
    [("q_delta", "340m", 0), ("gated_delta_net2", "1.3b", 1), ("kda", "340m", 1), (TRANSFORMER, "1.3b", 1)],
)
def test_blocks_weigh_what_the_preset_does(model, size, family):
    """Within half a step of 64 hidden channels; a family's own rule is its preset."""
    config, preset = make_config(model, size), named(f"{FAMILIES[family]}_{size}")
    step = 3 * 64 * config.width * config.layers
    difference = count_parameters(config, blocks_only=True) - count_parameters(preset, blocks_only=True)
    assert abs(difference) <= step / 2 < 0.03 * count_parameters(config)
    assert config.mlp_hidden % 64 == 0
    assert (config.dtype, config.param_dtype) == ("bfloat16", "float32")
    if model in FAMILIES:
        assert config == preset
    if model == TRANSFORMER:
        assert config.pattern == ("attention",)
        assert config.width // config.attention_heads == 128


def test_configs_refuse():
    with pytest.raises(ValueError, match="size: got '7b'"):
        make_config("kda", "7b")
    with pytest.raises(ValueError, match="family: got 'mamba'"):
        make_config("kda", "340m", "mamba")
    with pytest.raises(ValueError, match="models: got 'no', want 'transformer' or one of"):
        bench_training.main(replace(TOY, models=("no",)))
    with pytest.raises(ValueError, match="models: got none"):
        bench_training.main(replace(TOY, models=()))
    with pytest.raises(ValueError, match="unroll: got 0"):
        bench_training.main(replace(TOY, unroll=0))
    with pytest.raises(ValueError, match="conv_implementation: got 'cuda'"):
        bench_training.main(replace(TOY, conv_implementation="cuda"))
    with pytest.raises(ValueError, match="minutes: got -1, want 0 or more"):
        bench_training.main(replace(TOY, minutes=-1))
    with pytest.raises(ValueError, match="lengths: got 24, want a divisor of tokens = 16"):
        bench_training.main(replace(TOY, lengths=(24,)))
    with pytest.raises(ValueError, match="remat: got"):
        bench_training.main(replace(TOY, remat=("half",)))
    with pytest.raises(ValueError, match="loss_chunk: got 17, want at most tokens = 16"):
        bench_training.main(replace(TOY, loss_chunk=17))


def test_flops_by_hand():
    """Width 16, two layers, vocabulary 64: embedding left out, output layer counted."""
    tokens = 128
    attention, adding, erasing = (replace(make_config(x, "tiny"), layers=2) for x in (TRANSFORMER, "gla", "kda"))
    weights = 2 * (4 * 16 * 16 + 3 * 16 * attention.mlp_hidden + 2 * 16) + 16 + 64 * 16
    found = step_flops(attention, 32, tokens)
    assert found["parameters"] == 6 * weights * tokens
    # Scores and values, forward 2 * 16 operations each per key, three times that in all, 16 keys on average.
    assert found["attention"] == 2 * (3 * 2 * 2 * 16) * 16 * tokens
    assert found["recurrence"] == 0
    assert found["total"] == found["parameters"] + found["attention"]
    assert step_flops(attention, 64, tokens)["attention"] == 2 * found["attention"]

    window = replace(attention, pattern=("window",), window=8)
    keys = np.minimum(np.arange(32) + 0.5, 8).mean()
    assert step_flops(window, 32, tokens)["attention"] == pytest.approx(found["attention"] * keys / 16, rel=1e-12)
    assert step_flops(replace(window, window=64), 32, tokens) == found

    # Two heads with a state of 8 x 8 in each of two layers: written and read, or erased, too.
    adds, rewrites = (step_flops(config, 32, tokens) for config in (adding, erasing))
    assert adds["recurrence"] == 2 * 2 * 8 * 8 * (2 * 2 * 3) * tokens
    assert rewrites["recurrence"] == 2 * 2 * 8 * 8 * (3 * 2 * 3) * tokens
    assert rewrites["attention"] == 0
    assert step_flops(erasing, 128, tokens) == rewrites


def test_rules_that_erase():
    assert {name for name in RULES if not erases(name)} == {"linear_attention", "retnet", "mamba2", "gla"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A tiny run from end to end."""
    folder = tmp_path_factory.mktemp("results")
    return bench_training.main(replace(TOY, out=str(folder))), folder


def test_tiny_run(measured):
    result, folder = measured
    (path,) = folder.iterdir()
    assert json.loads(path.read_text()) == result
    assert [cell["model"] for cell in result["cells"]] == list(MODELS)
    for cell in result["cells"]:
        assert cell["remat"] == "none"
        assert cell["parameters"] == count_parameters(make_config(cell["model"], "tiny"))
        assert cell["loss"] == pytest.approx(np.log(TINY.vocab_size), abs=0.2)
        assert cell["tokens_per_s"] == pytest.approx(16e3 / cell["step_ms"])
        assert cell["utilisation"] == pytest.approx(cell["flops"]["total"] / cell["step_ms"] * 1e3 / 989e12)
        # Parameters and two moments, 4 bytes each, at least.
        assert cell["memory_bytes"] > 12 * cell["parameters"]
        assert cell["compile_s"] > 0
        assert "error" not in cell


def test_resume(measured, monkeypatch, capsys):
    """What is stored isn't measured again; other versions, other options and --again are."""
    result, folder = measured
    toy = replace(TOY, out=str(folder))
    path = next(folder.iterdir())
    before = path.read_text()
    tried = stub(monkeypatch)
    assert bench_training.main(toy)["cells"] == result["cells"]
    assert not tried
    assert "ours: nothing is left" in capsys.readouterr().out
    late = bench_training.main(replace(toy, lengths=(8, 16), minutes=0.0))
    assert late["cells"] == result["cells"]
    assert "ours: 3 cells are left" in capsys.readouterr().out
    assert len(bench_training.main(replace(toy, models=("delta_net",), lengths=(16,)))["cells"]) == 4
    assert len(bench_training.main(replace(toy, models=("delta_net",), packed=True))["cells"]) == 5
    assert len(bench_training.main(replace(toy, models=("delta_net",), again=True))["cells"]) == 5
    monkeypatch.setattr(bench_training, "jax_versions", lambda: {"jax": "another"})
    assert len(bench_training.main(replace(toy, models=("delta_net",)))["cells"]) == 5
    assert tried == [("delta_net", 16, "none"), *[("delta_net", 8, "none")] * 3]
    path.write_text(before)


def test_out_of_memory(tmp_path, monkeypatch, capsys):
    """The next policy is tried, longer rows begin there, and what never fits is stored as such."""
    toy = replace(TOY, models=("kda", TRANSFORMER), lengths=(16, 4), remat=Bench.remat, out=str(tmp_path))
    fits = {"delta_rule_states", "full"}
    tried = stub(monkeypatch, lambda config, cell: cell["model"] == "kda" and config.remat in fits)
    cells = bench_training.main(toy)["cells"]
    policies = ["none", "activations", "dots", "delta_rule_states"]
    kda = [("kda", 4, policy) for policy in policies] + [("kda", 16, "delta_rule_states")]
    assert tried[:5] == kda
    others = ["none", "activations", "dots", "full"]
    assert tried[5:] == [(TRANSFORMER, 4, policy) for policy in others] + [(TRANSFORMER, 16, "full")]
    assert [cell["length"] for cell in cells] == [4, 16, 4, 16]
    assert [cell["remat"] for cell in cells[:2]] == ["delta_rule_states"] * 2
    assert [cell["too_large"] for cell in cells] == [policies[:3], [], others, ["full"]]
    assert [cell.get("error") for cell in cells] == [None, None, "out of memory", "out of memory"]
    assert "| tiny | 16 | transformer | qdelta_jax | out of memory | out of memory |" in capsys.readouterr().out
    bench_training.main(toy)
    assert len(tried) == 10


def test_another_failure_is_no_reason_to_go_on(tmp_path, monkeypatch):
    toy = replace(TOY, models=("kda",), remat=Bench.remat, out=str(tmp_path))
    tried = stub(monkeypatch, lambda *_: False, "no kernel")
    (cell,) = bench_training.main(toy)["cells"]
    assert cell["error"] == "RuntimeError: no kernel"
    assert tried == [("kda", 8, "none")]


def test_which_errors_are_of_memory():
    assert is_out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes."))
    assert is_out_of_memory(type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate"))
    assert not is_out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded"))
    assert not is_out_of_memory(ValueError("no"))


def test_batches_are_random_and_predict_the_next_token():
    batch = make_batch(64, 8, 16)
    assert batch.tokens.shape == batch.targets.shape == (2, 8)
    np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    np.testing.assert_array_equal(batch.segment_ids, 1)
    assert len(np.unique(batch.tokens)) > 8


def test_unpacked_takes_a_row_for_one_segment():
    """The same program as the model's without segment ids."""

    def program(model, *, packed):
        graph, state = nnx.split(nnx.eval_shape(lambda: model(make_config(TRANSFORMER, "tiny"), rngs=nnx.Rngs(0))))

        def call(state, tokens, ids):
            return nnx.merge(graph, state)(tokens, segment_ids=ids if packed else None)

        ids = jax.ShapeDtypeStruct((2, 8), jnp.int32)
        return str(jax.make_jaxpr(call)(state, ids, ids))

    assert program(Unpacked, packed=True) == program(LanguageModel, packed=False)
    assert program(LanguageModel, packed=True) != program(LanguageModel, packed=False)


def test_options_survive_the_command_line():
    for bench in (Bench(), replace(TOY, again=True, family="q_delta", minutes=2.5)):
        assert tyro.cli(Bench, args=arguments(bench)) == bench
    assert arguments(Bench()) == []


def test_the_peer_runs_first_and_alone(tmp_path, monkeypatch, capsys):
    calls = []
    toy = replace(TOY, models=("kda",), sides=("ours", "peer"), minutes=2.0, out=str(tmp_path))
    stub(monkeypatch)
    monkeypatch.setattr(
        bench_training_peer.subprocess,
        "run",
        lambda command, **_: calls.append(command) or SimpleNamespace(returncode=0),
    )
    monkeypatch.setattr(bench_training_peer.importlib.util, "find_spec", lambda name: None if name == "fla" else 1)
    assert len(bench_training.main(toy)["cells"]) == 1
    assert "without the peer: fla not installed" in capsys.readouterr().out
    assert not calls
    monkeypatch.setattr(bench_training_peer.importlib.util, "find_spec", lambda name: 1)
    bench_training.main(toy)
    ((_, *command),) = calls
    assert command[:2] == ["-m", "experiments.bench_training"]
    assert tyro.cli(Bench, args=command[2:]) == replace(toy, sides=("peer",), minutes=1.0)


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed")
def test_no_cells_without_torch(tmp_path, capsys, monkeypatch):
    bench_training_peer.can_run.cache_clear()
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    result = bench_training.main(replace(TOY, models=("kda", "gated_delta_net"), sides=("peer",), out=str(tmp_path)))
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"  # torch needs the memory
    assert result["cells"] == []
    assert capsys.readouterr().out.count("without the peer: ModuleNotFoundError") == 1


@pytest.mark.parametrize("size", ["340m", "1.3b"])
def test_the_peer_has_our_sizes(size):
    """Our count against one by hand of the peer's layers, from the options that it is given."""
    for model in bench_training_peer.PEERS:
        config = make_config(model, size)
        sizes = bench_training_peer.peer_options(config)
        width, heads, key_dim = sizes["hidden_size"], sizes["num_heads"], sizes["head_dim"]
        value_dim = int(key_dim * sizes["expand_v"])
        keys, values = heads * key_dim, heads * value_dim
        mixer = width * (2 * keys + 2 * values) + sizes["conv_size"] * (2 * keys + values) + width * heads + value_dim
        if model == "kda":
            low_rank = 2 * width * value_dim + value_dim * (keys + values) + values
            mixer += low_rank + heads + keys
        else:
            mixer += width * values + width * heads + 2 * heads
        block = mixer + 3 * width * sizes["intermediate_size"] + 2 * width
        assert count_parameters(config, blocks_only=True) == sizes["num_hidden_layers"] * block
    with pytest.raises(ValueError, match="one rule in all layers"):
        bench_training_peer.peer_options(make_config(TRANSFORMER, size))


CELL = {
    **{"model": "kda", "side": "qdelta_jax", "size": "340m", "family": "gated_delta_net2", "length": 2048},
    **{
        "tokens": 65536,
        "packed": False,
        "implementation": None,
        "conv_implementation": None,
        "unroll": 1,
        "residuals": "recompute",
        "loss_chunk": None,
        "xla_flags": None,
        "remat": "dots",
        "too_large": ["none"],
    },
    **{"tokens_per_s": 123456.0, "utilisation": 0.45, "step_ms": 530.0, "memory_bytes": 3 * 2**30, "parameters": 9},
}
STORED = {
    "device": "NVIDIA H200",
    "peak_flops": 989e12,
    "cells": [
        CELL,
        {**CELL, "length": 65536, "tokens_per_s": 1e5, "compile_s": 31.5},
        {**CELL, "remat": "full", "tokens_per_s": 1.0, "packed": True},
        {**CELL, "side": "fla", "too_large": []},
        {**CELL, "tokens": 4096, "tokens_per_s": 9e5, "loss_chunk": 512, "xla_flags": "--xla_some=1"},
        {k: v for k, v in {**CELL, "model": TRANSFORMER, "error": "bad | kernel"}.items() if k != "tokens_per_s"},
    ],
}


def test_table_from_a_stored_file():
    text = plot_training.summary(STORED)
    assert "| 340m | 65536 | kda | qdelta_jax | 123.5 (45%) | 100.0 (45%) |" in text
    assert "| 340m | 65536 | kda | fla | 123.5 (45%) |  |" in text
    assert "| 340m | 4096 | kda | qdelta_jax | 900.0 (45%) |  |" in text
    assert "| 340m | 65536 | transformer | qdelta_jax | failed |  |" in text
    text = plot_training.table(STORED)
    row = "| 340m | kda | qdelta_jax | 1 x 65536 | 100000 | 0.45 | 530 |  | 3 | 31.5 | dots | 9 |"
    assert f"{row} preset gated_delta_net2; too large: none |" in text
    assert "| preset gated_delta_net2; packed; too large: none |" in text
    assert "| preset gated_delta_net2; loss_chunk 512; --xla_some=1; too large: none |" in text
    assert "too large: none; bad / kernel |" in text
    assert {line.count("|") for line in text.splitlines() if line} == {14}


def test_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "training.json"
    path.write_text(json.dumps(STORED))
    plot_training.main(path)
    assert path.with_suffix(".md").read_text().strip() in capsys.readouterr().out
    assert path.with_suffix(".png").stat().st_size > 10_000


@pytest.mark.filterwarnings("ignore:.* found in sys.modules")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--remat activation", r"remat: got \('activation',\), want some of .*"),
        ("--unroll 0", "unroll: got 0.*"),
        ("--sizes tinny", r"sizes: got 'tinny', want some of \('tiny', '340m', '1.3b'\)"),
        ("--lengths 33", "lengths: got 33, want a divisor of tokens = 65536"),
        ("--models foo", "models: got 'foo', want .*"),
        ("--sizes", "sizes: got none, want one or more"),
        ("--lengths", "lengths: got none, want one or more"),
    ],
)
def test_bad_options_end_in_one_line(given, message, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["bench_training", *given.split(), "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("experiments.bench_training", run_name="__main__")
    assert re.fullmatch(message, ended.value.code)


def test_a_peer_that_is_skipped_is_said_to_be(tmp_path, monkeypatch, capsys):
    toy = replace(TOY, sides=("peer",), out=str(tmp_path))
    monkeypatch.setattr(bench_training_peer, "can_run", lambda: False)
    for changes, message in (
        ({"models": ("kda",)}, "the peer cannot run here"),
        ({"models": ("q_delta",)}, "the peer has none of these models, only ('gated_delta_net', 'kda')"),
        ({"models": ("kda",), "remat": ("dots",)}, "the peer has none of these policies of remat, only"),
    ):
        assert bench_training.main(replace(toy, **changes))["cells"] == []
        shown = capsys.readouterr().out
        assert f"peer: skipped, {message}" in shown
        assert "nothing is left" not in shown
        assert "no effect on the peer: implementation\n" in shown
    bench_training.main(replace(toy, implementation=None, loss_chunk=8, packed=True))
    assert "no effect on the peer: loss_chunk, packed\n" in capsys.readouterr().out
