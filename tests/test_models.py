"""The language model: causality, caches, scanned cells, remat, sharding, configuration."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from small_models import build, config, draw, every_pattern, run
from tolerances import FLOAT32, SHARDED, assert_close, relative_error

from qdelta_jax.layers.partitioning import shardings
from qdelta_jax.models import LanguageModel, ModelConfig
from qdelta_jax.models.config import REMAT


@every_pattern
def test_causal(pattern):
    """The prefix is the same bit for bit whatever follows, and no gradient comes from the future."""
    model = build(pattern)
    tokens = jnp.arange(24)[None]
    changed = tokens.at[0, 13:].set(draw((11,)) // 2 + 40)
    got, other = run(model, tokens), run(model, changed)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got[:, :13], other[:, :13])
    assert relative_error(got[:, 13:], other[:, 13:]) > 1e-3
    # Every token appears once: the row of the embedding is the position.
    gradient = nnx.jit(nnx.grad(lambda m: m(tokens)[0, 12, 3]))(model)["embedding"].get_value()
    seen = np.flatnonzero(np.any(np.asarray(gradient) != 0, axis=1))
    first = 0 if pattern != ("window",) else 8
    assert seen.tolist() == list(range(first, 13))


@every_pattern
def test_prefill_and_decode_are_forward(pattern):
    model = build(pattern)
    tokens = draw((2, 66))
    whole = run(model, tokens)
    for length in (1, 2, 3, 63, 64, 65):
        start = model.init_cache(2, 66)
        logits, cache = run(model, tokens[:, :length], cache=start)
        assert_close(logits, whole[:, :length], FLOAT32, f"prefill {length}")
        logits, cache = run(model, tokens[:, length : length + 1], cache=cache)
        assert_close(logits[:, 0], whole[:, length], FLOAT32, f"decode after {length}")
        # The cache keeps its shapes and dtypes: memory is constant, and nothing recompiles.
        assert jax.tree.map(jnp.shape, cache) == jax.tree.map(jnp.shape, start)
        assert jax.tree.map(lambda x: x.dtype, cache) == jax.tree.map(lambda x: x.dtype, start)


def test_cache_size_depends_on_length_for_full_attention_alone():
    def size(pattern, length):
        return sum(x.size for x in jax.tree.leaves(build(pattern).init_cache(1, length)))

    assert size(("rule", "window"), 10) == size(("rule", "window"), 10_000)
    assert size(("attention",), 10_000) > 100 * size(("attention",), 10)


def count_equations(jaxpr):
    """Of a jaxpr and all those inside it."""
    total = 0
    for equation in jaxpr.eqns:
        total += 1
        for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                total += count_equations(inner)
    return total


@pytest.mark.parametrize("remat", ["none", "full"])
def test_program_does_not_grow_with_depth(remat):
    """Equal equation count at 4 and 8 cells, forward and gradient; a remainder is unrolled."""

    def equations(layers):
        c = config(("rule", "window"), layers=layers, remat=remat)
        model = nnx.eval_shape(lambda: LanguageModel(c, rngs=nnx.Rngs(0)))
        graph, parameters = nnx.split(model)

        def loss(parameters):
            return nnx.merge(graph, parameters)(jnp.zeros((1, 20), jnp.int32)).sum()

        return count_equations(jax.make_jaxpr(loss)(parameters)), count_equations(
            jax.make_jaxpr(jax.grad(loss))(parameters)
        )

    four, eight, nine = (equations(layers) for layers in (8, 16, 17))
    assert four == eight
    assert 200 < four[0] < four[1]
    assert nine[0] > eight[0]


def test_scanned_cells_are_the_blocks_in_order():
    """Five layers of a pattern of two: two scanned cells with parameters of their own, one layer behind."""
    c = config(("rule", "window"), layers=5, implementation="scan")
    model, tokens = LanguageModel(c, rngs=nnx.Rngs(3)), draw((1, 20))
    kernels = model.cells.blocks[0].mlp.up.kernel.get_value()
    assert kernels.shape == (2, 16, 24)
    assert relative_error(kernels[0], kernels[1]) > 0.5
    assert len(model.rest.blocks) == 1

    @nnx.jit
    def by_hand(model, tokens):
        x = model.embedding.get_value()[tokens]
        graph, parameters = nnx.split(model.cells)
        for i in range(2):
            x, _ = nnx.merge(graph, jax.tree.map(lambda p, i=i: p[i], parameters))(x, None, None, None)
        x, _ = model.rest.blocks[0](x)
        return model.logits(model.norm(x))

    assert_close(run(model, tokens), by_hand(model, tokens), FLOAT32)


@pytest.fixture(scope="module")
def plain_gradient():
    return loss_and_gradient("none")


def loss_and_gradient(remat, **changes):
    model = build(layers=2, remat=remat, **changes)

    def loss(model):
        return jnp.sum(jnp.sin(model(draw((1, 10)))))

    return jax.tree.leaves(nnx.jit(nnx.value_and_grad(loss))(model))


@pytest.mark.parametrize("remat", [name for name in REMAT if name not in ("none", "dots")])
def test_remat_changes_nothing(remat, plain_gradient):
    assert_close(loss_and_gradient(remat), plain_gradient, FLOAT32)


def test_without_a_scan_it_is_the_same(plain_gradient):
    """Two layers, all of them in one turn, and the remat that the test above leaves out."""
    assert_close(loss_and_gradient("dots", unroll=9), plain_gradient, FLOAT32)


@pytest.mark.parametrize(
    ("layers", "unroll", "guards"), [(4, 1, {False}), (5, 1, {False, True}), (2, 1, {True}), (4, 2, {True})]
)
def test_what_is_computed_again_outside_of_a_loop_is_guarded(layers, unroll, guards):
    """Otherwise the compiler joins it with what was computed before, and nothing is saved."""
    graph, parameters = nnx.split(build(("rule", "window"), layers=layers, unroll=unroll, remat="full"))
    program = jax.make_jaxpr(lambda p: nnx.merge(graph, p)(draw((1, 8))))(parameters)
    assert set(values_of(program.jaxpr, "prevent_cse")) == guards


def values_of(jaxpr, name):
    """Of a parameter of equations, wherever they are."""
    for equation in jaxpr.eqns:
        if name in equation.params:
            yield equation.params[name]
        for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from values_of(inner, name)


def test_remat_saves_memory():
    """Residuals of the blocks: all, products and what is between them, products, chunk states, inputs."""

    def size(remat):
        graph, parameters = nnx.split(build(layers=4, remat=remat))

        def forward(parameters):
            return nnx.merge(graph, parameters)(draw((1, 64)))

        _, pull = jax.eval_shape(lambda p: jax.vjp(forward, p), parameters)
        return sum(x.size for x in jax.tree.leaves(pull))

    none, activations, dots, states, full = (
        size(remat) for remat in ("none", "activations", "dots", "delta_rule_states", "full")
    )
    assert full < states < none
    assert full < dots < activations < none


def test_jit_is_eager():
    model, tokens = build(("window",)), draw((1, 7))
    assert_close(run(model, tokens), model(tokens), FLOAT32)


def test_bfloat16():
    """Compute in bfloat16, parameters in float32, logits in float32; A_log and dt_bias are never rounded."""
    tokens = draw((2, 20))
    model = build(("rule", "window"), dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    logits, (cells, _) = run(model, tokens, cache=model.init_cache(2, 20))
    assert logits.dtype == jnp.float32
    assert cells[0].state.dtype == jnp.float32
    assert cells[1].keys.dtype == jnp.bfloat16
    assert relative_error(logits, run(build(("rule", "window")), tokens)) < 0.05
    assert len(np.unique(np.asarray(logits))) > logits.size / 2
    c = config(dtype="bfloat16", param_dtype="bfloat16")
    half = nnx.eval_shape(lambda: LanguageModel(c, rngs=nnx.Rngs(0)))
    wide = [path for path, x in nnx.to_flat_state(nnx.state(half)) if x.get_value().dtype == jnp.float32]
    assert {path[-1] for path in wide} == {"A_log", "dt_bias"}


def test_float64(x64):
    c = config(dtype="float64", param_dtype="float64", implementation="scan")
    logits = nnx.jit(lambda tokens: LanguageModel(c, rngs=nnx.Rngs(0))(tokens))(draw((1, 5)))
    assert logits.dtype == jnp.float64


def test_tied_embeddings():
    model = build(("window",), tie_embeddings=True)
    x, _ = model.features(draw((1, 5)))
    assert_close(model(draw((1, 5))), x @ model.embedding.get_value().T, FLOAT32)
    assert model.head is None


def test_a_mesh_changes_neither_parameters_nor_logits(cpu_devices):
    """Created and run on 2 x 4 devices, against one: equal parameters, equal logits."""
    c = config(("rule", "window"))
    tokens = draw((8, 12))
    alone = LanguageModel(c, rngs=nnx.Rngs(7))
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=cpu_devices)
    with jax.set_mesh(mesh):
        sharded = nnx.jit(lambda: LanguageModel(c, rngs=nnx.Rngs(7)))()
        state = nnx.state(sharded)
        want = jax.tree.leaves(shardings(state, mesh))
        for x, sharding in zip(jax.tree.leaves(state), want, strict=True):
            assert x.sharding.is_equivalent_to(sharding, x.ndim)
        logits = run(sharded, tokens)
    kernel = sharded.cells.blocks[0].mlp.up.kernel
    assert kernel.get_metadata("out_sharding") == (None, "embed", "mlp")
    assert kernel.get_value().addressable_shards[0].data.shape == (1, 4, 24)
    assert_close(jax.tree.leaves(state), jax.tree.leaves(nnx.state(alone)), 0.0)
    assert_close(logits, run(alone, tokens), SHARDED)


def test_config_round_trip():
    options = {"layers": 5, "value_heads": 4, "decay_lower_bound": -5.0, "dtype": "bfloat16"}
    c = config(("rule", "window"), **options)
    assert ModelConfig.from_dict(json.loads(json.dumps(c.to_dict()))) == c
    assert hash(c) == hash(
        config(("rule", "window"), layers=5, value_heads=4, decay_lower_bound=-5.0, dtype="bfloat16")
    )


def test_numpy_values_of_a_config_become_its_own():
    """Past the annotations, which conftest.py has checked before __post_init__ is asked."""
    model = {
        **{
            "unroll": np.int64(3),
            "norm_eps": np.float32(0.5),
            "qk_norm": np.bool_(True),
            "rope_theta": np.longdouble(2),
        },
        **{"dtype": np.dtype("float32"), "conv_implementation": np.array("xla")},
    }
    for made, given in (
        (config(), {**model, "pattern": (np.str_("rule"),)}),
        (config().mixer("rule"), {"heads": np.int32(2), "gate_bias": np.bool_(False), "normalize_eps": np.float16(1)}),
        (config().mixer("window"), {"window": np.uint8(3), "rope_theta": np.float32(2)}),
    ):
        vars(made).update(given)
        made.__post_init__()
        assert json.loads(json.dumps(dataclasses.asdict(made)))
        assert {name: getattr(made, name) for name in given} == given
        assert not any(isinstance(x, np.generic | np.dtype | np.ndarray) for x in vars(made).values())


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("pattern", ["rule", "window"], ("rule", "window")),
        ("pattern", np.array(["rule"]), ("rule",)),
        ("dtype", jnp.bfloat16, "bfloat16"),
        ("param_dtype", np.float16, "float16"),
    ],
)
def test_lists_and_types_of_a_config_become_its_own(name, given, wanted):
    made = config()
    vars(made)[name] = given
    made.__post_init__()
    assert getattr(made, name) == wanted


@pytest.mark.parametrize("made", [config(), config().mixer("rule"), config().mixer("window")])
def test_a_flag_is_a_flag(made):
    made = dataclasses.replace(made)
    name = next(field.name for field in dataclasses.fields(made) if field.type is bool)
    vars(made)[name] = "no"
    with pytest.raises(ValueError, match=f"{name}: got 'no', want True or False"):
        made.__post_init__()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 0}, "width: got 0"),
        ({"vocab_size": -1}, "vocab_size: got -1"),
        ({"pattern": ()}, r"pattern: got \(\), want a tuple of one or more of"),
        ({"pattern": ("rule", "conv")}, r"pattern: got \('rule', 'conv'\)"),
        ({"rule": "delta"}, "rule: got 'delta'"),
        ({"value_heads": 3}, "value_heads: got 3, want a multiple of heads = 2"),
        (
            {"pattern": ("attention",), "attention_heads": 3},
            "attention_heads: got 3, want a divisor",
        ),
        ({"dtype": "int8"}, "dtype: got 'int8'"),
        ({"init_gain": float("inf")}, "init_gain: got inf, want a finite number, or None"),
        ({"remat": "some"}, "remat: got 'some'"),
        ({"implementation": "cuda"}, "implementation: got 'cuda'"),
        ({"attention_implementation": "cuda", "pattern": ("window",)}, "implementation: got 'cuda'"),
        ({"depth": 3}, r"unknown fields \['depth'\]"),
    ],
)
def test_bad_config(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({**config().to_dict(), **change})


def test_config_says_what_is_missing():
    with pytest.raises(ValueError, match="vocab_size"):
        ModelConfig.from_dict({"width": 16})
