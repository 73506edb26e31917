"""The mixer: every rule builds and trains; packing, padding and caches change nothing but the layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from tolerances import BF16, FLOAT32, SHARDED, assert_close, relative_error

import qdelta_jax as qd
from qdelta_jax import RULES, Decay, Gate
from qdelta_jax.layers.linear import xavier_uniform
from qdelta_jax.layers.mixer import Mixer, MixerConfig
from qdelta_jax.layers.partitioning import constrain

pytestmark = pytest.mark.core

WIDTH = 12
SOME_RULES = ["mamba2", "q_delta2"]
"""No erasing, a scaled value, decay per head; and every kind of gate there is."""


def build(rule="q_delta2", *, seed=0, options=None, **changes):
    fields = {
        "width": WIDTH,
        "rule": rule,
        "heads": 2,
        "value_heads": 4,
        "key_dim": 6,
        "value_dim": 5,
        "chunk_size": 4,
        "allow_negative_eigenvalues": True,
    }
    return Mixer(MixerConfig(**fields | changes), rngs=nnx.Rngs(seed), **options or {})


def tokens(batch, length, seed=1):
    return jax.random.normal(jax.random.key(seed), (batch, length, WIDTH))


@nnx.jit
def forward(mixer, x, segment_ids=None, cache=None):
    return mixer(x, segment_ids=segment_ids, cache=cache)


@nnx.jit
def gradients(mixer, x, segment_ids=None):
    """y, and the gradients of sum(y^3) in the parameters and in x."""

    def loss(mixer, x):
        y = mixer(x, segment_ids=segment_ids)[0].astype(jnp.float32)
        return jnp.sum(y**3), y

    (_, y), grads = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(mixer, x)
    return y, grads


def finite(tree):
    return all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", RULES)
def test_every_rule_runs_and_every_parameter_learns(name):
    y, (d_mixer, d_x) = gradients(build(name), tokens(2, 9))
    assert y.shape == (2, 9, WIDTH)
    assert finite((y, d_mixer, d_x))
    for path, leaf in nnx.to_flat_state(d_mixer):
        assert float(jnp.max(jnp.abs(leaf.get_value()))) > 0, path


def test_half_precision_is_near_float32():
    half = build("q_delta2", options={"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16})
    full = build("q_delta2")
    nnx.update(full, jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(half)))
    x = tokens(2, 9).astype(jnp.bfloat16)
    y, (d_half, d_x) = gradients(half, x)
    want, (d_full, d_want) = gradients(full, x.astype(jnp.float32))
    assert jax.eval_shape(lambda x: half(x)[0], x).dtype == d_x.dtype == jnp.bfloat16
    assert relative_error(y, want) < 4 * BF16["output"]
    assert relative_error(d_x, d_want) < 10 * BF16["gradient"]
    for (path, got), (_, reference) in zip(nnx.to_flat_state(d_half), nnx.to_flat_state(d_full), strict=True):
        own = path[-1] in ("A_log", "dt_bias")
        assert got.get_value().dtype == (jnp.float32 if own else jnp.bfloat16), path
        assert relative_error(got.get_value(), reference.get_value()) < 15 * BF16["gradient"], path


LENGTHS = (1, 2, 3, 63, 64, 65)


@pytest.mark.parametrize("name", SOME_RULES)
def test_prefill_and_one_step_are_forward(name):
    """For every T: T - 1 tokens padded to one length, on the left and on the right, then token T."""
    mixer, x = build(name, chunk_size=16), tokens(len(LENGTHS), max(LENGTHS))
    rows, last = jnp.arange(len(LENGTHS)), jnp.asarray(LENGTHS) - 1
    want, _ = forward(mixer, x)
    column = jnp.arange(64)[None]
    right = (column < last[:, None]).astype(jnp.int32)
    left_index = column - (64 - last[:, None])
    left = (left_index >= 0).astype(jnp.int32)
    layouts = (
        (jnp.where(right[:, :, None] > 0, x[:, :64], jnp.nan), right),
        (jnp.where(left[:, :, None] > 0, x[rows[:, None], jnp.maximum(left_index, 0)], jnp.nan), left),
    )
    for padded, ids in layouts:
        y, cache = forward(mixer, padded, ids, mixer.init_cache(len(LENGTHS)))
        assert float(jnp.max(jnp.abs(jnp.where((ids == 0)[:, :, None], y, 0)))) == 0
        y_last, after = forward(mixer, x[rows, last][:, None], None, cache)
        assert_close(y_last[:, 0], want[rows, last], FLOAT32)
        assert jax.tree.structure(after) == jax.tree.structure(cache)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_prompts_without_padding(length):
    mixer, x = build(), tokens(2, length)
    want, _ = forward(mixer, x)
    cache = mixer.init_cache(2)
    if length > 1:
        y, cache = forward(mixer, x[:, :-1], None, cache)
        assert_close(y, want[:, :-1], FLOAT32)
    y, _ = forward(mixer, x[:, -1:], None, cache)
    assert_close(y, want[:, -1:], FLOAT32)


def test_one_token_at_a_time_is_forward():
    """Rows of different lengths: a masked token changes neither state nor convolution."""
    mixer, x, t = build(), tokens(3, 16), jnp.arange(16)
    ids = jnp.stack([t >= 0, t < 7, t % 3 != 1]).astype(jnp.int32)
    want, end = forward(mixer, x, ids, mixer.init_cache(3))
    cache, ys = mixer.init_cache(3), []
    for t in range(16):
        y, cache = forward(mixer, x[:, t : t + 1], ids[:, t : t + 1], cache)
        ys.append(y)
    assert_close((jnp.concatenate(ys, 1), cache), (want, end), FLOAT32)


def test_split_is_the_whole():
    mixer, x = build(), tokens(3, 16)
    want, end = forward(mixer, x, None, mixer.init_cache(3))
    assert_close(want, forward(mixer, x)[0], FLOAT32)
    first, cache = forward(mixer, x[:, :9], None, mixer.init_cache(3))
    second, cache = forward(mixer, x[:, 9:], None, cache)
    assert_close((jnp.concatenate([first, second], 1), cache), (want, end), FLOAT32)


def test_left_padding_continues_a_cache():
    """A second prompt, padded on the left by 0, 2 and 5 tokens, behind a first one: as without padding."""
    mixer, x, pads = build(), np.asarray(tokens(3, 16)), (0, 2, 5)
    second, ids = np.full((3, 8, WIDTH), np.nan, np.float32), np.zeros((3, 8), np.int32)
    for row, pad in enumerate(pads):
        second[row, pad:], ids[row, pad:] = x[row, 8 : 16 - pad], 9
    _, cache = forward(mixer, jnp.asarray(x[:, :8]), jnp.ones((3, 8), jnp.int32), mixer.init_cache(3))
    y, after = forward(mixer, jnp.asarray(second), jnp.asarray(ids), cache)

    whole = np.arange(16)[None] < 16 - np.asarray(pads)[:, None]
    want, end = forward(mixer, jnp.asarray(x), jnp.asarray(whole, jnp.int32), mixer.init_cache(3))
    assert_close(after, end, FLOAT32)
    for row, pad in enumerate(pads):
        assert_close(y[row, pad:], want[row, 8 : 16 - pad], FLOAT32)


@pytest.mark.parametrize("name", SOME_RULES)
def test_packed_is_separate_and_padding_reaches_nothing(name):
    """Segments of 1, 2, 3 and 11 tokens, NaN in padding, also inside a segment: output and all gradients."""
    mixer, x = build(name), np.asarray(tokens(5, 24))
    ids = np.zeros((5, 24), np.int32)
    ids[0] = [0, 0, 5, 3, 3, 0, 4, 4, 4, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0]
    packed = np.where((ids == 0)[:, :, None], np.nan, x)
    y, (d_mixer, d_x) = gradients(mixer, jnp.asarray(packed), jnp.asarray(ids))

    places = [np.flatnonzero(ids[0] == i) for i in (5, 3, 4, 1)]
    separate, separate_ids = np.full_like(x, np.nan), np.zeros_like(ids)
    for row, place in enumerate(places):
        separate[row, : len(place)], separate_ids[row, : len(place)] = x[0, place], 1
    want, (d_want, d_x_want) = gradients(mixer, jnp.asarray(separate), jnp.asarray(separate_ids))
    assert_close(d_mixer, d_want, 5 * FLOAT32)
    y, d_x, want, d_x_want = map(np.asarray, (y, d_x, want, d_x_want))
    assert np.abs(y[ids == 0]).max() == np.abs(d_x[ids == 0]).max() == 0
    for row, place in enumerate(places):
        assert_close(y[0, place], want[row, : len(place)], FLOAT32)
        assert_close(d_x[0, place], d_x_want[row, : len(place)], 5 * FLOAT32)


def test_causal():
    mixer, x = build(), tokens(2, 9)
    d_x = jax.jit(jax.grad(lambda x: jnp.sum(mixer(x)[0][:, :5] ** 2)))(x)
    assert float(jnp.max(jnp.abs(d_x[:, 5:]))) == 0
    assert float(jnp.min(jnp.max(jnp.abs(d_x[:, :5]), axis=-1))) > 0
    changed = x.at[:, 5:].mul(100.0)
    np.testing.assert_array_equal(forward(mixer, x)[0][:, :5], forward(mixer, changed)[0][:, :5])


@pytest.mark.parametrize("bound", [None, -5.0])
def test_extreme_gates_train(bound):
    """A_log = 20 and pre-activations of a thousand: values and gradients stay finite."""
    mixer = build(decay_lower_bound=bound)
    mixer.gates.projections["log_decay"].decay.A_log.set_value(jnp.asarray([20.0, 0.0]))
    y, grads = gradients(mixer, 1e3 * tokens(2, 9))
    assert finite((y, grads))


def test_a_lower_bound_keeps_the_decay_above_it():
    mixer = build("kda", decay_lower_bound=-0.5)
    log_decay = mixer.gates(100 * tokens(2, 9))[0]["log_decay"]
    assert -0.5 <= float(jnp.min(log_decay)) < -0.49
    assert -0.01 < float(jnp.max(log_decay)) <= 0


def test_mamba2_step_multiplies_the_value():
    """Written out: no convolution, no gate, one head per value head."""
    mixer, x = build("mamba2", conv_width=0, output_gate=None, value_heads=2), tokens(1, 7)
    gate = mixer.gates.projections["log_decay"]
    step = jax.nn.softplus(gate.projection(x) + jnp.broadcast_to(gate.decay.dt_bias.get_value(), (1, 7, 2)))
    q, k, v = (jax.nn.silu(p(x)).reshape(1, 7, 2, -1) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    log_decay = -step * jnp.exp(gate.decay.A_log.get_value())[None, None]
    out, _ = qd.delta_rule(q, k, v * step[..., None], "mamba2", {"log_decay": log_decay}, implementation="scan")
    want = mixer.out_proj(mixer.norm(out).reshape(1, 7, -1))
    assert_close(mixer(x)[0], want, FLOAT32)


def test_a_rule_of_the_user():
    """Gates of other names, axes and activations, in the user's own file, with no change to the library."""

    @qd.rule(amount=Gate("value", jax.nn.softplus, low_rank=True), log_decay=Gate("head", Decay("sigmoid")))
    def leaky(q, k, v, *, amount, log_decay):
        return qd.Coefficients(k, e=0.1 * k, z=amount * v, log_decay=log_decay)

    mixer, x = build(leaky), tokens(1, 5)
    y, (d_mixer, _) = gradients(mixer, x)
    assert finite(y)
    amount, log_decay = (mixer.gates(x)[0][name] for name in ("amount", "log_decay"))
    assert (amount.shape, log_decay.shape) == ((1, 5, 4, 5), (1, 5, 4))
    assert all(float(jnp.max(jnp.abs(g))) > 0 for g in jax.tree.leaves(d_mixer))


