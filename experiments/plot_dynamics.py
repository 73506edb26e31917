"""The table and the plot of what experiments/dynamics.py stored.

    python -m experiments.plot_dynamics experiments/results/dynamics_tiny_q_delta_layer1.json

writes the table as .md and the plot as .png beside the file, from the file alone.
"""

from pathlib import Path
from typing import Any

from experiments.style import COLORS, pyplot
from experiments.tables import header, line, number, run_plot, save, write

STYLES = {"written": "-", "erased": "--", "forgotten": ":"}

PANELS = (
    ("What query and key read", "cosine of S q and S k", "tokens"),
    ("Rank of the state", "tokens read", "effective (line), stable (dashed)"),
    ("Spectrum of the last state", "index", "singular value"),
    ("Transitions", "spectral radius", "tokens"),
    ("Change of the state for each key channel", "key channel", "mean norm for each token"),
    ("Pairs that were stored", "age in tokens", "error of reading, relative"),
)
"""Title and axes of the panels below the first row."""

DRIFT = ("drift", "target", "prediction", "forgetting")


def table(result: dict[str, Any]) -> str:
    """The main numbers of each head, in markdown."""
    error = result["retrieval"]["error"]
    titles = ("", *(f"head {h}" for h in range(len(error))))
    lines = [f"{result['rule']}, layer {result['layer']} ({result['model']}), {result['device']}", "", *header(titles)]
    for name, values in _measures(result).items():
        lines.append(line((name, *map(number, values))))
    if "share_within_bound" in result:
        lines += ["", f"Of the residuals after a write {100 * result['share_within_bound']:.1f}% lie within the bound."]
    return "\n".join([*lines, ""])


def _measures(result: dict[str, Any]) -> dict[str, list[float | None]]:
    """By name, a number for each head."""
    found: dict[str, list[float | None]] = {}
    if "residual" in result:
        found["gain beta a of a write, mean"] = result["gain_beta_a"]["mean"]
        found["share of gains inside (0, 2), where writing contracts"] = result["share_of_gains_in_0_2"]
        found |= {f"residual {x} a write, mean": result["residual"][x]["mean"] for x in ("before", "after")}
        found["drift of the residual, mean"] = result["residual"]["drift"]["mean"]
        found |= {f"of that {x}, mean": result["residual"][x]["mean"] for x in DRIFT[1:]}
    found["cosine of S q and S k, mean"] = result["cosine_of_readouts"]["mean"]
    found["spectral radius of transitions, median"] = result["spectral_radius_of_transitions"]["quantile_0.5"]
    for kind in ("effective", "stable"):
        found[f"{kind} rank of the state at the end"] = [row[-1] for row in result["states"][f"{kind}_rank"]]
    errors = result["retrieval"]["error"]
    ages = [0, *(2**i for i in range(20) if 2**i < len(errors[0]))]
    found |= {f"error of reading a pair of age {age}, relative": [row[age] for row in errors] for age in ages}
    return found


