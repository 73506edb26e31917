# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Query feedback
#
# Q-Delta (arXiv 2606.08804) predicts a token's value with its key *and* its query:
#
#     x = k + feedback q        S_t = (I - beta k x^T) exp(log_decay) S_{t-1} + beta k v^T
#
# Before the write the residual is v - S^T x; the write goes along k. You will see what that stores, when the write
# makes the residual smaller (beta a in (0, 2), with a = k . x), how drift makes it larger again, and whether S q and S
# k read the same.

# %%
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np

sys.path.extend((".", ".."))  # `experiments` lies beside `notebooks`
import qdelta_jax as qd
from experiments.style import COLORS, DIVERGING, pyplot
from qdelta_jax.dynamics import contracting_share, readout_cosine, track

plt = pyplot(interactive=True)
QUICK = bool(os.environ.get("QDELTA_QUICK"))

# %% [markdown]
# ## What one write stores
#
# Two tokens, with values that are pictures of 16 x 16 = 256 channels. The first stores a ring under the key k_1. The
# second stores a cross under k_2, orthogonal to k_1, and its *query* is k_1. With beta = 1 and no decay, gain = k . x =
# 1, and the residual is gone after the write.

# %%
x = np.linspace(-1, 1, 16)
down, across = np.meshgrid(x, x, indexing="ij")
ring = (np.abs(np.hypot(down, across) - 0.72) < 0.2).astype(np.float32)
cross = (np.minimum(np.abs(down), np.abs(across)) < 0.2).astype(np.float32)

k = jnp.eye(4)[None, :2, None]  # [B, T, H, K]: k_1, then k_2
q = jnp.stack([jnp.zeros(4), jnp.eye(4)[0]])[None, :, None]
v = jnp.stack([ring.ravel(), cross.ravel()])[None, :, None]
k_2, q_2 = k[0, 1, 0], q[0, 1, 0]
one = jnp.ones((1, 2, 1))

read, feedbacks = {}, (0.0, 0.5)
for f in feedbacks:
    _, state = qd.delta_rule(q, k, v, "q_delta", {"beta": one, "feedback": f * one, "log_decay": 0 * one})
    for name, along in (("S k_2", k_2), ("S q_2", q_2), ("S x", k_2 + f * q_2)):
        read[f, name] = np.asarray(along @ state[0, 0]).reshape(16, 16)

figure, axes = plt.subplots(2, 3, figsize=(9, 6), sharex=True, sharey=True)
for ax, ((f, name), picture) in zip(axes.flat, read.items(), strict=True):
    image = ax.imshow(picture, cmap=DIVERGING, vmin=-1, vmax=1)
    ax.set(title=f"{name}, feedback {f}", xlabel="value channels, across", ylabel="value channels, down")
    ax.grid(False)
    ax.label_outer()
figure.colorbar(image, ax=axes, label="read (units of the values)")
figure.suptitle("After the second token: what its key, its query and x = k_2 + feedback q_2 read")

f = feedbacks[1]
stored_error = np.abs(read[f, "S k_2"] - (cross - f * ring)).max()
target_error = np.abs(read[f, "S x"] - cross).max()
print(f"S k_2 is cross - {f} ring: off by at most {stored_error:.1e}")
print(f"S x is the cross: off by at most {target_error:.1e}")

# %% [markdown]
# Without feedback the second key reads the cross. With feedback it is x that reads the cross. What the query reads
# already (half of the ring) is left out of what is stored under the key: k_2 alone reads the cross less half the ring.

# %% [markdown]
# ## The contraction lemma
#
# Multiply the update by x and one line remains: v - S_t^T x = (1 - beta a) (v - S^T x), S being the decayed state
# before the write. So the residual shrinks exactly if beta a is in (0, 2). `track` measures both sides on a stream of
# random unit keys and queries, with a beta drawn from (0, 1.3) for each token. Each feedback strength is one head here:
# the same tokens, five heads.

# %%
T, DIM = (64, 16) if QUICK else (2000, 32)
FEEDBACK = (0.0, 0.2, 0.5, 0.8, 1.0)
H = len(FEEDBACK)


