"""Figure 3: training the output under attention that is held fixed."""

import json

import numpy as np
import pytest

from benchmarks import fig3 as bench
from lib.book import claims
from lib.data import synthetic
from lib.train import fixed_attention as fixed
from lib.train.counts import Diverged
from lib.train.fixed_attention import MODELS, FixedArm, FixedRuns
from lib.train.synthetic_runs import SHARES, fig3, fixed_values, record_fixed

FASTER = 16  # rates times 16, steps divided by 16: the flow is the same


def sequences(seed=9, batches=40):
    counts, classes = synthetic.Stream(seed, batch=128, stratified=True, purpose="test").counts(batches)
    return counts.reshape(-1, 20), classes.ravel()


@pytest.fixture(scope="module")
def figure():
    """Final losses by model and share, on the shortened clock."""
    test = sequences(batches=300)
    arms = [FixedArm(model, share, eta=0.01 * FASTER) for model in ("collapsed", "factorised") for share in SHARES]
    runs = FixedRuns(arms, 1, batch=64)
    runs.advance(round(125_000 / FASTER / 50) * 50)
    loss = {arm: float(fixed.losses(runs.weights[arm], fixed.pattern(*test, arm.share), test[1]).mean()) for arm in arms}
    return {model: {arm.share: value for arm, value in loss.items() if arm.model == model} for model in ("collapsed", "factorised")}


def named(losses: dict) -> dict:
    return {f"alpha_{round(100 * share)}": value for share, value in losses.items()}


@pytest.mark.claim("P1-F3-COL")
def test_collapsed_losses_are_the_published_ones(figure):
    assert claims.judge("P1-F3-COL", {"official": named(figure["collapsed"])}).verdict == "holds"


@pytest.mark.claim("P1-F3-FAC")
def test_factorised_losses_are_the_published_ones(figure):
    assert claims.judge("P1-F3-FAC", {"official": named(figure["factorised"])}).verdict == "holds"


@pytest.mark.claim("P1-F3-MONO")
def test_more_fixed_attention_means_less_loss_at_the_same_step(figure):
    ordered = {model: [losses[share] for share in SHARES] for model, losses in figure.items()}
    assert claims.judge("P1-F3-MONO", {"official": ordered}).verdict == "holds"


@pytest.mark.claim("P1-F3-GAP")
def test_fixed_attention_matters_more_in_absolute_loss_with_a_collapsed_output(figure):
    spread = {model: losses[0.2] - losses[1.0] for model, losses in figure.items()}
    difference = spread["collapsed"] - spread["factorised"]
    assert difference > 0.5
    assert claims.judge("P1-F3-GAP", {"official": {"difference_of_spreads": difference}}).verdict == "holds"


@pytest.mark.parametrize("model", MODELS)
def test_one_step_under_fixed_attention_is_the_plain_loops_step(model):
    assert max(bench.one_step_difference(FixedArm(model, share, eta=0.5), 4) for share in (0.0, 0.3, 1.0)) < 1e-12


def test_small_late_steps_survive_in_float32():
    """The batch gradient must reach a weight as one number: late increments of single samples are below half a unit in the last place."""
    arm = FixedArm("factorised", 1.0, eta=1.0)
    late = FixedRuns([arm], 1, batch=64)
    late.advance(3000)
    moved = {}
    for dtype in ("float64", "float32"):
        slow = FixedArm("factorised", 1.0, eta=0.003)
        runs = FixedRuns([slow], 2, batch=128, dtype=dtype)
        runs.weights[slow] = {name: array.astype(dtype) for name, array in late.weights[arm].items()}
        runs.advance(1500)
        moved[dtype] = runs.weights[slow]["W_O"][:, 5:9].astype(float) - late.weights[arm]["W_O"][:, 5:9]
    assert np.linalg.norm(moved["float32"]) == pytest.approx(np.linalg.norm(moved["float64"]), rel=0.1)


