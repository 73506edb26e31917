"""Which implementation a call runs, and how it says why the kernels cannot."""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from cases import Shape, make_inputs
from jax import lax
from jax.sharding import AxisType
from kernels import any_machine, run_kernels, run_stand_in, stand_in
from reference import call, cast_inputs
from tolerances import FLOAT32, KERNEL, SAME, assert_close, relative_error

import pallas_kernels
import qdelta_jax as qd
from qdelta_jax import delta_rule, resolve_implementation
from qdelta_jax.mosaic import kernel_options
from qdelta_jax.plan import ChunkOptions

SMALL = Shape(1, 65, 1, 1, 16, 24)


def arguments(name="delta_net", shape=SMALL, dtype=jnp.float32) -> dict:
    inputs = cast_inputs(make_inputs(name, shape), dtype)
    return {"rule": name, **{n: inputs[n] for n in (*"qkv", "gates")}}


def resolve(implementation=None, *, name="delta_net", shape=SMALL, dtype=jnp.float32, **options):
    """Where any machine would do."""
    with any_machine():
        return resolve_implementation(implementation, shape.length, **{**arguments(name, shape, dtype), **options})


def test_none_picks_the_kernels_wherever_they_run():
    assert resolve() == "mosaic"
    assert resolve(dtype=jnp.bfloat16, segment_ids=jnp.ones((1, 65), jnp.int32)) == "mosaic"
    assert resolve(shape=SMALL._replace(length=1)) == "scan"
    assert resolve(validate=True) == "xla"
    assert resolve(shape=SMALL._replace(key_dim=300)) == "xla"
    assert resolve(precision=lax.DotAlgorithmPreset.F32_F32_F32) == "xla"
    with jax.enable_x64(True):
        assert resolve(dtype=jnp.float64) == "xla"


def test_an_explicit_name_is_what_runs():
    for name in ("scan", "xla", "mosaic"):
        assert resolve(name) == resolve_implementation(name, 100) == name
    assert resolve("mosaic", shape=SMALL._replace(length=1)) == "mosaic"
    with pytest.raises(ValueError, match="rule, k and v: got None"):
        resolve_implementation("mosaic", 65, q=jnp.zeros((1, 65, 1, 8)))


def test_delta_rule_runs_what_is_resolved(monkeypatch):
    """None runs the kernels where they can run, and traces them once."""
    calls = []
    monkeypatch.setattr(pallas_kernels, "forward", lambda *a, **k: calls.append(1) or stand_in(*a, **k))
    x = arguments()
    q, k, v, gates = (x[n] for n in (*"qkv", "gates"))
    with any_machine():
        for factor in (1.0, 0.5):
            delta_rule(factor * q, k, v, "delta_net", gates)
        assert len(calls) == 1
        assert_close(
            delta_rule(q, k, v, "delta_net", gates),
            delta_rule(q, k, v, "delta_net", gates, implementation="xla"),
            FLOAT32,
        )
        delta_rule(q[:, :1], k[:, :1], v[:, :1], "delta_net", {n: x[:, :1] for n, x in gates.items()})
    assert len(calls) == 1
    jax.clear_caches()


@qd.rule(beta=qd.per_head())
def running(q, k, v, *, beta):
    return qd.Coefficients(k, e=jnp.cumsum(beta * k, axis=-1), z=v, log_decay=None)


@qd.rule(beta=qd.per_head())
def normalized(q, k, v, *, beta):
    return qd.Coefficients(k, e=beta * k / jnp.sum(k * k, axis=-1, keepdims=True), z=v, log_decay=None)


@qd.rule(beta=qd.per_head())
def mixed(q, k, v, *, beta):
    return qd.Coefficients(k, e=beta * k, z=v + jnp.mean(q), log_decay=None)


@qd.rule(beta=qd.per_head())
def unfinished(q, k, v, *, beta):
    return k, beta * k, v


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (running, "its e uses the operation 'cumsum', which the kernels do not have"),
        (normalized, "its e uses the operation 'reduce_sum'"),
        (mixed, "its z uses the operation 'reduce_sum'"),
    ],
)
def test_a_rule_that_does_not_lower_is_refused_by_name(rule, reason):
    with pytest.raises(NotImplementedError, match=f"implementation='mosaic' cannot run here: .*{reason}"):
        resolve("mosaic", rule=rule)
    assert resolve(rule=rule) == "xla"


def test_a_rule_that_is_wrong_is_told_so_as_everywhere():
    for implementation in (None, "mosaic"):
        with pytest.raises(ValueError, match="rule 'unfinished': the function returned tuple, want Coefficients"):
            resolve(implementation, rule=unfinished)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"shape": SMALL._replace(key_dim=257)}, "K = 257 and V = 24; the kernels go up to 256"),
        ({"shape": SMALL._replace(key_dim=256)}, "need more shared memory than a multiprocessor has"),
        ({"shape": SMALL._replace(batch=70_000, length=2, key_dim=1, value_dim=1)}, "B = 70000"),
        ({"precision": lax.DotAlgorithmPreset.F32_F32_F32}, "precision is .*; the kernels take None and jax.lax.Prec"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(options, reason):
    with pytest.raises(NotImplementedError, match=f"implementation='mosaic' cannot run here: .*{reason}"):
        resolve("mosaic", **options)


def test_float64_is_refused_by_name():
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="q has dtype float64"):
        resolve("mosaic", dtype=jnp.float64)


