"""Text to token ids and back: bytes, or a byte-pair encoding."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = ["BpeVocabulary", "ByteVocabulary", "Vocabulary", "load_vocabulary", "train_bpe"]

END = "<|end|>"


@runtime_checkable
class Vocabulary(Protocol):
    """size: how many ids there are. end: the id that begins and ends every document."""

    # Ids that stand for no text (the end, and -1 behind it) decode to nothing.

    size: int
    end: int

    def encode(self, text: str) -> np.ndarray: ...

    def decode(self, tokens: Iterable[Any]) -> str: ...


class ByteVocabulary:
    """id = byte of the UTF-8 text, and 256 for the end of a document.

    >>> vocabulary = ByteVocabulary()
    >>> vocabulary.encode("é!").tolist(), vocabulary.decode([195, 169, 33, 256])
    ([195, 169, 33], 'é!')
    """

    size = 257
    end = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint16)

    def decode(self, tokens: Iterable[Any]) -> str:
        return bytes(int(t) for t in tokens if 0 <= int(t) < 256).decode("utf-8", errors="replace")


class BpeVocabulary:
    """A `tokenizers` tokenizer. Its end of a document is the first it has of <|end|>, <|endoftext|>, </s>.

    Raises:
        ValueError: it has none of them.
    """

    def __init__(self, tokenizer: Tokenizer):
        # A document that spells out "<|end|>" is text, not an end.
        tokenizer.encode_special_tokens = True
        self.tokenizer = tokenizer
        self.size = tokenizer.get_vocab_size()
        known = [i for name in (END, "<|endoftext|>", "</s>") if (i := tokenizer.token_to_id(name)) is not None]
        if not known:
            raise ValueError("vocabulary: the tokenizer has none of the tokens <|end|>, <|endoftext|>, </s>")
        self.end = known[0]

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

    def decode(self, tokens: Iterable[Any]) -> str:
        return self.tokenizer.decode([int(t) for t in tokens if int(t) >= 0 and int(t) != self.end])

    def save(self, path: Path) -> None:
        self.tokenizer.save(str(path))


def train_bpe(texts: Iterable[str], size: int) -> BpeVocabulary:
    """A byte-level BPE of at most `size` entries, fitted on these texts; it can encode any text.

    Raises:
        ValueError: size below 257, the bytes and the end of a document.
    """
    if size < 257:
        raise ValueError(f"bpe_size: got {size}, want at least 257")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return BpeVocabulary(tokenizer)


def load_vocabulary(path: str | Path) -> BpeVocabulary:
    """Reads a tokenizer.json.

    Raises:
        ValueError: no such file, not a tokenizer, or one without an end-of-document token.
    """
    if not Path(path).is_file():
        raise ValueError(f"vocabulary: got {str(path)!r}, want 'bytes', 'bpe', 'none' or the path of a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"vocabulary: {path} is not a tokenizer.json: {error}") from error
    return BpeVocabulary(tokenizer)
