"""Gradient flow of the population model, many runs at once, each with its own adaptive step and its own certificates.

The problem is smooth and hardly stiff before the end of training, so an explicit adaptive method fits: Dormand-Prince 5(4), with the
coefficients and the step rule of scipy's RK45. The one difference from `solve_ivp` is that the gradient is evaluated for all runs
in one call.
For the small matrices of paper 2 that is an order of magnitude faster, and a run gives the same numbers alone or in company.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.integrate import RK45
from scipy.optimize import brentq
from scipy.special import entr

from lib import checks
from lib.theory.markov import PopulationModel, low_rank_optimum

HALVING = 2.0**5  # a fifth-order method takes steps of half the length when its tolerance is 2^5 times smaller

Stop = Callable[[PopulationModel, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Certificate:
    """What vouches for a trajectory.

    Attributes:
        invariant_drift: largest change of any entry of C1, C2, C3 over the samples (0 for the exact flow).
        loss_error: largest loss difference, over the samples, from the same run with steps about twice as long (nats). It bounds
        the error of
            the coarser of the two, so it is on the safe side for this run. None where no companion was run.
        evaluations: gradients computed for this run, without its companion.
        rtol, atol: tolerances of the step control.
    """

    invariant_drift: float
    loss_error: float | None
    evaluations: int
    rtol: float
    atol: float


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One run of the flow, sampled in time; everything but `parameters` is computed when first asked for.

    Attributes:
        model: the population model of this run.
        times: [time], units of flow time (step count times learning rate).
        parameters: [time, size].
        certificate: see `Certificate`.
        ended: "time", the name of the stop that fired, or "budget" (out of gradient evaluations; the last sample is then not at t_end).
    """

    model: PopulationModel
    times: np.ndarray
    parameters: np.ndarray
    certificate: Certificate
    ended: str

    @property
    def stationary(self) -> np.ndarray:
        """Stationary law of the chain, [token]."""
        return self.model.chain.stationary

    @cached_property
    def loss(self) -> np.ndarray:
        """Population loss, [time], nats."""
        return self.model.loss(self.parameters)

    @cached_property
    def patterns(self) -> np.ndarray:
        """Attention per pair of token types, [time, query, key]."""
        return self.model.pattern(self.parameters)

    @cached_property
    def row_entropies(self) -> np.ndarray:
        """Entropy of each query's attention over types, [time, query], nats."""
        return entr(self.patterns).sum(-1)

    @cached_property
    def singular_values(self) -> dict[str, np.ndarray]:
        """Singular values of the four matrices, name -> [time, index], largest first."""
        weights = self.model.split(self.parameters)._asdict()
        return {name: np.linalg.svd(matrix, compute_uv=False) for name, matrix in weights.items()}

    @cached_property
    def levels(self) -> dict[str, float]:
        """Loss levels of the chain in nats: "uniform" (log d), "unigram" (H(pi)), "rank one" (plateau), "floor" (sum_i pi_i H(P_i))."""
        chain = self.model.chain
        rank_one = low_rank_optimum(chain, 1).loss
        return {
            "uniform": float(chain.uniform_level),
            "unigram": float(chain.unigram_level),
            "rank one": rank_one,
            "floor": float(chain.floor),
        }

    def at(self, time: float) -> int:
        """Index of the sample nearest to a time. Raises ValueError outside the run. Source: bookkeeping."""
        checks.in_closed("Trajectory.at", float(self.times[0]), float(self.times[-1]), time=time)
        return int(np.abs(self.times - time).argmin())


def loss_below(level: float) -> Stop:
    """A stop that fires when the loss falls to `level` (nats): late in training the steps get many, so end by an event. Source: ours."""
    return lambda model, parameters: model.loss(parameters) - level


