"""vmap, grad, checkpoint, scan, shard_map of the kernels; and the derivatives that they refuse by name."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Shape, make_inputs
from jax import lax
from jax.experimental import checkify
from jax.sharding import AxisType, PartitionSpec
from kernels import ON_GPU, run_kernels, run_stand_in
from reference import call, cast_inputs
from tolerances import KERNEL, KERNEL_GRADIENT, SAME, assert_close

from qdelta_jax import delta_rule

SMALL = Shape(2, 70, 1, 2, 8, 6)
TINY = Shape(1, 20, 1, 1, 8, 6)
"""For what runs in the interpreter."""

REFUSED = "implementation='mosaic'.*use implementation='xla'"

# On a GPU another program is another algorithm of its matrix library.
TOLERANCE = KERNEL["float32"] if ON_GPU else SAME


def inputs_of(name, shape=SMALL, seed=0, dtype=jnp.float32):
    return cast_inputs(make_inputs(name, shape, seed), dtype)


def stack(*trees):
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def loss(name, x, ids=None, implementation="mosaic", **options):
    out, state = call(name, x, ids, implementation=implementation, **options)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(state))


@pytest.fixture
def stand_in():
    with run_stand_in():
        yield


@pytest.mark.core
def test_vmap_over_one_gate_alone():
    """In the kernels themselves; q, k, v and the state are shared."""
    x = inputs_of("mamba2", TINY, dtype=jnp.bfloat16)
    decays = jnp.stack([x["gates"]["log_decay"], 0.5 * x["gates"]["log_decay"]])
    f = lambda decay: call("mamba2", {**x, "gates": {"log_decay": decay}}, implementation="mosaic")  # noqa: E731
    with run_kernels():
        assert_close(jax.vmap(f)(decays), stack(f(decays[0]), f(decays[1])), TOLERANCE)


def test_vmap_over_too_much_is_refused_by_name(stand_in):
    x = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((70_000, *a.shape), a.dtype), inputs_of("mamba2", SMALL._replace(batch=1))
    )
    with pytest.raises(NotImplementedError, match="a batch of 70000 sequences, and a grid takes 65535: map over fewer"):
        jax.eval_shape(jax.vmap(lambda x: call("mamba2", x, implementation="mosaic")), x)


def test_vmap_of_a_gradient_and_gradient_of_a_vmap(stand_in):
    """Over a stack of gates: each call's gradients, and their sum for what the calls share."""
    x = inputs_of("gated_delta_net")
    gates = [x["gates"], inputs_of("gated_delta_net", seed=1)["gates"]]
    f = lambda v, gates: loss("gated_delta_net", {**x, "v": v, "gates": gates})  # noqa: E731
    gradient = jax.grad(f, argnums=(0, 1))
    one = jax.jit(gradient)
    want = stack(*[one(x["v"], g) for g in gates])
    assert_close(jax.jit(jax.vmap(gradient, in_axes=(None, 0)))(x["v"], stack(*gates)), want, KERNEL_GRADIENT)
    every = lambda v, gates: jnp.sum(jax.vmap(f, in_axes=(None, 0))(v, gates))  # noqa: E731
    d_v, d_gates = jax.jit(jax.grad(every, argnums=(0, 1)))(x["v"], stack(*gates))
    assert_close((d_v, d_gates), (jnp.sum(want[0], axis=0), want[1]), KERNEL_GRADIENT)


def test_nested_vmap_with_segments(stand_in):
    """Over ids outside, over states along their last axis inside."""
    x = inputs_of("mamba2")
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 3, (2, *x["q"].shape[:2])), jnp.int32)
    states = jnp.stack([x["initial_state"], 2 * x["initial_state"]], axis=-1)

    def f(ids, state):
        return call("mamba2", {**x, "initial_state": state}, ids, implementation="mosaic")

    got = jax.vmap(jax.vmap(f, in_axes=(None, -1)), in_axes=(0, None))(ids, states)
    want = stack(*[stack(*[f(i, states[..., n]) for n in range(2)]) for i in ids])
    assert_close(got, want, TOLERANCE)


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.save_only_these_names("delta_rule_states")])
def test_checkpoint_of_scanned_layers_changes_nothing(policy, stand_in):
    x = inputs_of("mamba2")

    def model(decays, wrap=lambda f: f):
        def layer(v, decay):
            return call("mamba2", {**x, "v": v, "gates": {"log_decay": decay}}, implementation="mosaic")[0], ()

        return jnp.sum(lax.scan(wrap(layer), x["v"], decays)[0] ** 2)

    decays = jnp.stack([x["gates"]["log_decay"], 0.5 * x["gates"]["log_decay"]])
    got = jax.jit(jax.grad(partial(model, wrap=partial(jax.checkpoint, policy=policy))))(decays)
    assert_close(got, jax.jit(jax.grad(model))(decays), KERNEL_GRADIENT)


