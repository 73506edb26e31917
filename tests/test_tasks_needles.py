"""Needles: form of the prompt, places in the haystack, lengths in tokens, seeds."""

import itertools
import re
import uuid
from collections import Counter

import numpy as np
import pytest

from qdelta_jax.tasks import (
    DEPTHS,
    NEEDLE_TASKS,
    NeedleSample,
    NeedleTask,
    needle_examples,
    needle_samples,
)
from qdelta_jax.tasks.words import ADJECTIVES, NOUNS
from qdelta_jax.training.documents import sample_text
from qdelta_jax.training.vocabulary import ByteVocabulary, train_bpe

NAMES = list(NEEDLE_TASKS)
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = re.compile(r"One of the special magic (number|uuid)s for ([a-z]+-[a-z]+) is: ([0-9a-f-]+)\.")
TEXT = " ".join(f"This is sentence number {i} of {'very ' * (i % 7)}many." for i in range(300))
"""Sentences that say which they are."""


class Words:
    """One id for each word or sign, blank and line end, learnt as they come."""

    def __init__(self):
        self.known = []
        self.number = {}

    def encode(self, text):
        parts = re.findall(r"\w+|[^\w]", text)
        for part in parts:
            if part not in self.number:
                self.number[part] = len(self.known)
                self.known.append(part)
        return [self.number[part] for part in parts]

    def decode(self, ids):
        return "".join(self.known[i] for i in ids)


class WithIds:
    """Wraps ids in an object, as `tokenizers` does."""

    ids = None

    def encode(self, text):
        found = WithIds()
        found.ids = [ord(x) for x in text]
        return found

    def decode(self, ids):
        return "".join(map(chr, ids))


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([sample_text().read_text(encoding="utf-8")[:50_000], TEXT], 500)


@pytest.fixture(scope="module")
def shakespeare():
    return sample_text().read_text(encoding="utf-8")[:60_000]


def parts(sample):
    """(haystack, question) of a prompt, after the instruction has been checked."""
    kind = "uuid" if "magic uuid is" in sample.prompt else "number"
    head = (
        f"A special magic {kind} is hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind} afterwards.\n"
    )
    tail = (
        f"\nWhat is the special magic {kind} for {sample.key} mentioned in the provided text? "
        f"The special magic {kind} for {sample.key} mentioned in the provided text is"
    )
    assert sample.prompt.startswith(head)
    assert sample.prompt.endswith(tail)
    return sample.prompt[len(head) : -len(tail)]


@pytest.mark.parametrize("name", NAMES)
def test_prompts_have_the_form_of_ruler(name):
    samples = needle_samples(name, 30, length=2500, seed=0, tokenizer=ByteVocabulary(), text=TEXT)
    assert len(samples) == 30
    for sample in samples:
        needles = [m.groups() for m in NEEDLE.finditer(parts(sample))]
        assert len(needles) == (4 if name == "mk_niah_1" else 1)
        kinds, keys, values = zip(*needles, strict=True)
        assert len(set(keys)) == len(set(values)) == len(needles)
        assert dict(zip(keys, values, strict=True))[sample.key] == sample.answer
        assert all(key.split("-")[0] in ADJECTIVES and key.split("-")[1] in NOUNS for key in keys)
        assert sample.prompt.count(sample.answer) == 1
        if name == "s_niah_3":
            assert set(kinds) == {"uuid"}
            assert uuid.UUID(sample.answer).version == 4
            assert str(uuid.UUID(sample.answer)) == sample.answer
        else:
            assert set(kinds) == {"number"}
            assert all(re.fullmatch("[1-9][0-9]{6}", value) for value in values)
    assert len({s.answer for s in samples}) == len({s.key for s in samples}) == 30


def test_noise_is_repeated_lines():
    for sample in needle_samples("s_niah_1", 20, length=1500, seed=1, tokenizer=ByteVocabulary()):
        lines = parts(sample).split("\n")
        assert Counter(lines)[NOISE] == len(lines) - 1 > 5
        place = next(i for i, line in enumerate(lines) if line != NOISE)
        assert NEEDLE.fullmatch(lines[place])
        assert place == (len(lines) - 1) * sample.depth // 100


@pytest.mark.parametrize("name", ["s_niah_2", "mk_niah_1"])
def test_text_is_a_piece_of_the_circle(name):
    """Without its needles the haystack is what the text says from some sentence on, and round its end."""
    starts = set()
    for sample in needle_samples(name, 30, length=4000, seed=2, tokenizer=ByteVocabulary(), text=TEXT):
        rest = NEEDLE.sub("", parts(sample)).split()
        assert " ".join(rest[:4]).startswith("This is sentence number")
        first = int(rest[4])
        starts.add(first)
        circle = itertools.cycle(TEXT.split())
        skipped = sum(9 - 1 + i % 7 - 1 for i in range(first))
        assert rest == list(itertools.islice(circle, skipped, skipped + len(rest)))
    assert len(starts) > 20
    assert any(s > 270 for s in starts), "some go round the end"


def test_text_shorter_than_the_haystack_is_repeated():
    sample = needle_samples("s_niah_2", 1, length=2000, seed=0, tokenizer=ByteVocabulary(), text="One. Two three.")[0]
    rest = NEEDLE.sub("", parts(sample)).split()
    assert set(rest) == {"One.", "Two", "three."}
    assert rest.count("Two") > 50


