"""The two numbers of paper 1: strength of the output circuit, mu_OV, and of the query-key circuit, mu_QK.

On clean data (uniform classes, distinct and common tokens) gradient flow keeps both matrices on a line each; what moves is one scalar a
circuit. This module holds their equations for all four parametrisations, everything that follows in closed form, and time by quadrature.

| here | meaning | paper 1 |
|---|---|---|
| `classes`, `distinct`, `common`, `pool` | classes; distinct slots, common slots in a sequence; distinct tokens of a class | M, m, n, b |
| `mu_ov`, `mu_qk` | strength of the output circuit; score gap between distinct and common tokens | mu_OV, mu_QK |
| `alpha` | attention on the distinct tokens together, odds * e^mu_qk / (1 + odds * e^mu_qk) with odds = m/n | alpha |
| `logit` | alpha * mu_ov, the logit of the right class over the others | alpha mu_OV |
| `ratio` | eta_qk / eta_ov | r |
| parametrisation | attention letter first: F = a product of two matrices, C = collapsed, one matrix; then output | FAFO, CAFO, FACO, CACO |

Gradient flow of the scalars, with E = e^logit + M - 1 and the *stretch* of a circuit (1 if collapsed; how many times faster its scalar
moves if factorised):

    mu_ov' = eta_ov * stretch_ov * alpha / (b E)
    mu_qk' = eta_qk * stretch_qk * kappa (M-1) alpha (1-alpha) mu_ov / (M b Q E)

Dividing them removes E and with it time, with drive = ratio kappa (M-1)/(M Q):

    (1 + odds e^q) dq / stretch_qk(q) = drive * v dv / stretch_ov(v)

Everything else in this module integrates that. No exponential is ever formed of a number that may be large.

Source: paper 1, the two scalar equations of figure 4; all closed forms are derived in chapters p1_closed_form and p1_sharper.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.integrate import solve_ivp
from scipy.optimize import elementwise
from scipy.special import expi, expit, exprel, logit, logsumexp, wrightomega

from lib import checks

PARAMETRISATIONS = ("CACO", "CAFO", "FACO", "FAFO")
LARGEST_GAP = 700.0  # e^700 is still a float64
PANELS, NODES = 120, 16  # of the quadrature of time
# where its panels are placed from: evenly, and ever finer towards both ends (the path bends early, time passes late)
_FINE = np.geomspace(1e-9, 0.1, 161)
MONITOR = np.unique(np.concatenate([np.linspace(0.0, 1.0, 257), _FINE, 1.0 - _FINE]))


@dataclass(frozen=True)
class Setting:
    """Sizes of the world; all closed forms depend on nothing else but the rates.

    Args:
        classes: number of classes M (paper: M), at least 2.
        distinct: distinct slots in a sequence (m).
        common: common slots in a sequence (n).
        pool: distinct tokens that a class owns (b); not the length of the sequence.
        queries: query tokens a class has (Q). None means as many as the pool, which is what the published equations assume.
        common_pool: number of common tokens |C|. None means that their scores are held at zero (or that there are infinitely many), which
            is what the published equations assume.

    Raises:
        ValueError: a size that is not a whole number of at least 1 (2 classes).
    """

    classes: int = 20
    distinct: int = 5
    common: int = 50
    pool: int = 50
    queries: int | None = None
    common_pool: int | None = None

    def __post_init__(self):
        checks.integer_at_least("Setting", 2, classes=self.classes)
        checks.integer_at_least("Setting", 1, distinct=self.distinct, common=self.common, pool=self.pool)
        for name in ("queries", "common_pool"):
            if getattr(self, name) is not None:
                checks.integer_at_least("Setting", 1, **{name: getattr(self, name)})

    @property
    def odds(self) -> float:
        """Odds of a distinct slot under uniform attention, m/n."""
        return self.distinct / self.common

    @property
    def floor(self) -> float:
        """Uniform attention's share on the distinct slots, alpha_0 = m/(m+n)."""
        return self.distinct / (self.distinct + self.common)

    @property
    def kappa(self) -> float:
        """Score gap per unit of mu on the line: 1 + b/|C|, since common columns move down while distinct ones move up."""
        return 1.0 if self.common_pool is None else 1.0 + self.pool / self.common_pool

    @property
    def query_count(self) -> int:
        """Query tokens a class has, Q."""
        return self.pool if self.queries is None else self.queries

    @property
    def drive_per_ratio(self) -> float:
        """`drive`/`ratio` = kappa (M-1)/(M Q): all that the path in the plane (mu_ov, mu_qk) knows about the rates."""
        return self.kappa * (self.classes - 1) / (self.classes * self.query_count)

    @property
    def ov_singular(self) -> float:
        """Singular value of the output line's unit matrix, sqrt(b)."""
        return float(np.sqrt(self.pool))

    @property
    def qk_singular(self) -> float:
        """Singular value of the query-key line's unit matrix with common columns held, sqrt(Q b)."""
        return float(np.sqrt(self.query_count * self.pool))


FIGURE_4 = Setting()


