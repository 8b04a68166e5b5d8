"""Closed forms of the focus-dilution cycle of paper 2, in the order in which training meets them.

Stage I (condensation) leaves the origin at rate mu; Stage II (focus) leaves the second saddle at rate c; Stage III (dilution) bends the
embedding while attention grows; Stage IV leaves the rank-one plateau at rate nu. Stages II-IV up to the escape happen on the rank-one
manifold, whose flow (`RankOneFlow`) needs 2 d + 2 numbers instead of 2 d m + 2 m^2.

Functions of `stationary` take [..., token] and broadcast. `gamma` and `beta` are the profiles of embedding and unembedding over tokens.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy.integrate import solve_ivp
from scipy.linalg import block_diag
from scipy.special import entr, log_softmax, softmax

from lib import checks
from lib.theory.markov import Chain, PopulationModel, _law, sticky_chain

UNIFORM = 1e-12  # spread of pi below which the second saddle has no direction
TWIN = 1e-13  # difference below which two tokens count as equal: rounding of the law, well under any delta of interest


def _transpose(matrix: np.ndarray) -> np.ndarray:
    return np.swapaxes(matrix, -1, -2)


# ---------------------------------------------------------------------------------------------------------------- Stage I: condensation


def condensation_rate(stationary) -> np.ndarray:
    """Growth rate of the embedding at the origin, mu = |pi| |pi - 1/d|; 0 for uniform pi.

    Args:
        stationary: [..., token].

    Returns:
        [...], per unit of flow time. The Hessian at the origin has -mu and +mu m times each, and 0 otherwise.

    Raises:
        ValueError: pi is not a positive law over at least two tokens.

    Source: paper 2, Thm 3.2; derived in chapter p2_condensation.
    """
    law = _law("condensation_rate", stationary)
    return np.linalg.norm(law, axis=-1) * np.linalg.norm(law - 1 / law.shape[-1], axis=-1)


def _origin_profiles(stationary: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors pi/|pi| and (pi - 1/d)/|pi - 1/d|."""
    residual = stationary - 1 / stationary.shape[-1]
    if np.any(np.ptp(stationary, axis=-1) < UNIFORM):
        raise ValueError(
            f"condensation: stationary is uniform (all {stationary.flat[0]:g}), so nothing grows at the origin; give unequal frequencies."
        )
    return stationary / np.linalg.norm(stationary, axis=-1, keepdims=True), residual / np.linalg.norm(residual, axis=-1, keepdims=True)


def condensation_direction(model: PopulationModel, parameters: np.ndarray) -> np.ndarray:
    """Width-space unit vector onto which Stage I condenses everything: alpha_1, along W_0^T pi/|pi| + W_1 r/|r| with r = pi - 1/d.

    Args:
        model: population model.
        parameters: [..., size], the initial ones.

    Returns:
        [..., width].

    Raises:
        ValueError: uniform pi.

    Source: paper 2, Thm 3.2 (growing half of the linear flow at the origin).
    """
    growing = _growing(model, parameters)
    return growing / np.linalg.norm(growing, axis=-1, keepdims=True)


def _growing(model: PopulationModel, parameters: np.ndarray) -> np.ndarray:
    """Twice the growing mode of the linear flow at the origin, p + b, [..., width]."""
    towards, away = _origin_profiles(model.chain.stationary)
    w = model.split(parameters)
    return (towards[..., None, :] @ w.embedding)[..., 0, :] + (w.unembedding @ away[..., None])[..., 0]


def condensation_time(model: PopulationModel, parameters: np.ndarray, amplitude) -> np.ndarray:
    """When the growing mode of the linear flow at the origin reaches an amplitude: log(amplitude / initial amplitude) / mu.

    The amplitude is |p + b| / 2 with p = W_0^T pi/|pi| and b = W_1 r/|r|: what W_0 and W_1 each have along their own profile once the
    decaying half is gone.

    Args:
        model: population model of one chain.
        parameters: [size], start.
        amplitude: [...], > 0.

    Returns:
        [...], flow time; negative if the start is already beyond.

    Raises:
        ValueError: uniform pi, or amplitude <= 0.

    Source: paper 2, Thm 3.2 (length of Stage I); derived in chapter p2_condensation.
    """
    checks.positive("condensation_time", amplitude=amplitude)
    begun = np.linalg.norm(_growing(model, parameters)) / 2
    return np.log(np.asarray(amplitude, dtype=float) / begun) / condensation_rate(model.chain.stationary)


