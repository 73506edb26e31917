"""Needles in a haystack, as RULER asks for them (arXiv 2404.06654), for any tokenizer, text and length."""

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from qdelta_jax.checks import check_count
from qdelta_jax.tasks.codec import Codec, as_codec
from qdelta_jax.tasks.draws import Seed, generator
from qdelta_jax.tasks.examples import Examples
from qdelta_jax.tasks.haystack import Haystack, noise_haystack, text_haystack
from qdelta_jax.tasks.words import word_keys

__all__ = [
    "DEPTHS",
    "NEEDLE_TASKS",
    "NeedleSample",
    "NeedleTask",
    "needle_documents",
    "needle_examples",
    "needle_samples",
    "needle_score",
]

DEPTHS = tuple(round(100 * i / 39) for i in range(40))
"""Percent of the haystack's sentences that come before a needle."""

NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
PROMPT = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{haystack}\n"
    "What is the special magic {kind} for {key} mentioned in the provided text? "
    "The special magic {kind} for {key} mentioned in the provided text is"
)
UNITS_WEIGHED = 1000
TRIES = 12
UNITS_A_TOKEN = 64
"""Words of a haystack that a tokenizer makes a token of, at most: what makes no more of more words has no largest."""
SAMPLES, DOCUMENTS = 0, 1


class NeedleTask(NamedTuple):
    """haystack: repeated noise, or a text of the caller's. value: 7 digits, or a UUID. keys: needles, one is asked."""

    haystack: Literal["noise", "text"]
    value: Literal["number", "uuid"]
    keys: int


NEEDLE_TASKS = {
    "s_niah_1": NeedleTask("noise", "number", 1),
    "s_niah_2": NeedleTask("text", "number", 1),
    "s_niah_3": NeedleTask("text", "uuid", 1),
    "mk_niah_1": NeedleTask("text", "number", 4),
}
"""RULER's names of the tasks to what they are made of."""


class NeedleSample(NamedTuple):
    """A prompt that ends in the beginning of its answer; the answer; the key asked for, and its needle's depth."""

    prompt: str
    answer: str
    key: str
    depth: int

    @property
    def text(self) -> str:
        """Prompt, space, answer."""
        return f"{self.prompt} {self.answer}"


def needle_samples(
    task: str | NeedleTask,
    num_samples: int = 500,
    *,
    length: int,
    seed: Seed,
    tokenizer: Any,
    text: str | None = None,
    depth: int | None = None,
) -> list[NeedleSample]:
    """tokens(prompt) + tokens(" " + answer) <= length, with as much haystack as fits.

    The prompt is RULER's: an instruction, the haystack with the needle "One of the special magic numbers for KEY is:
    VALUE.", the question, and the first words of its answer, "The special magic number for KEY mentioned in the
    provided text is". One more word (a line of noise) would not fit. Sample i depends on the seed and i alone.
    Source: arXiv 2404.06654.

    Args:
        task: a name in `NEEDLE_TASKS`, or a task of your own.
        num_samples: RULER takes 500.
        length: tokens of prompt and answer together.
        seed: of keys, values, depths and of the sentence that the haystack begins with.
        tokenizer: with encode and decode, or the pair of them; encode adds no special tokens.
        text: any text, read in a circle; a task with noise does without and ignores it.
        depth: percent, of the needle that is asked for; by default one of the 40 `DEPTHS`. Others are at others.
    Raises:
        ValueError: an unknown task, a number out of its range, a tokenizer that adds tokens, no text where one is
            needed, or a length that has no place for prompt, answer and any haystack.

    >>> tokenizer = (lambda text: [ord(x) for x in text], lambda ids: "".join(map(chr, ids)))
    >>> sample, = needle_samples("s_niah_1", 1, length=550, seed=0, tokenizer=tokenizer, depth=50)
    >>> sample.prompt.split("\\n")[2], len(sample.text)
    ('One of the special magic numbers for round-rocket is: 8933942.', 539)
    """
    check_count("num_samples", num_samples)
    whole = isinstance(depth, int | np.integer) and not isinstance(depth, bool)
    if depth is not None and (not whole or not 0 <= depth <= 100):
        raise ValueError(f"depth: got {depth!r}, want an integer from 0 to 100 (percent), or None")
    writer = _Writer(task, length, tokenizer, text)
    return [writer.write(generator(seed, SAMPLES, i), depth) for i in range(num_samples)]