def plot(result: dict[str, Any], path: Path) -> None:
    """Nine panels, a colour for each head; six of a rule that erases nothing."""
    plt = pyplot()
    erases = "residual" in result
    figure, axes = plt.subplots(2 + erases, 3, figsize=(15, 8 + 4 * erases), layout="constrained")
    if erases:
        _plot_track(axes[0], result)
        axes, track = axes[1:], axes[0]
    else:
        track = ()
    states, errors = result["states"], _array(result["retrieval"]["error"])
    for h in range(len(errors)):
        look: dict[str, Any] = {"color": COLORS[h % len(COLORS)], "label": f"head {h}"}
        _stairs(axes[0, 0], result["cosine_of_readouts"], h, look)
        _stairs(axes[1, 0], result["spectral_radius_of_transitions"], h, look)
        axes[0, 1].plot(states["after_tokens"], states["effective_rank"][h], **look)
        axes[0, 1].plot(states["after_tokens"], states["stable_rank"][h], color=look["color"], linestyle="--")
        spectrum = states["last_singular_values"][h]
        axes[0, 2].plot(range(1, len(spectrum) + 1), spectrum, marker="o", markersize=3, **look)
        for part, style in STYLES.items():
            x = result["activity_per_key_channel"].get(f"key_{part}")
            if x is not None:
                axes[1, 1].plot(x[h], style, color=look["color"], label=f"{part}, head {h}")
        axes[1, 2].plot(errors[h], **look)
    for ax, (title, x, y) in zip(axes.flat, PANELS, strict=True):
        ax.set(title=title, xlabel=x, ylabel=y)
    for ax in (axes[0, 0], axes[0, 2], axes[1, 1]):
        ax.set_yscale("log")
    # Nearly all tokens are in few bins; without the logarithm the others have no height.
    axes[0, 0].set_ylim(bottom=0.7)
    _make_room(axes[1, 1], 0.35)
    axes[1, 2].axhline(1, color="#666666", linestyle=":", label="nothing read")
    # The legend stands above that line.
    axes[1, 2].set_ylim(0, max(1.5, axes[1, 2].get_ylim()[1]))
    wide = (axes[1, 1], *track[2:])
    for ax in (*track, *axes.flat):
        ax.legend(fontsize=8, ncols=len(errors) if ax in wide and len(errors) < 4 else 1)
    remark = "" if erases else ", which erases nothing"
    figure.suptitle(f"The memory of {result['rule']}{remark}, layer {result['layer']} ({result['model']})")
    save(figure, path, dpi=90)
    plt.close(figure)


def _plot_track(axes: Any, result: dict[str, Any]) -> None:
    """Gains, drift and its parts, and the residual against its bound."""
    heads = len(result["gain_beta_a"]["mean"])
    for h in range(heads):
        look: dict[str, Any] = {"color": COLORS[h % len(COLORS)], "label": f"head {h}"}
        _stairs(axes[0], result["gain_beta_a"], h, look)
        means = [result["residual"][name]["mean"][h] for name in DRIFT]
        places = [x + (h - (heads - 1) / 2) * 0.8 / heads for x in range(len(DRIFT))]
        axes[1].bar(places, means, 0.8 / heads, **look)
        for name, style in (("before", ":"), ("after", "-"), ("bound", "--")):
            x = _array(result["first_row"][name][h])
            x[~(x > 0)] = float("nan")
            axes[2].plot(x, style, linewidth=0.9, color=look["color"], label=f"{name}, head {h}")
    low, high = result["gain_beta_a"]["bins_from_to"]
    axes[0].axvspan(0, 2, color="#DDDDDD", alpha=0.5, label="contracts", zorder=0)
    axes[0].set_xlim(min(-0.1, low), max(2.1, high))
    axes[0].set(title="Gain of a write", xlabel="beta a = k . e", ylabel="tokens")
    axes[1].set_xticks(range(len(DRIFT)), DRIFT)
    axes[1].set(title="Drift of the residual and its parts", ylabel="mean norm")
    axes[2].set(yscale="log", xlabel="token", ylabel="norm (first row)")
    axes[2].set(title="Residual before and after a write, and its bound")
    _make_room(axes[2], 0.3)


def _stairs(ax: Any, measured: dict[str, Any], head: int, look: dict[str, Any]) -> None:
    """A histogram that `dynamics.histogram` counted."""
    (low, high), counts = measured["bins_from_to"], measured["tokens_in_bins"][head]
    edges = [low + (high - low) * i / len(counts) for i in range(len(counts) + 1)]
    ax.stairs(counts, edges, linewidth=1.4, **look)


def _make_room(ax: Any, share: float) -> None:
    """For a legend above the lines of a logarithmic axis."""
    bottom, top = ax.get_ylim()
    ax.set_ylim(bottom, top * (top / bottom) ** share)


def _array(x: Any) -> Any:
    """Of numbers, with NaN for the None of JSON."""
    import numpy as np

    return np.array(x, float)


def main(path: Path) -> None:
    write(path, "dynamics", table, plot)


if __name__ == "__main__":
    run_plot(main)
