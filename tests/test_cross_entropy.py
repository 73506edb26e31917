"""The loss in chunks of tokens against the loss of all logits at once: numbers, gradients, memory, meshes."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from standin import ONE, batch_of, small
from test_transforms import shapes_in
from tolerances import BF16, FLOAT32, FLOAT64, SHARDED, assert_close, relative_error

from qdelta_jax.layers.linear import Linear
from qdelta_jax.layers.partitioning import LOGICAL_TO_MESH, constrain
from qdelta_jax.models import LanguageModel
from qdelta_jax.training import OptimizerConfig
from qdelta_jax.training.cross_entropy import summed_cross_entropy
from qdelta_jax.training.train_step import Learner, make_mesh, shard_batch

ROWS, TIME, WIDTH, VOCAB = 3, 5, 4, 11
AXES = pytest.mark.parametrize("axis", [0, 1], ids=["untied", "tied"])


def draw(axis, dtype="float32", rows=ROWS, time=TIME, width=WIDTH, vocab=VOCAB):
    """(features, kernel, targets, counted), a few tokens of every row not counted."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, time, width)), dtype)
    kernel = jnp.asarray(rng.normal(size=(width, vocab) if axis == 0 else (vocab, width)), dtype)
    targets = jnp.asarray(rng.integers(0, vocab, (rows, time)), jnp.int32)
    return x, kernel, targets, jnp.asarray(np.arange(time) < rng.integers(2, time, rows)[:, None])


def plain(x, kernel, targets, counted, axis=0):
    """All logits at once."""
    logits = jnp.einsum("btd,dv->btv" if axis == 0 else "btd,vd->btv", x, kernel)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(jnp.where(counted, losses, 0))


@AXES
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", FLOAT64), ("float32", FLOAT32)])
def test_any_chunk_gives_the_loss_and_gradient_of_all_logits(axis, dtype, tolerance, x64):
    """Chunks of one token, a divisor, a non-divisor, all, and more than there are; NaN in padding."""
    x, kernel, targets, counted = draw(axis, dtype)
    want = jax.jit(jax.value_and_grad(partial(plain, axis=axis), (0, 1)))(x, kernel, targets, counted)
    dirty = jnp.where(counted[..., None], x, jnp.nan)
    wild = jnp.where(counted, targets, 10**6)
    for chunk in (1, 3, 4, ROWS * TIME, 1000, None):
        loss = partial(summed_cross_entropy, axis=axis, chunk=chunk)
        got = jax.jit(jax.value_and_grad(loss, (0, 1)))(dirty, kernel, wild, counted)
        assert {a.dtype for a in jax.tree.leaves(got)} == {jnp.dtype(dtype)}
        assert_close(got, want, tolerance, f"chunk {chunk}")
        assert np.all(np.asarray(got[1][0])[~np.asarray(counted)] == 0)
    loss = partial(summed_cross_entropy, axis=axis, chunk=4)
    assert_close(jax.jit(loss)(dirty, kernel, wild, counted), want[0], tolerance)


def test_second_derivatives(x64):
    arguments = draw(0, "float64")

    def hard(loss, x, kernel, *rest):
        slopes = jax.grad(lambda *a: jnp.sin(loss(*a, *rest)), (0, 1))(x, kernel)
        return sum(jnp.sum(s**3) for s in slopes)

    got, want = (
        jax.jit(jax.grad(partial(hard, loss), (0, 1)))(*arguments)
        for loss in (partial(summed_cross_entropy, chunk=4), plain)
    )
    assert_close(got, want, FLOAT64)


def test_bfloat16_products_float32_sums(x64):
    """Gradients of rounded inputs against float64; W's, a sum over tokens in float32, is better than rounded."""
    x, kernel, targets, counted = draw(0, "float32", 2, 64, 32, 48)
    x, kernel = (a.astype(jnp.bfloat16).astype(jnp.float32) for a in (x, kernel))
    wide = jax.jit(jax.value_and_grad(plain, (0, 1)))(x.astype(float), kernel.astype(float), targets, counted)
    loss = partial(summed_cross_entropy, chunk=8)
    got = jax.jit(jax.value_and_grad(loss, (0, 1)))(x.astype(jnp.bfloat16), kernel, targets, counted)
    assert [a.dtype for a in jax.tree.leaves(got)] == [jnp.float32, jnp.bfloat16, jnp.float32]
    assert relative_error(got[0], wide[0]) < FLOAT32
    assert relative_error(got[1][0].astype(float), wide[1][0]) < BF16["gradient"]
    assert relative_error(got[1][1], wide[1][1]) < BF16["gradient"] / 4