@jax.jit
def stream(key, similarity):
    """q, k, v [1, T, H, DIM], equal in all heads; q is normalize(similarity k + sqrt(1 - similarity^2) noise)."""
    q, k, v = jax.random.normal(jax.random.key(key), (3, 1, T, 1, DIM))
    k, noise = qd.l2_normalize(k), qd.l2_normalize(q)
    q = qd.l2_normalize(similarity * k + (1 - similarity**2) ** 0.5 * noise)
    return tuple(jnp.repeat(x, H, axis=2) for x in (q, k, v))


def gates(beta, log_decay=0.0):
    """beta: a number, or one for each token [1, T, 1]."""
    shape = (1, T, H)
    feedback = jnp.broadcast_to(jnp.array(FEEDBACK)[None, None], shape)
    return {
        "beta": jnp.broadcast_to(jnp.asarray(beta, jnp.float32), shape),
        "feedback": feedback,
        "log_decay": jnp.full(shape, log_decay),
    }


q, k, v = stream(0, 0.5)
beta = jax.random.uniform(jax.random.key(9), (1, T, 1), maxval=1.3)
seen = jax.tree.map(np.asarray, track(q, k, v, "q_delta", gates(beta)))
ratio = seen.after / seen.before
lemma_error = np.abs(ratio - np.abs(1 - seen.gain)).max()
inside = (seen.gain > 0) & (seen.gain < 2)
print(f"|after / before| and |1 - beta a| differ by at most {lemma_error:.1e}")
print(f"beta a in (0, 2): {inside.sum()} writes, of which {np.sum(ratio[inside] < 1)} made the residual smaller")
print(f"beta a outside: {np.sum(~inside)} writes, of which {np.sum(ratio[~inside] > 1)} made it larger")
share = np.asarray(contracting_share(jnp.asarray(seen.gain)), float).round(3).tolist()
print("share in (0, 2) by feedback:", dict(zip(FEEDBACK, share, strict=True)))

figure, axes = plt.subplots(1, 2, figsize=(11, 3.9))
for h, f in enumerate(FEEDBACK):
    look = {"histtype": "step", "linewidth": 1.6, "color": COLORS[h]}
    axes[0].hist(seen.gain[0, :, h], bins=np.linspace(0, 2.8, 57), label=f"{f}", **look)
    axes[1].plot(seen.gain[0, ::8, h], ratio[0, ::8, h], ".", color=COLORS[h], markersize=5, label=f"{f}")
axes[0].set(title=f"{T} writes for each strength", xlabel="gain beta a (no unit)", ylabel="writes")
grid = np.array([0, 1, 2.8])
axes[1].plot(grid, np.abs(1 - grid), "-", color="black", linewidth=0.8, label="|1 - beta a|")
axes[1].set(title="The write's effect on the residual", xlabel="gain beta a (no unit)")
axes[1].set_ylabel("|after| / |before| (no unit)")
for ax in axes:
    ax.axvspan(0, 2, color="#DDDDDD", alpha=0.5, zorder=0, label="in (0, 2)")
    ax.set_xlim(0, 2.8)
legend = axes[1].legend(title="feedback", loc="upper left", bbox_to_anchor=(1, 1))

# %% [markdown]
# With keys of norm 1, a = 1 + feedback k . q. Queries that lie along their key (k . q is about 0.5 here) push beta a
# up, and where beta is above 1, the stronger feedback leaves the interval at some tokens. There the residual grows.

# %% [markdown]
# ## Drift and the bound
#
# The residual does not vanish, since the next token has another value and another x. What it meets is the last residual
# plus the drift r: the change of the target less the change of the prediction. With rho the largest |1 - beta a| and r
# the largest drift so far,
#
#     |v - S_t^T x|  <=  rho^t |first|  +  rho (1 - rho^t) / (1 - rho) r

# %%
q, k, v = stream(1, 0.0)
calm = jax.tree.map(np.asarray, track(q, k, v, "q_delta", gates(0.8)))
SHOWN, HEAD = slice(1, 60), FEEDBACK.index(0.5)
slack = (calm.bound - calm.after)[0, 1:]
print(f"gain between {calm.gain.min():.2f} and {calm.gain.max():.2f}; bound - after is at least {slack.min():.2g}")

