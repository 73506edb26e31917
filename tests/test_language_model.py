"""The language model experiment: same weight, same tokens, the papers' ablations, sweeps, resuming, verdicts."""

import os
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from standin import ONE, StandIn, batch_of
from tolerances import FLOAT32, assert_close

import qdelta_jax as qd
from experiments import language_model, plot_language
from experiments.language_model import GRIDS, Language, held_out, resolve, training
from experiments.language_models import ABLATIONS, make_config
from experiments.language_training import PARTS, Plan, Runner, plan
from experiments.sweeps import deterministic, pick
from experiments.texts import load_text
from experiments.training_models import count_blocks
from qdelta_jax.layers.gates import Gates, HeadSizes
from qdelta_jax.models import ModelConfig
from qdelta_jax.training import OptimizerConfig
from qdelta_jax.training.optimizer import make_optimizer
from qdelta_jax.training.train_step import Learner, make_mesh

BASE = ModelConfig(
    vocab_size=1, width=32, layers=1, mlp_hidden=88, heads=2, key_dim=16, value_dim=16, attention_heads=2, window=8
)
TOY = Language(models=("gated_delta_net", "kda"), rates=(1e-3, 1e-2), seeds=3, length=16, tokens=640, batch_tokens=32)


@pytest.fixture(autouse=True)
def own_rules():
    """What ablations add to the table of rules goes again."""
    known = dict(qd.RULES)
    yield
    qd.RULES.clear()
    qd.RULES.update(known)


@pytest.mark.parametrize(
    "model", ["kda", "transformer", "transformer+conv", "q_delta+window", "gated_delta_net2:channel_write"]
)
def test_blocks_of_one_weight(model):
    config = make_config(model, BASE)
    # The step of mlp_hidden is gcd(64, 88) = 8.
    assert abs(count_blocks(config) - count_blocks(BASE)) <= 3 * BASE.width * 8 / 2 + 3 * 4 * BASE.width
    assert config.rule == (
        model if ":" in model else model.removesuffix("+window") if "delta" in model else config.rule
    )


def test_ablations_make_the_gates_that_they_say():
    sizes = HeadSizes(width=8, heads=2, value_heads=2, key_dim=4, value_dim=6)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 8)), jnp.float32)

    def gates(model):
        config = make_config(model, BASE)
        doubled = config.allow_negative_eigenvalues
        return Gates(qd.RULES[config.rule], sizes, rngs=nnx.Rngs(0), allow_negative_eigenvalues=doubled)(x)[0]

    plain, query = gates("gated_delta_net2"), gates("q_delta")
    for name, other in (("channel_erase", "write"), ("channel_write", "erase")):
        made = gates(f"gated_delta_net2:{name}")
        assert_close(made[other], np.broadcast_to(plain[other].mean(-1, keepdims=True), plain[other].shape), FLOAT32)
        assert np.ptp(plain[other], axis=-1).min() > 0.01
        kept = "write" if other == "erase" else "erase"
        np.testing.assert_array_equal(made[kept], plain[kept])
    assert_close(gates("gated_delta_net2:erase_to_2")["erase"], 2 * plain["erase"], FLOAT32)
    np.testing.assert_array_equal(gates("gated_delta_net2:erase_to_2")["write"], plain["write"])
    for value in (0.2, 0.5, 0.8, 1.0):
        made = gates(f"q_delta:feedback={value:g}")
        np.testing.assert_array_equal(made["feedback"], np.full((1, 3, 2), value, np.float32))
        np.testing.assert_array_equal(made["beta"], query["beta"])
    assert not np.any(gates("q_delta:no_decay")["log_decay"])
    assert qd.RULES["q_delta:no_decay"].function is qd.RULES["q_delta"].function
    assert len(ABLATIONS) == 8


