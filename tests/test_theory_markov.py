"""The population model of paper 2: chain, loss, exact gradient, invariants, levels."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.book import claims
from lib.theory import markov

LAW = (0.75, 0.19, 0.05, 0.01)


@st.composite
def chains(draw, sticky=None):
    """A chain with 2 to 6 tokens: sticky (either sign) or any stochastic matrix."""
    d = draw(st.integers(2, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    law = rng.dirichlet(np.ones(d)) * 0.9 + 0.1 / d
    if draw(st.booleans()) if sticky is None else sticky:
        lowest = -law.min() / (1 - law.min())
        return markov.sticky_chain(law, draw(st.floats(lowest * 0.99, 0.95)))
    return markov.general_chain(rng.dirichlet(np.full(d, 0.7), size=d) * 0.95 + 0.05 / d)


@st.composite
def models(draw):
    """A population model with parameters of a size between nearly linear and saturated."""
    model = markov.PopulationModel(draw(chains()), draw(st.integers(1, 7)))
    scale = 10 ** draw(st.floats(-2, 0.3))
    return model, model.initial(scale, draw(st.integers(0, 2**31)))


def torch_loss(model, parameters):
    """The same loss written for torch, from the definition and with its own layout of the parameters."""
    d, m = model.chain.vocabulary, model.width
    flat = torch.tensor(parameters, dtype=torch.float64, requires_grad=True)
    W_E, W_U, W_Q, W_K = (
        x.reshape(s) for x, s in zip(flat.split([d * m, d * m, m * m, m * m]), [(d, m), (m, d), (m, m), (m, m)], strict=True)
    )
    pi = torch.tensor(model.chain.stationary)
    scores = torch.einsum("im,mn,pn,jp->ij", W_E, W_Q, W_K, W_E)
    pattern = torch.softmax(scores + pi.log(), -1)
    logits = pattern @ W_E @ W_U
    loss = -(pi[:, None] * torch.tensor(model.chain.transition) * torch.log_softmax(logits, -1)).sum()
    loss.backward()
    return loss.item(), flat.grad.numpy()


@pytest.mark.claim("P2-grad")
@settings(max_examples=40, deadline=None)
@given(models())
def test_loss_and_gradient_equal_autograd(case):
    model, parameters = case
    loss, gradient = torch_loss(model, parameters)
    assert model.loss(parameters) == pytest.approx(loss, rel=1e-11)
    error = np.abs(model.gradient(parameters) - gradient).max() / max(np.abs(gradient).max(), 1e-12)
    assert claims.judge("P2-grad", {"theory": {"relative_error": error}}).verdict == "holds"


def test_gradient_of_a_batch_is_the_gradient_of_each_run():
    laws = np.array([LAW, (0.6, 0.2, 0.1, 0.1), (0.4, 0.3, 0.2, 0.1)])
    stickiness = np.array([0.5, -0.1, 0.8])
    batch = markov.PopulationModel(markov.sticky_chain(laws, stickiness), 5)
    parameters = batch.initial(0.7, [11, 12, 13])
    for i in range(3):
        alone = markov.PopulationModel(markov.sticky_chain(laws[i], stickiness[i]), 5)
        assert np.array_equal(parameters[i], alone.initial(0.7, 11 + i))
        np.testing.assert_allclose(batch.gradient(parameters)[i], alone.gradient(parameters[i]), atol=1e-15)
        np.testing.assert_allclose(batch.loss(parameters)[i], alone.loss(parameters[i]), atol=1e-15)
        for many, one in zip(batch.invariants(parameters), alone.invariants(parameters[i]), strict=True):
            np.testing.assert_allclose(many[i], one, atol=1e-14)


def test_views_write_through_and_join_is_the_inverse_of_split():
    model = markov.PopulationModel(markov.sticky_chain(LAW, 0.5), 3)
    parameters = model.initial(1.0, 0)
    assert [w.shape for w in model.split(parameters)] == [(4, 3), (3, 4), (3, 3), (3, 3)]
    assert np.array_equal(model.join(*model.split(parameters)), parameters)
    model.split(parameters).W_K[...] = 0
    assert np.all(parameters[-9:] == 0)
    assert np.all(parameters[:-9] != 0)


def change_of_invariants(model, parameters, direction):
    """Rate of change along a direction; exact, because the invariants are quadratic."""
    forth, back = model.invariants(parameters + direction), model.invariants(parameters - direction)
    return [np.abs(x - y).max() / 2 for x, y in zip(forth, back, strict=True)]


@pytest.mark.claim("P2-inv")
@settings(max_examples=30, deadline=None)
@given(models())
def test_invariants_do_not_change_along_the_gradient(case):
    model, parameters = case
    gradient = model.gradient(parameters)
    scale = np.abs(gradient).max() * np.abs(parameters).max()
    assert max(change_of_invariants(model, parameters, gradient)) <= 1e-11 * max(scale, 1e-12)


@pytest.mark.parametrize("wrong", ["embedding", "unembedding", "W_Q", "W_K"])
def test_invariants_change_along_another_direction(wrong):
    model = markov.PopulationModel(markov.sticky_chain(LAW, 0.5), 3)
    parameters = model.initial(0.5, 0)
    turned = model.gradient(parameters)
    getattr(model.split(turned), wrong)[...] *= -1  # one wrong sign is enough
    assert max(change_of_invariants(model, parameters, turned)) > 1e-4


@settings(max_examples=20, deadline=None)
@given(models(), st.integers(0, 2**31))
def test_rotating_the_width_changes_neither_loss_nor_pattern(case, seed):
    model, parameters = case
    rng = np.random.default_rng(seed)
    R, S = (np.linalg.qr(rng.standard_normal((model.width,) * 2))[0] for _ in range(2))
    w = model.split(parameters)
    turned = model.join(w.embedding @ R, R.T @ w.unembedding, R.T @ w.W_Q @ S, R.T @ w.W_K @ S)
    assert model.loss(turned) == pytest.approx(model.loss(parameters), rel=1e-12)
    np.testing.assert_allclose(model.pattern(turned), model.pattern(parameters), atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(models())
def test_loss_lies_above_the_floor_and_the_pattern_is_a_distribution(case):
    model, parameters = case
    assert model.loss(parameters) >= model.chain.floor - 1e-12
    pattern = model.pattern(parameters)
    assert np.all(pattern >= 0)
    np.testing.assert_allclose(pattern.sum(-1), 1, atol=1e-13)


def test_two_keys_with_scores_zero_and_log_three_share_one_to_three():
    np.testing.assert_allclose(markov.counted_softmax([[0, np.log(3)]], [1, 1]), [[0.25, 0.75]])
    np.testing.assert_allclose(markov.counted_softmax([[0, np.log(3)]], [3, 1]), [[0.5, 0.5]])
    model = markov.PopulationModel(markov.sticky_chain([0.5, 0.5], 0.0), 1)
    parameters = model.join([[1.0], [0.0]], [[0.0, 0.0]], [[np.log(3)]], [[1.0]])
    np.testing.assert_allclose(model.pattern(parameters), [[0.75, 0.25], [0.5, 0.5]])


def test_untrained_model_attends_by_frequency_and_loses_log_d():
    model = markov.PopulationModel(markov.sticky_chain(LAW, 0.5), 3)
    nothing = np.zeros(model.size)
    np.testing.assert_allclose(model.pattern(nothing), np.tile(LAW, (4, 1)))
    assert model.loss(nothing) == pytest.approx(np.log(4))
    assert model.chain.uniform_level == pytest.approx(np.log(4))
    assert np.abs(model.gradient(nothing)).max() == 0


def test_trap_scores_of_seven_hundred_stay_finite():
    scores = np.array([[710.0, 800.0, -900.0, 0.0]])
    np.testing.assert_allclose(markov.counted_softmax(scores, LAW), [[0, 1, 0, 0]], atol=1e-30)
    model = markov.PopulationModel(markov.sticky_chain(LAW, 0.5), 2)
    parameters = model.join(np.outer([27.0, -27.0, 20.0, 1.0], [1, 0]), np.ones((2, 4)) * [1, 0, 500, 0], *2 * [np.eye(2)])
    assert np.abs(model.attention_scores(parameters)).max() > 700
    for value in (model.pattern(parameters), model.loss(parameters), model.gradient(parameters)):
        assert np.all(np.isfinite(value))


def test_trap_an_absent_type_gets_nothing_whatever_its_score():
    pattern = markov.counted_softmax([[0.0, 700.0, np.log(3)]], [1, 0, 1])  # a maximum over all types would leave 0/0
    np.testing.assert_allclose(pattern, [[0.25, 0, 0.75]])
    assert pattern[0, 1] == 0
    np.testing.assert_allclose(markov.counted_softmax([[-2000.0, 0.0, -2000 + np.log(3)]], [1, 0, 1]), [[0.25, 0, 0.75]])


@settings(max_examples=25, deadline=None)
@given(chains())
def test_stationary_law_is_a_fixed_vector(chain):
    np.testing.assert_allclose(chain.stationary @ chain.transition, chain.stationary, atol=1e-13)
    np.testing.assert_allclose(markov.general_chain(chain.transition).stationary, chain.stationary, atol=1e-10)
    assert chain.floor <= chain.unigram_level + 1e-12 <= chain.uniform_level + 2e-12


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 6), st.integers(0, 2**31), st.floats(0.0, 2.0))
def test_random_chain_has_the_asked_frequencies_and_nothing_else_in_common(d, seed, spread):
    law = np.random.default_rng(seed).dirichlet(np.ones(d)) * 0.9 + 0.1 / d
    chain, other = (markov.random_chain(law, s, spread=spread) for s in (seed, seed + 1))
    np.testing.assert_allclose(chain.transition.sum(-1), 1, atol=1e-13)
    np.testing.assert_allclose(law @ chain.transition, law, atol=1e-12)
    np.testing.assert_allclose(markov.random_chain(law, seed, spread=0.0).transition, np.tile(law, (d, 1)), atol=1e-12)
    if spread > 0.1:
        assert np.abs(chain.transition - other.transition).max() > 1e-3


def test_levels_of_the_running_example():
    chain = markov.sticky_chain(LAW, 0.5)
    assert chain.unigram_level == pytest.approx(0.727139, abs=1e-6)
    assert chain.floor == pytest.approx(0.553611, abs=1e-6)
    above = [markov.low_rank_optimum(chain, k).loss - chain.floor for k in (1, 2, 3)]
    assert above == pytest.approx([0.079749, 0.009044, 0], abs=1e-6)


@settings(max_examples=8, deadline=None)
@given(chains())
def test_low_rank_optima_fall_with_the_rank_from_below_unigram_to_the_floor(chain):
    optima = [markov.low_rank_optimum(chain, k, starts=2) for k in range(1, chain.vocabulary)]
    levels = [chain.unigram_level, *[o.loss for o in optima]]
    assert np.all(np.diff(levels) <= 1e-9)
    assert levels[-1] == pytest.approx(chain.floor, abs=1e-7)
    for rank, optimum in enumerate(optima, 1):
        assert np.linalg.matrix_rank(optimum.logits, tol=1e-8 * np.abs(optimum.logits).max()) <= rank


def test_initial_parameters_have_the_asked_scale():
    model = markov.PopulationModel(markov.sticky_chain(LAW, 0.5), 64)
    assert model.initial(1e-3, 3).std() == pytest.approx(1e-3, rel=0.03)
    assert not np.array_equal(model.initial(1e-3, 3), model.initial(1e-3, 4))


MODEL = markov.PopulationModel(markov.sticky_chain(LAW, 0.5), 2)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: markov.sticky_chain([0.5, 0.34], 0.5), "stationary sums to 0.84; expected 1"),
        (lambda: markov.sticky_chain([0.5, 0.5, 0.0], 0.5), r"stationary = 0 at index \(2,\)"),
        (lambda: markov.sticky_chain([1.0], 0.5), "d < 2"),
        (lambda: markov.sticky_chain(LAW, -0.02), r"P_ii = -0.0098 < 0 at index \(3,\) .* expected stickiness >= -0.010101"),
        (lambda: markov.sticky_chain(LAW, 1.0), "stickiness = 1; expected < 1"),
        (lambda: markov.sticky_chain(LAW, np.nan), "stickiness = nan"),
        (lambda: markov.random_chain(LAW, 0, spread=-1.0), "spread = -1"),
        (lambda: markov.random_chain([0.5, 0.6], 0), "stationary sums to 1.1"),
        (lambda: markov.general_chain([[0.5, 0.4], [0.5, 0.5]]), r"not stochastic, row \(0,\) sums to 0.9"),
        (lambda: markov.general_chain([[1.2, -0.2], [0.5, 0.5]]), "transition = -0.2 at index"),
        (lambda: markov.general_chain(np.eye(3)), "not unique"),
        (lambda: markov.general_chain([[1.0, 0.0], [0.5, 0.5]]), "at token 1; drop tokens"),
        (lambda: markov.general_chain([[1.0]]), "d >= 2"),
        (lambda: markov.general_chain(np.ones((2, 3)) / 3), r"shape \(2, 3\)"),
        (lambda: MODEL.initial(0.0, 0), "init_scale = 0; expected a finite number > 0"),
        (lambda: MODEL.initial(-1e-3, 0), "init_scale = -0.001"),
        (lambda: MODEL.split(np.zeros(7)), "parameters have 7 entries; expected 24 for d = 4, m = 2"),
        (lambda: markov.PopulationModel(MODEL.chain, 0), "width = 0"),
        (lambda: markov.low_rank_optimum(MODEL.chain, 0), "rank = 0"),
        (lambda: markov.low_rank_optimum(markov.sticky_chain(LAW, [0.1, 0.2]), 1), "expected one chain"),
        (lambda: markov.counted_softmax([[0.0, 0.0]], [1, -1]), "counts = -1"),
        (lambda: markov.counted_softmax([[0.0, 0.0]], [0, 0]), "counts are all 0"),
    ],
)
def test_bad_input_names_the_value(call, words):
    with pytest.raises(ValueError, match=words):
        call()
