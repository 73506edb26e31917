"""What does a layer's memory do while it reads? Every diagnostic of `qdelta_jax.dynamics`, as numbers and a figure.

    python -m experiments.dynamics                              a tiny q_delta model, trained for seconds
    python -m experiments.dynamics --run runs/demo --layer 1    the model of `python -m experiments.demo`
    python -m experiments.dynamics --rule kda --steps 0         another rule, not trained

The batch is held-out text. Numbers go to DIR/NAME.json in less than a minute, and from there to a table and a figure
beside it (`python -m experiments.plot_dynamics FILE` makes these again).
"""

import json
import tempfile
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jax import Array

from experiments.plot_dynamics import plot, table
from experiments.store import make_header
from experiments.tables import write
from qdelta_jax import RULES, dynamics
from qdelta_jax.models import LanguageModel, ModelConfig
from qdelta_jax.training import DataConfig, OptimizerConfig, RunConfig, TrainConfig, load_model, train
from qdelta_jax.training.data import held_out_batches
from qdelta_jax.training.documents import load_corpus

CONFIG = TrainConfig(
    model=ModelConfig(
        vocab_size=257,
        width=64,
        layers=2,
        pattern=("rule",) * 2,
        heads=2,
        key_dim=16,
        value_dim=32,
        mlp_hidden=128,
        implementation="xla",
    ),
    data=DataConfig(sequence_length=128, batch_size=8, held_out=0.005, evaluation_length=256),
    optimizer=OptimizerConfig(learning_rate=6e-3, warmup_steps=10, final_fraction=0.1),
    run=RunConfig(steps=60, log_every=60, evaluate_every=10_000, save_every=10_000),
)
"""The tiny model, its text and its training."""

QUANTILES = (0.05, 0.5, 0.95)

BINS = 60
"""Of the histograms."""

SHOWN = 256
"""Tokens of the first row whose residuals are stored one by one."""