def needle_documents(
    task: str | NeedleTask, *, length: int, seed: Seed, tokenizer: Any, text: str | None = None, first: int = 0
) -> Iterator[str]:
    """Training documents of that form without end: prompt, space, answer, at most `length` tokens.

    Document i, counted from `first`, depends on the seed and i alone; none is a sample of `needle_samples` with the
    same seed. A row of T tokens holds a document of T - 1 (its end is predicted, too). For a test of generalisation,
    take the haystacks of training and test from different texts. Source: arXiv 2404.06654.

    Args, Raises: as for `needle_samples`.
    """
    if not isinstance(first, int | np.integer) or first < 0:
        raise ValueError(f"first: got {first!r}, want an integer of at least 0")
    generator(seed)
    writer = _Writer(task, length, tokenizer, text)

    def documents() -> Iterator[str]:
        i = first
        while True:
            yield writer.write(generator(seed, DOCUMENTS, i), None).text
            i += 1

    return documents()


def needle_examples(samples: Sequence[NeedleSample], *, length: int, tokenizer: Any) -> Examples:
    """Next-token prediction of tokens(prompt), tokens(" " + answer), in which the tokens of the answer count.

    Args:
        samples: B of them.
        length: T; rows are filled up with 0 on the right.
        tokenizer: as for `needle_samples`.
    Returns:
        `Examples` [B, T].
    Raises:
        ValueError: no samples, or one of more than T + 1 tokens.
    """
    if not samples:
        raise ValueError("samples: got none, want at least one")
    codec = as_codec(tokenizer)
    inputs, targets = np.zeros((2, len(samples), check_count("length", length)), np.int32)
    mask = np.zeros(inputs.shape, np.bool_)
    for row, sample in enumerate(samples):
        prompt, answer = codec.encode(sample.prompt), codec.encode(" " + sample.answer)
        if not len(prompt) or not len(answer):
            raise ValueError(f"samples: got no tokens for the prompt or the answer of sample {row}, want some of each")
        ids = np.concatenate([prompt, answer])
        size = len(ids) - 1
        if size > length:
            raise ValueError(f"length: got {length}, want at least {size} for sample {row} of {size + 1} tokens")
        inputs[row, :size] = ids[:-1]
        targets[row, :size] = ids[1:]
        mask[row, len(prompt) - 1 : size] = True
    return Examples(inputs, np.where(mask, targets, 0), mask)


def needle_score(outputs: Iterable[Any], samples: Iterable[NeedleSample], tokenizer: Any = None) -> float:
    """The fraction of outputs that contain their sample's answer, upper or lower case alike.

    Args:
        outputs: what a model wrote after each prompt: strings, or ids if a tokenizer is given.
        samples: as many.
        tokenizer: as for `needle_samples`.
    Raises:
        ValueError: none, or not as many outputs as samples, or ids without a tokenizer.

    >>> sample = NeedleSample("..", "ab12", "calm-otter", 0)
    >>> needle_score([" AB12.", " ab 12"], [sample, sample])
    0.5
    """
    outputs, samples = list(outputs), list(samples)
    if not samples or len(outputs) != len(samples):
        raise ValueError(f"outputs: got {len(outputs)} for {len(samples)} samples, want one for each of at least one")
    if tokenizer is not None:
        outputs = [as_codec(tokenizer).decode(ids) for ids in outputs]
    strange = [type(x).__name__ for x in outputs if not isinstance(x, str)]
    if strange:
        raise ValueError(f"outputs: got {strange[0]}, want strings (or ids and a tokenizer)")
    found = [s.answer.lower() in output.lower() for s, output in zip(samples, outputs, strict=True)]
    return sum(found) / len(found)