def norm_above(name: str, level: float) -> Stop:
    """A stop that fires when the Frobenius norm of one matrix reaches `level`.

    Args:
        name: embedding, unembedding, W_Q or W_K.
        level: > 0.

    Returns:
        A stop for `flow`.

    Raises:
        ValueError: unknown name, or level <= 0.

    Source: ours; marks the end of Stage I (embedding) and of Stage II (W_Q).
    """
    checks.one_of("norm_above", ("embedding", "unembedding", "W_Q", "W_K"), name=name)
    checks.positive("norm_above", level=level)
    return lambda model, parameters: level - np.linalg.norm(getattr(model.split(parameters), name), axis=(-1, -2))


class _Batch:
    """Dormand-Prince on many runs; run i has time t[i] and step h[i]."""

    def __init__(self, model, start, rtol, atol, direction=-1.0):
        self.model, self.direction = model, direction
        self.t, self.y, self.rtol, self.atol = np.zeros(len(start)), start.copy(), rtol, atol
        self.f = direction * model.gradient(self.y)
        scale = atol[:, None] + rtol[:, None] * np.abs(self.y)
        d0, d1 = (np.sqrt(np.mean((x / scale) ** 2, axis=-1)) for x in (self.y, self.f))
        with np.errstate(divide="ignore", invalid="ignore"):
            self.h = np.where((d0 > 1e-5) & (d1 > 1e-5), 0.01 * d0 / d1, 1e-3)
        self.rejected = np.zeros(len(start), bool)
        self.evaluations = np.ones(len(start), int)

    def keep(self, index):
        """Drop the runs that are done."""
        self.model = self.model.take(index)
        for name in ("t", "y", "f", "h", "rtol", "atol", "rejected", "evaluations"):
            setattr(self, name, getattr(self, name)[index])

    def step(self, t_end):
        """Try one step for every run; returns which were accepted, and the start and stages of the step for interpolation."""
        h = np.minimum(self.h, t_end - self.t)
        stages = np.empty((7, *self.y.shape))  # [stage, run, size]
        stages[0] = self.f
        flat = stages.reshape(7, -1)
        for i in range(1, 6):
            move = (RK45.A[i, :i] @ flat[:i]).reshape(self.y.shape)
            stages[i] = self.direction * self.model.gradient(self.y + h[:, None] * move)
        new = self.y + h[:, None] * (RK45.B @ flat[:6]).reshape(self.y.shape)
        stages[6] = self.direction * self.model.gradient(new)
        self.evaluations += 6
        scale = self.atol[:, None] + self.rtol[:, None] * np.maximum(np.abs(self.y), np.abs(new))
        error = np.sqrt(np.mean((h[:, None] * (RK45.E @ flat).reshape(self.y.shape) / scale) ** 2, axis=-1))  # [run]
        if not np.all(np.isfinite(error)):
            run = int(np.flatnonzero(~np.isfinite(error))[0])
            raise ValueError(
                f"flow: run {run} left the finite numbers at t = {self.t[run]:g}; start from smaller parameters or tighten rtol."
            )
        accepted = error < 1
        with np.errstate(divide="ignore"):
            factor = np.clip(0.9 * error**-0.2, 0.2, 10)
        factor = np.where(accepted & self.rejected, np.minimum(factor, 1), np.where(accepted, factor, np.minimum(factor, 1)))
        old_t, old_y = self.t, self.y
        self.t = np.where(accepted, np.where(h >= t_end - old_t, t_end, old_t + h), old_t)  # exact at the end
        self.y = np.where(accepted[:, None], new, old_y)
        self.f = np.where(accepted[:, None], stages[6], self.f)
        self.h, self.rejected = h * factor, ~accepted
        return accepted, old_t, old_y, h, stages


def _interpolate(fraction, y, h, stages):
    """Fourth-order dense output of scipy's RK45 at a fraction of the step, per run: [run, size]."""
    powers = fraction[:, None] ** np.arange(1, 5)  # [run, power]
    weights = powers @ RK45.P.T  # [run, stage]
    return y + h[:, None] * np.einsum("rs,srn->rn", weights, stages)


