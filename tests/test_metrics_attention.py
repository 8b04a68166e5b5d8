"""Attention metrics against values worked out by hand, their bounds, and what they refuse."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.metrics import attention
from lib.metrics.equal_loss import at_loss


def patterns(seed, *shape):
    return np.random.default_rng(seed).dirichlet(np.ones(shape[-1]), shape[:-1])


def test_attention_mass_of_two_keys_with_scores_0_and_ln_3():
    scores = np.array([0.0, np.log(3)])
    pattern = (np.exp(scores) / np.exp(scores).sum())[None, None]  # 1/4, 3/4
    np.testing.assert_allclose(attention.attention_mass(pattern, np.array([False, True])), [0.75])


def test_attention_mass_reads_the_query_that_is_asked_for():
    pattern = patterns(0, 2, 3, 5, 7)  # [batch, head, query, key]
    mask = np.zeros((2, 7), dtype=bool)
    mask[0, [1, 4]], mask[1, 6] = True, True
    for query in (0, 2, -1):
        want = np.stack([pattern[0, :, query, [1, 4]].sum(0), pattern[1, :, query, 6]])
        np.testing.assert_allclose(attention.attention_mass(pattern, mask, query=query), want)


@given(st.integers(1, 12), st.integers(0, 2**12 - 1))
@settings(max_examples=40, deadline=None)
def test_attention_mass_of_uniform_pattern_is_marked_fraction_and_equals_the_floor(keys, bits):
    mask = np.array([bits >> i & 1 for i in range(keys)], dtype=bool)
    if not mask.any():
        mask[0] = True
    mass = attention.attention_mass(np.full((3, 1, keys), 1 / keys), mask)
    np.testing.assert_allclose(mass, mask.mean())
    np.testing.assert_allclose(attention.uniform_floor(mask, keys), mask.mean())


def test_attention_mass_is_nan_without_marked_keys_and_not_zero():
    pattern, mask = patterns(1, 2, 3, 1, 5), np.array([[False] * 5, [True, False, False, False, True]])
    mass = attention.attention_mass(pattern, mask)
    assert np.isnan(mass[0]).all()
    assert np.isfinite(mass[1]).all()
    assert np.isnan(attention.uniform_floor(mask, np.array([5, 5]))).tolist() == [True, False]


def test_attention_mass_takes_torch_tensors():
    torch = pytest.importorskip("torch")
    mass = attention.attention_mass(torch.full((1, 3, 4), 0.25), torch.tensor([True, True, False, False]))
    np.testing.assert_allclose(mass, [0.5])


@pytest.mark.parametrize(
    "pattern, mask, query, message",
    [
        (np.full((1, 1, 2, 4), 0.21), [True] * 4, -1, r"row \[0, 0, 0\] sums to 0.8400 \(2 of 2 rows are off\)"),
        (np.array([[[0.5, np.nan]]]), [True, False], -1, r"row \[0, 0\] sums to nan"),
        (patterns(0, 1, 2, 4), [False] * 4, -1, r"mask of shape \(4,\) marks no key at all"),
        (patterns(0, 1, 2, 4), [True] * 3, -1, r"mask has shape \(3,\), pattern has 4 keys"),
        (patterns(0, 1, 2, 4), [1.0, 0, 0, 0], -1, r"mask has dtype float64; expected bool"),
        (patterns(0, 1, 2, 4), [True] * 4, 2, r"query = 2; expected an index into 2"),
        (patterns(0, 2, 4), [True] * 4, -1, r"pattern has shape \(2, 4\); expected \[\.\.\., head, query, key\]"),
    ],
)
def test_attention_mass_names_what_is_wrong(pattern, mask, query, message):
    with pytest.raises(ValueError, match=message):
        attention.attention_mass(pattern, np.asarray(mask), query=query)


def test_uniform_floor_refuses_marks_on_padding():
    with pytest.raises(ValueError, match=r"3 keys are marked at \[1\], only 2 are visible"):
        attention.uniform_floor(np.array([[True, False, False], [True, True, True]]), np.array([2, 2]))
    with pytest.raises(ValueError, match=r"keys = 0"):
        attention.uniform_floor(np.array([True]), 0)


def test_entropy_is_log_of_the_keys_when_uniform_and_zero_on_one_key():
    padded = np.array([[0.25] * 4 + [0.0], [0, 1.0, 0, 0, 0], [0.5, 0.5, 0, 0, 0]])
    np.testing.assert_allclose(attention.entropy(padded), [np.log(4), 0, np.log(2)], atol=1e-15)
    np.testing.assert_allclose(attention.entropy(padded, np.array([4, 5, 4])), [1, 0, 0.5], atol=1e-15)
    assert np.isnan(attention.entropy(np.array([1.0, 0.0]), np.array(1)))


@given(st.integers(2, 9), st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_normalised_entropy_lies_between_zero_and_one_and_ignores_the_order_of_keys(keys, seed):
    pattern = patterns(seed, 3, keys)
    share = attention.entropy(pattern, np.array(keys))
    assert np.all((share >= 0) & (share <= 1 + 1e-12))
    np.testing.assert_allclose(attention.entropy(pattern[:, ::-1], np.array(keys)), share)


def test_entropy_refuses_negative_weights_and_rows_off_one():
    with pytest.raises(ValueError, match=r"pattern = -0.5 at index"):
        attention.entropy(np.array([1.5, -0.5]))
    with pytest.raises(ValueError, match=r"sums to 0.9000"):
        attention.entropy(np.array([0.4, 0.5]))


def test_dtap_bins_are_half_open_and_the_last_is_closed():
    share = attention.dtap([0, 0.2, 0.5, 1.0], [0.1, 0.2, 0.999, 1.0], mass_edges=(0, 0.2, 0.5, 1), probability_edges=(0, 0.2, 1))
    np.testing.assert_allclose(share, [[0.25, 0, 0], [0, 0.25, 0.5]])  # [probability, mass]: 0.2 and 0.5 open their bins


@given(st.integers(1, 200), st.integers(0, 999))
@settings(max_examples=30, deadline=None)
def test_dtap_shares_sum_to_one_with_the_right_marginals(size, seed):
    mass, probability = np.random.default_rng(seed).random((2, size))
    share = attention.dtap(mass, probability)
    edges = (0, 0.2, 0.4, 0.6, 0.8, 1)
    np.testing.assert_allclose(share.sum(0), np.histogram(mass, edges)[0] / size)
    np.testing.assert_allclose(share.sum(1), np.histogram(probability, edges)[0] / size)


@pytest.mark.parametrize(
    "mass, probability, edges, message",
    [
        ([0.1, 0.2], [0.3], (0, 1), r"mass has shape \(2,\), probability \(1,\)"),
        ([], [], (0, 1), r"at least one example"),
        ([np.nan], [0.3], (0, 1), r"mass = nan"),
        ([0.6], [0.3], (0, 0.5), r"mass = 0.6 at index .*; expected a number from 0 to 0.5"),
        ([0.6], [0.3], (0, 0.7, 0.7, 1), r"expected at least two increasing numbers"),
    ],
)
def test_dtap_names_what_is_wrong(mass, probability, edges, message):
    with pytest.raises(ValueError, match=message):
        attention.dtap(mass, probability, mass_edges=edges)


def test_at_loss_interpolates_in_log_loss():
    loss, steps = [1.0, 0.4, 0.004, 0.5], [0, 5, 10, 15]
    assert at_loss(loss, steps, 0.04) == pytest.approx(7.5)  # halfway between 0.4 and 0.004 on a log axis
    assert at_loss(loss, steps, 0.4) == pytest.approx(5)
    assert at_loss(loss, steps, 2.0) == 0  # already there at the first look
    assert np.isnan(at_loss(loss, steps, 1e-3))  # never reached
    np.testing.assert_allclose(at_loss(loss, [[0, 1], [2, 3], [4, 5], [9, 9]], 0.04), [3, 4])


def test_at_loss_is_nan_safe_and_refuses_a_level_of_zero():
    assert np.isnan(at_loss([np.nan, np.nan], [0, 5], 0.1))
    with pytest.raises(ValueError, match=r"level = 0"):
        at_loss([1, 0.5], [0, 5], 0)
    with pytest.raises(ValueError, match=r"loss has shape \(2,\), values \(3,\)"):
        at_loss([1, 0.5], [0, 5, 10], 0.1)
