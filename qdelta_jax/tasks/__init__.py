"""Synthetic tasks that tell memories apart: recall, needles, state tracking, copying.

Every task is a pure function of its arguments and a seed. Those on tokens return `Examples`; needles are text.
"""

from qdelta_jax.tasks.copying import copying, selective_copying
from qdelta_jax.tasks.examples import Examples, accuracy
from qdelta_jax.tasks.mqar import mqar
from qdelta_jax.tasks.needles import (
    DEPTHS,
    NEEDLE_TASKS,
    NeedleSample,
    NeedleTask,
    needle_documents,
    needle_examples,
    needle_samples,
    needle_score,
)
from qdelta_jax.tasks.state_tracking import modular_addition, parity, permutation_words, permutations

__all__ = [
    "DEPTHS",
    "NEEDLE_TASKS",
    "Examples",
    "NeedleSample",
    "NeedleTask",
    "accuracy",
    "copying",
    "modular_addition",
    "mqar",
    "needle_documents",
    "needle_examples",
    "needle_samples",
    "needle_score",
    "parity",
    "permutation_words",
    "permutations",
    "selective_copying",
]
