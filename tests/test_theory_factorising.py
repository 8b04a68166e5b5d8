"""Factorising as an exact rescaling: the identities at random weights, under the flow, under descent, and what breaks them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.book import claims
from lib.theory import factorising as fac

ROWS, COLUMNS, HIDDEN = 5, 3, 7  # distinct primes: a forgotten transpose can't pass


def rule(claim: str, quantity: str):
    """The bound that the ledger sets for a quantity."""
    return claims.get(claim).rule(quantity).bound


def setting(seed, scale=0.5):
    problem = fac.random_problem(seed)
    left, right = fac.random_factors(seed, scale=scale)
    return problem, left, right, problem.gradient(left @ right)


def off(a, b):
    return float(np.abs(a - b).max())


@pytest.mark.parametrize("seed", range(3))
def test_gradient_is_the_slope_of_the_loss(seed):
    problem, left, right, gradient = setting(seed)
    direction = np.random.default_rng(seed).standard_normal((ROWS, COLUMNS))
    h = 1e-5
    slope = (problem.loss(left @ right + h * direction) - problem.loss(left @ right - h * direction)) / (2 * h)
    assert slope == pytest.approx(np.sum(gradient * direction), abs=1e-9)
    d_left, d_right = fac.factor_gradients(left, right, gradient)
    step = np.random.default_rng(seed).standard_normal(left.shape)
    slope = (problem.loss((left + h * step) @ right) - problem.loss((left - h * step) @ right)) / (2 * h)
    assert slope == pytest.approx(np.sum(d_left * step), abs=1e-9)
    step = np.random.default_rng(seed).standard_normal(right.shape)
    slope = (problem.loss(left @ (right + h * step)) - problem.loss(left @ (right - h * step))) / (2 * h)
    assert slope == pytest.approx(np.sum(d_right * step), abs=1e-9)


def test_loss_and_gradient_by_hand():
    problem = fac.SoftmaxRegression(np.array([[1.0]]), np.array([1]), 2)
    w = np.array([[np.log(3), 0.0]])  # probabilities 3/4, 1/4; label 1
    assert problem.loss(w) == pytest.approx(np.log(4))
    assert problem.gradient(w).tolist()[0] == pytest.approx([0.75, -0.75])


@pytest.mark.claim("P1-RESC")
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.1, 1.0), eta=st.floats(0.01, 3))
def test_step_identity_holds_at_any_weights_and_any_rate(seed, scale, eta):
    _, left, right, gradient = setting(seed, scale)
    new_left, new_right = fac.gradient_step(left, right, gradient, eta)
    change = new_left @ new_right - left @ right
    assert off(change, fac.product_step(left, right, gradient, eta)) < rule("P1-RESC", "step_identity")


@pytest.mark.claim("P1-RESC")
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.1, 1.0), eta=st.floats(0.1, 3))
def test_flow_identity_is_the_product_rule(seed, scale, eta):
    """The velocity of left @ right by the product rule, from the factors' own velocities."""
    _, left, right, gradient = setting(seed, scale)
    d_left, d_right = fac.factor_gradients(left, right, gradient)
    assert off(-eta * (d_left @ right + left @ d_right), fac.product_velocity(left, right, gradient, eta)) < rule(
        "P1-RESC", "flow_identity"
    )
    p, r = fac.preconditioners(left, right)
    w, dp, dr = fac.closed_velocity(left @ right, p, r, gradient, eta)
    assert off(w, fac.product_velocity(left, right, gradient, eta)) < 1e-13
    by_rule = -eta * (d_left @ left.T + left @ d_left.T)
    assert off(dp, by_rule) < 1e-12
    assert off(dr, -eta * (d_right.T @ right + right.T @ d_right)) < 1e-12


def test_second_order_term_is_needed():
    """Without eta² G Wᵀ G the step identity fails by an amount that falls with eta²."""
    _, left, right, gradient = setting(1)
    misses = []
    for eta in (0.4, 0.2):
        new_left, new_right = fac.gradient_step(left, right, gradient, eta)
        misses.append(off(new_left @ new_right - left @ right, fac.product_velocity(left, right, gradient, eta)))
    assert misses[0] > 1e-3
    assert misses[0] / misses[1] == pytest.approx(4, rel=1e-9)


