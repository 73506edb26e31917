"""validate=True: what cannot be seen while tracing is checked while running, inside a gradient over scanned layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CHUNK, IMPLEMENTATIONS, make_inputs
from jax import lax
from jax.experimental import checkify
from reference import call, cast_inputs
from tolerances import FLOAT32_DECAY, assert_close

pytestmark = pytest.mark.core

LAYERS = 3


@pytest.fixture(scope="module")
def inputs():
    return cast_inputs(make_inputs("kda"), jnp.float32)


def gradient(name, implementation, ids=None):
    """error, loss and gradient of a stack of scanned layers; each layer has its own decay."""

    def model(decays, x):
        def layer(v, decay):
            gates = {**x["gates"], "log_decay": decay}
            out, _ = call(
                name,
                {**x, "v": v, "gates": gates},
                ids,
                implementation=implementation,
                chunk_size=CHUNK,
                validate=True,
            )
            return out, None

        out, _ = lax.scan(layer, x["v"], decays)
        return jnp.sum(out**2)

    def checked(decays, x):
        error, loss = checkify.checkify(model)(decays, x)
        return loss, error

    return jax.jit(jax.value_and_grad(checked, has_aux=True))


def decays_of(x, changed=None):
    decay = jnp.stack([x["gates"]["log_decay"]] * LAYERS)
    return decay if changed is None else decay.at[changed[0]].set(changed[1])


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def checked(request):
    return gradient("kda", request.param)


def test_good_input_passes(checked, inputs):
    (loss, error), grads = checked(decays_of(inputs), inputs)
    error.throw()
    assert bool(jnp.isfinite(loss))
    assert bool(jnp.all(jnp.isfinite(grads)))


def test_positive_decay_in_one_layer(checked, inputs):
    (_, error), _ = checked(decays_of(inputs, ((1, 2, 3, 0, 4), 0.5)), inputs)
    with pytest.raises(checkify.JaxRuntimeError, match=r"gates\['log_decay'\]: want log_decay <= 0"):
        error.throw()


def test_the_gradient_is_that_of_an_unvalidated_call(checked, inputs):
    decays = decays_of(inputs).at[:, :, 7::5].set(-jnp.inf).at[:, :, 3::8].set(-1e4)

    def plain(decays):
        def layer(v, decay):
            x = {**inputs, "v": v, "gates": {**inputs["gates"], "log_decay": decay}}
            return call("kda", x, implementation="scan")[0], None

        return jnp.sum(lax.scan(layer, inputs["v"], decays)[0] ** 2)

    (loss, error), grads = checked(decays, inputs)
    error.throw()
    assert_close((loss, grads), jax.jit(jax.value_and_grad(plain))(decays), FLOAT32_DECAY)


@pytest.mark.parametrize("which", ["q", "k", "v", "beta", "log_decay"])
def test_nan(checked, inputs, which):
    decays, x = decays_of(inputs), inputs
    if which == "log_decay":
        decays = decays_of(inputs, ((2, 0, 0, 0, 0), jnp.nan))
    elif which == "beta":
        x = {**x, "gates": {**x["gates"], "beta": x["gates"]["beta"].at[1, 2, 1].set(jnp.nan)}}
    else:
        x = {**x, which: x[which].at[1, 2, 0, 1].set(jnp.nan)}
    (_, error), _ = checked(decays, x)
    name = which if which in "qkv" else f"gates['{which}']"
    with pytest.raises(checkify.JaxRuntimeError) as info:
        error.throw()
    assert f"{name}: NaN" in str(info.value)


def test_keys_without_unit_norm(checked, inputs):
    (_, error), _ = checked(decays_of(inputs), {**inputs, "k": 2 * inputs["k"]})
    with pytest.raises(checkify.JaxRuntimeError, match="k: rule 'kda' wants keys of unit norm"):
        error.throw()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_is_not_checked(inputs, implementation):
    ids = np.ones(inputs["q"].shape[:2], np.int32)
    ids[:, 5:9] = 0
    poison = lambda x: x.at[:, 5:9].set(jnp.nan)  # noqa: E731
    x = {**{n: poison(inputs[n]) for n in "qkv"}, "gates": jax.tree.map(poison, inputs["gates"])}
    x["initial_state"] = inputs["initial_state"]
    (loss, error), _ = gradient("kda", implementation, jnp.asarray(ids))(decays_of(x), x)
    error.throw()
    assert bool(jnp.isfinite(loss))


def test_outside_jit(inputs):
    """The values are concrete: the error comes from checkify all the same."""
    f = checkify.checkify(lambda x: call("kda", x, implementation="scan", validate=True))
    f(inputs)[0].throw()
    with pytest.raises(checkify.JaxRuntimeError, match="q: NaN"):
        f({**inputs, "q": inputs["q"] * jnp.nan})[0].throw()


def test_rules_that_do_not_normalise_take_any_key(inputs):
    x = {**inputs, "k": 5 * inputs["k"], "gates": {"log_decay": inputs["gates"]["log_decay"]}}
    checkify.checkify(lambda x: call("gla", x, implementation="scan", validate=True))(x)[0].throw()
