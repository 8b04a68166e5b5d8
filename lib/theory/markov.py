"""The population model of paper 2: one softmax attention layer that reads Markov sequences of unbounded length.

A context enters the model only through how often each type occurs (there are no positions), and in the limit of long contexts these
frequencies are the stationary law pi. What remains is a d x d problem without sampling noise, with the exact gradient below.

Symbols, ours -> the paper's: `stationary` -> pi, `transition` -> P, `stickiness` -> lambda, `vocabulary` -> d, `width` -> m,
`embedding` -> W_0, `unembedding` -> W_1, `attention_scores` -> Phi, `pattern` -> A, `logits` -> Z, `init_scale` -> epsilon.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.special import entr, log_softmax

from lib import checks

SUM_TOLERANCE = 1e-9  # a law is given in float64, so anything larger is a mistake of the caller and not rounding


def _law(where: str, stationary) -> np.ndarray:
    """A strictly positive law over at least two tokens, [..., token]."""
    law = np.asarray(stationary, dtype=float)
    if law.ndim == 0 or law.shape[-1] < 2:
        raise ValueError(f"{where}: stationary has shape {law.shape}, so d < 2; expected [..., token] with d >= 2 tokens.")
    checks.positive(where, stationary=law)
    total = law.sum(-1)
    if np.any(np.abs(total - 1) > SUM_TOLERANCE):
        worst = total.flat[np.abs(total - 1).argmax()]
        raise ValueError(f"{where}: stationary sums to {worst:.10g}; expected 1. Divide it by its sum.")
    return law


@dataclass(frozen=True, eq=False)
class Chain:
    """A Markov chain with its stationary law; build it with `sticky_chain` or `general_chain`.

    Attributes:
        transition: [..., from, to], rows sum to 1 (paper's P).
        stationary: [..., token], strictly positive (paper's pi).
    """

    transition: np.ndarray
    stationary: np.ndarray

    @property
    def vocabulary(self) -> int:
        """Number of token types (paper's d)."""
        return self.stationary.shape[-1]

    @cached_property
    def uniform_level(self) -> np.ndarray:
        """Loss of the untrained model, log d (nats)."""
        return np.full(self.stationary.shape[:-1], np.log(self.vocabulary))[()]

    @cached_property
    def unigram_level(self) -> np.ndarray:
        """Loss of the best constant prediction, H(pi) (nats); the level of the second saddle."""
        return entr(self.stationary).sum(-1)

    @cached_property
    def floor(self) -> np.ndarray:
        """Smallest possible loss, sum_i pi_i H(P_i) (nats): every row of the chain is known."""
        return (self.stationary * entr(self.transition).sum(-1)).sum(-1)


def sticky_chain(stationary, stickiness) -> Chain:
    """The chain that repeats its token or draws a new one: P = lambda I + (1 - lambda) 1 pi^T.

    Args:
        stationary: [..., token], positive, sums to 1 (pi); stays stationary for every stickiness.
        stickiness: [...] (lambda), at most 1; negative = avoids repeating, down to the value at which some P_ii reaches 0.

    Returns:
        Chain; leading axes of both arguments broadcast.

    Raises:
        ValueError: pi has a zero or does not sum to 1, d < 2, lambda > 1, or some P_ii < 0.

    Source: paper 2, the data of its theory section.
    """
    where = "sticky_chain"
    law = _law(where, stationary)
    lam = np.asarray(stickiness, dtype=float)[..., None, None]
    checks.finite(where, stickiness=lam)
    if np.any(lam >= 1):
        raise ValueError(f"{where}: stickiness = {lam.max():g}; expected < 1, otherwise the chain never leaves its first token.")
    transition = lam * np.eye(law.shape[-1]) + (1 - lam) * law[..., None, :]  # [..., from, to]
    repeats = np.diagonal(transition, axis1=-2, axis2=-1)  # [..., token]
    if np.any(repeats < 0):
        index = tuple(int(i) for i in np.argwhere(repeats < 0)[0])
        lowest = float(np.max(-law.min(-1) / (1 - law.min(-1))))
        raise ValueError(
            f"{where}: P_ii = {repeats[index]:.6g} < 0 at index {index} for stickiness = {lam.min():g};"
            f" expected stickiness >= {lowest:.6g} for this law."
        )
    return Chain(transition, np.broadcast_to(law, transition.shape[:-1]).copy())


def general_chain(transition) -> Chain:
    """A chain given by its transition matrix; the stationary law is solved for.

    Args:
        transition: [..., from, to], entries >= 0, rows sum to 1.

    Returns:
        Chain with the unique stationary law.

    Raises:
        ValueError: not square, d < 2, an entry < 0, a row that does not sum to 1, or a stationary law that is not unique or has a zero.

    Source: standard; used where paper 2 says that P matters only through pi.
    """
    where = "general_chain"
    matrix = np.asarray(transition, dtype=float)
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.shape[-1] < 2:
        raise ValueError(f"{where}: transition has shape {matrix.shape}; expected [..., d, d] with d >= 2.")
    checks.at_least(where, 0, transition=matrix)
    sums = matrix.sum(-1)
    if np.any(np.abs(sums - 1) > SUM_TOLERANCE):
        index = tuple(int(i) for i in np.argwhere(np.abs(sums - 1) > SUM_TOLERANCE)[0])
        raise ValueError(
            f"{where}: transition is not stochastic, row {index} sums to {sums[index]:.10g}; expected 1. Divide rows by their sums."
        )
    d = matrix.shape[-1]
    balance = np.swapaxes(matrix, -1, -2) - np.eye(d)  # pi balance^T = 0
    if np.any(np.linalg.svd(balance, compute_uv=False)[..., -2] < 1e-12):
        raise ValueError(
            f"{where}: stationary law of this transition is not unique (the chain falls apart); give one closed class of tokens."
        )
    right = np.zeros(matrix.shape[:-1])
    right[..., -1] = 1
    balance[..., -1, :] = 1  # one balance equation follows from the others; the sum takes its place
    law = np.linalg.solve(balance, right[..., None])[..., 0]
    if np.any(law <= 1e-14):
        raise ValueError(
            f"{where}: the stationary law has {law.min():.3g} at token {int(law.argmin()) % d};"
            " drop tokens that the chain never returns to."
        )
    return Chain(matrix, law / law.sum(-1, keepdims=True))


def random_chain(stationary, seed: int, *, spread: float = 1.0) -> Chain:
    """A random chain with given frequencies: everything else about it is left to chance.

    The matrix of pair frequencies pi_i P_ij starts as exp(spread * Gaussian) and its rows and columns are scaled in turn until both sum
    to pi (Sinkhorn).

    Args:
        stationary: [token], positive, sums to 1.
        seed: of the pair frequencies.
        spread: standard deviation of their logarithms before scaling, >= 0; 0 = every row is pi.

    Returns:
        Chain; not reversible in general.

    Raises:
        ValueError: not a positive law over at least two tokens; spread < 0.

    Source: standard scaling; used in chapter p2_cycle to vary P at fixed pi.
    """
    where = "random_chain"
    law = _law(where, stationary)
    checks.shape(where, "stationary", law, (None,))
    checks.at_least(where, 0, spread=spread)
    pairs = np.exp(spread * np.random.default_rng(seed).standard_normal((len(law),) * 2))
    while np.abs(pairs.sum(-1) - law).max() > 1e-14:
        pairs *= (law / pairs.sum(-1))[:, None]
        pairs *= law / pairs.sum(0)
    return Chain(pairs / pairs.sum(-1, keepdims=True), law)


def counted_softmax(attention_scores, counts) -> np.ndarray:
    """Softmax over token types, each type taken as often as it occurs: A_ij = n_j e^{Phi_ij} / sum_l n_l e^{Phi_il}.

    The maximum is taken over the types that occur; an absent type may have any score and gets exactly 0.

    Args:
        attention_scores: [..., query, key], per type (not per position).
        counts: [..., key] broadcastable to the scores' last axis, >= 0 (occurrences, or frequencies such as pi).

    Returns:
        [..., query, key], rows sum to 1.

    Raises:
        ValueError: a negative or non-finite count, or no type with count > 0.

    Source: paper 2's model without positions; derived in chapter p2_population.
    """
    counts = np.asarray(counts, dtype=float)
    checks.at_least("counted_softmax", 0, counts=counts)
    if np.any(counts.sum(-1) == 0):
        raise ValueError("counted_softmax: counts are all 0; expected at least one token in the context.")
    present = counts[..., None, :] > 0
    with np.errstate(divide="ignore"):
        logarithms = np.log(counts)[..., None, :]
    scores = np.where(present, attention_scores + np.where(present, logarithms, 0), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


class Weights(NamedTuple):
    """The four matrices, as views into the flat parameter vector.

    embedding [..., token, width] (W_0), unembedding [..., width, token] (W_1), W_Q and W_K [..., width, width].
    """

    embedding: np.ndarray
    unembedding: np.ndarray
    W_Q: np.ndarray
    W_K: np.ndarray


class Invariants(NamedTuple):
    """Constants of the flow (C1, C2, C3).

    embedding_output [..., width, width] = W_0^T W_0 - W_1 W_1^T - W_Q W_Q^T - W_K W_K^T;
    query_key [..., width, width] = W_Q^T W_Q - W_K^T W_K; output_sum [..., width] = W_1 1.
    """

    embedding_output: np.ndarray
    query_key: np.ndarray
    output_sum: np.ndarray


def _softmax(scores: np.ndarray) -> np.ndarray:
    """Row softmax; also for complex input (complex-step derivatives), where max orders by the real part."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


@dataclass(frozen=True, eq=False)
class PopulationModel:
    """Loss and gradient of the attention layer on one chain, as functions of a flat parameter vector.

    The layer: a token is a row of `embedding`; the query is the last token; attention averages the embeddings of the context; the
    average is
    read out by `unembedding`. No residual stream, value matrix, bias, position or 1/sqrt(width).

    Attributes:
        chain: the data; leading axes broadcast against those of the parameters (one run per entry).
        width: m >= 1.

    Source: paper 2, population limit of its model (reconstructed; derived in chapter p2_population).
    """

    chain: Chain
    width: int

    def __post_init__(self) -> None:
        checks.integer_at_least("PopulationModel", 1, width=self.width)

    @property
    def size(self) -> int:
        """Number of parameters, 2 d m + 2 m^2."""
        return 2 * self.width * (self.chain.vocabulary + self.width)

    @cached_property
    def _log_stationary(self) -> np.ndarray:
        return np.log(self.chain.stationary)[..., None, :]  # [..., 1, key]

    @cached_property
    def _query_weight(self) -> np.ndarray:
        return self.chain.stationary[..., :, None]  # [..., query, 1]

    def split(self, parameters: np.ndarray) -> Weights:
        """Views of a flat vector.

        Args:
            parameters: [..., size].

        Returns:
            Weights; writing into them writes into `parameters`.

        Raises:
            ValueError: the last axis has another length than `size`.

        Source: our layout, embedding | unembedding | W_Q | W_K, each row by row.
        """
        d, m = self.chain.vocabulary, self.width
        if parameters.shape[-1] != self.size:
            raise ValueError(
                f"PopulationModel.split: parameters have {parameters.shape[-1]} entries; expected {self.size} for d = {d}, m = {m}."
            )
        lead, dm, mm = parameters.shape[:-1], d * m, m * m
        return Weights(
            parameters[..., :dm].reshape(*lead, d, m),
            parameters[..., dm : 2 * dm].reshape(*lead, m, d),
            parameters[..., 2 * dm : 2 * dm + mm].reshape(*lead, m, m),
            parameters[..., 2 * dm + mm :].reshape(*lead, m, m),
        )

    def join(self, embedding, unembedding, W_Q, W_K) -> np.ndarray:
        """The flat vector [..., size] of four matrices; inverse of `split`. Source: our layout."""
        parts = (embedding, unembedding, W_Q, W_K)
        return np.concatenate([np.reshape(p, (*np.shape(p)[:-2], -1)) for p in parts], axis=-1)

    def initial(self, init_scale: float, seed: int | Sequence[int]) -> np.ndarray:
        """Gaussian start: every entry N(0, init_scale^2).

        Args:
            init_scale: epsilon > 0, standard deviation.
            seed: one seed, or a sequence of seeds (each run has its own stream: the same whether drawn alone or in a batch).

        Returns:
            [size] for one seed, [seed, size] for several.

        Raises:
            ValueError: init_scale <= 0.

        Source: paper 2, small initialisation.
        """
        checks.positive("PopulationModel.initial", init_scale=init_scale)
        if np.ndim(seed) == 0:
            return init_scale * np.random.default_rng(seed).standard_normal(self.size)
        return np.stack([self.initial(init_scale, int(s)) for s in np.asarray(seed)])

    def attention_scores(self, parameters: np.ndarray) -> np.ndarray:
        """Scores per pair of types before the softmax, [..., query, key] (Phi = W_0 W_Q W_K^T W_0^T). Source: paper 2."""
        w = self.split(parameters)
        return (w.embedding @ w.W_Q) @ (w.embedding @ w.W_K).swapaxes(-1, -2)

    def pattern(self, parameters: np.ndarray) -> np.ndarray:
        """Attention of each query type over key types, [..., query, key], rows sum to 1 (A_ij prop. to pi_j e^{Phi_ij}). Source:
        paper 2."""
        return _softmax(self.attention_scores(parameters) + self._log_stationary)

    def logits(self, parameters: np.ndarray) -> np.ndarray:
        """Next-token logits per query type, [..., query, token] (Z = A W_0 W_1). Source: paper 2."""
        w = self.split(parameters)
        return self.pattern(parameters) @ w.embedding @ w.unembedding

    def loss(self, parameters: np.ndarray) -> np.ndarray:
        """Population cross-entropy in nats, [...]: L = - sum_i pi_i sum_k P_ik log softmax(Z_i)_k. Source: paper 2."""
        return -(self._query_weight * self.chain.transition * log_softmax(self.logits(parameters), axis=-1)).sum((-1, -2))

    def query_loss(self, parameters: np.ndarray) -> np.ndarray:
        """Cross-entropy given the query, [..., query], nats; `loss` is its average under pi. Source: paper 2."""
        return -(self.chain.transition * log_softmax(self.logits(parameters), axis=-1)).sum(-1)

    def gradient(self, parameters: np.ndarray) -> np.ndarray:
        """Exact gradient of `loss`.

        Args:
            parameters: [..., size]; complex values are allowed (the gradient is analytic), which `cycle.hessian` uses.

        Returns:
            [..., size].

        Source: chain rule through Z, A and Phi; derived in chapter p2_population.
        """
        W_E, W_U, W_Q, W_K = self.split(parameters)
        query, key = W_E @ W_Q, W_E @ W_K  # [..., token, width]
        pattern = _softmax(query @ key.swapaxes(-1, -2) + self._log_stationary)  # [..., query, key]
        mixed = pattern @ W_E  # [..., query, width]
        by_logits = self._query_weight * (_softmax(mixed @ W_U) - self.chain.transition)  # G = dL/dZ [..., query, token]
        by_mixed = by_logits @ W_U.swapaxes(-1, -2)  # [..., query, width]
        by_pattern = pattern * (by_mixed @ W_E.swapaxes(-1, -2))  # A o dL/dA [..., query, key]
        by_scores = by_pattern - pattern * by_pattern.sum(axis=-1, keepdims=True)  # dL/dPhi [..., query, key]
        by_query, by_key = by_scores @ key, by_scores.swapaxes(-1, -2) @ query  # [..., token, width]
        out = np.empty(np.broadcast_shapes(mixed.shape[:-2], parameters.shape[:-1]) + parameters.shape[-1:], parameters.dtype)
        grad = self.split(out)
        grad.embedding[...] = pattern.swapaxes(-1, -2) @ by_mixed + by_query @ W_Q.swapaxes(-1, -2) + by_key @ W_K.swapaxes(-1, -2)
        transposed = W_E.swapaxes(-1, -2)
        grad.unembedding[...] = mixed.swapaxes(-1, -2) @ by_logits
        grad.W_Q[...] = transposed @ by_query
        grad.W_K[...] = transposed @ by_key
        return out

    def logit_gradient(self, parameters: np.ndarray) -> np.ndarray:
        """Loss gradient with respect to the product W_0 W_1, [..., key, token] (dL/dM = A^T G). Source: derived with `gradient`."""
        probabilities = _softmax(self.logits(parameters))
        return self.pattern(parameters).swapaxes(-1, -2) @ (self._query_weight * (probabilities - self.chain.transition))

    def invariants(self, parameters: np.ndarray) -> Invariants:
        """What gradient flow keeps: any change along a flow is an error of the integrator.

        Args:
            parameters: [..., size].

        Returns:
            Invariants.

        Source: derived in chapter p2_population (symmetries between neighbouring factors, softmax shift).
        """
        w = self.split(parameters)
        gram = [x @ x.swapaxes(-1, -2) for x in (w.embedding.swapaxes(-1, -2), w.unembedding, w.W_Q, w.W_K)]  # [..., width, width]
        inner = w.W_Q.swapaxes(-1, -2) @ w.W_Q - w.W_K.swapaxes(-1, -2) @ w.W_K
        return Invariants(gram[0] - gram[1] - gram[2] - gram[3], inner, w.unembedding.sum(-1))

    def take(self, index) -> "PopulationModel":
        """The model of some of the runs: indexes the chain's leading axes, if it has any. Source: bookkeeping of `flow`."""
        if self.chain.stationary.ndim == 1:
            return self
        return PopulationModel(Chain(self.chain.transition[index], self.chain.stationary[index]), self.width)


class LowRankOptimum(NamedTuple):
    """Best logits of a given rank: `loss` (nats), `logits` [query, token] and the largest entry of the gradient where the search ended."""

    loss: float
    logits: np.ndarray
    gradient: float


def low_rank_optimum(chain: Chain, rank: int, *, starts: int = 4, seed: int = 0) -> LowRankOptimum:
    """Smallest population loss over logit matrices Z = h beta of a given rank; rank one is the level of the Stage III plateau.

    Attention and embedding together can reach any h, so the level needs no attention at all. The problem is not convex: the best of several
    L-BFGS searches is kept.

    Args:
        chain: one chain, without leading axes.
        rank: >= 1; from d - 1 on the optimum is the chain's floor.
        starts: number of random starts (one more starts from the factors of log P).
        seed: of the random starts.

    Returns:
        LowRankOptimum.

    Raises:
        ValueError: the chain has leading axes; rank or starts < 1.

    Source: paper 2, Thm 3.9 (level of the plateau); derived in chapter p2_new_direction.
    """
    if chain.stationary.ndim != 1:
        raise ValueError(f"low_rank_optimum: chain has leading axes {chain.stationary.shape[:-1]}; expected one chain. Loop over them.")
    checks.integer_at_least("low_rank_optimum", 1, rank=rank, starts=starts)
    d, weight = chain.vocabulary, chain.stationary[:, None]

    def objective(flat):
        left, right = flat[: d * rank].reshape(d, rank), flat[d * rank :].reshape(rank, d)
        logarithms = log_softmax(left @ right, axis=-1)
        by_logits = weight * (np.exp(logarithms) - chain.transition)
        value = -(weight * chain.transition * logarithms).sum()
        return value, np.concatenate([(by_logits @ right.T).ravel(), (left.T @ by_logits).ravel()])

    logarithms = np.log(np.maximum(chain.transition, 1e-6))  # only a start, so forbidden transitions may be merely rare
    u, s, v = np.linalg.svd(np.sqrt(weight) * (logarithms - logarithms.mean(-1, keepdims=True)))
    rng = np.random.default_rng(seed)
    guesses = [np.concatenate([(u[:, :rank] * s[:rank] / np.sqrt(weight)).ravel(), v[:rank].ravel()])]
    guesses += [rng.standard_normal(2 * d * rank) for _ in range(starts)]
    options = {"maxiter": 20_000, "maxfun": 40_000, "ftol": 0, "gtol": 1e-10, "maxcor": 30}
    best = min((minimize(objective, g, jac=True, method="L-BFGS-B", options=options) for g in guesses), key=lambda r: r.fun)
    logits = best.x[: d * rank].reshape(d, rank) @ best.x[d * rank :].reshape(rank, d)
    return LowRankOptimum(float(best.fun), logits, float(np.abs(best.jac).max()))
