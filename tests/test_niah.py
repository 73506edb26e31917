"""The needle experiment: what is trained on, what is asked, what counts as an answer, sweeps and verdicts."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import niah, plot_niah
from experiments.language_training import PARTS, Runner
from experiments.niah import GRIDS, TIMES, Niah, resolve
from experiments.niah_data import TEST, VALIDATION, accuracy, answered, needle_rows, prepare, questions, training
from experiments.texts import load_text
from qdelta_jax.tasks import NEEDLE_TASKS

LENGTH = 900
"""Of a row of bytes that holds the longest prompt."""


@pytest.fixture(scope="module")
def text():
    return load_text("shipped")


def documents_of(rows, row):
    """(ids, where its answer begins) of each document of a row, in order."""
    for segment in range(1, rows.segment_ids[row].max() + 1):
        (where,) = np.nonzero(rows.segment_ids[row] == segment)
        np.testing.assert_array_equal(where, np.arange(where[0], where[-1] + 1))
        np.testing.assert_array_equal(rows.tokens[row, where[1:]], rows.targets[row, where[:-1]])
        asked = np.flatnonzero(rows.asked[row, where])
        np.testing.assert_array_equal(asked, np.arange(asked[0], len(where)))
        yield [rows.tokens[row, where[0]], *rows.targets[row, where]], asked[0] + 1


def test_rows_are_documents_with_weights_on_answers(text):
    """As many of each task; each begins and ends with the end of a document; the answer is what is asked for."""
    rows = needle_rows(text, LENGTH, 2)
    assert rows.tokens.shape == (2 * len(NEEDLE_TASKS), LENGTH)
    for row in range(len(rows.tokens)):
        ((ids, begin),) = documents_of(rows, row)
        assert ids[0] == ids[-1] == text.vocabulary.end
        prompt, answer = (text.vocabulary.decode(x) for x in (ids[1:begin], ids[begin:-1]))
        assert prompt.endswith("mentioned in the provided text is")
        assert f"is: {answer.strip()}." in prompt
        padding = rows.segment_ids[row] == 0
        assert not rows.tokens[row, padding].any()
        assert not rows.asked[row, padding].any()
    options = {"length": LENGTH, "rows": 4, "steps": 6, "documents": 2, "halvings": 0, "weight": 7.0}
    made = list(training(text, **options, seed=3))
    again, other = (next(training(text, **options, seed=seed)) for seed in (3, 4))
    np.testing.assert_array_equal(made[0].tokens, again.tokens)
    assert not np.array_equal(made[0].tokens, other.tokens)
    seen = []
    for batch in made:
        assert batch.tokens.shape == (4, LENGTH)
        assert (batch.weights[2:] == 1).all()
        for row in range(2):
            (own,) = [i for i, x in enumerate(rows.tokens) if np.array_equal(x, batch.tokens[row])]
            np.testing.assert_array_equal(batch.weights[row], np.where(rows.asked[own], 7, 1))
            np.testing.assert_array_equal(batch.targets[row], rows.targets[own])
            np.testing.assert_array_equal(batch.segment_ids[row], rows.segment_ids[own])
            seen.append(own)
    # 12 rows of 8: each once before any comes again.
    assert sorted(seen[:8]) == list(range(8))


def test_shorter_documents_share_a_row(text):
    length, tasks = 4 * LENGTH, list(NEEDLE_TASKS)
    rows = needle_rows(text, length, 5, 2)
    all_ids = []
    for row in range(5 * len(tasks)):
        found = list(documents_of(rows, row))
        # Of the five rows of a task the first and fourth hold one, the second and fifth two, the third four.
        assert len(found) == (1, 2, 4, 1, 2)[row // len(tasks)]
        for ids, begin in found:
            size = length // len(found)
            assert size - 200 < len(ids) <= size + 1
            assert f"is: {text.vocabulary.decode(ids[begin:-1]).strip()}." in text.vocabulary.decode(ids[1:begin])
            all_ids.append(tuple(ids))
    assert len(set(all_ids)) == len(all_ids) == 10 * len(tasks)


def test_questions_are_new_and_answers_are_where_they_are_asked(text):
    for task, needle in NEEDLE_TASKS.items():
        asked = questions(text, task, LENGTH, 3, TEST)
        assert asked.inputs.shape == (3, LENGTH - 1)
        other = questions(text, task, LENGTH, 3, VALIDATION)
        for row in range(3):
            prompt = text.vocabulary.decode(asked.inputs[row, 1 : asked.places[row, 0] + 1])
            assert prompt.endswith("mentioned in the provided text is")
            answer = text.vocabulary.decode(asked.answers[row])
            assert f"is: {answer.strip()}." in prompt
            assert len(answer) == (8 if needle.value == "number" else 37)
            known = text.vocabulary.decode(needle_rows(text, LENGTH, 2).tokens.ravel())
            assert answer.strip() not in known
            assert not np.array_equal(asked.answers[row], other.answers[row])
            # But for its last token an answer is among the inputs, behind the place where it is asked.
            np.testing.assert_array_equal(asked.inputs[row, asked.places[row, 1:]], asked.answers[row, :-1])


def fake(asked, wrong=()):
    """A model whose most likely token is the answer's, where it is asked, but in the rows that are wrong."""
    size = 257

    def features(inputs):
        best = np.zeros(inputs.shape, np.int32)
        for row, (where, what) in enumerate(zip(asked.places, asked.answers, strict=True)):
            best[row, where] = what
            best[row, where[-1]] += row in wrong
        return jax.nn.one_hot(jnp.asarray(best), size), None

    return SimpleNamespace(features=features, logits=lambda x: x)


