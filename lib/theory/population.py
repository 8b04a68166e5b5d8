"""The exact population of paper 1's clean data, its full matrices, and the scalars that describe them.

A sequence of class c shows m tokens of the class's pool and n common tokens; the query is a token of its own that names the class and is
not a key. Tokens are one-hot and have no position, so a sequence enters through its token *counts*: all of them are enumerated with
their probabilities, and loss and gradient are exact sums. The same code trains on sampled counts (`train(..., batch=)`).

Here `qk_circuit` = W_Q W_K^T is [query token, key token] and `ov_circuit` = W_V W_O is [key token, class], the transpose of the paper's
W_OV = W_O W_V. Keys come class by class, then the common tokens.

Lines (chapter p1_closed_form):  ov_circuit = mu_ov * S_OV,  qk_circuit = mu_qk * S_QK  with
S_OV[token of class c, output] = [output = c] - 1/M, and S_QK[query of class c, key] = 1 on the class's tokens, -b/|C| on common ones (0
where common columns are held).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, combinations_with_replacement
from math import comb, factorial, prod

import numpy as np

from lib import checks
from lib.theory.two_circuits import PARAMETRISATIONS, Setting

LARGEST = 200_000  # sequences that an enumeration may have
CHUNK = 64  # steps whose samples are drawn at once

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Population:
    """The clean data of paper 1, small enough to be enumerated.

    Args:
        classes: M.
        distinct: distinct slots in a sequence (m).
        common: common slots in a sequence (n).
        pool: distinct tokens of a class (b).
        common_pool: common tokens (|C|).
        queries: query tokens of a class (Q), equally likely.
        replacement: whether slots are drawn with replacement from their pool.
        prior: class probabilities; None = uniform. They are normalised.

    Raises:
        ValueError: sizes that are no whole numbers >= 1 (2 classes), slots that outnumber their pool without replacement, a prior of the
            wrong length or not positive.
    """

    classes: int = 3
    distinct: int = 2
    common: int = 3
    pool: int = 4
    common_pool: int = 5
    queries: int = 1
    replacement: bool = True
    prior: tuple[float, ...] | None = None

    def __post_init__(self):
        checks.integer_at_least("Population", 2, classes=self.classes)
        for name in ("distinct", "common", "pool", "common_pool", "queries"):
            checks.integer_at_least("Population", 1, **{name: getattr(self, name)})
        for slots, size in ((self.distinct, self.pool), (self.common, self.common_pool)):
            if not self.replacement and slots > size:
                raise ValueError(
                    f"Population: {slots} slots from {size} tokens without replacement; enlarge the pool or allow replacement."
                )
        if self.prior is not None:
            if len(self.prior) != self.classes:
                raise ValueError(f"Population: prior has {len(self.prior)} entries; expected one for each of {self.classes} classes.")
            checks.positive("Population", prior=self.prior)

    @property
    def keys(self) -> int:
        """Key tokens in all, M b + |C|."""
        return self.classes * self.pool + self.common_pool

    def setting(self, held: bool = False) -> Setting:
        """The sizes as the closed forms take them; `held` = the scores of common tokens stay at zero."""
        common_pool = None if held else self.common_pool
        return Setting(self.classes, self.distinct, self.common, self.pool, self.queries, common_pool)

    @cached_property
    def class_weights(self) -> np.ndarray:
        """Class probabilities, [class]."""
        raw = np.ones(self.classes) if self.prior is None else np.asarray(self.prior, float)
        return raw / raw.sum()

    @cached_property
    def local_keys(self) -> np.ndarray:
        """Tokens that a class's sequences can show: its own pool, then the common ones; [class, local key]."""
        own = np.arange(self.classes * self.pool).reshape(self.classes, self.pool)
        shared = np.broadcast_to(np.arange(self.classes * self.pool, self.keys), (self.classes, self.common_pool))
        return np.concatenate([own, shared], 1)

    @cached_property
    def sequences(self) -> tuple[np.ndarray, np.ndarray]:
        """Counts of the local keys, [sequence, local key], and probabilities within the class, [sequence]."""
        return _enumerated(self.distinct, self.common, self.pool, self.common_pool, self.replacement)

    def sample(self, seed: int, size: tuple[int, ...]) -> np.ndarray:
        """Counts of sequences drawn afresh, [*size, local key]; the law is that of `sequences`.

        Raises:
            ValueError: a population without replacement, which is not offered here.
        """
        return self._draw(np.random.default_rng([seed, 3]), size)

    def _draw(self, rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
        if not self.replacement:
            raise ValueError("Population.sample: replacement = False; expected True. Use the exact population (batch=None) instead.")
        pools = ((self.distinct, self.pool), (self.common, self.common_pool))
        return np.concatenate([rng.multinomial(slots, np.full(tokens, 1.0 / tokens), size) for slots, tokens in pools], -1).astype(float)

    @cached_property
    def ov_line(self) -> np.ndarray:
        """S_OV, [key, class]; zero on common keys."""
        own = np.repeat(np.eye(self.classes) - 1.0 / self.classes, self.pool, axis=0)
        return np.concatenate([own, np.zeros((self.common_pool, self.classes))])

    def qk_columns(self, held: bool = False) -> np.ndarray:
        """For each class the keys its queries learn to tell apart, [key, class]: 1 on its own pool, -b/|C| on common keys (0 if held)."""
        own = np.repeat(np.eye(self.classes), self.pool, axis=0)
        shared = np.full((self.common_pool, self.classes), 0.0 if held else -self.pool / self.common_pool)
        return np.concatenate([own, shared])

    def qk_line(self, mu_uniform: float, mu_centred: float | None = None, held: bool = False) -> np.ndarray:
        """The query-key circuit of the line (one scalar) or of the plane (two: class-uniform and centred part), [query, key]."""
        mu_centred = mu_uniform if mu_centred is None else mu_centred
        flat = np.full((self.classes, self.classes), 1.0 / self.classes)
        mixed = mu_uniform * flat + mu_centred * (np.eye(self.classes) - flat)
        return np.repeat(mixed @ self.qk_columns(held).T, self.queries, axis=0)


def _enumerated(m: int, n: int, b: int, size: int, replacement: bool) -> tuple[np.ndarray, np.ndarray]:
    number = comb(b + m - 1, m) * comb(size + n - 1, n) if replacement else comb(b, m) * comb(size, n)
    if number > LARGEST:
        raise ValueError(f"Population: {number} sequences a class; expected at most {LARGEST}. Make the pools or slots smaller, or sample.")

    def part(slots, tokens):
        draw = combinations_with_replacement if replacement else combinations
        counts = np.array([np.bincount(chosen, minlength=tokens) for chosen in draw(range(tokens), slots)])
        ways = np.array([factorial(slots) / prod(map(factorial, map(int, row))) for row in counts])
        return counts, ways / ways.sum()

    (own, p), (shared, w) = part(m, b), part(n, size)
    counts = np.concatenate([np.repeat(own, len(shared), 0), np.tile(shared, (len(own), 1))], 1)
    return counts.astype(float), np.outer(p, w).ravel()


# --- full matrices ------------------------------------------------------------------------------------------------------------------


def circuits(weights: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(qk_circuit [..., query, key], ov_circuit [..., key, class]) of weights in any parametrisation."""
    qk = weights["W_QK"] if "W_QK" in weights else weights["W_Q"] @ weights["W_K"].mT
    ov = weights["W_OV"] if "W_OV" in weights else weights["W_V"] @ weights["W_O"]
    return qk, ov


def _forward(population: Population, counts: np.ndarray, qk: np.ndarray, ov: np.ndarray):
    """Attention [..., class, query, sequence, local key], output rows [..., class, 1, local key, class], logits, per-sequence losses."""
    M, Q, keys = population.classes, population.queries, population.local_keys
    rows = qk.reshape(*qk.shape[:-2], M, Q, qk.shape[-1])
    scores = rows[..., np.arange(M)[:, None, None], np.arange(Q)[None, :, None], keys[:, None, :]]  # [..., class, query, local key]
    weight = np.exp(scores - scores.max(-1, keepdims=True))[..., None, :] * counts[..., None, :, :]
    attention = weight / weight.sum(-1, keepdims=True)
    values = ov[..., keys, :][..., None, :, :]  # [..., class, 1, local key, output]
    logits = attention @ values
    top = logits.max(-1, keepdims=True)
    log_norm = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
    own = np.eye(M)[:, None, None, :]
    losses = (log_norm - (logits * own).sum(-1, keepdims=True))[..., 0]
    return attention, values, np.exp(logits - log_norm) - own, losses


def _weighted(population: Population, counts: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Counts [..., class, sequence, local key] and their weights [class, 1, sequence]; the whole population where none are given."""
    if counts is None:
        counts, within = population.sequences
        counts = np.broadcast_to(counts, (population.classes, *counts.shape))
    else:
        within = np.full(counts.shape[-2], 1.0 / counts.shape[-2])
    return counts, population.class_weights[:, None, None] * within / population.queries


def loss_and_gradients(
    population: Population,
    qk: np.ndarray,
    ov: np.ndarray,
    counts: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cross-entropy and its gradients with respect to both circuits.

    Args:
        population: whose sequences, class weights and query tokens are meant.
        qk: [..., query, key].
        ov: [..., key, class].
        counts: [..., class, sequence, local key] of equally weighted sampled sequences; None = the whole population, exactly.

    Returns:
        loss [...], nats; gradient of qk [..., query, key]; gradient of ov [..., key, class].

    Raises:
        ValueError: shapes that do not fit the population.
    """
    M, Q, b, K = population.classes, population.queries, population.pool, population.keys
    checks.shape("loss_and_gradients", "qk", qk, (*qk.shape[:-2], M * Q, K))
    checks.shape("loss_and_gradients", "ov", ov, (*ov.shape[:-2], K, M))
    counts, share = _weighted(population, counts)
    attention, values, error, losses = _forward(population, counts, qk, ov)
    loss = (losses * share).sum((-3, -2, -1))
    error = error * share[..., None]  # [..., class, query, sequence, output]
    d_values = (attention.mT @ error).sum(-3)  # [..., class, local key, output]
    d_attention = error @ values.mT
    d_scores = attention * (d_attention - (attention * d_attention).sum(-1, keepdims=True))
    d_scores = d_scores.sum(-2)  # [..., class, query, local key]
    lead = loss.shape
    d_ov = np.concatenate([d_values[..., :b, :].reshape(*lead, M * b, M), d_values[..., b:, :].sum(-3)], -2)
    d_qk = np.zeros((*lead, M, Q, K))
    d_qk[..., np.arange(M)[:, None, None], np.arange(Q)[None, :, None], population.local_keys[:, None, :]] = d_scores
    return loss, d_qk.reshape(*lead, M * Q, K), d_ov


def gradients(
    population: Population, weights: Mapping[str, np.ndarray], held: bool = False, counts: np.ndarray | None = None
) -> tuple[np.ndarray, Weights]:
    """Loss and the gradient of every tensor in `weights` (chain rule through the factors).

    Args:
        population: the data.
        weights: W_QK or W_Q [query, h] and W_K [key, h]; W_OV or W_V [key, h] and W_O [h, class]; leading axes allowed.
        held: hold the scores of common keys at zero, as the published scalar equations do.
        counts: as in `loss_and_gradients`.
    """
    qk, ov = circuits(weights)
    if held:
        qk = np.concatenate([qk[..., : -population.common_pool], np.zeros_like(qk[..., -population.common_pool :])], -1)
    loss, d_qk, d_ov = loss_and_gradients(population, qk, ov, counts)
    if held:
        d_qk[..., -population.common_pool :] = 0.0
    out: Weights = {}
    if "W_QK" in weights:
        out["W_QK"] = d_qk
    else:
        out["W_Q"], out["W_K"] = d_qk @ weights["W_K"], d_qk.mT @ weights["W_Q"]
    if "W_OV" in weights:
        out["W_OV"] = d_ov
    else:
        out["W_V"], out["W_O"] = d_ov @ weights["W_O"].mT, weights["W_V"].mT @ d_ov
    return loss, out


def mean_attention(population: Population, qk: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """Attention on the distinct slots together, averaged over the population (or over sampled counts); [...], dimensionless."""
    counts, share = _weighted(population, counts)
    attention = _forward(population, counts, qk, np.zeros((population.keys, population.classes)))[0]
    return (attention[..., : population.pool].sum(-1) * share).sum((-3, -2, -1))


# --- starts -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Factors:
    """The two scalars of a factorised circuit, and how often their product occurs in it (once if aligned, twice from eps * identity)."""

    first: float
    second: float
    copies: int = 1


@dataclass(frozen=True)
class Beginning:
    """A start on the line: full matrices and the scalars that belong to them.

    `ov` is a number (collapsed) or Factors; `qk` likewise, the same for the class-uniform and the centred part.
    """

    parametrisation: str
    weights: Weights
    ov: float | Factors
    qk: float | Factors


def zero_start(population: Population) -> Beginning:
    """Both collapsed matrices at zero (CACO)."""
    M, Q, K = population.classes, population.queries, population.keys
    return Beginning("CACO", {"W_QK": np.zeros((M * Q, K)), "W_OV": np.zeros((K, M))}, 0.0, 0.0)


def aligned_start(
    population: Population,
    parametrisation: str,
    ov: tuple[float, float] = (0.1, 0.1),
    qk: tuple[float, float] = (0.1, 0.1),
    held: bool = False,
    seed: int = 0,
) -> Beginning:
    """Factors along the line's own singular directions, seen through a random rotation of the hidden space; collapsed circuits at zero.

    Args:
        population: the data.
        parametrisation: one of PARAMETRISATIONS.
        ov: singular values (a, c) of W_V and W_O; equal = balanced.
        qk: singular values of W_Q and W_K.
        held: whether common columns are held (it decides the directions of W_K).
        seed: of the rotation.

    Raises:
        ValueError: unknown parametrisation, singular values <= 0.
    """
    checks.one_of("aligned_start", PARAMETRISATIONS, parametrisation=parametrisation)
    checks.positive("aligned_start", ov=ov, qk=qk)
    M, Q, b = population.classes, population.queries, population.pool
    rng = np.random.default_rng(seed)
    weights = dict(zero_start(population).weights)
    begin_ov: float | Factors = 0.0
    begin_qk: float | Factors = 0.0
    if parametrisation[0] == "F":
        rotation = np.linalg.qr(rng.normal(size=(M + 2, M)))[0].T  # [class, hidden], orthonormal rows
        flat = np.full((M, M), 1.0 / M)
        uniform, centred = _qk_norms(population, held)
        columns = population.qk_columns(held)
        asks = np.repeat(np.eye(M), Q, axis=0) / np.sqrt(Q)  # [query, class]
        del weights["W_QK"]
        weights["W_Q"] = qk[0] * asks @ rotation
        weights["W_K"] = qk[1] * (columns @ flat / uniform + columns @ (np.eye(M) - flat) / centred) @ rotation
        begin_qk = Factors(*qk)
    if parametrisation[2] == "F":
        rotation = np.linalg.qr(rng.normal(size=(M + 1, M)))[0].T
        del weights["W_OV"]
        weights["W_V"] = ov[0] * population.ov_line @ rotation / np.sqrt(b)
        weights["W_O"] = ov[1] * rotation.T @ (np.eye(M) - 1.0 / M)
        begin_ov = Factors(*ov)
    return Beginning(parametrisation, weights, begin_ov, begin_qk)


def identity_start(population: Population, parametrisation: str, eps: float) -> Beginning:
    """The published start: every factor eps * identity on the whole vocabulary (keys, query tokens, label tokens); collapsed at zero.

    Only the rows that are ever used are kept: keys of W_V and W_K, query tokens of W_Q, label columns of W_O.
    """
    checks.one_of("identity_start", PARAMETRISATIONS, parametrisation=parametrisation)
    checks.positive("identity_start", eps=eps)
    M, Q, K = population.classes, population.queries, population.keys
    vocabulary = eps * np.eye(K + M * Q + M)
    weights = dict(zero_start(population).weights)
    begin_ov: float | Factors = 0.0
    begin_qk: float | Factors = 0.0
    if parametrisation[0] == "F":
        del weights["W_QK"]
        weights["W_Q"], weights["W_K"] = vocabulary[K : K + M * Q].copy(), vocabulary[:K].copy()
        begin_qk = Factors(eps, 0.0, copies=2)
    if parametrisation[2] == "F":
        del weights["W_OV"]
        weights["W_V"], weights["W_O"] = vocabulary[:K].copy(), vocabulary[:, K + M * Q :].copy()
        begin_ov = Factors(eps, 0.0, copies=2)
    return Beginning(parametrisation, weights, begin_ov, begin_qk)


def random_start(population: Population, scale: float, seeds: int, ratios: int = 1) -> Weights:
    """Collapsed matrices with independent normal entries of a standard deviation, [ratio, seed, ...]; the same for all ratios."""
    checks.at_least("random_start", 0.0, scale=scale)
    checks.integer_at_least("random_start", 1, seeds=seeds, ratios=ratios)
    shapes = {"W_QK": (population.classes * population.queries, population.keys), "W_OV": (population.keys, population.classes)}
    draws = [np.random.default_rng([seed, 1]) for seed in range(seeds)]
    return {
        name: np.broadcast_to(np.stack([scale * rng.normal(size=shape) for rng in draws]), (ratios, seeds, *shape)).copy()
        for name, shape in shapes.items()
    }


def tilted_start(population: Population, scale: float, seed: int = 0, ratio: float = 1.0) -> Weights:
    """Collapsed matrices at zero but for the common tokens, where each class has favourites that vote for it: off the line, by `scale`.

    Args:
        population: the data.
        scale: standard deviation of the entries of W_OV on common tokens.
        seed: which favourites.
        ratio: eta_qk/eta_ov of the training to come; sets the entries of W_QK so that only the growing direction is excited.
    """
    checks.positive("tilted_start", scale=scale, ratio=ratio)
    votes = np.random.default_rng([seed, 4]).normal(size=(population.common_pool, population.classes))
    votes = scale * (votes - votes.mean(0) - votes.mean(1, keepdims=True) + votes.mean())
    weights = zero_start(population).weights
    first = population.classes * population.pool
    weights["W_OV"][first:] = votes
    weights["W_QK"][:, first:] = np.repeat(np.sqrt(ratio / population.queries) * votes.T, population.queries, axis=0)
    return weights


def favourites(population: Population, ov: np.ndarray) -> np.ndarray:
    """Size of the class-specific votes of common tokens, [...]: Frobenius norm of their block of ov_circuit, its token mean removed."""
    block = ov[..., population.classes * population.pool :, :]
    return np.linalg.norm(block - block.mean(-2, keepdims=True), axis=(-2, -1))


def _qk_norms(population: Population, held: bool) -> tuple[float, float]:
    """Norms of the class-uniform and of a centred combination of `qk_columns`: sqrt(b + M b^2/|C|) and sqrt(b)."""
    b = population.pool
    extra = 0.0 if held else population.classes * b * b / population.common_pool
    return float(np.sqrt(b + extra)), float(np.sqrt(b))


# --- training -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What a training recorded.

    Attributes:
        step: [record].
        qk: [record, ..., query, key].
        ov: [record, ..., key, class].
        loss: [record, ...] of the whole population, nats.
        alpha: [record, ...] attention on the distinct slots, mean over the population.
    """

    step: np.ndarray
    qk: np.ndarray
    ov: np.ndarray
    loss: np.ndarray
    alpha: np.ndarray


def train(
    population: Population,
    weights: Mapping[str, np.ndarray],
    *,
    eta_ov: float,
    eta_qk: float | np.ndarray,
    steps: int,
    held: bool = False,
    batch: int | None = None,
    seeds: int = 0,
    record_at: np.ndarray | None = None,
    test: np.ndarray | None = None,
) -> Run:
    """Plain gradient descent on the full matrices; on the exact population, or on fresh samples.

    Args:
        population: the data.
        weights: where to start; not changed. With samples: [ratio, seed, ...].
        eta_ov: learning rate of W_OV, W_V, W_O.
        eta_qk: learning rate of W_QK, W_Q, W_K; a number, or one for each entry of the first axis.
        steps: how many.
        held: hold the scores of common keys at zero.
        batch: None = exact gradient; else sequences of each class drawn afresh at each step. The arms of a comparison (first axis) see
            the same sequences.
        seeds: length of the seed axis when sampling; seed i has a data stream of its own.
        record_at: steps to record (0 = start); None = only the last.
        test: counts [class, sequence, local key] on which loss and attention are recorded; None = the whole population.

    Raises:
        ValueError: rates <= 0, steps or batch < 1.
        FloatingPointError: the loss is no longer finite, with the step.
    """
    checks.positive("train", eta_ov=eta_ov, eta_qk=eta_qk)
    checks.integer_at_least("train", 1, steps=steps)
    if batch is not None:
        checks.integer_at_least("train", 1, batch=batch, seeds=seeds)
    rate_qk = np.asarray(eta_qk, float)
    rate_qk = rate_qk.reshape(-1, 1, 1, 1) if rate_qk.ndim else rate_qk
    rate = {name: rate_qk if name in ("W_QK", "W_Q", "W_K") else eta_ov for name in weights}
    current = {name: np.array(value, float) for name, value in weights.items()}
    wanted = set(np.asarray([steps] if record_at is None else record_at, int).tolist())
    samples = _stream(population, batch, seeds) if batch is not None else None
    records: list[tuple] = []
    for step in range(steps + 1):
        if step in wanted:
            qk, ov = circuits(current)
            exact = loss_and_gradients(population, qk, ov, test)[0]
            records.append((step, qk.copy(), ov.copy(), exact, mean_attention(population, qk, test)))
            if not np.all(np.isfinite(exact)):
                raise FloatingPointError(f"train: the loss is not finite at step {step}; lower eta_qk = {eta_qk!r} or eta_ov = {eta_ov!r}.")
        if step < steps:
            slopes = gradients(population, current, held, next(samples) if samples is not None else None)[1]
            for name, slope in slopes.items():
                current[name] -= rate[name] * slope
    return Run(*(np.stack([np.asarray(one) for one in part]) for part in zip(*records, strict=True)))


def _stream(population: Population, batch: int, seeds: int):
    """Fresh counts at each step, [seed, class, batch, local key]; each seed has its own generator."""
    draws = [np.random.default_rng([seed, 2]) for seed in range(seeds)]
    while True:
        yield from np.stack([population._draw(rng, (CHUNK, population.classes, batch)) for rng in draws], 1)


@dataclass(frozen=True)
class ScalarRun:
    """Scalars after each step of gradient descent, [step] (step 0 = start)."""

    mu_ov: np.ndarray
    mu_uniform: np.ndarray
    mu_centred: np.ndarray
    gap: np.ndarray
    loss: np.ndarray


def scalar_recursion(
    population: Population, beginning: Beginning, *, eta_ov: float, eta_qk: float, steps: int, held: bool = False
) -> ScalarRun:
    """What gradient descent does to the scalars: no matrix in sight.

    One scalar for the output circuit; for the query-key circuit two, of the class-uniform and of the centred part of the line, which differ
    only where the circuit is factorised and its common columns move.

    Source: derived in chapter p1_closed_form.
    """
    checks.positive("scalar_recursion", eta_ov=eta_ov, eta_qk=eta_qk)
    checks.integer_at_least("scalar_recursion", 1, steps=steps)
    M, b, Q = population.classes, population.pool, population.queries
    odds = population.distinct / population.common
    leak = 0.0 if held else b / population.common_pool
    norms = np.array(_qk_norms(population, held)) * np.sqrt(Q)  # singular values of the two parts
    ov, qk = beginning.ov, beginning.qk
    v_pair = np.array([ov.first, ov.second]) if isinstance(ov, Factors) else None
    q_pairs = np.array([[qk.first, qk.second]] * 2) if isinstance(qk, Factors) else None
    v = 0.0 if isinstance(ov, Factors) else ov
    mu = np.zeros(2) if isinstance(qk, Factors) else np.full(2, qk)
    rows = np.empty((steps + 1, 5))
    for step in range(steps + 1):
        if v_pair is not None:
            v = ov.copies * v_pair.prod() / np.sqrt(b)  # type: ignore[union-attr]
        if q_pairs is not None:
            mu = qk.copies * q_pairs.prod(1) / norms  # type: ignore[union-attr]
        gap = mu[0] * (1.0 / M + leak) + mu[1] * (1.0 - 1.0 / M)
        alpha = 1.0 / (1.0 + np.exp(-gap) / odds)
        full = np.exp(alpha * v) + M - 1.0
        rows[step] = v, mu[0], mu[1], gap, np.log1p((M - 1.0) * np.exp(-alpha * v))
        drive_ov = alpha / (b * full)
        drive_qk = (M - 1.0) * alpha * (1.0 - alpha) * v / (M * b * Q * full)
        if v_pair is not None:
            v_pair = v_pair + eta_ov * np.sqrt(b) * drive_ov * v_pair[::-1]
        else:
            v = v + eta_ov * drive_ov
        if q_pairs is not None:
            q_pairs = q_pairs + eta_qk * drive_qk * norms[:, None] * q_pairs[:, ::-1]
        else:
            mu = mu + eta_qk * drive_qk
    return ScalarRun(*rows.T)


@dataclass(frozen=True)
class Comparison:
    """Full matrices against scalars: largest absolute differences over all steps, and the training itself.

    Attributes:
        ov, qk, loss: largest absolute difference of an entry of ov_circuit, of qk_circuit, of the loss.
        off_line_qk: share of the final qk_circuit that is not on the single line.
        final_alpha: attention on the distinct slots at the end.
        losses: of the full matrices, [step], nats.
        scalars: what the scalars did.
    """

    ov: float
    qk: float
    loss: float
    off_line_qk: float
    final_alpha: float
    losses: np.ndarray
    scalars: ScalarRun

    @property
    def final_loss(self) -> float:
        """Loss of the full matrices after the last step, nats."""
        return float(self.losses[-1])

    @property
    def deviation(self) -> float:
        """The largest of the three differences."""
        return max(self.ov, self.qk, self.loss)


def compare(population: Population, beginning: Beginning, *, eta_ov: float, eta_qk: float, steps: int, held: bool = False) -> Comparison:
    """Train full matrices and scalars side by side and say how far apart they ever were.

    The prediction is a matrix: every entry of both circuits counts, at every step. With `held`, entries of common columns are not compared,
    since their scores are not theirs.
    """
    scalars = scalar_recursion(population, beginning, eta_ov=eta_ov, eta_qk=eta_qk, steps=steps, held=held)
    weights = {name: value.copy() for name, value in beginning.weights.items()}
    used = population.keys - (population.common_pool if held else 0)
    worst, losses = np.zeros(3), np.empty(steps + 1)
    for step in range(steps + 1):
        qk, ov = circuits(weights)
        loss, slopes = gradients(population, weights, held)
        losses[step] = loss
        line = population.qk_line(scalars.mu_uniform[step], scalars.mu_centred[step], held)
        apart = (
            np.abs(ov - scalars.mu_ov[step] * population.ov_line).max(),
            np.abs(qk - line)[:, :used].max(),
            abs(loss - scalars.loss[step]),
        )
        worst = np.maximum(worst, apart)
        if step < steps:
            for name, slope in slopes.items():
                weights[name] -= (eta_qk if name in ("W_QK", "W_Q", "W_K") else eta_ov) * slope
    off = off_line(qk[:, :used], population.qk_line(1.0, held=held)[:, :used])
    seen = np.where(np.arange(population.keys) < used, qk, 0.0)
    return Comparison(float(worst[0]), float(worst[1]), float(worst[2]), off, float(mean_attention(population, seen)), losses, scalars)


def off_line(matrix: np.ndarray, direction: np.ndarray) -> float:
    """Share of a matrix that is not along a direction: |W - <W, S> S/|S|^2| / |W|, Frobenius norms; in [0, 1]."""
    size = float(np.linalg.norm(matrix))
    if size == 0:
        raise ValueError("off_line: the matrix is zero; it has no direction yet.")
    along = float((matrix * direction).sum() / (direction * direction).sum())
    return float(np.linalg.norm(matrix - along * direction)) / size
