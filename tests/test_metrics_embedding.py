"""The common share of a set of vectors against values known beforehand."""

import numpy as np
import pytest

from lib.metrics.embedding import common_share


def test_common_share_is_one_for_equal_vectors_and_zero_for_opposite_ones():
    assert common_share(np.tile([1.0, -2.0, 3.0], (5, 1))) == pytest.approx(1)
    assert common_share([[1.0, 2.0], [-1.0, -2.0]]) == pytest.approx(0)


def test_common_share_of_orthogonal_vectors_is_one_over_their_number():
    assert common_share(np.eye(7)) == pytest.approx(1 / 7)
    np.testing.assert_allclose(common_share(np.stack([np.eye(4), np.ones((4, 4))])), [0.25, 1])


def test_common_share_does_not_depend_on_scale_or_rotation():
    random = np.random.default_rng(0)
    vectors = random.standard_normal((30, 5)) + 0.5
    turn = np.linalg.qr(random.standard_normal((5, 5)))[0]
    assert common_share(3 * vectors @ turn) == pytest.approx(common_share(vectors))
    assert 0 < common_share(vectors) < 1


@pytest.mark.parametrize(
    "vectors, message", [(np.zeros((3, 2)), "all vectors are zero"), (np.ones(3), r"shape \(3,\)"), ([[np.nan, 1.0]], "vectors = nan")]
)
def test_bad_vectors_are_named(vectors, message):
    with pytest.raises(ValueError, match=message):
        common_share(vectors)
