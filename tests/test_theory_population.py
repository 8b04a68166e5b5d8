"""Full matrices of paper 1's clean data against the scalars that describe them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.book import claims
from lib.theory import population as pop
from lib.theory import two_circuits as tc

properties = settings(max_examples=12, deadline=None, derandomize=True)  # a loaded machine must not fail a test
SMALL = pop.Population()  # 3 classes, pools of 4 and 5, 2 + 3 slots
RATES = {"eta_ov": 0.5, "eta_qk": 1.5}
populations = st.builds(
    pop.Population,
    classes=st.integers(2, 4),
    distinct=st.integers(1, 2),
    common=st.integers(1, 3),
    pool=st.integers(2, 4),
    common_pool=st.integers(3, 5),
    queries=st.integers(1, 3),
    replacement=st.booleans(),
)


def verdict(claim_id, **quantities):
    return claims.judge(claim_id, {"theory": quantities}).verdict


# --- the population -------------------------------------------------------------------------------------------------------------------


def test_the_small_population_has_1050_weighted_sequences():
    counts, share = SMALL.sequences
    assert 3 * len(counts) == 1050
    assert share.sum() == pytest.approx(1.0, abs=1e-14)
    assert np.all(counts[:, :4].sum(1) == 2)
    assert np.all(counts[:, 4:].sum(1) == 3)


@properties
@given(populations)
def test_every_token_of_a_pool_is_equally_likely(population):
    counts, share = population.sequences
    expected = [population.distinct / population.pool] * population.pool
    expected += [population.common / population.common_pool] * population.common_pool
    assert share @ counts == pytest.approx(np.array(expected), abs=1e-12)


def test_weights_of_sequences_are_the_multinomial_law():
    counts, share = pop.Population(distinct=2, common=1, pool=2, common_pool=1).sequences
    found = {tuple(row[:2].astype(int)): p for row, p in zip(counts, share, strict=True)}
    assert found == pytest.approx({(2, 0): 0.25, (1, 1): 0.5, (0, 2): 0.25})


def test_gradient_equals_autograd_on_one_hot_sequences():
    """All 2^2 3^1 token sequences of a class written out, torch softmax and cross-entropy: another road to the same numbers."""
    small = pop.Population(classes=3, distinct=2, common=2, pool=2, common_pool=3, queries=2, prior=(1.0, 2.0, 3.0))
    rng = np.random.default_rng(0)
    qk = torch.tensor(rng.normal(size=(6, small.keys)), requires_grad=True)
    ov = torch.tensor(rng.normal(size=(small.keys, 3)), requires_grad=True)
    own = np.stack(np.meshgrid(*[np.arange(2)] * 2, *[np.arange(3)] * 2, indexing="ij"), -1).reshape(-1, 4)  # [sequence, slot]
    total = torch.zeros((), dtype=torch.float64)
    for label in range(3):
        tokens = np.where(np.arange(4) < 2, own + 2 * label, own + 6)
        one_hot = torch.nn.functional.one_hot(torch.tensor(tokens), small.keys).double()  # [sequence, slot, key]
        for query in (2 * label, 2 * label + 1):
            pattern = torch.softmax(one_hot @ qk[query], -1)  # [sequence, slot]
            logits = (pattern[:, None, :] @ one_hot)[:, 0] @ ov
            loss = torch.nn.functional.cross_entropy(logits, torch.full((len(tokens),), label))
            total = total + loss * (label + 1) / 6 / 2
    total.backward()
    got = pop.loss_and_gradients(small, qk.detach().numpy(), ov.detach().numpy())
    assert got[0] == pytest.approx(total.item(), abs=1e-13)
    assert got[1] == pytest.approx(qk.grad.numpy(), abs=1e-14)
    assert got[2] == pytest.approx(ov.grad.numpy(), abs=1e-14)


@pytest.mark.parametrize("held", [False, True])
def test_gradients_of_factors_are_slopes_of_the_loss(held):
    rng = np.random.default_rng(1)
    weights = {n: rng.normal(size=w.shape) for n, w in pop.aligned_start(SMALL, "FAFO").weights.items()}
    loss, slopes = pop.gradients(SMALL, weights, held)
    assert loss > 0
    for name, slope in slopes.items():
        index = np.unravel_index(np.argmax(np.abs(slope)), slope.shape)
        around = []
        for step in (1e-5, -1e-5):
            moved = {n: w.copy() for n, w in weights.items()}
            moved[name][index] += step
            around.append(pop.gradients(SMALL, moved, held)[0])
        assert slope[index] == pytest.approx((around[0] - around[1]) / 2e-5, rel=1e-7)


def test_leading_axes_are_independent_runs():
    rng = np.random.default_rng(2)
    qk, ov = rng.normal(size=(2, 3, 3, SMALL.keys)), rng.normal(size=(2, 3, SMALL.keys, 3))
    together = pop.loss_and_gradients(SMALL, qk, ov)
    alone = pop.loss_and_gradients(SMALL, qk[1, 2], ov[1, 2])
    for many, one in zip(together, alone, strict=True):
        assert many[1, 2] == pytest.approx(one, abs=1e-15)


# --- the line -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.claim("P1-LINE-C")
def test_collapsed_matrices_never_leave_the_line():
    apart = [
        pop.compare(SMALL, pop.zero_start(SMALL), steps=1500, **RATES),
        pop.compare(SMALL, pop.zero_start(SMALL), steps=300, held=True, **RATES),
        pop.compare(pop.Population(replacement=False), pop.zero_start(SMALL), steps=500, **RATES),
    ]
    assert apart[0].final_loss < 0.02
    assert apart[0].final_alpha > 0.95
    assert verdict("P1-LINE-C", deviation=max(one.deviation for one in apart)) == "holds"


@pytest.mark.claim("P1-LINE-F")
def test_factorised_matrices_stay_on_the_line_from_aligned_and_identity_starts():
    worst = {
        name: pop.compare(SMALL, pop.aligned_start(SMALL, name, ov=(0.1, 0.1), held=True), steps=700, held=True, **RATES).deviation
        for name in ("CAFO", "FACO", "FAFO")
    }
    uneven = pop.aligned_start(SMALL, "FAFO", ov=(0.2, 0.05), qk=(0.1, 0.3), held=True)
    worst["FAFO"] = max(worst["FAFO"], pop.compare(SMALL, uneven, steps=300, held=True, **RATES).deviation)
    worst["CAFO"] = max(worst["CAFO"], pop.compare(SMALL, pop.aligned_start(SMALL, "CAFO"), steps=300, **RATES).deviation)
    start = pop.identity_start(SMALL, "FAFO", 0.1)
    worst["identity_start"] = pop.compare(SMALL, start, steps=700, held=True, **RATES).deviation
    assert verdict("P1-LINE-F", **worst) == "holds"


@pytest.mark.claim("P1-LINE-FA")
def test_factorised_attention_with_moving_common_columns_needs_two_scalars():
    ends = [pop.compare(SMALL, pop.aligned_start(SMALL, name), steps=800, **RATES) for name in ("FACO", "FAFO")]
    residual, deviation = min(end.off_line_qk for end in ends), max(end.deviation for end in ends)
    assert verdict("P1-LINE-FA", single_line_residual=residual, two_scalars_deviation=deviation) == "holds"
    held = pop.aligned_start(SMALL, "FACO", held=True)
    assert pop.compare(SMALL, held, steps=300, held=True, **RATES).off_line_qk < 1e-10


@pytest.mark.claim("P1-LINE-NEG")
def test_unequal_classes_take_the_output_matrix_off_its_line():
    uneven = pop.Population(prior=(1.3, 0.85, 0.85))
    run = pop.train(uneven, pop.zero_start(uneven).weights, steps=1000, **RATES)
    assert verdict("P1-LINE-NEG", residual=pop.off_line(run.ov[-1], uneven.ov_line)) == "holds"
    assert np.abs(run.ov[-1][-uneven.common_pool :]).max() > 0.1  # the common block no longer cancels
    even = pop.train(SMALL, pop.zero_start(SMALL).weights, steps=500, **RATES)
    assert pop.off_line(even.ov[-1], SMALL.ov_line) < 1e-12


def test_a_random_factorised_start_leaves_the_line_prediction():
    start = pop.aligned_start(SMALL, "CAFO")
    rng = np.random.default_rng(3)
    bent = {name: weight + 0.02 * rng.normal(size=weight.shape) for name, weight in start.weights.items()}
    wrong = pop.Beginning("CAFO", bent, start.ov, start.qk)
    assert pop.compare(SMALL, wrong, steps=300, **RATES).deviation > 1e-3


@properties
@given(population=populations, name=st.sampled_from(tc.PARAMETRISATIONS), held=st.booleans(), seed=st.integers(0, 5))
def test_line_and_plane_are_exact_in_any_small_world(population, name, held, seed):
    start = pop.aligned_start(population, name, ov=(0.3, 0.2), qk=(0.4, 0.4), held=held, seed=seed)
    assert pop.compare(population, start, steps=60, held=held, **RATES).deviation < 1e-12


def test_small_steps_tend_to_the_flow_at_first_order():
    """Gradient descent at fixed time eta*steps against the closed form: the error halves with the step."""
    world, begin, errors = SMALL.setting(held=True), pop.zero_start(SMALL), []
    exact = tc.state_at_time(np.log(200.0), 3.0, "CACO", world)
    for eta in (0.5, 0.25):
        end = pop.scalar_recursion(SMALL, begin, eta_ov=eta, eta_qk=3 * eta, steps=round(200 / eta), held=True)
        errors.append(abs(end.mu_ov[-1] - exact.mu_ov))
    assert errors[0] < 0.02
    assert errors[0] / errors[1] == pytest.approx(2.0, abs=0.1)


def test_effective_ratio_carries_the_published_equations_to_moving_common_columns():
    world = SMALL.setting()
    published = tc.Setting(SMALL.classes, SMALL.distinct, SMALL.common, SMALL.pool)
    run = pop.scalar_recursion(SMALL, pop.zero_start(SMALL), eta_ov=0.02, eta_qk=0.06, steps=20_000)
    predicted = tc.alpha_at(run.loss[-1], tc.effective_ratio(3.0, world), "CACO", published)
    assert tc.attention(run.gap[-1], published) == pytest.approx(predicted, abs=2e-4)
    assert tc.effective_ratio(3.0, world) == pytest.approx(3 * (1 + 4 / 5) * 4)


@pytest.mark.parametrize("queries, ratio", [(1, 0.5), (3, 4.0)])
def test_a_small_tilt_grows_off_the_line_as_predicted(queries, ratio):
    world = pop.Population(classes=3, distinct=1, common=40, pool=3, common_pool=2, queries=queries)
    start = pop.tilted_start(world, 1e-9, ratio=ratio)
    run = pop.train(world, start, eta_ov=0.25, eta_qk=0.25 * ratio, steps=400, record_at=np.array([0, 200, 400]))
    mu_ov = run.ov[:, 0, 0] - run.ov[:, world.pool, 0]
    seen = np.log(pop.favourites(world, run.ov) / pop.favourites(world, run.ov[0]))
    predicted = tc.off_line_growth(mu_ov, ratio, world.setting())
    assert predicted[-1] > 6
    assert np.all(seen[1:] < predicted[1:])
    assert seen[1:] == pytest.approx(predicted[1:], rel=0.07)  # first order in one over the number of slots


# --- sampled training -----------------------------------------------------------------------------------------------------------------


def test_arms_of_a_comparison_see_the_same_sequences_and_seeds_do_not():
    weights = pop.random_start(SMALL, 0.0, seeds=2, ratios=2)
    run = pop.train(SMALL, weights, eta_ov=0.5, eta_qk=np.array([1.0, 1.0]), steps=5, batch=3, seeds=2)
    assert run.ov[-1][0] == pytest.approx(run.ov[-1][1], abs=0)
    assert np.abs(run.ov[-1][0, 0] - run.ov[-1][0, 1]).max() > 1e-3


def test_same_seed_gives_the_same_run():
    runs = [pop.train(SMALL, pop.random_start(SMALL, 0.1, seeds=1), eta_ov=0.5, eta_qk=1.0, steps=70, batch=2, seeds=1) for _ in range(2)]
    assert np.array_equal(runs[0].qk, runs[1].qk)


def test_large_samples_tend_to_the_population():
    start = pop.random_start(SMALL, 0.0, seeds=1)
    exact = pop.train(SMALL, {name: weight[0, 0] for name, weight in start.items()}, steps=40, **RATES)
    sampled = pop.train(SMALL, start, eta_ov=0.5, eta_qk=1.5, steps=40, batch=4000, seeds=1)
    scale = np.abs(exact.ov[-1]).max()
    assert np.abs(sampled.ov[-1][0, 0] - exact.ov[-1]).max() < 0.05 * scale
    assert sampled.loss[-1][0, 0] == pytest.approx(exact.loss[-1], abs=2e-3)


def test_recorded_attention_of_zero_scores_is_the_uniform_share():
    run = pop.train(SMALL, pop.zero_start(SMALL).weights, steps=1, record_at=np.array([0, 1]), **RATES)
    assert run.alpha[0] == pytest.approx(2 / 5, abs=1e-15)
    assert run.loss[0] == pytest.approx(np.log(3), abs=1e-14)
    assert list(run.step) == [0, 1]


# --- bad input ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: pop.Population(distinct=0), r"Population: distinct = 0; expected a whole number >= 1"),
        (lambda: pop.Population(common=0), r"common = 0"),
        (lambda: pop.Population(classes=1), r"classes = 1"),
        (lambda: pop.Population(distinct=5, pool=4, replacement=False), r"5 slots from 4 tokens without replacement"),
        (lambda: pop.Population(prior=(0.5, 0.5)), r"prior has 2 entries; expected one for each of 3 classes"),
        (lambda: pop.Population(prior=(0.5, 0.5, 0.0)), r"prior = 0 at index \(2,\)"),
        (lambda: pop.Population(common=40, common_pool=20).sequences, r"sequences a class; expected at most 200000"),
        (lambda: pop.aligned_start(SMALL, "CA"), r"parametrisation = 'CA'"),
        (lambda: pop.aligned_start(SMALL, "CAFO", ov=(0.1, 0.0)), r"ov = 0 at index \(1,\)"),
        (lambda: pop.identity_start(SMALL, "FAFO", 0.0), r"eps = 0"),
        (lambda: pop.train(SMALL, pop.zero_start(SMALL).weights, eta_ov=0.0, eta_qk=1.0, steps=1), r"eta_ov = 0"),
        (lambda: pop.train(SMALL, pop.zero_start(SMALL).weights, eta_ov=1.0, eta_qk=-1.0, steps=1), r"eta_qk = -1"),
        (lambda: pop.train(SMALL, pop.zero_start(SMALL).weights, eta_ov=1.0, eta_qk=1.0, steps=0), r"steps = 0"),
        (lambda: pop.train(SMALL, pop.random_start(SMALL, 0, 1), eta_ov=1.0, eta_qk=1.0, steps=1, batch=0, seeds=1), r"batch = 0"),
        (lambda: pop.loss_and_gradients(SMALL, np.zeros((3, 4)), np.zeros((17, 3))), r"qk has shape \(3, 4\); expected \(3, 17\)"),
        (lambda: pop.off_line(np.zeros((2, 2)), np.eye(2)), r"the matrix is zero"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_diverging_run_names_its_step():
    weights = pop.zero_start(SMALL).weights
    weights = {name: weight + np.inf for name, weight in weights.items()}
    with np.errstate(all="ignore"), pytest.raises(FloatingPointError, match="not finite at step 0"):
        pop.train(SMALL, weights, eta_ov=1.0, eta_qk=1.0, steps=1, record_at=np.array([0]))
