"""The synthetic world of paper 1: tokens that tell the class, and tokens that tell nothing.

Each class owns a *pool* of b distinct tokens; one more pool holds the common tokens. A sequence of class c shows m tokens drawn
from the class's pool and n drawn from the common pool. The query is a token of its own that names the class but is not a key:
it can only be used to decide where to look.

| ours | paper 1 | meaning |
|---|---|---|
| `classes` | M | number of classes, equally likely |
| `pool` | b | distinct tokens that a class *owns* (not the length of a sequence) |
| `common_pool` | size of C | common tokens there are |
| `distinct_slots`, `common_slots` | m, n | tokens of each kind that a sequence *shows* |
| `uniform_mass` | alpha_0 | m/(m+n), attention on distinct tokens when all keys look alike |

Token ids in order: the distinct pools class by class, the common pool, the query tokens class by class.

Deviation: in the published synthetic runs the query and label tokens also occur as common keys (P1-F2-*); here the query is kept
apart, as the theory assumes.
"""

from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np

from lib import checks

LARGEST = 100_000  # sequences that an enumeration may have


@dataclass(frozen=True, eq=False)
class Sample:
    """A batch of sequences.

    Attributes:
        tokens: [batch, key] ids of the m + n keys, in random order.
        query: [batch] ids of the query tokens.
        label: [batch] classes.
    """

    tokens: np.ndarray
    query: np.ndarray
    label: np.ndarray


