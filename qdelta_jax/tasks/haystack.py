"""Text to hide needles in: words or lines in a circle, and the places between sentences."""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Haystack", "noise_haystack", "text_haystack"]

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
SENTENCE_END = re.compile(r"[.!?]['\"\u2019\u201d)\]]*$")
LONGEST = 100
"""Words of a sentence: text without full stops has places for needles, too."""


class Haystack(NamedTuple):
    """units: the pieces of a haystack, used in a circle. begins: indices of those that begin a sentence, from 0 up.

    joiner: what stands between neighbours.
    """

    units: list[str]
    begins: np.ndarray
    joiner: str

    def hide(self, start: int, count: int, needles: Iterable[tuple[int, str]]) -> str:
        """`count` units from unit `start`, with needles given as (depth in percent, sentence).

        A needle of depth d comes after floor(d / 100 * sentences) of the sentences; the last of these may be
        incomplete. Depth 0 is before the first word, depth 100 behind the last.
        """
        where = (start + np.arange(count)) % len(self.units)
        pieces = [self.units[i] for i in where]
        # A text may be long and what is cut from it short: a search for each word, not a pass over all sentences.
        near = np.minimum(np.searchsorted(self.begins, where), len(self.begins) - 1)
        places = np.append(np.flatnonzero(self.begins[near] == where), count)
        # From the back, so that the places of the others stay what they are.
        for depth, needle in sorted(needles, reverse=True):
            pieces.insert(places[(len(places) - 1) * depth // 100], needle)
        return self.joiner.join(pieces)


def noise_haystack() -> Haystack:
    """One line of five short sentences, again and again; needles are lines between them."""
    return Haystack([NOISE], np.array([0]), "\n")


def text_haystack(text: Any) -> Haystack:
    """The words of any text, one space between them; a word that ends in . ! or ? (and quotes) ends a sentence.

    Raises:
        ValueError: text is no string, or has no words.
    """
    if not isinstance(text, str) or not text.strip():
        came = f"a string of {len(text)} characters" if isinstance(text, str) else type(text).__name__
        raise ValueError(f"text: got {came}, want a string with words in it, for the haystack of this task")
    return _words(text)


@lru_cache(maxsize=4)
def _words(text: str) -> Haystack:
    """Documents are written a few at a time, all out of the same text: 2 MB of it take 0.2 s."""
    words = text.split()
    begins = [0]
    for i, word in enumerate(words[:-1], 1):
        if SENTENCE_END.search(word) or i - begins[-1] == LONGEST:
            begins.append(i)
    return Haystack(words, np.array(begins), " ")