class _Writer:
    """Writes samples of one task and length."""

    def __init__(self, task: str | NeedleTask, length: int, tokenizer: Any, text: str | None):
        found = NEEDLE_TASKS.get(task) if isinstance(task, str) else task
        if not isinstance(found, NeedleTask):
            raise ValueError(f"task: got {task!r}, want a NeedleTask or one of {list(NEEDLE_TASKS)}")
        task = found
        for name, known in (("haystack", ("noise", "text")), ("value", ("number", "uuid"))):
            if getattr(task, name) not in known:
                raise ValueError(f"task.{name}: got {getattr(task, name)!r}, want one of {known}")
        if check_count("task.keys", task.keys) > len(DEPTHS):
            raise ValueError(f"task.keys: got {task.keys}, want at most {len(DEPTHS)}, each at a depth of its own")
        self.task, self.length = task, check_count("length", length)
        self.codec: Codec = as_codec(tokenizer)
        self.haystack: Haystack = noise_haystack() if task.haystack == "noise" else text_haystack(text)
        some = self.haystack.units[:UNITS_WEIGHED]
        self.per_unit = len(self.codec.encode(self.haystack.joiner.join(some))) / len(some)
        if not self.per_unit:
            raise ValueError(f"text: its first {len(some)} words are no token of the tokenizer, want some")

    def write(self, rng: np.random.Generator, depth: int | None) -> NeedleSample:
        """Needle 0 is the one that is asked for."""
        task = self.task
        keys = word_keys(rng, task.keys)
        values = _values(rng, task)
        depths = [int(d) for d in rng.permutation([d for d in DEPTHS if d != depth])]
        depths = (depths if depth is None else [depth, *depths])[: task.keys]
        start = int(rng.choice(self.haystack.begins))
        needles = [
            (d, NEEDLE.format(kind=task.value, key=key, value=value))
            for d, key, value in zip(depths, keys, values, strict=True)
        ]

        def prompt(units: int) -> str:
            haystack = self.haystack.hide(start, units, needles)
            return PROMPT.format(kind=task.value, key=keys[0], haystack=haystack)

        room = self.length - len(self.codec.encode(" " + values[0]))
        size = _largest(lambda units: len(self.codec.encode(prompt(units))), room, self.per_unit)
        if size < 1:
            least = len(self.codec.encode(prompt(1))) + self.length - room
            raise ValueError(f"length: got {self.length}, want at least {least} for prompt, answer and some haystack")
        return NeedleSample(prompt(size), values[0], keys[0], depths[0])


def _values(rng: np.random.Generator, task: NeedleTask) -> list[str]:
    """As many different ones as there are keys."""
    if task.value == "number":
        return [str(10**6 + n) for n in rng.choice(9 * 10**6, task.keys, replace=False)]
    return [str(uuid.UUID(bytes=rng.bytes(16), version=4)) for _ in range(task.keys)]


def _largest(tokens: Callable[[int], int], room: int, per_unit: float) -> int:
    """n with tokens(n) <= room < tokens(n + 1), or 0 if there is none above. About `per_unit` tokens a unit.

    Guesses in proportion to what is left over, then by halves: a long haystack is encoded a few times only.
    """
    low, high = 0, None
    least = low_count = tokens(0)
    high_count = tries = 0
    if least > room:
        return 0
    while high is None or high - low > 1:
        guess = low + max(1, int((room - low_count) / per_unit))
        if high is not None:
            guess = (low + high) // 2 if tries > TRIES else min(guess, high - 1)
        if guess > UNITS_A_TOKEN * (room + 1):
            raise ValueError(
                f"tokenizer: got no more than {low_count} tokens for {low} words or lines, want more for more"
            )
        count = tokens(guess)
        tries += 1
        if count <= room:
            low, low_count = guess, count
        else:
            high, high_count = guess, count
        ends = (count - least) / guess if high is None else (high_count - low_count) / (high - low)
        per_unit = ends if ends > 0 else per_unit
    return low