def test_the_rate_is_an_argument():
    """A run at a rate is what the library's optimizer of that rate makes of the same batches."""
    runs = Plan(length=8, rows=2, steps=PARTS, run_minutes=10.0)
    rng = np.random.default_rng(0)
    data = [batch_of(rng, 2, 8) for _ in range(runs.steps)]
    build = partial(make_standin)
    runner = Runner(build, runs)
    learner = Learner(build, make_optimizer(OptimizerConfig(learning_rate=3e-2), runs.steps), make_mesh(ONE))
    with jax.set_mesh(learner.mesh):
        state = learner.init(5)
        for batch in data:
            state, metrics = learner.update(state, batch)
    found = runner.run(3e-2, 5, iter(data), lambda state: {"params": state.params})
    jax.tree.map(lambda a, b: assert_close(a, b, FLOAT32), found["params"], state.params)
    assert found["losses"][-1] == pytest.approx(float(metrics.loss), abs=1e-3)
    assert len(found["losses"]) == PARTS
    other = runner.run(1e-3, 5, iter(data), lambda state: {"params": state.params})
    assert other["losses"][-1] > found["losses"][-1] + 0.01
    with pytest.raises(TimeoutError, match="not trained after 0 minutes"):
        Runner(build, replace(runs, run_minutes=0.0)).run(3e-2, 5, iter(data), dict)


def make_standin(rngs):
    return StandIn(rngs=rngs)


def test_every_model_sees_the_same_tokens():
    text, runs = load_text("shipped"), plan(length=32, tokens=64 * PARTS, batch_tokens=64, run_minutes=1.0)
    one, again, other = (
        training(text, 1, runs),
        training(text, 1, replace(runs, run_minutes=2.0)),
        training(text, 2, runs),
    )
    assert len(one) == runs.steps == PARTS
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(one, again, strict=True))
    assert not any(np.array_equal(a.tokens, b.tokens) for a, b in zip(one, other, strict=True))
    halves = [
        sum(int((b.segment_ids != 0).sum()) for b in held_out(text, name, 32, 2)) for name in ("validation", "test")
    ]
    assert halves == [text.validation.num_tokens, text.test.num_tokens]
    both = [np.concatenate(part.tokens) for part in (text.train, text.validation, text.test)]
    assert bytes(np.concatenate(both).astype(np.uint8)).decode() == qd.training.documents.sample_text().read_text()


def stub(monkeypatch, score):
    """Nothing is trained; returns (rate, seed) of what was tried."""
    tried = []

    def run(self, rate, seed, data, score_of):
        tried.append((rate, seed))
        loss = score(len(tried), rate, seed)
        bits = {"validation_bits_per_byte": 1.0, "test_bits_per_byte": loss / np.log(2)}
        return {"validation": loss, "test": loss + 0.01, **bits, "losses": [1.0], "seconds": 1.0}

    monkeypatch.setattr(Runner, "run", run)
    return tried


def test_sweep_seeds_and_resume(tmp_path, monkeypatch, capsys):
    tried = stub(monkeypatch, lambda n, rate, seed: 2.0 + rate + 0.01 * seed)
    options = replace(TOY, out=str(tmp_path))
    assert not language_model.main(replace(options, minutes=0.0))["cells"]
    assert "10 runs are left" in capsys.readouterr().out
    result = language_model.main(options)
    # The lowest loss wins.
    assert tried == [(1e-3, 0), (1e-2, 0), (1e-3, 1), (1e-3, 2), (1e-3, 3)] * 2
    assert language_model.main(options)["cells"] == result["cells"]
    assert len(tried) == 10
    (row, _) = plot_language.rows(result)
    assert (row["rate"], row["trials"], list(row["tests"])) == (1e-3, 2, [1, 2, 3])
    assert row["mean"] == pytest.approx(2.031)
    assert row["interval"] == pytest.approx((2.031 - 4.3027 * 0.01 / 3**0.5, 2.031 + 4.3027 * 0.01 / 3**0.5), 1e-4)
    language_model.main(replace(options, tokens=1280, models=("kda",)))
    assert len(tried) == 15