@pytest.mark.claim("P1-RESC")
@pytest.mark.parametrize("seed", range(3))
def test_product_and_preconditioners_are_a_closed_system(seed):
    problem, left, right, _ = setting(seed)
    times = np.linspace(0, 50, 6)
    lefts, rights = fac.factor_flow(left, right, problem.gradient, times)
    w, p, r = fac.closed_flow(left @ right, *fac.preconditioners(left, right), problem.gradient, times)
    expected = fac.preconditioners(lefts, rights)
    assert off(lefts[0] @ rights[0], lefts[-1] @ rights[-1]) > 0.5  # the weights did move
    limit = rule("P1-RESC", "closed_system")
    assert off(w, lefts @ rights) < limit
    assert off(p, expected[0]) < limit
    assert off(r, expected[1]) < limit


@pytest.mark.claim("P1-RESC")
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), hidden=st.integers(COLUMNS, 11), scale=st.floats(0.1, 3))
def test_balanced_factors_are_balanced_and_their_preconditioners_are_roots(seed, hidden, scale):
    product = scale * np.random.default_rng(seed).standard_normal((ROWS, COLUMNS))
    left, right = fac.balanced_factors(product, hidden, seed)
    limit = rule("P1-RESC", "balanced_root") * max(1, scale) * 10
    assert off(left @ right, product) < limit
    assert off(fac.imbalance(left, right), 0) < limit
    p, r = fac.balanced_preconditioners(product)
    assert off(fac.preconditioners(left, right)[0], p) < limit
    assert off(fac.preconditioners(left, right)[1], r) < limit
    assert off(p @ p, product @ product.T) < 10 * limit * scale
    assert off(r @ r, product.T @ product) < 10 * limit * scale
    assert np.linalg.eigvalsh(p).min() > -1e-10


@pytest.mark.claim("P1-RESC")
def test_from_a_balanced_start_the_product_alone_is_closed():
    problem, left, right, _ = setting(4)
    times = np.linspace(0, 20, 5)
    lefts, rights = fac.factor_flow(*fac.balanced_factors(left @ right, HIDDEN, 4), problem.gradient, times)
    alone = fac.balanced_flow(left @ right, problem.gradient, times)
    assert off(alone, lefts @ rights) < rule("P1-RESC", "closed_system")


@pytest.mark.claim("P1-RESC-NEG")
@pytest.mark.parametrize("seed", range(3))
def test_unbalanced_start_breaks_the_root_and_nothing_else(seed):
    problem, left, right, _ = setting(seed)
    times = np.linspace(0, 20, 5)
    lefts, rights = fac.factor_flow(left, right, problem.gradient, times)
    product = lefts @ rights
    alone = fac.balanced_flow(left @ right, problem.gradient, times)
    miss = np.linalg.norm(alone[-1] - product[-1]) / np.linalg.norm(product[-1])
    assert miss > rule("P1-RESC-NEG", "unbalanced_root")
    roots, true = fac.balanced_preconditioners(left @ right), fac.preconditioners(left, right)
    assert min(off(a, b) for a, b in zip(roots, true, strict=True)) > 0.1
    assert off(fac.imbalance(lefts, rights), fac.imbalance(left, right)) < 1e-10  # conserved all the same


@pytest.mark.claim("P1-RESC-NEG")
@pytest.mark.parametrize("seed", range(3))
def test_frozen_preconditioners_lead_elsewhere(seed):
    problem, left, right, _ = setting(seed)
    times = np.linspace(0, 20, 5)
    lefts, rights = fac.factor_flow(left, right, problem.gradient, times)
    frozen = fac.preconditioned_flow(left @ right, *fac.preconditioners(left, right), problem.gradient, times)
    end = lefts[-1] @ rights[-1]
    assert np.linalg.norm(frozen[-1] - end) / np.linalg.norm(end) > rule("P1-RESC-NEG", "relative_difference")
    early = fac.preconditioned_flow(left @ right, *fac.preconditioners(left, right), problem.gradient, np.array([0, 1e-3]))
    start = fac.factor_flow(left, right, problem.gradient, np.array([0, 1e-3]))
    assert off(early[-1], start[0][-1] @ start[1][-1]) < 1e-5  # they leave the start together


@pytest.mark.claim("P1-CONS")
@pytest.mark.parametrize("seed", range(3))
def test_flow_conserves_the_imbalance(seed):
    problem, left, right, _ = setting(seed)
    lefts, rights = fac.factor_flow(left, right, problem.gradient, np.linspace(0, 50, 6))
    assert off(lefts[-1], left) > 0.1
    assert off(fac.imbalance(lefts, rights), fac.imbalance(left, right)) < rule("P1-CONS", "flow_drift")


