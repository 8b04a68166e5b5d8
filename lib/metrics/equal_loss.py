"""Comparing runs at equal loss rather than at equal time: where a loss curve first crosses a level, and what held there."""

import numpy as np

from lib import checks


def at_loss(loss, values, level: float) -> np.ndarray:
    """Value of something when the loss first reaches a level, between two evaluations.

    Between the evaluation above the level and the next one at or below it, `values` is interpolated linearly in log loss, so
    that a run whose loss falls fast is not judged at a much lower loss than one whose loss falls slowly.

    Source: derived in chapter p1_real_sentences (Paper 1 compares at equal loss in its theory, at equal steps elsewhere).

    Args:
        loss: [evaluation], nats, > 0 where finite.
        values: [evaluation, ...], measured at the same evaluations (pass the steps to get the step).
        level: loss in nats, > 0.

    Returns:
        [...]; NaN when the level is never reached.

    Raises:
        ValueError: level <= 0, or lengths that differ.
    """
    checks.positive("at_loss", level=level)
    loss, values = np.asarray(loss, dtype=float), np.asarray(values, dtype=float)
    if loss.ndim != 1 or len(values) != len(loss):
        raise ValueError(f"at_loss: loss has shape {loss.shape}, values {values.shape}; expected [evaluation] and [evaluation, ...].")
    below = np.flatnonzero(loss <= level)
    if below.size == 0:
        return np.full(values.shape[1:], np.nan)[()]
    after = below[0]
    if after == 0:
        return values[0]
    before = after - 1
    weight = (np.log(loss[before]) - np.log(level)) / (np.log(loss[before]) - np.log(loss[after]))
    return (1 - weight) * values[before] + weight * values[after]
