"""Generation: a batch of prompts is each prompt alone, sampling, stop tokens, compilations."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qdelta_jax.models import LanguageModel, ModelConfig, generate
from qdelta_jax.models.generation import Sampling, _generate, sample

VOCAB = 23
PROMPTS = [[1, 2, 3], [5], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]]


@cache
def build(pattern=("window",)):
    config = ModelConfig(
        vocab_size=VOCAB,
        width=16,
        layers=len(pattern),
        mlp_hidden=24,
        pattern=pattern,
        heads=2,
        key_dim=8,
        value_dim=8,
        attention_heads=2,
        window=4,
        chunk_size=16,
    )
    model = LanguageModel(config, rngs=nnx.Rngs(1))
    # Untrained models repeat themselves; strong embeddings and outputs make tokens depend on everything.
    model.embedding.set_value(model.embedding.get_value() * 50)
    model.head.kernel.set_value(model.head.kernel.get_value() * 50)
    return model


@pytest.mark.parametrize("pattern", [("rule", "window"), ("attention",)], ids="-".join)
def test_a_batch_is_each_prompt_alone(pattern):
    """Greedy: each row is the most likely token of a forward pass over all before it, one row at a time."""
    model = build(pattern)
    tokens, finished = generate(model, PROMPTS, max_new_tokens=9)
    assert tokens.shape == (3, 9)
    assert tokens.dtype == jnp.int32
    assert not np.any(finished)
    forward = nnx.jit(lambda model, tokens: model(tokens))
    for prompt, got in zip(PROMPTS, tokens.tolist(), strict=True):
        row = np.zeros((1, 20), np.int32)
        row[0, : len(prompt) + 9] = prompt + got
        logits = np.asarray(forward(model, jnp.array(row)))[0]
        assert got == logits[len(prompt) - 1 : len(prompt) + 8].argmax(-1).tolist()
        assert generate(model, [prompt], max_new_tokens=9).tokens[0].tolist() == got
    assert len(set(tokens.ravel().tolist())) > 3


def test_padded_array_with_lengths():
    padded = np.full((3, 12), 22)
    for row, prompt in zip(padded, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    want = generate(build(), PROMPTS, max_new_tokens=5)
    got = generate(build(), jnp.array(padded), lengths=[3, 1, 11], max_new_tokens=5)
    assert got.tokens.tolist() == want.tokens.tolist()


def test_stop_tokens_finish_a_row_and_leave_the_others():
    free = generate(build(), PROMPTS, max_new_tokens=12).tokens.tolist()
    # One that some row draws after its first token, and some row never.
    stop = next(t for row in free for t in row[1:] if t != row[0] and not all(t in other for other in free))
    expected = []
    for row in free:
        end = row.index(stop) + 1 if stop in row else 12
        expected.append(row[:end] + [-1] * (12 - end))
    tokens, finished = generate(build(), PROMPTS, max_new_tokens=12, stop_tokens=[stop])
    assert tokens.tolist() == expected
    assert finished.tolist() == [stop in row for row in free]
    assert not all(finished.tolist())


def test_new_lengths_do_not_recompile():
    """Nor do other temperatures, top_k, top_p and stop tokens."""
    _generate.clear_cache()
    model = build()
    rng = jax.random.key(0)
    generate(model, PROMPTS, max_new_tokens=3, temperature=0.5, top_k=3, rng=rng)
    assert _generate._cache_size() == 1
    generate(model, [[1] * 16, [2] * 7, [3]], max_new_tokens=16, temperature=2.0, top_k=5, rng=rng)
    generate(model, [[1], [2], [3]], max_new_tokens=1, temperature=1.0, top_p=0.5, stop_tokens=[4], rng=rng)
    assert _generate._cache_size() == 1
    generate(model, [[1] * 17, [2], [3]], max_new_tokens=3, temperature=0.5, top_k=3, rng=rng)
    assert _generate._cache_size() == 2


def test_sampling_follows_its_key_row_by_row():
    options = {"max_new_tokens": 8, "temperature": 1.0}
    first = generate(build(), PROMPTS, rng=jax.random.key(1), **options).tokens
    again = generate(build(), PROMPTS, rng=jax.random.key(1), **options).tokens
    other = generate(build(), PROMPTS, rng=jax.random.key(2), **options).tokens
    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()
    # A row does not depend on those behind it.
    alone = generate(build(), PROMPTS[:1], rng=jax.random.key(1), **options).tokens
    assert alone.tolist() == first[:1].tolist()


def frequencies(logits, count=20000, **options):
    values = {"temperature": 1.0, "top_k": len(logits), "top_p": 1.0, **options}
    keys = jax.random.split(jax.random.key(5), count)
    dtypes = {"temperature": jnp.float32, "top_k": jnp.int32, "top_p": jnp.float32}
    sampling = Sampling(**{name: dtype(values[name]) for name, dtype in dtypes.items()})
    rows = jnp.broadcast_to(jnp.array(logits, jnp.float32), (count, len(logits)))
    filtered = bool(options.keys() - {"temperature"})
    tokens = sample(rows, keys, sampling, filtered=filtered)
    return np.bincount(np.asarray(tokens), minlength=len(logits)) / count


PROBABILITIES = np.array([0.1, 0.4, 0.05, 0.3, 0.15])


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_p": 0.01}, [1]),
        ({"top_p": 0.69}, [1, 3]),
        ({"top_p": 0.71}, [1, 3, 4]),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
        # top_p counts within what top_k leaves: 0.4 of 0.7 is not yet 0.5.
        ({"top_k": 2, "top_p": 0.5}, [1]),
        ({"top_k": 2, "top_p": 0.6}, [1, 3]),
    ],
)
def test_sampled_distribution(options, kept):
    want = np.zeros(5)
    want[kept] = PROBABILITIES[kept] / PROBABILITIES[kept].sum()
    got = frequencies(np.log(PROBABILITIES), **options)
    assert set(np.flatnonzero(got)) == set(kept)
    # Four standard deviations of a frequency near 1/2.
    np.testing.assert_allclose(got, want, atol=4 * 0.5 / np.sqrt(20000))


def test_temperature_sharpens():
    want = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    np.testing.assert_allclose(frequencies(np.log(PROBABILITIES), temperature=0.5), want, atol=0.015)


def test_ties_are_cut_to_top_k():
    assert np.count_nonzero(frequencies(np.zeros(5), top_k=2)) == 2


def test_top_k_of_one_is_greedy():
    greedy = generate(build(), PROMPTS, max_new_tokens=6).tokens
    sampled = generate(build(), PROMPTS, max_new_tokens=6, temperature=3.0, top_k=1, rng=jax.random.key(0)).tokens
    assert sampled.tolist() == greedy.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": []}, "prompts: got none"),
        ({"prompts": [[1], []]}, r"prompts: row 1 has shape \(0,\)"),
        ({"prompts": [[1, VOCAB]]}, "prompts: row 0 has values outside the tokens 0 .. 22"),
        ({"prompts": np.ones((2, 3, 4), int)}, r"prompts: got shape \(2, 3, 4\)"),
        ({"prompts": np.ones((2, 3), int), "lengths": [3, 4]}, r"lengths: got \[3, 4\]"),
        ({"prompts": np.ones((2, 3), int), "lengths": [3, 0]}, "prompts: row 1 has shape"),
        ({"lengths": [1]}, "lengths: only an array"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0"),
        ({"temperature": -1.0}, "temperature: got -1.0"),
        ({"temperature": 1.0}, "rng: got None"),
        ({"top_k": 0}, "top_k: got 0"),
        ({"top_p": 0.0}, "top_p: got 0.0"),
        ({"top_p": 1.5}, "top_p: got 1.5"),
    ],
)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        generate(build(), **{"prompts": [[1]], "max_new_tokens": 2, **change})
