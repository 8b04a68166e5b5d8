"""Flows, first integrals, closed forms and growth of the two scalars of paper 1."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad, solve_ivp
from scipy.optimize import brentq

from lib.book import claims
from lib.theory import two_circuits as tc

properties = settings(max_examples=40, deadline=None, derandomize=True)  # a loaded machine must not fail a test
FOUR = tc.PARAMETRISATIONS
RATIOS = np.array([0.01, 0.1, 1.0, 10.0, 100.0])
LOSSES = np.array([1.0, 0.1, 1e-2, 1e-4])
LAST = 1e-4  # loss at which figure 4 ends
WORLD = tc.FIGURE_4


def start(parametrisation, scale=1e-3):
    return tc.start_of(parametrisation, scale)


def near(expected, rel):
    """pytest.approx without its absolute floor of 1e-12, which would wave small numbers through."""
    return pytest.approx(expected, rel=rel, abs=0)


def verdict(claim_id, **sides):
    return claims.judge(claim_id, sides).verdict


worlds = st.builds(
    tc.Setting,
    classes=st.integers(2, 50),
    distinct=st.integers(1, 20),
    common=st.integers(1, 200),
    pool=st.integers(1, 100),
    queries=st.one_of(st.none(), st.integers(1, 50)),
)
parametrisations = st.sampled_from(FOUR)
ratios = st.floats(1e-3, 1e3)


# --- attention and loss ---------------------------------------------------------------------------------------------------------------


def test_gap_of_log_ten_gives_half_the_attention_to_five_of_fifty_five_tokens():
    assert tc.attention(np.log(10.0)) == pytest.approx(0.5, abs=1e-15)
    assert tc.attention(0.0) == pytest.approx(5 / 55, abs=1e-15)


def test_attention_left_to_common_tokens_keeps_its_digits_when_alpha_rounds_to_one():
    assert tc.attention(60.0) == 1.0
    assert tc.common_attention(60.0) == near(10.0 * np.exp(-60.0), 1e-14)
    assert tc.attention(2000.0) == 1.0


def test_loss_is_log_m_at_logit_zero_and_survives_huge_logits():
    assert tc.loss_of(0.0) == pytest.approx(np.log(20.0), abs=1e-15)
    assert tc.loss_of(700.0) == near(19.0 * np.exp(-700.0), 1e-12)
    assert np.isfinite(tc.loss_of(-1e6))


@properties
@given(loss=st.floats(1e-280, 0.69), world=worlds)
def test_logit_for_a_loss_gives_that_loss(loss, world):
    assert tc.loss_of(tc.logit_for(loss, world), world) == near(loss, 1e-12)


@properties
@given(q=st.floats(1e-3, 30.0), world=worlds)
def test_gap_for_an_attention_gives_that_attention(q, world):
    assert tc.gap_for(tc.attention(q, world), world) == pytest.approx(q, rel=1e-9, abs=1e-2 * np.exp(q - 30))


# --- the flow -----------------------------------------------------------------------------------------------------------------------


@properties
@given(v=st.floats(0.0, 40.0), q=st.floats(0.0, 10.0), ratio=ratios)
def test_collapsed_rates_are_the_two_published_equations(v, q, ratio):
    M, m, n, b = 20, 5, 50, 50
    alpha = m * np.exp(q) / (m * np.exp(q) + n)
    denominator = np.exp(alpha * v) + M - 1
    got = tc.rates(v, q, "CACO", ratio)
    assert got[0] == near(alpha / (b * denominator), 1e-12)
    assert got[1] == near(ratio * (M - 1) * alpha * (1 - alpha) * v / (M * b**2 * denominator), 1e-9)


def test_rates_are_minus_the_loss_gradient_times_a_prefactor():
    v, q, step = 3.0, 1.2, 1e-6
    loss = lambda v, q: tc.loss_of(tc.attention(q) * v)  # noqa: E731
    dv, dq = tc.rates(v, q, "CACO", 1.0)
    assert dv == near(-(loss(v + step, q) - loss(v - step, q)) / (2 * step) / (50 * 19), 1e-8)
    assert dq == near(-(loss(v, q + step) - loss(v, q - step)) / (2 * step) / (20 * 50**2), 1e-8)


@properties
@given(parametrisation=parametrisations, ratio=ratios, scale=st.floats(1e-3, 1.0), world=worlds)
def test_ratio_multiplies_the_query_key_rate_only(parametrisation, ratio, scale, world):
    one = tc.rates(scale, scale, parametrisation, 1.0, world)
    many = tc.rates(scale, scale, parametrisation, ratio, world)
    assert many[0] == near(one[0], 1e-13)
    assert many[1] == near(ratio * one[1], 1e-12)


def test_factorised_circuits_move_by_twice_their_singular_value():
    v, q = 0.7, 0.4
    collapsed, factorised = tc.rates(v, q, "CACO"), tc.rates(v, q, "FAFO")
    assert factorised[0] == near(2 * np.sqrt(50) * v * collapsed[0], 1e-13)
    assert factorised[1] == near(2 * 50 * q * collapsed[1], 1e-13)


@properties
@given(ratio=ratios, queries=st.integers(1, 60), common_pool=st.integers(1, 300))
def test_other_query_counts_and_common_pools_act_as_another_ratio(ratio, queries, common_pool):
    world = replace(WORLD, queries=queries, common_pool=common_pool)
    here = tc.rates(2.0, 1.0, "CACO", ratio, world)
    there = tc.rates(2.0, 1.0, "CACO", tc.effective_ratio(ratio, world))
    assert here[1] == near(there[1], 1e-12)
    assert tc.alpha_at(0.1, ratio, "CACO", world) == near(tc.alpha_at(0.1, tc.effective_ratio(ratio, world)), 1e-12)


# --- first integrals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.claim("P1-INV")
def test_first_integrals_are_conserved_down_to_the_last_loss():
    drift = dict.fromkeys(FOUR, 0.0)
    for parametrisation in FOUR:
        begin = start(parametrisation)
        for ratio in (0.1, 1.0, 10.0):
            flow = tc.integrate(LAST, ratio, parametrisation, start=begin)
            kept = tc.first_integral(flow.mu_ov, flow.mu_qk, ratio, parametrisation, start=begin)
            drift[parametrisation] = max(drift[parametrisation], float(np.abs(kept).max()))
            assert flow.mu_qk[-1] > 10 * max(flow.mu_qk[0], 1e-3) or ratio < 1
    assert verdict("P1-INV", theory=drift) == "holds"


def test_first_integral_of_a_wrong_parametrisation_is_not_conserved():
    flow = tc.integrate(LAST, 1.0, "CACO")
    assert np.abs(tc.first_integral(flow.mu_ov, flow.mu_qk, 1.0, "CAFO")).max() > 1.0


@properties
@given(v=st.floats(1e-3, 50.0), ratio=ratios, parametrisation=parametrisations, world=worlds)
def test_path_lies_on_its_first_integral(v, ratio, parametrisation, world):
    begin = start(parametrisation, 1e-4)
    q = tc.mu_qk_at(v, ratio, parametrisation, world, begin)
    size = 1.0 + abs(tc.first_integral(v, begin.mu_qk + 1e-300, ratio, parametrisation, world, begin))
    assert abs(tc.first_integral(v, q, ratio, parametrisation, world, begin)) < 1e-10 * size


def test_small_gaps_keep_their_relative_precision():
    v, ratio = 1e-6, 1e-3
    drive = ratio * 19 / (20 * 50)
    assert tc.mu_qk_at(v, ratio) == near(drive * v**2 / 2 / (1 + 0.1), 1e-12)


@settings(properties, max_examples=12)
@given(parametrisation=parametrisations, ratio=st.floats(0.05, 20.0), loss=st.floats(1e-4, 0.5), world=worlds)
def test_closed_form_meets_the_integrated_flow(parametrisation, ratio, loss, world):
    begin = start(parametrisation, 1e-2)
    flow = tc.integrate(loss, ratio, parametrisation, world, begin)
    state = tc.state_at(loss, ratio, parametrisation, world, begin)
    assert state.mu_ov == near(flow.mu_ov[-1], 1e-8)
    assert state.mu_qk == near(flow.mu_qk[-1], 1e-8)
    assert state.time == near(flow.time[-1], 1e-8)
    assert state.loss == near(loss, 1e-10)


# --- factorised output in closed form -------------------------------------------------------------------------------------------------


def factor_flow(first, second, copies, end):
    """Both factors of W_OV and the gap of CAFO, by their own equations (a' = sqrt(b) c g, c' = sqrt(b) a g)."""
    sigma = WORLD.ov_singular

    def slope(_, y):
        v = copies * y[0] * y[1] / sigma
        g, gap = tc.rates(v, y[2], "CACO")
        return [sigma * y[1] * g, sigma * y[0] * g, gap, g]

    y = solve_ivp(slope, (0, end), [first, second, 0.0, 0.0], "DOP853", rtol=1e-12, atol=1e-15).y[:, -1]
    return copies * y[0] * y[1] / sigma, y[2], y[3]


@pytest.mark.claim("P1-FO-CLOSED")
def test_one_equation_describes_both_factors_of_the_output():
    eps, end, errors = 0.05, 1e5, {}
    for name, (a, c, copies) in {"unbalanced": (0.3, 0.02, 1), "identity_start": (eps, 0.0, 2)}.items():
        v, q, pushed = factor_flow(a, c, copies, end)
        begin = tc.identity_start("CAFO", eps) if copies == 2 else tc.Start(a * c / WORLD.ov_singular, ov_imbalance=a * a - c * c)
        closed = tc.factorised_strength(pushed, WORLD.ov_singular, begin.mu_ov, begin.ov_imbalance)
        gap = tc.mu_qk_at(v, 1.0, "CAFO", start=begin)
        when = np.exp(tc.log_time_at(v, 1.0, "CAFO", start=begin))
        errors[name] = max(abs(closed / v - 1), abs(gap - q), abs(when / end - 1))
        assert v > 1.0  # far from the start, so that all three had something to do
    assert verdict("P1-FO-CLOSED", theory={name: float(error) for name, error in errors.items()}) == "holds"


def test_unbalanced_strength_tends_to_the_balanced_one():
    exact = tc.factorised_strength(0.5, 2.0, start=0.1)
    assert tc.factorised_strength(0.5, 2.0, start=0.1, imbalance=1e-9) == near(exact, 1e-12)


# --- sharper at the same loss -----------------------------------------------------------------------------------------------------------


@pytest.mark.claim("P1-SHARP")
def test_attention_at_equal_loss_rises_strictly_with_the_ratio():
    grid = np.geomspace(1e-2, 1e2, 41)
    shares, worst = {}, 0.0
    for parametrisation in FOUR:
        begin = start(parametrisation, 1e-2)
        alpha = tc.alpha_at(LOSSES[:, None], grid, parametrisation, start=begin)
        shares[parametrisation] = float((np.diff(alpha, axis=1) > 0).mean())
        for ratio in (0.1, 1.0, 10.0):
            flow = tc.integrate(1e-2, ratio, parametrisation, start=begin)
            back = tc.ratio_for(flow.alpha[-1], 1e-2, parametrisation, start=begin)
            worst = max(worst, float(abs(back / ratio - 1)))
    assert verdict("P1-SHARP", theory={**shares, "closed_form_error": worst}) == "holds"


@properties
@given(parametrisation=parametrisations, ratio=ratios, more=st.floats(1.01, 5.0), loss=st.floats(1e-6, 0.3), world=worlds)
def test_more_ratio_is_more_attention_in_any_world(parametrisation, ratio, more, loss, world):
    begin = start(parametrisation, 1e-2)
    low, high = (tc.state_at(loss, r, parametrisation, world, begin, with_time=False) for r in (ratio, more * ratio))
    assert high.mu_qk > low.mu_qk
    assert high.mu_ov <= low.mu_ov


@properties
@given(parametrisation=parametrisations, ratio=ratios, loss=st.floats(1e-6, 0.3), world=worlds)
def test_ratio_for_inverts_alpha_at(parametrisation, ratio, loss, world):
    begin = start(parametrisation, 0.1)
    alpha = tc.alpha_at(loss, ratio, parametrisation, world, begin)
    rise, room = alpha - tc.attention(begin.mu_qk, world), 1 - alpha
    if min(rise, room) > 1e-6:  # alpha itself carries the digits of both ends
        assert tc.ratio_for(alpha, loss, parametrisation, world, begin) == near(ratio, 1e-8)


def test_explicit_ratio_is_the_printed_formula():
    M, b, odds, alpha, loss = 20, 50, 0.1, 0.6, 0.01
    need = np.log((M - 1) / (np.exp(loss) - 1))
    bracket = np.log(alpha / ((1 - alpha) * odds)) + alpha / (1 - alpha) - odds
    assert tc.ratio_for(alpha, loss) == near(2 * M * b / (M - 1) * (alpha / need) ** 2 * bracket, 1e-13)
    assert tc.ratio_for(alpha, loss, "CAFO") == near(2 * np.sqrt(b) * M * b / (M - 1) * alpha / need * bracket, 1e-13)


@pytest.mark.claim("P1-FO-WEAK")
def test_factorised_output_lowers_attention_at_equal_loss():
    grid = np.geomspace(1e-2, 1e2, 41)
    weaker = tc.alpha_at(LOSSES[:, None], grid, "CAFO") < tc.alpha_at(LOSSES[:, None], grid, "CACO")
    assert verdict("P1-FO-WEAK", theory={"share_lower": float(weaker.mean())}) == "holds"


def test_factorised_attention_sharpens_once_it_has_left_its_saddle():
    assert np.all(tc.alpha_at(LAST, RATIOS, "FACO", start=start("FACO", 1e-2)) > tc.alpha_at(LAST, RATIOS, "CACO"))
    assert tc.alpha_at(1.0, 0.01, "FACO", start=start("FACO", 1e-6)) < tc.alpha_at(1.0, 0.01, "CACO")  # still on the saddle


# --- figure 4 -------------------------------------------------------------------------------------------------------------------------


def end_point(ratio):
    state = tc.state_at(LAST, ratio)
    return {"tau": float(state.tau), "mu_ov": float(state.mu_ov), "mu_qk": float(state.mu_qk), "alpha": float(state.alpha)}


@pytest.mark.claim("P1-F4-R001")
@pytest.mark.claim("P1-F4-R01")
@pytest.mark.parametrize("claim_id, ratio", [("P1-F4-R001", 0.01), ("P1-F4-R01", 0.1)])
def test_slow_ratios_end_where_the_paper_prints(claim_id, ratio):
    assert verdict(claim_id, theory=end_point(ratio)) == "holds"
    assert verdict(claim_id, theory=end_point(1.05 * ratio)) == "fails"


@pytest.mark.claim("P1-F4-MONO")
def test_end_points_of_figure_four_are_ordered_and_agree_with_the_integrated_flow():
    state = tc.state_at(LAST, RATIOS)
    error = 0.0
    for i, ratio in enumerate(RATIOS):
        flow = tc.integrate(LAST, ratio)
        pairs = ((flow.time[-1], state.time[i]), (flow.mu_ov[-1], state.mu_ov[i]), (flow.mu_qk[-1], state.mu_qk[i]))
        error = max(error, *(abs(a / b - 1) for a, b in pairs))
    ends = {f"alpha_at_{r:g}": float(a) for r, a in zip(RATIOS, state.alpha, strict=True) if r >= 1}
    series = {"alpha": state.alpha.tolist(), "mu_qk": state.mu_qk.tolist(), "mu_ov": state.mu_ov.tolist()}
    assert verdict("P1-F4-MONO", theory={**series, **ends, "closed_form_error": float(error)}) == "holds"


def test_end_point_by_hand():
    """Figure 4 at r = 1 from its two equations alone: a root and an ordinary quadrature, none of lib's."""
    need = np.log(19 / np.expm1(LAST))

    def alpha_of(q):
        return 0.1 * np.exp(q) / (1 + 0.1 * np.exp(q))

    def gap_of(v):
        return brentq(lambda q: q + 0.1 * np.expm1(q) - 19 / 1000 * v * v / 2, 0, 30, xtol=1e-14)

    v_end = brentq(lambda v: alpha_of(gap_of(v)) * v - need, 1, 200, xtol=1e-13)
    time = quad(lambda v: 50 * (np.exp(alpha_of(gap_of(v)) * v) + 19) / alpha_of(gap_of(v)), 0, v_end, epsrel=1e-11, limit=200)[0]
    state = tc.state_at(LAST, 1.0)
    assert state.mu_ov == near(v_end, 1e-11)
    assert state.time == near(time, 1e-9)


