"""Models of an experiment run in processes of their own, on all GPUs, into one file."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tyro

from experiments import mqar, parallel
from experiments.mqar import Mqar
from experiments.parallel import Parallel, devices, main
from experiments.store import CellStore, make_header

REAL = subprocess.Popen
GRID = ["--models", "kda", "gla", "retnet", "--widths", "16", "--settings", "32", "4", "--minutes", "9", "--again"]


@pytest.fixture
def processes(monkeypatch, tmp_path):
    """What would have been started: (command, environment). Two GPUs; gla's process fails."""
    started = []

    def popen(command, *, env, stdout, **_):
        started.append((command[1:], env))
        stdout.write("much\nthe last line\n")
        return SimpleNamespace(returncode=int("gla" in command), poll=lambda: 0)

    monkeypatch.setattr(parallel.subprocess, "Popen", popen)
    monkeypatch.setattr(parallel.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0, stdout="2\n"))
    monkeypatch.setattr(mqar, "main", lambda options: print(f"the table of {options.models}, {options}"))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)
    return started


def test_each_model_has_a_process_and_the_table_comes_last(processes, capsys, tmp_path, monkeypatch):
    options = [*GRID, "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="failed: gla"):
        main(Parallel("mqar", each=1), options)
    given = tyro.cli(Mqar, args=options)
    assert len(processes) == 3
    for (command, environment), model in zip(processes, given.models, strict=True):
        assert command[:2] == ["-m", "experiments.mqar"]
        own = tyro.cli(Mqar, args=command[2:])
        assert own == replace(given, models=(model,), minutes=own.minutes)
        assert 8 < own.minutes <= 9
        assert environment["CUDA_VISIBLE_DEVICES"] in ("0", "1")
        assert environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
        # What a cell says of it: the models once, and not the minutes that were left.
        monkeypatch.setattr("sys.argv", command[1:])
        words = f"--models {model} --widths 16 --settings 32 4 --again --out DIR"
        assert make_header("mqar", "x", str(tmp_path))["command"] == f"python -m experiments.mqar {words}"
    shown = capsys.readouterr().out
    assert "kda: the last line" in shown
    assert "gla: ended with 1, see runs/parallel/mqar/gla.log" in shown
    assert shown.splitlines()[-1] == (f"the table of {given.models}, {replace(given, minutes=0.0, again=False)}")


def test_no_process_is_begun_when_the_time_is_up(processes, capsys):
    main(Parallel("mqar"), [*GRID, "--minutes", "0"])
    assert not processes
    assert "no time is left: kda, gla, retnet\n" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_ends_it_ends_its_processes(processes, monkeypatch, capsys, number):
    started = []

    def popen(command, **_):
        started.append(REAL([sys.executable, "-c", "import time; time.sleep(60)"]))
        if len(started) == 2:
            threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
        return started[-1]

    monkeypatch.setattr(parallel.subprocess, "Popen", popen)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended:
        main(Parallel("mqar", each=1), GRID)
    assert ended.value.code == 128 + number
    assert [process.returncode for process in started] == [-signal.SIGTERM] * 2
    assert signal.getsignal(number) == before
    shown = capsys.readouterr().out
    assert "stopped: the same command goes on" in shown
    assert "table" not in shown


def test_folders_and_devices_that_are_none(processes, monkeypatch):
    Path("file").write_text("")
    for options, words, name in (
        (Parallel("mqar", logs="file"), GRID, "logs: got file/mqar"),
        (Parallel("mqar"), [*GRID, "--out", "file"], "out: got file"),
        (Parallel("mqar"), [*GRID, "--out", "file/more"], "out: got file/more"),
    ):
        with pytest.raises(ValueError, match=f"{name}, want a folder"):
            main(options, words)
    with pytest.raises(ValueError, match="out: got file, want a folder"):
        CellStore((), Path("file/some.json"), {}, again=False)
    failed = SimpleNamespace(returncode=1, stderr="Traceback\nRuntimeError: no such backend\n")
    monkeypatch.setattr(parallel.subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(ValueError, match=r"JAX_PLATFORMS: got 'cuda', JAX .* \(RuntimeError: no such backend\)"):
        main(Parallel("mqar"), GRID)
    assert not processes


@pytest.mark.parametrize(
    ("words", "got"), [(["--models", "gla", "mqar"], "'--models'"), (["no"], "'no'"), ([], "nothing")]
)
def test_the_experiment_comes_first(words, got):
    with pytest.raises(ValueError, match=f"experiment: got {got}, want one of .*'mqar'.* before all options"):
        parallel.from_words(words)


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        (Parallel("mqar", each=0), GRID, "each: got 0, want at least 1"),
        (Parallel("mqar"), ["--models", "no"], "models: got 'no', want one of"),
        (Parallel("language_model"), ["--models", "no"], "models: got 'no'"),
        (Parallel("niah"), ["--seeds", "0"], "seeds: got 0, want at least 1"),
        (Parallel("niah"), ["--minutes", "nan"], "minutes: got nan, want 0 or more"),
    ],
)
def test_bad_options_are_refused(processes, options, arguments, message):
    with pytest.raises(ValueError, match=message):
        main(options, arguments)
    assert not processes


def test_devices(processes, monkeypatch):
    assert devices() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert devices() == ["3", "5"]
    monkeypatch.setattr(parallel.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0, stdout="0\n"))
    assert devices() == [None]


def test_cells_of_many_writers_are_all_kept(tmp_path):
    path = tmp_path / "some.json"

    def write(number):
        store = CellStore(("n",), path, {"device": "x"}, again=False)
        for i in range(20):
            store.put({"n": 100 * number + i})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    kept = CellStore(("n",), path, {}, again=False).result["cells"]
    assert sorted(cell["n"] for cell in kept) == [100 * i + j for i in range(8) for j in range(20)]
    assert [x.name for x in tmp_path.iterdir()] == ["some.json"]