def test_a_target_outside_the_vocabulary_is_not_a_number():
    x, kernel, targets, counted = draw(0)
    for wrong in (-1, VOCAB):
        assert np.isnan(jax.jit(summed_cross_entropy)(x, kernel, targets.at[0, 0].set(wrong), counted))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axis": 1}, r"kernel: got shape \(4, 11\), want width 4 along its axis 1"),
        ({"targets": np.zeros((3, 4), np.int32)}, r"targets: got int32 \(3, 4\), want integer \[B,T\] = \(3, 5\)"),
        ({"counted": np.ones((3, 5), np.int32)}, r"counted: got int32 \(3, 5\), want bool or floating \[B,T\]"),
        ({"chunk": 0}, "chunk: got 0, want at least 1 token"),
    ],
)
def test_refusals(change, message):
    names = ("x", "kernel", "targets", "counted")
    with pytest.raises(ValueError, match=message):
        summed_cross_entropy(**{**dict(zip(names, draw(0), strict=True)), **change})
    with pytest.raises(ValueError, match="loss_chunk: got 0, want above 0"):
        OptimizerConfig(loss_chunk=0)


def learner(build, mesh, **options):
    return Learner(build, optax.sgd(0.1), mesh, **options)


def model(rngs, kind=LanguageModel, **fields):
    return kind(small(layers=1, pattern=("window",), **fields), rngs=rngs)


def all_at_once(learner, state, batch):
    """Mean loss and gradient from the model's own logits."""

    def loss(params):
        logits = nnx.merge(learner.graph, params, state.constants)(batch.tokens, segment_ids=batch.segment_ids)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
        counted = batch.segment_ids != 0
        return jnp.sum(jnp.where(counted, losses, 0)) / jnp.sum(counted, dtype=jnp.float32).astype(losses.dtype)

    return jax.value_and_grad(loss)(state.params)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_parameter_of_a_language_model(tied, x64):
    """In float64, in microbatches, an odd number of tokens in each."""
    kind = {"dtype": "float64", "param_dtype": "float64", "tie_embeddings": tied}
    mesh = make_mesh(ONE)
    batch = batch_of(np.random.default_rng(0), 6, 7)
    with jax.set_mesh(mesh):
        parts = learner(partial(model, **kind), mesh, accumulation=2, loss_chunk=4)
        state, batch = parts.init(0), shard_batch(batch, mesh)
        want = jax.jit(partial(all_at_once, parts))(state, batch)
        loss, grads, tokens = jax.jit(parts.gradient)(state, batch)
        total, counted = parts.evaluate(state, batch)
    assert_close(grads, want[1], FLOAT64)
    assert_close([loss, total / counted], [want[0]] * 2, FLOAT32)
    assert tokens == counted


class Capped(LanguageModel):
    """A language model with a last word of its own."""

    def logits(self, x):
        return jnp.tanh(super().logits(x))


def with_bias(rngs):
    made = model(rngs)
    made.head = Linear(16, 257, use_bias=True, rngs=rngs)
    made.head.bias.set_value(jnp.linspace(-1.0, 1.0, 257))
    return made


@pytest.mark.parametrize("build", [partial(model, kind=Capped), with_bias], ids=["subclass", "head"])
def test_logits_that_are_more_than_a_product_are_asked_for(build):
    mesh = make_mesh(ONE)
    batch = batch_of(np.random.default_rng(0), 2, 7)
    assert build(nnx.Rngs(0)).readout() is None
    with jax.set_mesh(mesh):
        own = learner(build, mesh)
        state, batch = own.init(0), shard_batch(batch, mesh)
        total, tokens = own.evaluate(state, batch)
        want, _ = jax.jit(partial(all_at_once, own))(state, batch)
    assert_close(total / tokens, want, FLOAT32)


