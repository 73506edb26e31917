"""Numbers on disk, and what held-out loss means."""

import json
import math

import pytest

from qdelta_jax.training.metrics import MetricsWriter, ProgressBar, held_out_metrics, read_metrics


def write(directory, steps, after=0, value=1.0, tensorboard=False):
    writer = MetricsWriter(directory, after=after, tensorboard=tensorboard)
    for step in steps:
        writer.write(step, {"loss": value})
    writer.close()


def test_records_are_appended_and_never_twice(tmp_path):
    write(tmp_path, range(1, 8), value=1.0)
    write(tmp_path, range(6, 11), after=5, value=2.0)
    records = read_metrics(tmp_path)
    assert [r["step"] for r in records] == list(range(1, 11))
    assert [r["loss"] for r in records] == [1.0] * 5 + [2.0] * 5
    assert not (tmp_path / "metrics.tmp").exists()


def test_a_new_run_starts_an_empty_file(tmp_path):
    write(tmp_path, range(1, 5))
    write(tmp_path, [1])
    assert [r["step"] for r in read_metrics(tmp_path)] == [1]


def test_a_torn_last_line_is_dropped(tmp_path):
    write(tmp_path, [1, 2])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "los')
    write(tmp_path, [3], after=2)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path):
    write(tmp_path, [1], value=math.nan)
    write(tmp_path, [2], after=1, value=math.inf)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert [r["loss"] for r in read_metrics(tmp_path)] == [None, None]


def test_tensorboard_gets_the_same_numbers(tmp_path):
    write(tmp_path, [1, 2], tensorboard=True)
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert content.count(b"loss") == 2


def test_held_out_numbers():
    # A uniform guess over 256 bytes: 8 bits a byte, perplexity 256; 10 tokens of 2 bytes each: 4 bits a byte.
    nats = 10 * math.log(256)
    assert held_out_metrics(nats, 10.0, 10) == pytest.approx(
        {"held_out/loss": math.log(256), "held_out/perplexity": 256, "held_out/bits_per_byte": 8}
    )
    assert held_out_metrics(nats, 10.0, 20)["held_out/bits_per_byte"] == pytest.approx(4)
    assert "held_out/bits_per_byte" not in held_out_metrics(nats, 10.0, 0)
    assert held_out_metrics(1e6, 1.0, 1)["held_out/perplexity"] == math.inf
    assert math.isnan(held_out_metrics(math.nan, 1.0, 1)["held_out/perplexity"])


def test_progress_bar_shows_loss_speed_and_time_left(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with ProgressBar(10, 2, shown=True) as bar:
        bar.update(4, "loss 1.234  5,678 tokens/s")
        bar.say("a line")
    shown = capsys.readouterr().err
    for part in ("4/10", "loss 1.234", "5,678 tokens/s", "left", "a line"):
        assert part in shown, shown