def linear_origin_flow(model: PopulationModel, parameters: np.ndarray, times) -> np.ndarray:
    """Solution of the flow linearised at the origin: only W_0 along pi and W_1 along pi - 1/d move, as cosh and sinh of mu t.

    Args:
        model: population model of one chain.
        parameters: [size], start.
        times: [time].

    Returns:
        [time, size].

    Raises:
        ValueError: uniform pi.

    Source: paper 2, Lemma 3.1 and Thm 3.2.
    """
    towards, away = _origin_profiles(model.chain.stationary)
    rate, times = condensation_rate(model.chain.stationary), np.asarray(times, dtype=float)
    w = model.split(parameters)
    p, b = towards @ w.embedding, w.unembedding @ away  # [width]; p' = mu b, b' = mu p
    grown, mixed = np.cosh(rate * times) - 1, np.sinh(rate * times)  # [time]
    out = np.repeat(parameters[None], len(times), axis=0)
    moved = model.split(out)
    moved.embedding[...] += towards[:, None] * (grown[:, None] * p + mixed[:, None] * b)[:, None, :]
    moved.unembedding[...] += (grown[:, None] * b + mixed[:, None] * p)[:, :, None] * away
    return out


# ----------------------------------------------------------------------------------------------------------------------- Stage II: focus


class Profiles(NamedTuple):
    """Token profiles of the second saddle: embedding `gamma` and unembedding `beta`, both [..., token] and of equal norm."""

    gamma: np.ndarray
    beta: np.ndarray


def saddle_profiles(stationary) -> Profiles:
    """Profiles of the second saddle: gamma along pi, beta along l = log pi - mean log pi, norms equal, (pi . gamma) beta = l.

    Args:
        stationary: [..., token].

    Returns:
        Profiles.

    Raises:
        ValueError: not a positive law, or uniform (l = 0: the origin is then the only such point).

    Source: paper 2, Thm 3.3; derived in chapter p2_focus.
    """
    law = _law("saddle_profiles", stationary)
    if np.any(np.ptp(law, axis=-1) < UNIFORM):
        raise ValueError(
            f"saddle_profiles: stationary is uniform (all {law.flat[0]:g}), so there is no second saddle and no rate c;"
            " give unequal frequencies."
        )
    odds = np.log(law) - np.log(law).mean(-1, keepdims=True)
    size = [np.linalg.norm(v, axis=-1, keepdims=True) for v in (law, odds)]
    rho = np.sqrt(size[1] / size[0])
    return Profiles(rho * law / size[0], rho * odds / size[1])


def focus_saddle(model: PopulationModel, direction: np.ndarray | None = None) -> np.ndarray:
    """The second saddle theta_c^1: W_0 = gamma alpha^T, W_1 = alpha beta^T, W_Q = W_K = 0. It predicts pi whatever the query, so L = H(pi).

    Args:
        model: population model.
        direction: [width], alpha (made a unit vector); None = first axis. Any direction gives a critical point.

    Returns:
        [..., size].

    Raises:
        ValueError: uniform pi, or a direction of wrong shape or zero.

    Source: paper 2, Thm 3.3.
    """
    gamma, beta = saddle_profiles(model.chain.stationary)
    alpha = np.eye(model.width)[0] if direction is None else np.asarray(direction, dtype=float)
    checks.shape("focus_saddle", "direction", alpha, (model.width,))
    checks.positive("focus_saddle", norm_of_direction=np.linalg.norm(alpha))
    alpha = alpha / np.linalg.norm(alpha)
    nothing = np.zeros((*gamma.shape[:-1], model.width, model.width))
    return model.join(gamma[..., :, None] * alpha, alpha[:, None] * beta[..., None, :], nothing, nothing)


def _score_pull(chain: Chain) -> tuple[np.ndarray, np.ndarray, Profiles]:
    """Factors u [..., query], v [..., key] of -dL/dPhi = u v^T at the second saddle."""
    profiles = saddle_profiles(chain.stationary)
    gamma, beta = profiles
    pi = chain.stationary
    predicted = ((chain.transition - pi[..., None, :]) @ beta[..., None])[..., 0]  # (P_i - pi) . beta [..., query]
    return pi * predicted, pi * (gamma - (pi * gamma).sum(-1, keepdims=True)), profiles


def focus_rate(chain: Chain) -> np.ndarray:
    """Rate at which attention leaves the second saddle, c = Var_pi(gamma) sum_i pi_i gamma_i (P_i - pi) . beta.

    For the sticky chain c = lambda Var_pi(gamma) Cov_pi(gamma, beta), so its sign is that of lambda. c > 0: attention gathers on
    the frequent token
    (W_Q = W_K grows at c); c < 0: it leaves the frequent token (W_Q = -W_K grows at |c|). The Hessian has -c and +c m times each.

    Args:
        chain: any chain (leading axes allowed).

    Returns:
        [...], per unit of flow time, signed.

    Raises:
        ValueError: uniform pi.

    Source: paper 2, Thm 3.4 for the sticky chain; for a general chain derived in chapter p2_focus.
    """
    u, v, (gamma, _) = _score_pull(chain)
    return (gamma * u).sum(-1) * (gamma * v).sum(-1)


