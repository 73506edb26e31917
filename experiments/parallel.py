"""The models of an experiment at once: processes of their own on every GPU, so that some train while others compile.

    python -m experiments.parallel mqar --grid full --minutes 25
    python -m experiments.parallel language_model --grid full --each 2 --models kda mamba2 transformer

The experiment comes first: mqar, language_model or niah. Options are its own, which `python -m experiments.mqar --help`
shows, and those below. Results go to the file that the experiment writes, cell by cell, and the same command, with this
module or without, goes on with what is left, also after Ctrl-C. In the end comes the experiment's table. Numbers are
those of one process; the seconds that are stored hold the waiting for the others.
"""

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tyro

from experiments.store import arguments, as_written, make_folder, run_command

OPTIONS = {"mqar": "Mqar", "language_model": "Language", "niah": "Niah"}
"""By experiment: the class of its options."""

DEVICES = "import jax; print(jax.local_device_count() if jax.default_backend() == 'gpu' else 0)"
"""In a process of its own: this one would keep the GPUs' memory."""

POLL_S = 0.1


@dataclass(frozen=True)
class Parallel:
    """What runs, and how much of it at once; all other options are the experiment's.

    Args:
        experiment: its name.
        each: processes on a GPU (or on the CPU, without one).
        logs: folder for what each process prints.
    """

    experiment: Annotated[Literal["mqar", "language_model", "niah"], tyro.conf.Positional]
    each: int = 3
    logs: str = "runs/parallel"


class Job(NamedTuple):
    """model: that it trains. device: as in `devices`. log: what it prints."""

    model: str
    device: str | None
    log: Path
    process: subprocess.Popen


def main(options: Parallel, words: list[str]) -> None:
    """Trains the models; `words` are the experiment's options.

    Raises:
        ValueError: a bad option, also of the experiment.
        SystemExit: a process failed, or this one was told to stop.
    """
    until = time.perf_counter()
    if options.each < 1:
        raise ValueError(f"each: got {options.each}, want at least 1")
    module = importlib.import_module(f"experiments.{options.experiment}")
    own = tyro.cli(getattr(module, OPTIONS[options.experiment]), args=words)
    grid = module.resolve(own)
    until += 60 * grid.minutes
    logs = Path(options.logs) / options.experiment
    make_folder("logs", logs)
    make_folder("out", Path(own.out))
    # Of the processes, and of this one, which asks JAX for the device's name in the end.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    waiting, free = list(grid.models), devices() * options.each
    running: list[Job] = []
    failed, late = [], list[str]()
    with told_to_stop() as told:
        try:
            while (waiting or running) and not told:
                for job in [job for job in running if job.process.poll() is not None]:
                    running.remove(job)
                    free.append(job.device)
                    failed += [job.model] if job.process.returncode else []
                    print(f"{job.model}: {outcome(job)}", flush=True)
                left = (until - time.perf_counter()) / 60
                if waiting and left <= 0:
                    print(f"no time is left: {', '.join(waiting)}", flush=True)
                    late = waiting.copy()
                    waiting.clear()
                elif waiting and free:
                    model = waiting.pop(0)
                    alone = replace(own, models=(model,), minutes=round(left, 2))
                    command = [sys.executable, "-m", f"experiments.{options.experiment}", *arguments(alone)]
                    running.append(start(model, command, free.pop(0), logs))
                else:
                    time.sleep(POLL_S)
        finally:
            for job in running:
                job.process.terminate()
            for job in running:
                job.process.wait()
    if told:
        print("stopped: the same command goes on", flush=True)
        raise SystemExit(128 + told[0])
    # Nothing is trained: its last lines, of all models. To train again what is stored would leave all of it.
    module.main(replace(own, minutes=0.0, again=False))
    if own.again and late:
        print(f"not trained again: {', '.join(late)}", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def start(model: str, command: list[str], device: str | None, logs: Path) -> Job:
    log = logs / f"{model.replace(':', '_')}.log"
    visible = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
    with log.open("w") as file:
        process = subprocess.Popen(command, env={**os.environ, **visible}, stdout=file, stderr=file)
    return Job(model, device, log, process)


def outcome(job: Job) -> str:
    """Of one that has ended."""
    if job.process.returncode:
        return f"ended with {job.process.returncode}, see {job.log}"
    return (job.log.read_text().splitlines() or [""])[-1]


@contextmanager
def told_to_stop() -> Iterator[list[int]]:
    """The signals that came, Ctrl-C or SIGTERM. As exceptions they could come between a process and its name."""
    told: list[int] = []
    before = {x: signal.signal(x, lambda number, _: told.append(number)) for x in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def devices() -> list[str | None]:
    """What CUDA_VISIBLE_DEVICES is for each GPU; None: no GPU, the CPU.

    Raises:
        ValueError: JAX finds none of what JAX_PLATFORMS names.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    asked = subprocess.run([sys.executable, "-c", DEVICES], check=False, capture_output=True, text=True)
    if asked.returncode:
        reason = (asked.stderr.splitlines() or [""])[-1]
        raise ValueError(f"JAX_PLATFORMS: got {os.environ.get('JAX_PLATFORMS', '')!r}, JAX finds no device ({reason})")
    count = int(asked.stdout)
    if not count:
        return [None]
    return list(given.split(",")) if given else [str(i) for i in range(count)]


def from_words(words: list[str]) -> None:
    """
    Raises:
        ValueError: the first is no experiment; of words before it nobody knows whose they are.
    """
    if not words or words[0] not in (*OPTIONS, "-h", "--help"):
        got = repr(words[0]) if words else "nothing"
        raise ValueError(f"experiment: got {got}, want one of {tuple(OPTIONS)} before all options")
    made: Any = tyro.cli(Parallel, args=words, description=as_written(__doc__), return_unknown_args=True)
    main(*made)


if __name__ == "__main__":
    run_command(from_words, sys.argv[1:])