@dataclass(frozen=True)
class Start:
    """Where a flow begins.

    Args:
        mu_ov: strength of the output circuit; must be > 0 for a balanced factorised one to move at all.
        mu_qk: score gap; must be > 0 for a balanced factorised query-key circuit to move at all.
        ov_imbalance: |a^2 - c^2| of the two factors of W_OV (0 = balanced; 2 eps^2 for the start eps * identity). Conserved by the flow.
        qk_imbalance: the same for W_QK.

    Raises:
        ValueError: a negative or infinite number.
    """

    mu_ov: float = 0.0
    mu_qk: float = 0.0
    ov_imbalance: float = 0.0
    qk_imbalance: float = 0.0

    def __post_init__(self):
        checks.at_least("Start", 0.0, mu_ov=self.mu_ov, mu_qk=self.mu_qk, ov_imbalance=self.ov_imbalance, qk_imbalance=self.qk_imbalance)


ZERO = Start()


def start_of(parametrisation: str, scale: float) -> Start:
    """Collapsed circuits at zero, factorised ones balanced at `scale`."""
    checks.one_of("start_of", PARAMETRISATIONS, parametrisation=parametrisation)
    checks.positive("start_of", scale=scale)
    return Start(mu_ov=scale if parametrisation[2] == "F" else 0.0, mu_qk=scale if parametrisation[0] == "F" else 0.0)


def identity_start(parametrisation: str, eps: float) -> Start:
    """The published start of factorised layers, eps * identity: strength 0, imbalance 2 eps^2 (derived in chapter p1_closed_form)."""
    checks.one_of("identity_start", PARAMETRISATIONS, parametrisation=parametrisation)
    checks.positive("identity_start", eps=eps)
    imbalance = 2.0 * eps * eps
    return Start(ov_imbalance=imbalance if parametrisation[2] == "F" else 0.0, qk_imbalance=imbalance if parametrisation[0] == "F" else 0.0)


def effective_ratio(ratio: ArrayLike, setting: Setting) -> np.ndarray:
    """Ratio at which the published equations (Q = b, common columns held) describe a collapsed query-key circuit in this world.

    r_eff = ratio (1 + b/|C|)(b/Q). Source: derived in chapter p1_closed_form.
    """
    checks.positive("effective_ratio", ratio=ratio)
    return np.asarray(ratio, float) * setting.kappa * setting.pool / setting.query_count


# --- attention, logit, loss ---------------------------------------------------------------------------------------------------------


def attention(mu_qk: ArrayLike, setting: Setting = FIGURE_4) -> np.ndarray:
    """Attention on the distinct tokens together, alpha = 1/(1 + e^-mu_qk/odds); in (0, 1). Paper 1, figure 4."""
    return expit(np.asarray(mu_qk, float) + np.log(setting.odds))


def common_attention(mu_qk: ArrayLike, setting: Setting = FIGURE_4) -> np.ndarray:
    """1 - alpha to full relative precision, 1/(1 + odds e^mu_qk), also where alpha itself rounds to 1."""
    return expit(-np.asarray(mu_qk, float) - np.log(setting.odds))


def gap_for(alpha: ArrayLike, setting: Setting = FIGURE_4) -> np.ndarray:
    """Score gap mu_qk at which the distinct tokens get attention alpha.

    Raises:
        ValueError: alpha outside (alpha_0, 1), which no positive gap gives.
    """
    checks.in_open("gap_for", setting.floor, 1.0, alpha=alpha)
    return logit(np.asarray(alpha, float)) - np.log(setting.odds)


def loss_of(logit_value: ArrayLike, setting: Setting = FIGURE_4) -> np.ndarray:
    """Cross-entropy in nats at a logit alpha*mu_ov: log(1 + (M-1) e^-logit). Paper 1, figure 4."""
    return np.logaddexp(0.0, np.log(setting.classes - 1) - np.asarray(logit_value, float))


def logit_for(loss: ArrayLike, setting: Setting = FIGURE_4) -> np.ndarray:
    """Logit needed for a loss, Lambda(l) = log((M-1)/(e^l - 1)); the inverse of `loss_of`.

    Raises:
        ValueError: loss outside (0, log M): training from zero starts at log M and never reaches 0.
    """
    checks.in_open("logit_for", 0.0, np.log(setting.classes), loss=loss)
    return np.log(setting.classes - 1) - np.log(np.expm1(np.asarray(loss, float)))


# --- the flow -----------------------------------------------------------------------------------------------------------------------


def _check(where: str, parametrisation: str, ratio: ArrayLike, setting: Setting, start: Start, closed: bool = True) -> None:
    checks.one_of(where, PARAMETRISATIONS, parametrisation=parametrisation)
    checks.positive(where, ratio=ratio)
    if parametrisation[0] == "F" and setting.common_pool is not None:
        raise ValueError(
            f"{where}: common_pool = {setting.common_pool} with a factorised query-key circuit; moving common columns need two scalars. "
            "Use population.scalar_recursion, or common_pool=None to hold them."
        )
    if closed and parametrisation[0] == "F" and start.qk_imbalance > 0:
        raise ValueError(
            f"{where}: qk_imbalance = {start.qk_imbalance:g}; closed forms exist for a balanced query-key start only. Use integrate()."
        )
    if parametrisation[0] == "F" and start.mu_qk == 0 and start.qk_imbalance == 0:
        raise ValueError(f"{where}: mu_qk starts at 0 and balanced, a saddle that {parametrisation} never leaves; give start.mu_qk > 0.")


def _stretch(strength: np.ndarray, singular: float, imbalance: float) -> np.ndarray:
    """a^2 + c^2 of a factorised circuit, from its product and the conserved a^2 - c^2."""
    return np.hypot(2.0 * singular * strength, imbalance)