def test_mean_field_descent_tends_to_its_flow_with_slope_one_in_the_rate():
    arms = [FixedArm("collapsed", 0.6, eta=eta, mean_field=True) for eta in (0.4, 0.2, 0.1)]
    ends = []
    for arm in arms:
        runs = FixedRuns([arm], 1)
        runs.advance(round(400 / arm.eta / 50) * 50)
        ends.append(fixed.losses(runs.weights[arm], fixed.mean_pattern(0.6), np.arange(4)).mean())
    assert (ends[0] - ends[1]) / (ends[1] - ends[2]) == pytest.approx(2, abs=0.1)


def test_mean_pattern_is_the_mean_of_the_patterns():
    counts, classes = sequences(batches=400)
    for share in (0.2, 1.0):
        mean = fixed.mean_pattern(share)
        assert mean.sum(1) == pytest.approx(1)
        seen = fixed.pattern(counts, classes, share)
        for c in range(4):
            mine = seen[classes == c]
            assert np.abs((mine.mean(0) - mean[c]) / (mine.std(0) / np.sqrt(len(mine)) + 1e-12)).max() < 5


def test_mean_field_loss_is_too_low_because_the_loss_is_convex():
    arms = [FixedArm("collapsed", 0.4, eta=0.5, mean_field=mean) for mean in (False, True)]
    runs = FixedRuns(arms, 3)
    runs.advance(1000)
    counts, classes = sequences()
    data = fixed.losses(runs.weights[arms[0]], fixed.pattern(counts, classes, 0.4), classes).mean()
    field = fixed.losses(runs.weights[arms[1]], fixed.mean_pattern(0.4), np.arange(4)).mean()
    assert 0.8 < field / data < 0.999


def test_pattern_spreads_evenly_within_distinct_and_within_common_positions():
    counts = np.zeros((1, 20), np.uint8)
    counts[0, [0, 1, 10, 19]] = [2, 1, 1, 3]  # with the last token of class 0 (id 1): four common positions
    pattern = fixed.pattern(counts, np.array([0]), 0.8)[0]
    assert pattern[[0, 1, 10, 19]] == pytest.approx([0.1, 0.1, 0.2, 0.6])
    assert pattern.sum() == pytest.approx(1)


def test_common_sequences_make_the_sensitivity_precise_and_share_one_is_not_forced_to_zero():
    weights = fixed.initial(FixedArm("collapsed", 0.6), 1)
    weights["W_O"][10:, :50] *= 3
    parts = [sequences(seed, 10) for seed in range(6)]
    paired = [fixed.sensitivity(weights, 0.6, *part) for part in parts]
    fresh = [fixed.sensitivity(weights, 0.6, *part, other=parts[i - 1]) for i, part in enumerate(parts)]
    assert np.std(paired) < 0.05 * np.std(fresh)
    assert fixed.sensitivity(weights, 1.0, *parts[0]) != 0
    slope = (
        fixed.losses(weights, fixed.pattern(*parts[0], 0.59), parts[0][1])
        - fixed.losses(weights, fixed.pattern(*parts[0], 0.61), parts[0][1])
    ).mean() / 0.02
    assert fixed.sensitivity(weights, 0.6, *parts[0]) == pytest.approx(slope, rel=0.02)


def test_bias_is_trained_only_in_the_published_collapsed_model():
    arms = [FixedArm(model, 0.6, eta=0.5) for model in MODELS]
    runs = FixedRuns(arms, 1, batch=32)
    runs.advance(50)
    start = [fixed.initial(arm, 1) for arm in arms]
    moved = [np.abs(runs.weights[arm]["bias"][:50] - before["bias"][:50]).max() for arm, before in zip(arms, start, strict=True)]
    assert moved[0] > 0.01
    assert moved[1:] == [0, 0]
    assert not start[1]["bias"][:50].any()


