# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What the gates do
#
# `gated_delta_net2` has three gates, each a vector: `erase` and `log_decay` with a number per key channel (a row of the
# state), `write` with a number per value channel (a column).
#
#     S_t = (I - k (erase*k)^T) Diag(exp(log_decay)) S_{t-1} + k (write*v)^T
#
# Here they are set by hand for groups of channels. You will see what leaves the state and what enters it, block by
# block; what changes when keys are not axes; and what each gate moves per token, as `channel_activity` measures it.

# %%
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np

sys.path.extend((".", ".."))  # `experiments` lies beside `notebooks`
import qdelta_jax as qd
from experiments.style import COLORS, DIVERGING, MARKERS, pyplot
from qdelta_jax.dynamics import channel_activity, chunk_states, erase_gain

plt = pyplot(interactive=True)
QUICK = bool(os.environ.get("QDELTA_QUICK"))
RULE = "gated_delta_net2"

# %% [markdown]
# ## A quilt of gates
#
# The state begins with a picture in it: 16 rows of stripes. Then 16 tokens write 16 rows of rings, token i with the key
# e_i, so that it touches row i alone. Rows come in four groups with `erase` = 0, 0.5, 1 and 2, columns in four groups
# with `write` = 0, 0.5, 1 and 0. Nothing decays.