def readout_spectrum(stationary) -> np.ndarray:
    """Positive Hessian eigenvalues of the (W_0, W_1) block at the second saddle: those of K^1/2 (diag pi - pi pi^T) K^1/2, K = |l|
    |pi| (I + l l^T/|l|^2).

    Args:
        stationary: [..., token].

    Returns:
        [..., d - 1], increasing. The block has no other eigenvalue but 0. Attention leaves a fully formed saddle only if the
        smallest exceeds c.

    Raises:
        ValueError: uniform pi.

    Source: paper 2, Thm 3.3; derived in chapter p2_focus.
    """
    gamma, beta = saddle_profiles(stationary)
    law = np.asarray(stationary, dtype=float)
    size = (law * gamma).sum(-1)[..., None, None]  # pi . gamma, whose square is |l| |pi|
    unit = beta / np.linalg.norm(beta, axis=-1, keepdims=True)
    along = unit[..., :, None] * unit[..., None, :]
    root = size * (np.eye(law.shape[-1]) + (np.sqrt(2) - 1) * along)  # K^1/2
    fisher = np.eye(law.shape[-1]) * law[..., None, :] - law[..., :, None] * law[..., None, :]
    return np.linalg.eigvalsh(root @ fisher @ root)[..., 1:]


def attention_direction(model: PopulationModel, parameters: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """Which of the m equally fast modes W_Q = +-W_K = alpha w^T the flow grows: w along W_Q^T alpha + sign(c) W_K^T alpha of the start.

    Args:
        model: population model of one chain.
        parameters: [..., size], where attention starts to grow (W_Q, W_K keep their initial values through Stage I).
        direction: [..., width], alpha.

    Returns:
        [..., width], unit vectors.

    Raises:
        ValueError: uniform pi, or c = 0 (nothing grows).

    Source: paper 2, Thm 3.4 calls the mode unique; it is unique once the start is given. Derived in chapter p2_focus.
    """
    rate = focus_rate(model.chain)
    if np.any(np.abs(rate) < UNIFORM):
        raise ValueError(
            "attention_direction: focus rate c = 0, so no attention mode grows; expected a chain whose rows depend on the token."
        )
    w = model.split(parameters)
    column = np.asarray(direction)[..., :, None]
    growing = (_transpose(w.W_Q) @ column + np.sign(rate) * _transpose(w.W_K) @ column)[..., 0]
    return growing / np.linalg.norm(growing, axis=-1, keepdims=True)


def hessian(objective, parameters: np.ndarray, *, step: float = 1e-30) -> np.ndarray:
    """Hessian to rounding accuracy, by complex steps through the analytic gradient: no subtraction, so no noise floor of a finite
    difference.

    Args:
        objective: PopulationModel or RankOneFlow of one chain (anything whose `gradient` is analytic and takes leading axes).
        parameters: [size].
        step: imaginary step.

    Returns:
        [size, size], symmetric.

    Source: standard (complex-step derivative).
    """
    probes = parameters + 1j * step * np.eye(parameters.shape[-1])  # [probe, size]
    matrix = objective.gradient(probes).imag / step
    return (matrix + matrix.T) / 2


def time_per_decade(rate) -> np.ndarray:
    """Extra flow time that a start ten times smaller spends at a saddle, ln 10 / rate.

    Args:
        rate: [...], > 0: mu for Stage I, c for Stage II, nu for Stage IV.

    Returns:
        [...].

    Raises:
        ValueError: rate <= 0.

    Source: paper 2, Thm 3.2 and its counterparts (time log(1/epsilon) / rate).
    """
    checks.positive("time_per_decade", rate=rate)
    return np.log(10) / np.asarray(rate, dtype=float)


# ---------------------------------------------------------------------------------------------------------------------- Stage III: dilution


def dilution_drive(chain: Chain) -> np.ndarray:
    """Direction in which growing attention bends the embedding: d gamma / dt = s (2 (gamma . u) v + Var_pi(gamma) u), modulo pi.

    s = q k is the strength of attention, u v^T = -dL/dPhi at the second saddle. Along pi a restoring force of order one acts as
    well, so only
    components that annihilate pi are predicted.

    Args:
        chain: any chain (leading axes allowed).

    Returns:
        [..., token], per unit of s.

    Raises:
        ValueError: uniform pi.

    Source: paper 2, Props 3.6-3.7; derived in chapter p2_dilution.
    """
    u, v, (gamma, _) = _score_pull(chain)
    return 2 * (gamma * u).sum(-1, keepdims=True) * v + (gamma * v).sum(-1, keepdims=True) * u


def dilution_law(chain: Chain, strength, start) -> np.ndarray:
    """Change of the embedding profile while attention grows from s_0 to s: drive (s - s_0) / (2 |c|), modulo pi; it grows as e^{2 |c| t}.

    Args:
        chain: one chain with c != 0. The mode that grows has k = q for c > 0 and k = -q for c < 0.
        strength: [...], s = q k, small; negative for c < 0.
        start: [...], s_0.

    Returns:
        [..., token].

    Raises:
        ValueError: uniform pi.

    Source: paper 2, Prop 3.7; derived in chapter p2_dilution.
    """
    grown = np.asarray(strength, dtype=float) - start
    return grown[..., None] * dilution_drive(chain) / (2 * np.abs(focus_rate(chain)))


def symmetric_dilution(gamma: np.ndarray, stationary: np.ndarray) -> np.ndarray:
    """D = (1 - pi_1) gamma_1 - pi_1 (gamma_2 + ... + gamma_d): 0 when the embedding profile is parallel to pi. With equal low tokens
    D(t) - D(0) = 3 (s(t) - s_0) / (2 (gamma_1 - gamma_2)) to leading order.

    Args:
        gamma: [..., token], embedding profile.
        stationary: [token]; token 0 is the frequent one.

    Returns:
        [...].

    Raises:
        ValueError: shapes differ.

    Source: paper 2, Prop 3.7.
    """
    checks.shape("symmetric_dilution", "stationary", stationary, (gamma.shape[-1],))
    return (1 - stationary[0]) * gamma[..., 0] - stationary[0] * gamma[..., 1:].sum(-1)


class RankOneState(NamedTuple):
    """Views into the flat state: gamma, beta [..., token] and the strengths q, k [...] of W_Q and W_K."""

    gamma: np.ndarray
    beta: np.ndarray
    q: np.ndarray
    k: np.ndarray


@dataclass(frozen=True, eq=False)
class RankOneFlow:
    """The flow on the invariant manifold W_0 = gamma a^T, W_1 = a beta^T, W_Q = q a w^T, W_K = k a w^T (|a| = |w| = 1).

    Attributes:
        chain: one chain.

    Source: derived in chapter p2_dilution; paper 2 works on this manifold through Stages II-IV.
    """

    chain: Chain

    @property
    def size(self) -> int:
        """2 d + 2."""
        return 2 * self.chain.vocabulary + 2

    def split(self, state: np.ndarray) -> RankOneState:
        """Views of a flat state [..., 2 d + 2]. Source: our layout, gamma | beta | q | k."""
        d = self.chain.vocabulary
        if state.shape[-1] != self.size:
            raise ValueError(f"RankOneFlow.split: state has {state.shape[-1]} entries; expected {self.size} for d = {d}.")
        return RankOneState(state[..., :d], state[..., d : 2 * d], state[..., -2], state[..., -1])

    def near_saddle(self, init_scale: float) -> np.ndarray:
        """The second saddle with q = k sign(c) = init_scale, [2 d + 2]: on its unstable direction. Raises ValueError for init_scale
        <= 0. Source: Thm 3.4."""
        checks.positive("RankOneFlow.near_saddle", init_scale=init_scale)
        gamma, beta = saddle_profiles(self.chain.stationary)
        sign = 1.0 if focus_rate(self.chain) >= 0 else -1.0
        return np.concatenate([gamma, beta, [init_scale, sign * init_scale]])

    def pattern(self, state: np.ndarray) -> np.ndarray:
        """Attention, [..., query, key]: A_ij prop. to pi_j e^{q k gamma_i gamma_j}. Source: derived with the manifold."""
        gamma, _, q, k = self.split(state)
        scores = (q * k)[..., None, None] * gamma[..., :, None] * gamma[..., None, :] + np.log(self.chain.stationary)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return weights / weights.sum(axis=-1, keepdims=True)

    def loss(self, state: np.ndarray) -> np.ndarray:
        """Population loss, [...], nats. Source: `PopulationModel.loss` on the manifold."""
        gamma, beta, _, _ = self.split(state)
        mixed = (self.pattern(state) @ gamma[..., None])[..., 0]  # h = A gamma [..., query]
        logarithms = log_softmax(mixed[..., :, None] * beta[..., None, :], axis=-1)
        return -(self.chain.stationary[:, None] * self.chain.transition * logarithms).sum((-1, -2))

    def gradient(self, state: np.ndarray) -> np.ndarray:
        """Gradient of `loss`, [..., 2 d + 2]; complex states allowed. Source: derived in chapter p2_dilution."""
        gamma, beta, q, k = self.split(state)
        strength = (q * k)[..., None]
        pattern = self.pattern(state)  # [..., query, key]
        mixed = (pattern @ gamma[..., None])[..., 0]  # h [..., query]
        scores = mixed[..., :, None] * beta[..., None, :]
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        by_logits = self.chain.stationary[:, None] * (weights / weights.sum(axis=-1, keepdims=True) - self.chain.transition)  # G
        by_mixed = (by_logits @ beta[..., None])[..., 0]  # [..., query]
        by_scores = by_mixed[..., :, None] * pattern * (gamma[..., None, :] - mixed[..., :, None])  # dL/dPhi [..., query, key]
        left, right = (by_scores @ gamma[..., None])[..., 0], (_transpose(by_scores) @ gamma[..., None])[..., 0]
        joint = (gamma * left).sum(-1)  # gamma^T (dL/dPhi) gamma
        by_gamma = (_transpose(pattern) @ by_mixed[..., None])[..., 0] + strength * (left + right)
        by_beta = (_transpose(by_logits) @ mixed[..., None])[..., 0]
        return np.concatenate([by_gamma, by_beta, (k * joint)[..., None], (q * joint)[..., None]], axis=-1)

    @cached_property
    def twins(self) -> np.ndarray:
        """Averaging over tokens that the chain cannot tell apart, [size, size] projection; the identity if there are none.

        Two tokens are twins if swapping them changes neither P nor pi. The exact flow keeps twins equal; rounding does not where the
        symmetric point is a saddle, and would then pick a winner that depends on the machine. Source: ours.
        """
        pi, P, d = self.chain.stationary, self.chain.transition, self.chain.vocabulary
        leader = np.arange(d)
        for j in range(1, d):
            for i in np.unique(leader[:j][np.abs(pi[:j] - pi[j]) < TWIN]):
                swapped = np.arange(d)
                swapped[[i, j]] = j, i
                if np.abs(P[np.ix_(swapped, swapped)] - P).max() < TWIN:
                    leader[j] = i
                    break
        same = (leader[:, None] == leader).astype(float)
        average = same / same.sum(-1, keepdims=True)
        return block_diag(average, average, np.eye(2))

    def embed(self, state: np.ndarray, model: PopulationModel, direction: np.ndarray, attention: np.ndarray) -> np.ndarray:
        """The full parameters of a state.

        Args:
            state: [2 d + 2].
            model: population model of the same chain.
            direction, attention: [width], unit vectors a and w.

        Returns:
            [size of the model].

        Source: definition of the manifold.
        """
        gamma, beta, q, k = self.split(state)
        mode = np.outer(direction, attention)
        return model.join(np.outer(gamma, direction), np.outer(direction, beta), q * mode, k * mode)

    def project(self, model: PopulationModel, parameters: np.ndarray) -> np.ndarray:
        """The state of the manifold nearest to full parameters that have condensed: what `embed` would have had to be given.

        a is the leading right singular vector of the embedding (its sign makes token 0 positive), w points along
        W_Q^T a + W_K^T a, the half of attention that grows for c > 0. What the parameters have outside is dropped.

        Args:
            model: population model of the same chain.
            parameters: [..., size of the model].

        Returns:
            [..., 2 d + 2].

        Source: Thm 3.4 (selected mode); used in chapter p2_dilution to predict a full run from one of its moments.
        """
        weights = model.split(parameters)
        a = np.linalg.svd(weights.embedding, full_matrices=False)[2][..., :1, :]  # [..., 1, width]
        a = a * np.sign((weights.embedding[..., :1, :] * a).sum(-1, keepdims=True))
        by_query, by_key = a @ weights.W_Q, a @ weights.W_K  # [..., 1, width]
        w = (by_query + by_key) / np.linalg.norm(by_query + by_key, axis=-1, keepdims=True)
        strengths = [(side * w).sum(-1) for side in (by_query, by_key)]
        return np.concatenate([(weights.embedding @ _transpose(a))[..., 0], (a @ weights.unembedding)[..., 0, :], *strengths], axis=-1)

    def integrate(
        self, state: np.ndarray, t_end: float, *, times=None, held: tuple[str, ...] = (), rtol: float = 1e-11, atol: float = 1e-13
    ):
        """Flow from a state; few variables, so scipy's stiff-aware LSODA reaches very long times cheaply.

        A start in which twins are equal (see `twins`) stays so exactly, as in exact arithmetic.

        Args:
            state: [2 d + 2].
            t_end: > 0.
            times: [time] samples; None = only the end.
            held: parts of the state (gamma, beta, q, k) that stay as they are: what would happen if training could not move them?

        Returns:
            (times [time], states [time, 2 d + 2]).

        Raises:
            ValueError: t_end <= 0, an unknown part, or the integrator gave up (its message is passed on).

        Source: gradient flow on the manifold.
        """
        checks.positive("RankOneFlow.integrate", t_end=t_end)
        free = np.ones(self.size)
        for name in held:
            checks.one_of("RankOneFlow.integrate", RankOneState._fields, held=name)
            getattr(self.split(free), name)[...] = 0
        sample = np.array([float(t_end)]) if times is None else np.asarray(times, dtype=float)
        twins = self.twins
        keep = twins if np.abs(twins @ state - state).max() <= TWIN * np.abs(state).max() else np.eye(self.size)
        run = solve_ivp(
            lambda _, y: -free * (keep @ self.gradient(y)), (0, t_end), state, method="LSODA", rtol=rtol, atol=atol, t_eval=sample
        )
        if not run.success:
            raise ValueError(f"RankOneFlow.integrate: stopped at t = {run.t[-1] if run.t.size else 0:g} of {t_end:g}: {run.message}")
        return run.t, run.y.T


# ------------------------------------------------------------------------------------------------------------- Stage IV: a new direction


@dataclass(frozen=True, eq=False)
class Plateau:
    """A critical point on the rank-one manifold, reached by the flow from the second saddle.

    Attributes:
        flow: the reduced flow it belongs to.
        state: [2 d + 2].
        gradient_norm: norm of the reduced gradient there.
    """

    flow: RankOneFlow
    state: np.ndarray
    gradient_norm: float

    @property
    def loss(self) -> float:
        """Level of the plateau, nats."""
        return float(self.flow.loss(self.state))

    @property
    def strength(self) -> float:
        """s = q k."""
        return float(self.state[-2] * self.state[-1])

    @property
    def pattern(self) -> np.ndarray:
        """Attention there, [query, key]."""
        return self.flow.pattern(self.state)

    @property
    def mixed(self) -> np.ndarray:
        """h = A gamma, what each query reads, [query]."""
        return self.pattern @ self.flow.split(self.state).gamma

    @property
    def logit_gradient(self) -> np.ndarray:
        """dL/dM = A^T G, [key, token]: what a second direction would reduce."""
        chain, beta = self.flow.chain, self.flow.split(self.state).beta
        by_logits = chain.stationary[:, None] * (softmax(np.outer(self.mixed, beta), axis=-1) - chain.transition)
        return self.pattern.T @ by_logits

    @property
    def escape_rates(self) -> np.ndarray:
        """Singular values of dL/dM, largest first, [token]: the rates nu at which further directions grow, each m - 1 times in the
        Hessian."""
        return np.linalg.svd(self.logit_gradient, compute_uv=False)


def rank_one_plateau(chain: Chain, *, init_scale: float = 1e-3, t_end: float = 1e6, tolerance: float = 1e-11) -> Plateau:
    """Where the rank-one flow from the second saddle comes to rest, polished by Newton steps.

    Critical points form a curve (attention and embedding can trade), so the flow, not the loss alone, says which point is meant. Tokens
    that the chain cannot tell apart stay equal here even where that is a saddle: read `symmetry_ratio` before calling the point stable.

    Args:
        chain: one chain with c != 0.
        init_scale: q at the start; the end point hardly depends on it once small.
        t_end: time after which the search gives up.
        tolerance: on the gradient's norm.

    Returns:
        Plateau.

    Raises:
        ValueError: uniform pi, c = 0 or so small that t_end is too early, or not at rest at t_end.

    Source: paper 2, Thm 3.9; derived in chapter p2_new_direction.
    """
    if np.abs(focus_rate(chain)) < UNIFORM:
        raise ValueError(
            "rank_one_plateau: focus rate c = 0, so the flow never leaves the second saddle;"
            " expected a chain whose rows depend on the token."
        )
    flow = RankOneFlow(chain)
    state = flow.near_saddle(init_scale)
    leave = 4 * np.log(1 / init_scale) / np.abs(focus_rate(chain))  # past the exponential start, where the gradient is small too
    if leave > t_end:
        raise ValueError(
            f"rank_one_plateau: leaving the second saddle at c = {focus_rate(chain):.3g} takes t = {leave:.3g}; raise t_end = {t_end:g}."
        )
    _, states = flow.integrate(state, float(leave))
    state, elapsed = states[-1], float(leave)
    while np.linalg.norm(flow.gradient(state)) > 1e-7:
        if elapsed > t_end:
            raise ValueError(
                f"rank_one_plateau: gradient norm {np.linalg.norm(flow.gradient(state)):.3g} at t = {elapsed:g};"
                " expected rest. Raise t_end."
            )
        _, states = flow.integrate(state, elapsed)
        state, elapsed = states[-1], 2 * elapsed
    for _ in range(6):  # the smallest step that mends the gradient: flat directions (gauges, the curve) are left alone
        gradient = flow.gradient(state)
        if np.linalg.norm(gradient) < 1e-15:
            break
        values, vectors = np.linalg.eigh(hessian(flow, state))
        stiff = np.abs(values) > 1e-6
        state = state - flow.twins @ vectors[:, stiff] @ ((vectors[:, stiff].T @ gradient) / values[stiff])
    norm = float(np.linalg.norm(flow.gradient(state)))
    if norm > tolerance:
        raise ValueError(
            f"rank_one_plateau: gradient norm {norm:.3g} after polishing;"
            f" expected <= {tolerance:g}. The point is nearly degenerate (R near 1)."
        )
    return Plateau(flow, state, norm)


def twin_chain(pi_1: float, offsets, delta: float, stickiness: float) -> Chain:
    """Sticky chain with one frequent token and d - 1 nearly equal ones: pi_i = pi_0 + delta offsets_i, pi_0 = (1 - pi_1) / (d - 1).

    Args:
        pi_1: frequency of the first token.
        offsets: [d - 1], sum to 0.
        delta: how unequal; 0 = twins.
        stickiness: lambda.

    Returns:
        Chain.

    Raises:
        ValueError: offsets do not sum to 0, or the law is not positive.

    Source: paper 2, setting of Thm 3.9.
    """
    offsets = np.asarray(offsets, dtype=float)
    checks.in_open("twin_chain", 0, 1, pi_1=pi_1)
    if abs(offsets.sum()) > 1e-12:
        raise ValueError(f"twin_chain: offsets sum to {offsets.sum():g}; expected 0, so that pi sums to 1. Subtract their mean.")
    return sticky_chain(np.concatenate([[pi_1], (1 - pi_1) / len(offsets) + delta * offsets]), stickiness)


class SymmetricPlateau(NamedTuple):
    """Rank-one optimum among symmetric points, for equal low tokens: `loss` (nats), logit gaps `frequent` = log P_11/P_12 and `low`
    = log p_b/q."""

    loss: np.ndarray
    frequent: np.ndarray
    low: np.ndarray


def _symmetric(where: str, pi_1, vocabulary, stickiness):
    checks.at_least(where, 2, vocabulary=vocabulary)
    checks.in_open(where, 0, 1, stickiness=stickiness, pi_1=pi_1)
    pi_1, d, lam = (np.asarray(x, dtype=float) for x in (pi_1, vocabulary, stickiness))
    back = (1 - lam) * pi_1  # p_b, from a low token to the frequent one
    pi_0 = (1 - pi_1) / (d - 1)
    other = (1 - back) / (d - 1)  # q, the mean probability of a low token after a low token
    frequent = np.log((lam + back) / ((1 - lam) * pi_0))
    return pi_1, d, lam, back, pi_0, other, frequent, np.log(back / other)


def symmetric_plateau(pi_1, vocabulary, stickiness) -> SymmetricPlateau:
    """Closed form of the plateau for equal low tokens: the frequent row is learnt exactly, all low rows predict their common mean.

    L = pi_1 H(P_1) + (1 - pi_1) (-p_b log p_b - (1 - p_b) log q) with p_b = (1 - lambda) pi_1, q = (1 - p_b) / (d - 1).

    Args:
        pi_1, vocabulary, stickiness: numbers or arrays that broadcast; 0 < pi_1, stickiness < 1, vocabulary >= 2.

    Returns:
        SymmetricPlateau, entries [...].

    Raises:
        ValueError: out of range.

    Source: paper 2, Thm 3.9; derived in chapter p2_new_direction.
    """
    pi_1, d, lam, back, pi_0, other, frequent, low = _symmetric("symmetric_plateau", pi_1, vocabulary, stickiness)
    first = entr(lam + back) + (d - 1) * entr((1 - lam) * pi_0)
    return SymmetricPlateau(pi_1 * first + (1 - pi_1) * (entr(back) - (1 - back) * np.log(other)), frequent, low)


def symmetry_ratio(pi_1, vocabulary, stickiness) -> np.ndarray:
    """R: the symmetric plateau is stable within the rank-one manifold iff R > 1; below 1 twins part by themselves, without any delta.

    R = p_b (1 - p_b) (pi_1 (1 - lambda) g_1^2 + (1 - p_b) g_l^2) / lambda^2, with the logit gaps of `symmetric_plateau`. The
    criterion needs d >= 3 (with
    one low token there is nothing to part).

    Args:
        pi_1, vocabulary, stickiness: numbers or arrays that broadcast; vocabulary >= 3.

    Returns:
        [...], dimensionless.

    Raises:
        ValueError: out of range.

    Source: derived in chapter p2_new_direction; a condition that paper 2's Thm 3.9 does not state as reported to us.
    """
    checks.at_least("symmetry_ratio", 3, vocabulary=vocabulary)
    pi_1, _, lam, back, _, _, frequent, low = _symmetric("symmetry_ratio", pi_1, vocabulary, stickiness)
    return back * (1 - back) * (pi_1 * (1 - lam) * frequent**2 + (1 - back) * low**2) / lam**2


class _Twins(NamedTuple):
    """Numbers of a symmetric plateau that its stability and the prefactor of nu share."""

    pi_1: float
    pi_0: float
    lam: float
    back: float
    other: float
    rare: float  # P_12
    gap: float  # beta_1 - beta_2
    spread: float  # variance of gamma under a low row of attention
    strength: float
    h_1: float
    h_2: float


def _twins(where: str, plateau: Plateau) -> _Twins:
    chain = plateau.flow.chain
    pi = chain.stationary
    if len(pi) < 3 or np.ptp(pi[1:]) > UNIFORM:
        raise ValueError(f"{where}: low tokens have frequencies {pi[1:]}; expected at least two equal ones. Use twin_chain(..., delta=0).")
    gamma, beta, _, _ = plateau.flow.split(plateau.state)
    low = plateau.pattern[1]
    rare = float(chain.transition[0, 1])
    lam = 1 - rare / pi[1]
    return _Twins(
        pi_1=pi[0],
        pi_0=pi[1],
        lam=lam,
        back=(1 - lam) * pi[0],
        other=(1 - (1 - lam) * pi[0]) / (len(pi) - 1),
        rare=rare,
        gap=beta[0] - beta[1],
        spread=low @ gamma**2 - (low @ gamma) ** 2,
        strength=plateau.strength,
        h_1=plateau.mixed[0],
        h_2=plateau.mixed[1],
    )


def twin_block(plateau: Plateau) -> np.ndarray:
    """Hessian on (embedding, unembedding) of the low tokens when they part (changes that sum to 0): a 2 x 2 block, d - 2 times.

    Args:
        plateau: of a chain with equal low tokens.

    Returns:
        [2, 2]; its determinant has the sign of R - 1.

    Raises:
        ValueError: low tokens are not equal.

    Source: derived in chapter p2_new_direction.
    """
    t = _twins("twin_block", plateau)
    inner = t.pi_0 * (t.strength * t.spread) ** 2 * t.back * (1 - t.back) * t.gap**2
    outer = t.pi_1 * t.h_1**2 * t.rare + (1 - t.pi_1) * t.h_2**2 * t.other
    cross = t.lam * t.pi_0 * t.strength * t.spread
    return np.array([[inner, -cross], [-cross, outer]])


def escape_prefactor(plateau: Plateau, offsets) -> float:
    """nu / delta for nearly equal low tokens, pi_i = pi_0 + delta c_i: |f| |c|, from first-order perturbation of the symmetric plateau.

    Args:
        plateau: of the symmetric chain (delta = 0).
        offsets: [d - 1], c, sum 0.

    Returns:
        Limit of nu / delta, for the escape rate nu = |A^T G|_2; diverges as R -> 1.

    Raises:
        ValueError: low tokens not equal, offsets of wrong length or not summing to 0.

    Source: paper 2, Thm 3.9 (nu = Theta(delta)); prefactor derived in chapter p2_new_direction.
    """
    t = _twins("escape_prefactor", plateau)
    offsets = np.asarray(offsets, dtype=float)
    checks.shape("escape_prefactor", "offsets", offsets, (plateau.flow.chain.vocabulary - 1,))
    if abs(offsets.sum()) > 1e-12:
        raise ValueError(f"escape_prefactor: offsets sum to {offsets.sum():g}; expected 0. Subtract their mean.")
    gamma = plateau.flow.split(plateau.state).gamma
    first, low = plateau.pattern[0], plateau.pattern[1]  # [key]
    curvature = t.back * (1 - t.back) * t.gap**2
    drive = (1 - t.lam) * (t.pi_1 * t.h_1 + (1 - t.pi_1) * t.h_2) + t.lam * t.h_2
    stiffness = t.pi_1 * t.h_1**2 * t.rare + (1 - t.pi_1) * t.h_2**2 * t.other - t.pi_0 * t.lam**2 / curvature
    shift = drive / stiffness  # d beta_low = delta shift c
    f = first * t.pi_1 * (t.h_1 * t.rare * shift - (1 - t.lam))
    f += low * (-t.lam + (1 - t.pi_1) * (t.h_2 * t.other * shift - (1 - t.lam)))
    f -= t.pi_0 * t.lam**2 / curvature * shift * low * (gamma - t.h_2) / t.spread
    return float(np.linalg.norm(f) * np.linalg.norm(offsets))