@pytest.mark.claim("P1-TIME-NOTMONO")
def test_hundredfold_ratio_needs_longer_than_tenfold_to_the_last_loss():
    ten, hundred = tc.time_at(LAST, [10.0, 100.0])
    assert verdict("P1-TIME-NOTMONO", theory={"extra_time": float(hundred / ten - 1)}) == "holds"
    early = tc.time_at(0.1, RATIOS)
    assert np.all(np.diff(early) < 0)  # at a modest loss the order is the naive one


# --- growth -----------------------------------------------------------------------------------------------------------------------------


def late(log10_time, ratio):
    state = tc.state_at_time(np.log(10.0) * np.asarray(log10_time), ratio)
    return state, tc.growth(state)


@pytest.mark.claim("P1-RATE-V")
def test_output_strength_grows_like_the_logarithm_of_time():
    slopes = late([6, 12, 20, 40], 100.0)[1].ov_per_log
    assert verdict("P1-RATE-V", theory={"slope": slopes.tolist()}) == "holds"
    assert late(400, 0.01)[1].ov_per_log == pytest.approx(1.0, abs=0.02)  # slow ratios get there too, much later
    assert late(10_000, 0.01)[1].ov_per_log == pytest.approx(1.0, abs=1e-4)  # where time passes in the last sliver of the path