figure, axes = plt.subplots(1, 2, figsize=(11, 3.9), gridspec_kw={"width_ratios": (3, 2)})
for name, label, line, color in (
    ("bound", "bound of the residual after", "--", COLORS[5]),
    ("before", "before the write", ":", COLORS[1]),
    ("after", "after the write", "-", COLORS[0]),
):
    axes[0].plot(np.arange(T)[SHOWN], getattr(calm, name)[0, SHOWN, HEAD], line, color=color, label=label)
axes[0].set(title=f"Residual, feedback {FEEDBACK[HEAD]}, beta 0.8", xlabel="token", ylabel="norm (units of the values)")
axes[0].set(ylim=(0, 1.2 * calm.before[0, SHOWN, HEAD].max()))
axes[0].legend(ncols=3, loc="upper center")
labels = {"drift": "drift r", "target": "of the target", "prediction": "of the prediction"}
for i, (name, label) in enumerate(labels.items()):
    means = getattr(calm, name)[0, 1:].mean(axis=0)
    axes[1].bar(np.arange(H) + 0.27 * (i - 1), means, 0.27, color=COLORS[i], label=label)
axes[1].set(title="Drift and its parts", xlabel="feedback", ylabel="mean norm (units of the values)")
axes[1].set_xticks(np.arange(H), FEEDBACK)
axes[1].set_ylim(0, 1.35 * calm.drift[0, 1:].mean(axis=0).max())
legend = axes[1].legend(ncols=3, loc="upper center", columnspacing=1)
drift, before, after = (x[0, 1:].mean(axis=0).astype(float) for x in (calm.drift, calm.before, calm.after))
for h, f in enumerate(FEEDBACK):
    print(f"feedback {f}: mean drift {drift[h]:.2f}, residual before {before[h]:.2f}, after {after[h]:.2f}")

# %% [markdown]
# The values are independent from token to token, so the target drifts at full strength: each write takes most of the
# residual away and the next token brings it back. The bound of what is left after the write holds at every token. The
# stronger the feedback, the longer x is, and the more the prediction drifts: that part grows with feedback, the
# target's does not.

# %% [markdown]
# ## Do S q and S k read the same?
#
# If they did, feedback would only scale the prediction. Their cosine says how far the query adds another view of the
# state. Below the query turns from independent of the key (0) to equal to it (1).

# %%
SIMILARITIES = (0.0, 0.5, 1.0) if QUICK else (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
cosines = {}
for similarity in SIMILARITIES:
    q, k, v = stream(2, similarity)
    cosines[similarity] = np.asarray(readout_cosine(q, k, v, "q_delta", gates(0.5, -0.02)))[0, T // 4 :]

figure, axes = plt.subplots(1, 2, figsize=(11, 3.8))
bins = np.linspace(-1.02, 1.02, 52)
for similarity, color in zip((0.0, 0.5, 1.0), COLORS[:3], strict=True):
    look = {"histtype": "step", "linewidth": 1.6, "color": color}
    axes[0].hist(cosines[similarity][:, HEAD], bins=bins, label=f"{similarity}", **look)
axes[0].set(title=f"Tokens, feedback {FEEDBACK[HEAD]}", xlabel="cosine of S q and S k", ylabel="tokens (log scale)")
axes[0].set(yscale="log")
axes[0].legend(title="similarity of q and k", loc="upper left")
chosen = np.array([cosines[similarity][:, HEAD] for similarity in SIMILARITIES])
low, high = np.quantile(chosen, (0.1, 0.9), axis=1)
axes[1].fill_between(SIMILARITIES, low, high, color=COLORS[0], alpha=0.2, label="10% to 90% of the tokens")
axes[1].plot(SIMILARITIES, chosen.mean(axis=1), "o-", color=COLORS[0], label="mean over tokens")
axes[1].plot([0, 1], [0, 1], ":", color="black", label="equal")
axes[1].set(title="More similar queries read more alike", xlabel="similarity of q and k (mean cosine)")
axes[1].set_ylabel("cosine of S q and S k")
legend = axes[1].legend()
for similarity in SIMILARITIES:
    means = cosines[similarity].mean(axis=0).astype(float).round(3).tolist()
    print(f"similarity {similarity}: mean cosine by feedback {dict(zip(FEEDBACK, means, strict=True))}")

# %% [markdown]
# On this stream what the two read is, on average, as similar as the two are themselves, and feedback changes it little
# (the printed rows). Single tokens scatter widely unless q is nearly k.