def _locate(stop, model, y, h, stages):
    """Fraction of one run's step at which a stop fires, and the parameters there."""

    def signed(x):
        return float(np.ravel(stop(model, _interpolate(np.array([x]), y, h, stages)))[0])

    x = brentq(signed, 0, 1, xtol=1e-12) if signed(0.0) > 0 >= signed(1.0) else 1.0
    return x, _interpolate(np.array([x]), y, h, stages)[0]


def _checked(where, model, start, t_end, times, rtol, atol):
    """Sample times [time] and absolute tolerances [run]."""
    checks.shape(where, "start", start, (None, model.size))
    checks.finite(where, start=start)
    checks.positive(where, t_end=t_end, rtol=rtol)
    times = np.unique(np.append(np.arange(np.floor(t_end) + 1.0), t_end)) if times is None else np.asarray(times, dtype=float)
    checks.in_closed(where, 0, t_end, times=times)
    if times.ndim != 1 or times.size < 2 or np.any(np.diff(times) <= 0):
        raise ValueError(f"{where}: times has shape {times.shape}; expected at least two increasing times.")
    if model.chain.stationary.ndim > 1:
        checks.shape(where, "chain.stationary", model.chain.stationary, (len(start), None))
    size = np.sqrt(np.mean(start**2, axis=-1))  # [run]
    if atol is None:
        checks.positive(where, root_mean_square_of_start=size)
        return times, rtol * size
    checks.positive(where, atol=atol)
    if np.any(atol > size / 100):
        raise ValueError(f"{where}: atol = {atol:g}; expected at most {size.min() / 100:.3g}, a hundredth of the initial parameters' size.")
    return times, np.full(len(start), float(atol))


