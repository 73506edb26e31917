# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Interference and recall
#
# A state of K x V numbers holds pairs of a key and a value, one on top of the other. Here pairs are stored one after
# the other and all of them are asked after each. You will see states fill up, what is read for a key besides its own
# value, and the error of recall against the number of stored pairs and against their age, for five rules, with random
# keys and with orthogonal ones.

# %%
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np

sys.path.extend((".", ".."))  # `experiments` lies beside `notebooks`
import qdelta_jax as qd
from experiments.style import COLORS, DIVERGING, MARKERS, pyplot
from qdelta_jax.dynamics import chunk_states, effective_rank, map_states, retrieval_by_age

plt = pyplot(interactive=True)
QUICK = bool(os.environ.get("QDELTA_QUICK"))
K = V = 8 if QUICK else 32
PAIRS, STREAMS = 2 * K, 2 if QUICK else 32

# %% [markdown]
# ## The pairs
#
# All keys and values have norm 1. Random keys overlap: the cosine of two of them is about 1 / sqrt(K). Orthogonal ones
# do not, but there are only K of them, so that after K pairs every further one rewrites an old key. Half of the batch
# has random keys, half orthogonal. While a pair is stored, the token's query is the key of a pair stored before it;
# `q_delta` is the only rule here to which that matters.

# %%
noise = jax.random.normal(jax.random.key(0), (STREAMS, PAIRS, K))
random_keys = qd.l2_normalize(noise)
rotation = jnp.linalg.qr(noise[:, :K])[0]
orthogonal_keys = jnp.concatenate([rotation, rotation], axis=1)
keys = jnp.concatenate([random_keys, orthogonal_keys])[:, :, None]  # [B, N, H, K]
values = qd.l2_normalize(jax.random.normal(jax.random.key(1), (2 * STREAMS, PAIRS, 1, V)))
asked = np.random.default_rng(0).integers(0, np.maximum(np.arange(PAIRS), 1))
queries = keys[:, asked]
RANDOM, ORTHOGONAL = slice(0, STREAMS), slice(STREAMS, None)

one = jnp.ones((2 * STREAMS, PAIRS, 1))
GATES = {"beta": one, "log_decay": -0.03 * one, "feedback": 0.3 * one}
RULES = ("linear_attention", "delta_net")
if not QUICK:
    RULES = ("linear_attention", "retnet", "delta_net", "gated_delta_net", "q_delta")
LOOK = {rule: {"color": COLORS[i], "marker": MARKERS[i], "label": rule} for i, rule in enumerate(RULES)}
calls = {rule: (rule, {name: GATES[name] for name in qd.RULES[rule].gates}) for rule in RULES}
cosines = np.abs(np.einsum("bik,bjk->bij", *[np.asarray(random_keys)] * 2)[:, *np.triu_indices(PAIRS, 1)])
print(f"random keys: root mean square cosine {np.sqrt(np.mean(cosines**2)):.3f}, 1 / sqrt(K) = {K**-0.5:.3f}")

# %% [markdown]
# ## States fill up
#
# One stream with random keys. Each row is one memory after more and more pairs.

