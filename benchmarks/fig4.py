"""Figure 4: the closed form with one quadrature, against Runge–Kutta with the published step."""

import math

from benchmarks.timing import compare
from lib.theory import two_circuits

RATIO, LOSS = 1.0, 1e-4


def runge_kutta(ratio: float, loss: float, step: float = 10.0) -> tuple[float, float, float]:
    """(mu_ov, mu_qk, alpha) at the first step with this loss, as the published notebook finds them: fixed steps in plain floats."""
    classes, distinct, common, pool = 20, 5, 50, 50
    fast = min(1.0, ratio)  # published time unit: tau = min(eta_OV, eta_QK) t
    eta_ov, eta_qk = 1.0 / fast, ratio / fast

    def slope(v, q):
        weight = distinct * math.exp(q)
        alpha = weight / (weight + common)
        pull = math.exp(alpha * v) + classes - 1
        return eta_ov * alpha / (pool * pull), eta_qk * (classes - 1) * alpha * (1 - alpha) * v / (classes * pool**2 * pull)

    v = q = 0.0
    while True:
        a1, b1 = slope(v, q)
        a2, b2 = slope(v + step / 2 * a1, q + step / 2 * b1)
        a3, b3 = slope(v + step / 2 * a2, q + step / 2 * b2)
        a4, b4 = slope(v + step * a3, q + step * b3)
        v += step / 6 * (a1 + 2 * a2 + 2 * a3 + a4)
        q += step / 6 * (b1 + 2 * b2 + 2 * b3 + b4)
        alpha = distinct * math.exp(q) / (distinct * math.exp(q) + common)
        if math.log1p((classes - 1) * math.exp(-alpha * v)) <= loss:
            return v, q, alpha


def closed_form(ratio: float, loss: float) -> tuple[float, float, float]:
    """The same and the time, without an ODE."""
    state = two_circuits.state_at(loss, ratio)
    return float(state.mu_ov), float(state.mu_qk), float(state.alpha)


def fig4() -> dict:
    """One run of Figure 4 (r = 1) down to the published last loss."""
    return compare(
        "fig4-closed-form",
        lambda: closed_form(RATIO, LOSS),
        lambda: runge_kutta(RATIO, LOSS),
        lambda ours, theirs: max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)),
        repeats=1,
    )


BENCHMARKS = [fig4]
