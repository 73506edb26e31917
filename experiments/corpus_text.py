"""Files of packages to clean English text: plain text, dictionaries, Bibles, R's data; duplicates."""

import gzip
import hashlib
import re
import struct
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator

from experiments.corpus_packages import Files

MIN_DOCUMENT = 500
"""Characters: shorter documents are dropped."""
MAX_DOCUMENT = 50_000
"""Characters: longer documents are cut, or one of them could be half of the held-out text."""
MIN_REPEATED = 100
"""Characters: shorter paragraphs may repeat (headings, the names in a play)."""
SMALL_WORDS = frozenset(
    re.findall(
        r"\w+",
        "the of and to a in is that for it as with be or by on this are not from an at which was his he have but they",
    )
)
MIN_SMALL_WORDS = 0.12
"""Share of `SMALL_WORDS`. Prose has 0.25 to 0.45; lists, code and other languages have less than this."""

_SPACES = {ord(c): " " for c in "\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u3000\t"}
_NOTHING = dict.fromkeys(map(ord, "\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\ufffd¶\r\f\x08"))


def clean(text: str) -> str:
    """NFC, plain spaces, no control characters, no line ends in spaces, paragraphs apart by one empty line."""
    text = unicodedata.normalize("NFC", text).translate(_SPACES | _NOTHING)
    text = re.sub(r"[\x00-\x09\x0b-\x1f\x7f]", "", text)
    text = re.sub(r" +$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def paragraphs(text: str) -> list[str]:
    """Of a cleaned text. Rules, tables and numbers, where fewer than 6 in 10 characters are letters, are left out."""
    kept = []
    for part in re.split(r"\n\s*\n", clean(text)):
        solid = re.sub(r"\s", "", part)
        if solid and sum(map(str.isalpha, solid)) >= 0.6 * len(solid):
            kept.append(part.rstrip())
    return kept


def is_english(text: str) -> bool:
    """Whether it reads as English sentences."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    return len(words) >= 50 and sum(w in SMALL_WORDS for w in words) >= MIN_SMALL_WORDS * len(words)


def group(parts: Iterable[str], size: int) -> Iterator[str]:
    """Parts (verses, entries) joined into documents of at least `size` characters; the last may have less."""
    held: list[str] = []
    length = 0
    for part in parts:
        held.append(part)
        length += len(part)
        if length >= size:
            yield "\n\n".join(held)
            held, length = [], 0
    if held:
        yield "\n\n".join(held)


class Deduplicator:
    """Drops paragraphs that came before, in whichever document; letters and digits alone are compared."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()
        self.documents: set[bytes] = set()

    def new_document(self, text: str) -> bool:
        return self._add(self.documents, text)

    def new_paragraphs(self, parts: list[str]) -> list[str]:
        return [p for p in parts if len(p) < MIN_REPEATED or self._add(self.seen, p)]

    def _add(self, seen: set[bytes], text: str) -> bool:
        key = hashlib.blake2b("".join(filter(str.isalnum, text.lower())).encode(), digest_size=16).digest()
        new = key not in seen
        seen.add(key)
        return new


def decode(path: str, raw: bytes) -> str:
    if path.endswith((".gz", ".dz")):
        raw = gzip.decompress(raw)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def each(read: Callable[[str], Iterator[str]]) -> Callable[[Files], Iterator[str]]:
    """A reader of one text, over files."""
    return lambda files: (text for path, raw in files for text in read(decode(path, raw)))


def unwrap(text: str) -> str:
    """Paragraphs of full lines become one line each; verse and lists, whose lines are short, stay."""
    parts = []
    for part in text.split("\n\n"):
        lines = [line.strip() for line in part.split("\n")]
        parts.append(" ".join(lines) if all(len(line) >= 55 for line in lines[:-1]) else "\n".join(lines))
    return "\n\n".join(parts)


def plain(heading: str = "", size: int = 20_000, drop: str = "") -> Callable[[Files], Iterator[str]]:
    """Plain text, cut before lines that match `heading`, or else into documents of `size` characters.

    drop: lines that match it are no text.
    """

    def read(text: str) -> Iterator[str]:
        text = clean(text)
        if drop:
            text = re.sub(rf"^(?:{drop})\n?", "", text, flags=re.MULTILINE)
        chapters = re.split(rf"(?m)^(?={heading})", text) if heading else [text]
        for chapter in filter(None, map(str.strip, chapters)):
            yield from group(unwrap(chapter).split("\n\n"), size)

    return each(read)


def dictionary(size: int = 4000) -> Callable[[Files], Iterator[str]]:
    """dictd's text: an entry begins at the margin, its text is indented; documents of consecutive entries."""

    def read(text: str) -> Iterator[str]:
        entries = re.split(r"\n(?=[^\s])", text)
        yield from group((e for e in map(entry, entries) if e), size)

    return each(read)


def entry(text: str) -> str:
    """One entry without pronunciation, etymology, the names of the sources and the braces of links."""
    if text.startswith(("00-", "00")):
        return ""
    # Letters with an accent: [=o], [a^], [oe]. But not [R.], which is "rare".
    accent = r"\[(?:[^\w\s\[\]]([A-Za-z]{1,2})|([A-Za-z]{1,2})[^\w\s\[\].]|([ao]e|[AO]E))\]"
    text = re.sub(accent, lambda m: m[1] or m[2] or m[3], text)
    text = re.sub(
        r"\[(?:1913 Webster|Webster 1913 Suppl\.|WordNet[^]]*|PJC|RP|AS|Century[^]]*|\+?[A-Z]{2,3})(?: \+PJC)?\]",
        "",
        text,
    )
    head, _, rest = text.partition("\n\n")
    head = re.sub(r"\s\\[^\\]*\\(?:\s*\([^()]*\))?", "", head)
    if "\\" in text[:200]:
        # Etymologies are long, labels such as [Obs.] short.
        head = re.sub(r"\s\[[^\[\]]{12,}(?:\[[^\]]*\][^\[\]]*)*\]", "", head)
    text = re.sub(r"\{([^{}]*)\}", r"\1", f"{head}\n\n{rest}")
    parts = [" ".join(p.split()) for p in re.split(r"\n\s*\n", text)]
    return "\n".join(p for p in parts if p and not re.fullmatch(r"\(\d{4}-\d\d-\d\d\)", p))


def fortunes(text: str) -> Iterator[str]:
    """Sayings, some to a document."""
    return group((s.strip("\n") for s in re.split(r"(?m)^%\n", clean(text))), 2000)


def sword(files: Files) -> Iterator[str]:
    """A SWORD module, blocks of zlib with an index of verses; documents are chapters or some comments together."""
    named = {re.sub(r".*/", "", path): raw for path, raw in files}
    for verses in sorted((n for n in named if n.endswith("zv")), key=lambda n: n.startswith("nt")):
        blocks, index = named[verses[:-1] + "z"], struct.iter_unpack("<III", named[verses[:-1] + "s"])
        texts = [zlib.decompress(blocks[at : at + size]) if size else b"" for at, size, _ in index]
        yield from _chapters(_places(named[verses], texts), texts)


def _places(raw: bytes, texts: list[bytes]) -> list[tuple[int, int, int]]:
    """(block, offset, size) of each verse. Newer modules have longer sizes; what they call themselves does not tell."""
    for form in ("<IIH", "<III"):
        if len(raw) % struct.calcsize(form) == 0:
            places = list(struct.iter_unpack(form, raw))
            if all(not size or (n < len(texts) and at + size <= len(texts[n])) for n, at, size in places):
                return places
    raise ValueError(f"sword: got an index of {len(raw)} bytes that fits no text, want 10 or 12 bytes a verse")


def _chapters(verses: Iterable[tuple[int, int, int]], texts: list[bytes]) -> Iterator[str]:
    held: list[str] = []
    before = None
    for place in verses:
        number, at, size = place
        raw = texts[number][at : at + size].decode("utf-8", errors="replace") if size else ""
        # An entry without text is the place of a chapter's heading.
        if (not raw or "<chapter" in raw) and sum(map(len, held)) > 1500:
            yield "\n".join(held)
            held = []
        # Verses that share a comment point to the same one.
        said = _verse(raw) if raw and place != before else ""
        before = place if raw else before
        if said:
            held.append(said)
    yield "\n".join(held)


def _verse(raw: str) -> str:
    raw = re.sub(r"(?s)<(note|figure)\b.*?</\1>", " ", raw)
    raw = re.sub(r"</?(?:p|div)\b[^>]*>|\\par\b", "\0", raw)
    raw = re.sub(r"</?(?:lb|br|l|lg|title)\b[^>]*>", "\n", raw)
    raw = re.sub(r"[^\S\n]+", " ", re.sub(r"<[^>]*>", "", raw))
    # Between paragraphs an empty line, between the lines of a psalm none.
    return re.sub(r" ?[\n\0][\s\0]*", lambda m: "\n\n" if "\0" in m[0] else "\n", raw).strip()


def r_strings(files: Files) -> Iterator[str]:
    """Character vectors of R's data: one line an element, cut at the chapters."""
    for _, raw in files:
        while raw:
            unpack = zlib.decompressobj()
            data, raw = unpack.decompress(raw[4:]), unpack.unused_data
            lines, at = [], 0
            while match := re.compile(rb"\x00[\x00-\x0f][\x00\x80\x20]\x09(.{4})", re.DOTALL).search(data, at):
                size = struct.unpack(">i", match[1])[0]
                at = match.end() + max(0, size)
                lines.append(data[match.end() : at].decode("utf-8", errors="replace"))
            yield from plain(r"(?:CHAPTER|Chapter|VOLUME|Volume)\b", size=10**9)([("", "\n".join(lines).encode())])
