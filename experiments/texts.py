"""The text of a training experiment: three splits of documents as tokens, and their tokenizer."""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from qdelta_jax.training import DataConfig
from qdelta_jax.training.documents import Documents, load_corpus
from qdelta_jax.training.vocabulary import BpeVocabulary, ByteVocabulary, load_vocabulary, train_bpe

SHIPPED = "shipped"
"""In place of a corpus: the text that ships with the library."""

HELD_OUT = 0.05
"""Of the shipped text."""


@dataclass(frozen=True, eq=False)
class Text:
    """name: what it is, with a hash of its tokens and what they mean. train, validation, test: a document is in one."""

    name: str
    vocabulary: BpeVocabulary | ByteVocabulary
    train: Documents
    validation: Documents
    test: Documents

    @property
    def vocab_size(self) -> int:
        """A multiple of 64, which is what matrix units like."""
        return -(-self.vocabulary.size // 64) * 64

    def excerpt(self, part: Documents, characters: int) -> str:
        """The first documents of a split, about so many characters."""
        found: list[str] = []
        for tokens in part.tokens:
            left = characters - sum(map(len, found))
            if left <= 0:
                break
            # No token is shorter than a byte, and no character longer than four.
            found.append(self.vocabulary.decode(tokens[: 4 * left])[:left])
        return "\n\n".join(found)


@cache
def load_text(corpus: str, bpe_size: int = 0) -> Text:
    """The corpus of that folder, or the text that ships with the library.

    Args:
        corpus: a folder that `python -m experiments.corpus` made, or "shipped".
        bpe_size: of the shipped text: 0 for bytes, else a byte-pair encoding of so many tokens.
    Raises:
        ValueError: the folder has no corpus.
    """
    if corpus == SHIPPED:
        loaded = load_corpus(DataConfig(held_out=HELD_OUT), seed=0)
        train, held_out = loaded.train.tokens, loaded.held_out.tokens
        vocabulary: BpeVocabulary | ByteVocabulary = ByteVocabulary()
        if bpe_size:
            as_text = vocabulary.decode
            vocabulary = train_bpe([as_text(x) for x in train], bpe_size)
            train, held_out = ([vocabulary.encode(as_text(x)) for x in part] for part in (train, held_out))
        name = "shakespeare"
    else:
        folder = Path(corpus)
        # There only while the files beside it belong together.
        if not (folder / "corpus.json").is_file():
            raise ValueError(
                f"corpus: got {corpus!r}, want {SHIPPED!r} or a folder made by `python -m experiments.corpus --out ..`"
            )
        if bpe_size:
            raise ValueError(f"bpe_size: got {bpe_size} with a corpus, want 0: it has a tokenizer")
        vocabulary = load_vocabulary(folder / "tokenizer.json")
        files, held_out_files = (str(folder / "train.bin"),), (str(folder / "held_out.bin"),)
        config = DataConfig(files=files, held_out_files=held_out_files, vocabulary="none", separator=vocabulary.end)
        loaded = load_corpus(config, seed=0)
        train, held_out = loaded.train.tokens, loaded.held_out.tokens
        name = folder.name
    validation, test = _halves(held_out)
    # What the ids mean is in it, too: the text itself, of the part that is decoded anyway.
    hashed = hashlib.sha256(vocabulary.decode(np.concatenate(held_out)).encode())
    for tokens in (*train, *held_out):
        hashed.update(np.asarray(tokens, "<u4").tobytes())
    digest = hashed.hexdigest()[:8]

    def documents(tokens: list[np.ndarray], count: bool) -> Documents:
        size = sum(len(vocabulary.decode(x).encode()) for x in tokens) if count else 0
        return Documents(tokens, vocabulary.end, size)

    parts = documents(train, False), documents(validation, True), documents(test, True)
    return Text(f"{name} {digest}", vocabulary, *parts)


def _halves(held_out: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Every other document, or the halves of the only one."""
    if len(held_out) > 1:
        return held_out[::2], held_out[1::2]
    middle = len(held_out[0]) // 2
    return [held_out[0][:middle]], [held_out[0][middle:]]