def stretches(mu_ov: ArrayLike, mu_qk: ArrayLike, parametrisation: str, setting: Setting = FIGURE_4, start: Start = ZERO):
    """How many times faster than collapsed each scalar moves: (stretch_ov, stretch_qk), 1 for a collapsed circuit.

    A factorised circuit with factors a and c on the line moves a^2 + c^2 times as fast as a collapsed one. Source: derived in chapter
    p1_closed_form; the general statement is tested in chapter p1_factorising.
    """
    v, q = np.asarray(mu_ov, float), np.asarray(mu_qk, float)
    ov = _stretch(v, setting.ov_singular, start.ov_imbalance) if parametrisation[2] == "F" else np.ones_like(v)
    qk = _stretch(q, setting.qk_singular, start.qk_imbalance) if parametrisation[0] == "F" else np.ones_like(q)
    return ov, qk


def rates(
    mu_ov: ArrayLike,
    mu_qk: ArrayLike,
    parametrisation: str = "CACO",
    ratio: ArrayLike = 1.0,
    setting: Setting = FIGURE_4,
    start: Start = ZERO,
    eta_ov: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Right-hand sides (mu_ov', mu_qk') of the scalar gradient flow, per unit of time (time = eta * steps at eta_ov = 1).

    Paper 1, the two equations of figure 4 (CACO); the other three are derived in chapter p1_closed_form.

    Args:
        mu_ov, mu_qk: strengths, any broadcastable shapes.
        parametrisation: one of PARAMETRISATIONS.
        ratio: eta_qk/eta_ov, > 0.
        setting: sizes.
        start: only its imbalances matter here.
        eta_ov: learning rate of the output circuit, > 0.

    Raises:
        ValueError: a rate <= 0, an unknown parametrisation, a factorised query-key circuit with moving common columns.
    """
    _check("rates", parametrisation, ratio, setting, Start(1.0, 1.0, start.ov_imbalance, start.qk_imbalance), closed=False)
    checks.positive("rates", eta_ov=eta_ov)
    drive = np.asarray(ratio, float) * setting.drive_per_ratio
    return _rates(np.asarray(mu_ov, float), np.asarray(mu_qk, float), parametrisation, drive, setting, start, eta_ov)


def _rates(v, q, parametrisation, drive, setting, start, eta_ov):
    """`rates` without its checks, for the solver's inner loop."""
    ov, qk = stretches(v, q, parametrisation, setting, start)
    alpha, rest = attention(q, setting), common_attention(q, setting)
    pace = eta_ov * alpha * np.exp(-_log_denominator(alpha * v, setting)) / setting.pool
    return pace * ov, pace * drive * rest * v * qk


def _log_denominator(x: np.ndarray, setting: Setting) -> np.ndarray:
    """log(e^x + M - 1)."""
    return np.logaddexp(x, np.log(setting.classes - 1))


@dataclass(frozen=True)
class Trajectory:
    """A solved flow: time, mu_ov, mu_qk, each [point]; the last point is the event that was asked for."""

    time: np.ndarray
    mu_ov: np.ndarray
    mu_qk: np.ndarray
    setting: Setting

    @property
    def alpha(self) -> np.ndarray:
        """Attention on the distinct tokens, [point]."""
        return attention(self.mu_qk, self.setting)

    @property
    def loss(self) -> np.ndarray:
        """Loss in nats, [point]."""
        return loss_of(self.alpha * self.mu_ov, self.setting)


def integrate(
    loss: float,
    ratio: float = 1.0,
    parametrisation: str = "CACO",
    setting: Setting = FIGURE_4,
    start: Start = ZERO,
    eta_ov: float = 1.0,
    rtol: float = 1e-12,
) -> Trajectory:
    """Solve the flow by an adaptive method (DOP853) until a loss is reached.

    The slow but general way, which the closed forms are tested against; it also takes an unbalanced query-key start.

    Args:
        loss: where to stop, nats, below the loss at the start.
        ratio, parametrisation, setting, start, eta_ov: as in `rates`.
        rtol: relative tolerance a step; the absolute one is scaled to the smallest start strength.

    Returns:
        the solver's own points and the stopping point.

    Raises:
        ValueError: bad input, or a loss not below the start's.
        RuntimeError: the solver gave up.
    """
    _check("integrate", parametrisation, ratio, setting, start, closed=False)
    _can_move("integrate", parametrisation, start)
    target = float(logit_for(loss, setting))
    if float(attention(start.mu_qk, setting)) * start.mu_ov >= target:
        raise ValueError(f"integrate: loss = {loss:g} is not below the loss at the start; lower it or start smaller.")
    scales = [s for s in (start.mu_ov, start.mu_qk, start.ov_imbalance, start.qk_imbalance, 1.0) if s > 0]

    def reached(_, y):
        return float(attention(y[1], setting)) * y[0] - target

    reached.terminal = True  # type: ignore[attr-defined]

    def slope(_, y):
        return np.stack(_rates(y[0], y[1], parametrisation, ratio * setting.drive_per_ratio, setting, start, eta_ov))

    solution = solve_ivp(
        slope, (0.0, 1e300), [start.mu_ov, start.mu_qk], "DOP853", events=reached, rtol=rtol, atol=1e-2 * rtol * min(scales)
    )
    if solution.status != 1:
        raise RuntimeError(f"integrate: the solver stopped before loss {loss:g}: {solution.message}")
    return Trajectory(solution.t, solution.y[0], solution.y[1], setting)


def _can_move(where: str, parametrisation: str, start: Start) -> None:
    if parametrisation[2] == "F" and start.mu_ov == 0 and start.ov_imbalance == 0:
        raise ValueError(f"{where}: mu_ov starts at 0 and balanced, a saddle that {parametrisation} never leaves; give start.mu_ov > 0.")


# --- the path: first integrals and what follows from them ---------------------------------------------------------------------------
# Left side: integral of (1 + odds e^q)/stretch_qk from the start; right side: drive * integral of v/stretch_ov from the start.


def _left(s: np.ndarray, parametrisation: str, setting: Setting, start: Start) -> np.ndarray:
    """Left integral at s = q - q0 (collapsed) or s = log(q/q0) (factorised)."""
    if parametrisation[0] == "C":
        return s + setting.odds * np.exp(start.mu_qk) * np.expm1(s)
    q = start.mu_qk * np.exp(s)
    return (s + setting.odds * (expi(q) - expi(start.mu_qk))) / (2.0 * setting.qk_singular)


def _gap(s: np.ndarray, parametrisation: str, start: Start) -> np.ndarray:
    return start.mu_qk + s if parametrisation[0] == "C" else start.mu_qk * np.exp(s)


def _left_slope(s: np.ndarray, parametrisation: str, setting: Setting, start: Start) -> np.ndarray:
    """Derivative of `_left` in s."""
    full = 1.0 + setting.odds * np.exp(_gap(s, parametrisation, start))
    return full if parametrisation[0] == "C" else full / (2.0 * setting.qk_singular)


def _right(v: np.ndarray, parametrisation: str, setting: Setting, start: Start) -> np.ndarray:
    """Right integral without the drive, from the start's mu_ov to v."""
    if parametrisation[2] == "C":
        return (v - start.mu_ov) * (v + start.mu_ov) / 2.0
    span = _stretch(v, setting.ov_singular, start.ov_imbalance) - _stretch(np.asarray(start.mu_ov), setting.ov_singular, start.ov_imbalance)
    return span / (4.0 * setting.pool)


def _right_slope(v: np.ndarray, parametrisation: str, setting: Setting, start: Start) -> np.ndarray:
    if parametrisation[2] == "C":
        return v
    if start.ov_imbalance == 0:
        return np.full_like(v, 0.5 / setting.ov_singular)
    return v / _stretch(v, setting.ov_singular, start.ov_imbalance)


def _largest_s(parametrisation: str, start: Start) -> float:
    return LARGEST_GAP - start.mu_qk if parametrisation[0] == "C" else float(np.log(LARGEST_GAP / start.mu_qk))


def _solve_left(target: np.ndarray, parametrisation: str, setting: Setting, start: Start) -> np.ndarray:
    """The s at which the left integral has a value: Wright omega if collapsed, a bracketed root if factorised; then Newton."""
    odds, q0 = setting.odds, start.mu_qk
    if parametrisation[0] == "C":
        # q + odds e^q = K  <=>  w + log w = K + log odds with w = odds e^q, hence w = omega(K + log odds)
        w = wrightomega(target + q0 + odds * np.exp(q0) + np.log(odds))
        s = np.log(w / odds) - q0
    else:
        high = np.minimum(2.0 * setting.qk_singular * target, _largest_s(parametrisation, start))
        if np.any(_left(high, parametrisation, setting, start) < target * (1 - 1e-12)):
            raise ValueError(f"mu_qk would exceed {LARGEST_GAP:g}; expected a smaller ratio or mu_ov.")
        s = elementwise.find_root(
            lambda s, goal: np.log1p(_left(s, parametrisation, setting, start)) - np.log1p(goal),
            (np.zeros_like(high), high),
            args=(target,),
        ).x
        # a target of rounding size has no bracket; there the integral is linear
        s = np.where(np.isnan(s), 2.0 * setting.qk_singular * target / (1.0 + odds * np.exp(q0)), s)
    for _ in range(2):  # omega gives q to absolute precision; Newton on the integral itself gives it to relative precision
        s = s - (_left(s, parametrisation, setting, start) - target) / _left_slope(s, parametrisation, setting, start)
    return s


def first_integral(
    mu_ov: ArrayLike,
    mu_qk: ArrayLike,
    ratio: ArrayLike = 1.0,
    parametrisation: str = "CACO",
    setting: Setting = FIGURE_4,
    start: Start = ZERO,
) -> np.ndarray:
    """What the flow conserves, zero at the start.

    With q = mu_qk, v = mu_ov, lam = `qk_singular`, balanced factors (a common schedule of both rates conserves it too):

    - CACO: q + odds e^q - drive v^2/2
    - CAFO: q + odds e^q - drive v/(2 sqrt b)
    - FACO: log q + odds Ei(q) - lam drive v^2
    - FAFO: log q + odds Ei(q) - lam drive v/sqrt b

    each minus its value at the start. Source: derived in chapter p1_closed_form.

    Returns:
        dimensionless, broadcast shape of the arguments.
    """
    _check("first_integral", parametrisation, ratio, setting, start)
    v, q = np.asarray(mu_ov, float), np.asarray(mu_qk, float)
    s = q - start.mu_qk if parametrisation[0] == "C" else np.log(q / start.mu_qk)
    scale = 1.0 if parametrisation[0] == "C" else 2.0 * setting.qk_singular
    drive = np.asarray(ratio, float) * setting.drive_per_ratio
    return scale * (_left(s, parametrisation, setting, start) - drive * _right(v, parametrisation, setting, start))


def mu_qk_at(
    mu_ov: ArrayLike,
    ratio: ArrayLike = 1.0,
    parametrisation: str = "CACO",
    setting: Setting = FIGURE_4,
    start: Start = ZERO,
) -> np.ndarray:
    """Query-key strength when the output strength is mu_ov: the path, without time.

    CACO from zero: odds e^q = omega(odds + log odds + drive v^2/2), omega the Wright omega function. The factorised ones by a
    bracketed root. Source: derived in chapter p1_closed_form.

    Raises:
        ValueError: mu_ov below the start's, bad rates, a path that leaves float64.
    """
    _check("mu_qk_at", parametrisation, ratio, setting, start)
    checks.at_least("mu_qk_at", start.mu_ov, mu_ov=mu_ov)
    v, drive = np.broadcast_arrays(np.asarray(mu_ov, float), np.asarray(ratio, float) * setting.drive_per_ratio)
    target = drive * _right(v, parametrisation, setting, start)
    return _gap(_solve_left(target, parametrisation, setting, start), parametrisation, start)


def ratio_for(
    alpha: ArrayLike,
    loss: ArrayLike,
    parametrisation: str = "CACO",
    setting: Setting = FIGURE_4,
    start: Start = ZERO,
) -> np.ndarray:
    """The ratio eta_qk/eta_ov that gives attention alpha at the moment when the loss is `loss`.

    CACO from zero, Q = b, common columns held:
    r = (2 M b/(M-1)) (alpha/Lambda)^2 [log(alpha/((1-alpha) odds)) + alpha/(1-alpha) - odds].
    Increasing in alpha. Source: derived in chapter p1_sharper.

    Args:
        alpha: attention, in (attention at the start, 1); broadcasts with `loss`.
        loss: nats, in (0, log M) and below the loss at the start.

    Raises:
        ValueError: alpha or loss outside these.
    """
    _check("ratio_for", parametrisation, 1.0, setting, start)
    low = float(attention(start.mu_qk, setting))
    checks.in_open("ratio_for", low, 1.0, alpha=alpha)
    a = np.asarray(alpha, float)
    q = logit(a) - np.log(setting.odds)
    s = q - start.mu_qk if parametrisation[0] == "C" else np.log(q / start.mu_qk)
    v = logit_for(loss, setting) / a
    if np.any(v <= start.mu_ov):
        raise ValueError(
            f"ratio_for: at this alpha and loss mu_ov would be {np.min(v):g}, not above its start {start.mu_ov:g}; lower the loss."
        )
    return _left(s, parametrisation, setting, start) / (setting.drive_per_ratio * _right(v, parametrisation, setting, start))


def _gap_at_loss(loss: ArrayLike, ratio: ArrayLike, parametrisation: str, setting: Setting, start: Start) -> tuple[np.ndarray, np.ndarray]:
    """(mu_qk, mu_ov) when the loss is reached."""
    _check("alpha_at", parametrisation, ratio, setting, start)
    need, drive = np.broadcast_arrays(logit_for(loss, setting), np.asarray(ratio, float) * setting.drive_per_ratio)
    v_first = need / attention(start.mu_qk, setting)
    if np.any(v_first <= start.mu_ov):
        raise ValueError("alpha_at: loss is not below the loss at the start; lower it or start smaller.")
    high = _solve_left(drive * _right(v_first, parametrisation, setting, start), parametrisation, setting, start)

    def sides(s, need, drive):
        v = need / attention(_gap(s, parametrisation, start), setting)
        return _left(s, parametrisation, setting, start), drive * _right(v, parametrisation, setting, start)

    def difference(s, need, drive):
        left, right = sides(s, need, drive)
        return np.arcsinh(left) - np.arcsinh(right)  # same root, tame at both ends

    top = high * (1 + 1e-9) + 1e-300
    s = elementwise.find_root(difference, (np.zeros_like(high), top), args=(need, drive)).x
    s = np.where(np.isnan(s), high, s)  # an interval of rounding size
    for _ in range(2):
        left, right = sides(s, need, drive)
        q = _gap(s, parametrisation, start)
        v = need / attention(q, setting)
        dq = 1.0 if parametrisation[0] == "C" else q
        slope = _left_slope(s, parametrisation, setting, start)
        slope = slope + drive * _right_slope(v, parametrisation, setting, start) * v * common_attention(q, setting) * dq
        s = s - (left - right) / slope
    q = _gap(s, parametrisation, start)
    return q, need / attention(q, setting)


def alpha_at(
    loss: ArrayLike,
    ratio: ArrayLike = 1.0,
    parametrisation: str = "CACO",
    setting: Setting = FIGURE_4,
    start: Start = ZERO,
) -> np.ndarray:
    """Attention on the distinct tokens at the moment when the loss is `loss`; the inverse of `ratio_for`.

    Args:
        loss: nats, below the loss at the start; broadcasts with `ratio`.
        ratio: eta_qk/eta_ov, > 0.
        parametrisation, setting, start: as in `rates`. A factorised output circuit may start at exactly zero here: that is the limit of
            ever smaller starts.

    Returns:
        broadcast shape, in (attention at the start, 1).

    Raises:
        ValueError: rates <= 0, loss outside (0, log M) or not below the start's.
    """
    return attention(_gap_at_loss(loss, ratio, parametrisation, setting, start)[0], setting)


# --- time -------------------------------------------------------------------------------------------------------------------------------


def _clock(v: np.ndarray, parametrisation: str, setting: Setting, start: Start) -> np.ndarray:
    """y with dv = stretch_ov dy (times 2 sqrt b if factorised): the variable in which the integrand of time is smooth."""
    if parametrisation[2] == "C":
        return v
    if start.ov_imbalance == 0:
        return np.log(v)
    return np.arcsinh(2.0 * setting.ov_singular * v / start.ov_imbalance)


def _from_clock(y: np.ndarray, parametrisation: str, setting: Setting, start: Start) -> np.ndarray:
    if parametrisation[2] == "C":
        return y
    if start.ov_imbalance == 0:
        return np.exp(y)
    return start.ov_imbalance / (2.0 * setting.ov_singular) * np.sinh(y)


def log_time_at(
    mu_ov: ArrayLike,
    ratio: ArrayLike = 1.0,
    parametrisation: str = "CACO",
    setting: Setting = FIGURE_4,
    start: Start = ZERO,
    eta_ov: float = 1.0,
) -> np.ndarray:
    """Natural logarithm of the time at which the output strength is mu_ov.

    t = integral of b (e^(alpha u) + M - 1)/(eta_ov alpha stretch_ov) du along the path, by Gauss-Legendre panels placed where the path
    bends, summed as logarithms, so that times such as 10^40 (or 10^400) do not overflow. Source: derived in chapter p1_closed_form.

    Raises:
        ValueError: mu_ov not above its start; a factorised output circuit that starts on its saddle.
    """
    _check("log_time_at", parametrisation, ratio, setting, start)
    _can_move("log_time_at", parametrisation, start)
    checks.positive("log_time_at", eta_ov=eta_ov)
    checks.in_open("log_time_at", start.mu_ov, np.inf, mu_ov=mu_ov)
    ends, ratios = np.broadcast_arrays(np.asarray(mu_ov, float), np.asarray(ratio, float))
    first = _clock(np.asarray(start.mu_ov), parametrisation, setting, start)
    last = _clock(ends.ravel(), parametrisation, setting, start)
    arms = ratios.ravel()[:, None]  # [arm, 1]

    def path(y):
        # the start's own point may come back from the clock a rounding below itself
        v = np.maximum(_from_clock(y, parametrisation, setting, start), start.mu_ov)
        return v, mu_qk_at(v, arms, parametrisation, setting, start)

    grid = first + (last[:, None] - first) * MONITOR  # [arm, point]
    v, q = path(grid)
    x = attention(q, setting) * v
    left = -np.log1p(x[:, -1:] - x)  # the last few nats of logit hold nearly all the time
    monitor = sum((g - g[:, :1]) / np.maximum(g[:, -1:] - g[:, :1], 1e-300) for g in (grid, q, x, left))
    marks = np.linspace(0.0, 1.0, PANELS + 1)
    edges = np.stack([np.interp(marks * m[-1], m, g) for m, g in zip(monitor, grid, strict=True)])  # [arm, edge]
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    half = np.diff(edges) / 2.0
    y = ((edges[:, :-1] + half)[:, :, None] + half[:, :, None] * nodes).reshape(len(edges), -1)  # [arm, panel * node]
    v, q = path(y)
    alpha = attention(q, setting)
    log_integrand = np.log(setting.pool / eta_ov) + _log_denominator(alpha * v, setting) - np.log(alpha)
    if parametrisation[2] == "F":
        log_integrand = log_integrand - np.log(2.0 * setting.ov_singular)
    log_weight = np.log((half[:, :, None] * weights).reshape(y.shape))
    return logsumexp(log_integrand + log_weight, axis=1).reshape(ends.shape)


@dataclass(frozen=True)
class State:
    """A moment of the flow; all arrays of one shape.

    `log_time` is the natural logarithm of the time (eta_ov = 1 unless said otherwise), None where it was not asked for.
    """

    mu_ov: np.ndarray
    mu_qk: np.ndarray
    ratio: np.ndarray
    setting: Setting
    log_time: np.ndarray | None = None

    @property
    def alpha(self) -> np.ndarray:
        """Attention on the distinct tokens."""
        return attention(self.mu_qk, self.setting)

    @property
    def loss(self) -> np.ndarray:
        """Loss, nats."""
        return loss_of(self.alpha * self.mu_ov, self.setting)

    @property
    def time(self) -> np.ndarray:
        """Time t (infinite where it exceeds float64)."""
        if self.log_time is None:
            raise ValueError("State.time: this state was computed without time; ask for it with with_time=True.")
        return np.exp(self.log_time)

    @property
    def tau(self) -> np.ndarray:
        """The published time axis, tau = min(eta_ov, eta_qk) t. Paper 1, figure 4."""
        return self.time * np.minimum(1.0, self.ratio)


def state_at(
    loss: ArrayLike,
    ratio: ArrayLike = 1.0,
    parametrisation: str = "CACO",
    setting: Setting = FIGURE_4,
    start: Start = ZERO,
    eta_ov: float = 1.0,
    with_time: bool = True,
) -> State:
    """The flow at the moment when the loss is `loss`: strengths by a root, time by quadrature.

    Args: as `alpha_at`; `with_time=False` skips the quadrature.
    """
    q, v = _gap_at_loss(loss, ratio, parametrisation, setting, start)
    ratios = np.broadcast_to(np.asarray(ratio, float), v.shape)
    log_time = log_time_at(v, ratios, parametrisation, setting, start, eta_ov) if with_time else None
    return State(v, q, ratios, setting, log_time)


def time_at(
    loss: ArrayLike,
    ratio: ArrayLike = 1.0,
    parametrisation: str = "CACO",
    setting: Setting = FIGURE_4,
    start: Start = ZERO,
    eta_ov: float = 1.0,
) -> np.ndarray:
    """Time at which the loss is reached. Not monotone in the ratio: see chapter p1_sharper."""
    return state_at(loss, ratio, parametrisation, setting, start, eta_ov).time


def state_at_time(
    log_time: ArrayLike,
    ratio: ArrayLike = 1.0,
    parametrisation: str = "CACO",
    setting: Setting = FIGURE_4,
    start: Start = ZERO,
    eta_ov: float = 1.0,
) -> State:
    """The flow at a time, given as its natural logarithm so that 10^40 is as easy as 10.

    Args:
        log_time: log t, finite; broadcasts with `ratio`.
        ratio, parametrisation, setting, start, eta_ov: as in `rates`.
    """
    checks.finite("state_at_time", log_time=log_time)
    _check("state_at_time", parametrisation, ratio, setting, start)
    _can_move("state_at_time", parametrisation, start)
    goals, ratios = np.broadcast_arrays(np.asarray(log_time, float), np.asarray(ratio, float))
    goal, arm = goals.ravel(), ratios.ravel()

    def late_by(growth, goal, arm):
        return log_time_at(start.mu_ov + np.exp(growth), arm, parametrisation, setting, start, eta_ov) - goal

    low, high = np.full(goal.shape, -1.0), np.full(goal.shape, 1.0)  # in log(mu_ov - start)
    for _ in range(200):
        early = late_by(low, goal, arm) > 0
        late = late_by(high, goal, arm) < 0
        if not (early.any() or late.any()):
            break
        low, high = np.where(early, low - 2.0, low), np.where(late, high + 1.0, high)
    growth = elementwise.find_root(late_by, (low, high), args=(goal, arm), tolerances={"xatol": 1e-13, "xrtol": 1e-13}).x
    v = (start.mu_ov + np.exp(growth)).reshape(goals.shape)
    return State(v, mu_qk_at(v, ratios, parametrisation, setting, start), ratios, setting, goals)


# --- growth -----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Growth:
    """Speeds of growth at a time, exact (no finite differences).

    Attributes:
        ov_per_log: d mu_ov / d log t; tends to 1 for CACO.
        qk_per_loglog: d mu_qk / d log log t; tends to 2 for CACO.
        qk_exponent: d log mu_qk / d log log t; would be 2 if mu_qk grew like log^2 t.
    """

    ov_per_log: np.ndarray
    qk_per_loglog: np.ndarray
    qk_exponent: np.ndarray


def growth(state: State, parametrisation: str = "CACO", start: Start = ZERO, eta_ov: float = 1.0) -> Growth:
    """Speeds of growth at a state that has a time t > 1. Source: derived in chapter p1_closed_form."""
    if state.log_time is None:
        raise ValueError("growth: the state has no time; compute it with state_at_time or with_time=True.")
    checks.positive("growth", log_time=state.log_time)
    setting, v, q = state.setting, state.mu_ov, state.mu_qk
    ov, qk = stretches(v, q, parametrisation, setting, start)
    log_pace = np.log(eta_ov / setting.pool) + np.log(state.alpha) - _log_denominator(state.alpha * v, setting)
    pace = np.exp(log_pace + state.log_time)  # t times the collapsed mu_ov'
    drive = state.ratio * setting.drive_per_ratio
    qk_per_loglog = pace * drive * common_attention(q, setting) * v * qk * state.log_time
    return Growth(pace * ov, qk_per_loglog, qk_per_loglog / q)


def local_exponent(mu_qk: ArrayLike, setting: Setting = FIGURE_4) -> np.ndarray:
    """d log mu_qk / d log mu_ov along CACO from zero: 2 [1 + odds (e^q - 1)/q]/(1 + odds e^q); falls from 2 to 0.

    It depends on mu_qk alone. Source: derived in chapter p1_closed_form.
    """
    checks.positive("local_exponent", mu_qk=mu_qk)
    q = np.asarray(mu_qk, float)
    # both parts divided by e^q: exprel(-q) = (1 - e^-q)/q
    return 2.0 * (np.exp(-q) + setting.odds * exprel(-q)) / (np.exp(-q) + setting.odds)


def mu_qk_bound(mu_ov: ArrayLike, ratio: ArrayLike = 1.0, parametrisation: str = "CACO", setting: Setting = FIGURE_4) -> np.ndarray:
    """Ceiling of mu_qk for a collapsed query-key circuit from zero.

    drive (1-alpha_0) v^2/2 (CACO), drive (1-alpha_0) v/(2 sqrt b) (CAFO). With mu_ov = O(log t) these are the bounds O(log^2 t) and
    O(log t). Source: derived in chapter p1_closed_form.
    """
    checks.one_of("mu_qk_bound", ("CACO", "CAFO"), parametrisation=parametrisation)
    checks.at_least("mu_qk_bound", 0.0, mu_ov=mu_ov)
    checks.positive("mu_qk_bound", ratio=ratio)
    v = np.asarray(mu_ov, float)
    drive = np.asarray(ratio, float) * setting.drive_per_ratio
    return drive * (1.0 - setting.floor) * _right(v, parametrisation, setting, ZERO)


def mu_qk_asymptote(mu_ov: ArrayLike, ratio: ArrayLike = 1.0, parametrisation: str = "CACO", setting: Setting = FIGURE_4) -> np.ndarray:
    """What mu_qk tends to as mu_ov grows (difference o(1)).

    - CACO: 2 log v + log(drive/(2 odds))
    - CAFO: log v + log(drive/(2 odds sqrt b))
    - FACO: q - log q = 2 log v + log(lam drive/odds)
    - FAFO: q - log q = log v + log(lam drive/(odds sqrt b))

    the last two solved for q (its larger solution). Source: derived in chapter p1_closed_form.

    Raises:
        ValueError: mu_ov too small for q - log q to have a solution (right side < 1).
    """
    _check("mu_qk_asymptote", parametrisation, ratio, setting, Start(mu_qk=1.0))
    checks.positive("mu_qk_asymptote", mu_ov=mu_ov)
    log_v = np.log(np.asarray(mu_ov, float))
    drive = np.asarray(ratio, float) * setting.drive_per_ratio
    right = 2.0 * log_v if parametrisation[2] == "C" else log_v - np.log(setting.ov_singular)
    if parametrisation[0] == "C":
        return right + np.log(drive / (2.0 * setting.odds))
    right = np.asarray(right + np.log(setting.qk_singular * drive / setting.odds))
    checks.at_least("mu_qk_asymptote", 1.0, right_side=right)
    q = right + np.log(right) + 1.0  # above the root; q -> right + log q contracts with factor 1/q < 1
    for _ in range(3):
        q = right + np.log(q)
    for _ in range(6):
        q = q - (q - np.log(q) - right) / (1.0 - 1.0 / q)
    return q


def off_line_growth(mu_ov: ArrayLike, ratio: ArrayLike, setting: Setting) -> np.ndarray:
    """How many times over e a small departure from the line has grown: the line is invariant, but nothing pulls back to it.

    A query may learn to point at one particular common token, and that token to vote for the query's class. To first order in such a
    departure, and for many slots, both strengths grow like e^N with

        N = sqrt(ratio/Q) (b/|C|) * integral of (1-alpha)/alpha dv,   (1-alpha)/alpha = e^-mu_qk/odds,

    whatever the loss on the way. A finite number of slots makes it somewhat slower. Source: derived in chapter p1_closed_form.

    Args:
        mu_ov: strength of the output circuit up to which to count, >= 0.
        ratio: eta_qk/eta_ov.
        setting: with a finite `common_pool`; collapsed circuits from zero.

    Returns:
        N, dimensionless, broadcast shape.

    Raises:
        ValueError: no finite common pool, ratio <= 0, mu_ov < 0.
    """
    if setting.common_pool is None:
        raise ValueError("off_line_growth: common_pool = None; expected the number of common tokens. A finite pool is what makes it grow.")
    checks.positive("off_line_growth", ratio=ratio)
    checks.at_least("off_line_growth", 0.0, mu_ov=mu_ov)
    ends, ratios = np.broadcast_arrays(np.asarray(mu_ov, float), np.asarray(ratio, float))
    nodes, weights = np.polynomial.legendre.leggauss(200)
    half = np.sqrt(ends)[..., None] / 2.0  # v = s^2 puts nodes where mu_qk starts to rise
    s = half * (nodes + 1.0)
    q = mu_qk_at(s * s, ratios[..., None], "CACO", setting)
    area = (np.exp(-q) / setting.odds * 2.0 * s * half * weights).sum(-1)
    return np.sqrt(ratios / setting.query_count) * setting.pool / setting.common_pool * area


def factorised_strength(pushed: ArrayLike, singular: float, start: float = 0.0, imbalance: float = 0.0, rate: float = 1.0) -> np.ndarray:
    """Strength of a factorised circuit after its drive has pushed for a while, in closed form.

    With G = integral of the collapsed drive g dt and sigma = `singular`:
    balanced: start * e^(2 rate sigma G); else (imbalance/(2 sigma)) sinh(2 rate sigma G + asinh(2 sigma start/imbalance)).
    The start eps * identity is start = 0, imbalance = 2 eps^2.

    Args:
        pushed: G, any shape.
        singular: `Setting.ov_singular` or `Setting.qk_singular`.
        start: strength at G = 0.
        imbalance: |a^2 - c^2|.
        rate: learning rate of the circuit.

    Source: derived in chapter p1_closed_form.
    """
    checks.positive("factorised_strength", singular=singular, rate=rate)
    checks.at_least("factorised_strength", 0.0, start=start, imbalance=imbalance)
    phase = 2.0 * rate * singular * np.asarray(pushed, float)
    if imbalance == 0:
        return start * np.exp(phase)
    return imbalance / (2.0 * singular) * np.sinh(phase + np.arcsinh(2.0 * singular * start / imbalance))
