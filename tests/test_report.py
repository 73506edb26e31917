"""The page of results holds every table with what it comes from, and what is stale or unknown is found."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from experiments import (
    dynamics,
    plot_bench,
    plot_kernels,
    plot_language,
    plot_mqar,
    plot_niah,
    plot_training,
    report,
    tables,
)
from experiments.provenance import config
from experiments.report import ROOT, Report, find_stale, main, make_texts

WHEN = {"date": "2026-01-02", "versions": {"jax": "1.2", "flax": "0.9"}}
KERNEL = {
    **{"rule": "kda", "shape": "1x64x2", "dtype": "bfloat16", "implementation": "mosaic", "chunk_size": 64},
    "residuals": "recompute",
    **{"device_ms": 0.25, "floor_ms": 0.125, "call_ms": 0.5, **WHEN},
}
RECALL = {
    **{"model": "kda", "width": 8, "length": 16, "pairs": 2, "rate": 0.01, "seed": 0, "sweep": True, "source": "aa"},
    **{"options": {"vocab": 64, "tokens": 320}, "config": {"layers": 2, "pattern": ["rule", "window"]}, "state": 128},
    **{"block_parameters": 900, "validation": 0.5, "test": 0.5, **WHEN},
}
STEP = {
    **{"model": "kda", "side": "qdelta_jax", "size": "340m", "family": "kda", "length": 64, "tokens": 128},
    **{"policies": ["none"], "remat": "none", "too_large": [], "packed": False, "implementation": None, "steps": 2},
    **{"conv_implementation": None, "unroll": 1, "residuals": "recompute", "loss_chunk": None, "xla_flags": None},
    **{"tokens_per_s": 2000.0, "utilisation": 0.5, **WHEN},
}
MEASURED = {"mean": [0.5], "quantile_0.5": [0.625], "bins_from_to": [0.0, 1.0], "tokens_in_bins": [[1, 0, 3]]}
RESULTS = {
    "kernels_x": {
        **{"device": "X1", "date": "2026-01-03", "command": "python -m experiments.bench_kernels --out DIR"},
        "cells": [
            KERNEL,
            {**KERNEL, "rule": "gla", "device_ms": 0.375, "date": "2026-01-05", "versions": {"jax": "1.3"}},
        ],
    },
    "training_x": {
        **{"device": "X1", "command": "python -m experiments.bench_training", "peak_flops": 1e15},
        "cells": [STEP, {**STEP, "model": "gla", "error": "out of memory"}],
    },
    "bench_x": {
        **{"device": "cpu", "jax": "1.4", "date": "2026-01-06", "command": "python -m experiments.bench"},
        **{
            "dtype": "float32",
            "chunk_size": 16,
            "torch": {"torch": "2.9", "threads": 1, "naive kda": {"error": "a|b"}},
        },
        "shape": {"batch": 1, "length": 64, "heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 9},
        "rows": [
            {
                **{"rule": "kda", "input_bytes": 2**21, "temporary_bytes": {"64": 2**20, "1024": 2**22}},
                "xla": {"forward_ms": 1.0, "forward_backward_ms": 4.0},
                "scan": {"forward_ms": 2.0, "forward_backward_ms": 10.0},
            }
        ],
    },
    "mqar_x": {
        **{"device": "cpu", "command": "python -m experiments.mqar"},
        "cells": [RECALL, *({**RECALL, "seed": seed, "sweep": False, "test": 0.25 * seed} for seed in (1, 2, 3))],
    },
    "dynamics_x": {
        **{"device": "cpu", "date": "2026-01-07", "rule": "gla", "layer": 1, "model": "small", "seed": 4},
        **{"cosine_of_readouts": MEASURED, "spectral_radius_of_transitions": MEASURED},
        "states": {
            **{"after_tokens": [1, 2], "effective_rank": [[1.0, 1.5]], "stable_rank": [[1.0, 1.25]]},
            "last_singular_values": [[2.0, 1.0]],
        },
        "activity_per_key_channel": {"key_written": [[1.0, 2.0]]},
        "retrieval": {"error": [[0.125, 0.25, None]]},
    },
}
"""Names of files and what they hold; the last one has neither command nor versions."""


def read_page(folder):
    return make_texts(folder, folder / "page.md")[folder / "page.md"]


def section_of(page, heading):
    return page.split(f"## {heading}")[1].split("\n## ")[0]


@pytest.fixture
def folder(tmp_path):
    for name, result in RESULTS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    return tmp_path


def test_every_section_says_where_it_comes_from(folder):
    page = read_page(folder)
    headings = [line[3:] for line in page.splitlines() if line.startswith("## ")]
    assert [heading.split(": ")[1] for heading in headings] == list(RESULTS)
    for name, result in RESULTS.items():
        (heading,) = [heading for heading in headings if heading.endswith(f": {name}")]
        section = section_of(page, heading)
        assert f"](#{report.anchor(heading)})" in page
        assert f"- device: {result['device']}\n" in section
        assert f"](./{name}.json)" in section or f"]({name}.json)" in section
        assert (f"]({name}.png)" in section) == (name != "bench_x")
        assert result.get("command", "command: not stored") in section
    kernels = section_of(page, "GPU kernels")
    assert "- measured: 2026-01-02 to 2026-01-05\n" in kernels
    assert "- versions: 2 sets\n  - 1 of 2: jax 1.2; flax 0.9\n  - 1 of 2: jax 1.3\n" in kernels
    assert "- config: rule kda / gla; shape 1x64x2; dtype bfloat16; implementation mosaic; chunk_size 64\n" in kernels
    assert "- seeds: not stored\n- " in kernels
    assert "| 1x64x2 | kda | bfloat16 | 0.125 | 0.25 |  |  | 2.00 |  |" in kernels
    assert "| mosaic (chunks of 64) | 0.375 | 0.5 | 0.125 | 3.00 |" in kernels
    assert "- measurements: 2, 1 failed\n" in section_of(page, "Training steps")
    assert "| 340m | 128 | kda | qdelta_jax | 2.0 (50%) |" in section_of(page, "Training steps")
    bench = section_of(page, "Chunked solver")
    assert "- versions: jax 1.4; torch 2.9\n" in bench
    assert "HV=4, K=8, V=9, float32, chunks of 16" in bench
    assert "| kda | 1 | 4 | 2 | 10 | 2.50 | 1.0 | 4.0 | 2.0 |" in bench
    assert "| naive kda |  |  | a/b |" in bench
    recall = section_of(page, "Associative recall")
    assert "- versions: jax 1.2; flax 0.9; source aa\n" in recall
    assert "- seeds: 3 (1, 2, 3), and 1 (0) for the sweep\n" in recall
    assert "vocab 64; tokens 320; layers 2; pattern [rule window]\n" in recall
    assert "| 0.01 | 3 | 50.0 | 0.0 to 100.0 |" in recall
    dynamics_ = section_of(page, "Dynamics")
    assert "- versions: not stored\n- seeds: 1 (4)\n" in dynamics_
    assert "| error of reading a pair of age 1, relative | 0.25 |" in dynamics_
    assert "beta a" not in dynamics_


def test_made_again_nothing_changes_and_what_is_stale_is_found(folder, capsys):
    for name in ("training_x", "dynamics_x", "kernels_x"):
        (folder / f"{name}.json").unlink()
    options = Report(str(folder), str(folder.parent / f"{folder.name}_page" / "page.md"))
    page, check = Path(options.out), Report(options.results, options.out, check=True)
    with pytest.raises(
        ValueError,
        match=r"stale: .*page\.md, .*bench_x\.md, .*mqar_x\.md, .*mqar_x\.png; the same command without --check",
    ):
        main(check)
    assert not page.exists()
    main(options)
    capsys.readouterr()
    main(check)
    assert capsys.readouterr().out == "nothing is stale\n"
    assert f"](../{folder.name}/mqar_x.png)" in page.read_text()
    made = {path: path.read_bytes() for path in (page, *folder.iterdir())}
    assert len(made) == 6
    main(options)
    assert {path: path.read_bytes() for path in made} == made
    main(check)
    page.write_text(page.read_text().replace("0.9", "0.8"))
    with pytest.raises(ValueError, match=r"stale: [^,]*page\.md; "):
        main(check)
    main(options)
    # A number that is in the figure alone.
    changed = {**RECALL, "losses": [1.0]}
    (folder / "mqar_x.json").write_text(
        json.dumps({**RESULTS["mqar_x"], "cells": [changed, *RESULTS["mqar_x"]["cells"][1:]]})
    )
    with pytest.raises(ValueError, match=r"stale: [^,]*mqar_x\.png; "):
        main(check)


@pytest.mark.parametrize("name", ["poems_x.json", "mqar_y.png", "bench_x.png", "mqar_x.csv", "mqar_z"])
def test_files_of_no_known_kind_are_refused(folder, name):
    """So is a table or figure that nothing is stored for, or whose kind has none."""
    (folder / name).write_text("{}")
    with pytest.raises(ValueError, match=rf"^{name}: got a file of no known kind, want .* kernels_, training_, bench_"):
        read_page(folder)


def test_a_measurement_in_progress_is_left_alone(folder):
    before = read_page(folder)
    (folder / "mqar_y.tmp").write_text("{")
    assert read_page(folder) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(RESULTS["mqar_x"])[:-40], "got .*line 1 column .*, want JSON"),
        ("[1]", "got a list, want a JSON object"),
        (
            json.dumps({"device": "x", "cells": [{**RECALL, "sweep": False}, 3]}),
            "got TypeError: .*want what `python -m experiments.mqar` stores",
        ),
        (json.dumps({"cells": [RECALL]}), "got no 'device', want what `python -m experiments.mqar` stores"),
    ],
)
def test_a_broken_file_is_named(folder, text, message):
    (folder / "mqar_x.json").write_text(text)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(folder))}/mqar_x.json: {message}"):
        read_page(folder)


def test_settings_are_those_of_their_cells():
    """What all have in common, what each model was tried with, and what is a model's own."""
    cells = [{**RECALL, "rate": rate, "config": {"layers": 2, "heads": heads}} for rate in (2, 1) for heads in range(5)]
    cells += [{**cell, "model": "gla", "config": {"layers": 2, "window": 9}} for cell in cells]
    cells += [{**RECALL, "model": "gla", "rate": 1, "config": {"layers": 2}}]
    assert config(("model", "length", "rate", "config"), cells) == [
        "- config: length 16; layers 2",
        "  - each model: rate 1 / 2",
        "  - kda: heads 0 to 4",
        "  - gla: window 9 / not stored",
    ]
    assert config(("seed",), []) == ["- config: not stored"]


