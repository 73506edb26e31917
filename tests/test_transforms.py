"""jit, vmap, checkpoint, eval_shape, sharding; one compilation for one shape; memory that grows with T alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import IMPLEMENTATIONS, Shape, make_inputs
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from reference import call, cast_inputs
from tolerances import FLOAT32, SAME, assert_close

import qdelta_jax as qd
from qdelta_jax import delta_rule, step

SMALL = Shape(4, 10, 1, 2, 8, 6)
CHUNK = 4
"""Three chunks, the last one not full: smaller ones compile faster."""


def inputs_of(name, shape=SMALL, seed=0, dtype=jnp.float32):
    return cast_inputs(make_inputs(name, shape, seed), dtype)


def stack(*trees):
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def loss(name, x, **options):
    out, state = call(name, x, chunk_size=CHUNK, **options)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(state))


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("linear_attention", "xla"), ("q_delta2", "xla"), ("q_delta2", "scan")],
)
def test_vmap_is_a_loop(name, implementation):
    """Over everything at once: values and gradients."""
    items = [inputs_of(name, SMALL._replace(batch=2), seed) for seed in range(3)]
    f = jax.value_and_grad(partial(loss, name, implementation=implementation))
    got = jax.jit(jax.vmap(f))(stack(*items))
    f = jax.jit(f)
    assert_close(got, stack(*[f(x) for x in items]), FLOAT32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_over_a_stack_of_gates(implementation):
    """One sequence under several settings of its gates; the gradient of what is shared is the sum."""
    x = inputs_of("q_delta2")
    gates = [x["gates"], *(inputs_of("q_delta2", seed=s)["gates"] for s in (1, 2))]
    x = {n: a for n, a in x.items() if n != "gates"}
    f = lambda x, gates: loss("q_delta2", {**x, "gates": gates}, implementation=implementation)  # noqa: E731
    every = lambda x, gates: jnp.sum(jax.vmap(f, in_axes=(None, 0))(x, gates))  # noqa: E731
    got = jax.jit(jax.grad(every, argnums=(0, 1)))(x, stack(*gates))
    one = jax.jit(jax.grad(f, argnums=(0, 1)))
    found = [one(x, g) for g in gates]
    assert_close(got[0], jax.tree.map(lambda *a: sum(a), *[a for a, _ in found]), FLOAT32)
    assert_close(got[1], stack(*[b for _, b in found]), FLOAT32)


@pytest.mark.core
def test_vmap_over_one_gate_alone():
    x = inputs_of("q_delta")
    betas = jnp.stack([x["gates"]["beta"], 0.5 * x["gates"]["beta"]])
    f = jax.jit(lambda beta: call("q_delta", {**x, "gates": {**x["gates"], "beta": beta}}, chunk_size=CHUNK))
    assert_close(jax.jit(jax.vmap(f))(betas), stack(f(betas[0]), f(betas[1])), SAME)


def test_vmap_over_segment_ids_and_of_step():
    x = inputs_of("kda", SMALL._replace(batch=1))
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 3, (3, 1, SMALL.length)), jnp.int32)
    f = jax.jit(lambda i: call("kda", x, i, chunk_size=CHUNK))
    assert_close(jax.jit(jax.vmap(f))(ids), stack(*[f(i) for i in ids]), SAME)
    token = jax.tree.map(lambda a: a[:, 0], {n: x[n] for n in (*"qkv", "gates")})
    state = jnp.stack([x["initial_state"], 2 * x["initial_state"]])
    g = jax.jit(lambda s: step(s, *(token[n] for n in "qkv"), rule="kda", gates=token["gates"]))
    assert_close(jax.jit(jax.vmap(g))(state), stack(g(state[0]), g(state[1])), SAME)


@pytest.mark.parametrize("name", ["q_delta"])
def test_checkpoint_changes_nothing(name):
    x = inputs_of(name)
    plain = lambda x: loss(name, jax.tree.map(jnp.tanh, x), implementation="xla")  # noqa: E731
    want = jax.jit(jax.grad(plain))(x)
    for policy in (None, jax.checkpoint_policies.save_only_these_names("delta_rule_states")):
        assert_close(jax.jit(jax.grad(jax.checkpoint(plain, policy=policy)))(x), want, SAME)


@pytest.mark.core
def test_a_policy_saves_the_states_by_name():
    """With the states saved the chunks are solved once more for the gradient, not twice more."""

    def products(policy):
        f = jax.checkpoint(partial(loss, "q_delta", implementation="xla"), policy=policy)
        return str(jax.make_jaxpr(jax.grad(f))(inputs_of("q_delta"))).count("dot_general")

    names = jax.checkpoint_policies.save_only_these_names
    assert products(names("delta_rule_states")) <= products(names("no such name"))
    text = str(jax.make_jaxpr(jax.grad(partial(loss, "q_delta", implementation="xla")))(inputs_of("q_delta")))
    assert "delta_rule_states" in text


@pytest.mark.core
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_eval_shape(implementation):
    """A sequence that no memory could hold: shapes come without computing anything."""
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)  # noqa: E731
    batch, length, heads, key, value = 64, 2**20, 32, 128, 256
    q = shape(batch, length, heads, key)
    gates = {"beta": shape(batch, length, heads), "log_decay": shape(batch, length, heads)}
    f = partial(delta_rule, rule="gated_delta_net", implementation=implementation)
    out, state = jax.eval_shape(f, q, q, shape(batch, length, heads, value), gates=gates)
    assert (out.shape, out.dtype) == ((batch, length, heads, value), jnp.bfloat16)
    assert (state.shape, state.dtype) == ((batch, heads, key, value), jnp.float32)


def counting_rule():
    """A rule that counts how often it is traced."""
    calls = []

    @qd.rule(beta=qd.per_head(), log_decay=qd.per_head())
    def counted(q, k, v, *, beta, log_decay):
        calls.append(1)
        return qd.Coefficients(k, e=beta * k, z=beta * v, log_decay=log_decay)

    return counted, calls


@pytest.mark.core
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_compilation_for_one_shape(implementation):
    """Eager calls and gradients, new values, ids, scale given or not: traced once, and again only for a new shape."""
    rule, calls = counting_rule()
    x = inputs_of("gated_delta_net")
    ids = jnp.ones((SMALL.batch, SMALL.length), jnp.int32)
    run = lambda x, i=None: call(rule, x, i, implementation=implementation, chunk_size=CHUNK)  # noqa: E731
    run(x)
    once = len(calls)
    for factor in (0.5, 0.25):
        run(jax.tree.map(lambda a, f=factor: a * f, x))
        run({**x, "gates": dict(reversed(x["gates"].items()))})
    assert len(calls) == once
    run(x, ids)
    twice = len(calls)
    run(x, 2 * ids)
    assert len(calls) == twice
    grad = jax.grad(lambda x: jnp.sum(run(x)[0] ** 2))
    grad(x)
    traced = len(calls)
    grad(jax.tree.map(lambda a: 0.5 * a, x))
    assert len(calls) == traced


@pytest.mark.core
def test_step_compiles_once():
    rule, calls = counting_rule()
    x = jax.tree.map(lambda a: a[:, 0], {n: a for n, a in inputs_of("gated_delta_net").items() if n != "initial_state"})
    decode = jax.jit(lambda s, x: step(s, *(x[n] for n in "qkv"), rule=rule, gates=x["gates"])[1])
    state = jnp.zeros((SMALL.batch, SMALL.value_heads, SMALL.key_dim, SMALL.value_dim))
    for _ in range(4):
        state = decode(state, x)
    assert decode._cache_size() == 1
    assert len(calls) == 1


MEMORY = SMALL._replace(batch=1, heads=2, value_heads=2, key_dim=16, value_dim=16)


def gradient_of(name, length, **options):
    shape = MEMORY._replace(length=length)
    x = jax.eval_shape(lambda: inputs_of(name, shape))
    return jax.grad(lambda x: jnp.sum(call(name, x, implementation="xla", **options)[0] ** 2)), x


@pytest.mark.parametrize("name", ["q_delta2"])
def test_memory_is_linear_in_length(name):
    """Temporary bytes of the compiled gradient at T = 4096 and 8192."""
    if jax.default_backend() != "cpu":
        pytest.skip("a GPU's matrix library takes workspace of any size")

    def temporaries(length):
        f, x = gradient_of(name, length, chunk_size=16)
        return jax.jit(f).lower(x).compile().memory_analysis().temp_size_in_bytes

    short, long = temporaries(4096), temporaries(8192)
    assert long < 2.2 * short


def shapes_in(jaxpr) -> list[tuple[int, ...]]:
    """Of every intermediate value, in every equation inside."""
    found = []
    for equation in jaxpr.eqns:
        found += [v.aval.shape for v in equation.outvars]
        for value in jax.tree.leaves(equation.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found += shapes_in(inner)
    return found


@pytest.mark.parametrize("name", ["gla", "q_delta2"])
def test_channel_decay_makes_no_pairs_of_tokens_times_channels(name):
    """No [C, C, K] for a whole sequence: nothing has more than 16 numbers per token, head and channel."""
    length = 4096
    f, x = gradient_of(name, length)
    sizes = [int(np.prod(s)) for s in shapes_in(jax.make_jaxpr(f)(x).jaxpr)]
    assert len(sizes) > 200
    assert max(sizes) <= 16 * length * MEMORY.value_heads * MEMORY.key_dim


@pytest.mark.core
def test_sharded_is_whole(cpu_devices):
    """Batch over four devices, heads over two: the same numbers, and no device asks another for anything."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), devices=cpu_devices)
    shape = SMALL._replace(batch=4, heads=2, value_heads=4)
    x = inputs_of("q_delta2", shape)
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 3, (4, SMALL.length)), jnp.int32)
    f = jax.jit(jax.value_and_grad(lambda x, i: loss("q_delta2", x, segment_ids=i)))
    want = f(x, ids)
    place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    placed = jax.tree.map(lambda a: place(a, "data", None, "model"), {n: x[n] for n in (*"qkv", "gates")})
    placed["initial_state"] = place(x["initial_state"], "data", "model")
    placed_ids = place(ids, "data")
    compiled = f.lower(placed, placed_ids).compile()
    assert_close(compiled(placed, placed_ids), want, FLOAT32)
    text = compiled.as_text()
    assert "all-gather" not in text
    assert "all-to-all" not in text


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("linear_attention", "xla"), ("q_delta2", "xla"), ("q_delta2", "scan")],
)
def test_inside_shard_map(name, implementation, cpu_devices):
    """A batch over four devices that share the keys, no state given: the gradient of the keys is summed."""
    mesh = jax.make_mesh((4,), ("data",), devices=cpu_devices[:4], axis_types=(AxisType.Auto,))
    x = inputs_of(name)
    split, shared = PartitionSpec("data"), PartitionSpec()

    def f(q, k, v, gates):
        k = jnp.broadcast_to(k, q.shape)
        return delta_rule(q, k, v, name, gates, implementation=implementation, chunk_size=CHUNK)

    def gradient(f):
        return jax.jit(jax.grad(lambda *a: sum(jnp.sum(jnp.sin(y)) for y in f(*a)), argnums=(0, 1, 2, 3)))

    mapped = jax.shard_map(f, mesh=mesh, in_specs=(split, shared, split, split), out_specs=split)
    arguments = x["q"], x["k"][:1], x["v"], x["gates"]
    assert_close(gradient(mapped)(*arguments), gradient(f)(*arguments), FLOAT32)


