"""Errors about bad input name the value, what was expected and what to do."""

import numpy as np
import pytest

from lib import checks


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: checks.positive("rates", eta_qk=0.0), "rates: eta_qk = 0; expected a finite number > 0"),
        (lambda: checks.positive("rates", eta_qk=[1.0, -2.0]), r"eta_qk = -2 at index \(1,\)"),
        (lambda: checks.positive("rates", eta_qk=float("nan")), "eta_qk = nan"),
        (lambda: checks.finite("loss", loss=np.inf), "loss = inf"),
        (lambda: checks.at_least("sizes", 0, n=-1), "n = -1; expected a finite number >= 0"),
        (
            lambda: checks.in_open("ratio_for", 0.25, 1, alpha=0.25),
            "alpha = 0.25; expected a number strictly between 0.25 and 1",
        ),
        (lambda: checks.in_closed("mass", 0, 1, mass=1.5), "mass = 1.5; expected a number from 0 to 1"),
        (lambda: checks.integer_at_least("setting", 1, m=0), "m = 0; expected a whole number >= 1"),
        (lambda: checks.integer_at_least("setting", 1, m=2.0), "m = 2.0"),
        (lambda: checks.integer_at_least("setting", 1, m=True), "m = True"),
        (lambda: checks.one_of("model", ["a", "b"], kind="c"), "kind = 'c'; expected one of 'a', 'b'"),
        (lambda: checks.shape("f", "x", np.zeros((2, 3)), (3, None)), r"x has shape \(2, 3\); expected \(3, 'any'\)"),
        (lambda: checks.rows_sum_to_one("f", [[0.5, 0.5], [0.5, 0.3421]]), r"row \[1\] sums to 0.8421 \(1 of 2 rows"),
        (lambda: checks.rows_sum_to_one("f", [[np.nan, 1.0]]), "sums to nan"),
        (lambda: checks.positive("rates", eta="fast"), "eta = 'fast' is not a number"),
    ],
)
def test_the_error_names_value_and_expectation(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_good_values_pass():
    checks.positive("f", a=1.0, b=[1, 2], c=np.ones(3))
    checks.in_open("f", 0, 1, a=0.5)
    checks.integer_at_least("f", 1, m=np.int64(3))
    checks.shape("f", "x", np.zeros((2, 3)), (2, None))
    checks.rows_sum_to_one("f", np.full((2, 3, 4), 0.25))
