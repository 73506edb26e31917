"""Documents to batches: rows of packed pieces, shuffled by epoch, resumable at any batch.

A document of n ids is n + 1 predictions: [end, x_1 .. x_n] predicts [x_1 .. x_n, end]. Long documents are
cut into pieces of `length` predictions, at places that differ from epoch to epoch; short ones stay whole,
and several share a row. Each piece is one segment of its row: segment_ids count from 1, and 0 is padding
that predicts nothing. So every token is predicted once an epoch, and no prediction crosses documents.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import grain
import jax
import numpy as np

from qdelta_jax.training.documents import Documents

__all__ = ["Batch", "batches", "held_out_batches"]

BINS = 64
"""Rows that are filled at once: more waste less, and mix the pieces of neighbouring epochs a little more."""


class Batch(NamedTuple):
    """[B, T] int32, NumPy or JAX: inputs, what they predict, and their segments (0: padding, no loss).

    weights: [B, T] bool (which targets count) or floating, at least 0 (how much each counts); None: all count
        alike. Padding never counts, whatever its weight. That they are not negative is not checked.
    """

    tokens: Any
    targets: Any
    segment_ids: Any
    weights: Any = None


class Pieces:
    """Places where pieces of documents may lie: (document, slot). A long one has one slot to spare."""

    def __init__(self, documents: Documents, length: int):
        counts = [_slots(len(t) + 1, length) for t in documents.tokens]
        self.starts = np.concatenate([[0], np.cumsum(counts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> tuple[int, int]:
        document = int(np.searchsorted(self.starts, index, side="right")) - 1
        return document, int(index - self.starts[document])


def _slots(size: int, length: int) -> int:
    return 1 if size <= length else -(-size // length) + 1


def _piece(documents: Documents, document: int, slot: int, length: int, first: int) -> dict | None:
    """The piece in that slot when the document's first one has `first` predictions; None if it is empty."""
    ids = documents.tokens[document]
    size = len(ids) + 1
    if size <= length:
        first = size
    start, stop = max(0, first + (slot - 1) * length), min(size, first + slot * length)
    if start >= stop:
        return None
    body = ids[max(0, start - 1) : min(len(ids), stop)].astype(np.int32)
    ends = np.full(1, documents.end, np.int32)
    row = np.concatenate([ends if start == 0 else ends[:0], body, ends if stop == size else ends[:0]])
    return {"tokens": row[:-1], "targets": row[1:]}


def batches(
    documents: Documents, *, length: int, rows: int, seed: int, process: tuple[int, int] = (0, 1)
) -> grain.DatasetIterator:
    """Endless iterator of `Batch`es; `get_state` and `set_state` hold its position.

    Args:
        documents: of the training split.
        length: T, tokens in a row.
        rows: in a batch of this process.
        seed: of the order and of the places of the cuts.
        process: (index, count); each process sees its own pieces.
    Raises:
        ValueError: fewer pieces than processes.
    """
    index, count = process
    pieces = Pieces(documents, length)
    if len(pieces) < count:
        raise ValueError(f"files: {len(pieces)} pieces of {length} tokens cannot be shared by {count} processes")
    mine = grain.MapDataset.source(pieces).seed(seed).shuffle()[index::count]
    per_epoch = len(mine)

    def cut(position: int, place: tuple[int, int]) -> dict | None:
        document, slot = place
        epoch = position // per_epoch
        first = int(np.random.default_rng((seed, epoch, document)).integers(1, length + 1))
        return _piece(documents, document, slot, length, first)

    flow = mine.repeat().map_with_index(cut)
    flow = flow.to_iter_dataset(grain.ReadOptions(num_threads=0))
    packed = grain.experimental.FirstFitPackIterDataset(
        flow,
        length_struct={"tokens": length, "targets": length},
        num_packing_bins=BINS,
        seed=seed,
        shuffle_bins=True,
    )
    return iter(packed.batch(rows, drop_remainder=True).map(_to_batch))


def _to_batch(packed: dict) -> Batch:
    return Batch(packed["tokens"], packed["targets"], packed["tokens_segment_ids"])


def held_out_batches(
    documents: Documents, *, length: int, rows: int, process: tuple[int, int] = (0, 1)
) -> Iterator[Batch]:
    """Every held-out prediction once, in order; the last batches are filled with padding.

    All processes see the same number of batches, process i every count-th row from the i-th.
    """
    index, count = process
    table = list(_rows(documents, length))
    total = -(-len(table) // (rows * count)) * rows * count
    table += [Batch(*np.zeros((3, length), np.int32))] * (total - len(table))
    mine = table[index::count]
    for start in range(0, len(mine), rows):
        yield jax.tree.map(lambda *parts: np.stack(parts), *mine[start : start + rows])


def _rows(documents: Documents, length: int) -> Iterator[Batch]:
    row, used, segment = np.zeros((3, length), np.int32), 0, 0
    for document in range(len(documents.tokens)):
        for slot in range(_slots(len(documents.tokens[document]) + 1, length)):
            piece = _piece(documents, document, slot, length, length)
            if piece is None:
                continue
            size = len(piece["tokens"])
            if used + size > length:
                yield Batch(*row)
                row, used, segment = np.zeros((3, length), np.int32), 0, 0
            segment += 1
            row[:, used : used + size] = piece["tokens"], piece["targets"], np.full(size, segment)
            used += size
    if used:
        yield Batch(*row)