def test_parameters_are_those_of_the_published_layer():
    """Gated DeltaNet-2 1.3B: 1,302,638,112 in 18 layers, less a SwiGLU of 6208 and two norms."""
    config = MixerConfig(
        width=2304,
        rule="gated_delta_net2",
        heads=16,
        key_dim=128,
        value_dim=128,
        gate_low_rank=True,
        gate_bias=True,
    )
    mixer = nnx.eval_shape(lambda: Mixer(config, rngs=nnx.Rngs(0)))
    count = sum(x.size for x in jax.tree.leaves(nnx.state(mixer, nnx.Param)))
    assert count == 1_302_638_112 // 18 - 3 * 2304 * 6208 - 2 * 2304


def test_initialisers():
    mixer = build(options={"kernel_init": xavier_uniform(2**-2.5), "conv_init": nnx.initializers.ones})
    kernel = mixer.q_proj.kernel.get_value()
    assert float(jnp.max(jnp.abs(kernel))) <= 2**-2.5 * (6 / (12 + 12)) ** 0.5
    assert float(jnp.min(mixer.convolutions["q"].kernel.get_value())) == 1.0


def test_eight_devices_are_one_device(cpu_devices):
    """Same seed, same initialisation; the batch over data and fsdp, the parameters over fsdp."""
    x = tokens(8, 9)
    want = gradients(build("q_delta"), x)
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=cpu_devices)
    with jax.set_mesh(mesh):
        mixer = build("q_delta")
        assert mixer.q_proj.kernel.get_value().sharding.spec[0] == "fsdp"
        x = constrain(x, ("batch", None, None))
        assert len(x.sharding.device_set) == 8
        y, (d_mixer, d_x) = gradients(mixer, x)
    assert_close((y, (nnx.to_pure_dict(d_mixer), d_x)), (want[0], (nnx.to_pure_dict(want[1][0]), want[1][1])), SHARDED)


def test_refusals():
    with pytest.raises(ValueError, match="value_heads: got 3, want a multiple of heads = 2"):
        build(value_heads=3)
    with pytest.raises(ValueError, match="rule: got 'gdn'"):
        build("gdn")
    with pytest.raises(ValueError, match="key_dim: got 0"):
        build(key_dim=0)
    with pytest.raises(ValueError, match="output_gate: got 'tanh'"):
        build(output_gate="tanh")
    with pytest.raises(ValueError, match=r"x: got shape \(1, 2, 5\), want \[B,T,width\] with width = 12"):
        build()(jnp.ones((1, 2, 5)))
    with pytest.raises(ValueError, match="cache: got 0 convolution states, want 3"):
        build()(tokens(1, 2), cache=build(conv_width=0).init_cache(1))
