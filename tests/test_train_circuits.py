"""Descent of the two circuits: it is gradient descent, it reports what it says, and it refuses what can't be right."""

import numpy as np
import pytest
import torch

from lib.data.two_pools import TwoPools
from lib.models.circuits import CODES, TwoCircuits
from lib.train.circuits import descend

LAW = TwoPools(classes=3, pool=2, common_pool=5, distinct_slots=2, common_slots=3)


def build(code="FAFO", **options):
    return TwoCircuits.from_code(code, LAW.vocabulary, LAW.classes, **({"init": "balanced", "ensemble": (2,), "seed": 0} | options))


@pytest.mark.parametrize("code", CODES)
def test_each_step_is_a_gradient_step_with_its_circuits_rate(code):
    model, plain = build(code), build(code)
    sample = LAW.sample(31, 1)
    run = descend(model, LAW, sample, eta_qk=0.3, eta_ov=0.7, steps=3)
    query, label, tokens = (torch.as_tensor(x) for x in (sample.query, sample.label, sample.tokens))
    for step in range(4):
        loss = plain.loss(query, label, tokens=tokens)
        np.testing.assert_allclose(run.loss[step], loss.detach().numpy(), rtol=0, atol=1e-12)
        pattern = plain.pattern(query, tokens=tokens)  # [seed, batch, key]
        mass = (pattern * torch.as_tensor(LAW.is_distinct(sample.tokens))).sum(-1).mean(-1)
        np.testing.assert_allclose(run.mass[step], mass.detach().numpy(), rtol=0, atol=1e-12)
        if step == 3:
            break
        slopes = torch.autograd.grad(loss.sum(), list(plain.parameters()))
        with torch.no_grad():
            for (name, parameter), slope in zip(plain.named_parameters(), slopes, strict=True):
                parameter -= (0.3 if name in ("W_Q", "W_K", "W_QK") else 0.7) * slope
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_training_finds_the_distinct_tokens():
    run = descend(build("CACO"), LAW, LAW.sample(200, 0), eta_qk=2.0, eta_ov=2.0, steps=150)
    assert (run.loss[-1] < 0.1 * run.loss[0]).all()
    assert (run.mass[-1] > LAW.uniform_mass + 0.15).all()


def test_bad_input_is_refused():
    options = {"sample": LAW.sample(5, 0), "eta_qk": 1.0, "eta_ov": 1.0, "steps": 2}
    small = TwoCircuits(LAW.vocabulary - 1, LAW.classes)
    with pytest.raises(ValueError, match=f"vocabulary {LAW.vocabulary - 1} and 3 outputs; expected {LAW.vocabulary} and 3"):
        descend(small, LAW, **options)
    with pytest.raises(ValueError, match="eta_qk = 0"):
        descend(build(), LAW, **(options | {"eta_qk": 0.0}))
    with pytest.raises(ValueError, match="steps = 0"):
        descend(build(), LAW, **(options | {"steps": 0}))
    with pytest.raises(ValueError, match=r"not finite at step \d+ .*lower the rates"):
        descend(build(), LAW, **(options | {"eta_qk": 1e160, "eta_ov": 1e160, "steps": 9}))