def test_speeds_of_growth_are_derivatives_of_the_state():
    step, log_time = 1e-4, np.log(1e8)
    speeds = late(8, 1.0)[1]
    before, after = (tc.state_at_time(log_time + s, 1.0) for s in (-step, step))
    loglog = np.log(log_time + step) - np.log(log_time - step)
    assert speeds.ov_per_log == near((after.mu_ov - before.mu_ov) / (2 * step), 1e-6)
    assert speeds.qk_per_loglog == near((after.mu_qk - before.mu_qk) / loglog, 1e-6)
    assert speeds.qk_exponent == near((np.log(after.mu_qk) - np.log(before.mu_qk)) / loglog, 1e-6)


@pytest.mark.parametrize("parametrisation", FOUR)
def test_state_at_a_time_is_reached_at_that_time(parametrisation):
    begin = start(parametrisation, 1e-2)
    goal = np.log(10.0) * np.array([4.0, 40.0])
    state = tc.state_at_time(goal, 3.0, parametrisation, start=begin)
    assert tc.log_time_at(state.mu_ov, 3.0, parametrisation, start=begin) == near(goal, 1e-11)
    assert np.all(np.diff(state.mu_ov) > 0)


@pytest.mark.claim("P1-RATE-Q-UB")
def test_gap_never_exceeds_its_quadratic_ceiling():
    v = np.geomspace(1e-2, 1e3, 400)
    excess = max(float((tc.mu_qk_at(v, r, p) - tc.mu_qk_bound(v, r, p)).max()) for r in (0.01, 1.0, 100.0) for p in ("CACO", "CAFO"))
    assert verdict("P1-RATE-Q-UB", theory={"excess": excess}) == "holds"
    assert tc.mu_qk_at(1e-2, 1.0) > 0.999 * tc.mu_qk_bound(1e-2, 1.0)  # and the ceiling is touched at the start


