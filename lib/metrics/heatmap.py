"""What stands beside a DTAP heatmap: the row that uniform attention would give, and separability."""

import numpy as np
from scipy import stats

from lib import checks


def uniform_row(context: int, keys: int, probability: float, *, edges=(0, 0.2, 0.4, 0.6, 0.8, 1)) -> tuple[np.ndarray, float]:
    """Shares of sequences per bin of attention mass if attention were exactly uniform.

    The number of informative keys is binomial, so the mass is Bin(context, probability)/keys. This is the reference for every
    heatmap of Figure 2: what no learning of attention at all looks like.

    Source: derived in chapter p1_dtap.

    Args:
        context: tokens that may be informative (L-2).
        keys: positions attended to (L-1, or L-2 when the query is not among its keys).
        probability: of a context token to be informative (5.5/15.5 in Figure 2).
        edges: of the bins, half-open, the last one closed.

    Returns:
        [bin] shares that sum to 1, and the mean mass.

    Raises:
        ValueError: fewer keys than context tokens, a probability outside [0, 1], or edges that don't cover [0, 1].
    """
    checks.integer_at_least("uniform_row", 1, context=context)
    checks.integer_at_least("uniform_row", context, keys=keys)
    checks.in_closed("uniform_row", 0, 1, probability=probability)
    edges = np.asarray(edges, dtype=float)
    if len(edges) < 2 or edges[0] > 0 or edges[-1] < 1 or not np.all(np.diff(edges) > 0):
        raise ValueError(f"uniform_row: edges = {edges.tolist()}; expected increasing numbers from 0 to 1.")
    informative = np.arange(context + 1)
    weight = stats.binom.pmf(informative, context, probability)
    bins = np.clip(np.searchsorted(edges, informative / keys, side="right") - 1, 0, len(edges) - 2)
    return np.bincount(bins, weights=weight, minlength=len(edges) - 1), float(context * probability / keys)


def separability(key, informative) -> np.ndarray:
    """By how much the most attended informative key beats the least attended other key.

    Paper 1, Figure 2 code: max attention of a single informative token minus min attention of a single other token.

    Args:
        key: [..., key], attention of single keys; NaN where there is none.
        informative: [..., key], bool.

    Returns:
        [...], dimensionless, in [-1, 1]. NaN where a sequence has no informative or no other key.

    Raises:
        ValueError: shapes differ, or attention outside [0, 1].
    """
    key, informative = np.asarray(key, dtype=float), np.asarray(informative)
    if key.shape != informative.shape or informative.dtype != bool:
        raise ValueError(
            f"separability: key has shape {key.shape}, informative {informative.shape} ({informative.dtype}); expected the same, bool."
        )
    checks.in_closed("separability", 0, 1 + 1e-9, key=key[~np.isnan(key)])
    there = ~np.isnan(key)
    best = np.max(key, -1, where=there & informative, initial=-np.inf)
    least = np.min(key, -1, where=there & ~informative, initial=np.inf)
    return np.where(np.isfinite(best) & np.isfinite(least), best - least, np.nan)