def test_step_inside_shard_map(cpu_devices):
    mesh = jax.make_mesh((4,), ("data",), devices=cpu_devices[:4], axis_types=(AxisType.Auto,))
    x = inputs_of("kda")
    token = jax.tree.map(lambda a: a[:, 0], {n: x[n] for n in (*"qkv", "gates")})
    state = jnp.zeros((1, *x["initial_state"].shape[1:]))

    def f(state, x):
        return step(state, *(x[n] for n in "qkv"), rule="kda", gates=x["gates"])

    split = PartitionSpec("data")
    got = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(PartitionSpec(), split), out_specs=split))(state, token)
    assert_close(got, jax.jit(f)(jnp.concatenate([state] * 4), token), SAME)


def test_one_mapped_gate_in_the_form_of_an_accelerator(monkeypatch):
    """Off the CPU, what vmap left unmapped gets the mapped axis too: values and gradients stay those of a loop."""
    inputs = inputs_of("q_delta")
    betas = jnp.stack([inputs["gates"]["beta"], 0.5 * inputs["gates"]["beta"]])

    def value(beta):
        out, state = call("q_delta", {**inputs, "gates": {**inputs["gates"], "beta": beta}}, chunk_size=CHUNK)
        return jnp.sum(jnp.sin(out)) + jnp.sum(state)

    one = jax.jit(jax.value_and_grad(value))
    want = [one(beta) for beta in betas]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    # Another jit cache entry than the CPU's form.
    jax.clear_caches()
    got = jax.jit(jax.vmap(jax.value_and_grad(value)))(betas)
    jax.clear_caches()
    assert_close(got, stack(*want), SAME)
