"""Files, vocabularies, splits and packed batches."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest

from qdelta_jax.training import ByteVocabulary, DataConfig
from qdelta_jax.training.data import batches, held_out_batches
from qdelta_jax.training.documents import Documents, load_corpus, sample_text
from qdelta_jax.training.vocabulary import load_vocabulary, train_bpe

END = 9999
SIZES = (3, 5, 1, 300, 40, 32, 31, 33, 64, 65, 10)


@pytest.fixture
def documents():
    """Ids that name their own place: x predicts x + 1 inside a document."""
    starts = np.cumsum([1, *SIZES])
    return Documents([np.arange(a, a + n) for a, n in zip(starts, SIZES, strict=False)], END, 0)


def predictions(batch):
    real = batch.segment_ids != 0
    return list(zip(batch.tokens[real].tolist(), batch.targets[real].tolist(), strict=True))


def expected(documents):
    pairs = Counter()
    for ids in documents.tokens:
        row = [END, *ids.tolist(), END]
        pairs.update(itertools.pairwise(row))
    return pairs


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def test_no_prediction_crosses_documents_or_pieces(documents):
    for batch in take(batches(documents, length=32, rows=4, seed=0), 30):
        assert batch.tokens.shape == batch.targets.shape == batch.segment_ids.shape == (4, 32)
        for row in range(4):
            ids = batch.segment_ids[row]
            changes = np.flatnonzero(np.diff(ids))
            assert set(np.unique(ids)) - {0} == set(range(1, ids.max() + 1))
            assert np.all(ids[np.flatnonzero(ids == 0)[0] :] == 0) if (ids == 0).any() else True
            # Inside a segment the inputs are the targets, one later.
            inside = np.setdiff1d(np.flatnonzero(ids[:-1]), changes)
            np.testing.assert_array_equal(batch.tokens[row, inside + 1], batch.targets[row, inside])
        for token, target in predictions(batch):
            assert END in (token, target) or target == token + 1


def test_every_token_is_predicted_once_an_epoch(documents):
    wanted, epochs = expected(documents), 40
    seen, total = Counter(), 0
    iterator = batches(documents, length=32, rows=1, seed=3)
    while total < epochs * documents.num_tokens:
        pairs = predictions(next(iterator))
        seen.update(pairs)
        total += len(pairs)
    assert set(seen) == set(wanted)
    # Only the pieces that wait in the bins may be ahead or behind.
    assert all(abs(seen[pair] - epochs * wanted[pair]) <= 3 * wanted[pair] for pair in wanted)


def test_cuts_move_from_epoch_to_epoch(documents):
    long = Documents([documents.tokens[3]], END, 0)
    starts = {int(b.tokens[0, 0]) for b in take(batches(long, length=32, rows=1, seed=0), 60)}
    assert len(starts) > 20


def test_order_depends_on_the_seed_alone(documents):
    one, same, other = (take(batches(documents, length=32, rows=4, seed=s), 5) for s in (1, 1, 2))
    for a, b in zip(one, same, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
    assert any(not np.array_equal(a.tokens, b.tokens) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("consumed", [0, 1, 17, 40])
def test_position_is_restored_exactly(documents, consumed):
    first = batches(documents, length=32, rows=3, seed=5)
    take(first, consumed)
    state = json.loads(json.dumps(first.get_state()))
    second = batches(documents, length=32, rows=3, seed=5)
    second.set_state(state)
    for a, b in zip(take(first, 30), take(second, 30), strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


def test_processes_share_the_pieces(documents):
    long = Documents([np.arange(1, 20_000)], END, 0)
    seen = []
    for index in range(2):
        iterator = batches(long, length=32, rows=1, seed=0, process=(index, 2))
        seen.append({p for b in take(iterator, 64) for p in predictions(b)})
    # 64 rows of the 313 of a first epoch: nothing twice.
    assert not seen[0] & seen[1]
    with pytest.raises(ValueError, match="cannot be shared by 100 processes"):
        batches(documents, length=32, rows=1, seed=0, process=(0, 100))


@pytest.mark.parametrize("count", [1, 3])
def test_held_out_has_every_prediction_once(documents, count):
    parts = [list(held_out_batches(documents, length=32, rows=4, process=(i, count))) for i in range(count)]
    assert len({len(part) for part in parts}) == 1
    assert all(b.tokens.shape == (4, 32) for part in parts for b in part)
    assert Counter(p for part in parts for b in part for p in predictions(b)) == expected(documents)


def test_bytes_round_trip():
    vocabulary = ByteVocabulary()
    text = "naïve — 東京 🙂\n"
    assert vocabulary.decode([*vocabulary.encode(text).tolist(), vocabulary.end, -1]) == text


def test_bpe_round_trip_and_ends(tmp_path):
    vocabulary = train_bpe(["the cat and the hat and the rat " * 20], 300)
    assert 257 < vocabulary.size <= 300
    text = "the naïve <|end|> 東京"
    ids = vocabulary.encode(text)
    assert vocabulary.end not in ids, "text that spells the end token must not become one"
    assert vocabulary.decode([*ids.tolist(), vocabulary.end, -1]) == text
    vocabulary.save(tmp_path / "tokenizer.json")
    loaded = load_vocabulary(tmp_path / "tokenizer.json")
    np.testing.assert_array_equal(loaded.encode(text), ids)
    assert (loaded.size, loaded.end) == (vocabulary.size, vocabulary.end)


def test_bpe_of_a_run_is_fitted_on_training_text_and_kept(tmp_path):
    train, held_out = tmp_path / "a.txt", tmp_path / "b.txt"
    train.write_text("the cat and the hat " * 50)
    held_out.write_text("zyzzyva " * 50)
    config = DataConfig(files=(str(train),), held_out_files=(str(held_out),), vocabulary="bpe", bpe_size=270)
    first = load_corpus(config, 0, tmp_path)
    assert len(first.train.tokens[0]) < 1000
    assert len(first.held_out.tokens[0]) >= 400
    assert not (tmp_path / "tokenizer.json").exists()
    first.vocabulary.save(tmp_path / "tokenizer.json")
    train.write_text("something else entirely " * 50)
    again = load_corpus(config, 0, tmp_path)
    np.testing.assert_array_equal(first.held_out.tokens[0], again.held_out.tokens[0])


def test_one_document_is_split_by_place(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(65 + i // 10) for i in range(200)))
    corpus = load_corpus(DataConfig(files=(str(path),), held_out=0.1), 0)
    assert (
        corpus.vocabulary.decode(corpus.train.tokens[0]) + corpus.vocabulary.decode(corpus.held_out.tokens[0])
        == path.read_text()
    )
    assert corpus.held_out.num_bytes == 20
    assert corpus.held_out.num_tokens == 21


def test_documents_are_split_whole(tmp_path):
    path = tmp_path / "docs.jsonl"
    texts = [f"document {i} " + "é" * i for i in range(40)]
    path.write_text("\n".join(json.dumps({"text": t}) for t in texts) + "\n\n", encoding="utf-8")
    config = DataConfig(files=(str(path),), held_out=0.2)
    corpus = load_corpus(config, seed=1)
    parts = [[corpus.vocabulary.decode(t) for t in s.tokens] for s in (corpus.train, corpus.held_out)]
    assert sorted(parts[0] + parts[1]) == sorted(texts)
    assert not set(parts[0]) & set(parts[1])
    assert 0.15 < sum(map(len, parts[1])) / sum(map(len, texts)) < 0.3
    assert corpus.held_out.num_bytes == sum(len(t.encode()) for t in parts[1])
    assert [t.tolist() for t in load_corpus(config, 1).held_out.tokens] == [t.tolist() for t in corpus.held_out.tokens]
    assert [corpus.vocabulary.decode(t) for t in load_corpus(config, 2).held_out.tokens] != parts[1]


@pytest.mark.parametrize("suffix", [".npy", ".bin"])
def test_token_files(tmp_path, suffix):
    ids = np.array([7, 8, 9, 0, 0, 5, 6, 0, 300], np.uint16)
    path = tmp_path / f"ids{suffix}"
    if suffix == ".npy":
        np.save(path, ids)
    else:
        ids.tofile(path)
    config = DataConfig(files=(str(path),), held_out_files=(str(path),), vocabulary="none", separator=0)
    corpus = load_corpus(config, 0)
    assert [t.tolist() for t in corpus.train.tokens] == [[7, 8, 9], [5, 6], [300]]
    assert corpus.train.end == 0
    assert corpus.vocab_size == 301
    assert corpus.held_out.num_bytes == 0
    with pytest.raises(ValueError, match="token ids from 300 to 300, want 0 <= id < 257"):
        load_corpus(DataConfig(files=(str(path),), held_out_files=(str(path),)), 0)


def test_bad_files_are_named(tmp_path):
    def load(name, content=b"", **options):
        path = tmp_path / name
        path.write_bytes(content)
        return load_corpus(DataConfig(files=(str(path),), **options), 0)

    with pytest.raises(ValueError, match=r"nowhere\.txt does not exist"):
        load_corpus(DataConfig(files=(str(tmp_path / "nowhere.txt"),)), 0)
    with pytest.raises(ValueError, match=r"want \.txt, \.jsonl, \.npy or \.bin"):
        load("a.pdf")
    with pytest.raises(ValueError, match="is not UTF-8"):
        load("latin.txt", "é".encode("latin1"))
    with pytest.raises(ValueError, match="no text for training"):
        load("empty.txt")
    with pytest.raises(ValueError, match="line 2: want JSON with 'text'"):
        load("a.jsonl", b'{"text": "good"}\n{"txt": "bad"}\n')
    with pytest.raises(ValueError, match="line 1: 'text' is int, want a string"):
        load("b.jsonl", b'{"text": 5}\n')
    with pytest.raises(ValueError, match="want a multiple of 2"):
        load("odd.bin", b"abc", vocabulary="none")
    with pytest.raises(ValueError, match="text and token files together"):
        load_corpus(DataConfig(files=(str(tmp_path / "a.jsonl"), str(tmp_path / "odd.bin"))), 0)
    with pytest.raises(ValueError, match="path of a tokenizer"):
        load("c.txt", b"text", vocabulary="byte")
    with pytest.raises(ValueError, match="'none' for text files"):
        load("c.txt", b"text", vocabulary="none")
    with pytest.raises(ValueError, match="bpe_size: got 100"):
        load("c.txt", b"text", vocabulary="bpe", bpe_size=100)
    with pytest.raises(ValueError, match="held_out: got 1"):
        DataConfig(held_out=1.0)


def test_half_a_surrogate_pair_is_replaced(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800b"}\n{"text": "c"}\n')
    corpus = load_corpus(DataConfig(files=(str(path),)), 0)
    assert {corpus.vocabulary.decode(s.tokens[0]) for s in (corpus.train, corpus.held_out)} == {"a?b", "c"}


def test_sample_text_ships():
    content = sample_text().read_bytes()
    assert 900_000 < len(content) < 1_000_000
    assert content.isascii()
    assert b"MACBETH." in content
    assert "public domain" in sample_text().with_name("README.md").read_text()
