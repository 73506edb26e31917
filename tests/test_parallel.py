"""Models of an experiment run in processes of their own, on all GPUs, into one file."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import tyro

from experiments import parallel
from experiments.mqar import Mqar
from experiments.parallel import Parallel, devices, main
from experiments.store import CellStore

GRID = ["--models", "kda", "gla", "retnet", "--widths", "16"]


@pytest.fixture
def processes(monkeypatch, tmp_path):
    """What would have been started: (command, environment). Two GPUs; gla's process fails."""
    started = []

    def run(command, *, check, env=None, stdout=None, **_):
        if command[1] == "-c":
            return SimpleNamespace(stdout=b"2\n")
        started.append((command[1:], env))
        stdout.write("much\nthe last line\n")
        return SimpleNamespace(returncode=int(command[-3] == "gla"))

    monkeypatch.setattr(parallel.subprocess, "run", run)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)
    return started


def test_each_model_has_a_process(processes, capsys):
    assert main(Parallel("mqar", each=1), GRID) == ["gla"]
    assert sorted(command[-3] for command, _ in processes) == ["gla", "kda", "retnet"]
    for command, environment in processes:
        # Of options that stand twice the last one counts.
        assert command[:-4] == ["-m", "experiments.mqar", *GRID]
        own = tyro.cli(Mqar, args=command[2:])
        assert (own.models, own.widths) == ((command[-3],), (16,))
        assert 0 < own.minutes <= 15
        assert environment["CUDA_VISIBLE_DEVICES"] in ("0", "1")
        assert environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    shown = capsys.readouterr().out
    assert "kda: the last line" in shown
    assert "gla: ended with 1, see runs/parallel/mqar/gla.log" in shown
    with pytest.raises(SystemExit, match="failed: gla"):
        parallel.run(Parallel("mqar"), GRID)


def test_no_process_is_begun_when_the_time_is_up(processes, capsys):
    assert not main(Parallel("mqar"), [*GRID, "--minutes", "0"])
    assert not processes
    assert "kda: no time is left" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        (Parallel("mqar", each=0), GRID, "each: got 0, want at least 1"),
        (Parallel("mqar"), ["--models", "no"], "rule: got 'no'"),
        (Parallel("language_model"), ["--models", "no"], "models: got 'no'"),
        (Parallel("niah"), ["--seeds", "0"], "seeds: got 0, want at least 1"),
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
    monkeypatch.setattr(parallel.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=b"0\n"))
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