def test_states_are_saved_by_name_and_only_for_a_gradient(stand_in):
    f, x = partial(loss, "q_delta"), inputs_of("q_delta")
    # What the gradient kernels take, and what the XLA form does, which is the stand-in's.
    name = "delta_rule_saved" if ON_GPU else "delta_rule_states"
    assert name in str(jax.make_jaxpr(jax.grad(f))(x))
    assert name not in str(jax.make_jaxpr(f)(x))


def test_dtypes_of_results(stand_in):
    """out in q's dtype, the state in float32, each gradient in its argument's dtype; float32 gates are welcome."""
    x = {**inputs_of("q_delta2", dtype=jnp.bfloat16), "gates": inputs_of("q_delta2")["gates"]}
    f = partial(call, "q_delta2", implementation="mosaic")
    out, state = jax.eval_shape(f, x)
    assert (out.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    grads = jax.eval_shape(lambda x: jax.vjp(f, x)[1](f(x))[0], x)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), grads) == jax.tree.map(lambda x: (x.shape, x.dtype), x)


def sharded(f, mesh, **options):
    split, shared = PartitionSpec("data"), PartitionSpec()

    def local(q, k, v, gates):
        return f(q, jnp.broadcast_to(k, q.shape), v, gates)

    return jax.shard_map(local, mesh=mesh, in_specs=(split, shared, split, split), out_specs=split, **options)


def gradient(f):
    return jax.jit(jax.grad(lambda *a: sum(jnp.sum(jnp.sin(y)) for y in f(*a)), argnums=(0, 1, 2, 3)))


@pytest.mark.core
@pytest.mark.parametrize("how", [run_kernels, run_stand_in])
def test_inside_shard_map(how):
    """A batch over devices that share the keys; the interpreter knows one device at a time."""
    devices = jax.devices()[: 1 if how is run_kernels else 4]
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices, axis_types=(AxisType.Auto,))
    x = inputs_of("mamba2", TINY._replace(batch=len(devices)))
    arguments = x["q"], x["k"][:1], x["v"], x["gates"]
    f = lambda *a: delta_rule(*a[:3], "mamba2", a[3], implementation="mosaic")  # noqa: E731
    plain = lambda q, k, v, gates: delta_rule(q, jnp.broadcast_to(k, q.shape), v, "mamba2", gates)  # noqa: E731
    # The gradient's own part is plain JAX, whatever computes the states.
    wrap = jax.jit if how is run_kernels else gradient
    with how():
        got = wrap(sharded(f, mesh))(*arguments)
    assert_close(got, wrap(plain)(*arguments), KERNEL_GRADIENT)


FORWARD = lambda f, x: jax.jvp(f, (x,), (x,))  # noqa: E731
TWICE = lambda f, x: jax.grad(lambda x: jnp.sum(jax.grad(f)(x)["v"] ** 2))(x)  # noqa: E731
DERIVATIVES = {
    "forward": FORWARD,
    "forward under jit": lambda f, x: jax.jit(partial(FORWARD, f))(x),
    "twice": TWICE,
    "twice under jit": lambda f, x: jax.jit(partial(TWICE, f))(x),
    "forward over reverse": lambda f, x: FORWARD(jax.grad(f), x),
    "twice under vmap": lambda f, x: jax.vmap(partial(TWICE, f))(stack(x, x)),
    "twice, checkpointed": lambda f, x: TWICE(jax.checkpoint(f), x),
}


@pytest.mark.core
@pytest.mark.parametrize("which", DERIVATIVES)
def test_derivatives_that_are_refused_by_name(which, stand_in):
    with pytest.raises(NotImplementedError, match=REFUSED):
        DERIVATIVES[which](partial(loss, "q_delta"), inputs_of("q_delta"))


def test_what_is_not_differentiated_may_be_inside_any_derivative(stand_in):
    """Second and forward derivatives with respect to something else."""
    x = inputs_of("q_delta")
    assert jax.eval_shape(jax.hessian(lambda y: y**3 * loss("q_delta", x)), 2.0).shape == ()


def test_validate():
    """The checks run with the kernels; a gradient of validated calls is refused by name."""
    x = inputs_of("mamba2", TINY)
    checked = checkify.checkify(partial(loss, "mamba2", validate=True))
    with run_kernels():
        f = jax.jit(checked)
        error, value = f(x)
        error.throw()
        assert "want log_decay <= 0" in f({**x, "gates": {"log_decay": -0.1 * x["gates"]["log_decay"]}})[0].get()
        with pytest.raises(NotImplementedError, match=REFUSED):
            jax.grad(lambda x: checked(x)[1])(x)
    assert_close(value, loss("mamba2", x, implementation="xla"), KERNEL["float32"])