# %%
SHOWN = (K // 4, K, PAIRS)
states = {}  # [B, K, V] after so many pairs
for rule in RULES:
    for end, state in chunk_states(queries, keys, values, *calls[rule], chunk_size=K // 4):
        states[rule, end] = state[:, 0]
snapshots = {(rule, count): states[rule, count][0] for rule in RULES for count in SHOWN}
most = max(float(jnp.abs(state).max()) for state in snapshots.values())

figure, axes = plt.subplots(len(SHOWN), len(RULES), figsize=(13, 8), sharex=True, sharey=True)
for row, count in zip(axes, SHOWN, strict=True):
    for ax, rule in zip(row, RULES, strict=True):
        image = ax.imshow(snapshots[rule, count], cmap=DIVERGING, vmin=-most, vmax=most)
        ax.grid(False)
        ax.set(title=f"{rule}, {count} pairs", xlabel="value channel", ylabel="key channel")
        ax.label_outer()
figure.colorbar(image, ax=axes, label="state (units of the values)", shrink=0.6)
norms, ranks = {}, {}
for rule in RULES:
    norms[rule] = [float(jnp.linalg.norm(snapshots[rule, count])) for count in SHOWN]
    ranks[rule] = [float(effective_rank(snapshots[rule, count])) for count in SHOWN]
    print(f"{rule:>16}: norm {np.round(norms[rule], 1)}, effective rank {np.round(ranks[rule], 1)} after {SHOWN} pairs")

# %% [markdown]
# The state of `linear_attention` grows as long as pairs come. `delta_net` grows more slowly, and the decay keeps the
# other three small.

# %% [markdown]
# ## What else a key reads
#
# After K pairs every key is asked. The picture has a column for each key and a row for each value: the product of the
# value with what the key reads, S^T k. A perfect memory shows the identity.

# %%
figure, axes = plt.subplots(2, len(RULES), figsize=(13, 6.4), sharex=True, sharey=True)
diagonal = {}
for column, rule in zip(axes.T, RULES, strict=True):
    seen = np.einsum("bkv,bsk,buv->bus", states[rule, K], keys[:, :K, 0], values[:, :K, 0])
    for ax, (name, which) in zip(column, (("random", RANDOM), ("orthogonal", ORTHOGONAL)), strict=True):
        image = ax.imshow(seen[which][0], cmap=DIVERGING, vmin=-1.5, vmax=1.5)
        ax.set(title=f"{rule}\n{name} keys", xlabel="key that is asked", ylabel="value that is found")
        ax.grid(False)
        ax.label_outer()
        diagonal[rule, name] = np.mean([np.diag(x) for x in seen[which]])
figure.colorbar(image, ax=axes, label="value . S^T key (no unit)")
for rule in RULES:
    random, orthogonal = diagonal[rule, "random"], diagonal[rule, "orthogonal"]
    print(f"{rule:>16}: mean of the diagonal, random keys {random:.2f}, orthogonal keys {orthogonal:.2f}")

# %% [markdown]
# `linear_attention` keeps every diagonal entry, and with random keys everything else, too. `delta_net` with random keys
# gives up old pairs (top left) and has less beside the diagonal. With orthogonal keys both are perfect: what is still
# seen beside the diagonal are the products of the values, which are random.

# %% [markdown]
# ## Error against the number of stored pairs
#
# The error of a pair is |S^T k - v| / |v|: 0 is perfect, 1 is as good as reading nothing. `map_states` asks for all
# pairs after every token, and holds one state at a time.


# %%
def recall_errors(state):
    """[B, N]: of every pair, stored already or not."""
    read = jnp.einsum("bkv,bnk->bnv", state[:, 0], keys[:, :, 0], precision="highest")
    return jnp.linalg.norm(read - values[:, :, 0], axis=-1)


stored = np.tril(np.ones((PAIRS, PAIRS), bool))  # [number of tokens - 1, pair]
errors, mean_error = {}, {}
for rule in RULES:
    found = np.asarray(map_states(recall_errors, queries, keys, values, *calls[rule], chunk_size=1))  # [N, B, N]
    for name, which in (("random", RANDOM), ("orthogonal", ORTHOGONAL)):
        errors[rule, name] = np.where(stored, found[:, which].mean(axis=1), np.nan)
        mean_error[rule, name] = np.nanmean(errors[rule, name], axis=1)

figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
count = np.arange(1, PAIRS + 1)
for ax, (name, last) in zip(axes, (("random", PAIRS), ("orthogonal", K)), strict=True):
    for rule in RULES:
        ax.plot(count[:last], mean_error[rule, name][:last], markevery=max(1, K // 4), **LOOK[rule])
    ax.axhline(1, color="#666666", linestyle=":", label="nothing read")
    ax.set(title=f"{name.capitalize()} keys", xlabel="stored pairs", xlim=(0, last))
expected = np.sqrt((count - 1) / K)
axes[0].plot(count, expected, "--", color="black", label="sqrt((N - 1) / K)")
axes[0].set_ylabel("mean error of all stored pairs (no unit)")
legend = axes[0].legend()
distance = np.abs(mean_error["linear_attention", "random"] - expected).max()
print(f"linear_attention with random keys: at most {distance:.3f} from sqrt((N - 1) / K)")
print(f"mean error after K = {K} pairs, random and orthogonal, and after {PAIRS}, random:")
for rule in RULES:
    random, orthogonal = (mean_error[rule, name] for name in ("random", "orthogonal"))
    print(f"{rule:>16}: {random[K - 1]:.2f}  {orthogonal[K - 1]:.2f}  {random[-1]:.2f}")

# %% [markdown]
# With random keys the error of `linear_attention` is that of N - 1 other pairs read with a weight of 1 / sqrt(K) each;
# after about K pairs it is no better than reading nothing. The rules that erase are ahead while there are few pairs.
# After 2K pairs none of the five is far from 1. With orthogonal keys `linear_attention` and `delta_net` are perfect up
# to K pairs, a decay costs what it forgets, and `q_delta` pays for its feedback, too: what the query reads is left out
# of what is stored under the key.

# %% [markdown]
# ## Error against age
#
# The same numbers, not averaged over the pairs. A row is the life of one pair: it begins on the diagonal, when the pair
# is stored, and time runs to the right.

# %%
figure, axes = plt.subplots(2, len(RULES), figsize=(13, 6.6), sharex=True, sharey=True)
for column, rule in zip(axes.T, RULES, strict=True):
    for ax, name in zip(column, ("random", "orthogonal"), strict=True):
        picture = errors[rule, name].T
        image = ax.imshow(picture, vmin=0, vmax=1.5, extent=(0.5, PAIRS + 0.5, PAIRS + 0.5, 0.5))
        ax.set(title=f"{rule}\n{name} keys", xlabel="stored pairs", ylabel="pair")
        ax.grid(False)
        ax.label_outer()
bar = figure.colorbar(image, ax=axes, label="error of the pair (no unit)", extend="max")

# %% [markdown]
# With orthogonal keys the second round begins after K pairs: each key gets a new value. In the rules that erase the new
# value replaces the old one, whose error jumps. The rules without an erase vector read the sum of both values, and the
# new pair is as wrong as the old one (in `retnet` the old one has decayed).
#
# With random keys, the mean over all ages hides who is right about what:

# %%
figure, ax = plt.subplots(figsize=(8, 4))
by_age = {}
for rule in RULES:
    seen = retrieval_by_age(queries, keys, values, *calls[rule], max_age=PAIRS, chunk_size=PAIRS)
    by_age[rule] = np.asarray(seen.error[RANDOM, 0].mean(axis=0))
    ax.plot(np.arange(PAIRS), by_age[rule], markevery=max(1, K // 4), **LOOK[rule])
ax.axhline(1, color="#666666", linestyle=":", label="nothing read")
ax.set(title=f"After {PAIRS} pairs with random keys, K = {K}", xlabel="age (tokens since it was stored)")
ax.set_ylabel("error of the pair (no unit)")
legend = ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
print("error of the newest pair, of age K / 2, and of the oldest:")
for rule in RULES:
    print(f"{rule:>16}: {by_age[rule][0]:.2f}  {by_age[rule][K // 2]:.2f}  {by_age[rule][-1]:.2f}")

# %% [markdown]
# `linear_attention` is as wrong about the newest pair as about the oldest. The decay of `retnet` buys better recent
# pairs with the old ones. The delta rules are right about the newest pair (`q_delta` up to its feedback), and worse
# than reading nothing about the oldest ones.