@pytest.mark.claim("P1-CONS")
@pytest.mark.parametrize("seed", range(3))
def test_descent_drifts_by_half_when_the_rate_is_halved(seed):
    problem, left, right, _ = setting(seed)
    start = fac.imbalance(left, right)
    drifts = []
    for eta in (0.05, 0.025, 0.0125):
        end = [x[-1] for x in fac.gradient_descent(left, right, problem.gradient, eta, steps=round(20 / eta), every=round(20 / eta))]
        drifts.append(np.linalg.norm(fac.imbalance(*end) - start))
    low, high = rule("P1-CONS", "drift_ratio")
    assert low < drifts[0] / drifts[1] < high
    assert low < drifts[1] / drifts[2] < high
    predicted = 0.0125 * np.linalg.norm(fac.drift_slope(left, right, problem.gradient, np.linspace(0, 20, 401)))
    assert drifts[2] == pytest.approx(predicted, rel=0.02)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), eta=st.floats(0.01, 3))
def test_change_of_the_imbalance_in_a_step_is_exact(seed, eta):
    _, left, right, gradient = setting(seed)
    change = fac.imbalance(*fac.gradient_step(left, right, gradient, eta)) - fac.imbalance(left, right)
    assert off(change, fac.imbalance_step(left, right, gradient, eta)) < 1e-12


def test_descent_goes_to_the_flow_as_the_rate_shrinks():
    problem, left, right, _ = setting(2)
    lefts, rights = fac.factor_flow(left, right, problem.gradient, np.array([0, 10.0]))
    misses = []
    for eta in (0.02, 0.01):
        a, b = fac.gradient_descent(left, right, problem.gradient, eta, steps=round(10 / eta), every=round(10 / eta))
        misses.append(off(a[-1] @ b[-1], lefts[-1] @ rights[-1]))
    assert misses[0] / misses[1] == pytest.approx(2, rel=0.05)


def test_descent_keeps_what_it_says():
    problem, left, right, _ = setting(0)
    a, b = fac.gradient_descent(left, right, problem.gradient, 0.1, steps=6, every=2)
    assert a.shape == (4, ROWS, HIDDEN)
    assert b.shape == (4, HIDDEN, COLUMNS)
    one = fac.gradient_step(left, right, problem.gradient(left @ right), 0.1)
    two = fac.gradient_step(*one, problem.gradient(one[0] @ one[1]), 0.1)
    assert off(a[0], left) == 0
    assert off(a[1], two[0]) < 1e-15


def test_leading_axes_are_independent_runs():
    problem = fac.random_problem(0)
    starts = [fac.random_factors(seed) for seed in range(4)]
    left, right = (np.stack(parts) for parts in zip(*starts, strict=True))
    together = fac.gradient_descent(left, right, problem.gradient, 0.1, steps=5, every=5)
    velocity = fac.product_velocity(left, right, problem.gradient(left @ right))
    for i, start in enumerate(starts):
        alone = fac.gradient_descent(*start, problem.gradient, 0.1, steps=5, every=5)
        assert off(together[0][-1, i], alone[0][-1]) < 1e-14
        assert off(velocity[i], fac.product_velocity(*start, problem.gradient(start[0] @ start[1]))) < 1e-14


@pytest.mark.claim("P1-RESC")
@pytest.mark.parametrize("a, c", [(0.6, 0.6), (0.4, 1.1)])
def test_aligned_factors_turn_the_schedule_into_one_number(a, c):
    random = np.random.default_rng(0)
    rows = np.linalg.qr(random.standard_normal((ROWS, 2)))[0]
    columns = np.linalg.qr(random.standard_normal((COLUMNS, 2)))[0]
    left, right = fac.aligned_factors(a, c, rows, columns, HIDDEN, seed=1)
    gradient = rows @ random.standard_normal((2, 2)) @ columns.T  # any gradient within the two spans
    assert off(fac.product_velocity(left, right, gradient, 0.3), -fac.aligned_rate(a, c, 0.3) * gradient) < 1e-13
    h, eta = 0.7, 0.3  # on a multiple of W the factors keep their form, and only their sizes move
    stepped = fac.gradient_step(left, right, h * rows @ columns.T, eta)
    same = fac.aligned_factors(a - eta * c * h, c - eta * a * h, rows, columns, HIDDEN, seed=1)
    assert max(off(x, y) for x, y in zip(stepped, same, strict=True)) < 1e-14
    outside = random.standard_normal((ROWS, COLUMNS))  # and one that is not
    assert off(fac.product_velocity(left, right, outside, 0.3), -fac.aligned_rate(a, c, 0.3) * outside) > 0.01
    assert off(left @ right, a * c * rows @ columns.T) < 1e-14


