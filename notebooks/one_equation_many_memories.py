# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # One equation, many memories
#
# Every memory of this library is one recurrence. A state `S` of K keys by V values changes with every token:
#
#     S_t = (I - k_t e_t^T) Diag(exp(log_decay_t)) S_{t-1} + k_t z_t^T        o_t = scale * S_t^T q_t
#
# A rule says what `e`, `z` and `log_decay` are, and nothing else. Here the same tokens go through all ten rules. You
# will see the state that each of them is left with, what can be read from it, and that the token-by-token scan and the
# chunked solver give the same numbers.

# %%
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np

sys.path.extend((".", ".."))  # `experiments` lies beside `notebooks`
import qdelta_jax as qd
from experiments.style import COLORS, DIVERGING, pyplot

plt = pyplot(interactive=True)
QUICK = bool(os.environ.get("QDELTA_QUICK"))
RULES = list(qd.RULES)

# %% [markdown]
# ## A rule is one small function
#
# It takes one token's q, k, v and its gates, and returns the factors of the recurrence. One step by hand, in NumPy,
# and the library's `step`:

# %%
q, k, v = jax.random.normal(jax.random.key(0), (3, 4))
k = qd.l2_normalize(k)
gates = {"beta": jnp.array([0.8]), "feedback": jnp.array([0.3]), "log_decay": jnp.array([-0.1])}
before = jax.random.normal(jax.random.key(1), (4, 4))

made = qd.RULES["q_delta"](q, k, v, **gates)
print(f"q_delta: {qd.RULES['q_delta'].__doc__}")
for name, x in made._asdict().items():
    print(f"{name:>9} = {np.array2string(np.asarray(x), precision=3)}")

decayed = np.exp(made.log_decay)[:, None] * before
by_hand = (np.eye(4) - np.outer(made.k, made.e)) @ decayed + np.outer(made.k, made.z)
in_batch = {name: x[None] for name, x in gates.items()}  # `step` takes [B, H, ...]
_, state = qd.step(before[None, None], *(x[None, None] for x in (q, k, v)), rule="q_delta", gates=in_batch)
step_error = float(np.max(np.abs(state[0, 0] - by_hand)))
print(f"largest difference between `step` and the equation: {step_error:.1e}")

# %% [markdown]
# ## Twenty-four tokens
#
# With keys e_1 .. e_16 (one 1, else zeros) a token writes one row of the state, so a state can be looked at as a
# picture. Tokens 1 to 16 write the rows of a ring. Tokens 17 to 24 write the first eight rows again, with those of a
# cross. Each token's query is the key of the row above its own.

# %%
K = V = 16
x = np.linspace(-1, 1, V)
down, across = np.meshgrid(x, x, indexing="ij")
ring = (np.abs(np.hypot(down, across) - 0.72) < 0.2).astype(np.float32)
cross = (np.minimum(np.abs(down), np.abs(across)) < 0.2).astype(np.float32)

