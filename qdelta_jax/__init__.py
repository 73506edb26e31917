"""Recurrent memories with delta rules: one recurrence, every variant, exact gradients.

S_t = (I - k_t e_t^T) Diag(exp(log_decay_t)) S_{t-1} + k_t z_t^T        o_t = scale * S_t^T q_t
"""

from qdelta_jax.delta_rule import delta_rule, resolve_implementation, segment_final_states, step
from qdelta_jax.normalize import l2_normalize
from qdelta_jax.rules import (
    RULES,
    Coefficients,
    Decay,
    Gate,
    Rule,
    get_rule,
    per_head,
    per_key_channel,
    per_value_channel,
    rule,
)
from qdelta_jax.segments import segment_ids_from_cu_seqlens, segment_masks, segment_runs

__version__ = "0.1.0"

__all__ = [
    "RULES",
    "Coefficients",
    "Decay",
    "Gate",
    "Rule",
    "delta_rule",
    "get_rule",
    "l2_normalize",
    "per_head",
    "per_key_channel",
    "per_value_channel",
    "resolve_implementation",
    "rule",
    "segment_final_states",
    "segment_ids_from_cu_seqlens",
    "segment_masks",
    "segment_runs",
    "step",
]