@pytest.mark.parametrize("command", [plot_mqar.main, lambda path: main(Report(str(path.parent), str(path)))])
@pytest.mark.parametrize(
    ("result", "message"),
    [
        (RESULTS["kernels_x"], "got what `python -m experiments.bench_kernels` stores, want what `python -m .*mqar` s"),
        ({"device": "x"}, "got no '(date|rows|cells)', want what `python -m experiments.mqar` stores"),
        (None, "got 'No such file or directory', want a file that can be read"),
    ],
)
def test_a_file_of_another_kind_ends_in_one_line(command, result, message, tmp_path, capsys):
    path = tmp_path / "mqar_x.json"
    if result is None:
        path.symlink_to(tmp_path / "nowhere")
    else:
        path.write_text(json.dumps(result))
    with pytest.raises(SystemExit) as ended:
        tables.in_one_line(command, path)
    assert ended.value.code == 2
    assert re.fullmatch(rf"{re.escape(str(path))}: {message}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize("given", [[], ["--rows"], ["a", "b"]])
def test_a_plot_command_takes_one_file(given, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["x", *given])
    with pytest.raises(SystemExit, match="2"):
        tables.run_plot(print)
    assert "want one FILE.json" in capsys.readouterr().err


def test_what_a_figure_misses_is_named(tmp_path):
    result = {key: x for key, x in RESULTS["dynamics_x"].items() if key != "activity_per_key_channel"}
    (tmp_path / "dynamics_x.json").write_text(json.dumps(result))
    with pytest.raises(ValueError, match=r"/dynamics_x.json: got no 'activity_per_key_channel', want"):
        main(Report(str(tmp_path), str(tmp_path.parent / "x.md")))
    with pytest.raises(ValueError, match=r"results: got .*nowhere, want a folder"):
        main(Report(str(tmp_path / "nowhere")))


def test_the_committed_page_is_what_the_stored_results_say():
    """`python -m experiments.report` makes it so."""
    folder, out = Path(Report.results), Path(Report.out)
    assert not [str(path.relative_to(ROOT)) for path in find_stale(folder, make_texts(folder, out))]


def test_stamps(tmp_path):
    """A figure stays a PNG that can be read."""
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "x.png"
    assert tables.stamp_of(path) is None
    image.new("RGB", (3, 2), "red").save(path)
    assert tables.stamp_of(path) is None
    tables.stamp(path, "some result")
    assert tables.stamp_of(path) == "some result"
    with image.open(path) as found:
        assert found.info["Result"] == "some result"
        assert found.getpixel((2, 1)) == (255, 0, 0)


def test_histograms_of_tokens():
    """Two heads; the token that is masked is counted nowhere; ends belong to their bins."""
    x = np.array([[[0.0, 0.5], [1.0, 1.0], [9.0, 9.0]]])
    found = dynamics.histogram(x, np.array([[True, True, False]]))
    assert found["bins_from_to"] == [0.0, 1.0]
    counts = np.array(found["tokens_in_bins"])
    assert counts.shape == (2, dynamics.BINS)
    assert [list(np.flatnonzero(row)) for row in counts] == [[0, 59], [30, 59]]
    ones = dynamics.histogram(np.ones((1, 4, 1)), np.ones((1, 4), bool))
    assert ones["bins_from_to"] == [0.95, 1.05]
    assert np.sum(ones["tokens_in_bins"]) == 4
    above = dynamics.histogram(np.full((1, 4, 1), 1 + 1e-7), np.ones((1, 4), bool), (-1.0, 1.0))
    assert above["tokens_in_bins"][0][-1] == 4


def test_a_plot_command_makes_what_the_report_makes(folder, tmp_path, capsys):
    plot_mqar.main(folder / "mqar_x.json")
    made = {suffix: (folder / f"mqar_x{suffix}").read_bytes() for suffix in (".md", ".png")}
    assert made[".md"].decode().strip() in capsys.readouterr().out
    for name in RESULTS:
        if name != "mqar_x":
            (folder / f"{name}.json").unlink()
    main(Report(str(folder), str(tmp_path.parent / "other.md")))
    assert {suffix: (folder / f"mqar_x{suffix}").read_bytes() for suffix in (".md", ".png")} == made


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *((module, "cells") for module in (plot_kernels, plot_language, plot_mqar, plot_niah, plot_training)),
        (plot_bench, "rows"),
    ],
)
def test_a_result_without_cells_is_named(module, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = Path("some") / "x.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"device": "x", name: []}))
    monkeypatch.setattr("sys.argv", ["x", str(path)])
    with pytest.raises(SystemExit, match="2"):
        tables.run_plot(module.main)
    assert re.fullmatch(rf"some/x.json: got no {name}, want what `python .*` stores\n", capsys.readouterr().err)
    assert list(path.parent.iterdir()) == [path]


def test_a_number_that_no_figure_can_show_names_the_file(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"device": "x", "peak_flops": 1e15, "cells": [{**STEP, "length": 0}]}))
    with pytest.raises(ValueError, match=r"/x.json: got ZeroDivisionError: .*, want what"):
        plot_training.main(path)


def test_a_plot_command_shows_its_usage(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["folder/plot_mqar.py", "--help"])
    tables.run_plot(plot_mqar.main)
    shown = capsys.readouterr().out
    assert shown.startswith("usage: python -m experiments.plot_mqar FILE.json\n\nThe table and the plot of")