@pytest.mark.parametrize("depth", [0, 1, 26, 50, 99, 100])
@pytest.mark.parametrize("name", ["s_niah_1", "s_niah_2", "mk_niah_1"])
def test_needles_lie_at_their_depth(name, depth):
    for sample in needle_samples(name, 5, length=6000, seed=3, tokenizer=ByteVocabulary(), text=TEXT, depth=depth):
        assert sample.depth == depth
        haystack = parts(sample)
        others = [m for m in NEEDLE.finditer(haystack) if m[2] != sample.key]
        for match in others:
            haystack = haystack.replace(match[0], "")
        before, after = re.split(rf"One of the special magic numbers for {sample.key} is: \d+\.", haystack)
        if name == "s_niah_1":
            above, below = (x.split("\n").count(NOISE) for x in (before, after))
        else:
            # A last sentence that is cut counts as one: "This" begins each.
            above, below = before.count("This"), after.count("This")
            assert depth == 100 or before.strip()[-1:] in ("", "."), "needles lie between sentences"
        assert above == (above + below) * depth // 100
        if depth == 0:
            assert not before.strip()
        if depth == 100:
            assert not after.strip()


def test_depths_are_40_from_0_to_100_and_all_are_used():
    assert len(DEPTHS) == len(set(DEPTHS)) == 40
    assert (DEPTHS[0], DEPTHS[-1]) == (0, 100)
    np.testing.assert_array_equal(DEPTHS, np.round(np.linspace(0, 100, 40)))
    samples = needle_samples("s_niah_1", 800, length=500, seed=4, tokenizer=ByteVocabulary())
    counts = Counter(s.depth for s in samples)
    assert set(counts) == set(DEPTHS)
    assert max(counts.values()) < 20 + 5 * np.sqrt(20)


def test_the_key_asked_for_is_as_often_first_as_last():
    samples = needle_samples("mk_niah_1", 400, length=2000, seed=5, tokenizer=ByteVocabulary(), text=TEXT)
    order = Counter([m[2] for m in NEEDLE.finditer(parts(s))].index(s.key) for s in samples)
    assert set(order) == {0, 1, 2, 3}
    assert all(abs(n - 100) < 50 for n in order.values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["bytes", "bpe", "words", "pair", "ids"])
@pytest.mark.parametrize("length", [700, 1024])
def test_prompt_and_answer_fill_the_length(name, kind, length, bpe, shakespeare):
    tokenizer = {
        "bytes": ByteVocabulary(),
        "bpe": bpe,
        "words": Words(),
        "pair": (lambda text: [ord(x) for x in text], lambda ids: "".join(map(chr, ids))),
        "ids": WithIds(),
    }[kind]
    encode = tokenizer[0] if kind == "pair" else tokenizer.encode

    def count(text):
        found = encode(text)
        return len(getattr(found, "ids", found))

    if kind != "bpe" and name == "mk_niah_1":
        length += 200
    samples = needle_samples(name, 6, length=length, seed=6, tokenizer=tokenizer, text=shakespeare)
    widest = 1 + max(count(" " + x) for x in ([NOISE] if name == "s_niah_1" else set(shakespeare.split())))
    for sample in samples:
        used = count(sample.prompt) + count(" " + sample.answer)
        assert length - widest <= used <= length
        assert count(sample.text) == used


def test_no_further_word_would_fit():
    text = TEXT.replace("very", "extraordinarily")
    for sample in needle_samples("s_niah_2", 40, length=1500, seed=7, tokenizer=ByteVocabulary(), text=text, depth=0):
        rest = NEEDLE.sub("", parts(sample)).split()
        words = text.split()
        start = words.index(rest[4]) - 4
        assert words[start : start + len(rest)] == rest or start + len(rest) > len(words)
        following = words[(start + len(rest)) % len(words)]
        assert len(sample.text) <= 1500 < len(sample.text) + 1 + len(following)


def test_samples_depend_on_seed_and_number_alone():
    def make(count, seed, name="mk_niah_1"):
        return needle_samples(name, count, length=1500, seed=seed, tokenizer=ByteVocabulary(), text=TEXT)

    assert make(5, 8) == make(9, 8)[:5]
    assert make(5, (8, 1)) == make(5, (8, 1))
    different = [make(5, seed) for seed in (8, 9, (8, 0), (8, 1))]
    for a, b in itertools.combinations(different, 2):
        assert not {s.key for s in a} & {s.key for s in b}
        assert not {s.answer for s in a} & {s.answer for s in b}


def test_a_task_of_ones_own():
    task = NeedleTask("noise", "uuid", 40)
    sample = needle_samples(task, 1, length=6000, seed=0, tokenizer=ByteVocabulary(), depth=100)[0]
    lines = parts(sample).split("\n")
    assert len([x for x in lines if NEEDLE.fullmatch(x)]) == 40
    assert sample.key in lines[-1]


def test_a_tokenizer_that_makes_no_more_of_more_text_is_refused():
    rare = (lambda text: [1] * (text.count("magic") * 3 + 1) if text else [], str)
    with pytest.raises(ValueError, match="tokenizer: got no more than"):
        needle_samples("s_niah_2", 1, length=700, seed=0, tokenizer=rare, text="abc def")


def test_an_empty_prompt_is_refused():
    tokenizer = (lambda text: [ord(x) for x in text], str)
    with pytest.raises(ValueError, match="got no tokens for the prompt or the answer of sample 0"):
        needle_examples([NeedleSample("", "ab", "k", 0)], length=5, tokenizer=tokenizer)