@dataclass(frozen=True)
class Dynamics:
    """run: directory of a training run; by default a tiny model is made.

    rule, steps: of the tiny model; 0 steps leave it as initialised.
    layer: whose memory; negative ones count from the end.
    rows, length: of the batch, held-out text.
    chunk_size: tokens between two states that are looked at.
    max_age: of the pairs that are asked for.
    out: where the results go.
    """

    run: str | None = None
    rule: str = "q_delta"
    steps: int = CONFIG.run.steps
    layer: int = -1
    rows: int = 4
    length: int = 256
    chunk_size: int = 16
    max_age: int = 128
    out: str = "experiments/results"

    def __post_init__(self) -> None:
        for name, least in (("steps", 0), ("rows", 1), ("length", 2), ("chunk_size", 1), ("max_age", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: got {getattr(self, name)}, want at least {least}")
        if self.rule not in RULES:
            raise ValueError(f"rule: got {self.rule!r}, want one of {sorted(RULES)}")


def main(options: Dynamics) -> dict[str, Any]:
    model, config, source = make_model(options)
    tokens, segment_ids = make_batch(config, options)
    rule, layer = config.model.rule, options.layer % config.model.layers
    measured = measure(model, tokens, segment_ids, options)
    name = f"dynamics_{Path(options.run).name if options.run else 'tiny'}_{rule}_layer{layer}"
    result = {
        **make_header("dynamics", jax.devices()[0].device_kind, options.out),
        "versions": {"jax": jax.__version__, **{name: version(name) for name in ("jaxlib", "flax", "numpy")}},
        **{"rule": rule, "layer": layer, "model": source, "seed": config.run.seed},
        "options": {"steps": options.steps, "chunk_size": options.chunk_size, "max_age": options.max_age},
        "batch": {"rows": options.rows, "length": options.length, "tokens": int((segment_ids != 0).sum())},
        **summary(measured, segment_ids, options),
    }
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    write(path, "dynamics", table, plot)
    return result


def make_model(options: Dynamics) -> tuple[LanguageModel, TrainConfig, str]:
    """The model, how it was made, and that in words."""
    if options.run is not None:
        model, config, _ = load_model(options.run)
        return model, config, f"checkpoint of {Path(options.run).name}"
    with tempfile.TemporaryDirectory() as folder:
        run = replace(CONFIG.run, directory=folder, steps=max(options.steps, 1))
        config = replace(CONFIG, model=replace(CONFIG.model, rule=options.rule), run=run)
        words = f"width {config.model.width}, {config.model.layers} layers, {options.steps} steps"
        if options.steps == 0:
            return LanguageModel(config.model, rngs=nnx.Rngs(config.run.seed)), config, words
        train(config)
        return load_model(folder)[0], config, words


def make_batch(config: TrainConfig, options: Dynamics) -> tuple[Array, Array]:
    """The first rows of held-out text and their segments."""
    corpus = load_corpus(config.data, config.run.seed, None if options.run is None else Path(options.run))
    batch = next(held_out_batches(corpus.held_out, length=options.length, rows=options.rows))
    return jnp.asarray(batch.tokens), jnp.asarray(batch.segment_ids)


def measure(model: LanguageModel, tokens: Array, segment_ids: Array, options: Dynamics) -> dict[str, Any]:
    """Everything there is to see in one layer, as NumPy arrays; None where the rule erases nothing."""
    q, k, v, gates = dynamics.capture(model, tokens, options.layer, segment_ids=segment_ids)
    call = (q, k, v, model.config.rule, gates)
    packed: dict[str, Any] = {"segment_ids": segment_ids}
    chunks: dict[str, Any] = {**packed, "chunk_size": options.chunk_size}
    try:
        track = dynamics.track(*call, **packed)
    except ValueError as error:
        if "erases nothing" not in str(error):
            raise
        track = None
    made = {
        "track": None if track is None else track._asdict(),
        "share": None if track is None else dynamics.contracting_share(track.gain, segment_ids),
        "cosine": dynamics.readout_cosine(*call, **packed),
        "radius": dynamics.spectral_radius(*call, **packed),
        "rank": dynamics.map_states(dynamics.effective_rank, *call, **chunks),
        "stable_rank": dynamics.map_states(dynamics.stable_rank, *call, **chunks),
        "singular_values": dynamics.map_states(dynamics.singular_values, *call, **chunks)[-1],
        "activity": dynamics.channel_activity(*call, **packed)._asdict(),
        "gates": {name: x._asdict() for name, x in dynamics.gate_statistics(gates, **packed).items()},
        "retrieval": dynamics.retrieval_by_age(*call, **chunks, max_age=options.max_age)._asdict(),
    }
    return jax.tree.map(np.asarray, made)


def summary(measured: dict[str, Any], segment_ids: Array, options: Dynamics) -> dict[str, Any]:
    """What is stored: means, quantiles and histograms over tokens, curves over chunks, channels and ages, per head."""
    valid = np.asarray(segment_ids != 0)
    track = measured["track"]
    found: dict[str, Any] = {}
    if track is not None:
        counted = track["counted"]
        found["gain_beta_a"] = {**spread(track["gain"], counted), **histogram(track["gain"], counted)}
        found["share_of_gains_in_0_2"] = numbers(measured["share"])
        names = ("before", "after", "drift", "target", "prediction", "forgetting", "bound")
        found["residual"] = {name: spread(track[name], counted) for name in names}
        within = track["after"] <= track["bound"] * (1 + 1e-4) + 1e-5
        found["share_within_bound"] = float(within[counted].mean())
        seen = np.where(counted[0], 1.0, np.nan)
        found["first_row"] = {name: numbers((seen * track[name][0])[:SHOWN].T) for name in ("before", "after", "bound")}
    found["cosine_of_readouts"] = {
        **spread(measured["cosine"], valid),
        **histogram(measured["cosine"], valid, (-1.0, 1.0)),
    }
    radius = measured["radius"]
    found["spectral_radius_of_transitions"] = {**spread(radius, valid), **histogram(radius, valid)}
    ends = np.minimum(np.arange(1, len(measured["rank"]) + 1) * options.chunk_size, valid.shape[1])
    found["states"] = {
        "after_tokens": ends.tolist(),
        "effective_rank": numbers(measured["rank"].mean(1).T),
        "stable_rank": numbers(measured["stable_rank"].mean(1).T),
        "last_singular_values": numbers(measured["singular_values"].mean(0)),
    }
    activity = {name: x for name, x in measured["activity"].items() if x is not None}
    found["activity_per_token"] = {name: numbers(x.mean(0).mean(-1)) for name, x in activity.items()}
    keys = {name: x for name, x in activity.items() if name.startswith("key_")}
    found["activity_per_key_channel"] = {name: numbers(x.mean(0)) for name, x in keys.items()}
    found["gates"] = {
        name: {part: numbers(x.mean(-1) if x.ndim == 2 else x) for part, x in of.items()}
        for name, of in measured["gates"].items()
    }
    retrieval = {name: pooled(measured["retrieval"], name) for name in ("error", "cosine")}
    found["retrieval"] = {name: numbers(x) for name, x in retrieval.items()}
    return found


def pooled(retrieval: dict[str, Any], name: str) -> Any:
    """Means over the rows of the batch, each weighing as many pairs as it has: [HV, A]; NaN without pairs."""
    pairs = retrieval["pairs"][:, None]
    total = pairs.sum(0)
    return np.where(total > 0, (retrieval[name] * pairs).sum(0) / np.maximum(total, 1), np.nan)


def spread(x: Any, mask: Any) -> dict[str, Any]:
    """Mean and quantiles of [B, T, HV] over the tokens of the mask, [B, T] or [B, T, HV]."""
    mask = np.broadcast_to(mask[..., None] if mask.ndim == 2 else mask, x.shape)
    heads = [x[..., h][mask[..., h]] for h in range(x.shape[-1])]
    made = {"mean": numbers(np.asarray([np.mean(h) for h in heads]))}
    for level in QUANTILES:
        made[f"quantile_{level}"] = numbers(np.asarray([np.quantile(h, level) for h in heads]))
    return made


def histogram(x: Any, mask: Any, ends: tuple[float, float] | None = None) -> dict[str, Any]:
    """Tokens of the mask in each of equal bins, from end to end of what there is, for each head of [B, T, HV]."""
    mask = np.broadcast_to(mask[..., None] if mask.ndim == 2 else mask, x.shape)
    low, high = ends or (float(x[mask].min()), float(x[mask].max()))
    if high - low < 1e-3:
        # Rules without a decay have one and the same radius everywhere.
        low, high = low - 0.05, high + 0.05
    edges = np.linspace(low, high, BINS + 1)
    # Rounded: a cosine may be a little above 1.
    inside = np.clip(x, low, high)
    counts = [np.histogram(inside[..., h][mask[..., h]], edges)[0].tolist() for h in range(x.shape[-1])]
    return {"bins_from_to": numbers([low, high]), "tokens_in_bins": counts}


def numbers(x: Any) -> Any:
    """Nested lists of four digits; None for what JSON does not have."""
    if np.ndim(x):
        return [numbers(y) for y in x]
    return float(f"{float(x):.4g}") if np.isfinite(x) else None


if __name__ == "__main__":
    try:
        main(tyro.cli(Dynamics, description=__doc__))
    except ValueError as error:
        raise SystemExit(f"ValueError: {error}") from error
