"""What tests compare with: an independent loop in NumPy; and one compiled call of each kind under test."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from cases import CHUNK

from qdelta_jax import delta_rule

ERASE_WRITE = {
    "delta_net": lambda q, k, v, g: (g["beta"] * k, g["beta"] * v),
    "gated_delta_net": lambda q, k, v, g: (g["beta"] * k, g["beta"] * v),
    "kda": lambda q, k, v, g: (g["beta"] * k, g["beta"] * v),
    "gated_delta_net2": lambda q, k, v, g: (g["erase"] * k, g["write"] * v),
    "q_delta": lambda q, k, v, g: (g["beta"] * (k + g["feedback"] * q), g["beta"] * v),
    "q_delta2": lambda q, k, v, g: (g["erase"] * (k + g["feedback"] * q), g["write"] * v),
}
"""e and z of each rule that erases, written down from the papers a second time."""


def loop(name, inputs, *, scale=None, segment_ids=None):
    """The recurrence of one rule, token by token in float64: S <- (I - k e^T) Diag(exp(log_decay)) S + k z^T.

    Returns:
        out [B, T, HV, V] and the final state [B, HV, K, V].
    """
    q, k, v = (np.asarray(inputs[x], np.float64) for x in "qkv")
    batch, length, heads, key_dim = q.shape
    value_heads = v.shape[2]
    state = np.array(inputs["initial_state"], np.float64)
    scale = key_dim**-0.5 if scale is None else scale
    out = np.zeros_like(v)
    for b, h in np.ndindex(batch, value_heads):
        last_id = None
        for t in range(length):
            this_id = 1 if segment_ids is None else int(segment_ids[b, t])
            if this_id == 0:
                continue
            if last_id not in (None, this_id):
                state[b, h] = 0
            last_id = this_id
            q_t, k_t = (x[b, t, h * heads // value_heads] for x in (q, k))
            gates = {
                g: np.asarray(x, np.float64)[b, t, h * x.shape[2] // value_heads] for g, x in inputs["gates"].items()
            }
            e, z = ERASE_WRITE.get(name, lambda q, k, v, g: (0 * k, v))(q_t, k_t, v[b, t, h], gates)
            decay = np.exp(gates.get("log_decay", np.zeros(1)))
            forgotten = np.broadcast_to(decay, (key_dim,))[:, None] * state[b, h]
            state[b, h] = forgotten + np.outer(k_t, z - forgotten.T @ e)
            out[b, t, h] = scale * state[b, h].T @ q_t
    return out, state


def cast(tree, dtype):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def cast_inputs(inputs: dict, dtype) -> dict:
    """Everything in dtype, the state in float32 or better."""
    state = jnp.float64 if dtype == jnp.float64 else jnp.float32
    return {**cast(inputs, dtype), "initial_state": cast(inputs["initial_state"], state)}


def call(name, inputs, segment_ids=None, **options):
    """`delta_rule` of a dict of inputs."""
    return delta_rule(
        *(inputs[x] for x in "qkv"),
        name,
        inputs["gates"],
        initial_state=inputs["initial_state"],
        segment_ids=segment_ids,
        **options,
    )


@cache
def _forward(name, options):
    return jax.jit(partial(call, name, **dict(options)))


@cache
def _gradients(name, options):
    @jax.jit
    def run(inputs, cotangents, segment_ids):
        (out, state), pull_back = jax.vjp(lambda x: call(name, x, segment_ids, **dict(options)), inputs)
        return out, state, pull_back(cotangents)[0]

    return run


def forward(name, inputs, segment_ids=None, *, dtype=jnp.float64, **options) -> dict:
    """{"output", "final_state"} of one compiled call."""
    run = _forward(name, tuple(sorted(options.items())))
    out, state = run(cast_inputs(inputs, dtype), segment_ids)
    return {"output": np.asarray(out, np.float64), "final_state": np.asarray(state, np.float64)}


def gradients(name, inputs, cotangents, segment_ids=None, *, dtype=jnp.float64, **options) -> dict:
    """{"output", "final_state", "grad_q", "grad_k", .., "grad_initial_state"} of one compiled call."""
    run = _gradients(name, tuple(sorted(options.items())))
    given = cast_inputs(inputs, dtype)
    d_out, d_state = cotangents
    d_out, d_state = cast(d_out, dtype), cast(d_state, given["initial_state"].dtype)
    out, state, grads = run(given, (d_out, d_state), segment_ids)
    flat = {**{n: x for n, x in grads.items() if n != "gates"}, **grads["gates"]}
    found = {"output": out, "final_state": state, **{f"grad_{n}": x for n, x in flat.items()}}
    return {n: np.asarray(x, np.float64) for n, x in found.items()}


def solve(name, implementation, inputs, cotangents, ids=None, **options) -> dict:
    """`gradients` at the chunk size that goes with `cases.SMALL`: tests that use it share its compilations."""
    return gradients(name, inputs, cotangents, ids, implementation=implementation, chunk_size=CHUNK, **options)
