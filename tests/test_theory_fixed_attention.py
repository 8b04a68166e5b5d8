import numpy as np
import pytest
from scipy import integrate

from lib.book import claims
from lib.theory import fixed_attention as fixed

SETTING = {"classes": 4, "pool": 10}


def flow(share, time, factorised, start=0.0):
    """Logit gap by brute force: the equation for mu_ov, integrated."""
    M, b = SETTING["classes"], SETTING["pool"]

    def slope(_, v):
        drive = share / (b * (np.exp(share * v) + M - 1))
        return 2 * np.sqrt(b) * v * drive if factorised else drive

    run = integrate.solve_ivp(slope, (0, time), [start / share], method="DOP853", rtol=1e-12, atol=1e-14)
    return share * run.y[0, -1]


@pytest.mark.claim("P1-F3-FLOW")
def test_loss_at_fixed_attention_depends_on_share_squared_times_time_if_collapsed_and_share_times_time_if_factorised():
    collapsed = [flow(a, t, False) / fixed.collapsed_logit(a, t, **SETTING) - 1 for a in (0.2, 0.5, 1.0) for t in (1.0, 1e3, 1e5)]
    factorised = [
        flow(a, t, True, start=0.01) / fixed.factorised_logit(a, t, start=0.01, **SETTING) - 1
        for a in (0.2, 0.5, 1.0)
        for t in (1.0, 30.0, 1e3)
    ]
    worst = {"collapsed": float(np.abs(collapsed).max()), "factorised": float(np.abs(factorised).max())}
    assert claims.judge("P1-F3-FLOW", {"theory": worst}).verdict == "holds"


def test_half_the_attention_takes_four_times_as_long_collapsed_and_twice_as_long_factorised():
    assert fixed.collapsed_logit(0.5, 400.0, **SETTING) == pytest.approx(float(fixed.collapsed_logit(1.0, 100.0, **SETTING)), rel=1e-14)
    assert fixed.factorised_logit(0.5, 20.0, start=0.1, **SETTING) == pytest.approx(
        fixed.factorised_logit(1.0, 10.0, start=0.1, **SETTING), rel=1e-12
    )


def test_fixed_attention_starts_where_it_is_told():
    assert fixed.collapsed_logit(0.7, 0.0, **SETTING) == pytest.approx(0, abs=1e-15)
    assert fixed.factorised_logit(0.7, 0.0, start=0.3, **SETTING) == 0.3
    assert fixed.loss_of(0.0, 4) == pytest.approx(np.log(4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"share": 0.0}, "share = 0"),
        ({"share": 1.5}, "share = 1.5"),
        ({"time": -1.0}, "time = -1"),
        ({"classes": 1}, "classes = 1"),
        ({"pool": 0}, "pool = 0"),
    ],
)
def test_fixed_attention_refuses_what_makes_no_sense(change, message):
    with pytest.raises(ValueError, match=message):
        fixed.collapsed_logit(**({"share": 0.5, "time": 1.0} | SETTING | change))


def test_factorised_output_refuses_to_start_at_its_fixed_point():
    with pytest.raises(ValueError, match="start = 0"):
        fixed.factorised_logit(0.5, 1.0, start=0.0, **SETTING)