def test_angles_and_distances_by_hand():
    a, b = np.array([[1.0, 0], [0, 0]]), np.array([[1.0, 1], [0, 0]])
    assert fac.angle(a, b) == pytest.approx(45)
    assert fac.angle(a, -3 * a) == pytest.approx(180)
    assert fac.angle(np.stack([a, b]), np.stack([b, b])).tolist() == pytest.approx([45, 0])
    assert fac.angle(a, a + 1e-9 * b) == pytest.approx(np.degrees(1e-9), rel=1e-6)
    assert fac.relative_distance(a, 2 * a) == pytest.approx(0.5)
    left, right = fac.aligned_factors(0.6, 0.8, np.eye(5)[:, :2], np.eye(3)[:, :2], HIDDEN)
    gradient = np.zeros((5, 3))
    gradient[:2, :2] = [[1, 2], [3, 4]]
    assert fac.effective_rate(left, right, gradient, 0.5) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="length_of_first = 0"):
        fac.angle(0 * a, b)
    with pytest.raises(ValueError, match=r"second has shape \(1, 2\); expected \(2, 2\)"):
        fac.relative_distance(a, b[:1])


def test_half_the_identity_twice_is_the_collapsed_matrix():
    problem, left, right, gradient = setting(3)
    halves = np.eye(ROWS) / 2, np.eye(COLUMNS) / 2
    assert off(fac.rescaled(halves[0], gradient, halves[1]), gradient) < 1e-15
    times = np.array([0, 1e-3])
    end = fac.preconditioned_flow(left @ right, *halves, problem.gradient, times)[-1]
    assert off(end, left @ right - 1e-3 * gradient) < 1e-5


def test_bad_input_is_refused():
    problem, left, right, gradient = setting(0)
    with pytest.raises(ValueError, match=r"left has shape \(7, 5\), right \(7, 3\); expected"):
        fac.product_step(left.T, right, gradient, 0.1)
    with pytest.raises(ValueError, match=r"gradient has shape \(3, 5\); expected \[..., 5, 3\]"):
        fac.product_velocity(left, right, gradient.T)
    with pytest.raises(ValueError, match="left = nan at index"):
        fac.imbalance(left * np.nan, right)
    with pytest.raises(ValueError, match="gradient = inf"):
        fac.factor_gradients(left, right, gradient + np.inf)
    for eta in (0.0, -1.0, np.nan):
        for call in (fac.product_velocity, fac.product_step, fac.gradient_step, fac.imbalance_step):
            with pytest.raises(ValueError, match=r"eta = .*expected a finite number > 0"):
                call(left, right, gradient, eta)
        with pytest.raises(ValueError, match="eta = "):
            fac.gradient_descent(left, right, problem.gradient, eta, 2)
        with pytest.raises(ValueError, match="eta = "):
            fac.factor_flow(left, right, problem.gradient, [0, 1], eta)
    for times in ([1.0, 2.0], [0.0, 0.0], [0.0]):
        with pytest.raises(ValueError, match="expected increasing times that start at 0"):
            fac.factor_flow(left, right, problem.gradient, times)
    with pytest.raises(ValueError, match="every = 4 does not divide steps = 6"):
        fac.gradient_descent(left, right, problem.gradient, 0.1, 6, 4)
    with pytest.raises(ValueError, match="take a smaller rate"), np.errstate(all="ignore"):
        fac.gradient_descent(left, right, lambda w: w**3, 1e3, 50)
    with pytest.raises(ValueError, match="hidden = 2; expected a whole number >= 3"):
        fac.balanced_factors(left @ right, 2)
    with pytest.raises(ValueError, match="off orthonormal"):
        fac.aligned_factors(1.0, 1.0, 2 * np.eye(ROWS)[:, :2], np.eye(COLUMNS)[:, :2], HIDDEN)
    with pytest.raises(ValueError, match="a = 0"):
        fac.aligned_factors(0.0, 1.0, np.eye(ROWS)[:, :2], np.eye(COLUMNS)[:, :2], HIDDEN)
    with pytest.raises(ValueError, match=r"p has shape \(3, 3\); expected \(5, 5\)"):
        fac.closed_velocity(left @ right, np.eye(3), np.eye(3), gradient)
    with pytest.raises(ValueError, match=r"r has shape \(5, 5\); expected \(3, 3\)"):
        fac.preconditioned_flow(left @ right, np.eye(5), np.eye(5), problem.gradient, [0, 1])
    with pytest.raises(ValueError, match="product = nan"):
        fac.balanced_preconditioners(left @ right * np.nan)
    with pytest.raises(ValueError, match="labels = 3"):
        fac.SoftmaxRegression(np.ones((1, 1)), np.array([3]), 3)
    with pytest.raises(ValueError, match="columns = 1"):
        fac.random_problem(0, columns=1)
    with pytest.raises(ValueError, match="seed = -1"):
        fac.random_factors(-1)
