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


def fixed_plane(vectors) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates of a moving table of vectors in one plane for all times: the two leading directions of all times stacked.

    A basis chosen afresh at every time turns with the data, and a picture in it shows turns that no vector made. The origin stays
    where it is (no centring). Signs: at the last time the first vector is positive along the first axis, and the vector that is
    largest along the second axis is positive there.

    Args:
        vectors: [time, vector, dimension], dimension >= 2.

    Returns:
        (coordinates [time, vector, 2], share [2] of the total squared length along each axis).

    Raises:
        ValueError: not finite, another number of axes, or all vectors zero.

    Source: standard (singular value decomposition of the stacked vectors); used in chapter p2_cycle.
    """
    vectors = np.asarray(vectors, dtype=float)
    checks.shape("fixed_plane", "vectors", vectors, (None, None, None))
    checks.finite("fixed_plane", vectors=vectors)
    checks.positive("fixed_plane", total_length=np.linalg.norm(vectors))
    _, sizes, axes = np.linalg.svd(vectors.reshape(-1, vectors.shape[-1]), full_matrices=False)
    coordinates = vectors @ axes[:2].T
    last = coordinates[-1]
    signs = np.sign([last[0, 0], last[np.abs(last[:, 1]).argmax(), 1]])
    return coordinates * np.where(signs == 0, 1, signs), sizes[:2] ** 2 / (sizes**2).sum()
