"""Any tokenizer as two functions: text to ids, ids to text."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Codec", "as_codec"]


class Codec(NamedTuple):
    """encode: text to ids [n] int32, without special tokens. decode: ids to text."""

    encode: Callable[[str], np.ndarray]
    decode: Callable[[Any], str]


def as_codec(tokenizer: Any) -> Codec:
    """From an object with encode and decode, or a pair (encode, decode); ids may be in an attribute `ids`.

    Raises:
        ValueError: it is neither, or its encode adds special tokens, or gives no ids.
    """
    if isinstance(tokenizer, tuple | list) and len(tokenizer) == 2:
        encode, decode = tokenizer
    else:
        encode, decode = getattr(tokenizer, "encode", None), getattr(tokenizer, "decode", None)
    if not callable(encode) or not callable(decode):
        name = type(tokenizer).__name__
        raise ValueError(f"tokenizer: got {name}, want a pair of functions (encode, decode) or an object with both")

    def ids(text: str) -> np.ndarray:
        found = encode(text)
        return np.asarray(getattr(found, "ids", found), np.int32)

    special = ids("")
    if special.ndim != 1 or special.size:
        raise ValueError(
            f"tokenizer: encodes the empty text to {special.tolist()}, want no token: let it add no special ones"
        )
    if not ids("The grass is green.").size:
        raise ValueError("tokenizer: encodes 'The grass is green.' to no token, want at least one")
    return Codec(ids, decode)
