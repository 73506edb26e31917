"""The gradient kernels against the definition in float64."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CORE, RULE_NAMES, Shape, gate_shape, make_cotangents, make_inputs
from flax import nnx
from kernels import (
    HEADS,
    ON_GPU,
    SEGMENTED,
    SMALL,
    all_heads,
    any_machine,
    check_gradients,
    growing,
    one_head,
    poisoned,
    run_kernels,
    segments,
)
from reference import call, cast_inputs
from tolerances import (
    FLOAT32_DECAY,
    KERNEL_CORRELATED,
    KERNEL_FINER_U,
    KERNEL_GRADIENT,
    KERNEL_GRADIENT_16,
    KERNEL_GRADIENT_16_DECAY,
    KERNEL_GROWING,
    assert_close,
    relative_error,
)

import pallas_kernels
import qdelta_jax as qd
from pallas_kernels.gradient_layout import Layout
from pallas_kernels.inputs import make_problem
from pallas_kernels.linear import coefficients, terms
from pallas_kernels.pull_back import PullBack
from pallas_kernels.rule import TiledRule, Unsupported
from qdelta_jax.layers.mixer import Mixer, MixerConfig
from qdelta_jax.mosaic import kernel_settings

F32, BF16, F64 = jnp.float32, jnp.bfloat16, jnp.float64


@contextmanager
def by_kernels(**overrides):
    """The gradient kernels, which must have been called: what does not fit into them goes through XLA otherwise."""
    spy = mock.patch.object(pallas_kernels, "backward", wraps=pallas_kernels.backward)
    with spy as called, run_kernels(gradients="kernels", **overrides):
        yield
    assert called.called


KINDS = RULE_NAMES if ON_GPU else ("mamba2", "q_delta2")
"""On a CPU, where each takes many seconds, the ways through the kernels that no test below takes."""

THREE = SMALL._replace(length=130)
WIDE = Shape(1, 70, 1, 2, 70, 72)
"""Two tiles of channels for keys and for values, two value heads for one head."""


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_rule(name):
    check_gradients(name, make_inputs(name, SMALL), make_cotangents(SMALL), how=by_kernels)


@pytest.mark.parametrize("name", ["gated_delta_net2"] + ["gated_delta_net"] * ON_GPU)
def test_16_bit_inputs_and_wide_grouped_heads(name):
    finer = name == "gated_delta_net2" and not ON_GPU
    limits = {"tolerance": KERNEL_FINER_U if finer else KERNEL_GRADIENT_16}
    limits["of_decay"] = KERNEL_FINER_U if finer else KERNEL_GRADIENT_16_DECAY
    check_gradients(name, make_inputs(name, WIDE), make_cotangents(WIDE), how=by_kernels, dtype=BF16, **limits)


@pytest.mark.parametrize("name", ["gated_delta_net2"] + ["q_delta"] * ON_GPU)
def test_transitions_that_grow(name):
    """Past the range of float16 long before the end, and everything is finite."""
    shape = Shape(1, 192, 1, 1, 16, 24)
    limits = {"dtype": BF16, "tolerance": KERNEL_GROWING}
    check_gradients(name, growing(name, shape.length), make_cotangents(shape), how=by_kernels, **limits)


@pytest.mark.parametrize("name", ["gla"] + ["q_delta"] * ON_GPU)
def test_segments_and_poisoned_padding(name):
    ids = segments(SEGMENTED)
    check_gradients(name, poisoned(make_inputs(name, SEGMENTED), ids), make_cotangents(SEGMENTED), ids, how=by_kernels)


@pytest.mark.parametrize("residuals", ["recompute"] + ["keep"] * ON_GPU)
@pytest.mark.parametrize("name", ["delta_net"] + ["retnet", "kda"] * ON_GPU)
def test_stretches_and_what_is_saved(name, residuals):
    """What the shapes of a long sequence would choose."""
    how = partial(by_kernels, count=3)
    check_gradients(name, make_inputs(name, THREE), make_cotangents(THREE), how=how, residuals=residuals)


@pytest.mark.parametrize(("dtype", "residuals"), [(F32, "recompute"), (BF16, "keep")])
def test_extreme_decays_and_what_is_kept(dtype, residuals):
    inputs = make_inputs("kda", SMALL)
    decay = inputs["gates"]["log_decay"]
    decay[:, 20:23] = -np.inf
    decay[:, 40:50, :, :5] = -1e4
    decay[:, 50:] = 0
    limits = {"tolerance": FLOAT32_DECAY}
    if dtype == BF16:
        limits = {"tolerance": KERNEL_GRADIENT_16, "of_decay": KERNEL_GRADIENT_16_DECAY}
    options = {"how": by_kernels, "dtype": dtype, "residuals": residuals}
    check_gradients("kda", inputs, make_cotangents(SMALL), **options, **limits)


def test_correlated_keys():
    """Nearly equal keys, erased almost twice over."""
    inputs = make_inputs("q_delta", SMALL)
    keys = inputs["k"][:, :1] + 0.3 * inputs["k"]
    inputs["k"] = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    inputs["gates"]["beta"] = np.full_like(inputs["gates"]["beta"], 1.9)
    check_gradients("q_delta", inputs, make_cotangents(SMALL), how=by_kernels, tolerance=KERNEL_CORRELATED["float32"])


def test_vmap_over_one_gate():
    inputs = cast_inputs(make_inputs("delta_net", SMALL), F32)
    factors = jnp.asarray([0.5, 1.0])

    def gradient(implementation):
        def loss(factor):
            gates = {"beta": factor * inputs["gates"]["beta"]}
            given = {**inputs, "gates": gates}
            return jnp.sum(call("delta_net", given, implementation=implementation, residuals="keep")[0] ** 2)

        return jax.jit(jax.vmap(jax.grad(loss)))(factors)

    with by_kernels():
        got = gradient("mosaic")
    assert relative_error(got, gradient("xla")) <= KERNEL_GRADIENT


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        # Few heads: on top come the kernels that work on stretches of a sequence and join them, which are the same for
        # all rules but for the shape of the decay.
        pytest.param(n, 1 if n in ("gated_delta_net", "kda") else 32, marks=[pytest.mark.core] if n in CORE else [])
        for n in RULE_NAMES
    ],
)
def test_every_rule_lowers(name, batch):
    shape = Shape(batch, 4096 // batch, 8, 16, 128, 128)
    rule = qd.RULES[name]
    q = jax.ShapeDtypeStruct((*shape[:3], 128), BF16)
    v = jax.ShapeDtypeStruct((*shape[:2], 16, 128), BF16)
    kinds = {n: F32 if n == "log_decay" else BF16 for n in rule.gates}
    gates = {n: jax.ShapeDtypeStruct(gate_shape(name, n, shape), kinds[n]) for n in rule.gates}
    ids = jax.ShapeDtypeStruct(shape[:2], jnp.int32)

    def loss(q, k, v, gates, ids):
        return jnp.sum(qd.delta_rule(q, k, v, name, gates, segment_ids=ids, implementation="mosaic")[0].astype(F32))

    with any_machine(), kernel_settings(gradients="kernels"):
        made = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).trace(q, q, v, gates, ids)
        text = made.lower(lowering_platforms=("cuda",)).as_text()
    # A kernel is named twelve times. Those of stretches come on top.
    assert text.count("mosaic_gpu") >= 12 * (8 if batch == 1 else 4)


MANY = (
    lambda x: x**3 + x**-3 + x**1 + x**0,
    lambda x: jnp.sqrt(x) + jax.lax.rsqrt(x) + jnp.square(x) + 1 / x,
    lambda x: jax.nn.sigmoid(x) + jnp.tanh(x) + jax.nn.softplus(x) + jax.nn.silu(x),
    lambda x: jnp.sin(x) + jnp.cos(x) + jnp.abs(x) * jnp.sign(x),
    lambda x: jnp.exp(-x) + jnp.exp2(x) + jnp.expm1(x) + jnp.log(x) + jnp.log1p(x),
    lambda x: jnp.clip(x, 0.2, 0.8) + jnp.maximum(x, 0.5) * jnp.minimum(x, 0.5) + jnp.where(x > 0.3, x, 2 * x),
)
"""What a rule's function may be made of."""


