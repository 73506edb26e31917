"""The recall experiment resumes, picks rates, counts states and trains as it says."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from standin import ONE
from tolerances import FLOAT32, assert_close

from experiments import mqar, plot_mqar
from experiments.mqar import GRIDS, Mqar, resolve
from experiments.mqar_models import CONVOLVED, make_config, state_size
from experiments.mqar_models import build as build_model
from experiments.mqar_models import weight as weigh_model
from experiments.mqar_training import PARTS, Plan, Trainer, make_data, make_order
from experiments.plot_mqar import rows
from experiments.sweeps import pick
from experiments.training_models import TRANSFORMER
from experiments.uncertainty import interval
from qdelta_jax import RULES, tasks
from qdelta_jax.training import OptimizerConfig
from qdelta_jax.training.data import Batch
from qdelta_jax.training.optimizer import make_optimizer
from qdelta_jax.training.train_step import Learner, make_mesh, shard_batch

TOY = Mqar(
    models=("delta_net", TRANSFORMER),
    widths=(8,),
    settings=((8, 2),),
    rates=(1e-3, 1e-2, 1e-1),
    seeds=2,
    vocab=16,
    examples=40,
    halvings=0,
    held_out=11,
    tokens=320,
    batch_tokens=32,
    implementation="scan",
)
PLAN = Plan(8, 2, 16, 40, 0, 11, 320, 32, 1, 10.0)


def config_of(model, width=8, vocab=16):
    return make_config(model, width, vocab=vocab, dtype="float32", implementation="scan")


def stub(monkeypatch, score=lambda rate, seed: 1 - abs(np.log10(rate) + 2) / 4 - seed / 100, fails=()):
    """Nothing is trained; returns (model, rate, seed) of what was tried."""
    tried = []

    def run(self, rates, seeds):
        tried.extend((self.model, rate, seed) for rate, seed in zip(rates, seeds, strict=True))
        if set(rates) & set(fails):
            raise RuntimeError("no")
        one = {"losses": [1.0], "seconds": 1.0, "compile_s": 1.0}
        pairs = zip(rates, seeds, strict=True)
        return [{"validation": score(rate, seed), "test": score(rate, seed) + 0.001, **one} for rate, seed in pairs]

    monkeypatch.setattr(Trainer, "run", run)
    return tried


def test_sweep_then_seeds_of_the_picked_rate(tmp_path, monkeypatch, capsys):
    """The rate is picked by another seed and other examples than those that are reported; stored cells stay."""
    tried = stub(monkeypatch)
    options = replace(TOY, out=str(tmp_path))
    result = mqar.main(options)
    runs = [(1e-3, 0), (1e-2, 0), (1e-1, 0), (1e-2, 1), (1e-2, 2)]
    assert tried == [(model, *run) for model in options.models for run in runs]
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text()) == result
    assert "nothing is left" in capsys.readouterr().out
    for row in rows(result):
        assert (row["rate"], row["trials"], row["tests"]) == (1e-2, 3, [pytest.approx(x) for x in (0.991, 0.981)])
        assert row["mean"] == pytest.approx(0.986)
    tried.clear()
    assert mqar.main(options)["cells"] == result["cells"]
    assert not tried
    # More halvings than two pairs have train on nothing else.
    mqar.main(replace(options, models=("delta_net",), halvings=1))
    tried.clear()
    mqar.main(replace(options, models=("delta_net",), halvings=10**9))
    assert not tried
    # A longer list of seeds, other options, other versions.
    mqar.main(replace(options, seeds=3))
    assert tried == [(model, 1e-2, 3) for model in options.models]
    tried.clear()
    mqar.main(replace(options, tokens=640, models=("delta_net",)))
    assert tried == [("delta_net", *run) for run in runs]
    monkeypatch.setattr(mqar, "versions", lambda: {"jax": "another"})
    tried.clear()
    mqar.main(replace(options, models=("delta_net",)))
    assert tried == [("delta_net", *run) for run in runs]


def test_time_ends_and_the_next_run_goes_on(tmp_path, monkeypatch, capsys):
    tried = stub(monkeypatch)
    options = replace(TOY, out=str(tmp_path), models=("delta_net",))
    assert not mqar.main(replace(options, minutes=0.0))["cells"]
    assert "5 runs are left" in capsys.readouterr().out
    mqar.main(replace(options, rates=(1e-3,), seeds=1))
    tried.clear()
    mqar.main(options)
    assert tried == [("delta_net", *run) for run in ((1e-2, 0), (1e-1, 0), (1e-2, 1), (1e-2, 2))]


def test_failures_are_stored_and_runs_go_together(tmp_path, monkeypatch):
    tried = stub(monkeypatch, fails=(1e-2,))
    options = replace(TOY, out=str(tmp_path), models=("delta_net",), together=2)
    result = mqar.main(options)
    # The two that ran together fail together; of what is left the best is picked.
    assert [cell.get("error") for cell in result["cells"]] == ["RuntimeError: no"] * 2 + [None] * 3
    assert tried[3:] == [("delta_net", 1e-1, 1), ("delta_net", 1e-1, 2)]
    assert rows(result)[0]["failed"] == 2
    assert "2 runs failed" in plot_mqar.table(result)
    stub(monkeypatch, fails=TOY.rates)
    result = mqar.main(replace(options, again=True))
    assert not [row for row in rows(result) if row["rate"] == 1e-2]


def test_a_transformer_that_fails_says_so(tmp_path, monkeypatch):
    stub(monkeypatch, lambda rate, seed: 0.3)
    with pytest.raises(SystemExit, match=r"the Transformer recalls 30.1% of 2 pairs, want at least 97%"):
        mqar.main(replace(TOY, models=("delta_net", CONVOLVED), out=str(tmp_path)))
    assert len(list(tmp_path.iterdir())) == 1
    mqar.main(replace(TOY, out=str(tmp_path / "plain")))
    # In a file that holds it, one model alone is not judged by it.
    for alone in ("delta_net", CONVOLVED):
        mqar.main(replace(TOY, models=(alone,), out=str(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": ("no",)}, "models: got 'no', want one of"),
        ({"widths": (10,)}, "widths: got 10, want a multiple of 4"),
        ({"rates": (0.1, 0.1)}, r"rates: got \(0.1, 0.1\), want one or more, each once"),
        ({"rates": (float("nan"),)}, r"rates: got \(nan,\), want finite numbers above 0"),
        ({"seeds": 0}, "seeds: got 0, want at least 1"),
        ({"vocab": 8}, "vocab_size: got 8, want more than length = 8"),
        ({"settings": ((8, 3),)}, "length: got 8, want an even number of at least 4"),
        ({"halvings": -1}, "halvings: got -1, want 0 or more"),
        (
            {"halvings": 1, "examples": 1, "batch_tokens": 8},
            r"examples: got 1, want at least 2, rows of \[2, 1\] pairs",
        ),
        ({"minutes": float("nan")}, "minutes: got nan, want 0 or more"),
        ({"run_minutes": -1.0}, "run_minutes: got -1.0, want 0 or more"),
        ({"batch_tokens": 30}, "batch_tokens: got 30, want a multiple of the length 8"),
        ({"tokens": 300}, "tokens: got 300, want at least 10"),
    ],
)
def test_bad_options_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        resolve(replace(TOY, **changes))


def test_grids():
    full = GRIDS["full"]
    resolve(Mqar(grid="full", widths=full.widths[:1]))
    assert set(full.models) >= {*RULES, TRANSFORMER, "q_delta+window"}
    assert set(full.settings) > {(64, 4), (128, 8), (256, 16), (512, 64)}  # the usual ones
    assert (full.vocab, full.examples, full.held_out, full.seeds) == (8192, 100_000, 3000, 3)
    # Of the usual 1e-4 to 1e-2 those below had learned least after as many tokens (experiments/LOG.md).
    assert full.rates[0] == 1e-3
    assert full.rates[-1] == 1e-2
    assert resolve(Mqar()) == GRIDS["toy"]


def test_pick_and_interval():
    cells = [{"rate": r, "validation": v} for r, v in ((0.1, 0.9), (0.1, 0.1), (0.2, 0.6), (0.2, 0.6), (0.3, 0.6))]
    assert pick(cells) == 0.2
    assert pick([{"rate": 0.1, "error": "no"}]) is None
    # Student's t of two degrees of freedom at 97.5% is 4.303; the standard deviation of these is 0.01.
    assert interval([0.89, 0.9, 0.91]) == pytest.approx(
        (0.9 - 4.3027 * 0.01 / 3**0.5, 0.9 + 4.3027 * 0.01 / 3**0.5), 1e-5
    )
    assert interval([1.0, 1.0, 1.0], high=1.0) == (1.0, 1.0)
    assert interval([0.5, 1.0], low=0.0)[0] == 0.0
    assert interval([0.5]) is None


def test_states_by_hand():
    """Two heads of 16 x 16 and three tokens of three convolutions; keys and values of every token; half of each."""
    state = 2 * 16 * 16 + 3 * 3 * 32
    for model in RULES:
        assert state_size(config_of(model, 32), 64) == state
    assert state_size(config_of(TRANSFORMER, 32), 64) == 2 * 64 * 32
    hybrid = config_of("q_delta+window", 32)
    assert hybrid.window == state // 64
    assert abs(state_size(hybrid, 64) - state) <= 32
    assert state_size(config_of("q_delta", 512, 8192), 1) == 4 * 128 * 128 + 9 * 512


@pytest.mark.parametrize("width", [24, 64])
def test_blocks_weigh_the_same(width):
    wanted = weigh_model("q_delta", config_of("q_delta", width))[1]
    for model in (*RULES, TRANSFORMER, CONVOLVED, "kda+window"):
        total, blocks = weigh_model(model, config_of(model, width))
        assert abs(blocks - wanted) <= 3 * 8 * width
        assert total == blocks + 16 * width + width


def test_every_example_once_an_epoch():
    plan = replace(PLAN, tokens=640, examples=43)
    order = make_order(plan, 3)
    assert order.shape == (plan.steps, 4) == (20, 4)
    assert len(np.unique(order[:10])) == len(np.unique(order[10:])) == 40
    assert not np.array_equal(order[:10], order[10:])
    assert not np.array_equal(order, make_order(plan, 4))
    train, validation, test = make_data(plan)
    assert [len(x.inputs) for x in (train, validation, test)] == [43, 11, 11]
    assert not np.array_equal(validation.inputs, test.inputs)
    assert np.array_equal(np.take_along_axis(train.inputs, train.places, 1) >= 8, np.zeros((43, 2), bool))


def test_some_rows_have_fewer_pairs():
    """Half as many, a quarter as many, in equal parts; what else is at their places does not count."""
    plan = replace(PLAN, length=32, pairs=8, vocab=64, halvings=2)
    train, validation, test = make_data(plan)
    counts = np.sum(train.counted, axis=1)
    assert np.unique(counts, return_counts=True)[1].tolist() == [13, 13, 14]
    assert np.unique(counts).tolist() == [2, 4, 8]
    assert np.all(validation.counted)
    assert np.all(test.counted)
    assert np.all(np.diff(train.places, axis=1) > 0)
    for row in range(plan.examples):
        number = int(counts[row])
        answers = dict(np.asarray(train.inputs[row, : 2 * number]).reshape(number, 2).tolist())
        asked = np.asarray(train.places[row])[np.asarray(train.counted[row])]
        keys = np.asarray(train.inputs[row])[asked].tolist()
        assert sorted(keys) == sorted(answers)
        assert [answers[key] for key in keys] == np.asarray(train.answers[row])[np.asarray(train.counted[row])].tolist()


def test_what_is_not_counted_changes_no_loss():
    plan = replace(PLAN, length=16, pairs=4, vocab=32, halvings=1)
    made = Trainer("delta_net", config_of("delta_net", vocab=32), plan)
    state, train = jax.jit(made._init)(jnp.int32(0)), make_data(plan)[0]
    batch = jax.tree.map(lambda x: x[18:22], train)
    assert 0 < np.sum(~batch.counted) < batch.counted.size
    loss = jax.jit(made.loss)
    changed = batch._replace(answers=jnp.where(batch.counted, batch.answers, 1))
    want = loss(state.params, state.constants, batch)
    assert float(loss(state.params, state.constants, changed)) == float(want)
    counts = np.sum(batch.counted, axis=1)
    rows = [jax.tree.map(lambda x, i=i: x[i : i + 1], batch) for i in range(4)]
    alone = [float(loss(state.params, state.constants, row)) for row in rows]
    assert float(want) == pytest.approx(np.average(alone, weights=counts), rel=FLOAT32)


@pytest.fixture(scope="module")
def trainer():
    return Trainer("delta_net", config_of("delta_net"), PLAN)


def numbers(runs):
    return [(run["validation"], run["test"], run["losses"]) for run in runs]


def test_the_same_seed_gives_the_same_numbers(trainer):
    first = numbers(trainer.run([0.01], [1]))
    assert len(first[0][2]) == PARTS
    assert all(np.isfinite(first[0][2]))
    assert numbers(trainer.run([0.01], [1])) == first
    assert numbers(trainer.run([0.01], [2])) != first
    faster = numbers(trainer.run([0.02], [1]))
    assert faster != first
    # Together they are what each is alone, but for the order of sums; the last lane repeats.
    three = Trainer("delta_net", config_of("delta_net"), replace(PLAN, together=3))
    both = numbers(three.run([0.01, 0.02], [1, 1]))
    for got, want in zip(both, [*first, *faster], strict=True):
        assert got[2] == pytest.approx(want[2], abs=2e-4)


def test_training_is_that_of_the_library(trainer):
    """The loss at the queries alone is that of a Batch whose weights are the mask; so are the updates of a Learner."""
    examples = tasks.mqar(40, length=8, pairs=2, vocab_size=16, seed=(0, 0))
    order, rate = make_order(PLAN, 5)[:1], 0.01
    mesh = make_mesh(ONE)
    with jax.set_mesh(mesh):
        # A rate of 1 after one step of warm-up times `rate` is `rate`.
        optimizer = make_optimizer(OptimizerConfig(learning_rate=rate, final_fraction=0.0), PLAN.steps)
        learner = Learner(lambda rngs: build_model("delta_net", trainer.config, rngs), optimizer, mesh)
        state, mine = learner.init(5), jax.jit(trainer._init)(jnp.int32(5))
        advance, data = jax.jit(trainer._advance), make_data(PLAN)[0]
        assert_close(mine.params, jax.device_get(state.params), 0.0)
        for _ in range(2):
            batch = Batch(examples.inputs, examples.targets, np.ones_like(examples.inputs), examples.mask)
            batch = shard_batch(jax.tree.map(lambda x: x[order[0]], batch), mesh)
            state, metrics = learner.update(state, batch)
            mine, loss = advance(data, mine, jnp.float32(rate), jnp.asarray(order))
            assert float(loss) == pytest.approx(float(metrics.loss), rel=FLOAT32)
            assert metrics.tokens == 8
        assert_close(jax.device_get(mine.params), jax.device_get(state.params), 1e-3)


def test_right_answers_are_counted(trainer):
    """The last batch is not full, and is not counted twice; as `tasks.accuracy` does from all logits."""
    state, held_out = jax.jit(trainer._init)(jnp.int32(0)), make_data(PLAN)[1]
    examples = tasks.mqar(11, length=8, pairs=2, vocab_size=16, seed=(0, 1))
    model = nnx.merge(trainer.graph, state.params, state.constants)
    want = tasks.accuracy(nnx.jit(lambda model, x: model(x).argmax(-1))(model, held_out.inputs), examples)
    assert int(jax.jit(trainer._score)(held_out, state)) == round(22 * want)


def test_a_run_that_takes_too_long_fails(trainer):
    late = Trainer("delta_net", trainer.config, replace(PLAN, run_minutes=0.0))
    late.__dict__["programs"] = trainer.programs
    with pytest.raises(TimeoutError, match=r"not trained after 0 minutes \(run_minutes\)"):
        late.run([0.01], [0])


def test_table_and_plot(tmp_path, monkeypatch):
    stub(monkeypatch)
    names = ("q_delta", "q_delta+window", CONVOLVED)
    mqar.main(
        replace(
            TOY,
            models=names,
            widths=(8, 16),
            settings=((8, 2), (12, 2)),
            batch_tokens=48,
            tokens=480,
            out=str(tmp_path),
        )
    )
    (path,) = tmp_path.iterdir()
    plot_mqar.main(path)
    lines = path.with_suffix(".md").read_text().splitlines()
    assert len([line for line in lines if line.startswith(("| 8 x 2", "| 12 x 2"))]) == 12
    assert any("| 2 | 0.00048M | 8 | q_delta | 104 |" in line and "| 98.6 | 92.2 to 100.0 |" in line for line in lines)
    assert path.with_suffix(".png").stat().st_size > 10_000