@dataclass(frozen=True)
class TwoPools:
    """Paper 1, law of the synthetic data: distinct and common tokens.

    Args:
        classes: M, at least 2.
        pool: b, distinct tokens per class.
        common_pool: number of common tokens.
        distinct_slots: m, distinct tokens a sequence shows.
        common_slots: n, common tokens a sequence shows.
        queries: query tokens per class.
        replacement: whether a sequence may show a token twice. Without, the slots can't outnumber their pool.

    Raises:
        ValueError: sizes below 1 (2 classes), or more slots than tokens where `replacement` is False.
    """

    classes: int = 20
    pool: int = 50
    common_pool: int = 50
    distinct_slots: int = 5
    common_slots: int = 50
    queries: int = 1
    replacement: bool = True

    def __post_init__(self):
        checks.integer_at_least("TwoPools", 2, classes=self.classes)
        checks.integer_at_least("TwoPools", 1, pool=self.pool, common_pool=self.common_pool, distinct_slots=self.distinct_slots,
                                common_slots=self.common_slots, queries=self.queries)  # fmt: skip
        for slots, size, name in ((self.distinct_slots, self.pool, "distinct"), (self.common_slots, self.common_pool, "common")):
            if not self.replacement and slots > size:
                raise ValueError(
                    f"TwoPools: {slots} {name} slots from a pool of {size} without replacement; expected at most {size}. Enlarge the pool."
                )

    @property
    def vocabulary(self) -> int:
        """Number of token ids, query tokens included."""
        return self.classes * (self.pool + self.queries) + self.common_pool

    @property
    def length(self) -> int:
        """Keys of a sequence, m + n."""
        return self.distinct_slots + self.common_slots

    @property
    def uniform_mass(self) -> float:
        """Mass on distinct tokens when attention is uniform, m/(m+n); paper 1's alpha_0."""
        return self.distinct_slots / self.length

    @property
    def distinct_ids(self) -> np.ndarray:
        """Ids of the distinct tokens, [class, pool]."""
        return np.arange(self.classes * self.pool).reshape(self.classes, self.pool)

    @property
    def common_ids(self) -> np.ndarray:
        """Ids of the common tokens, [common_pool]."""
        return self.classes * self.pool + np.arange(self.common_pool)

    @property
    def query_ids(self) -> np.ndarray:
        """Ids of the query tokens, [class, query]; never keys, so they can also serve as label tokens."""
        start = self.classes * self.pool + self.common_pool
        return start + np.arange(self.classes * self.queries).reshape(self.classes, self.queries)

    def is_distinct(self, tokens: np.ndarray) -> np.ndarray:
        """Which tokens are distinct ones, bool in the shape of `tokens`. In a sequence they are all of its own class."""
        return np.asarray(tokens) < self.classes * self.pool

    def sample(self, batch: int, seed: int) -> Sample:
        """Draw sequences: class uniform, each kind of slot from its pool, slots in random order.

        Args:
            batch: number of sequences.
            seed: of this batch; equal seeds give equal batches.

        Returns:
            Sample.

        Raises:
            ValueError: batch < 1 or a negative seed.

        Source: paper 1, synthetic data (with the query kept out of the keys).
        """
        checks.integer_at_least("sample", 1, batch=batch)
        checks.integer_at_least("sample", 0, seed=seed)
        random = np.random.default_rng([seed, 3])
        label = random.integers(self.classes, size=batch)
        query = self.query_ids[label, random.integers(self.queries, size=batch)]
        distinct = label[:, None] * self.pool + self._slots(random, batch, self.pool, self.distinct_slots)
        common = self.common_ids[self._slots(random, batch, self.common_pool, self.common_slots)]
        tokens = random.permuted(np.concatenate([distinct, common], axis=1), axis=1)
        return Sample(tokens, query, label)

    def every_sequence(self) -> Sample:
        """All sequences there are, each once and all equally likely: a mean over them is the exact expectation.

        Only without replacement, where sequences with the same tokens in another order are one.

        Returns:
            Sample; tokens of a sequence are in increasing order.

        Raises:
            ValueError: a law with replacement (its sequences are not equally likely up to order), or more than 100,000 sequences.

        Source: derived in chapter p1_two_circuits.
        """
        if self.replacement:
            raise ValueError("every_sequence: the law draws with replacement; expected replacement=False. Sample instead.")
        total = self.classes * self.queries * comb(self.pool, self.distinct_slots) * comb(self.common_pool, self.common_slots)
        if total > LARGEST:
            raise ValueError(f"every_sequence: {total} sequences; expected at most {LARGEST}. Take smaller pools, or sample.")
        distinct, common = (
            np.array(list(combinations(range(pool), slots)))
            for pool, slots in ((self.pool, self.distinct_slots), (self.common_pool, self.common_slots))
        )
        label, asked, d, c = (x.ravel() for x in np.indices((self.classes, self.queries, len(distinct), len(common))))
        tokens = np.concatenate([self.distinct_ids[label[:, None], distinct[d]], self.common_ids[common[c]]], axis=1)
        return Sample(tokens, self.query_ids[label, asked], label)

    def _slots(self, random: np.random.Generator, batch: int, pool: int, slots: int) -> np.ndarray:
        """Indices into a pool, [batch, slot]."""
        if self.replacement:
            return random.integers(pool, size=(batch, slots))
        return random.permuted(np.tile(np.arange(pool), (batch, 1)), axis=1)[:, :slots]


def token_counts(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """How often each token of the vocabulary occurs in each sequence.

    Without positions these numbers are all that the model can see of a sequence: an exact sufficient statistic.

    Args:
        tokens: [..., key] ids.
        vocabulary: number of ids.

    Returns:
        [..., vocabulary] whole numbers; a row sums to the number of keys.

    Raises:
        ValueError: ids that are not whole or outside the vocabulary.

    Source: derived in chapter p1_two_circuits.
    """
    checks.integer_at_least("token_counts", 1, vocabulary=vocabulary)
    tokens = np.asarray(tokens)
    if tokens.dtype.kind not in "iu" or tokens.ndim == 0:
        raise ValueError(f"token_counts: tokens of dtype {tokens.dtype} and shape {tokens.shape}; expected whole numbers [..., key].")
    checks.in_closed("token_counts", 0, vocabulary - 1, tokens=tokens)
    flat = tokens.reshape(-1, tokens.shape[-1])
    rows = np.arange(len(flat))[:, None] * vocabulary
    counts = np.bincount((flat + rows).ravel(), minlength=len(flat) * vocabulary)
    return counts.reshape(*tokens.shape[:-1], vocabulary)
