"""Rows of an embedding: both ways to sum their gradients agree, and one of them adds nothing in an unknown order."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from tolerances import BF16, FLOAT32, FLOAT64, assert_close

from qdelta_jax.layers.embedding import lookup
from qdelta_jax.models import LanguageModel, ModelConfig

RNG = np.random.default_rng(0)
TABLE, TOKENS = RNG.normal(size=(11, 6)), RNG.integers(-2, 14, (3, 40))
"""Rows that are read often, and tokens outside of the table."""
D_Y = RNG.normal(size=(3, 40, 6)) * 10.0 ** RNG.integers(-6, 6, (3, 40, 1))


def pull(table, dtype, gradient):
    y, back = jax.vjp(lambda table: lookup(table, jnp.asarray(TOKENS), dtype, gradient), table)
    return y, back(jnp.asarray(D_Y, y.dtype))[0]


@pytest.mark.parametrize(
    ("of", "dtype"),
    [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")],
)
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_gradients_agree(of, dtype, backend, monkeypatch):
    """With what NumPy sums in float64; also in the form of an accelerator, where float32 is three 16-bit parts."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    y, d_table = jax.jit(lambda table: pull(table, dtype, "product"))(jnp.asarray(TABLE, of))
    same, _ = pull(jnp.asarray(TABLE, of), dtype, "scatter")
    assert y.dtype == dtype
    assert d_table.dtype == of
    np.testing.assert_array_equal(y, same)
    want = np.zeros(TABLE.shape)
    np.add.at(want, np.clip(TOKENS, 0, 10), np.asarray(jnp.asarray(D_Y, dtype), np.float64))
    # Each sum of a column is off by what its largest term loses.
    assert_close(d_table, jnp.asarray(want, of), 2 * float(jnp.finfo(of).eps) if of != "float32" else FLOAT32)


def test_float64(x64):
    assert_close(
        pull(jnp.asarray(TABLE), "float64", "product"), pull(jnp.asarray(TABLE), "float64", "scatter"), FLOAT64
    )


def test_a_model_adds_nothing_in_an_unknown_order():
    options = {"vocab_size": 11, "width": 8, "layers": 1, "mlp_hidden": 8, "heads": 1, "key_dim": 8, "value_dim": 8}
    tokens = jnp.asarray(np.clip(TOKENS, 0, 10))
    found, texts = [], []
    for gradient in ("scatter", "product"):
        config = ModelConfig(**options, embedding_gradient=gradient)
        graph, state = nnx.split(LanguageModel(config, rngs=nnx.Rngs(0)))
        run = jax.jit(jax.grad(lambda state, graph=graph: jnp.sum(jnp.sin(nnx.merge(graph, state)(tokens)))))
        texts.append(run.lower(state).as_text())
        found.append(run(state))
    assert ["stablehlo.scatter" in text for text in texts] == [True, False]
    assert_close(found[1], found[0], FLOAT32)
    with pytest.raises(ValueError, match="embedding_gradient: got 'sum', want one of"):
        ModelConfig(**options, embedding_gradient="sum")


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint32"])
def test_tokens_of_any_integer_type(dtype):
    """A table of more rows than 8 bits can number."""
    table, largest = jnp.arange(300.0)[:, None], min(np.iinfo(dtype).max, 1000)
    tokens = jnp.asarray([0, 5, 127, largest], dtype)
    want = [0.0, 5.0, 127.0, min(largest, 299.0)]
    for gradient in ("scatter", "product"):
        assert lookup(table, tokens, "float32", gradient)[:, 0].tolist() == want


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_under_vmap_over_tables_and_in_a_jacobian(dtype):
    tables, tokens = jnp.asarray(RNG.normal(size=(2, 5, 3)), jnp.float32), jnp.asarray([1, 4, 1])

    def value(gradient, table):
        return jnp.sum(jnp.sin(lookup(table, tokens, dtype, gradient).astype(jnp.float32)))

    def rows(gradient, table):
        return lookup(table, tokens, dtype, gradient)

    for f in (
        lambda g: jax.vmap(jax.grad(partial(value, g)))(tables),
        lambda g: jax.jacrev(partial(rows, g))(tables[0]),
    ):
        assert_close(f("product"), f("scatter"), FLOAT32 if dtype == "float32" else BF16["gradient"])


def test_inside_shard_map(cpu_devices):
    mesh = Mesh(np.array(cpu_devices[:4]), ("data",))
    table, tokens = jnp.asarray(TABLE, jnp.float32), jnp.asarray(np.clip(TOKENS, 0, 10).reshape(4, -1))

    def gradient(table, tokens):
        return jax.grad(lambda table: jnp.sum(jnp.sin(lookup(table, tokens, "float32", "product"))))(table)

    split = jax.shard_map(
        gradient, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("data")), out_specs=PartitionSpec()
    )
    assert_close(jax.jit(split)(table, tokens), gradient(table, tokens), FLOAT32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": jnp.ones(3)}, r"table: got \(3,\), want \[V, D\]"),
        ({"tokens": jnp.ones(3)}, "tokens: got float32, want an integer array"),
        ({"tokens": [0, 1]}, "tokens: got list, want an integer array"),
        ({"gradient": "sum"}, "gradient: got 'sum', want one of"),
    ],
)
def test_bad_arguments(change, message):
    good = {"table": jnp.ones((3, 2)), "tokens": jnp.zeros(3, jnp.int32), "dtype": "float32"}
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(lookup)(**{**good, **change})