GPU = {"platform": "gpu", "device_kind": "NVIDIA something", "compute_capability": "9.0"}


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (GPU, None),
        ({**GPU, "compute_capability": "10.0"}, r"Hopper GPUs \(compute capability 9.0\).* NVIDIA something \(10.0\)"),
        ({"platform": "tpu", "device_kind": "TPU v5"}, r"for Hopper GPUs, and the device is a tpu \(TPU v5\)"),
    ],
)
def test_machines(device, reason, monkeypatch):
    """Where an array is, else where JAX computes by default."""
    monkeypatch.setattr(sys.modules["pallas_kernels.supports"], "_default", lambda: SimpleNamespace(**device))
    shape = jax.ShapeDtypeStruct((1, 65, 1, 16), jnp.float32)
    if reason is None:
        assert pallas_kernels.machine(shape) is None
    else:
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(pallas_kernels.machine(shape))


def test_this_machine(cpu_devices):
    on_cpu = jax.device_put(jnp.zeros((1, 65, 1, 16)), cpu_devices[0])
    assert "the device is a cpu" in pallas_kernels.machine(on_cpu)
    x = {**arguments(), "q": on_cpu}
    with pytest.raises(NotImplementedError, match=r"implementation='mosaic' cannot run here: .* is a cpu"):
        delta_rule(x["q"], x["k"], x["v"], "delta_net", x["gates"], implementation="mosaic")


def test_calls_spread_over_devices_are_refused(cpu_devices):
    """Unless they are inside shard_map, where each device has its own."""
    mesh = jax.make_mesh((4,), ("data",), devices=cpu_devices[:4], axis_types=(AxisType.Auto,))
    reasons = []
    with jax.set_mesh(mesh):
        reasons.append(pallas_kernels.machine(None))
        look = lambda x: reasons.append(pallas_kernels.machine(x)) or x  # noqa: E731
        jax.eval_shape(jax.shard_map(look, in_specs=jax.P("data"), out_specs=jax.P("data")), jnp.zeros(4))
    spread = jax.device_put(jnp.zeros(4), jax.NamedSharding(mesh, jax.P("data")))
    reasons.append(pallas_kernels.machine(spread))
    found = ["spread over 4 devices" in (reason or "") for reason in reasons]
    assert found == [True, False, True]


@pytest.mark.parametrize(
    ("precision", "dtype", "accurate"),
    [
        (lax.Precision.HIGHEST, jnp.float32, True),
        (lax.Precision.HIGH, jnp.float32, True),
        (lax.Precision.DEFAULT, jnp.float32, False),
        (None, jnp.bfloat16, False),
        (lax.Precision.HIGH, jnp.float16, False),
        (lax.Precision.HIGHEST, jnp.bfloat16, True),
    ],
)
def test_precision(precision, dtype, accurate):
    assert kernel_options(ChunkOptions(1.0, precision=precision), dtype).accurate is accurate


def test_highest_precision_of_half_inputs():
    """The output is rounded to bfloat16, the state is exact to float32."""
    x = cast_inputs(make_inputs("mamba2", SMALL), jnp.bfloat16)
    with run_kernels():
        state = call("mamba2", x, implementation="mosaic", precision="highest")[1]
    want = call("mamba2", cast_inputs(x, jnp.float32), implementation="xla")[1]
    assert_close(state, want, KERNEL["float32"])


def test_default_precision_of_float32_inputs():
    x = cast_inputs(make_inputs("delta_net", SMALL), jnp.float32)
    with run_kernels():
        got = call("delta_net", x, implementation="mosaic", precision="default")
    want = call("delta_net", x, implementation="xla")
    errors = [relative_error(a, b) for a, b in zip(got, want, strict=True)]
    assert KERNEL["float32"] < max(errors) <= KERNEL["float16"]


def test_chunk_size_and_residuals_change_nothing():
    x = cast_inputs(make_inputs("mamba2", SMALL), jnp.float32)
    f = lambda x, **options: jnp.sum(call("mamba2", x, implementation="mosaic", **options)[0] ** 2)  # noqa: E731
    with run_stand_in():
        want = jax.value_and_grad(f)(x)
        assert_close(jax.value_and_grad(lambda x: f(x, chunk_size=16, residuals="keep"))(x), want, SAME)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (1, 65, 1, 8)}, r"k: got shape \(1, 65, 1, 8\)"),
        ({"v": (1, 65, 3, 0)}, "v: got shape"),
        ({"gates": {}}, r"gates: got \[\], want \['beta'\]"),
        ({"gates": {"beta": (1, 5, 1)}}, r"gates\['beta'\]: got shape \(1, 5, 1\)"),
        ({"state": (2, 1, 16, 24)}, "state: got shape"),
        ({"state": None}, "state: got None"),
    ],
)
def test_the_kernels_alone_refuse_what_does_not_fit(change, message):
    shapes = {"q": (1, 65, 1, 16), "k": (1, 65, 1, 16), "v": (1, 65, 1, 24), "gates": {"beta": (1, 65, 1)}}
    shapes |= {"state": (1, 1, 16, 24)} | change
    arrays = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))
    with pytest.raises(ValueError, match=message):
        pallas_kernels.forward(qd.RULES["delta_net"].function, {"beta": "head"}, **arrays, scale=1.0)


def test_a_decay_made_of_keys_is_refused_by_name():
    @qd.rule()
    def forgetful(q, k, v):
        return qd.Coefficients(k, e=None, z=v, log_decay=-abs(k))

    with any_machine(), pytest.raises(NotImplementedError, match="its log_decay reads k"):
        resolve_implementation("mosaic", 65, **{**arguments("linear_attention"), "rule": forgetful})
