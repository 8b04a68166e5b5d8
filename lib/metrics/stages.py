"""What is measured on a run of paper 2: condensation of a matrix, entropy of attention rows, and where one stage ends and the next begins.

Works on plain arrays; a trajectory is anything with the attributes of `Run`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.special import entr

from lib import checks


def row_entropies(pattern) -> np.ndarray:
    """Entropy of each query's attention, in nats: 0 = one key, log(keys) = uniform.

    Args:
        pattern: [..., query, key], rows sum to 1; exact zeros are fine (their term is 0).

    Returns:
        [..., query].

    Raises:
        ValueError: a row does not sum to 1.

    Source: paper 2's measure of focus and dilution.
    """
    checks.rows_sum_to_one("row_entropies", pattern)
    return entr(np.asarray(pattern, dtype=float)).sum(-1)


def _singular(where: str, matrix) -> np.ndarray:
    matrix = np.asarray(matrix, dtype=float)
    if matrix.ndim < 2:
        raise ValueError(f"{where}: matrix has shape {matrix.shape}; expected [..., row, column].")
    checks.finite(where, matrix=matrix)
    values = np.linalg.svd(matrix, compute_uv=False)  # [..., index], largest first
    if np.any(values[..., 0] == 0):
        raise ValueError(f"{where}: matrix is 0 everywhere, so it has no direction; expected some non-zero entry.")
    return values


def effective_rank(matrix) -> np.ndarray:
    """Exponential of the entropy of the normalised singular values: 1 for rank one, k for k equal singular values.

    Args:
        matrix: [..., row, column], not all zero.

    Returns:
        [...], from 1 to min(row, column).

    Raises:
        ValueError: a zero matrix or fewer than two axes.

    Source: standard (entropy form of the rank); condensation in paper 2 means that it falls to 1.
    """
    values = _singular("effective_rank", matrix)
    return np.exp(entr(values / values.sum(-1, keepdims=True)).sum(-1))


def rank_ratio(matrix) -> np.ndarray:
    """Second singular value over the first, sigma_2 / sigma_1: 0 = rank one.

    Args:
        matrix: [..., row, column], not all zero, at least two rows and columns.

    Returns:
        [...], in [0, 1].

    Raises:
        ValueError: a zero matrix, or one that cannot have rank two.

    Source: paper 2, condensation.
    """
    values = _singular("rank_ratio", matrix)
    if values.shape[-1] < 2:
        raise ValueError(f"rank_ratio: matrix has shape {np.shape(matrix)}, so no second singular value; expected at least 2 x 2.")
    return values[..., 1] / values[..., 0]


def alignment(matrix, left=None, right=None) -> np.ndarray:
    """Cosine between a matrix and the rank-one matrix left right^T; a side that is not given may be any vector (the best one).

    Args:
        matrix: [..., row, column], not all zero.
        left: [row] or [..., row].
        right: [column] or [..., column]; at least one of the two.

    Returns:
        [...], in [0, 1]; 1 = condensed on that direction. The sign is dropped, since left and right may both turn.

    Raises:
        ValueError: neither side given, or a zero matrix or vector.

    Source: paper 2, Thm 3.2 (embedding along pi alpha_1^T, unembedding along alpha_1 (pi - 1/d)^T).
    """
    if left is None and right is None:
        raise ValueError("alignment: neither left nor right given; expected at least one direction.")
    matrix = np.asarray(matrix, dtype=float)
    size = np.sqrt((_singular("alignment", matrix) ** 2).sum(-1))  # Frobenius norm
    if left is not None:
        left = np.asarray(left, dtype=float)
        checks.positive("alignment", norm_of_left=np.linalg.norm(left, axis=-1))
        matrix = (left[..., None, :] @ matrix) / np.linalg.norm(left, axis=-1)[..., None, None]
    if right is not None:
        right = np.asarray(right, dtype=float)
        checks.positive("alignment", norm_of_right=np.linalg.norm(right, axis=-1))
        matrix = (matrix @ right[..., :, None]) / np.linalg.norm(right, axis=-1)[..., None, None]
    return np.linalg.norm(matrix, axis=(-1, -2)) / size


class Run(Protocol):
    """What `stages` reads from a trajectory."""

    @property
    def times(self) -> np.ndarray:
        """[time], increasing."""

    @property
    def loss(self) -> np.ndarray:
        """[time], nats."""

    @property
    def patterns(self) -> np.ndarray:
        """[time, query, key], rows sum to 1."""

    @property
    def stationary(self) -> np.ndarray:
        """[token]."""

    @property
    def singular_values(self) -> Mapping[str, np.ndarray]:
        """name -> [time, index], at least for "embedding" and "W_Q"."""

    @property
    def levels(self) -> Mapping[str, float]:
        """loss levels in nats: "uniform", "unigram" and "rank one"."""


@dataclass(frozen=True)
class Boundary:
    """One stage boundary.

    Attributes:
        time: when the rule first held, interpolated between samples; None = not reached.
        rule: the rule in words.
        reason: why it was not reached; empty otherwise.
    """

    time: float | None
    rule: str
    reason: str = ""

    @property
    def reached(self) -> bool:
        """Whether the rule ever held."""
        return self.time is not None

    def __str__(self) -> str:
        return f"{self.time:.1f}" if self.time is not None else f"not reached ({self.reason})"


RULES = {
    "condensed": "loss within 2 % of the way from log d down to H(pi)",
    "peak": "attention of the second most frequent query to the frequent token is largest",
    "focus": "entropy of the frequent query's attention below half of H(pi), gathered on the frequent token",
    "dilution": "that attention falls below pi_1 - 0.001",
    "plateau": "loss within 2 % of the way from H(pi) down to the rank-one optimum",
    "new direction": "second singular value of the embedding above 0.2 of the first",
    "second focus": "second singular value of W_Q above 0.2 of the first",
}


def crossing(times: np.ndarray, signal: np.ndarray, after: float) -> float | None:
    """First time >= after at which a signal is <= 0, linear between samples.

    Args:
        times: [time], increasing.
        signal: [time].
        after: where the search begins.

    Returns:
        The time; None if the signal stays positive.

    Source: ours, behind every stage boundary; used in chapter p2_dilution for embedding and attention alike.
    """
    below = np.flatnonzero((signal <= 0) & (times >= after))
    if not below.size:
        return None
    i = int(below[0])
    if i == 0 or signal[i - 1] <= 0:  # it holds already when the search begins
        return float(max(after, times[0]))
    share = signal[i - 1] / (signal[i - 1] - signal[i])
    return float(max(times[i - 1] + share * (times[i] - times[i - 1]), after))


def _peak(times: np.ndarray, signal: np.ndarray, until: float) -> float | None:
    """Time of the largest value up to `until`, by a parabola through three samples; None if it lies on the edge of the window."""
    window = int(np.searchsorted(times, until, side="right"))
    i = int(signal[:window].argmax()) if window else 0
    if i == 0 or i + 1 >= len(times):
        return None
    if signal[i] == signal[i - 1] or signal[i] < signal[i + 1]:
        return None
    bend, tilt, _ = np.polyfit(times[i - 1 : i + 2] - times[i], signal[i - 1 : i + 2], 2)
    return float(times[i] - tilt / (2 * bend))


def stages(run: Run) -> dict[str, Boundary]:
    """Where the stages of a run begin, in the order in which the cycle has them.

    "condensed" ends Stage I; around "focus", the end of Stage II, the other rows turn ("peak") and soon fall below where they
    started ("dilution", Stage
    III), which ends at the "plateau"; "new direction" is Stage IV, "second focus" starts the next cycle. Rules are in `RULES`. A
    rule is looked for only after the boundaries that it builds on, and a rule that never holds, or whose
    foundation was not reached, says so.

    Args:
        run: a trajectory (see `Run`); samples fine enough to see each stage, at most about one time unit apart.

    Returns:
        name -> Boundary, in the order of `RULES`.

    Raises:
        ValueError: shapes that do not fit, NaN, times not increasing, or uniform pi (no token is the frequent one).

    Source: detectors for the stages of paper 2; ours, tested against scatter over seeds.
    """
    where = "stages"
    times, loss, patterns, pi = (np.asarray(x, dtype=float) for x in (run.times, run.loss, run.patterns, run.stationary))
    checks.shape(where, "loss", loss, (len(times),))
    checks.shape(where, "patterns", patterns, (len(times), len(pi), len(pi)))
    checks.finite(where, times=times, loss=loss)
    checks.rows_sum_to_one(where, patterns)
    if len(times) < 3 or np.any(np.diff(times) <= 0):
        raise ValueError(f"{where}: times have {len(times)} entries; expected at least 3, increasing.")
    if np.ptp(pi) < 1e-12:
        raise ValueError(f"{where}: stationary is uniform (all {pi[0]:g}), so no token is the frequent one; give unequal frequencies.")
    uniform, unigram, rank_one = (run.levels[name] for name in ("uniform", "unigram", "rank one"))
    top, second = np.argsort(-pi, kind="stable")[:2]
    entropy = entr(patterns[:, top]).sum(-1)  # [time]
    on_top = patterns[:, top, top] > pi[top]
    witness = patterns[:, second, top]
    ratios = {}
    for name in ("embedding", "W_Q"):
        values = np.asarray(run.singular_values[name], dtype=float)
        checks.shape(where, f"singular_values[{name!r}]", values, (len(times), None))
        first = np.where(values[:, 0] > 0, values[:, 0], 1.0)
        ratios[name] = values[:, 1] / first if values.shape[1] > 1 else np.zeros(len(times))
    gathered = np.where(on_top, entropy, np.inf)  # a sharp row on another token is not focus
    found: dict[str, Boundary] = {}

    def settle(name: str, time: float | None, needs: tuple[str, ...] = ()) -> None:
        missing = [n for n in needs if not found[n].reached]
        reason = f"needs {missing[0]!r}, which was not reached" if missing else f"rule did not hold up to t = {times[-1]:g}"
        found[name] = Boundary(None, RULES[name], reason) if missing or time is None else Boundary(time, RULES[name])

    def start(*names: str) -> float:
        return max([t for n in names if (t := found[n].time) is not None], default=float(times[0]))

    settle("condensed", crossing(times, loss - unigram - 0.02 * (uniform - unigram), times[0]))
    capped = np.where(np.isfinite(gathered), gathered, uniform)  # linear interpolation needs finite numbers
    settle("focus", crossing(times, capped - 0.5 * unigram, start("condensed")), ("condensed",))
    sharp = crossing(times, capped - 0.1 * unigram, start("condensed"))
    settle("peak", None if sharp is None else _peak(times, witness, sharp), ("focus",))
    settle("dilution", crossing(times, witness - pi[top] + 0.001, start("peak")), ("peak",))
    settle("plateau", crossing(times, loss - rank_one - 0.02 * (unigram - rank_one), start("condensed")), ("condensed",))
    settle("new direction", crossing(times, 0.2 - ratios["embedding"], start("condensed", "focus")), ("condensed", "focus"))
    settle("second focus", crossing(times, 0.2 - ratios["W_Q"], start("focus")), ("focus",))
    return {name: found[name] for name in RULES}
