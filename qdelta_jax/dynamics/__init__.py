"""What a memory does while it reads: states, gains, drifts, spectra, what is forgotten and what can be read again.

Every function takes q, k, v, rule, gates, initial_state and segment_ids as `qdelta_jax.delta_rule` does, works for
every rule, and holds one state at a time, however long the sequence is. `capture` takes these arguments out of a model.
"""

from qdelta_jax.dynamics.activity import ChannelActivity, GateStatistics, channel_activity, gate_statistics
from qdelta_jax.dynamics.capture import capture
from qdelta_jax.dynamics.gain import contracting_share, erase_gain
from qdelta_jax.dynamics.readout import readout_cosine
from qdelta_jax.dynamics.retrieval import Retrieval, retrieval_by_age
from qdelta_jax.dynamics.spectrum import (
    effective_rank,
    singular_values,
    spectral_radius,
    stable_rank,
    transition_eigenvalues,
)
from qdelta_jax.dynamics.states import chunk_states, map_states
from qdelta_jax.dynamics.tracking import Tracking, track, tracking_bound

__all__ = [
    "ChannelActivity",
    "GateStatistics",
    "Retrieval",
    "Tracking",
    "capture",
    "channel_activity",
    "chunk_states",
    "contracting_share",
    "effective_rank",
    "erase_gain",
    "gate_statistics",
    "map_states",
    "readout_cosine",
    "retrieval_by_age",
    "singular_values",
    "spectral_radius",
    "stable_rank",
    "track",
    "tracking_bound",
    "transition_eigenvalues",
]
