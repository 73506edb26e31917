"""The look of every figure: `style.mplstyle` beside this file, and what a style sheet cannot say."""

from pathlib import Path
from typing import Any

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
"""Okabe and Ito's, as in the style sheet: told apart by colour-blind readers too."""

MARKERS = ("o", "s", "^", "v", "D", "P", "X")

DIVERGING = "PuOr"
"""The colour map of what has a sign, 0 in the middle: orange and purple differ for colour-blind readers too."""


def pyplot(interactive: bool = False) -> Any:
    """matplotlib.pyplot with the style sheet in use; files alone are drawn unless `interactive`."""
    import matplotlib

    if not interactive:
        matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.style.use(Path(__file__).with_name("style.mplstyle"))
    return plt
