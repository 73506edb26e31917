"""Files to documents: lists of token ids, split into training and held-out."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from qdelta_jax.training.config import DataConfig
from qdelta_jax.training.vocabulary import ByteVocabulary, Vocabulary, load_vocabulary, train_bpe

__all__ = ["Corpus", "Documents", "load_corpus", "sample_text"]


@dataclass(frozen=True)
class Documents:
    """tokens: an array of ids per document. end: the id around each. num_bytes: of text, 0 if unknown."""

    tokens: list[np.ndarray]
    end: int
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        """Predicted tokens: every id, and the end of every document."""
        return sum(len(t) + 1 for t in self.tokens)


@dataclass(frozen=True)
class Corpus:
    """The two splits, the vocabulary (None for bare ids) and how many ids a model must know."""

    train: Documents
    held_out: Documents
    vocabulary: Vocabulary | None
    vocab_size: int


def sample_text() -> Path:
    """The public-domain English text that ships with the library (qdelta_jax/data)."""
    return Path(str(resources.files("qdelta_jax") / "data" / "shakespeare.txt"))


def load_corpus(config: DataConfig, seed: int, directory: Path | None = None) -> Corpus:
    """Reads the files, splits them, and turns them into ids.

    The split comes first, so that a "bpe" vocabulary sees training text alone. It is read from tokenizer.json
    in `directory` when that exists, so that a resumed run has the same; nothing is written.

    Raises:
        ValueError: a file is missing, empty, of an unknown kind or has a line that does not fit; text and
            token files are mixed; a token id that `vocabulary` does not have.
    """
    files = config.files or (str(sample_text()),)
    kinds = {_kind(f) for f in (*files, *config.held_out_files)}
    if len(kinds) > 1:
        raise ValueError(f"files: got text and token files together ({', '.join(files)}), want one of the two")
    tokenised = kinds == {"tokens"}
    documents = [d for f in files for d in _read(Path(f), config)]
    if config.held_out_files:
        train, held_out = documents, [d for f in config.held_out_files for d in _read(Path(f), config)]
    else:
        train, held_out = _split(documents, config.held_out, seed)
    if not train or not held_out:
        raise ValueError(f"files: {', '.join(files)} leave no text for training or none for evaluation")
    vocabulary = _vocabulary(config, train if not tokenised else [], directory)
    splits = []
    for part in (train, held_out):
        if tokenised:
            splits.append(_from_ids(part, config, vocabulary))
        else:
            assert vocabulary is not None
            splits.append(Documents([vocabulary.encode(text) for text in part], vocabulary.end, _count(part)))
    size = vocabulary.size if vocabulary else 1 + max(int(t.max()) for s in splits for t in s.tokens)
    return Corpus(splits[0], splits[1], vocabulary, size)


def _kind(name: str) -> str:
    kinds = {".txt": "text", ".jsonl": "text", ".npy": "tokens", ".bin": "tokens"}
    kind = kinds.get(Path(name).suffix)
    if kind is None:
        raise ValueError(f"files: got {name!r}, want .txt, .jsonl, .npy or .bin")
    return kind


def _read(path: Path, config: DataConfig) -> Iterator:
    """Texts, or arrays of ids without separators; empty documents are dropped."""
    if not path.is_file():
        raise ValueError(f"files: {path} does not exist")
    if path.suffix == ".txt":
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"files: {path} is not UTF-8: {error}") from error
        documents: Iterator[Any] = iter([text])
    elif path.suffix == ".jsonl":
        documents = _read_jsonl(path, config.text_field)
    else:
        documents = _read_ids(path, config)
    return (d for d in documents if len(d))


def _read_jsonl(path: Path, field: str) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[field]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"files: {path}, line {number}: want JSON with {field!r} ({error!r})") from error
            if not isinstance(text, str):
                raise ValueError(f"files: {path}, line {number}: {field!r} is {type(text).__name__}, want a string")
            # JSON can spell half of a surrogate pair, which is no character and has no UTF-8.
            yield text.encode("utf-8", errors="replace").decode("utf-8")


def _read_ids(path: Path, config: DataConfig) -> Iterator[np.ndarray]:
    """Views of the file between separators: nothing is copied, so a file may be larger than memory."""
    if path.suffix == ".npy":
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    else:
        dtype = np.dtype(config.bin_dtype).newbyteorder("<")
        if path.stat().st_size % dtype.itemsize or not path.stat().st_size:
            raise ValueError(f"files: {path} has {path.stat().st_size} bytes, want a multiple of {dtype.itemsize}")
        ids = np.memmap(path, dtype, mode="r")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"files: {path} holds {ids.dtype} of shape {ids.shape}, want one axis of integers")
    ends = np.append(np.flatnonzero(ids == config.separator), len(ids))
    starts = np.append(0, ends[:-1] + 1)
    return (ids[a:b] for a, b in zip(starts, ends, strict=True))


def _split(documents: list, fraction: float, seed: int) -> tuple[list, list]:
    """(training, held-out): documents drawn until they reach the fraction, or the end of the only one."""
    if len(documents) == 1:
        cut = max(1, len(documents[0]) - max(1, round(fraction * len(documents[0]))))
        rest = documents[0][cut:]
        return [documents[0][:cut]], [rest] if len(rest) else []
    wanted = fraction * sum(map(len, documents))
    chosen: set[int] = set()
    size = 0
    for index in np.random.default_rng(seed).permutation(len(documents))[:-1]:
        if size >= wanted:
            break
        chosen.add(int(index))
        size += len(documents[index])
    kept = [d for i, d in enumerate(documents) if i not in chosen]
    return kept, [documents[i] for i in sorted(chosen)]


def _vocabulary(config: DataConfig, texts: list[str], directory: Path | None) -> Vocabulary | None:
    if config.vocabulary == "none":
        if texts:
            raise ValueError("vocabulary: got 'none' for text files, want 'bytes', 'bpe' or a tokenizer.json")
        return None
    if config.vocabulary == "bytes":
        return ByteVocabulary()
    if config.vocabulary != "bpe":
        return load_vocabulary(config.vocabulary)
    stored = directory / "tokenizer.json" if directory else None
    if stored and stored.is_file():
        return load_vocabulary(stored)
    if not texts:
        raise ValueError("vocabulary: got 'bpe' for token files, want 'bytes', 'none' or a tokenizer.json")
    return train_bpe(texts, config.bpe_size)


def _from_ids(documents: list[np.ndarray], config: DataConfig, vocabulary: Vocabulary | None) -> Documents:
    for ids in documents:
        if int(ids.min()) < 0 or (vocabulary and int(ids.max()) >= vocabulary.size):
            size = vocabulary.size if vocabulary else "any"
            raise ValueError(f"files: token ids from {ids.min()} to {ids.max()}, want 0 <= id < {size}")
    if vocabulary is None:
        return Documents(documents, config.separator, 0)
    return Documents(documents, vocabulary.end, _count([vocabulary.decode(d) for d in documents]))


def _count(texts: list[str]) -> int:
    return sum(len(text.encode("utf-8")) for text in texts)
