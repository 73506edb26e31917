"""What experiments/niah.py trains on and tests with, and how an answer counts."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import islice, product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.texts import Text
from qdelta_jax.tasks import NEEDLE_TASKS, needle_documents, needle_examples, needle_samples
from qdelta_jax.training.data import Batch, batches

TRAINING, VALIDATION, TEST = 0, 1, 2
"""Seeds of needles."""

PIECE = 25
"""Documents that a thread writes at a time."""

HAYSTACK = 2_000_000
"""Characters of a split that serve as its haystack, at most: read in a circle."""


KINDS = (np.int32, np.int32, np.int32, np.float32)


class Questions(NamedTuple):
    """inputs [n, T]; places [n, A] that are asked, and the answers' tokens there [n, A], -1 where there is none."""

    inputs: np.ndarray
    places: np.ndarray
    answers: np.ndarray


@cache
def needle_rows(text: Text, length: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """tokens [N, T + 1] of documents, how many each has [N], and where its answer begins [N]; `count` of each task.

    Rows of the tasks take turns. Padding is 0.
    """
    codec, tasks = text.vocabulary, list(NEEDLE_TASKS)
    haystack = text.excerpt(text.train, HAYSTACK)
    rows = np.zeros((count * len(tasks), length + 1), np.int32)
    sizes, begins = np.zeros((2, len(rows)), np.int32)

    def write(job: tuple[int, int]) -> None:
        place, first = job
        seed, many = (TRAINING, place), min(PIECE, count - first)
        made = needle_documents(tasks[place], length=length - 1, seed=seed, tokenizer=codec, text=haystack, first=first)
        for i, document in enumerate(islice(made, many), first):
            prompt, answer = document.rsplit(" ", 1)
            ids = [codec.encode(prompt), codec.encode(f" {answer}")]
            row = i * len(tasks) + place
            begins[row] = 1 + len(ids[0])
            sizes[row] = begins[row] + len(ids[1]) + 1
            rows[row, : sizes[row]] = np.concatenate([[codec.end], *ids, [codec.end]])

    # A tokenizer works outside of Python's lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(write, product(range(len(tasks)), range(0, count, PIECE))))
    return rows, sizes, begins


def training(
    text: Text, *, length: int, rows: int, steps: int, documents: int, weight: float, seed: int
) -> Iterator[Batch]:
    """Batches: needle documents in the first half of the rows, pieces of text in the others.

    Every document once an epoch, in an order that depends on the seed. Tokens of an answer and its end weigh
    `weight`.
    """
    tokens, sizes, begins = needle_rows(text, length, documents)
    half = rows // 2
    epochs = -(-half * steps // len(tokens))
    order = np.concatenate([np.random.default_rng((seed, epoch)).permutation(len(tokens)) for epoch in range(epochs)])
    place = np.arange(1, length + 1)
    for step, piece in enumerate(islice(batches(text.train, length=length, rows=half, seed=seed), steps)):
        mine = order[step * half : (step + 1) * half]
        inside, asked = place < sizes[mine, None], place >= begins[mine, None]
        needles = Batch(tokens[mine, :-1], tokens[mine, 1:], inside.astype(np.int32), np.where(asked, weight, 1.0))
        plain = piece._replace(weights=np.ones(piece.tokens.shape))
        yield Batch(*(np.concatenate(pair).astype(kind) for *pair, kind in zip(needles, plain, KINDS, strict=True)))


@cache
def questions(text: Text, task: str, length: int, samples: int, seed: int) -> Questions:
    """Of held-out text. Seeds of their own give values that no training document has, and keys that few have."""
    haystack = text.excerpt(text.test if seed == TEST else text.validation, HAYSTACK)
    made = needle_samples(
        task,
        samples,
        length=length - 1,
        seed=(seed, list(NEEDLE_TASKS).index(task)),
        tokenizer=text.vocabulary,
        text=haystack,
    )
    inputs, targets, mask = needle_examples(made, length=length - 2, tokenizer=text.vocabulary)
    # Documents begin with the end of the one before.
    inputs = np.concatenate([np.full((samples, 1), text.vocabulary.end, np.int32), inputs], axis=1)
    count = int(mask.sum(1).max())
    places, answers = np.zeros((samples, count), np.int32), np.full((samples, count), -1, np.int32)
    for row in range(samples):
        (where,) = np.nonzero(mask[row])
        places[row, : len(where)], answers[row, : len(where)] = where + 1, targets[row, where]
    return Questions(inputs, places, answers)


def prepare(text: Text, length: int, times: Iterable[int], samples: int) -> None:
    """Makes all questions at once, for `questions` to find: those of validation at the length itself alone."""
    jobs = [(n * length, TEST) for n in sorted(times, reverse=True)] + [(length, VALIDATION)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: questions(text, job[1], job[0][0], samples, job[0][1]), product(jobs, NEEDLE_TASKS)))


def answered(model: Any, asked: Questions) -> tuple[Array, Array]:
    """[n] each: whether every token of the answer is the most likely one there, says a `LanguageModel`, and the share
    of its tokens that are."""
    x, _ = model.features(asked.inputs)
    x = jnp.take_along_axis(x, jnp.asarray(asked.places)[..., None], axis=1)
    there = jnp.asarray(asked.answers) >= 0
    right = (jnp.argmax(model.logits(x), axis=-1) == asked.answers) & there
    tokens = jnp.sum(there, axis=-1, dtype=jnp.int32)
    hits = jnp.sum(right, axis=-1, dtype=jnp.int32)
    return hits == tokens, hits.astype(jnp.float32) / tokens.astype(jnp.float32)


def accuracy(answered: Callable[[Questions], tuple[Array, Array]], asked: Questions, rows: int) -> tuple[float, float]:
    """Means of what `answered` says, so many rows at a time; the last ones are filled up."""
    count = len(asked.inputs)
    found = []
    for start in range(0, count, rows):
        index = np.minimum(np.arange(start, start + rows), count - 1)
        found.append([x[: count - start] for x in answered(Questions(*(x[index] for x in asked)))])
    whole, share = (np.concatenate(parts) for parts in zip(*jax.device_get(found), strict=True))
    return float(whole.mean()), float(share.mean())