@pytest.mark.claim("P1-ASYM-Q")
def test_gap_tends_to_twice_the_log_of_the_output_strength_plus_a_constant():
    gaps = []
    for ratio in RATIOS:
        v = np.sqrt(np.array([1e5, 1e7, 1e10]) / (ratio * WORLD.drive_per_ratio))
        gaps.append(np.abs(tc.mu_qk_at(v, ratio) - tc.mu_qk_asymptote(v, ratio)).max())
    assert verdict("P1-ASYM-Q", theory={"largest_gap": float(max(gaps))}) == "holds"


@pytest.mark.parametrize("parametrisation", FOUR)
def test_asymptotes_of_all_four_close_in(parametrisation):
    v = np.array([1e4, 1e8, 1e16])
    begin = start(parametrisation, 1e-2)
    if parametrisation[2] == "C":
        v = np.sqrt(v)
    apart = np.abs(tc.mu_qk_at(v, 10.0, parametrisation, start=begin) - tc.mu_qk_asymptote(v, 10.0, parametrisation))
    assert np.all(np.diff(apart) < 0)
    assert apart[-1] < 0.06


@pytest.mark.claim("P1-RATE-Q")
def test_gap_grows_like_twice_the_iterated_logarithm_not_its_square():
    speeds = late(40, np.array([1.0, 10.0, 100.0]))[1]
    measured = {"loglog_slope": speeds.qk_per_loglog.tolist(), "log_exponent": speeds.qk_exponent.tolist()}
    assert verdict("P1-RATE-Q", theory=measured) == "holds"


