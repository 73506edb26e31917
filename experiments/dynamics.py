"""What does a layer's memory do while it reads? Every diagnostic of `qdelta_jax.dynamics`, as numbers and a figure.

    python -m experiments.dynamics                              a tiny q_delta model, trained for seconds
    python -m experiments.dynamics --run runs/demo --layer 1    the model of `python -m experiments.demo`
    python -m experiments.dynamics --rule kda --steps 0         another rule, not trained

The batch is held-out text. Numbers go to DIR/NAME.json and the figure to DIR/NAME.png in less than a minute.
"""

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jax import Array

from experiments.store import make_header
from experiments.style import COLORS, pyplot
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

PARTS = {"written": "-", "erased": "--", "forgotten": ":"}

PANELS = (
    ("What query and key read", "cosine of S q and S k", "tokens"),
    ("Rank of the state", "tokens read", "effective (line), stable (dashed)"),
    ("Spectrum of the last state", "index", "singular value"),
    ("Transitions", "spectral radius", "tokens"),
    ("Change of the state for each key channel", "key channel", "mean norm for each token"),
    ("Pairs that were stored", "age in tokens", "error of reading, relative"),
)
"""Title and axes of the panels below the first row."""


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
        **{"jax": jax.__version__, "rule": rule, "layer": layer, "model": source},
        "batch": {"rows": options.rows, "length": options.length, "tokens": int((segment_ids != 0).sum())},
        **summary(measured, segment_ids, options),
    }
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    text, figure = folder / f"{name}.json", folder / f"{name}.png"
    text.write_text(json.dumps(result, indent=1) + "\n")
    plot(measured, np.asarray(segment_ids != 0), result, figure)
    print(report(result))
    print(f"{text}\n{figure}")
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
    """What is stored: means and quantiles over tokens, curves over chunks and ages, per head."""
    valid = np.asarray(segment_ids != 0)
    track = measured["track"]
    found: dict[str, Any] = {}
    if track is not None:
        counted = track["counted"]
        found["gain_beta_a"] = spread(track["gain"], counted)
        found["share_of_gains_in_0_2"] = numbers(measured["share"])
        names = ("before", "after", "drift", "target", "prediction", "forgetting", "bound")
        found["residual"] = {name: spread(track[name], counted) for name in names}
        within = track["after"] <= track["bound"] * (1 + 1e-4) + 1e-5
        found["share_within_bound"] = float(within[counted].mean())
    found["cosine_of_readouts"] = spread(measured["cosine"], valid)
    found["spectral_radius_of_transitions"] = spread(measured["radius"], valid)
    ends = np.minimum(np.arange(1, len(measured["rank"]) + 1) * options.chunk_size, valid.shape[1])
    found["states"] = {
        "after_tokens": ends.tolist(),
        "effective_rank": numbers(measured["rank"].mean(1).T),
        "stable_rank": numbers(measured["stable_rank"].mean(1).T),
        "last_singular_values": numbers(measured["singular_values"].mean(0)),
    }
    activity = {name: x for name, x in measured["activity"].items() if x is not None}
    found["activity_per_token"] = {name: numbers(x.mean(0).mean(-1)) for name, x in activity.items()}
    found["gates"] = {
        name: {part: numbers(x.mean(-1) if x.ndim == 2 else x) for part, x in of.items()}
        for name, of in measured["gates"].items()
    }
    ages = [a for a in (2**i for i in range(20)) if a < options.max_age]
    kept = [0, *ages]
    retrieval = {name: pooled(measured["retrieval"], name) for name in ("error", "cosine")}
    found["retrieval"] = {"age": kept, **{name: numbers(x[:, kept]) for name, x in retrieval.items()}}
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


def numbers(x: Any) -> Any:
    """Nested lists of four digits; None for what JSON does not have."""
    if np.ndim(x):
        return [numbers(y) for y in x]
    return float(f"{float(x):.4g}") if np.isfinite(x) else None


def report(result: dict[str, Any]) -> str:
    """The main numbers of each head, in lines."""
    lines = [f"{result['rule']}, layer {result['layer']} ({result['model']}), a number for each head:"]
    if "residual" in result:
        lines += [
            f"  beta a, mean                {result['gain_beta_a']['mean']}",
            f"  share inside (0, 2)         {result['share_of_gains_in_0_2']}",
            f"  drift, mean                 {result['residual']['drift']['mean']}",
            f"  residual before a write     {result['residual']['before']['mean']}",
            f"  residual after it           {result['residual']['after']['mean']}",
        ]
    lines += [
        f"  cosine of S q and S k       {result['cosine_of_readouts']['mean']}",
        f"  spectral radius, median     {result['spectral_radius_of_transitions']['quantile_0.5']}",
        f"  effective rank at the end   {[row[-1] for row in result['states']['effective_rank']]}",
        f"  retrieval error at age 0    {[row[0] for row in result['retrieval']['error']]}",
    ]
    return "\n".join(lines)


