"""Learning what to say while attention is held fixed: closed forms of the flow behind Figure 3.

With attention alpha on the informative tokens the logit gap is x = alpha mu_ov and the loss log(1 + (M-1) e^-x). A collapsed output
circuit follows mu_ov' = eta alpha / (b (e^x + M - 1)), a balanced factorised one 2 sqrt(b) mu_ov times that. Written in x, both
separate, and attention and time enter through one product only.
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, special

from lib import checks


def loss_of(logit_gap: ArrayLike, classes: int) -> np.ndarray:
    """Loss at a logit gap x.

    Args:
        logit_gap: x = alpha mu_ov, >= 0.
        classes: M.

    Returns:
        log(1 + (M-1) e^-x) in nats.
    """
    return np.log1p((classes - 1) * np.exp(-np.asarray(logit_gap, dtype=float)))


def collapsed_logit(share: ArrayLike, time: ArrayLike, *, classes: int, pool: int, eta: float = 1.0) -> np.ndarray:
    """Logit gap of a collapsed output after some time, from zero: e^x - 1 + (M-1) x = alpha^2 eta t / b.

    The loss therefore depends on attention and time only through alpha^2 t: half the attention takes four times as long.

    Source: derived in chapter p1_fixed_attention.

    Args:
        share: alpha, in (0, 1].
        time: t >= 0 (learning rate times steps, if eta = 1).
        classes: M >= 2; pool: b, distinct tokens per class.
        eta: learning rate.

    Returns:
        x, broadcast over share and time.

    Raises:
        ValueError: a share outside (0, 1], a time < 0, a rate <= 0, fewer than two classes, an empty pool.
    """
    _check("collapsed_logit", share, time, classes, pool, eta)
    others = classes - 1
    reach = 1 + np.square(share) * eta * np.asarray(time, dtype=float) / pool
    # e^x = others * w turns the law into w + ln w = reach/others - ln(others); omega solves that without overflow
    return np.log(special.wrightomega(reach / others - np.log(others))) + np.log(others)


def factorised_clock(logit_gap: ArrayLike, classes: int) -> np.ndarray:
    """Ei(x) + (M-1) ln x, which grows by 2 alpha eta t / sqrt(b) along the balanced factorised flow.

    Args:
        logit_gap: x > 0.
        classes: M.
    """
    checks.positive("factorised_clock", logit_gap=logit_gap)
    return special.expi(logit_gap) + (classes - 1) * np.log(logit_gap)


def factorised_logit(share: float, time: float, *, start: float, classes: int, pool: int, eta: float = 1.0) -> float:
    """Logit gap of a balanced factorised output after some time: Ei(x) + (M-1) ln x grows by 2 alpha eta t / sqrt(b).

    Up to the start the loss depends on attention and time through alpha t alone: half the attention takes twice as long.

    Source: derived in chapter p1_fixed_attention.

    Args:
        share, time, classes, pool, eta: as in `collapsed_logit`, scalars.
        start: x at time 0, > 0 (zero is a fixed point).

    Returns:
        x.

    Raises:
        ValueError: as `collapsed_logit`, and a start <= 0.
    """
    _check("factorised_logit", share, time, classes, pool, eta)
    checks.positive("factorised_logit", start=start)
    target = factorised_clock(start, classes) + 2 * share * eta * time / np.sqrt(pool)
    low, high = np.log(start), np.log(max(start, 1.0))
    while factorised_clock(np.exp(high), classes) < target:
        high += 1.0
    if high <= low or time == 0:
        return float(start)
    return float(np.exp(optimize.brentq(lambda y: factorised_clock(np.exp(y), classes) - target, low, high, xtol=1e-15, rtol=1e-15)))


def _check(where: str, share: ArrayLike, time: ArrayLike, classes: int, pool: int, eta: float) -> None:
    checks.positive(where, share=share, eta=eta)
    checks.in_closed(where, 0, 1, share=share)
    checks.at_least(where, 0, time=time)
    checks.integer_at_least(where, 2, classes=classes)
    checks.integer_at_least(where, 1, pool=pool)
