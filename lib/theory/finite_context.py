"""Contexts of finite length: what the population model leaves out, exactly and to first order in one over the length.

The layer has no positions, so a context acts through how often each type occurs and through its last token. That makes a sum over
contexts a sum over *counts*: `every_context` lists all of them with their probabilities, and `FiniteModel` is the population model with
these counts in place of pi. No sampling enters unless the contexts are sampled.

Symbols, ours -> the paper's: `length` -> s, `counts` -> n; the others as in `lib.theory.markov`.
"""

from dataclasses import dataclass
from functools import cached_property
from math import comb

import numpy as np
from scipy.special import log_softmax, softmax

from lib import checks
from lib.theory.markov import Chain, PopulationModel, _softmax

LARGEST = 12_000_000  # cells that an enumeration may have


@dataclass(frozen=True, eq=False)
class Contexts:
    """Contexts as far as a layer without positions can tell them apart.

    Attributes:
        counts: [context, key], occurrences of each type, the last token's own included.
        query: [context], type of the last token; it occurs, so its count is at least 1.
        outcome: [context, token], law of the next token: one-hot where one was seen, or the chain's own row.
        weight: [context], >= 0, sums to 1.
    """

    counts: np.ndarray
    query: np.ndarray
    outcome: np.ndarray
    weight: np.ndarray

    @property
    def length(self) -> int:
        """Tokens in a context (paper's s)."""
        return int(self.counts[0].sum())


def counted(tokens, following, vocabulary: int) -> Contexts:
    """Sampled contexts, counted: those that a layer without positions cannot tell apart become one, with the shares of what followed.

    Args:
        tokens: [sequence, position], ids; the last position is the query.
        following: [sequence], ids of the next tokens.
        vocabulary: d.

    Returns:
        Contexts, one per distinct pair of counts and query, weighted by how many sequences share it.

    Raises:
        ValueError: an id outside 0 ... d - 1, or shapes that do not fit.

    Source: counts in place of positions, derived in chapter p2_population.
    """
    tokens, following = np.asarray(tokens), np.asarray(following)
    checks.shape("counted", "tokens", tokens, (None, None))
    checks.shape("counted", "following", following, (len(tokens),))
    checks.in_closed("counted", 0, vocabulary - 1, tokens=tokens, following=following)
    counts = (tokens[..., None] == np.arange(vocabulary)).sum(-2)  # [sequence, key]
    keys, group = np.unique(np.column_stack([counts, tokens[:, -1]]), axis=0, return_inverse=True)
    outcome = np.zeros((len(keys), vocabulary))
    np.add.at(outcome, (group.ravel(), following), 1.0)
    size = outcome.sum(-1)
    return Contexts(keys[:, :-1], keys[:, -1], outcome / size[:, None], size / size.sum())


def every_context(chain: Chain, length: int, start=None) -> Contexts:
    """All contexts of a length with their exact probabilities, by a recursion over the length.

    Args:
        chain: one chain, without leading axes.
        length: s >= 1.
        start: [token], law of the first token; None = uniform, as in paper 2.

    Returns:
        Contexts; `outcome` is the chain's row of the query, so that the next token is averaged over as well.

    Raises:
        ValueError: leading axes, a start that is no law, or more contexts than fit (about length^(d - 1)).

    Source: derived in chapter p2_population.
    """
    where, d = "every_context", chain.vocabulary
    if chain.stationary.ndim != 1:
        raise ValueError(f"{where}: chain has leading axes {chain.stationary.shape[:-1]}; expected one chain.")
    checks.integer_at_least(where, 1, length=length)
    if (length + 1) ** (d - 1) * d > LARGEST:
        raise ValueError(
            f"{where}: length = {length} with d = {d} gives {comb(length + d - 1, d - 1):,} counts in a table of"
            f" {(length + 1) ** (d - 1) * d:,} cells; expected at most {LARGEST:,}. Shorten the contexts or sample them."
        )
    law = np.full(d, 1 / d) if start is None else np.asarray(start, dtype=float)
    checks.shape(where, "start", law, (d,))
    checks.rows_sum_to_one(where, law)
    table = np.zeros((length + 1,) * (d - 1) + (d,))  # [count of type 0, ..., of type d - 2, last token]; the last count is the rest
    shift = np.eye(d, d - 1, dtype=int)  # how a token moves the table's index
    for j in range(d):
        table[(*shift[j].tolist(), j)] = law[j]
    for t in range(1, length):
        old = table[(slice(0, t + 1),) * (d - 1)]
        arriving = old @ chain.transition  # [..., next token]
        table = np.zeros_like(table)
        for j in range(d):
            place: tuple = (*(slice(k, t + 1 + k) for k in shift[j].tolist()), j)
            table[place] += arriving[..., j]
    index = np.argwhere(table > 0)
    counts = np.column_stack([index[:, :-1], length - index[:, :-1].sum(-1)])
    query = index[:, -1]
    return Contexts(counts, query, chain.transition[query], table[tuple(index.T)])