@pytest.mark.parametrize("of", [("head", lambda x, y: y(x["beta"])), ("key", lambda x, y: y(x["wide"]))])
def test_every_operation_lowers_with_its_derivative(of):
    axis, take = of

    def function(q, k, v, **gates):
        return k, k * sum(take(gates, f) for f in MANY), v, None

    q = jax.ShapeDtypeStruct((1, 4096, 8, 128), BF16)
    name, size = ("beta", ()) if axis == "head" else ("wide", (128,))
    gates, state = {name: jax.ShapeDtypeStruct((1, 4096, 8, *size), BF16)}, jax.ShapeDtypeStruct((1, 8, 128, 128), F32)
    run = partial(pallas_kernels.backward, function, {name: axis}, scale=1.0)
    made = jax.jit(lambda q, gates, s: run(q, q, q, gates, s, None, None, q, s)).trace(q, gates, state)
    assert "mosaic_gpu" in made.lower(lowering_platforms=("cuda",)).as_text()


@qd.rule(into=qd.per_head(), d_out=qd.per_value_channel(), log_decay=qd.per_head())
def awkward(q, k, v, *, into, d_out, log_decay):
    """Gates named as arrays inside the kernels are; functions without a value at 0, where padding is."""
    return qd.Coefficients(
        k, e=0.05 * k / into, z=d_out * v * jnp.log(into), log_decay=0.3 * jnp.log1p(-log_decay) - 0.4
    )