def test_interrupted_fixed_runs_go_on_with_the_same_bits(tmp_path):
    arms = [FixedArm("collapsed", 0.4), FixedArm("factorised", 1.0)]
    whole, part = FixedRuns(arms, 5, batch=32), FixedRuns(arms, 5, batch=32)
    whole.advance(200)
    part.advance(50)
    part.save(tmp_path / "part.npz", seen=[1])
    again, extra = FixedRuns.load(tmp_path / "part.npz", arms, 5, batch=32)
    again.advance(150)
    assert extra == {"seen": [1]}
    assert again.last_loss == whole.last_loss
    for arm in arms:
        assert all(np.array_equal(again.weights[arm][name], whole.weights[arm][name]) for name in whole.weights[arm])
    with pytest.raises(ValueError, match="belongs to other arms"):
        FixedRuns.load(tmp_path / "part.npz", arms[::-1], 5, batch=32)


def test_interrupted_figure_is_the_uninterrupted_one(tmp_path, monkeypatch):
    arms = [FixedArm("collapsed", 0.4), FixedArm("factorised", 0.4, mean_field=True)]
    monkeypatch.setattr("lib.train.synthetic_runs.CHECKPOINT_FIXED", 250)
    whole = record_fixed(arms, 1, steps=500, tests=10)
    save = FixedRuns.save

    def stop(self, path, **extra):
        save(self, path, **extra)
        raise KeyboardInterrupt

    monkeypatch.setattr(FixedRuns, "save", stop)
    with pytest.raises(KeyboardInterrupt):
        record_fixed(arms, 1, steps=500, tests=10, checkpoint=tmp_path / "x.npz")
    monkeypatch.setattr(FixedRuns, "save", save)
    again = record_fixed(arms, 1, steps=500, tests=10, checkpoint=tmp_path / "x.npz")
    assert again | {"seconds": 0} == whole | {"seconds": 0}


def test_diverging_arm_is_named_and_the_others_go_on():
    good, bad = FixedArm("collapsed", 0.4), FixedArm("factorised", 0.8, eta=1e200)
    runs = FixedRuns([good, bad], 6, batch=32)
    runs.advance(100)
    assert list(runs.failed) == [bad]
    for word in ("step", "factorised", "share 0.8", "seed 6", "1e+200"):
        assert word in runs.failed[bad]
    assert np.isfinite(runs.last_loss[good])
    with pytest.raises(Diverged, match="no arm is left"):
        FixedRuns([bad], 6, batch=32).advance(50)


def test_card_of_figure_3_has_every_arm_and_stays_small(tmp_path):
    fig3(1, steps=250, tests=2, work=tmp_path / "work", folder=tmp_path)
    path = tmp_path / "p1_fig3.json"
    card = json.loads(path.read_text())
    run = card["results"]["runs"][0]
    assert fixed_values(card, "factorised").shape == (1, 5)
    assert not np.array_equal(fixed_values(card, "factorised"), fixed_values(card, "factorised", mean_field=True))
    with pytest.raises(ValueError, match=r"no 'sensitivity' for collapsed, share 0\.2, seed 1234"):
        fixed_values(card, "collapsed", "sensitivity", mean_field=True)
    assert {(arm["model"], arm["share"]) for arm in run["arms"]} == {(model, share) for model in MODELS for share in SHARES}
    assert len(run["arms"]) == 30
    assert all("sensitivity" in arm for arm in run["arms"] if not arm["mean_field"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedArm("linear", 0.5), "model = 'linear'"),
        (lambda: FixedArm("collapsed", 1.2), "share = 1.2"),
        (lambda: FixedArm("collapsed", 0.5, eta=0.0), "eta = 0"),
        (lambda: FixedRuns([], 1), "0 arms"),
        (lambda: FixedRuns([FixedArm("collapsed", 0.5)] * 2, 1), "2 arms, 1 of them distinct"),
        (lambda: FixedRuns([FixedArm("collapsed", 0.5)], 1).advance(20), "steps = 20"),
        (lambda: fig3(0), "seeds = 0"),
        (lambda: fixed.mean_pattern(-0.1), "share = -0.1"),
    ],
)
def test_figure_3_refuses_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()