@pytest.mark.claim("P1-EXP")
def test_local_exponent_is_the_slope_of_the_path_on_log_axes():
    step, errors = 1e-4, []
    for ratio in RATIOS:
        v = np.geomspace(0.1, 1e3, 60)
        ends = [np.log(tc.mu_qk_at(v * np.exp(s), ratio)) for s in (-step, step)]
        errors.append(np.abs((ends[1] - ends[0]) / (2 * step) - tc.local_exponent(tc.mu_qk_at(v, ratio))).max())
    assert verdict("P1-EXP", theory={"formula_error": float(max(errors))}) == "holds"


@properties
@given(q=st.floats(1e-6, 800.0), factor=st.floats(1.01, 3.0), world=worlds)
def test_local_exponent_falls_from_two_towards_zero(q, factor, world):
    low, high = tc.local_exponent(q, world), tc.local_exponent(q * factor, world)
    assert 0 < high < low <= 2.0 + 1e-12 or (q * factor < 1e-5 and high == pytest.approx(low))


def test_growth_off_the_line_is_its_integral():
    world = replace(WORLD, common_pool=40, queries=3)
    for ratio, end in ((0.01, 80.0), (10.0, 13.0)):
        area = quad(lambda v: 10 * np.exp(-tc.mu_qk_at(v, ratio, "CACO", world)), 0, end, epsrel=1e-11, limit=300)[0]  # noqa: B023
        assert tc.off_line_growth(end, ratio, world) == near(np.sqrt(ratio / 3) * 50 / 40 * area, 1e-6)


