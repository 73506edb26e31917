"""Layers, models and configurations say in a ValueError which argument is wrong."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from qdelta_jax.layers.attention import Attention, AttentionConfig
from qdelta_jax.layers.inputs import check_tokens
from qdelta_jax.layers.linear import Linear
from qdelta_jax.layers.mixer import Mixer, MixerConfig
from qdelta_jax.layers.norms import GatedRMSNorm, RMSNorm
from qdelta_jax.models import LanguageModel, ModelConfig, generate
from qdelta_jax.rules import RULES

SIZES = {"vocab_size": 11, "width": 8, "layers": 1, "mlp_hidden": 8, "key_dim": 4, "value_dim": 4, "heads": 1}
X = jnp.ones((2, 3, 8))


@pytest.fixture(scope="module")
def layers():
    rngs = nnx.Rngs(0)
    return {
        "mixer": Mixer(MixerConfig(width=8, heads=1, key_dim=4, value_dim=4), rngs=rngs),
        "attention": Attention(AttentionConfig(8, heads=1, head_dim=8), rngs=rngs),
        "window": Attention(AttentionConfig(8, heads=1, head_dim=8, window=2), rngs=rngs),
    }


@pytest.fixture(scope="module")
def model():
    return LanguageModel(ModelConfig(**SIZES), rngs=nnx.Rngs(0))


ALONG = [
    ({"segment_ids": jnp.ones((1, 3), jnp.int32)}, r"segment_ids: got shape \(1, 3\)"),
    ({"segment_ids": jnp.ones((2, 1), jnp.int32)}, r"segment_ids: got shape \(2, 1\)"),
    ({"segment_ids": jnp.ones((2, 3))}, "segment_ids: got dtype float32"),
    ({"segment_ids": [[1, 1, 1]] * 2}, "segment_ids: got list"),
    ({"positions": jnp.zeros((1, 3), jnp.int32)}, r"positions: got shape \(1, 3\)"),
    ({"positions": jnp.zeros((2, 3))}, "positions: got dtype float32"),
    ({"positions": 0}, "positions: got int"),
]


@pytest.mark.parametrize("kind", ["mixer", "attention"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": X[0]}, r"x: got shape \(3, 8\)"),
        ({"x": X[:, :, :5]}, r"want \[B,T,width\] with width = 8"),
        ({"x": X[:, :0]}, r"x: got shape \(2, 0, 8\), want no empty axis"),
        ({"x": X[:0]}, r"x: got shape \(0, 3, 8\), want no empty axis"),
        ({"x": X.astype(jnp.int32)}, "x: got dtype int32"),
        ({"x": [1.0]}, "x: got list"),
        *ALONG,
    ],
)
def test_layers(layers, kind, change, message):
    with pytest.raises(ValueError, match=message):
        layers[kind](**{"x": X, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": jnp.zeros(3, jnp.int32)}, r"tokens: got shape \(3,\)"),
        ({"tokens": jnp.zeros((2, 0), jnp.int32)}, r"tokens: got shape \(2, 0\)"),
        ({"tokens": jnp.zeros((2, 3))}, "tokens: got dtype float32"),
        ({"tokens": [[1, 2]]}, "tokens: got list"),
        ({"tokens": jnp.full((2, 3), 11)}, r"tokens: got values 11 \.\. 11, want them within 0 \.\. 10"),
        ({"tokens": jnp.full((2, 3), -1)}, r"tokens: got values -1 \.\. -1"),
        *ALONG,
    ],
)
def test_model(model, change, message):
    with pytest.raises(ValueError, match=message):
        model(**{"tokens": jnp.zeros((2, 3), jnp.int32), **change})


def test_padding_and_traced_tokens_are_not_looked_at():
    bad = jnp.array([[1, 99]])
    check_tokens(bad, 11, jnp.array([[1, 0]]))
    jax.eval_shape(lambda x: check_tokens(x, 11), bad)
    with pytest.raises(ValueError, match=r"tokens: got values 1 \.\. 99"):
        check_tokens(bad, 11, jnp.array([[1, 1]]))


@pytest.mark.parametrize("kind", ["mixer", "attention", "window"])
def test_cache_of_another_batch(layers, kind):
    with pytest.raises(ValueError, match="cache: got one of batch size 1, want x's batch size 2"):
        layers[kind](X, cache=layers[kind].init_cache(1, 4))


MIXER_CACHES = [
    (lambda c: {"state": c.state}, "cache: got dict, want a MixerCache"),
    (lambda c: c._replace(state=c.state[..., 0]), r"cache.state: got shape \(2, 1, 4\), want \[B,HV,K,V\]"),
    (lambda c: c._replace(convolutions=0), "cache.convolutions: got int, want a tuple"),
    (lambda c: c._replace(state=c.state.astype(jnp.int32)), "cache.state: got dtype int32, want float32"),
]


@pytest.mark.parametrize(("change", "message"), MIXER_CACHES)
def test_bad_cache_of_a_mixer(layers, change, message):
    """Without the annotation checks of this suite, which would raise first."""
    mixer = layers["mixer"]
    run = lambda x: inspect.unwrap(Mixer.__call__)(mixer, x, cache=change(mixer.init_cache(2)))  # noqa: E731
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(run, X)


ATTENTION_CACHES = [
    (lambda c: {"keys": c.keys}, "cache: got dict, want an AttentionCache"),
    (lambda c: c._replace(keys=0), r"cache.keys: got int, want an array \[B,N,H,D\]"),
    (lambda c: c._replace(keys=c.keys[:1]), "cache: got one of batch size 1"),
    (lambda c: c._replace(values=c.values[:, 1:]), r"cache.values: got shape \(2, 1, .* want \[B,N,H,D\]"),
    (lambda c: c._replace(values=c.values.astype(jnp.int32)), "cache.values: got dtype int32, want a floating dtype"),
    (lambda c: c._replace(length=3), r"cache.length: got int, want an array \[B\]"),
    (lambda c: c._replace(length=c.length.astype(jnp.float32)), "cache.length: got dtype float32, want an integer"),
]


@pytest.mark.parametrize("build", [partial(Linear, 4, 4), partial(RMSNorm, 4), partial(GatedRMSNorm, 4)])
def test_dtypes_of_small_layers(build):
    for name, value in (("dtype", jnp.int32), ("param_dtype", "x")):
        with pytest.raises(ValueError, match=f"^{name}: got .*, want a floating dtype"):
            build(rngs=nnx.Rngs(0), **{name: value})


@pytest.mark.parametrize("eps", [0.0, -1.0, 1e-30])
def test_eps_of_a_norm(eps):
    with pytest.raises(ValueError, match=f"eps: got {eps}, want a number above 0"):
        RMSNorm(4, eps, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(("change", "message"), ATTENTION_CACHES)
def test_bad_cache_of_attention(layers, change, message):
    """As above."""
    window = layers["window"]
    run = lambda x: inspect.unwrap(Attention.__call__)(window, x, cache=change(window.init_cache(2, 1)))  # noqa: E731
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(run, X)


def test_more_tokens_than_the_cache_holds(layers):
    with pytest.raises(ValueError, match="x: got 3 tokens in one call, want at most the cache's max_length = 2"):
        layers["attention"](X, cache=layers["attention"].init_cache(2, 2))
    window = layers["window"]
    assert jax.eval_shape(lambda: window(X, cache=window.init_cache(2, 1))[0]).shape == X.shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 2.0}, "max_new_tokens: got 2.0"),
        ({"max_new_tokens": True}, "max_new_tokens: got True"),
        ({"top_k": 1.5}, "top_k: got 1.5"),
        ({"temperature": "1"}, "temperature: got '1'"),
        ({"temperature": float("nan")}, "temperature: got nan"),
        ({"top_p": "1"}, "top_p: got '1'"),
        ({"stop_tokens": 3}, "stop_tokens: got 3"),
        ({"stop_tokens": [11]}, "stop_tokens: got 11 in it"),
        ({"stop_tokens": [1.0]}, "stop_tokens: got 1.0 in it"),
        ({"stop_tokens": "1"}, "stop_tokens: got '1'"),
        ({"rng": 0}, "rng: got int"),
        ({"rng": jax.random.split(jax.random.key(0))}, r"rng: got shape \(2,\)"),
        ({"rng": jnp.zeros(2)}, "rng: got shape"),
        ({"prompts": [[1.0]]}, "prompts: row 0 has dtype float64"),
        ({"prompts": "text"}, "prompts: got str"),
    ],
)
def test_generate(model, change, message):
    with pytest.raises(ValueError, match=message):
        generate(model, **{"prompts": [[1]], "max_new_tokens": 2, **change})


CONFIGS = {
    MixerConfig: {"width": 8, "heads": 1, "key_dim": 4, "value_dim": 4},
    AttentionConfig: {"width": 8, "heads": 1, "head_dim": 8},
    ModelConfig: SIZES,
}


def refused(config, name, value):
    """As `config(name=value)` does without the annotation checks of this suite, which would raise first."""
    made = config(**CONFIGS[config])
    object.__setattr__(made, name, value)
    made.__post_init__()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("value", [2.0, True, "2", 0])
def test_counts(config, value):
    for name in CONFIGS[config]:
        with pytest.raises(ValueError, match=f"{name}: got {value!r}"):
            refused(config, name, value)


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (MixerConfig, "conv_width", 4.0),
        (MixerConfig, "value_heads", 2.0),
        (MixerConfig, "decay_lower_bound", 0.0),
        (MixerConfig, "norm_eps", 0.0),
        (MixerConfig, "normalize_eps", -1),
        (MixerConfig, "normalize_eps", True),
        (MixerConfig, "normalize_eps", 1e-50),
        (MixerConfig, "normalize_eps", 10**400),
        (AttentionConfig, "kv_heads", 1.0),
        (AttentionConfig, "window", True),
        (AttentionConfig, "rope_theta", -1.0),
        (AttentionConfig, "norm_eps", "1e-6"),
        (ModelConfig, "attention_dim", 8.0),
        (ModelConfig, "window", None),
        (ModelConfig, "conv_width", -1),
        (ModelConfig, "rope_theta", 0.0),
        (ModelConfig, "norm_eps", float("nan")),
        (ModelConfig, "decay_lower_bound", 1.0),
        (ModelConfig, "rule", RULES["q_delta"]),
    ],
)
def test_fields(config, name, value):
    with pytest.raises(ValueError, match=f"{name}: got "):
        refused(config, name, value)