def test_an_answer_counts_if_all_of_it_is_most_likely(text):
    asked = questions(text, "s_niah_1", LENGTH, 3, TEST)
    whole, share = answered(fake(asked), asked)
    assert whole.tolist() == [True] * 3
    assert share.tolist() == [1.0] * 3
    whole, share = answered(fake(asked, wrong=(1,)), asked)
    assert whole.tolist() == [True, False, True]
    tokens = asked.answers.shape[1]
    assert share.tolist() == pytest.approx([1, (tokens - 1) / tokens, 1])
    # Places without an answer don't count.
    short = asked._replace(answers=np.concatenate([asked.answers[:, :-1], np.full((3, 1), -1, np.int32)], axis=1))
    whole, share = answered(fake(asked, wrong=(1,)), short)
    assert (whole.tolist(), share.tolist()) == ([True] * 3, [1.0] * 3)


def test_the_last_rows_are_filled_up_and_not_counted(text):
    asked = questions(text, "s_niah_1", LENGTH, 3, TEST)
    sizes = []

    def first_is_right(some):
        sizes.append(len(some.inputs))
        right = (some.inputs == asked.inputs[0]).all(-1)
        return jnp.asarray(right), jnp.where(right, 1.0, 0.25)

    assert accuracy(first_is_right, asked, 2) == pytest.approx((1 / 3, 0.5))
    assert sizes == [2, 2]


def test_questions_are_made_beforehand(text):
    prepare(text, LENGTH, (1, 2), 2)
    before = questions.cache_info().misses
    for times, seed in ((1, TEST), (2, TEST), (1, VALIDATION)):
        questions(text, "mk_niah_1", times * LENGTH, 2, seed)
    assert questions.cache_info().misses == before


TOY = Niah(
    models=("gated_delta_net", "kda"),
    bpe_size=0,
    rates=(1e-3, 1e-2),
    seeds=2,
    length=LENGTH,
    tokens=2 * LENGTH * PARTS,
    batch_tokens=2 * LENGTH,
    documents=1,
    samples=1,
)


