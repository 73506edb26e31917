# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # vmap over gate variants
#
# The gates of a rule are a dict of arrays, so a stack of them is a stack of memories. Here a whole ablation is one
# compiled call: a grid of write strengths and feedback strengths, with the gradient at each point of the grid; runs of
# gradient descent on that grid, all at once; and gates per channel, each of them replaced by its mean, learned side by
# side.

# %%
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

sys.path.extend((".", ".."))  # `experiments` lies beside `notebooks`
import qdelta_jax as qd
from experiments.style import COLORS, MARKERS, pyplot

plt = pyplot(interactive=True)
QUICK = bool(os.environ.get("QDELTA_QUICK"))
IMPLEMENTATION = "scan" if QUICK else None  # compiles faster, and is slower
STREAMS, T, DIM = (2, 16, 8) if QUICK else (8, 64, 16)

# %% [markdown]
# ## The question
#
# A stream writes to a few random keys over and over. The true value of a key moves a little with every token (a random
# walk), and what is written is the true value with noise on it. The query of a token is its own key with noise; after
# the write it should read the true value. How strongly should a token write (`beta`), and should its query take part in
# the erasing (`feedback`)?

# %%
KEYS, NOISE, MOVE, BLUR = DIM // 2, 1.0, 0.4, 0.5
random = np.random.default_rng(0)


def normal(*shape):
    return random.standard_normal(shape, np.float32)


def unit(x):
    return np.asarray(qd.l2_normalize(jnp.asarray(x)))


which = random.integers(0, KEYS, (STREAMS, T))  # the key of each token


def of_tokens(x):
    """[B, T, keys, channels] to [B, T, H, channels]: those of each token's key, with one head."""
    return np.take_along_axis(x, which[:, :, None, None], axis=2)


pool = normal(STREAMS, 1, KEYS, DIM)
first, moves = normal(STREAMS, 1, KEYS, DIM), normal(STREAMS, T, KEYS, DIM)
walk = np.cumsum(moves, axis=1) / np.float32(KEYS**0.5)
truth = of_tokens(first + np.float32(MOVE) * walk)
k = of_tokens(np.broadcast_to(unit(pool), walk.shape))
v = truth + np.float32(NOISE) * normal(*truth.shape)
q = unit(k + np.float32(BLUR) * unit(normal(*k.shape)))
one = jnp.ones((STREAMS, T, 1))
stream = jax.tree.map(jnp.asarray, (q, k, v, truth))


