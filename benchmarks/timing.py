"""Fair timing of two ways to do one thing: alternate them, take medians, check that they agree."""

import statistics
import time
from collections.abc import Callable
from typing import Any


def seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    """Wall time of one call and what it returned."""
    begun = time.perf_counter()
    result = function()
    return time.perf_counter() - begun, result


def compare(
    name: str,
    ours: Callable[[], Any],
    reference: Callable[[], Any],
    agreement: Callable[[Any, Any], float],
    repeats: int = 3,
    ours_per_call: float = 1.0,
    reference_per_call: float = 1.0,
) -> dict:
    """Time two implementations alternately, so that a busy machine slows both.

    Args:
        name: of the benchmark.
        ours, reference: do the work and return its result; the first call of each is a warm-up (compilation, caches).
        agreement: of the two results, a number that should be near 0.
        repeats: timed calls of each.
        ours_per_call, reference_per_call: units of work that one call does; times are per unit, so that a slow
            reference may do less of the same work.

    Returns:
        name, ours_s and reference_s (median seconds a unit), ratio, agreement.
    """
    near = agreement(ours(), reference())
    mine, theirs = [], []
    for _ in range(repeats):
        mine.append(seconds(ours)[0] / ours_per_call)
        theirs.append(seconds(reference)[0] / reference_per_call)
    ours_s, reference_s = statistics.median(mine), statistics.median(theirs)
    return {"name": name, "ours_s": ours_s, "reference_s": reference_s, "ratio": reference_s / ours_s, "agreement": near}