# %%
N = 16
ERASE, WRITE = (0.0, 0.5, 1.0, 2.0), (0.0, 0.5, 1.0, 0.0)
down, across = np.meshgrid(np.arange(N), np.arange(N), indexing="ij")
stripes = ((down + across) // 2 % 2).astype(np.float32)
rings = (np.hypot(down - 7.5, across - 7.5) // 2 % 2).astype(np.float32)


def tokens(x):
    """[T, channels] as [B, T, H, channels] with one batch row and one head."""
    return jnp.asarray(np.asarray(x, np.float32)[None, :, None])


def gates_of(erase, write, log_decay, length):
    """The same gates for all tokens."""
    gates = {"erase": erase, "write": write, "log_decay": log_decay}
    return {name: tokens(np.tile(x, (length, 1))) for name, x in gates.items()}


def state_after(keys, values, gates, initial):
    initial = jnp.asarray(np.asarray(initial, np.float32)[None, None])
    k = tokens(keys)
    return np.asarray(qd.delta_rule(k, k, tokens(values), RULE, gates, initial_state=initial)[1])[0, 0]


gates = gates_of(np.repeat(ERASE, 4), np.repeat(WRITE, 4), np.zeros(N), N)
nothing = np.zeros((N, N))
left = state_after(np.eye(N), nothing, gates, stripes)  # the tokens write zeros
entered = state_after(np.eye(N), rings, gates, nothing)  # there is nothing to erase
both = state_after(np.eye(N), rings, gates, stripes)
sum_error = np.abs(left + entered - both).max()
print(f"left + entered - both: at most {sum_error:.1e}")

# %% [markdown]
# The recurrence is linear in the old state and in the values. So what is left of the old picture and what entered of
# the new one can be computed apart, and their sum is the state.


# %%
def show(ax, picture, title):
    """A state with 0 in the middle of the colours."""
    image = ax.imshow(picture, cmap=DIVERGING, vmin=-2, vmax=2)
    ax.set(title=title, xlabel="value channel", ylabel="key channel")
    ax.grid(False)
    return image


def quilt(ax):
    """The borders of the groups, and the gates at the sides."""
    for border in (3.5, 7.5, 11.5):
        ax.axhline(border, color="black", linewidth=0.6)
        ax.axvline(border, color="black", linewidth=0.6)
    ax.set_xticks(np.arange(1.5, N, 4), [f"{x:g}" for x in WRITE])
    ax.set_yticks(np.arange(1.5, N, 4), [f"{x:g}" for x in ERASE])
    ax.set(xlabel="write gate of the value channels", ylabel="erase gate of the key channels")


figure, axes = plt.subplots(1, 5, figsize=(14, 3.5))
show(axes[0], stripes, "old: the state before")
show(axes[1], rings, "new: what is written")
results = {"left of the old": left, "entered of the new": entered, "the state": both}
for ax, (title, picture) in zip(axes[2:], results.items(), strict=True):
    image = show(ax, picture, title)
    quilt(ax)
for ax in axes[[1, 3, 4]]:
    ax.set_ylabel("")
figure.colorbar(image, ax=axes, label="state (units of the values)")


def blocks(picture, of):
    """Each of the 4 x 4 blocks as a multiple of the same block of another picture."""
    a, b = (x.reshape(4, 4, 4, 4).swapaxes(1, 2) for x in (picture, of))
    return (a * b).sum((2, 3)) / (b * b).sum((2, 3))


kept, taken = blocks(left, stripes), blocks(entered, rings)
print("how much of the old is left, by erase gate:  ", dict(zip(ERASE, kept.mean(1).round(3).tolist(), strict=True)))
print("how much of the new entered, by value group: ", taken.mean(0).round(3).tolist())
print("spread over the other axis:", kept.std(1).max().round(6), taken.std(0).max().round(6))

# %% [markdown]
# With axes as keys the two gates do not meet. What is left of the old is 1 - erase, whatever `write` is: all of it,
# half, nothing, and with `erase` = 2 its negative. What enters of the new is `write`, whatever `erase` is. A channel
# can be erased without being written (bottom of the first and last columns) and written without being erased (first
# row).

# %% [markdown]
# ## Keys that are no axes
#
# A unit key of 16 channels lies a little along each of them, and the erase gate now decides *how much of the key
# reads*: the token erases along e = erase*k. Along k the old state is multiplied by 1 - gain, with gain = k . e = sum_i
# erase_i k_i^2. If `erase` is 1 for some channels and 0 for the rest, the gain is the part of the key that lies in the
# open ones.

# %%
COUNT = 128 if QUICK else 4096
k, v = jax.random.normal(jax.random.key(0), (2, 1, COUNT, 1, N))
k = qd.l2_normalize(k)
OPEN = (2, 8, 14, 16)
gains = {}
for count in OPEN:
    some = gates_of(np.where(np.arange(N) < count, 1.0, 0.0), np.ones(N), np.zeros(N), COUNT)
    gains[count] = np.asarray(erase_gain(k, k, k, RULE, some))[0, :, 0]

figure, ax = plt.subplots(figsize=(8, 3.6))
for count, color in zip(OPEN, COLORS[:4], strict=True):
    look = {"histtype": "step", "linewidth": 1.8, "color": color}
    ax.hist(gains[count], bins=np.linspace(0, 1.05, 64), label=f"{count} of {N} channels", **look)
    ax.axvline(count / N, color=color, linestyle="--")
ax.set(title="What share of a random key may erase (dashed: open / all channels)", yscale="log")
ax.set(xlabel="gain k . e (no unit)", ylabel="tokens (log scale)")
legend = ax.legend(title="erase = 1 in", loc="upper left", bbox_to_anchor=(1, 1))
for count in OPEN:
    print(f"{count:>2} open: mean gain {gains[count].mean():.3f}, {count}/{N} = {count / N:.3f}")

# %% [markdown]
# ## Three gates over time
#
# Now the same keys as a stream, with random values, and gates by groups of key channels: the first group decays, the
# second erases, the third does both, and the fourth does neither. In the value channels the first half is written. What
# each part moves per token and channel is `channel_activity`: the norms of the rows and columns of
#
#     S_t - S_{t-1} = (Diag(exp(log_decay)) - I) S_{t-1}  -  k (S^T e)^T  +  k z^T
#                       forgotten                            erased          written

# %%
group = np.arange(N) // 4
DECAYS, ERASES = np.isin(group, (0, 2)), np.isin(group, (1, 2))
gates = gates_of(np.where(ERASES, 1.0, 0.0), np.where(group < 2, 1.0, 0.0), np.where(DECAYS, -0.1, 0.0), COUNT)
seen = channel_activity(k, k, v, RULE, gates)

figure, axes = plt.subplots(1, 2, figsize=(11, 3.8))
for ax, kind in zip(axes, ("key", "value"), strict=True):
    for i, part in enumerate(("forgotten", "erased", "written")):
        amount = np.asarray(getattr(seen, f"{kind}_{part}"))[0, 0]
        ax.plot(np.arange(N), amount, color=COLORS[i], marker=MARKERS[i], label=part)
    for border in (3.5, 7.5, 11.5):
        ax.axvline(border, color="black", linewidth=0.6)
    ax.set(xlabel=f"{kind} channel", ylabel="mean norm per token (units of the values)")
axes[0].set_xticks(np.arange(1.5, N, 4), ["decays", "erases", "decays,\nerases", "neither"])
axes[0].set(title="Rows of the state", xlabel="key channels, by their gates", ylim=(0, None))
axes[1].set_xticks(np.arange(1.5, N, 4), ["write = 1", "write = 1", "write = 0", "write = 0"])
axes[1].set(title="Columns of the state", xlabel="value channels, by their gate", ylim=(0, None))
legend = axes[0].legend()

rows = {"forgotten": seen.key_forgotten, "erased": seen.key_erased}
rows = {part: np.asarray(x, float)[0, 0].reshape(4, 4).mean(axis=1) for part, x in rows.items()}
columns = np.asarray(seen.value_written)[0, 0]
for part, x in rows.items():
    print(f"{part} per group of key channels: {x.round(3).tolist()}")
print(f"written per half of the value channels: {columns[:8].mean():.3f}, {columns[8:].mean():.3f}")

# %% [markdown]
# Channels without decay forget nothing. But *every* key channel is erased from, also those whose `erase` is 0: the gate
# says which channels are **read** to predict what is stored (S^T e), and the prediction is taken off along the whole
# key, k (S^T e)^T. `erase` closes a channel completely only when the key is an axis, as above.

# %% [markdown]
# ## How long a row lives
#
# The same groups, with `erase` = 0.5 where it was 1. The state is random at the beginning and the values are 0: nothing
# enters, and each curve is what a group of rows still holds. First with axes as keys, each once in 16 tokens, then with
# random unit keys (the mean over streams).

# %%
STEPS, STREAMS = 32, 4 if QUICK else 64
groups = ("decays", "erases", "decays and erases", "neither")
gates = gates_of(np.where(ERASES, 0.5, 0.0), np.ones(N), np.where(DECAYS, -0.1, 0.0), STEPS)
gates = {name: jnp.repeat(x, STREAMS, axis=0) for name, x in gates.items()}
start = v[0, : STREAMS * N].reshape(STREAMS, 1, N, N)
random_keys = k[0, : STREAMS * STEPS].reshape(STREAMS, STEPS, 1, N)
axis_keys = jnp.repeat(tokens(np.eye(N)[np.arange(STEPS) * 5 % N]), STREAMS, axis=0)

curves = {}
for name, keys in (("axes", axis_keys), ("random unit vectors", random_keys)):
    states = chunk_states(keys, keys, jnp.zeros_like(keys), RULE, gates, initial_state=start, chunk_size=1)
    norms = [np.linalg.norm(state, axis=-1)[:, 0] for state in (start, *(state for _, state in states))]
    curves[name] = np.mean(np.array(norms) / norms[0], axis=1).reshape(STEPS + 1, 4, 4).mean(axis=2)

figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), sharey=True)
for ax, (name, curve) in zip(axes, curves.items(), strict=True):
    for i, label in enumerate(groups):
        ax.plot(curve[:, i], color=COLORS[i], marker=MARKERS[i], markevery=4, label=label)
    ax.set(title=f"Keys: {name}", xlabel="tokens read", ylim=(0, None))
axes[0].set_ylabel("norm of a row / its norm at first (no unit)")
legend = axes[1].legend(title="group of key channels", loc="upper left", bbox_to_anchor=(1, 1))
for name, curve in curves.items():
    print(f"{name}: after {STEPS} tokens", dict(zip(groups, curve[-1].astype(float).round(3).tolist(), strict=True)))
print(f"a decay alone: exp(-0.1 * {STEPS}) = {np.exp(-0.1 * STEPS):.3f}; two erases of a half alone: {0.5**2}")

# %% [markdown]
# With axes the groups do what their gates say: the decay alone, two halvings, their product, and nothing at all. With
# random keys the groups leak into each other: a row is also moved by what the other rows read. The order of the groups
# stays, and every row that has a gate ends higher than with axes as keys.
