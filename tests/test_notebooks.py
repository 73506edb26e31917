"""The notebooks run, show what they say, and their two files are one: quick sizes, in this process."""

import json
import runpy
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jupytext
import matplotlib
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
NAMES = (
    "one_equation_many_memories",
    "what_the_gates_do",
    "query_feedback",
    "interference_and_recall",
    "training_to_a_retrieval_curve",
    "vmap_over_gate_variants",
)
FIGURES = dict(zip(NAMES, (4, 4, 4, 5, 3, 2), strict=True))


@cache
def run(name: str) -> SimpleNamespace:
    """The names that a notebook leaves behind, and what is written on each axes of its figures."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.close("all")
    before = list(sys.path)
    with pytest.MonkeyPatch.context() as patch, matplotlib.rc_context():
        patch.setenv("QDELTA_QUICK", "1")
        patch.chdir(FOLDER)  # as in Jupyter
        left = runpy.run_path(str(FOLDER / f"{name}.py"))
        figures = [plt.figure(number) for number in plt.get_fignums()]
        left["figures"] = [
            [(ax.get_title(), ax.get_xlabel(), ax.get_ylabel()) for ax in figure.axes if ax.get_label() != "<colorbar>"]
            for figure in figures
        ]
    sys.path[:] = before
    plt.close("all")
    return SimpleNamespace(**left)


def test_all_of_them_are_here():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(NAMES) == {path.stem for path in FOLDER.glob("*.ipynb")}
    assert all(f"`{name}`" in (FOLDER / "README.md").read_text() for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_its_figures_say_what_they_show(name):
    figures = run(name).figures
    assert len(figures) == FIGURES[name]
    for axes in figures:
        assert all(title for title, _, _ in axes)
        # Inner ones of a grid leave it to those at the edge.
        assert any(x for _, x, _ in axes)
        assert any(y for _, _, y in axes)


@pytest.mark.parametrize("name", NAMES)
def test_its_two_files_are_one_without_outputs(name):
    stored = json.loads((FOLDER / f"{name}.ipynb").read_text())
    for cell in stored["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"] == [] and cell["execution_count"] is None)
    assert stored["metadata"]["kernelspec"] == {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = jupytext.read(FOLDER / f"{name}.py")
    wanted = [(cell.cell_type, cell.source) for cell in made.cells]
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in stored["cells"]] == wanted


def test_one_equation_many_memories():
    seen = run("one_equation_many_memories")
    assert seen.step_error < 1e-6
    assert 0 < max(seen.difference.values()) < 1e-5  # the scan and the chunks
    assert max(seen.collapses.values()) < 1e-5
    # Only rules that erase get rid of what was there.
    erasing = {"delta_net", "gated_delta_net", "kda", "gated_delta_net2", "q_delta", "q_delta2"}
    assert {rule for rule, left in seen.left.items() if left < 0.05} == erasing
    assert seen.left["linear_attention"] == pytest.approx(1)


def test_what_the_gates_do():
    seen = run("what_the_gates_do")
    assert seen.sum_error < 1e-6
    np.testing.assert_allclose(seen.kept, 1 - np.array(seen.ERASE)[:, None] * np.ones((1, 4)), atol=1e-6)
    np.testing.assert_allclose(seen.taken, np.ones((4, 1)) * np.array(seen.WRITE)[None], atol=1e-6)
    assert seen.rows["forgotten"][[1, 3]].max() == 0 < seen.rows["forgotten"][[0, 2]].min()
    assert seen.rows["erased"].min() > 0
    assert seen.columns[8:].max() == 0 < seen.columns[:8].min()
    expected = [np.exp(-3.2), 0.25, 0.25 * np.exp(-3.2), 1]
    np.testing.assert_allclose(seen.curves["axes"][-1], expected, rtol=1e-4)


def test_query_feedback():
    seen = run("query_feedback")
    assert max(seen.stored_error, seen.target_error) < 1e-6
    assert seen.lemma_error < 1e-4
    assert np.all(seen.ratio[seen.inside] < 1)
    assert np.all(seen.ratio[~seen.inside] >= 1)
    assert seen.slack.min() > -1e-4
    np.testing.assert_allclose(seen.cosines[1.0], 1, atol=1e-5)
    assert np.abs(seen.cosines[0.0].mean()) < 0.3


def test_interference_and_recall():
    seen = run("interference_and_recall")
    orthogonal = {rule: seen.mean_error[rule, "orthogonal"] for rule in seen.RULES}
    for rule in ("linear_attention", "delta_net"):
        assert orthogonal[rule][: seen.K].max() < 1e-5
        assert seen.diagonal[rule, "orthogonal"] == pytest.approx(1, abs=1e-5)
    assert seen.by_age["delta_net"][0] < 1e-5 < 0.5 < seen.by_age["linear_attention"][0]
    # Values with each other: the old pair reads the new value in one, and their sum in the other.
    assert orthogonal["delta_net"][-1] > 0.5
    assert orthogonal["linear_attention"][-1] == pytest.approx(1, abs=1e-5)


def test_training_to_a_retrieval_curve():
    seen = run("training_to_a_retrieval_curve")
    assert set(seen.losses) == {(rule, seed) for rule in seen.RULES for seed in seen.SEEDS}
    for curve in seen.losses.values():
        assert np.all(np.isfinite(curve))
        assert curve[0] == pytest.approx(np.log(seen.VOCAB), rel=0.02)  # nothing is known at first
        assert curve[-1] < curve[0] - 0.01
    for (length, _), each in seen.right.items():
        assert each.shape == (len(seen.SEEDS), len(seen.ASKED[length]))
        assert np.all((each >= 0) & (each <= 1))


def test_vmap_over_gate_variants():
    seen = run("vmap_over_gate_variants")
    assert seen.vmap_error < 1e-5
    # The gradient is that of the grid's own values, and each descent begins by going down.
    i = len(seen.betas) // 2
    step = np.float32(1e-2)
    beta, feedback = seen.betas[i], seen.feedbacks[i]
    slope = (seen.loss(beta + step, feedback, seen.stream) - seen.loss(beta - step, feedback, seen.stream)) / (2 * step)
    assert float(slope) == pytest.approx(float(seen.d_beta[i, i]), rel=0.05)
    assert all(seen.errors[:, -1] < seen.errors[:, 0])
    assert np.ptp(np.asarray(seen.learned["erase"])[[2, 3]], axis=1) == pytest.approx(0, abs=1e-6)
    assert np.all(np.ptp(np.asarray(seen.learned["erase"])[[0, 1]], axis=1) > 1e-6)
