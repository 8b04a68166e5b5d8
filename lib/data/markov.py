"""Sequences of a Markov chain: contexts with the token that follows."""

from typing import NamedTuple

import numpy as np

from lib import checks


class Windows(NamedTuple):
    """`tokens` [sequence, position], the last of them the query, and `following` [sequence], the next token."""

    tokens: np.ndarray
    following: np.ndarray


def windows(transition, length: int, count: int, seed: int, start=None) -> Windows:
    """Draw independent sequences.

    Args:
        transition: [from, to], rows sum to 1 (P).
        length: tokens in a context (s).
        count: number of sequences (N).
        seed: of the generator.
        start: [token], law of the first token; None = uniform, as in paper 2.

    Returns:
        Windows of integer ids.

    Raises:
        ValueError: not a stochastic matrix, a start that is no law, or sizes below 1.

    Source: paper 2, synthetic data.
    """
    where = "windows"
    transition = np.asarray(transition, dtype=float)
    checks.shape(where, "transition", transition, (None, transition.shape[-1]))
    checks.rows_sum_to_one(where, transition)
    checks.integer_at_least(where, 1, length=length, count=count)
    d = len(transition)
    law = np.full(d, 1 / d) if start is None else np.asarray(start, dtype=float)
    checks.shape(where, "start", law, (d,))
    checks.rows_sum_to_one(where, law)
    draws = np.random.default_rng(seed).random((length + 1, count))
    edges = np.cumsum(transition, axis=-1)[:, :-1]  # without the last, so that rounding cannot lead past the last token
    path = np.empty((length + 1, count), dtype=np.int64)  # [position, sequence]
    path[0] = np.searchsorted(np.cumsum(law)[:-1], draws[0], side="right")
    for t in range(length):
        path[t + 1] = (draws[t + 1][:, None] >= edges[path[t]]).sum(-1)
    return Windows(path[:-1].T, path[-1])
