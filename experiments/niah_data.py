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
"""Rows that a thread writes at a time."""

HAYSTACK = 2_000_000
"""Characters of a split that serve as its haystack, at most: read in a circle."""


KINDS = (np.int32, np.int32, np.int32, np.float32)


class Questions(NamedTuple):
    """inputs [n, T]; places [n, A] that are asked, and the answers' tokens there [n, A], -1 where there is none."""

    inputs: np.ndarray
    places: np.ndarray
    answers: np.ndarray


class Rows(NamedTuple):
    """[N, T] each: tokens, what they predict, their documents (from 1; 0: padding), and whether that is asked for: a
    token of an answer or the end behind it."""

    tokens: np.ndarray
    targets: np.ndarray
    segment_ids: np.ndarray
    asked: np.ndarray


@cache
def needle_rows(text: Text, length: int, count: int, halvings: int = 0) -> Rows:
    """`count` rows of each task, which take turns. Of those of a task as many each hold a document as long as a row,
    two of half that length, four of a quarter, and so on for so many halvings."""
    codec, tasks, kinds = text.vocabulary, list(NEEDLE_TASKS), halvings + 1
    haystack = text.excerpt(text.train, HAYSTACK)
    shape = (count * len(tasks), length)
    tokens, targets, segment_ids = np.zeros((3, *shape), np.int32)
    rows = Rows(tokens, targets, segment_ids, np.zeros(shape, np.bool_))

    def write(job: tuple[int, int, int]) -> None:
        place, half, first = job
        size = length >> half
        numbers = range(kinds * first + half, min(kinds * (first + PIECE), count), kinds)
        made = needle_documents(
            tasks[place],
            length=size - 1,
            seed=(TRAINING, place, half),
            tokenizer=codec,
            text=haystack,
            first=first << half,
        )
        for number, part in product(numbers, range(1 << half)):
            prompt, answer = next(made).rsplit(" ", 1)
            begin = [codec.end, *codec.encode(prompt)]
            ids = np.array([*begin, *codec.encode(f" {answer}"), codec.end])
            row, where = number * len(tasks) + place, part * size + np.arange(len(ids) - 1)
            rows.tokens[row, where], rows.targets[row, where] = ids[:-1], ids[1:]
            rows.segment_ids[row, where] = part + 1
            rows.asked[row, where[len(begin) - 1 :]] = True

    jobs = product(range(len(tasks)), range(kinds), range(0, -(-count // kinds), PIECE))
    # A tokenizer works outside of Python's lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            list(pool.map(write, jobs))
        except ValueError as error:
            wanted = f"documents of {length >> halvings} tokens are too short ({error})"
            raise ValueError(f"length {length}, halvings {halvings}: {wanted}") from error
    return rows


def training(
    text: Text, *, length: int, rows: int, steps: int, documents: int, halvings: int, weight: float, seed: int
) -> Iterator[Batch]:
    """Batches: needle documents in the first half of the rows, pieces of text in the others.

    Every row of documents once an epoch, in an order that depends on the seed. What is asked for weighs `weight`.
    """
    found = needle_rows(text, length, documents, halvings)
    half, count = rows // 2, len(found.tokens)
    epochs = -(-half * steps // count)
    order = np.concatenate([np.random.default_rng((seed, epoch)).permutation(count) for epoch in range(epochs)])
    for step, piece in enumerate(islice(batches(text.train, length=length, rows=half, seed=seed), steps)):
        mine = Rows(*(x[order[step * half : (step + 1) * half]] for x in found))
        needles = (*mine[:3], np.where(mine.asked, weight, 1.0))
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
