"""Needles in use: documents to train on, examples, the score, refusals; and the parts they are made of."""

import itertools
import re

import numpy as np
import pytest
from test_tasks_needles import NEEDLE, TEXT

from qdelta_jax.tasks import (
    NEEDLE_TASKS,
    NeedleSample,
    NeedleTask,
    needle_documents,
    needle_examples,
    needle_samples,
    needle_score,
)
from qdelta_jax.tasks.haystack import NOISE, noise_haystack, text_haystack
from qdelta_jax.tasks.needles import _largest
from qdelta_jax.tasks.words import ADJECTIVES, NOUNS, word_keys
from qdelta_jax.training.vocabulary import ByteVocabulary, train_bpe


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([TEXT], 400)


@pytest.mark.parametrize("density", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_largest_is_found_from_any_guess(density, seed):
    """Units of very different cost, and a guess of their mean that is wrong."""
    costs = np.random.default_rng(seed).choice([1, 2, 3, 90], 4000, p=[0.5, 0.3, 0.1, 0.1])
    totals = 50 + np.concatenate([[0], np.cumsum(costs)])
    asked = []

    def tokens(n):
        asked.append(n)
        return int(totals[min(n, 4000)]) + 100_000 * max(0, n - 4000)

    for room in (51, 60, 500, 7777, int(totals[-1])):
        asked.clear()
        assert _largest(tokens, room, density * costs.mean()) == int(np.searchsorted(totals, room, "right")) - 1
        assert len(asked) < 30
    assert _largest(tokens, 49, 1.0) == 0


def test_documents_are_prompts_with_answers(bpe):
    def make(first, count, seed=0):
        flow = needle_documents("mk_niah_1", length=600, seed=seed, tokenizer=bpe, text=TEXT, first=first)
        return list(itertools.islice(flow, count))

    documents = make(0, 12)
    assert documents == make(0, 12)
    assert documents[7:] == make(7, 5)
    assert not set(documents) & set(make(0, 12, seed=1))
    samples = needle_samples("mk_niah_1", 12, length=600, seed=0, tokenizer=bpe, text=TEXT)
    assert not {s.answer for s in samples} & {d.split()[-1] for d in documents}, "tests are not for training"
    for document in documents:
        prompt, answer = document.rsplit(" ", 1)
        key = re.search(r"number for ([a-z]+-[a-z]+) mentioned in the provided text is$", prompt)[1]
        assert {m[2]: m[3] for m in NEEDLE.finditer(prompt)}[key] == answer
        assert 580 < len(bpe.encode(document)) <= 600
    with pytest.raises(ValueError, match="first: got -1, want an integer of at least 0"):
        make(-1, 1)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_examples_ask_for_the_answer(kind, bpe):
    tokenizer = {"bytes": ByteVocabulary(), "bpe": bpe}[kind]
    length = 900 if kind == "bytes" else 400
    samples = needle_samples("s_niah_3", 6, length=length, seed=9, tokenizer=tokenizer, text=TEXT)
    examples = needle_examples(samples, length=length, tokenizer=tokenizer)
    assert [x.shape for x in examples] == [(6, length)] * 3
    assert [x.dtype for x in examples] == [np.int32, np.int32, np.bool_]
    for sample, inputs, targets, mask in zip(samples, *examples, strict=True):
        asked = np.flatnonzero(mask)
        assert tokenizer.decode(targets[asked]) == " " + sample.answer
        prompt = tokenizer.encode(sample.prompt)
        assert asked[0] == len(prompt) - 1
        assert np.all(np.diff(asked) == 1)
        assert tokenizer.decode(inputs[: asked[0] + 1]) == sample.prompt
        np.testing.assert_array_equal(inputs[asked[1:]], targets[asked[:-1]])
        assert not targets[~mask].any()
        assert not inputs[asked[-1] + 1 :].any()


def test_examples_say_what_they_need():
    sample = NeedleSample("ask", "42", "calm-otter", 0)
    examples = needle_examples([sample], length=5, tokenizer=ByteVocabulary())
    assert examples.mask.tolist() == [[False, False, True, True, True]]
    with pytest.raises(ValueError, match="length: got 4, want at least 5 for sample 0 of 6 tokens"):
        needle_examples([sample], length=4, tokenizer=ByteVocabulary())
    with pytest.raises(ValueError, match="samples: got none"):
        needle_examples([], length=4, tokenizer=ByteVocabulary())


def test_score_is_a_substring_of_any_case():
    samples = [NeedleSample("..", answer, "calm-otter", 0) for answer in ("1234567", "ab-cd", "ab-cd", "7654321")]
    outputs = [" 1234567.", "It is AB-CD", "ab cd", "765432"]
    assert needle_score(outputs, samples) == needle_score(iter(outputs), iter(samples)) == 0.5
    vocabulary = ByteVocabulary()
    assert needle_score([vocabulary.encode(x) for x in outputs], samples, vocabulary) == 0.5
    assert needle_score([s.answer for s in samples], samples) == 1
    with pytest.raises(ValueError, match="outputs: got 1 for 4 samples"):
        needle_score(outputs[:1], samples)
    with pytest.raises(ValueError, match="outputs: got 0 for 0 samples"):
        needle_score([], [])
    with pytest.raises(ValueError, match="outputs: got ndarray, want strings"):
        needle_score([vocabulary.encode(x) for x in outputs], samples)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "s_niah_9"}, "task: got 's_niah_9', want a NeedleTask or one of \\['s_niah_1'"),
        ({"task": NeedleTask("hay", "number", 1)}, "task.haystack: got 'hay', want one of"),
        ({"task": NeedleTask("noise", "word", 1)}, "task.value: got 'word', want one of"),
        ({"task": NeedleTask("noise", "number", 0)}, "task.keys: got 0, want an integer of at least 1"),
        ({"task": NeedleTask("noise", "number", 41)}, "task.keys: got 41, want at most 40"),
        ({"num_samples": 0}, "num_samples: got 0, want an integer of at least 1"),
        ({"length": 0}, "length: got 0, want an integer of at least 1"),
        ({"length": 100}, "length: got 100, want at least 3[0-9]{2} for prompt, answer and some haystack"),
        ({"seed": -1}, "seed: got -1"),
        ({"text": None}, "text: got NoneType, want a string"),
        ({"text": " \n"}, "text: got a string of 2 characters, want a string with words"),
        ({"depth": 101}, "depth: got 101, want an integer from 0 to 100"),
        ({"depth": True}, "depth: got True, want an integer from 0 to 100"),
        ({"depth": -1}, "depth: got -1, want an integer from 0 to 100"),
        ({"tokenizer": "bpe"}, "tokenizer: got str, want a pair of functions"),
        ({"tokenizer": (len,)}, "tokenizer: got tuple, want a pair of functions"),
        ({"tokenizer": (lambda text: [0, *map(ord, text)], str)}, r"encodes the empty text to \[0\], want no token"),
        ({"tokenizer": (lambda text: [], str)}, "encodes 'The grass is green.' to no token"),
        ({"tokenizer": (lambda text: [1] if "grass" in text else [], str)}, "text: its first .* are no token"),
    ],
)
def test_bad_arguments(changes, message):
    good = {"task": "s_niah_2", "num_samples": 1, "length": 1000, "seed": 0, "tokenizer": ByteVocabulary()}
    with pytest.raises(ValueError, match=message):
        needle_samples(**{**good, "text": TEXT, **changes})


