"""What a table of embeddings looks like as a whole."""

import numpy as np

from lib import checks


def common_share(vectors) -> np.ndarray:
    """How much of the vectors is one and the same vector: squared length of their mean over the mean of their squared lengths.

    Source: standard (one minus the share of the variance); used in chapter p1_real_sentences to show what an output that
    never occurs does to the embedding. Independent vectors give 1/count, equal ones give 1.

    Args:
        vectors: [..., vector, dimension].

    Returns:
        [...], dimensionless, in [0, 1].

    Raises:
        ValueError: not finite, fewer than two axes, or all vectors zero.
    """
    vectors = np.asarray(vectors.detach().cpu() if hasattr(vectors, "detach") else vectors, dtype=float)
    if vectors.ndim < 2 or vectors.shape[-2] == 0:
        raise ValueError(f"common_share: vectors has shape {vectors.shape}; expected [..., vector, dimension] with at least one vector.")
    checks.finite("common_share", vectors=vectors)
    lengths = (vectors**2).sum(-1).mean(-1)
    if np.any(lengths == 0):
        raise ValueError("common_share: all vectors are zero; expected at least one that is not. Take the rows that occur in the data.")
    return (vectors.mean(-2) ** 2).sum(-1) / lengths