def test_names_and_padding_do_not_matter():
    """65 tokens of 16 and 24 channels leave most of two tiles to padding."""
    inputs = make_inputs("gated_delta_net", SMALL)
    random = np.random.default_rng(0)
    beta = inputs["gates"].pop("beta")
    inputs["gates"] |= {"into": 0.5 + 0.5 * beta, "d_out": random.uniform(size=inputs["v"].shape)}
    inputs["gates"]["log_decay"] = np.clip(inputs["gates"]["log_decay"], -0.4, 0)
    inputs, cotangents = cast_inputs(inputs, F32), make_cotangents(SMALL)
    given = jnp.asarray(cotangents[0], F32), jnp.asarray(cotangents[1], F32)

    def run(implementation):
        f = lambda x: call(awkward, x, jnp.asarray(ids), implementation=implementation)  # noqa: E731
        out, pull_back = jax.vjp(f, inputs)
        return out, pull_back(given)[0]

    ids = np.ones(SMALL[:2], np.int32)
    ids[:, 40:44] = 0
    with by_kernels():
        got = jax.jit(run, static_argnums=0)("mosaic")
    want = jax.jit(run, static_argnums=0)("xla")
    errors = jax.tree.map(relative_error, got, want)
    assert max(jax.tree.leaves(errors)) <= KERNEL_GRADIENT, errors


def test_arguments_are_checked():
    x = cast_inputs(make_inputs("delta_net", SMALL), F32)
    rule = qd.RULES["delta_net"]
    run = partial(pallas_kernels.backward, rule.function, {"beta": "head"}, x["q"], x["k"], x["v"], x["gates"])
    with pytest.raises(ValueError, match=r"d_out: got shape \(1, 64, 1, 24\)"):
        run(x["initial_state"], None, None, x["v"][:, :-1], x["initial_state"], scale=1.0)
    with pytest.raises(ValueError, match="d_end: got shape None"):
        run(x["initial_state"], None, None, x["v"], None, scale=1.0)
    with pytest.raises(ValueError, match="scale: got NoneType"):
        run(x["initial_state"], None, None, x["v"], x["initial_state"], scale=None)
    for axes, gates, name in ((None, x["gates"], "axes"), ({"beta": "head"}, None, "gates")):
        with pytest.raises(ValueError, match=f"{name}: got NoneType, want a mapping"):
            pallas_kernels.supports(rule.function, axes, x["q"], x["k"], x["v"], gates)


def test_tiles_on_their_way_out_lie_apart():
    """Where values have many gates, or more channels than keys: they land where keys were, never where results lie."""
    rule = TiledRule(lambda q, k, v, a, b: (k, None, a * b * v, None), {"a": "value", "b": "value"}, 64, 256)
    shapes = jax.ShapeDtypeStruct((1, 64, 1, 64), BF16), jax.ShapeDtypeStruct((1, 64, 1, 256), BF16)
    options = {"accurate": False, "masked": False, "segmented": False, "interpret": False}
    problem = make_problem(rule, *shapes, scale=1.0, **options)
    layout = Layout(problem, rule, dict.fromkeys(("q", "k", "v", "a", "b"), BF16), 1)
    late = {first for first, _ in layout.late.values()}
    assert len(late) == 3
    assert not late & {layout.spare[0], layout.spare[0] + 1}
    first, step = layout.values["d_z"]
    assert not late & {first + piece * step for piece in range(problem.value_pieces)}


def test_captured_arrays_are_refused_and_numbers_are_not():
    tau, array = jnp.float32(0.5), jnp.full((16,), 0.5)
    assert TiledRule(lambda q, k, v: (k, None, tau * v, None), {}, 16, 24).absent == {"e", "log_decay"}
    erasing = TiledRule(lambda q, k, v: (k, tau * k, v, None), {}, 16, 24)
    assert terms(erasing) == ("k",)
    assert float(coefficients(erasing, {}).k) == 0.5
    with pytest.raises(Unsupported, match="captures an array"):
        TiledRule(lambda q, k, v: (k * jnp.broadcast_to(array, k.shape), None, v, None), {}, 16, 24)