def test_the_least_length_of_the_message_works():
    for name in NEEDLE_TASKS:
        with pytest.raises(ValueError, match="length: got 1, want at least") as caught:
            needle_samples(name, 1, length=1, seed=0, tokenizer=ByteVocabulary(), text="word " * 10)
        least = int(re.search("at least ([0-9]+)", str(caught.value))[1])
        sample = needle_samples(name, 1, length=least, seed=0, tokenizer=ByteVocabulary(), text="word " * 10)[0]
        assert len(sample.text) == least


def test_sentences_end_with_signs_or_are_cut():
    words = 'He said: "Go away!" (Never.) 3.5 is no end, is it? ' + "on " * 205
    haystack = text_haystack(words)
    begins = [haystack.units[i] for i in haystack.begins]
    assert begins == ["He", "(Never.)", "3.5", "on", "on", "on"]
    assert np.diff(haystack.begins)[-2:].tolist() == [100, 100]
    assert noise_haystack().units == [NOISE]


def test_keys_are_pairs_of_plain_words():
    for words in (ADJECTIVES, NOUNS):
        assert len(set(words)) == len(words) > 150
        assert all(re.fullmatch("[a-z]{2,12}", word) for word in words)
    keys = word_keys(np.random.default_rng(0), 20_000)
    assert len(set(keys)) == 20_000
    assert len({key.split("-")[0] for key in keys}) == len(ADJECTIVES)
    assert len({key.split("-")[1] for key in keys}) == len(NOUNS)