def test_sweep_seeds_resume_and_verdicts(tmp_path, monkeypatch, capsys):
    tried = []

    def run(self, rate, seed, data, score):
        tried.append((rate, seed))
        best = {"validation": 0.5 + rate, "losses": [1.0], "seconds": 1.0}
        level = (0.5 if len(tried) <= 4 else 0.8) + 0.01 * seed
        return {**best, "test": {task: {str(n): level / n for n in TIMES} for task in NEEDLE_TASKS}}

    monkeypatch.setattr(Runner, "run", run)
    monkeypatch.setattr(niah, "prepare", lambda *_: None)
    monkeypatch.setattr(niah, "needle_rows", lambda *_: None)
    options = replace(TOY, out=str(tmp_path))
    result = niah.main(options)
    assert tried == [(1e-3, 0), (1e-2, 0), (1e-2, 1), (1e-2, 2)] * 2
    assert "nothing is left" in capsys.readouterr().out
    assert niah.main(options)["cells"] == result["cells"]
    assert len(tried) == 8
    lines = plot_niah.table(result).splitlines()
    (row,) = [line for line in lines if line.startswith("| S-NIAH-3 | kda")]
    assert [cell.split(" (")[0] for cell in row.split(" | ")[-5:-1]] == ["81.5", "40.8", "20.4", "10.2"]
    assert row.endswith("| best rate at the edge of those tried |")
    (verdict,) = [line for line in lines if line.startswith("| kda above gated_delta_net")]
    assert verdict.split(" | ")[2:] == ["+14.1", "+14.1 to +14.1", "yes |"]


def test_lengths_without_room_end_the_run_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(Runner, "run", lambda *_: pytest.fail("trained"))
    short = {"length": 300, "batch_tokens": 600, "tokens": 600 * PARTS}
    with pytest.raises(ValueError, match="length: got 299, want at least"):
        niah.main(replace(TOY, **short, models=("kda",), out=str(tmp_path)))
    with pytest.raises(ValueError, match=r"length 900, halvings 3: documents of 112 tokens are too short \(length"):
        needle_rows(load_text("shipped"), LENGTH, 8, 3)


def test_a_long_transformer_has_no_convolutions():
    with pytest.raises(ValueError, match=r"models: got 'transformer\+conv' of 10 layers, want 'transformer'"):
        resolve(Niah(grid="full", models=("transformer+conv",)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": ("no",)}, "models: got 'no', want one of"),
        ({"models": ("no+window",)}, r"models: got 'no\+window'"),
        ({"rates": (0.0,)}, r"rates: got \(0.0,\), want finite numbers above 0"),
        ({"rates": (float("nan"),)}, r"rates: got \(nan,\), want finite"),
        ({"answer_weight": float("inf")}, "answer_weight: got inf, want a finite number above 0"),
        ({"samples": 0}, "samples: got 0, want at least 1"),
        ({"halvings": -1}, "halvings: got -1, want 0 or more"),
        ({"halvings": 10}, "halvings: got 10, want 0 or more, of a length of 900"),
        ({"answer_weight": 0.0}, "answer_weight: got 0.0, want a finite number above 0"),
        ({"rates": ()}, r"rates: got \(\), want one or more"),
        ({"batch_tokens": 3 * LENGTH, "tokens": 3 * LENGTH * PARTS}, "want an even number of rows of 900"),
    ],
)
def test_bad_options_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        resolve(replace(TOY, **changes))


def test_the_full_grid():
    full = GRIDS["full"]
    assert full.seeds >= 3
    assert {"gated_delta_net", "q_delta", "kda", "gated_delta_net2", "transformer"} <= set(full.models)


def test_a_corpus_that_is_not_there_is_what_is_refused():
    """Whatever is said of a tokenizer."""
    with pytest.raises(ValueError, match=r"^corpus: got 'shiped', want 'shipped' or a folder"):
        niah.main(Niah(corpus="shiped"))