def error_of(rule, gates, stream):
    """Mean squared error of what is read, over that of reading nothing; the first quarter does not count."""
    q, k, v, truth = stream
    out, _ = qd.delta_rule(q, k, v, rule, gates, scale=1.0, implementation=IMPLEMENTATION)
    return jnp.mean((out - truth)[:, T // 4 :] ** 2) / jnp.mean(truth[:, T // 4 :] ** 2)


def loss(beta, feedback, stream):
    """One number for one setting of the gates."""
    gates = {"beta": beta * one, "feedback": feedback * one, "log_decay": jnp.zeros_like(one)}
    return error_of("q_delta", gates, stream)


# %% [markdown]
# ## One call for the whole grid
#
# `jax.vmap` twice over the gates gives the grid; `jax.value_and_grad` inside gives the gradient with respect to both
# gates at every point.

# %%
betas = jnp.linspace(0.05, 1.2, 4 if QUICK else 16)
feedbacks = jnp.linspace(-0.5, 1.0, 4 if QUICK else 16)
both = jax.value_and_grad(loss, argnums=(0, 1))
grid = jax.jit(jax.vmap(jax.vmap(both, in_axes=(None, 0, None)), in_axes=(0, None, None)))

seconds = []
for _ in range(2):
    began = time.perf_counter()
    values, (d_beta, d_feedback) = jax.block_until_ready(grid(betas, feedbacks, stream))
    seconds.append(time.perf_counter() - began)
print(f"{values.size} settings with gradients: {seconds[0]:.1f} s with compilation, {seconds[1]:.2f} s without")

vmap_error = max(abs(float(values[i, i] / loss(betas[i], feedbacks[i], stream)) - 1) for i in range(3))
print(f"three of them, each in a call of its own, differ by at most {vmap_error:.1e} (relative)")

best = np.unravel_index(np.argmin(values), values.shape)
best_beta, best_feedback = float(betas[best[0]]), float(feedbacks[best[1]])
no_feedback = int(np.argmin(np.abs(feedbacks)))
print(f"best: beta {best_beta:.2f}, feedback {best_feedback:.2f}, error {float(values[best]):.3f}")
beta_alone = int(np.argmin(values[:, no_feedback]))
print(f"without feedback: beta {float(betas[beta_alone]):.2f}, error {float(values[beta_alone, no_feedback]):.3f}")

# %% [markdown]
# ## Descents, all at once
#
# The same `loss`, followed downhill from eight settings. A `lax.scan` is one descent; `vmap` makes it eight. The steps
# follow the gradient of log(error), which is tame where the error is huge.

# %%
DESCENT_STEPS, RATE = 3 if QUICK else 60, 0.1
starts = [[0.1, -0.4], [0.1, 0.3], [0.1, 0.9], [0.6, -0.45], [0.6, 0.95], [1.1, -0.45], [1.1, 0.1], [1.1, 0.6]]
starts = jnp.array(starts)


def descend(start, stream):
    """[steps + 1, 2]: the gates after each step."""

    def step(at, _):
        after = at - RATE * jax.grad(lambda x: jnp.log(loss(*x, stream)))(at)
        return after, after

    return jnp.concatenate([start[None], jax.lax.scan(step, start, length=DESCENT_STEPS)[1]])


paths = np.asarray(jax.jit(jax.vmap(descend, in_axes=(0, None)))(starts, stream))
ends = paths[:, -1].astype(float)
print("they end at (beta, feedback):", ends.round(2).tolist())
corner = float(betas[-1] * (1 + feedbacks[-1] * np.mean(np.sum(k * q, axis=-1))))
print(f"mean beta a in the corner of the largest gates: {corner:.2f}")

figure, ax = plt.subplots(figsize=(9, 5.2))
shown = np.minimum(np.asarray(values).T, 2)
picture = ax.contourf(betas, feedbacks, shown, levels=np.geomspace(shown.min(), 2, 24), cmap="viridis")
bar = figure.colorbar(picture, ax=ax, label="error / that of reading nothing (2 and more alike)", format="%.2f")
every = slice(None, None, 2)
arrows = -np.stack([d_beta.T, d_feedback.T])[:, every, every]
arrows = arrows / np.linalg.norm(arrows, axis=0)
ax.quiver(betas[every], feedbacks[every], *arrows, color="white", alpha=0.6, width=0.002, scale=45, angles="xy")
ax.plot(*paths.T, color=COLORS[1], linewidth=1.6, label=["descents", *[None] * (len(paths) - 1)])
ax.plot(*starts.T, "o", color=COLORS[1], markeredgecolor="black", label="their starts")
ax.plot(
    best_beta, best_feedback, "*", color=COLORS[5], markersize=15, markeredgecolor="black", label="best of the grid"
)
ax.set(title="One compiled call: errors and downhill directions", xlabel="beta (no unit)", ylabel="feedback (no unit)")
ax.grid(False)
legend = ax.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=3)

# %% [markdown]
# All descents end at one point, beside the best point of the grid. The best `beta` is well below 1: values carry noise,
# and a token that writes only a part averages over what was written to its key before. The best feedback is a little
# above 0, and it gains little here (compare the two printed errors). Where both gates are large, errors explode: beta a
# leaves (0, 2), as in `query_feedback`.

# %% [markdown]
# ## Erase only, write only
#
# `gated_delta_net2` has a gate per key channel (`erase`) and one per value channel (`write`). Its authors' ablation
# puts the mean over the channels in the place of a gate. Whether that is done is a number here, 0 or 1 for each gate:
# four variants are a stack of four pairs of numbers, and one `vmap` trains them together.
#
# The stream gets structure for the gates to find. Keys of the first group lie in the first half of the key channels and
# their values move quickly; those of the second group lie in the second half and do not move. The second half of the
# value channels has three times the noise of the first.

# %%
HALF = DIM // 2
quick_key = (np.arange(KEYS) < KEYS // 2)[:, None]
open_half = (np.arange(DIM) < HALF) == quick_key  # [keys, channels]
k = of_tokens(np.broadcast_to(unit(pool * open_half), walk.shape))
truth = of_tokens(first + np.where(quick_key, np.float32(2 * MOVE), np.float32(0)) * walk)
v = truth + np.where(np.arange(DIM) < HALF, np.float32(0.5), np.float32(1.5)) * normal(*truth.shape)
VARIANTS = {"both per channel": (1, 1), "erase only": (1, 0), "write only": (0, 1), "neither": (0, 0)}
TRAINING_STEPS, TRAINING_RATE = 3 if QUICK else 150, 4.0


def gates_of(params, own):
    """erase and write; a gate whose `own` is 0 is the mean over its channels."""
    gates = {name: jax.nn.sigmoid(x) for name, x in params.items()}
    return {name: own[name] * gate + (1 - own[name]) * jnp.mean(gate, keepdims=True) for name, gate in gates.items()}


def train(own, stream):
    """The learned gates, and the error along the way."""

    def channel_loss(params):
        gates = {name: jnp.broadcast_to(x, (STREAMS, T, 1, DIM)) for name, x in gates_of(params, own).items()}
        return error_of("gated_delta_net2", {**gates, "log_decay": jnp.zeros_like(one)}, stream)

    def step(params, _):
        error, gradient = jax.value_and_grad(channel_loss)(params)
        return jax.tree.map(lambda x, g: x - TRAINING_RATE * g, params, gradient), error

    params, errors = jax.lax.scan(step, {"erase": jnp.zeros(DIM), "write": jnp.zeros(DIM)}, length=TRAINING_STEPS)
    return gates_of(params, own), errors


stack = jnp.array(list(VARIANTS.values()), jnp.float32)
own = {"erase": stack[:, 0], "write": stack[:, 1]}
learned, errors = jax.jit(jax.vmap(train, in_axes=(0, None)))(own, jax.tree.map(jnp.asarray, (k, k, v, truth)))

figure, axes = plt.subplots(1, 3, figsize=(14, 3.8))
for i, name in enumerate(VARIANTS):
    axes[0].plot(errors[i], color=COLORS[i], label=name)
    for ax, gate in zip(axes[1:], ("erase", "write"), strict=True):
        ax.plot(learned[gate][i], color=COLORS[i], marker=MARKERS[i], label=name)
axes[0].set(title="Four variants, trained together", xlabel="step", ylabel="error / that of reading nothing")
axes[1].set(title="Learned erase gates", xlabel="key channel", ylabel="erase (no unit)", ylim=(0, 1))
axes[2].set(title="Learned write gates", xlabel="value channel", ylabel="write (no unit)", ylim=(0, 1))
for ax in axes[1:]:
    ax.axvline(HALF - 0.5, color="#666666", linewidth=0.8)
legend = axes[2].legend(title="gates per channel", loc="upper left", bbox_to_anchor=(1, 1))
final = dict(zip(VARIANTS, np.asarray(errors[:, -1]).astype(float), strict=True))
for i, (name, error) in enumerate(final.items()):
    halves = {gate: np.asarray(x[i], float).reshape(2, HALF).mean(axis=1).round(2) for gate, x in learned.items()}
    print(f"{name:>16}: error {error:.4f}; halves of erase {halves['erase']}, of write {halves['write']}")

# %% [markdown]
# The gate per value channel earns most of the gain: it writes the noisy half of the values more weakly. A gate per key
# channel earns less, and its two halves differ less.