@dataclass(frozen=True, eq=False)
class FiniteModel(PopulationModel):
    """The layer on contexts of finite length: loss and gradient are averages over given contexts, everything else is inherited.

    `pattern` and `logits` stay those of an unbounded context, so that runs with different lengths can be compared;
    a trajectory's loss is the finite one.

    Attributes:
        contexts: see `Contexts`.

    Source: paper 2's model before its limit; derived in chapter p2_population.
    """

    contexts: Contexts

    @cached_property
    def _log_counts(self) -> np.ndarray:
        counts = self.contexts.counts
        return np.log(counts, where=counts > 0, out=np.full(counts.shape, -np.inf))  # absent: no weight, whatever the score

    @cached_property
    def _by_query(self) -> np.ndarray:
        """[query type, context], adds up what contexts with the same query contribute."""
        return (self.contexts.query == np.arange(self.chain.vocabulary)[:, None]).astype(float)

    def context_pattern(self, parameters: np.ndarray) -> np.ndarray:
        """Attention over types in every context, [..., context, key]. Source: A_ij prop. to n_j e^{Phi_ij}, chapter p2_population."""
        return _softmax(self.attention_scores(parameters)[..., self.contexts.query, :] + self._log_counts)

    def query_pattern(self, parameters: np.ndarray) -> np.ndarray:
        """Attention given the query, averaged over its contexts, [..., query, key]. Source: ours; every type must be a query."""
        total = self._by_query @ (self.contexts.weight[:, None] * self.context_pattern(parameters))
        return total / (self._by_query @ self.contexts.weight)[:, None]

    def loss(self, parameters: np.ndarray) -> np.ndarray:
        """Average cross-entropy over the contexts, [...], nats. Source: paper 2."""
        w = self.split(parameters)
        logits = self.context_pattern(parameters) @ w.embedding @ w.unembedding  # [..., context, token]
        return -(self.contexts.weight[:, None] * self.contexts.outcome * log_softmax(logits, axis=-1)).sum((-1, -2))

    def query_loss(self, parameters: np.ndarray) -> np.ndarray:
        """Average cross-entropy given the query, [..., query], nats. Source: as `loss`; every type must occur as a query."""
        w = self.split(parameters)
        logits = self.context_pattern(parameters) @ w.embedding @ w.unembedding
        each = -(self.contexts.outcome * log_softmax(logits, axis=-1)).sum(-1)  # [..., context]
        return (each * self.contexts.weight) @ self._by_query.T / (self._by_query @ self.contexts.weight)

    def gradient(self, parameters: np.ndarray) -> np.ndarray:
        """Exact gradient of `loss`, [..., size]. Source: `PopulationModel.gradient` with one row a context; chapter p2_population."""
        W_E, W_U, W_Q, W_K = self.split(parameters)
        pattern = self.context_pattern(parameters)  # [..., context, key]
        mixed = pattern @ W_E  # [..., context, width]
        by_logits = self.contexts.weight[:, None] * (_softmax(mixed @ W_U) - self.contexts.outcome)  # [..., context, token]
        by_mixed = by_logits @ W_U.swapaxes(-1, -2)  # [..., context, width]
        by_pattern = pattern * (by_mixed @ W_E.swapaxes(-1, -2))
        by_scores = self._by_query @ (by_pattern - pattern * by_pattern.sum(-1, keepdims=True))  # dL/dPhi [..., query, key]
        by_query, by_key = by_scores @ W_E @ W_K, by_scores.swapaxes(-1, -2) @ W_E @ W_Q  # [..., token, width]
        transposed = W_E.swapaxes(-1, -2)
        return self.join(
            pattern.swapaxes(-1, -2) @ by_mixed + by_query @ W_Q.swapaxes(-1, -2) + by_key @ W_K.swapaxes(-1, -2),
            mixed.swapaxes(-1, -2) @ by_logits,
            transposed @ by_query,
            transposed @ by_key,
        )


def length_law(model: PopulationModel, parameters: np.ndarray, start=None) -> np.ndarray:
    """K_i of the expansion L_s = L + K/s + O(1/s^2), per query; K = sum_i pi_i K_i.

    With frequencies nu = n / s, s E[nu - pi | last token i] tends to m_i (the first and the last token are known to be special) and
    s Cov(nu) to C (frequencies scatter), and the loss is expanded to second order in nu - pi.

    Args:
        model: population model of one chain.
        parameters: [size].
        start: [token], law of the first token; None = uniform.

    Returns:
        [query], nats times tokens.

    Raises:
        ValueError: leading axes, or a start that is no law.

    Source: derived in chapter p2_population (fundamental matrix of a Markov chain; delta method).
    """
    chain, d = model.chain, model.chain.vocabulary
    checks.shape("length_law", "parameters", parameters, (model.size,))
    law = np.full(d, 1 / d) if start is None else np.asarray(start, dtype=float)
    checks.shape("length_law", "start", law, (d,))
    checks.rows_sum_to_one("length_law", law)
    pi, P = chain.stationary, chain.transition
    reversed_P = P.T * pi / pi[:, None]  # the chain read backwards from the query
    excess = [np.linalg.inv(np.eye(d) - T + pi) - pi for T in (P, reversed_P)]  # sum over t >= 0 of T^t - 1 pi^T
    shift = law @ excess[0] + excess[1]  # m_i [query, key]
    spread = pi[:, None] * excess[0]
    spread = spread + spread.T - np.diag(pi) + np.outer(pi, pi)  # C [key, key]
    w = model.split(parameters)
    pattern = model.pattern(parameters)
    ratio = pattern / pi  # [query, key]
    M = w.embedding @ w.unembedding  # [key, token]
    probability = softmax(pattern @ M, axis=-1)
    out = np.empty(d)
    for i, (a, r, p, m) in enumerate(zip(pattern, ratio, probability, shift, strict=True)):
        moved = r * m - a * (r @ m) - r * (spread @ r) + a * (r @ spread @ r)  # s E[change of the pattern]
        turn = (np.diag(r) - np.outer(a, r)).T @ M  # d logits / d frequencies [key, token]
        out[i] = (p - P[i]) @ (moved @ M) + 0.5 * np.trace((np.diag(p) - np.outer(p, p)) @ turn.T @ spread @ turn)
    return out