row = np.concatenate([np.arange(K), np.arange(K // 2)])  # the row that each token writes
values = np.concatenate([ring, cross[: K // 2]])
T = len(row)


def tokens(x):
    """[T] or [T, channels] as [B, T, H] or [B, T, H, channels], with one batch row and one head."""
    return jnp.asarray(np.asarray(x, np.float32)[None, :, None])


def show(ax, picture, title):
    """A picture with 0 in the middle of the colours."""
    image = ax.imshow(picture, cmap=DIVERGING, vmin=-2, vmax=2)
    ax.set(title=title, xlabel="value channel", ylabel="key channel")
    ax.grid(False)
    return image


figure, axes = plt.subplots(1, 2, figsize=(6, 3.2))
show(axes[0], ring, "tokens 1-16: a ring")
image = show(axes[1], np.where(np.arange(K)[:, None] < K // 2, cross, 0), "tokens 17-24: half a cross")
figure.colorbar(image, ax=axes, label="value (no unit)")
figure.suptitle("What is written, row by row")
print(f"{T} tokens, K = {K} key channels, V = {V} value channels")

# %% [markdown]
# ## The gates
#
# Each rule takes the gates that it knows by name, so one dict serves all ten. They are constant in time here:
# `beta` = 1 (write whole values), `feedback` = 0.5, and a decay of exp(-0.05) a token. Where a rule takes one gate per
# channel, the upper and the lower half differ: the upper eight key channels do not decay at all, `erase` is 1 in the
# upper half and 0 in the lower, `write` is 1 in the left half and 0.5 in the right.

# %%
DECAY = -0.05
half = np.arange(K) < K // 2
GATES = {
    "beta": {"head": np.ones(1)},
    "feedback": {"head": np.full(1, 0.5)},
    "log_decay": {"head": np.full(1, DECAY), "key": np.where(half, 0.0, DECAY)},
    "erase": {"key": np.where(half, 1.0, 0.0)},
    "write": {"value": np.where(half, 1.0, 0.5)},
}


def gates_for(rule, length):
    """The rule's own gates, the same for all tokens: [1, T, 1] per head, [1, T, 1, channels] per channel."""
    chosen = {name: GATES[name][gate.axis] for name, gate in qd.RULES[rule].gates.items()}
    in_time = {name: np.tile(x, (length, 1)) for name, x in chosen.items()}
    return {name: tokens(x[:, 0] if x.shape[1] == 1 else x) for name, x in in_time.items()}


def run(rule, q, k, v, **options):
    """Output [T, V] and final state [K, V]."""
    out, state = qd.delta_rule(tokens(q), tokens(k), tokens(v), rule, gates_for(rule, len(k)), scale=1.0, **options)
    return np.asarray(out[0, :, 0]), np.asarray(state[0, 0])


for rule in RULES:
    print(f"{rule:>17}: {', '.join(f'{name} (per {gate.axis})' for name, gate in qd.RULES[rule].gates.items()) or '-'}")

# %% [markdown]
# ## Ten states

# %%
keys = np.eye(K)[row]
queries = np.eye(K)[row - 1]
states = {rule: run(rule, queries, keys, values, implementation="scan")[1] for rule in RULES}

figure, axes = plt.subplots(2, 5, figsize=(12, 5.4), sharex=True, sharey=True)
for ax, rule in zip(axes.flat, RULES, strict=True):
    image = show(ax, states[rule], rule)
    ax.label_outer()
figure.colorbar(image, ax=axes, label="state (units of the values)")
figure.suptitle("The same 24 tokens, ten memories")

upper, lower = slice(0, K // 2), slice(K // 2, K)
covered = (ring[upper] == 1) & (cross[upper] == 0)
left = {rule: state[upper][covered].mean() for rule, state in states.items()}
print("what is left of the ring's ones in the upper half, where the cross wrote a zero (mean):")
for rule in RULES:
    print(f"{rule:>17}: {left[rule]:5.2f}")

# %% [markdown]
# The rules without an erase vector keep the ring below the cross: all of it in `linear_attention` (and in `gla`, whose
# upper channels do not decay here), what the decay has left of it in `retnet` and `mamba2`. `delta_net`,
# `gated_delta_net` and `kda` erase the row before they write it, and nothing of the ring is left under the cross.
# `gated_delta_net2` does so, too, and writes the right half at half strength. `q_delta` and `q_delta2` erase what the
# key *and* the query read: half of what the row above holds is taken off every row that is written (in `q_delta2` only
# where the row above has an `erase` of 1). That is where negative entries come from, and the notebook
# `query_feedback` looks at it.

# %%
for rule in ("delta_net", "q_delta", "q_delta2"):
    print(f"{rule:>10}: smallest entry {states[rule].min():.2f}")

# %% [markdown]
# ## What is read
#
# Keys of a model are not axes. With random keys the picture in the state is scrambled, but the memory can be asked: row
# i of the pictures below is S^T k_i, read with the key of row i. Sixteen random unit keys of 32 channels overlap, so
# that a row that is written also moves what the other keys read.

# %%
WIDE = 16 if QUICK else 32
random_keys = np.asarray(qd.l2_normalize(jax.random.normal(jax.random.key(2), (K, WIDE))))
GATES["log_decay"]["key"] = np.full(WIDE, DECAY)
GATES["erase"]["key"] = np.ones(WIDE)
GATES["write"]["value"] = np.ones(V)
target = np.concatenate([cross[upper], ring[lower]])  # the newest value of each key

reads, errors = {}, {}
for rule in RULES:
    _, state = run(rule, random_keys[row - 1], random_keys[row], values, implementation="scan")
    reads[rule] = random_keys @ state
    errors[rule] = np.linalg.norm(reads[rule] - target) / np.linalg.norm(target)

figure, axes = plt.subplots(2, 5, figsize=(12, 5.8), sharex=True, sharey=True)
for ax, rule in zip(axes.flat, RULES, strict=True):
    image = show(ax, reads[rule], f"{rule}\nerror {errors[rule]:.2f}")
    ax.set_ylabel("key that is asked")
    ax.label_outer()
figure.colorbar(image, ax=axes, label="S^T k (units of the values)")
figure.suptitle("Read back with random keys: half a cross above half a ring was written last")

overlap = np.abs(random_keys @ random_keys.T - np.eye(K)).max()
print(f"largest overlap of two keys: {overlap:.2f}")
print("error of what is read, |read - newest| / |newest|:")
print("\n".join(f"{rule:>17}: {errors[rule]:.2f}" for rule in sorted(RULES, key=errors.get)))

# %% [markdown]
# The gates per channel are the same for all channels in this figure, so `gla` is `mamba2`, and `kda` and
# `gated_delta_net2` are `gated_delta_net`: the rules collapse onto each other where their gates agree.

# %%
collapses = {
    ("gla", "mamba2"): np.abs(reads["gla"] - reads["mamba2"]).max(),
    ("kda", "gated_delta_net"): np.abs(reads["kda"] - reads["gated_delta_net"]).max(),
    ("gated_delta_net2", "kda"): np.abs(reads["gated_delta_net2"] - reads["kda"]).max(),
    ("q_delta2", "q_delta"): np.abs(reads["q_delta2"] - reads["q_delta"]).max(),
}
for (one, other), difference in collapses.items():
    print(f"{one} and {other}: {difference:.1e} apart")

# %% [markdown]
# ## The scan is the chunked solver
#
# `implementation="scan"` takes one token at a time and is the definition. `"xla"` solves chunks of 64 tokens at once.
# Both are run over a longer random sequence, and the outputs are compared by the norm of their difference.

# %%
LENGTH = T if QUICK else 2000
q, k, v = jax.random.normal(jax.random.key(3), (3, LENGTH, WIDE))
q, k = qd.l2_normalize(q), qd.l2_normalize(k)
GATES["beta"]["head"] = np.full(1, 0.5)
GATES["erase"]["key"] = np.linspace(0, 1, WIDE)
GATES["write"]["value"] = np.linspace(0, 1, WIDE)
GATES["log_decay"]["key"] = np.linspace(-0.2, 0, WIDE)

difference = {}
for rule in ("linear_attention", "q_delta") if QUICK else RULES:
    by_token, in_chunks = (run(rule, q, k, v, implementation=how)[0] for how in ("scan", "xla"))
    difference[rule] = np.linalg.norm(by_token - in_chunks) / np.linalg.norm(by_token)

figure, ax = plt.subplots(figsize=(8, 3.6))
ax.scatter(list(difference.values()), list(difference), color=COLORS[0], label="scan against chunks")
ax.axvline(np.finfo(np.float32).eps, color=COLORS[5], linestyle="--", label="rounding of one float32 number")
ax.set(xscale="log", xlim=(2e-8, 2e-5), title=f"Two ways to the same output, {LENGTH} tokens", ylabel="rule")
ax.set_xlabel("relative difference of the outputs (no unit)")
ax.invert_yaxis()
legend = ax.legend(loc="lower right")
print(f"largest relative difference: {max(difference.values()):.1e}")