def test_what_does_not_fit_goes_through_xla():
    rule = qd.RULES["q_delta2"]
    q = jax.ShapeDtypeStruct((1, 64, 1, 256), BF16)
    gates = {n: jax.ShapeDtypeStruct(gate_shape("q_delta2", n, Shape(1, 64, 1, 1, 256, 256)), BF16) for n in rule.gates}
    axes = {n: gate.axis for n, gate in rule.gates.items()}
    options = {"accurate": False, "masked": False, "segmented": False}
    reason = pallas_kernels.backward_unsupported(rule.function, axes, q, q, gates, **options)
    assert "shared memory" in reason


def test_a_function_whose_derivative_sums_over_tokens_is_refused():
    function = lambda q, k, v: (k, None, v * jax.lax.stop_gradient(v) + jnp.sort(v, axis=-1), None)  # noqa: E731
    with pytest.raises(Unsupported, match="sort"):
        PullBack(TiledRule(function, {}, 16, 24))


@pytest.mark.parametrize("name", ["gated_delta_net", "kda"] if ON_GPU else ["mamba2"])
def test_decay_parameters_of_a_layer(name):
    """The gradients of A_log and dt_bias, through the layer's gate, against the whole layer in float64."""
    length, size = (1000, 64) if ON_GPU else (70, 16)
    config = MixerConfig(width=32, rule=name, heads=2, key_dim=size, value_dim=size, implementation="mosaic")
    layer = Mixer(config, rngs=nnx.Rngs(0))
    x, cotangent = (jax.random.normal(jax.random.key(i), (2, length, 32)) for i in range(2))

    def decay_gradients(layer, x, cotangent):
        _, of = nnx.jit(nnx.value_and_grad(lambda layer, x: jnp.sum(layer(x)[0] * cotangent)))(layer, x)
        decay = of.gates.projections["log_decay"].decay
        return np.asarray(decay.A_log.get_value()), np.asarray(decay.dt_bias.get_value())

    with by_kernels():
        got = decay_gradients(layer, x, cotangent)
    with jax.enable_x64(True):
        exact = Mixer(replace(config, implementation="scan"), dtype=F64, param_dtype=F64, rngs=nnx.Rngs(0))
        nnx.update(exact, jax.tree.map(lambda x: jnp.asarray(np.asarray(x), F64), nnx.state(layer)))
        want = decay_gradients(exact, *(jnp.asarray(np.asarray(x), F64) for x in (x, cotangent)))
    assert [x.dtype for x in want] == [F64, F64]
    assert_close(got, want, FLOAT32_DECAY)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RULE_NAMES)
def test_many_blocks_twice(name):
    """Bit for bit the same, and against the XLA form."""
    shape = Shape(2, 2048, 8, 8, 128, 128)
    inputs = cast_inputs(make_inputs(name, shape), BF16)
    cotangent = jnp.asarray(make_cotangents(shape)[0], BF16)

    def gradient(implementation):
        f = lambda x: call(name, x, implementation=implementation)[0]  # noqa: E731
        return jax.jit(lambda x: jax.vjp(f, x)[1](cotangent)[0])

    with by_kernels():
        run = gradient("mosaic")
        first, second = run(inputs), run(inputs)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    errors = jax.tree.map(relative_error, first, gradient("xla")(inputs))
    assert max(jax.tree.leaves(errors)) <= KERNEL_GRADIENT_16_DECAY, errors


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gated_delta_net", "gla"])
def test_more_than_2_31_elements(name):
    """The gradients of a head among others are those of the head alone. v stands for the cotangent."""

    @jax.jit
    def run(inputs):
        return jax.vjp(lambda x: call(name, x, implementation="mosaic")[0], inputs)[1](inputs["v"])[0]

    with by_kernels():
        whole = run(all_heads(name))
        for index in (0, HEADS - 1):
            alone = run(one_head(name, index))
            state = relative_error(whole["initial_state"][:, index], alone["initial_state"][:, 0])
            ones = [(whole[n], alone[n]) for n in "qkv"] + [(whole["gates"][n], x) for n, x in alone["gates"].items()]
            errors = [
                float(jnp.linalg.norm(_one(x, index) - _one(y, 0)) / jnp.linalg.norm(_one(y, 0))) for x, y in ones
            ]
            assert max(float(state), *errors) <= KERNEL_GRADIENT_16_DECAY, errors


def _one(x, head):
    return x[:, :, head].astype(F32)
