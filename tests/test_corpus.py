"""The corpus of packages, made up here: splits, repeated text, downloads, the files that come out."""

import hashlib
import io
import json
import subprocess
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from experiments import corpus
from experiments.corpus import Gather, Source, collect, main, replaced
from experiments.corpus_markup import html
from experiments.corpus_packages import Package, fetch, find, read_files
from experiments.corpus_text import each, plain
from qdelta_jax.training import DataConfig
from qdelta_jax.training.documents import load_corpus

SENTENCE = "The keeper of the light told us that number {} of the old stories was not to be read in the dark. "


def prose(start: int, count: int = 12) -> str:
    return "".join(SENTENCE.format(n) for n in range(start, start + count)).strip()


def make_deb(path: Path, files: dict[str, str]) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    parts = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": packed.getvalue()}
    raw = b"!<arch>\n"
    for name, content in parts.items():
        raw += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode() + content
        raw += b"\n" * (len(content) % 2)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)


@pytest.fixture
def sources(tmp_path):
    """Two sources, whose packages lie in tmp_path / "out" / "packages"."""
    packages = tmp_path / "out" / "packages"
    make_deb(packages / "tales_1%3a2.0-1_all.deb", {f"usr/tales/{n}.txt": prose(100 * n) for n in range(40)})
    pages = {f"page{n}.html": f"<body><nav>Home</nav><p>{prose(10_000 + 100 * n)}</p></body>" for n in range(40)}
    with zipfile.ZipFile(packages / "web_pages-0.3-py3-none-any.whl", "w") as wheel:
        for name, text in pages.items():
            wheel.writestr(f"data/{name}", text)
    return (Source("tales", r"tales/\d+\.txt", plain()), Source("web-pages", r".*\.html", each(html), "pypi"))


def gather(tmp_path, **changes) -> Gather:
    return Gather(out=str(tmp_path / "out"), bpe_size=300, held_out=0.2, **changes)


# Repetitions and splits


def test_repeated_documents_and_paragraphs_are_counted(tmp_path, sources):
    packages = tmp_path / "out" / "packages"
    shared = prose(0)
    make_deb(packages / "copies_1_all.deb", {"a.txt": shared, "b.txt": f"{shared}\n\n{prose(50_000)}", "c.txt": "No."})
    sources = (*sources, Source("copies", r".*\.txt", plain()))
    documents, dropped = collect(sources, corpus.get(sources, packages, allow_missing=False))
    assert dropped["copies"] == {
        "not text": 0, "repeated document": len(shared), "repeated paragraph": len(shared) + 2, "short": 3,
    }  # fmt: skip
    assert [d.text for d in documents if d.source == "copies"] == [prose(50_000)]


def test_long_documents_are_cut_between_paragraphs(tmp_path, sources):
    parts = [prose(100 * n) for n in range(100)]
    make_deb(tmp_path / "long_1_all.deb", {"a.txt": "\n\n".join(parts)})
    source = Source("long", r".*\.txt", plain(size=10**9))
    documents, _ = collect([source], corpus.get([source], tmp_path, False))
    assert len(documents) == 3
    assert sorted(p for d in documents for p in d.text.split("\n\n")) == sorted(parts)


def test_added_sources_move_no_document_to_the_other_split(tmp_path, sources):
    packages = tmp_path / "out" / "packages"
    # It comes first here, and takes a paragraph from a document of the next source.
    make_deb(packages / "added_1_all.deb", {"a.txt": f"{prose(300)}\n\n{prose(70_000)}"})
    make_deb(packages / "long_1_all.deb", {"b.txt": f"{prose(300)}\n\n{prose(80_000)}"})
    sources = (*sources[1:], Source("long", r".*\.txt", plain()))
    more = (Source("added", r".*\.txt", plain()), *sources)
    before, after = (
        {d.text[-600:]: (d.key, d.is_held_out(0.2)) for d in collect(s, corpus.get(s, packages, False))[0]}
        for s in (sources, more)
    )
    assert len(after) == len(before) + 1
    assert before.items() <= after.items()
    assert 0 < sum(held for _, held in before.values()) < len(before)


# From packages to files


def test_tokens_read_back_as_the_text_that_the_report_counts(tmp_path, sources):
    report = main(gather(tmp_path), sources)
    out = tmp_path / "out"
    texts = {n: [json.loads(x) for x in (out / f"{n}.jsonl").open(encoding="utf-8")] for n in ("train", "held_out")}
    assert sorted(d["text"] for n in texts for d in texts[n]) == sorted(
        [*(prose(100 * n) for n in range(40)), *(prose(10_000 + 100 * n) for n in range(40))]
    )
    data = DataConfig(
        files=(str(out / "train.bin"),),
        held_out_files=(str(out / "held_out.bin"),),
        vocabulary=str(out / "tokenizer.json"),
        separator=report["separator"],
    )
    read = load_corpus(data, seed=0)
    for name, part in (("train", read.train), ("held_out", read.held_out)):
        assert [read.vocabulary.decode(t) for t in part.tokens] == [d["text"] for d in texts[name]]
        row = report["splits"][name]["all"]
        assert row == {"documents": len(part.tokens), "bytes": part.num_bytes, "tokens": part.num_tokens}
        assert len(np.fromfile(out / f"{name}.bin", "<u2")) == row["tokens"]
    assert {d["source"] for d in texts["train"]} == {"tales", "web-pages"}
    assert report["packages"]["tales"]["version"] == "1:2.0-1"
    assert report["sha256"]["train.bin"] == hashlib.sha256((out / "train.bin").read_bytes()).hexdigest()
    assert str(tmp_path) not in (out / "corpus.json").read_text()


