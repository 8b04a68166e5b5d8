"""The common share of a set of vectors against values known beforehand."""

import numpy as np
import pytest

from lib.metrics.embedding import common_share, fixed_plane


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


def test_fixed_plane_keeps_lengths_of_vectors_that_lie_in_a_plane_and_its_signs():
    random = np.random.default_rng(1)
    flat = random.standard_normal((20, 4, 2)) * [3.0, 1.0]  # [time, vector, 2]
    axes = np.linalg.qr(random.standard_normal((6, 2)))[0].T
    coordinates, share = fixed_plane(flat @ axes)
    np.testing.assert_allclose(np.linalg.norm(coordinates, axis=-1), np.linalg.norm(flat, axis=-1))
    np.testing.assert_allclose(coordinates @ coordinates.swapaxes(-1, -2), flat @ flat.swapaxes(-1, -2))
    assert share.sum() == pytest.approx(1)
    assert share[0] > share[1]
    assert coordinates[-1, 0, 0] > 0
    assert coordinates[-1, np.abs(coordinates[-1, :, 1]).argmax(), 1] > 0


def test_fixed_plane_does_not_turn_with_the_data():
    angles = np.linspace(0, np.pi / 2, 5)
    turning = np.stack([np.cos(angles), np.sin(angles), 0 * angles], -1)[:, None]  # one vector turns from x to y
    coordinates, _ = fixed_plane(turning)
    turned = np.unwrap(np.arctan2(coordinates[:, 0, 1], coordinates[:, 0, 0]))
    assert abs(turned[-1] - turned[0]) == pytest.approx(np.pi / 2)  # a basis of its own per time would show no turn


def test_fixed_plane_names_bad_input():
    with pytest.raises(ValueError, match=r"vectors has shape \(4, 2\)"):
        fixed_plane(np.ones((4, 2)))
    with pytest.raises(ValueError, match="total_length = 0"):
        fixed_plane(np.zeros((3, 4, 2)))
