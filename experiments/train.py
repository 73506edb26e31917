"""Trains a language model on any text.

    python -m experiments.train                                      the text that ships with the library
    python -m experiments.train --data.files book.txt --run.directory runs/book
    python -m experiments.train --size q_delta_340m --model.vocab-size 32000 --data.files corpus.jsonl \\
        --data.vocabulary tokenizer.json --data.sequence-length 4096 --mesh.data 1 --mesh.fsdp -1

--size NAME takes a model from `qdelta_jax.models.sizes.SIZES`; the --model options change it. Started again,
the same command continues from its last checkpoint; Ctrl-C saves one.
"""

import argparse
import sys
from collections.abc import Sequence

import tyro

from qdelta_jax.models.sizes import SIZES, named
from qdelta_jax.training import TrainConfig, TrainResult, train


def main(arguments: Sequence[str] | None = None) -> TrainResult:
    """Reads the command line and trains.

    Raises:
        SystemExit: an option that does not exist or does not fit, with the reason.
    """
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    before.add_argument("--size", choices=sorted(SIZES))
    chosen, rest = before.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    default = TrainConfig(model=named(chosen.size)) if chosen.size else TrainConfig()
    description = f"{__doc__}\n\n--size NAME: one of {', '.join(sorted(SIZES))}."
    config = tyro.cli(
        TrainConfig, prog="python -m experiments.train", args=rest, default=default, description=description
    )
    try:
        result = train(config)
    except (ValueError, FloatingPointError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    print(f"step {result.step}, everything in {result.directory}")
    return result


if __name__ == "__main__":
    main()