def test_same_packages_same_bytes(tmp_path, sources):
    out, names = tmp_path / "out", ("train.jsonl", "held_out.jsonl", "train.bin", "held_out.bin", "tokenizer.json")
    main(gather(tmp_path), sources)
    first = {n: (out / n).read_bytes() for n in (*names, "corpus.json")}
    main(gather(tmp_path), sources)
    assert {n: (out / n).read_bytes() for n in first} == first
    assert sorted(p.name for p in out.iterdir()) == sorted([*first, "packages"])


def test_interrupted_run_leaves_no_half_file_and_no_report(tmp_path, sources, monkeypatch):
    main(gather(tmp_path), sources)
    before = (tmp_path / "out" / "train.bin").read_bytes()

    def fails(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus.BpeVocabulary, "encode", fails)
    with pytest.raises(KeyboardInterrupt):
        main(gather(tmp_path, bpe_bytes=1000), sources)
    left = {p.name for p in (tmp_path / "out").iterdir()}
    assert left == {"packages", "tokenizer.json", "train.bin", "train.jsonl", "held_out.bin", "held_out.jsonl"}
    assert (tmp_path / "out" / "train.bin").read_bytes() == before


def test_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(TypeError), replaced(path) as file:
        file.writelines([b"ne", None])
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]


def no_network(monkeypatch, code: int = 100, files: tuple[str, ...] = ()) -> list[list[str]]:
    """Downloads that end so; the commands that were run."""
    commands = []

    def run(command, *, cwd, **_):
        commands.append(command)
        for name in files:
            Path(cwd, name).write_text("x")
        return subprocess.CompletedProcess(command, code, "", "E: Unable to locate package")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_missing_package_is_named_and_skipped_only_on_request(tmp_path, sources, monkeypatch):
    no_network(monkeypatch)
    more = (*sources, Source("absent", ".*", plain()))
    with pytest.raises(ValueError, match="packages: got none of absent, want all, or --allow-missing"):
        main(gather(tmp_path), more)
    report = main(gather(tmp_path, allow_missing=True), more)
    assert report["missing"] == ["absent"]
    assert list(report["packages"]) == ["tales", "web-pages"]


def test_download_is_cached_and_leaves_nothing_when_it_fails(tmp_path, monkeypatch):
    commands = no_network(monkeypatch, 0, ("tales_1_all.deb",))
    assert fetch("tales", "deb", tmp_path) == Package("tales", "1", tmp_path / "tales_1_all.deb")
    assert fetch("tales", "deb", tmp_path).version == "1"
    assert commands == [["apt-get", "download", "tales"]]
    no_network(monkeypatch, 1, ("more_1_all.deb",))
    with pytest.raises(ValueError, match="more: got no package"):
        fetch("more", "deb", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["tales_1_all.deb"]


def test_no_apt_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="tales: got no program apt-get"):
        fetch("tales", "deb", tmp_path)


def test_odd_packages_are_refused(tmp_path):
    for name in ("tales_1_all.deb", "tales_2_all.deb", "tales-more_1_all.deb", "cut_1_all.deb", "cut_web-1.tar.gz"):
        (tmp_path / name).write_bytes(b"!<arch>\n")
    with pytest.raises(ValueError, match=r"got tales_1_all\.deb and tales_2_all\.deb, want one"):
        find("tales", "deb", tmp_path)
    for name, kind in (("cut", "deb"), ("cut-web", "pypi")):
        with pytest.raises(ValueError, match=f"{name}: got a damaged"):
            read_files(find(name, kind, tmp_path), ".*")
    make_deb(tmp_path / "good_1_all.deb", {"a.txt": "x"})
    with pytest.raises(ValueError, match=r"good: got no file b\\\.txt"):
        read_files(find("good", "deb", tmp_path), r"b\.txt")


@pytest.mark.parametrize("changes", [{"bpe_size": 256}, {"bpe_size": 65537}, {"held_out": 0.0}, {"held_out": 1.0}])
def test_bad_settings_are_refused(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=f"{name}: got"):
        Gather(**changes)


def test_no_split_may_be_empty(tmp_path, sources):
    with pytest.raises(ValueError, match="held_out: got 1e-09 of 80 documents"):
        main(Gather(out=str(tmp_path / "out"), bpe_size=300, held_out=1e-9), sources)