def test_no_array_has_every_logit():
    """In the gradient and in the evaluation of a language model: none has even a quarter of them."""
    mesh = make_mesh(ONE)
    batch = batch_of(np.random.default_rng(0), 2, 64)
    found = {}
    with jax.set_mesh(mesh):
        for kind in (LanguageModel, Capped):
            own = learner(partial(model, kind=kind, vocab_size=2000), mesh, loss_chunk=8)
            jaxprs = [jax.make_jaxpr(run)(own.abstract(), batch).jaxpr for run in (own.gradient, own.evaluate)]
            found[kind] = [max(np.prod(shape, dtype=int) for shape in shapes_in(jaxpr)) for jaxpr in jaxprs]
    every = 2 * 64 * 2000
    assert max(found[LanguageModel]) < every / 4
    # The same search finds them where they are.
    assert min(found[Capped]) >= every


def test_memory_is_that_of_a_chunk():
    """512 tokens of 32768 logits are 64 MiB, and their gradient as much; a chunk of 16 tokens is 2 MiB."""
    x, kernel, targets, counted = draw(0, "float32", 2, 256, 8, 32768)

    def temporary(loss):
        compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, kernel, targets, counted).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(partial(summed_cross_entropy, chunk=16)) < temporary(plain) / 10


COLLECTIVE = re.compile(r"= (.*?) (?:all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(")


@AXES
@pytest.mark.parametrize("tensor", [1, 2], ids=["whole", "vocabulary-in-parts"])
def test_eight_devices_exchange_no_logits(axis, tensor, cpu_devices, monkeypatch):
    """The numbers of one device; and the loop exchanges numbers per token, never logits, weights or their gradient."""
    monkeypatch.setitem(LOGICAL_TO_MESH, "vocab", "tensor")
    arguments = draw(axis, "float32", 8, 13, 16, 64)
    names = ("embed", "vocab") if axis == 0 else ("vocab", "embed")
    gradient = jax.value_and_grad(partial(summed_cross_entropy, axis=axis, chunk=10), (0, 1))
    want = jax.jit(gradient)(*arguments)
    shape, kinds = (2, 4 // tensor, tensor), (AxisType.Auto,) * 3
    with jax.set_mesh(jax.make_mesh(shape, ("data", "fsdp", "tensor"), axis_types=kinds, devices=cpu_devices)):
        placed = [constrain(a, ("batch", *[None] * (a.ndim - 1))) for a in arguments]
        placed[1] = constrain(arguments[1], names)
        compiled = jax.jit(gradient).lower(*placed).compile()
        got = compiled(*placed)
    assert_close(got, want, SHARDED)
    assert got[1][1].addressable_shards[0].data.size == 16 * 64 // 4
    lines = compiled.as_text().splitlines()
    moved = [(found, "while/body" in line) for line in lines for found in COLLECTIVE.findall(line)]
    assert any(not inside for _, inside in moved)
    shapes = [shape for found, inside in moved if inside for shape in re.findall(r"\[([\d,]*)\]", found)]
    assert bool(shapes) == (tensor > 1)
    # A chunk's features are at most 10 x 16; its logits on a device 10 x 32 or more, the kernel 16 x 32.
    assert all(np.prod([int(n) for n in shape.split(",") if n]) <= 10 * 16 for shape in shapes)


def test_narrow_targets_and_empty_batches():
    """A target's type may be too narrow for the vocabulary's size."""
    x, kernel = jnp.ones((1, 3, 2)), jnp.linspace(-1.0, 1.0, 600).reshape(2, 300)
    counted = jnp.ones((1, 3), bool)
    loss = lambda targets: jax.value_and_grad(summed_cross_entropy, (0, 1))(x, kernel, targets, counted)  # noqa: E731
    want, got = (loss(jnp.asarray([[1, 2, 200]], dtype)) for dtype in (jnp.int32, jnp.uint8))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    with pytest.raises(ValueError, match="no axis of length 0"):
        summed_cross_entropy(x[:0], kernel, jnp.zeros((0, 3), jnp.int32), counted[:0])