def test_failures_are_left_and_tried_again(tmp_path, monkeypatch, capsys):
    """Of two rates one fails: the other is picked, and the failed one counts as left."""

    def score(n, rate, seed):
        if rate == 1e-3 and n <= 2:
            raise FloatingPointError("NaN")
        return 2.0 + rate

    tried = stub(monkeypatch, score)
    options = replace(TOY, models=("kda",), out=str(tmp_path))
    result = language_model.main(options)
    assert tried == [(1e-3, 0), (1e-2, 0), (1e-2, 1), (1e-2, 2), (1e-2, 3)]
    assert "1 runs are left" in capsys.readouterr().out
    assert "1 runs failed" in plot_language.table(result)
    # The other rate is better, once it works.
    language_model.main(options)
    assert tried[5:] == [(1e-3, 0), (1e-3, 1), (1e-3, 2), (1e-3, 3)]
    assert "nothing is left" in capsys.readouterr().out
    # More rates go on with what is stored.
    result = language_model.main(replace(options, rates=(1e-4, 1e-3, 1e-2)))
    assert tried[9:] == [(1e-4, 0), (1e-4, 1), (1e-4, 2), (1e-4, 3)]
    (row,) = plot_language.rows(result)
    assert (row["trials"], row["rate"], row["edge"]) == (3, 1e-4, True)


def test_verdicts_of_paired_differences(tmp_path, monkeypatch):
    """Between seeds losses differ by 0.1, between models by 0.02: only the pairs tell."""
    models = ("gated_delta_net", "kda", "gated_delta_net2")

    def score(n, rate, seed):
        model = models[(n - 1) // 4]
        return 3.0 + 0.1 * seed + {"kda": 0.02, "gated_delta_net2": 0.001 * (-1) ** seed}.get(model, 0.0)

    stub(monkeypatch, score)
    result = language_model.main(replace(TOY, models=models, rates=(1e-3,), out=str(tmp_path)))
    text = plot_language.table(result)
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}
    assert "+0.0200" in lines["kda"]
    assert lines["gated_delta_net below kda"].endswith("| yes |")
    assert lines["gated_delta_net2 below gated_delta_net"].endswith("| the noise is too large to tell |")
    assert plot_language.lower((0.1, None)) == "too few seeds"
    assert pick(result["cells"], "validation", -1) == 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": ("no",)}, "models: got 'no', want one of"),
        ({"models": ("q_delta:no",)}, "models: got 'q_delta:no', want one of"),
        ({"models": ()}, "models: got"),
        ({"rates": (0.1, 0.1)}, r"rates: got \(0.1, 0.1\), want one or more, each once"),
        ({"seeds": 0}, "seeds: got 0, want at least 1"),
        ({"batch_tokens": 30}, "batch_tokens: got 30, want a multiple of the length 16"),
        ({"tokens": 600}, "tokens: got 600, want at least 20"),
    ],
)
def test_bad_options_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        resolve(replace(TOY, **changes))


def test_the_full_grid_can_take_the_shipped_text():
    grid = resolve(Language("full", models=("kda",), corpus="shipped"))
    assert load_text(grid.corpus).name.startswith("shakespeare ")
    assert resolve(Language("full", models=("kda",))).corpus == "runs/corpus"


def test_a_folder_without_corpus_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"corpus: got .* want 'shipped' or a folder made by"):
        load_text(str(tmp_path))


def test_the_full_grid():
    full = GRIDS["full"]
    assert set(full.models) >= {*qd.RULES, "transformer", *ABLATIONS, "q_delta+window"}
    assert full.seeds >= 3
    assert 30e6 < count_blocks(full.base) + 8192 * full.base.width < 60e6


def test_deterministic_leaves_given_options_alone(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_gpu_enable_triton_gemm=true")
    deterministic()
    deterministic()
    want = ["--xla_a=1", "--xla_gpu_enable_triton_gemm=true", "--xla_gpu_deterministic_ops=true"]
    assert os.environ["XLA_FLAGS"].split() == want