def flows(
    model: PopulationModel,
    start: np.ndarray,
    t_end: float,
    *,
    times: np.ndarray | None = None,
    stops: Mapping[str, Stop] | None = None,
    rtol: float = 1e-7,
    atol: float | None = None,
    certify: bool = True,
    budget: int = 400_000,
) -> list[Trajectory]:
    """Integrate d theta / dt = - grad L for several runs together.

    Args:
        model: one population model; where its chain has a leading axis, run i takes chain i.
        start: [run, size], initial parameters.
        t_end: end of the flow, > 0.
        times: [time], increasing from >= 0 to <= t_end; None = every unit of time (761 samples for t_end = 760). All parameters are kept
            at each, so give few for a large model.
        stops: name -> function(model, parameters [run, size]) -> [run]; a run ends where a value falls to 0 or below, and the
            crossing is located on the interpolant. A run that starts beyond it ends at once.
        rtol: relative tolerance per step.
        atol: absolute tolerance per step; None = rtol times the root mean square of the start. An absolute tolerance near the initial
            parameters would replace the saddle's growth by integration error, so one above a hundredth of that size is refused.
        certify: also run every trajectory with doubled steps and report the difference; costs little since the two share their
        gradient calls.
        budget: gradient evaluations after which a run is cut (`ended` is then "budget").

    Returns:
        One Trajectory per run, in order.

    Raises:
        ValueError: bad shapes, times or tolerances.

    Source: gradient flow of paper 2; the method is Dormand-Prince 5(4) as in scipy.integrate.RK45.
    """
    start = np.asarray(start, dtype=float)
    times, absolute = _checked("flows", model, start, t_end, times, rtol, atol)
    count, copies = len(start), 2 if certify else 1
    runs = np.tile(np.arange(count), copies)  # the second copy is the companion with doubled steps
    loosened = np.repeat([1.0, HALVING][:copies], count)
    batch = _Batch(model.take(runs), start[runs], rtol * loosened, absolute[runs] * loosened)
    samples = np.full((count, times.size, model.size), np.nan)
    companion = np.full((count, times.size), np.nan)
    filled = np.zeros(len(runs), int)  # samples written so far
    ends: dict[int, tuple[str, float, np.ndarray]] = {}
    evaluations = np.zeros(len(runs), int)
    alive = np.arange(len(runs))
    if times[0] == 0:
        samples[:, 0], companion[:, 0], filled[:] = start, model.loss(start), 1
    for name, stop in (stops or {}).items():
        for run in np.flatnonzero(stop(batch.model, batch.y) <= 0).tolist():
            ends.setdefault(run, (name, 0.0, batch.y[run].copy()))
    alive = np.array([run for run in alive.tolist() if run not in ends], int)
    if len(alive) < len(runs):
        batch.keep(alive)
    while alive.size:
        accepted, t, y, h, stages = batch.step(t_end)
        limit = batch.t.copy()  # samples are taken up to here
        for name, stop in (stops or {}).items():
            for i in np.flatnonzero(accepted & (np.asarray(stop(batch.model, batch.y)) <= 0)).tolist():
                x, value = _locate(stop, batch.model.take(slice(i, i + 1)), y[i : i + 1], h[i : i + 1], stages[:, i : i + 1])
                if t[i] + x * h[i] <= limit[i]:
                    limit[i] = t[i] + x * h[i]
                    ends[int(alive[i])] = (name, limit[i], value)
        while True:
            due = np.flatnonzero(accepted & (filled[alive] < times.size))
            due = due[times[filled[alive[due]]] <= limit[due]]
            if not due.size:
                break
            at = times[filled[alive[due]]]
            values = _interpolate((at - t[due]) / h[due], y[due], h[due], stages[:, due])
            own = alive[due] < count
            samples[alive[due][own], filled[alive[due][own]]] = values[own]
            if not own.all():  # of a companion only the loss is wanted
                other = due[~own]
                companion[alive[other] - count, filled[alive[other]]] = batch.model.take(other).loss(values[~own])
            filled[alive[due]] += 1
        for i, run in enumerate(alive.tolist()):
            if batch.t[i] >= t_end:
                ends.setdefault(run, ("time", t_end, batch.y[i].copy()))
            elif batch.evaluations[i] >= budget:
                ends.setdefault(run, ("budget", float(batch.t[i]), batch.y[i].copy()))
        done = np.array([run in ends for run in alive.tolist()])
        if done.any():
            evaluations[alive[done]] = batch.evaluations[done]
            alive = alive[~done]
            batch.keep(np.flatnonzero(~done))
    out = []
    for run in range(count):
        name, last, end = ends[run]
        mine, at = samples[run, : filled[run]], times[: filled[run]]
        loss_error = None
        if name != "time" and (not at.size or last > at[-1]):
            mine, at = np.concatenate([mine, end[None]]), np.append(at, last)  # the stop itself is the last sample
        single = model.take(run)
        if certify:
            common = min(filled[run], filled[count + run])
            difference = np.abs(single.loss(samples[run, :common]) - companion[run, :common])
            loss_error = float(difference.max(initial=0.0))
        before, along = single.invariants(start[run]), single.invariants(mine)
        drift = max(float(np.abs(after - first).max()) for first, after in zip(before, along, strict=True))
        certificate = Certificate(drift, loss_error, int(evaluations[run]), rtol, float(absolute[run]))
        out.append(Trajectory(single, at, mine, certificate, name))
    return out


def flow(model: PopulationModel, start: np.ndarray, t_end: float, **options) -> Trajectory:
    """One run of the gradient flow; see `flows` for the options.

    Args:
        model: population model of one chain.
        start: [size], for instance `model.initial(1e-3, seed=0)`.
        t_end: end of the flow, > 0.

    Returns:
        Trajectory.

    Raises:
        ValueError: as `flows`.

    Source: gradient flow of paper 2.
    """
    checks.shape("flow", "start", np.asarray(start), (model.size,))
    return flows(model, np.asarray(start)[None], t_end, **options)[0]