def plot(measured: dict[str, Any], valid: Any, result: dict[str, Any], path: Path) -> None:
    """Nine panels, a colour for each head."""
    plt = pyplot()
    figure, axes = plt.subplots(3, 3, figsize=(15, 11.5), layout="constrained")
    track, heads = measured["track"], measured["cosine"].shape[-1]
    if track is None:
        for ax in axes[0]:
            ax.text(0.5, 0.5, f"{result['rule']} erases nothing", ha="center", transform=ax.transAxes)
            ax.set_axis_off()
    else:
        plot_track(axes[0], track)
    ends = result["states"]["after_tokens"]
    ages = pooled(measured["retrieval"], "error")
    for h in range(heads):
        look: dict[str, Any] = {"color": COLORS[h % len(COLORS)], "label": f"head {h}"}
        axes[1, 0].hist(measured["cosine"][..., h][valid], bins=np.linspace(-1, 1, 61), histtype="step", **look)
        axes[1, 1].plot(ends, measured["rank"].mean(1)[:, h], **look)
        axes[1, 1].plot(ends, measured["stable_rank"].mean(1)[:, h], color=look["color"], linestyle="--")
        spectrum = measured["singular_values"].mean(0)[h]
        axes[1, 2].plot(np.arange(1, len(spectrum) + 1), spectrum, marker="o", markersize=3, **look)
        axes[2, 0].hist(measured["radius"][..., h][valid], bins=60, histtype="step", **look)
        for part, style in PARTS.items():
            x = measured["activity"][f"key_{part}"]
            if x is not None:
                label = f"{part}, head {h}"
                axes[2, 1].plot(np.arange(x.shape[-1]), x.mean(0)[h], style, color=look["color"], label=label)
        axes[2, 2].plot(np.arange(ages.shape[1]), ages[h], **look)
    for ax, (title, x, y) in zip(axes[1:].flat, PANELS, strict=True):
        ax.set(title=title, xlabel=x, ylabel=y)
    axes[1, 2].set_yscale("log")
    axes[2, 1].set_yscale("log")
    bottom, top = axes[2, 1].get_ylim()
    axes[2, 1].set_ylim(bottom, top * (top / bottom) ** 0.25)
    axes[2, 2].axhline(1, color="#666666", linestyle=":", label="nothing read")
    for ax in axes.flat:
        if ax.has_data():
            ax.grid(alpha=0.3)
            ax.legend(fontsize=7, ncols=2 if ax is axes[2, 1] else 1)
    figure.suptitle(f"The memory of {result['rule']}, layer {result['layer']} ({result['model']})")
    figure.savefig(path, dpi=75)
    plt.close(figure)


def plot_track(axes: Any, track: dict[str, Any]) -> None:
    """Gains, drift and its parts, and the residual against its bound."""
    counted, heads = track["counted"], track["gain"].shape[-1]
    names = ("drift", "target", "prediction", "forgetting")
    for h in range(heads):
        look: dict[str, Any] = {"color": COLORS[h % len(COLORS)], "label": f"head {h}"}
        axes[0].hist(track["gain"][..., h][counted[..., h]], bins=60, histtype="step", **look)
        means = [track[name][..., h][counted[..., h]].mean() for name in names]
        axes[1].bar(np.arange(4) + (h - (heads - 1) / 2) * 0.8 / heads, means, 0.8 / heads, **look)
        for name, style in (("before", ":"), ("after", "-"), ("bound", "--")):
            x = np.where(counted[0, :, h], track[name][0, :, h], np.nan)
            x = np.where(np.isfinite(x) & (x > 0), x, np.nan)
            axes[2].plot(x, style, linewidth=0.9, color=look["color"], label=f"{name}, head {h}")
    axes[0].axvspan(0, 2, color="#DDDDDD", alpha=0.5, label="contracts")
    axes[0].set_xlim(min(-0.1, track["gain"].min()), max(2.1, track["gain"].max()))
    axes[0].set(title="Gain of a write", xlabel="beta a = k . e", ylabel="tokens")
    axes[1].set_xticks(np.arange(4), ["drift", "target", "prediction", "forgetting"])
    axes[1].set(title="Drift of the residual and its parts", ylabel="mean norm")
    axes[2].set_yscale("log")
    axes[2].set(title="Residual before and after a write, and its bound", xlabel="token", ylabel="norm (first row)")


if __name__ == "__main__":
    try:
        main(tyro.cli(Dynamics, description=__doc__))
    except ValueError as error:
        raise SystemExit(f"ValueError: {error}") from error
