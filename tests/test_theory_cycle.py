"""The closed forms of the focus-dilution cycle against Hessians and flows."""

from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq, minimize_scalar

from lib.book import claims
from lib.theory import cycle, flow, markov

LAW = (0.75, 0.19, 0.05, 0.01)
CHAIN = markov.sticky_chain(LAW, 0.5)
MODEL = markov.PopulationModel(CHAIN, 8)
TWINS = (1.0, 0.0, -1.0)


@st.composite
def laws(draw):
    """A law over 2 to 6 tokens that is not nearly uniform, sorted or not."""
    d = draw(st.integers(2, 6))
    law = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).dirichlet(np.ones(d)) * 0.9 + 0.1 / d
    assume(np.ptp(law) > 0.05)
    return law


@st.composite
def chains(draw):
    """Sticky or any other chain, with unequal frequencies."""
    if draw(st.booleans()):
        return markov.sticky_chain(draw(laws()), draw(st.floats(0.05, 0.9)))
    d = draw(st.integers(2, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    chain = markov.general_chain(rng.dirichlet(np.full(d, 0.7), size=d) * 0.95 + 0.05 / d)
    assume(np.ptp(chain.stationary) > 0.05)
    return chain


def judged(claim, **measured):
    """Verdict of the ledger on what a test measured."""
    return claims.judge(claim, {"theory": {name: np.asarray(value, dtype=float).tolist() for name, value in measured.items()}}).verdict


def count(values, level, tolerance=1e-9):
    return int((np.abs(values - level) < tolerance).sum())


@cache
def whole_cycle():
    return flow.flow(MODEL, MODEL.initial(1e-3, 0), 760, certify=False)


@cache
def twins(delta, pi_1=0.6, offsets=TWINS, stickiness=0.5):
    return cycle.rank_one_plateau(cycle.twin_chain(pi_1, offsets, delta, stickiness))


# --------------------------------------------------------------------------------------------------------------------------------- Stage I


@pytest.mark.claim("P2-T3.2-mu")
@settings(max_examples=25, deadline=None)
@given(laws(), st.floats(0.0, 0.9), st.integers(1, 5))
def test_origin_has_the_rate_mu_once_per_width_and_no_other(law, stickiness, width):
    model = markov.PopulationModel(markov.sticky_chain(law, stickiness), width)
    values = np.linalg.eigvalsh(cycle.hessian(model, np.zeros(model.size)))
    mu = cycle.condensation_rate(law)
    alike = (count(values, -mu), count(values, mu), count(values, 0)) == (width, width, model.size - 2 * width)
    assert judged("P2-T3.2-mu", eigenvalue_error=abs(values[0] + mu), multiplicity_matches=alike) == "holds"


def test_rates_of_the_running_examples():
    assert cycle.condensation_rate([LAW, (0.6, 0.1, 0.15, 0.15)])[0] == pytest.approx(0.459501, abs=1e-6)
    assert cycle.condensation_rate([0.6, 0.1, 0.1, 0.1, 0.1]) == pytest.approx(0.282843, abs=1e-6)
    assert cycle.condensation_rate([0.25] * 4) == 0
    assert cycle.focus_rate(markov.sticky_chain(LAW, [0.5, 0.2])) == pytest.approx([0.07978470, 0.03191388], abs=1e-8)
    assert cycle.focus_rate(markov.sticky_chain([0.6, 0.1, 0.1, 0.1, 0.1], 0.5)) == pytest.approx(0.10215437, abs=1e-8)
    assert cycle.focus_rate(markov.sticky_chain([0.4, 0.3, 0.2, 0.1], 0.5)) == pytest.approx(0.00439238, abs=1e-8)
    assert cycle.readout_spectrum(LAW) == pytest.approx([0.0443008, 0.2176767, 0.9009527], abs=1e-7)


@cache
def near_origin(amplitude, init_scales, width=8, seed=0):
    """Start, flow and linear flow at the time at which the growing mode has that amplitude."""
    model, rate, pi, out = markov.PopulationModel(CHAIN, width), cycle.condensation_rate(LAW), np.array(LAW), []
    for init_scale in init_scales:
        begin = model.initial(init_scale, seed)
        w, residual = model.split(begin), pi - 0.25
        mode = (pi @ w.embedding / np.linalg.norm(pi) + w.unembedding @ residual / np.linalg.norm(residual)) / 2
        t = np.log(amplitude / np.linalg.norm(mode)) / rate
        end = flow.flow(model, begin, t, times=[0, t], rtol=1e-12, certify=False).parameters[-1]
        out.append((begin, end, cycle.linear_origin_flow(model, begin, [t])[0]))
    return out


def slope(x, y):
    return np.polyfit(np.log(x), np.log(y), 1)[0]


def test_growing_mode_has_its_amplitude_at_the_condensation_time():
    begin, amplitudes = MODEL.initial(1e-4, 2), np.array([0.01, 0.1])
    times = cycle.condensation_time(MODEL, begin, amplitudes)
    assert np.diff(times) == pytest.approx(np.log(10) / cycle.condensation_rate(LAW))
    for parameters, amplitude in zip(cycle.linear_origin_flow(MODEL, begin, times), amplitudes, strict=True):
        w = MODEL.split(parameters)
        for matrix in (w.embedding, w.unembedding):
            assert np.linalg.norm(matrix) == pytest.approx(amplitude, rel=2e-3)


@pytest.mark.claim("P2-L3.1")
def test_error_of_the_linear_flow_is_quadratic_in_the_amplitude_alone():
    def error(case):
        return np.linalg.norm(case[1] - case[2]) / np.linalg.norm(case[2])

    errors = [error(case) for case in near_origin(0.1, (1e-3, 1e-4, 1e-5))]
    errors += [error(near_origin(0.1, (1e-4,), width, seed)[0]) for width, seed in ((8, 1), (3, 2), (20, 3))]
    spread = np.ptp(errors) / np.mean(errors)  # neither init scale nor seed nor width matters at equal amplitude
    amplitudes = (0.02, 0.05, 0.1)
    power = slope(amplitudes, [error(near_origin(a, (1e-4,))[0]) for a in amplitudes])
    assert judged("P2-L3.1", relative_spread=spread, slope=power) == "holds"
    assert errors[0] == pytest.approx(0.1634 * 0.1**2, rel=0.01)  # the constant belongs to pi alone


@pytest.mark.claim("P2-T3.2-rank1")
def test_embedding_condenses_on_pi_with_an_error_of_init_scale_squared():
    def misalignment(parameters, begin):
        alpha, w = cycle.condensation_direction(MODEL, begin), MODEL.split(parameters)
        pairs = (w.embedding, np.outer(LAW, alpha)), (w.unembedding, np.outer(alpha, np.array(LAW) - 0.25))
        return [1 - (have * want).sum() / np.linalg.norm(have) / np.linalg.norm(want) for have, want in pairs]

    init_scales = (1e-3, 1e-4, 1e-5)
    flowing, linear = (np.array([misalignment(case[i], case[0]) for case in near_origin(0.1, init_scales)]) for i in (1, 2))
    power = slope(init_scales, flowing[:, 0])
    assert judged("P2-T3.2-rank1", embedding_slope=power, output_cosine=1 - flowing[:, 1].max()) == "holds"
    np.testing.assert_allclose(flowing[:, 0], linear[:, 0], rtol=0.03)
    assert slope(init_scales, linear[:, 1]) == pytest.approx(2, abs=0.02)


def test_unembedding_turns_from_pi_minus_uniform_to_log_pi_after_the_origin():
    run = flow.flow(MODEL, MODEL.initial(1e-4, 0), 60, certify=False)
    W_U = MODEL.split(run.parameters).unembedding
    residual, odds = np.array(LAW) - 0.25, np.log(LAW) - np.log(LAW).mean()
    cosine = [np.linalg.norm(W_U @ v, axis=-1) / np.linalg.norm(v) / np.linalg.norm(W_U, axis=(-1, -2)) for v in (residual, odds)]
    early, late = np.flatnonzero(run.loss < 1.35)[0], -1
    assert cosine[0][early] > 0.9999 > 0.9 > cosine[1][early]
    assert cosine[1][late] > 0.99 > 0.95 > cosine[0][late]


@pytest.mark.claim("P2-T3.2-frozen")
def test_attention_is_frozen_to_fourth_order_in_the_amplitude():
    amplitudes = (0.02, 0.04, 0.08)
    moved = []
    for amplitude in amplitudes:
        begin, end, _ = near_origin(amplitude, (1e-4,))[0]
        before, after = MODEL.split(begin).W_Q, MODEL.split(end).W_Q
        moved.append(np.linalg.norm(after - before) / np.linalg.norm(before))
    assert judged("P2-T3.2-frozen", slope=slope(amplitudes, moved)) == "holds"
    assert max(moved) < 1e-5


def test_without_attention_the_embedding_moves_along_pi_for_all_time():
    start = MODEL.initial(0.3, 1)
    for matrix in MODEL.split(start)[2:]:
        matrix[...] = 0
    run = flow.flow(MODEL, start, 40, times=[0, 3, 40], certify=False)
    for moved in MODEL.split(run.parameters[1:] - start).embedding:
        coefficients = moved / np.array(LAW)[:, None]  # the same row vector for every token
        np.testing.assert_allclose(coefficients, coefficients[:1].repeat(4, 0), atol=1e-10)
        assert np.abs(coefficients).max() > 0.1


@pytest.mark.claim("P2-T3.2-time")
def test_a_start_ten_times_smaller_takes_log_ten_over_mu_longer():
    level = CHAIN.unigram_level + 0.02 * (CHAIN.uniform_level - CHAIN.unigram_level)
    starts = MODEL.initial(1.0, 0) * np.array([1e-2, 1e-3, 1e-4])[:, None]
    runs = flow.flows(MODEL, starts, 60, stops={"level": flow.loss_below(level)}, certify=False)
    per_decade = np.diff([run.times[-1] for run in runs])
    off = per_decade - cycle.time_per_decade(cycle.condensation_rate(LAW))
    assert judged("P2-T3.2-time", difference_per_decade=off) == "holds"
    assert np.abs(off).max() < 0.1


# -------------------------------------------------------------------------------------------------------------------------------- Stage II


@pytest.mark.claim("P2-T3.3-point")
@settings(max_examples=25, deadline=None)
@given(chains(), st.integers(1, 6), st.integers(0, 2**31))
def test_second_saddle_has_no_gradient_and_predicts_pi(chain, width, seed):
    model = markov.PopulationModel(chain, width)
    saddle = cycle.focus_saddle(model, np.random.default_rng(seed).standard_normal(width))
    assert judged("P2-T3.3-point", gradient_norm=np.linalg.norm(model.gradient(saddle))) == "holds"
    assert model.loss(saddle) == pytest.approx(chain.unigram_level, abs=1e-12)
    w = model.split(saddle)
    assert np.linalg.norm(w.embedding) == pytest.approx(np.linalg.norm(w.unembedding))


def test_a_point_beside_the_second_saddle_has_a_gradient():
    saddle = cycle.focus_saddle(MODEL)
    assert np.linalg.norm(MODEL.split(saddle).embedding) == pytest.approx(2.030793, abs=1e-6)
    saddle[: 4 * 8] *= 1.01
    assert np.abs(MODEL.gradient(saddle)).max() > 1e-3


@pytest.mark.claim("P2-T3.3-psd")
@settings(max_examples=20, deadline=None)
@given(chains(), st.integers(2, 4))
def test_readout_block_is_positive_with_the_predicted_spectrum_and_not_coupled_to_attention(chain, width):
    model = markov.PopulationModel(chain, width)
    H = cycle.hessian(model, cycle.focus_saddle(model))
    readout = 2 * width * chain.vocabulary
    assert np.abs(H[:readout, readout:]).max() < 1e-12
    values = np.linalg.eigvalsh(H[:readout, :readout])
    error = np.abs(values[-(chain.vocabulary - 1) :] - cycle.readout_spectrum(chain.stationary)).max()
    assert judged("P2-T3.3-psd", eigenvalue_error=error, negative_part=-values[0]) == "holds"
    assert np.abs(values[: -(chain.vocabulary - 1)]).max() < 1e-11


@pytest.mark.claim("P2-T3.4-c")
@pytest.mark.claim("P2-genP-c")
@settings(max_examples=25, deadline=None)
@given(chains(), st.integers(1, 4))
def test_attention_block_has_plus_and_minus_c_once_per_width(chain, width):
    model = markov.PopulationModel(chain, width)
    H = cycle.hessian(model, cycle.focus_saddle(model))
    readout = 2 * width * chain.vocabulary
    values = np.linalg.eigvalsh(H[readout:, readout:])
    c = cycle.focus_rate(chain)
    assume(abs(c) > 1e-5)
    alike = count(values, c) == count(values, -c) == width and count(values, 0) == 2 * width**2 - 2 * width
    error = abs(values[0] + abs(c))
    assert judged("P2-T3.4-c", eigenvalue_error=error, multiplicity_matches=alike) == "holds"
    assert judged("P2-genP-c", eigenvalue_error=error) == "holds"
    mode = model.join(
        np.zeros((chain.vocabulary, width)), np.zeros((width, chain.vocabulary)), *2 * [np.eye(width)[:1].T * np.eye(width)[:1]]
    )
    assert mode @ H @ mode / (mode @ mode) == pytest.approx(-c, abs=1e-9)  # W_Q = W_K = alpha w^T grows at c, sign included


@settings(max_examples=40, deadline=None)
@given(laws(), st.floats(0.01, 0.95))
def test_c_of_a_sticky_chain_is_stickiness_times_variance_times_covariance(law, stickiness):
    gamma, beta = cycle.saddle_profiles(law)
    variance = law @ gamma**2 - (law @ gamma) ** 2
    covariance = law @ (gamma * beta) - (law @ gamma) * (law @ beta)
    c = cycle.focus_rate(markov.sticky_chain(law, stickiness))
    assert c == pytest.approx(stickiness * variance * covariance, rel=1e-10)
    assert c > 0
    lowest = -law.min() / (1 - law.min())
    assert cycle.focus_rate(markov.sticky_chain(law, lowest / 2)) < 0 == cycle.focus_rate(markov.sticky_chain(law, 0.0)).round(15)


def test_c_is_negative_where_the_frequent_token_is_never_repeated():
    chain = markov.general_chain([[0.0, 0.5, 0.5], [0.8, 0.1, 0.1], [0.8, 0.1, 0.1]])
    assert chain.stationary.argmax() == 0
    assert cycle.focus_rate(chain) < -1e-4


@cache
def from_saddle(stickiness):
    """Start at the second saddle with a little noise in attention, and its unstable growth."""
    model = markov.PopulationModel(markov.sticky_chain(LAW, stickiness), 8)
    start = cycle.focus_saddle(model) + model.initial(1e-6, 3) * (np.arange(model.size) >= 64)
    c = cycle.focus_rate(model.chain)
    run = flow.flow(model, start, 12 / c, atol=1e-10, rtol=1e-8, stops={"grown": flow.norm_above("W_Q", 0.1)}, certify=False)
    assert run.ended == "grown"
    return model, start, run


@pytest.mark.claim("P2-T3.4-rate")
@pytest.mark.parametrize("stickiness", [0.2, 0.5, 0.8])
def test_attention_grows_at_rate_c(stickiness):
    model, _, run = from_saddle(stickiness)
    size = np.linalg.norm(model.split(run.parameters).W_Q, axis=(-1, -2))
    window = (size > 1e-4) & (size < 5e-2)
    rate = np.polyfit(run.times[window], np.log(size[window]), 1)[0]
    assert judged("P2-T3.4-rate", rate_over_predicted=rate / cycle.focus_rate(model.chain)) == "holds"


@pytest.mark.claim("P2-T3.4-phi")
def test_scores_grow_along_pi_pi():
    model, _, run = from_saddle(0.5)
    scores, target = model.attention_scores(run.parameters[-1]), np.outer(LAW, LAW)
    assert judged("P2-T3.4-phi", cosine=(scores * target).sum() / np.linalg.norm(scores) / np.linalg.norm(target)) == "holds"


@pytest.mark.claim("P2-T3.4-w")
def test_start_selects_which_of_the_modes_grows():
    model, start, run = from_saddle(0.5)
    alpha = np.eye(8)[0]
    expected = cycle.attention_direction(model, start, alpha)
    left, values, right = np.linalg.svd(model.split(run.parameters[-1]).W_Q)
    assert abs(left[:, 0] @ alpha) > 0.999
    assert judged("P2-T3.4-w", cosine=abs(right[0] @ expected)) == "holds"
    assert values[1] < 1e-3 * values[0]
    assert abs(right[0] @ cycle.attention_direction(model, model.initial(1.0, 99), alpha)) < 0.9  # another start, another mode


@pytest.mark.claim("P2-T3.5-focus")
def test_the_frequent_query_focuses_on_its_own_token():
    assert judged("P2-T3.5-focus", peak=whole_cycle().patterns[:, 0, 0].max()) == "holds"


@pytest.mark.claim("P2-T3.5-lowrows")
def test_other_queries_hardly_focus_at_all():
    peaks = whole_cycle().patterns[:200, 1:, 0].max(0)
    np.testing.assert_allclose(peaks, [0.7736, 0.7543, 0.7507], atol=2e-3)
    assert judged("P2-T3.5-lowrows", row_2=peaks[0], row_3=peaks[1], row_4=peaks[2]) == "fails"


@pytest.mark.claim("P2-T3.5-lowrows")
def test_even_with_the_embedding_held_the_strength_of_attention_comes_to_rest_before_other_queries_focus():
    reduced, (_, beta) = cycle.RankOneFlow(CHAIN), cycle.saddle_profiles(LAW)
    wish = (CHAIN.transition - np.array(LAW)) @ beta
    assert wish[0] > 0 > wish[1:].max()  # after a rare token the frequent one is less likely than usual
    _, (early, late) = reduced.integrate(reduced.near_saddle(1e-3), 3000, times=[1000, 3000], held=("gamma",))
    assert late[-1] * late[-2] == pytest.approx(early[-1] * early[-2], rel=1e-6)
    assert reduced.pattern(late)[:, 0] == pytest.approx([0.974, 0.851, 0.780, 0.756], abs=1e-3)


@pytest.mark.claim("P2-T3.4-phi")
@pytest.mark.claim("P2-T3.4-w")
def test_weights_at_the_origin_predict_scores_and_direction_of_attention_much_later():
    for run in flow.flows(MODEL, MODEL.initial(1e-3, [0, 1]), 100, stops={"grown": flow.norm_above("W_Q", 0.1)}, certify=False):
        begin, end = run.parameters[0], run.parameters[-1]
        w = cycle.attention_direction(MODEL, begin, cycle.condensation_direction(MODEL, begin))
        scores, target = MODEL.attention_scores(end), np.outer(LAW, LAW)
        assert judged("P2-T3.4-phi", cosine=(scores * target).sum() / np.linalg.norm(scores) / np.linalg.norm(target)) == "holds"
        assert judged("P2-T3.4-w", cosine=abs(np.linalg.svd(MODEL.split(end).W_Q)[2][0] @ w)) == "holds"


@pytest.mark.claim("P2-lam-sign")
def test_with_negative_stickiness_the_frequent_query_looks_away():
    model = markov.PopulationModel(markov.sticky_chain([0.6, 0.2, 0.1, 0.1], -0.1), 8)
    run = flow.flow(model, model.initial(1e-3, 0), 1000, times=[0, 500, 1000], certify=False)
    sticky = MODEL.attention_scores(whole_cycle().parameters[100])[0, 0]
    avoiding = model.attention_scores(run.parameters[-1])[0, 0]
    assert judged("P2-lam-sign", score_when_sticky=sticky, score_when_avoiding=avoiding) == "holds"
    assert run.patterns[-1, 0, 0] == pytest.approx(0.402, abs=0.005)
    w = model.split(run.parameters[-1])
    assert (w.W_Q * w.W_K).sum() < -0.99 * np.linalg.norm(w.W_Q) * np.linalg.norm(w.W_K)


# ------------------------------------------------------------------------------------------------------------------------------- Stage III


@st.composite
def states(draw):
    """A point of the rank-one manifold, away from any saddle."""
    chain = draw(chains())
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    return cycle.RankOneFlow(chain), rng.standard_normal(2 * chain.vocabulary + 2)


@pytest.mark.claim("P2-closure")
@settings(max_examples=30, deadline=None)
@given(states(), st.integers(1, 5), st.integers(0, 2**31))
def test_full_gradient_on_the_rank_one_manifold_is_the_reduced_one(case, width, seed):
    reduced, state = case
    model = markov.PopulationModel(reduced.chain, width)
    a, w = (v / np.linalg.norm(v) for v in np.random.default_rng(seed).standard_normal((2, width)))
    full = model.gradient(reduced.embed(state, model, a, w))
    np.testing.assert_allclose(full, reduced.embed(reduced.gradient(state), model, a, w), atol=1e-12 * max(1, np.abs(full).max()))
    assert model.loss(reduced.embed(state, model, a, w)) == pytest.approx(reduced.loss(state), rel=1e-12)


@settings(max_examples=30, deadline=None)
@given(chains())
def test_growing_attention_bends_the_embedding_as_predicted_for_any_chain(chain):
    reduced, s = cycle.RankOneFlow(chain), 1e-7
    gamma, beta = cycle.saddle_profiles(chain.stationary)
    state = np.concatenate([gamma, beta, [np.sqrt(s), np.sqrt(s)]])
    moving = -reduced.split(reduced.gradient(state)).gamma / s
    difference = moving - cycle.dilution_drive(chain)
    pi = chain.stationary
    difference -= pi * (pi @ difference) / (pi @ pi)  # only components that annihilate pi are claimed
    assert np.abs(difference).max() < 1e-5 * max(1, np.abs(cycle.dilution_drive(chain)).max())


@cache
def stage_three(pi_1, d, stickiness):
    chain = markov.sticky_chain([pi_1] + [(1 - pi_1) / (d - 1)] * (d - 1), stickiness)
    reduced, c = cycle.RankOneFlow(chain), cycle.focus_rate(chain)
    times = np.linspace(0, np.log(1e-3 / 1e-8) / (2 * c), 40)
    _, path = reduced.integrate(reduced.near_saddle(1e-4), times[-1], times=times)
    return chain, c, times, path


@pytest.mark.claim("P2-P3.7-D")
@pytest.mark.parametrize("pi_1, d, stickiness", [(0.6, 5, 0.5), (0.75, 4, 0.5), (0.4, 6, 0.3)])
def test_dilution_follows_the_law_in_the_strength_of_attention(pi_1, d, stickiness):
    chain, _, _, path = stage_three(pi_1, d, stickiness)
    gamma, _, q, k = cycle.RankOneFlow(chain).split(path)
    s = q * k
    D = cycle.symmetric_dilution(gamma, chain.stationary)
    predicted = 3 * (s - s[0]) / (2 * (gamma[0, 0] - gamma[0, 1]))
    assert s[-1] == pytest.approx(1e-3, rel=0.05)
    assert judged("P2-P3.7-D", ratio=D[10:] / predicted[10:]) == "holds"
    law = cycle.symmetric_dilution(cycle.dilution_law(chain, s, s[0]), chain.stationary)  # the general law, on the same measure
    np.testing.assert_allclose(law, predicted, rtol=1e-9)


def test_the_law_of_dilution_holds_where_attention_turns_away():
    """Negative stickiness: c < 0, the growing mode has k = -q, and the embedding bends the other way."""
    chain = markov.sticky_chain([0.6, 0.1, 0.1, 0.1, 0.1], -0.1)
    reduced, c = cycle.RankOneFlow(chain), float(cycle.focus_rate(chain))
    assert c < 0
    start = reduced.near_saddle(1e-4)
    start[-1] = -start[-2]
    times = np.linspace(0, np.log(1e-3 / 1e-8) / (2 * -c), 40)
    _, path = reduced.integrate(start, times[-1], times=times)
    gamma, _, q, k = reduced.split(path)
    s = q * k
    bent = cycle.symmetric_dilution(gamma, chain.stationary)[10:]
    law = cycle.symmetric_dilution(cycle.dilution_law(chain, s, s[0]), chain.stationary)[10:]
    np.testing.assert_allclose(bent / law, 1, rtol=0.01)


@pytest.mark.claim("P2-P3.7-rate")
def test_dilution_grows_at_twice_c():
    chain, c, times, path = stage_three(0.6, 5, 0.5)
    D = cycle.symmetric_dilution(path[:, :5], chain.stationary)
    window = path[:, -1] > 1e-3
    assert judged("P2-P3.7-rate", rate_over_predicted=np.polyfit(times[window], np.log(D[window]), 1)[0] / (2 * c)) == "holds"


@pytest.mark.claim("P2-P3.8-sign")
@settings(max_examples=50, deadline=None)
@given(states())
def test_a_query_gives_the_frequent_token_less_than_pi_exactly_when_its_embedding_is_negative(case):
    reduced, state = case
    gamma, _, q, k = reduced.split(state)
    top = gamma.argmax()  # the claim needs only that the token's profile is the largest one
    state[-1] = abs(k) * np.sign(q)  # s > 0
    excess = reduced.pattern(state)[:, top] - reduced.chain.stationary[top]
    clear = np.abs(gamma) > 1e-6
    assert judged("P2-P3.8-sign", agreement=np.mean(np.sign(excess[clear]) == np.sign(gamma[clear]))) == "holds"
    state[-1] *= -1
    excess = reduced.pattern(state)[:, top] - reduced.chain.stationary[top]
    assert np.array_equal(np.sign(excess[clear]), -np.sign(gamma[clear]))


def test_second_query_recrosses_pi_when_its_embedding_changes_sign():
    run = whole_cycle()
    left, _, _ = np.linalg.svd(MODEL.split(run.parameters[80:130]).embedding)
    profile = left[:, :, 0] * np.sign(left[:, :1, 0])  # sign of a singular vector is arbitrary: token 1 is made positive
    sign_change = np.flatnonzero(profile[:, 1] < 0)[0]
    recrossing = np.flatnonzero(run.patterns[80:130, 1, 0] < LAW[0])[0]
    assert abs(int(sign_change) - int(recrossing)) <= 1


@pytest.mark.claim("P2-P3.8-all")
def test_all_other_tokens_dilute_with_one_dominant_token_but_not_with_two():
    alone, rival = (cycle.rank_one_plateau(markov.sticky_chain(law, 0.3)) for law in (LAW, (0.46, 0.37, 0.17)))
    every = [bool(np.all(p.pattern[1:, 0] < p.flow.chain.stationary[0])) for p in (alone, rival)]
    assert every == [True, False]
    assert judged("P2-P3.8-all", share_of_chains=np.mean(every)) == "holds in part"
    assert rival.pattern[1, 0] > 0.46 > rival.pattern[2, 0]  # the second frequent token joins the first, the rare one turns


def test_ten_numbers_at_one_moment_predict_the_full_run():
    run, reduced = whole_cycle(), cycle.RankOneFlow(CHAIN)
    states = reduced.project(MODEL, run.parameters[45:140])
    _, path = reduced.integrate(states[0], 94, times=np.arange(95.0))
    np.testing.assert_allclose(reduced.loss(path), run.loss[45:140], atol=2e-3)
    np.testing.assert_allclose(path[:, :4], states[:, :4], atol=0.02)
    np.testing.assert_allclose(reduced.pattern(path)[-1], run.patterns[139], atol=5e-3)


@settings(max_examples=20, deadline=None)
@given(states(), st.integers(2, 5), st.integers(0, 2**31))
def test_projection_undoes_the_embedding_in_the_full_parameters(case, width, seed):
    reduced, state = case
    model = markov.PopulationModel(reduced.chain, width)
    a, w = (v / np.linalg.norm(v) for v in np.random.default_rng(seed).standard_normal((2, width)))
    assume(abs(state[0]) > 1e-3 and abs(state[-1] + state[-2]) > 1e-3)
    back = reduced.project(model, reduced.embed(state, model, a, w))
    sign = np.sign(state[0])
    expected = np.concatenate([sign * state[:-2], np.sign(state[-1] + state[-2]) * state[-2:]])
    np.testing.assert_allclose(back, expected, atol=1e-12)


def test_with_the_embedding_held_focus_stays():
    reduced = cycle.RankOneFlow(CHAIN)
    start = reduced.near_saddle(1e-3)
    _, (held,) = reduced.integrate(start, 400, held=("gamma",))
    _, (free,) = reduced.integrate(start, 400)
    assert np.array_equal(held[:4], start[:4])
    assert np.all(reduced.pattern(held)[:, 0] > LAW[0])
    assert np.all(reduced.pattern(free)[1:, 0] < LAW[0] - 0.1)
    assert reduced.loss(held) > reduced.loss(free) + 0.05
    with pytest.raises(ValueError, match="held = 'pi'"):
        reduced.integrate(start, 1, held=("pi",))


@pytest.mark.claim("P2-P3.8-dilute")
def test_row_entropies_fall_and_then_rise_above_where_they_started():
    entropies = whole_cycle().row_entropies
    dips, rises = entropies[:130, 1:3].min(0), entropies[:320, 1:3].max(0)
    np.testing.assert_allclose(dips, [0.684, 0.7195], atol=0.005)
    np.testing.assert_allclose(rises, [1.069, 1.122], atol=0.01)
    assert judged("P2-P3.8-dilute", row_2_rise=(rises - dips)[0], row_3_rise=(rises - dips)[1]) == "holds"
    assert entropies[:320, 0].min() < 1e-3


# -------------------------------------------------------------------------------------------------------------------------------- Stage IV


@pytest.mark.parametrize("chain", [CHAIN, cycle.twin_chain(0.6, TWINS, 0.04, 0.5), markov.sticky_chain([0.7, 0.2, 0.1], 0.3)])
def test_reduced_flow_comes_to_rest_at_the_rank_one_optimum(chain):
    plateau = cycle.rank_one_plateau(chain)
    assert plateau.loss == pytest.approx(markov.low_rank_optimum(chain, 1).loss, abs=1e-10)
    assert plateau.gradient_norm < 1e-13


@pytest.mark.parametrize("pi_1, d, stickiness", [(0.6, 4, 0.5), (0.75, 4, 0.5), (0.6, 5, 0.3)])
def test_symmetric_plateau_has_the_closed_form(pi_1, d, stickiness):
    closed = cycle.symmetric_plateau(pi_1, d, stickiness)
    plateau = twins(0.0, pi_1, (0.0,) * (d - 1), stickiness)
    assert plateau.loss == pytest.approx(closed.loss, abs=1e-13)
    beta = plateau.flow.split(plateau.state).beta
    np.testing.assert_allclose(plateau.mixed[:2] * (beta[0] - beta[1]), [closed.frequent, closed.low], atol=1e-10)


@pytest.mark.claim("P2-T3.9-plateau")
def test_plateau_of_both_flows_is_the_rank_one_optimum():
    symmetric = markov.sticky_chain([0.6, 0.4 / 3, 0.4 / 3, 0.4 / 3], 0.5)
    search, symmetric_search = (markov.low_rank_optimum(chain, 1).loss for chain in (CHAIN, symmetric))
    measured = {
        "reduced_flow": abs(cycle.rank_one_plateau(CHAIN).loss - search),
        "full_flow": abs(whole_cycle().loss[220] - search),
        "symmetric_closed_form": abs(cycle.symmetric_plateau(0.6, 4, 0.5).loss - symmetric_search),
    }
    assert judged("P2-T3.9-plateau", **measured) == "holds"


def transversal(delta, width):
    """Hessian eigenvalues of the full model at the plateau, and those of the reduced flow."""
    plateau = twins(delta)
    model = markov.PopulationModel(plateau.flow.chain, width)
    e = np.eye(width)
    point = plateau.flow.embed(plateau.state, model, e[0], e[-1])
    assert np.abs(model.gradient(point)).max() < 1e-13
    return np.linalg.eigvalsh(cycle.hessian(model, point)), np.linalg.eigvalsh(cycle.hessian(plateau.flow, plateau.state)), plateau


@pytest.mark.claim("P2-T3.9-degenerate")
def test_twins_leave_no_way_out_at_second_order():
    full, reduced, plateau = transversal(0.0, 3)
    assert np.abs(plateau.logit_gradient).max() < 1e-12
    assert judged("P2-T3.9-degenerate", largest_eigenvalue=max(-full.min(), 0.0)) == "holds"
    # all non-zero eigenvalues are those of the reduced flow: every transversal direction is flat
    np.testing.assert_allclose(full[full > 1e-9], reduced[reduced > 1e-9], atol=1e-9)


@pytest.mark.claim("P2-T3.9-nu")
@pytest.mark.parametrize("width", [2, 3, 5])
def test_unequal_twins_open_m_minus_one_directions_at_rate_nu(width):
    full, _, plateau = transversal(0.02, width)
    nu = plateau.escape_rates[0]
    assert nu == pytest.approx(0.00255, rel=0.02)
    assert full[0] == pytest.approx(-nu, rel=1e-6)
    assert count(full, -nu, 1e-9) == width - 1


@pytest.mark.claim("P2-T3.9-nu")
@pytest.mark.claim("P2-T3.9-second")
@pytest.mark.parametrize("pi_1, offsets, stickiness", [(0.6, TWINS, 0.5), (0.75, TWINS, 0.5), (0.6, (1.0, 0.5, -0.2, -1.3), 0.3)])
def test_escape_rate_is_linear_in_delta_and_the_second_cubic(pi_1, offsets, stickiness):
    deltas = np.array([0.0005, 0.001, 0.002]) * (0.25 if len(offsets) == 4 else 1)
    rates = np.array([twins(delta, pi_1, offsets, stickiness).escape_rates for delta in deltas])
    assert judged("P2-T3.9-nu", slope=slope(deltas, rates[:, 0])) == "holds"
    assert judged("P2-T3.9-second", slope=slope(deltas, rates[:, 1])) == "holds"


@pytest.mark.claim("P2-T3.9-prefactor")
@pytest.mark.parametrize(
    "pi_1, offsets, stickiness, published",
    [(0.6, TWINS, 0.5, 0.14337918), (0.75, TWINS, 0.5, 0.09385197), (0.6, (1.0, 0.5, -0.2, -1.3), 0.3, 0.00667708)],
)
def test_prefactor_of_the_escape_rate_has_the_closed_form(pi_1, offsets, stickiness, published):
    predicted = cycle.escape_prefactor(twins(0.0, pi_1, offsets, stickiness), offsets)
    assert predicted == pytest.approx(published, rel=1e-5)
    measured = twins(1e-5, pi_1, offsets, stickiness).escape_rates[0] / 1e-5
    assert judged("P2-T3.9-prefactor", relative_error=abs(measured / predicted - 1)) == "holds"


@pytest.mark.claim("P2-T3.9-zero")
def test_escape_rate_is_quadratic_where_its_constant_vanishes():
    def size(stickiness):
        return cycle.escape_prefactor(twins(0.0, stickiness=stickiness), TWINS)

    at = minimize_scalar(size, bounds=(0.37, 0.41), method="bounded", options={"xatol": 1e-7}).x
    assert at == pytest.approx(0.38940, abs=1e-4)
    assert size(at) < 1e-6 < 1e-3 < min(size(0.37), size(0.41))
    deltas = np.array([0.0005, 0.001, 0.002])
    assert judged("P2-T3.9-zero", slope=slope(deltas, [twins(d, stickiness=at).escape_rates[0] for d in deltas])) == "holds"


@pytest.mark.claim("P2-T3.9-tang")
@pytest.mark.parametrize("delta", [0.0, 0.01, 0.05])
def test_trap_four_zero_modes_are_gauges_and_not_slow_directions(delta):
    plateau = twins(delta)
    values = np.linalg.eigvalsh(cycle.hessian(plateau.flow, plateau.state))
    assert judged("P2-T3.9-tang", largest_eigenvalue=np.abs(values[:4]).max()) == "holds"
    assert count(values, 0) == 4  # exactly, at every delta; complex steps leave no noise to hide in
    assert values[4] > 0.01
    gamma, beta, q, k = plateau.flow.split(plateau.state)
    zero = np.linalg.eigh(cycle.hessian(plateau.flow, plateau.state))[1][:, :4]
    gauges = [
        np.concatenate([0 * gamma, 0 * beta, [q, -k]]),
        np.concatenate([gamma, -beta, [-q, -k]]),
        np.concatenate([0 * gamma, 1 + 0 * beta, [0, 0]]),
    ]
    for gauge in gauges:
        assert np.linalg.norm(zero.T @ gauge) == pytest.approx(np.linalg.norm(gauge), rel=1e-9)


@pytest.mark.claim("P2-T3.9-R")
@pytest.mark.parametrize("d", [3, 4, 6])
def test_twins_are_stable_within_rank_one_exactly_when_R_exceeds_one(d):
    seen, agree = set(), []
    for pi_1 in (0.45, 0.7):
        for stickiness in (0.2, 0.4, 0.55, 0.65, 0.8):
            R = cycle.symmetry_ratio(pi_1, d, stickiness)
            plateau = twins(0.0, pi_1, (0.0,) * (d - 1), stickiness)
            values = np.linalg.eigvalsh(cycle.hessian(plateau.flow, plateau.state))
            agree.append((values.min() > -1e-10) == (R > 1))
            block = np.linalg.eigvalsh(cycle.twin_block(plateau))
            assert np.sign(np.linalg.det(cycle.twin_block(plateau))) == np.sign(R - 1)
            for eigenvalue in block:
                assert count(values, eigenvalue, 1e-8) >= d - 2
            seen.add(bool(R > 1))
    assert seen == {True, False}
    assert judged("P2-T3.9-R", agreement=np.mean(agree)) == "holds"


@pytest.mark.claim("P2-T3.9-R")
def test_thresholds_of_R():
    expected = {(0.6, 4): 0.585, (0.75, 4): 0.708, (0.6, 5): 0.623, (0.4, 6): 0.462, (0.5, 10): 0.644}
    found = {case: brentq(lambda lam, case=case: float(cycle.symmetry_ratio(*case, lam)) - 1, 0.05, 0.95) for case in expected}
    assert found == pytest.approx(expected, abs=5e-4)
    assert np.shape(cycle.symmetry_ratio(np.array([[0.5], [0.6]]), 4, np.array([0.3, 0.5, 0.7]))) == (2, 3)


@pytest.mark.claim("P2-T3.9-stall")
def test_twins_stall_when_R_exceeds_one_and_part_by_themselves_below():
    chains_ = markov.sticky_chain([0.6, 0.4 / 3, 0.4 / 3, 0.4 / 3], [0.5, 0.7])
    model = markov.PopulationModel(chains_, 8)
    stuck, free = flow.flows(model, model.initial(1e-3, [0, 0]), 900, times=[0, 500, 700, 900], certify=False)
    closed = cycle.symmetric_plateau(0.6, 4, np.array([0.5, 0.7])).loss
    assert judged("P2-T3.9-stall", distance_to_plateau=np.abs(stuck.loss[1:] - closed[0]).max()) == "holds"
    assert closed[0] - chains_.floor[0] == pytest.approx(0.134308, abs=1e-5)
    assert np.all(stuck.singular_values["embedding"][:, 1] < 0.2 * stuck.singular_values["embedding"][:, 0] + (stuck.times < 10))
    assert free.loss[-1] < closed[1] - 0.02


@pytest.mark.claim("P2-T3.9-stuck")
def test_twins_are_not_stuck_in_all_settings():
    grid, frequent = np.linspace(0.05, 0.95, 19), np.linspace(0.4, 0.9, 11)
    ratio = np.stack([cycle.symmetry_ratio(frequent, d, grid[:, None]) for d in (3, 4, 6, 10)])  # [d, stickiness, pi_1]
    assert judged("P2-T3.9-stuck", share_of_settings=np.mean(ratio > 1)) == "holds in part"
    assert np.all(ratio[:, grid < 0.12] > 1)  # rarely repeated: stuck
    assert np.all(ratio[:, grid > 0.93] < 1)  # often repeated: they part
    assert np.all(np.diff(ratio, axis=1) < 0)


def test_parting_twins_leave_at_the_negative_eigenvalue_of_their_block():
    chain = cycle.twin_chain(0.6, (0.0,) * 3, 0.0, 0.7)
    plateau = cycle.rank_one_plateau(chain)
    rate = -np.linalg.eigvalsh(cycle.twin_block(plateau))[0]
    model = markov.PopulationModel(chain, 8)
    run = flow.flow(model, model.initial(1e-3, 0), 330, certify=False)
    spread = np.ptp(plateau.flow.project(model, run.parameters)[:, 1:4], axis=1)
    window = (spread > 0.005) & (spread < 0.05) & (run.times > 140)
    assert np.polyfit(run.times[window], np.log(spread[window]), 1)[0] == pytest.approx(rate, rel=0.05)


def test_trap_an_exactly_symmetric_start_never_parts_even_where_it_is_unstable():
    plateau = twins(0.0, 0.6, (0.0,) * 3, 0.7)
    assert cycle.symmetry_ratio(0.6, 4, 0.7) < 1
    assert plateau.gradient_norm < 1e-13  # looks like the end ...
    assert np.ptp(plateau.flow.split(plateau.state).gamma[1:]) < 1e-9
    assert np.linalg.eigvalsh(cycle.hessian(plateau.flow, plateau.state))[0] < -1e-4  # ... and is a saddle
    state = plateau.flow.near_saddle(1e-3)
    _, path = plateau.flow.integrate(state, 3000)
    assert np.ptp(plateau.flow.split(path[0]).gamma[1:]) < 1e-12
    state[1] += 1e-9  # a hair of difference is enough
    _, path = plateau.flow.integrate(state, 3000)
    assert np.ptp(plateau.flow.split(path[0]).gamma[1:]) > 0.1


def test_only_tokens_that_the_chain_cannot_tell_apart_are_twins():
    assert np.array_equal(cycle.RankOneFlow(CHAIN).twins, np.eye(10))
    average = cycle.RankOneFlow(cycle.twin_chain(0.6, TWINS, 0.0, 0.5)).twins
    np.testing.assert_allclose(average[1:4, 1:4], 1 / 3)
    assert average[0, 0] == 1
    cyclic = markov.general_chain([[0.2, 0.5, 0.3], [0.3, 0.2, 0.5], [0.5, 0.3, 0.2]])  # equal frequencies, but no swap keeps P
    assert np.array_equal(cycle.RankOneFlow(cyclic).twins, np.eye(8))


@pytest.mark.claim("P2-T3.9-escape")
@pytest.mark.parametrize("delta", [0.04, 0.08])
def test_second_embedding_direction_grows_at_nu(delta):
    plateau = twins(delta)
    model = markov.PopulationModel(plateau.flow.chain, 8)
    noise = model.initial(1e-6, 0)
    start = plateau.flow.embed(plateau.state, model, np.eye(8)[0], np.eye(8)[1]) + noise
    nu = plateau.escape_rates[0]
    run = flow.flow(model, start, 9 / nu, times=np.linspace(3, 8, 11) / nu, atol=1e-10, certify=False)
    rate = np.polyfit(run.times, np.log(run.singular_values["embedding"][:, 1]), 1)[0]
    assert judged("P2-T3.9-escape", rate_over_predicted=rate / nu) == "holds"


@pytest.mark.claim("P2-T3.9-escape")
def test_full_flow_from_the_origin_leaves_the_plateau_at_nu():
    plateau = twins(0.08)
    model = markov.PopulationModel(plateau.flow.chain, 8)
    run = flow.flow(model, model.initial(1e-4, 0), 560, certify=False)
    second = run.singular_values["embedding"][:, 1]
    window = (np.abs(run.loss - plateau.loss) < 1e-4) & (second < 0.1)
    assert window.sum() > 50
    assert np.polyfit(run.times[window], np.log(second[window]), 1)[0] == pytest.approx(plateau.escape_rates[0], rel=0.02)


# --------------------------------------------------------------------------------------------------------------------------- whole cycle


@pytest.mark.claim("P2-cycle")
def test_first_plateau_is_at_the_rank_one_level_and_the_second_cycle_stays_above_rank_two():
    run = whole_cycle()
    one, two = (markov.low_rank_optimum(CHAIN, k).loss for k in (1, 2))
    gap = abs(run.loss[220] - one)
    assert judged("P2-cycle", first_plateau_gap=gap, below_rank_1=one - run.loss[-1], above_rank_2=run.loss[-1] - two) == "holds"
    assert np.all(run.loss >= two)
    assert run.loss[55] == pytest.approx(CHAIN.unigram_level, abs=2e-3)


def test_a_decade_of_init_scale_costs_what_the_rates_say():
    start = MODEL.initial(1.0, 0)
    runs = flow.flows(MODEL, start * np.array([[1e-3], [1e-4]]), 150, stops={"half": flow.norm_above("W_Q", 0.5)}, certify=False)
    rates = cycle.condensation_rate(LAW), cycle.focus_rate(CHAIN)
    assert runs[1].times[-1] - runs[0].times[-1] == pytest.approx(sum(map(cycle.time_per_decade, rates)), rel=0.04)


UNIFORM = markov.sticky_chain([0.25] * 4, 0.5)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: cycle.condensation_rate([0.6, 0.3]), "stationary sums to 0.9"),
        (lambda: cycle.condensation_rate([1.0]), "d < 2"),
        (lambda: cycle.focus_rate(UNIFORM), r"stationary is uniform \(all 0.25\)"),
        (lambda: cycle.saddle_profiles([0.5, 0.5]), r"uniform \(all 0.5\)"),
        (lambda: cycle.saddle_profiles([0.5, 0.5, 0.0]), r"stationary = 0 at index \(2,\)"),
        (lambda: cycle.condensation_direction(markov.PopulationModel(UNIFORM, 2), np.zeros(24)), r"uniform \(all 0.25\)"),
        (lambda: cycle.focus_saddle(MODEL, np.zeros(8)), "norm_of_direction = 0"),
        (lambda: cycle.focus_saddle(MODEL, np.ones(7)), r"direction has shape \(7,\)"),
        (
            lambda: cycle.attention_direction(markov.PopulationModel(markov.sticky_chain(LAW, 0.0), 8), MODEL.initial(1, 0), np.eye(8)[0]),
            "c = 0",
        ),
        (lambda: cycle.rank_one_plateau(markov.sticky_chain(LAW, 0.0)), "c = 0"),
        (lambda: cycle.rank_one_plateau(markov.sticky_chain([0.35, 0.325, 0.325], 0.15)), r"c = 8.45e-09 takes t = 3.27e\+09"),
        (lambda: cycle.time_per_decade(0.0), "rate = 0"),
        (lambda: cycle.RankOneFlow(CHAIN).near_saddle(0.0), "init_scale = 0"),
        (lambda: cycle.RankOneFlow(CHAIN).split(np.zeros(9)), "state has 9 entries; expected 10 for d = 4"),
        (lambda: cycle.RankOneFlow(CHAIN).integrate(np.zeros(10), -1.0), "t_end = -1"),
        (lambda: cycle.twin_chain(0.6, (1.0, 0.0, 0.0), 0.01, 0.5), "offsets sum to 1; expected 0"),
        (lambda: cycle.twin_chain(0.6, TWINS, 0.2, 0.5), "stationary = -0.0666667"),
        (lambda: cycle.twin_chain(1.2, TWINS, 0.0, 0.5), "pi_1 = 1.2"),
        (lambda: cycle.symmetry_ratio(0.6, 4, 0.0), "stickiness = 0"),
        (lambda: cycle.symmetry_ratio(0.6, 2, 0.5), "vocabulary = 2; expected a finite number >= 3"),
        (lambda: cycle.symmetric_plateau(0.6, 1, 0.5), "vocabulary = 1"),
        (lambda: cycle.twin_block(twins(0.02)), "expected at least two equal ones"),
        (lambda: cycle.escape_prefactor(twins(0.0), (1.0, 1.0, 1.0)), "offsets sum to 3"),
        (lambda: cycle.escape_prefactor(twins(0.0), (1.0, -1.0)), r"offsets has shape \(2,\)"),
        (lambda: cycle.symmetric_dilution(np.ones(3), np.ones(4) / 4), r"stationary has shape \(4,\)"),
    ],
)
def test_bad_input_names_the_value(call, words):
    with pytest.raises(ValueError, match=words):
        call()
