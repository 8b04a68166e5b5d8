"""The synthetic law of paper 1: who may appear where, how often, and that counts lose nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.data.two_pools import TwoPools, token_counts

PRIMES = TwoPools(classes=3, pool=7, common_pool=11, distinct_slots=2, common_slots=5, queries=2)


def test_ids_are_three_blocks_that_fill_the_vocabulary():
    ids = np.concatenate([PRIMES.distinct_ids.ravel(), PRIMES.common_ids, PRIMES.query_ids.ravel()])
    assert np.array_equal(ids, np.arange(PRIMES.vocabulary))
    assert PRIMES.vocabulary == 3 * 7 + 11 + 3 * 2


def test_default_is_the_published_scale_and_b_is_not_the_length():
    law = TwoPools()
    assert (law.classes, law.pool, law.distinct_slots, law.common_slots) == (20, 50, 5, 50)
    assert law.length == 55 != law.pool
    assert law.uniform_mass == pytest.approx(1 / 11)


@settings(max_examples=25, deadline=None)
@given(
    classes=st.integers(2, 5),
    pool=st.integers(3, 7),
    common=st.integers(3, 7),
    m=st.integers(1, 3),
    n=st.integers(1, 3),
    queries=st.integers(1, 3),
    replacement=st.booleans(),
    seed=st.integers(0, 999),
)
def test_a_sequence_shows_m_distinct_tokens_of_its_own_class_and_n_common_ones(classes, pool, common, m, n, queries, replacement, seed):
    law = TwoPools(classes, pool, common, m, n, queries, replacement)
    sample = law.sample(17, seed)
    distinct = law.is_distinct(sample.tokens)
    assert np.array_equal(distinct.sum(1), np.full(17, m))
    assert np.isin(sample.tokens[~distinct], law.common_ids).all()
    owner = sample.tokens // pool
    assert (owner == sample.label[:, None])[distinct].all()
    assert all(q in law.query_ids[c] for q, c in zip(sample.query, sample.label, strict=True))
    if not replacement:
        assert token_counts(sample.tokens, law.vocabulary).max() == 1


def test_every_kind_of_token_is_uniform_in_its_pool():
    sample = PRIMES.sample(20_000, seed=1)
    counts = token_counts(sample.tokens, PRIMES.vocabulary).sum(0)
    common = counts[PRIMES.common_ids] / (20_000 * 5 / 11)
    distinct = counts[PRIMES.distinct_ids] / (20_000 * 2 / (3 * 7))
    assert np.abs(common - 1).max() < 0.05  # five standard deviations of 9091 occurrences
    assert np.abs(distinct - 1).max() < 0.11  # and of 1905
    assert np.abs(np.bincount(sample.label) / 20_000 - 1 / 3).max() < 0.02
    assert np.abs(np.bincount(sample.query)[PRIMES.query_ids] / 20_000 - 1 / 6).max() < 0.015


def test_slots_come_in_random_order():
    where = PRIMES.is_distinct(PRIMES.sample(5_000, seed=2).tokens).mean(0)
    assert np.abs(where - 2 / 7).max() < 0.04


def test_equal_seeds_give_equal_batches_and_others_do_not():
    first, again, other = PRIMES.sample(9, 4), PRIMES.sample(9, 4), PRIMES.sample(9, 5)
    assert np.array_equal(first.tokens, again.tokens)
    assert np.array_equal(first.query, again.query)
    assert not np.array_equal(first.tokens, other.tokens)


def test_every_sequence_is_there_once():
    law = TwoPools(classes=3, pool=4, common_pool=5, distinct_slots=2, common_slots=3, queries=2, replacement=False)
    everything = law.every_sequence()
    assert len(everything.label) == 3 * 2 * 6 * 10
    rows = {(q, *t) for q, t in zip(everything.query.tolist(), everything.tokens.tolist(), strict=True)}
    assert len(rows) == len(everything.label)
    drawn = law.sample(300, 0)
    seen = {(q, *sorted(t)) for q, t in zip(drawn.query.tolist(), drawn.tokens.tolist(), strict=True)}
    assert seen <= rows
    assert np.array_equal(law.is_distinct(everything.tokens).sum(1), np.full(len(everything.label), 2))
    counts = token_counts(everything.tokens, law.vocabulary)
    assert np.ptp(counts[:, law.common_ids].sum(0)) == 0
    for c in range(3):
        own = counts[everything.label == c][:, law.distinct_ids]
        assert np.ptp(own[:, c].sum(0)) == 0
        assert own.sum() == own[:, c].sum()


def test_enumeration_refuses_what_is_not_uniform_or_too_large():
    with pytest.raises(ValueError, match="expected replacement=False"):
        PRIMES.every_sequence()
    with pytest.raises(ValueError, match=r"every_sequence: \d+ sequences; expected at most 100000"):
        TwoPools(replacement=False).every_sequence()


def test_counts_by_hand():
    assert token_counts(np.array([[0, 2, 2], [1, 1, 1]]), 4).tolist() == [[1, 0, 2, 0], [0, 3, 0, 0]]


def test_counts_do_not_see_the_order():
    tokens = PRIMES.sample(13, 6).tokens
    assert np.array_equal(token_counts(tokens, PRIMES.vocabulary), token_counts(tokens[:, ::-1], PRIMES.vocabulary))
    assert (token_counts(tokens.reshape(13, 1, 7), PRIMES.vocabulary).sum(-1) == 7).all()


@pytest.mark.parametrize("name", ["pool", "common_pool", "distinct_slots", "common_slots", "queries"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_sizes_below_one_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"TwoPools: {name} = .*expected a whole number >= 1"):
        TwoPools(**{name: value})


def test_other_bad_input_is_refused():
    with pytest.raises(ValueError, match="classes = 1; expected a whole number >= 2"):
        TwoPools(classes=1)
    with pytest.raises(ValueError, match="8 distinct slots from a pool of 7 without replacement; expected at most 7"):
        TwoPools(3, 7, 11, 8, 5, replacement=False)
    with pytest.raises(ValueError, match="batch = 0"):
        PRIMES.sample(0, 1)
    with pytest.raises(ValueError, match="seed = -1"):
        PRIMES.sample(3, -1)
    with pytest.raises(ValueError, match="tokens = 4 at index"):
        token_counts(np.array([[0, 4]]), 4)
    with pytest.raises(ValueError, match="expected whole numbers"):
        token_counts(np.array([[0.5, 1.0]]), 4)
