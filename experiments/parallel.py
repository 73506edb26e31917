"""The models of an experiment at once: processes of their own on every GPU, so that some train while others compile.

    python -m experiments.parallel mqar --grid full --minutes 25
    python -m experiments.parallel language_model --grid full --each 2 --models kda mamba2 transformer

Options are those of the experiment (mqar, language_model or niah), and two more. Results go to the file that the
experiment writes, cell by cell, and the same command, with this module or without, goes on with what is left. Numbers
are those of one process; the seconds that are stored hold the waiting for the others.
"""

import importlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any, Literal

import tyro

from experiments.store import as_written, run_command

OPTIONS = {"mqar": "Mqar", "language_model": "Language", "niah": "Niah"}
"""By experiment: the class of its options."""

DEVICES = "import jax; print(jax.local_device_count() if jax.default_backend() == 'gpu' else 0)"
"""In a process of its own: this one would keep the GPUs' memory."""


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


def main(options: Parallel, arguments: list[str]) -> list[str]:
    """Models whose process failed.

    Raises:
        ValueError: a bad option, also of the experiment.
    """
    began = time.perf_counter()
    if options.each < 1:
        raise ValueError(f"each: got {options.each}, want at least 1")
    module = importlib.import_module(f"experiments.{options.experiment}")
    grid = module.resolve(tyro.cli(getattr(module, OPTIONS[options.experiment]), args=arguments))
    logs = Path(options.logs) / options.experiment
    logs.mkdir(parents=True, exist_ok=True)
    slots: SimpleQueue[str | None] = SimpleQueue()
    found = devices()
    for _ in range(options.each):
        for device in found:
            slots.put(device)

    def trained(model: str) -> bool:
        """Whether its process ended well."""
        device = slots.get()
        try:
            left = grid.minutes - (time.perf_counter() - began) / 60
            if left <= 0:
                say(f"{model}: no time is left")
                return True
            # Of an option that is given twice the last counts.
            own = [*arguments, "--models", model, "--minutes", f"{left:.2f}"]
            environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            if device is not None:
                environment["CUDA_VISIBLE_DEVICES"] = device
            log = logs / f"{model.replace(':', '_')}.log"
            with log.open("w") as file:
                command = [sys.executable, "-m", f"experiments.{options.experiment}", *own]
                code = subprocess.run(command, check=False, env=environment, stdout=file, stderr=file).returncode
            last = (log.read_text().splitlines() or [""])[-1]
            say(f"{model}: {last if not code else f'ended with {code}, see {log}'}")
            return not code
        finally:
            slots.put(device)

    with ThreadPoolExecutor(options.each * len(found)) as pool:
        fine = list(pool.map(trained, grid.models))
    return [model for model, ended_well in zip(grid.models, fine, strict=True) if not ended_well]


def say(text: str) -> None:
    """In one piece: others speak, too."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def devices() -> list[str | None]:
    """What CUDA_VISIBLE_DEVICES is for each GPU; None: no GPU, the CPU."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = int(subprocess.run([sys.executable, "-c", DEVICES], check=True, capture_output=True).stdout)
    if not count:
        return [None]
    return list(given.split(",")) if given else [str(i) for i in range(count)]


def run(options: Parallel, arguments: list[str]) -> None:
    failed = main(options, arguments)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    made: Any = tyro.cli(Parallel, description=as_written(__doc__), return_unknown_args=True)
    run_command(lambda pair: run(*pair), made)