# --- bad input --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: tc.Setting(distinct=0), r"distinct = 0; expected a whole number >= 1"),
        (lambda: tc.Setting(common=0), r"common = 0"),
        (lambda: tc.Setting(classes=1), r"classes = 1; expected a whole number >= 2"),
        (lambda: tc.Setting(pool=2.5), r"pool = 2.5"),
        (lambda: tc.Setting(queries=0), r"queries = 0"),
        (lambda: tc.Start(mu_ov=-1.0), r"mu_ov = -1"),
        (lambda: tc.rates(1, 1, "CACO", 0.0), r"rates: ratio = 0"),
        (lambda: tc.rates(1, 1, "CACO", -1.0), r"ratio = -1"),
        (lambda: tc.rates(1, 1, "CACO", np.nan), r"ratio = nan"),
        (lambda: tc.rates(1, 1, "CACO", 1.0, eta_ov=0.0), r"eta_ov = 0"),
        (lambda: tc.rates(1, 1, "CFCF"), r"parametrisation = 'CFCF'; expected one of 'CACO'"),
        (lambda: tc.ratio_for(1 / 11, 0.1), r"alpha = 0.0909091; expected a number strictly between 0.0909091 and 1"),
        (lambda: tc.ratio_for(1.0, 0.1), r"alpha = 1;"),
        (lambda: tc.ratio_for([0.5, 0.05], 0.1), r"alpha = 0.05 at index \(1,\)"),
        (lambda: tc.gap_for(0.05), r"gap_for: alpha = 0.05"),
        (lambda: tc.alpha_at(np.log(20.0), 1.0), r"loss = 2.99573; expected a number strictly between 0 and 2.99573"),
        (lambda: tc.alpha_at(0.0, 1.0), r"loss = 0;"),
        (lambda: tc.alpha_at(1.0, 1.0, "CAFO", start=tc.Start(mu_ov=90.0)), r"not below the loss at the start"),
        (lambda: tc.integrate(1.0, 1.0, "CAFO", start=tc.Start(mu_ov=90.0)), r"not below the loss at the start"),
        (lambda: tc.alpha_at(0.1, 1.0, "FACO"), r"mu_qk starts at 0 and balanced, a saddle that FACO never leaves"),
        (lambda: tc.time_at(0.1, 1.0, "CAFO"), r"mu_ov starts at 0 and balanced, a saddle that CAFO never leaves"),
        (lambda: tc.alpha_at(0.1, 1.0, "FACO", tc.Setting(common_pool=5), tc.Start(mu_qk=0.1)), r"moving common columns need two scalars"),
        (lambda: tc.alpha_at(0.1, 1.0, "FACO", start=tc.identity_start("FACO", 0.1)), r"Use integrate\(\)"),
        (lambda: tc.mu_qk_at(0.5, 1.0, start=tc.Start(mu_ov=1.0)), r"mu_ov = 0.5; expected a finite number >= 1"),
        (lambda: tc.log_time_at(0.0), r"mu_ov = 0; expected a number strictly between 0 and inf"),
        (lambda: tc.state_at_time(np.inf), r"log_time = inf"),
        (lambda: tc.state_at(0.1, with_time=False).time, r"computed without time"),
        (lambda: tc.growth(tc.state_at(0.1, with_time=False)), r"has no time"),
        (lambda: tc.off_line_growth(1.0, 1.0, WORLD), r"common_pool = None; expected the number of common tokens"),
        (lambda: tc.start_of("CAFO", 0.0), r"scale = 0"),
        (lambda: tc.identity_start("FAFO", -1.0), r"eps = -1"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_unbalanced_query_key_start_is_left_to_the_integrator():
    flow = tc.integrate(1e-2, 1.0, "FAFO", start=tc.identity_start("FAFO", 0.1))
    assert flow.mu_qk[0] == flow.mu_ov[0] == 0
    assert flow.loss[-1] == near(1e-2, 1e-9)
    assert flow.alpha[-1] > WORLD.floor
