"""Training on token counts: the same steps as the plain loop, and paper 1's claims on a shortened clock."""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from benchmarks import fig2 as bench
from lib.book import claims
from lib.data import synthetic
from lib.train import counts
from lib.train.counts import PARAMETRISATIONS, Arm, Diverged, Run, hastened, summary, train_all
from lib.train.counts_batched import BatchedRuns
from lib.train.synthetic_runs import FIG2_ARMS, evaluation_steps, fig2, ratio_arms, record_run, values

ARMS = {arm.name: arm for arm in (*FIG2_ARMS, *ratio_arms())}
FASTER = 16  # rates times 16, steps divided by 16: the flow is the same, the noise larger
SEED = 1


@cache
def outcome(name: str, until: float | None = None, seed: int = SEED) -> dict:
    """Summary of an arm at its end, or when its training loss reaches a level, on the shortened clock."""
    arm = replace(hastened(ARMS[name], FASTER), until=until)
    if until is not None:
        arm = replace(arm, stop_loss=None)
    run = counts.train(arm, seed)
    test = [one[0] for one in synthetic.Stream(seed, batch=3200, length=arm.length, purpose="test").counts(1)]
    return {"step": run.step} | summary(arm, run.weights, *test)


def top_row(seen: dict) -> list[float]:
    """The published row of a heatmap: sequences predicted with more than 0.8."""
    return seen["dtap"][-1].tolist()


def holds(claim: str, **sides) -> bool:
    return claims.judge(claim, sides).verdict == "holds"


# --- the same steps ---------------------------------------------------------------------------------------------------------------


@pytest.mark.claim("P1-SPEED")
@pytest.mark.parametrize("attended", [True, False])
@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
def test_one_step_on_counts_is_one_step_on_tokens(parametrisation, attended):
    arm = Arm("step", parametrisation, eta_qk=0.3, eta_ov=0.7, attended=attended)
    rule = claims.get("P1-SPEED").rule("step_difference")
    assert max(bench.one_step_difference(arm, seed) for seed in range(3)) <= rule.bound


def test_torch_batch_takes_the_same_steps_for_any_mixture_of_arms():
    mixture = [
        Arm("a", "FAFO", eta_qk=0.2, steps=100),
        Arm("b", "CAFO", eta_qk=0.05, init_qk="zero", init_ov="identity", steps=100),
        Arm("c", "FACO", eta_qk=0.3, ramp=10.0, steps=100, attended=False),
        Arm("d", "CACO", eta_qk=0.01, ramp=40.0, steps=100),
    ]
    pairs = [(arm, seed) for arm in mixture for seed in (3, 4)]
    batched = BatchedRuns(pairs, device=torch.device("cpu"))
    batched.advance(100)
    for number, (arm, seed) in enumerate(pairs):
        run = Run(arm, seed)
        run.advance(100)
        for name, array in batched.weights(number).items():
            assert np.abs(array - run.weights[name][:, :50]).max(initial=0) < 1e-13
        assert np.abs(run.losses - np.array(batched.losses)[:, number]).max() < 1e-12


def test_ramp_raises_the_query_key_rate_linearly_to_its_name():
    arm = Arm("ramp", "CACO", ramp=10.0, steps=1000)
    assert arm.eta_qk + arm.eta_slope * 1000 == pytest.approx(0.1)
    assert Arm("flat", "CACO").eta_slope == 0


def test_arms_of_one_seed_share_their_data_and_their_starts():
    one, other = Run(ARMS["CACO"], 7), Run(replace(ARMS["CACO"], eta_qk=0.2, attended=False), 7)
    assert np.array_equal(one.weights["W_O"], other.weights["W_O"])
    one.advance(100)
    other.advance(100)
    assert np.array_equal(one.stream.state, other.stream.state)
    assert not np.array_equal(one.weights["W_Q"], other.weights["W_Q"])


def test_padding_of_the_outputs_stays_zero():
    run = Run(Arm("pad", "FAFO", eta_qk=0.2, eta_ov=0.5, steps=200), 1)
    run.advance(200)
    assert not run.weights["W_O"][:, 50:].any()
    assert np.abs(run.weights["W_O"][:, :50]).max() > 0.3


# --- bits, checkpoints, failures --------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_bits_on_one_thread_and_two():
    pairs = [(Arm("a", "FAFO", eta_qk=0.1, steps=300), seed) for seed in (1, 2, 3)]
    (alone, _), (together, _) = train_all(pairs, threads=1), train_all(pairs, threads=2)
    for a, b in zip(alone, together, strict=True):
        assert all(np.array_equal(a.weights[name], b.weights[name]) for name in a.weights)
        assert np.array_equal(a.losses, b.losses)
    assert not np.array_equal(alone[0].losses, alone[1].losses)


def test_an_interrupted_run_goes_on_with_the_same_bits(tmp_path):
    arm = Arm("ramp", "FACO", ramp=5.0, steps=600)
    whole, part = Run(arm, 2), Run(arm, 2)
    whole.advance(600)
    part.advance(250)
    part.save(tmp_path / "part.npz", note=[1, 2])
    again, note = Run.load(tmp_path / "part.npz", arm, 2)
    assert note["note"] == [1, 2]
    again.advance(600)
    assert again.step == 600
    assert np.array_equal(again.losses, whole.losses)
    assert all(np.array_equal(again.weights[name], whole.weights[name]) for name in whole.weights)
    with pytest.raises(ValueError, match=r"part.npz was saved by .*'seed': 2"):
        Run.load(tmp_path / "part.npz", arm, 3)


def test_an_interrupted_record_is_the_record_of_an_uninterrupted_run(tmp_path, monkeypatch):
    arm = Arm("two", "CACO", eta_ov=0.1, steps=1500)
    monkeypatch.setattr("lib.train.synthetic_runs.CHECKPOINT", 500)
    whole = record_run(arm, 3, levels=(3.5, 1.0))
    saves, save = [], Run.save

    def stop_after_two(self, path, **extra):
        save(self, path, **extra)
        saves.append(self.step)
        if len(saves) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "save", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        record_run(arm, 3, levels=(3.5, 1.0), checkpoint=tmp_path / "two.npz")
    assert saves == [500, 1000]
    monkeypatch.setattr(Run, "save", save)
    again = record_run(arm, 3, levels=(3.5, 1.0), checkpoint=tmp_path / "two.npz")
    assert again | {"seconds": 0} == whole | {"seconds": 0}
    assert not (tmp_path / "two.npz").exists()


def test_a_diverging_run_names_itself_and_leaves_the_others_alone():
    good = Arm("good", "CACO", steps=100)
    bad = replace(good, name="too fast", eta_ov=1e200)
    runs, said = train_all([(good, 1), (bad, 5), (good, 2)])
    assert [run is not None for run in runs] == [True, False, True]
    assert np.isfinite(runs[2].losses).all()
    assert len(said) == 1
    for part in ("step", "'too fast'", "seed 5", "eta_qk = 0.01", "eta_ov = 1e+200"):
        assert part in said[0]
    batched = BatchedRuns([(good, 1), (bad, 5)], device=torch.device("cpu"))
    batched.advance(50)
    assert list(batched.failed) == [1]
    assert "'too fast' (seed 5" in batched.failed[1]
    assert np.isfinite(batched.losses[-1][0])
    with pytest.raises(Diverged, match="no run is left"):
        BatchedRuns([(bad, 5)], device=torch.device("cpu")).advance(50)


def test_card_keeps_finished_runs_and_notes_failed_ones(tmp_path):
    arms = (Arm("fine", "CACO", steps=500), Arm("too fast", "CACO", eta_ov=1e200, steps=500))
    fig2(2, arms=arms, work=tmp_path / "work", folder=tmp_path)
    card = json.loads((tmp_path / "p1_fig2.json").read_text())
    assert card["seeds"] == [1234, 1235]
    assert [run["seed"] for run in card["results"]["arms"]["fine"]] == [1234, 1235]
    assert len(card["results"]["failed"]) == 2
    assert values(card, "fine", "final", "mass").shape == (2,)
    assert np.isnan(values(card, "fine", "levels", "0.001", "mass")).all()
    assert values(card, "fine", "trajectory", "step").tolist() == [[250, 500]] * 2
    with pytest.raises(ValueError, match="arm = 'coarse'"):
        values(card, "coarse", "steps")
    with pytest.raises(ValueError, match=r"'masses' is not in a run of 'fine'; there are: step, .*mass"):
        values(card, "fine", "final", "masses")
    kept = tmp_path / "work" / "fig2" / "fine-1234.json"
    kept.write_text(kept.read_text().replace('"steps": 500, "stopped"', '"steps": 499, "stopped"'))
    fig2(1, ("fine",), arms=arms, work=tmp_path / "work", folder=tmp_path)
    assert json.loads((tmp_path / "p1_fig2.json").read_text())["results"]["arms"]["fine"][0]["steps"] == 499  # taken, not run again


# --- bad input --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parametrisation": "FOFA"}, "parametrisation = 'FOFA'"),
        ({"eta_qk": 0.0}, "eta_qk = 0"),
        ({"eta_ov": -0.1}, "eta_ov = -0.1"),
        ({"eta_qk": float("nan")}, "eta_qk = nan"),
        ({"init_qk": "ones"}, "init_qk = 'ones'"),
        ({"steps": 120}, "steps = 120; expected a multiple of 50"),
        ({"parametrisation": "FACO", "init_qk": "zero"}, "factorised attention starting from zero never moves"),
        ({"parametrisation": "CAFO", "init_ov": "zero"}, "factorised output starting from zero never moves"),
    ],
)
def test_arms_refuse_what_cannot_be_run(options, message):
    with pytest.raises(ValueError, match=message):
        Arm(**({"name": "x", "parametrisation": "CACO"} | options))


def test_runs_refuse_empty_grids_mixed_sizes_odd_steps_and_wrong_vocabularies():
    arm = Arm("x", "CACO", steps=100)
    with pytest.raises(ValueError, match="no runs"):
        train_all([])
    with pytest.raises(ValueError, match="0 runs"):
        BatchedRuns([])
    with pytest.raises(ValueError, match=r"\(32, 64\), \(32, 128\)"):
        BatchedRuns([(arm, 1), (replace(arm, length=128), 1)])
    with pytest.raises(ValueError, match="steps = 30"):
        Run(arm, 1).advance(80 - 50)
    with pytest.raises(ValueError, match=r"counts has shape \(3, 50\)"):
        counts.examine(arm, Run(arm, 1).weights, np.zeros((3, 50)), np.zeros(3, int))
    with pytest.raises(ValueError, match="no arm to run"):
        fig2(1, arms=())
    with pytest.raises(ValueError, match="arm = 'FOFO'"):
        fig2(1, ("FOFO",))
    with pytest.raises(ValueError, match="seeds = 0"):
        fig2(0)


# --- what is measured -------------------------------------------------------------------------------------------------------------


def test_untrained_collapsed_model_from_zero_attends_uniformly_and_knows_nothing():
    arm = Arm("zero", "CACO", init_qk="zero", init_ov="zero")
    occurs, classes = (one[0] for one in synthetic.Stream(1, batch=500, purpose="test").counts(1))
    seen = summary(arm, counts.initial(arm, 1), occurs, classes)
    assert seen["loss"] == pytest.approx(np.log(50))
    assert seen["mass"] == pytest.approx(occurs[:, 10:].sum(1).mean() / 63)
    assert seen["separability"] == pytest.approx(0, abs=1e-15)
    assert sum(seen["mass_by_kind"].values()) == pytest.approx(1)
    assert seen["mass_by_kind"]["own query"] == pytest.approx((occurs[np.arange(500), 5 + classes].mean() + 1) / 63)
    without = summary(replace(arm, attended=False), counts.initial(arm, 1), occurs, classes)
    assert without["mass"] == pytest.approx(occurs[:, 10:].sum(1).mean() / 62)


def test_examine_sees_a_query_that_is_told_to_look_at_itself():
    arm = Arm("self", "CACO", init_qk="zero", init_ov="zero")
    weights = counts.initial(arm, 1)
    weights["W_Q"][range(4), synthetic.FIG2.query] = 100.0
    occurs, classes = (one[0] for one in synthetic.Stream(1, batch=500, purpose="test").counts(1))
    seen = summary(arm, weights, occurs, classes)
    assert seen["top_kind"]["own query"] == 1.0
    assert seen["mass_by_kind"]["own query"] > 0.999
    assert seen["query_gap"] == pytest.approx(100 / np.sqrt(50))


def test_stop_rule_looks_only_at_epochs_1_101_201():
    arm = Arm("stop", "CACO", epoch=250, stop_loss=10.0, steps=60_000)
    run = Run(arm, 1)
    run.losses[:] = 1.0
    for epoch, fires in ((1, True), (2, False), (100, False), (101, True), (102, False), (201, True)):
        run.step = 250 * epoch
        assert run.stop_rule() is fires
    run.step = 250
    run.losses[:] = 11.0
    assert not run.stop_rule()


@pytest.mark.parametrize("epoch", [250, 200, 100, 50])
def test_training_misses_no_step_at_which_it_may_stop(epoch, monkeypatch):
    arm = Arm("stop", "CACO", epoch=epoch, stop_loss=1e-9, until=1e-9, steps=101 * epoch)
    looked = []
    monkeypatch.setattr(Run, "advance", lambda self, steps: setattr(self, "step", min(self.step + steps, arm.steps)))
    monkeypatch.setattr(Run, "stop_rule", lambda self: bool(looked.append(self.step)))
    counts.train(arm, 1)
    assert {epoch, 101 * epoch} <= set(looked)
    assert set(range(250, arm.steps + 1, 250)) <= set(looked)


def test_runs_are_looked_at_on_a_logarithmic_grid_that_ends_with_the_run():
    steps = evaluation_steps(200_000)
    assert steps[0] == 250
    assert steps[-1] == 200_000
    assert all(step % 250 == 0 for step in steps)
    assert len(steps) <= 27


# --- paper 1, Figure 2, on the shortened clock ------------------------------------------------------------------------------------


@pytest.mark.claim("P1-F2-FAFO")
def test_fully_factorised_model_is_sure_while_its_attention_stays_near_uniform():
    seen = outcome("FAFO")
    row = top_row(seen)
    assert holds("P1-F2-FAFO", official={"row": row, "loss": seen["loss"], "middle_share": row[1] + row[2]})


@pytest.mark.claim("P1-F2-FACO")
def test_collapsing_the_output_puts_the_attention_on_the_distinct_tokens():
    seen = outcome("FACO")
    assert holds("P1-F2-FACO", official={"row": top_row(seen), "loss": seen["loss"], "last_bin": top_row(seen)[-1]})


@pytest.mark.claim("P1-F2-SEP")
def test_separability_is_ten_times_wider_with_a_collapsed_output():
    fafo, faco = (outcome(name)["separability"] for name in ("FAFO", "FACO"))
    assert holds("P1-F2-SEP", official={"fafo": fafo, "faco": faco, "factor": faco / fafo})


@pytest.mark.claim("P1-F2-CACO5")
def test_fivefold_query_key_rate_gives_the_published_row():
    seen = outcome("CACO 5x, L = 128")
    assert holds("P1-F2-CACO5", official={"row": top_row(seen), "loss": seen["loss"]})


@pytest.mark.claim("P1-F2-CACO10")
def test_rate_that_rises_to_tenfold_gives_the_row_published_as_tenfold():
    seen = outcome("CACO ramp to 10x, L = 128")
    assert holds("P1-F2-CACO10", official={"row": top_row(seen), "loss": seen["loss"]})


@pytest.mark.claim("P1-F2-CACO1")
def test_equal_rates_leave_less_attention_on_the_distinct_tokens_than_fivefold():
    gain = outcome("CACO 5x, L = 128")["mass"] - outcome("CACO 1x, L = 128")["mass"]
    assert gain > 0.2
    assert holds("P1-F2-CACO1", pure={"mass_gain": gain})


@pytest.mark.claim("P1-F2-RAMP")
def test_rising_to_tenfold_is_weaker_than_tenfold():
    gain = outcome("CACO 10x, L = 128")["mass"] - outcome("CACO ramp to 10x, L = 128")["mass"]
    assert gain > 0.05
    assert holds("P1-F2-RAMP", pure={"mass_gain": gain})


@pytest.mark.claim("P1-F2-CLEAN")
@pytest.mark.claim("P1-F2-20x")
def test_twentyfold_rate_alone_sharpens_the_fully_factorised_model_at_equal_loss():
    base, faster = (outcome(name, until=0.001)["mass"] for name in ("FAFO, identity start", "FAFO 20x"))
    assert holds("P1-F2-CLEAN", pure={"mass_gain": faster - base})
    ramp = outcome("FAFO ramp to 40x", until=0.001)["mass"]
    assert holds("P1-F2-20x", pure={"mass_gain_20x": faster - base, "mass_gain_ramp": ramp - base})


@pytest.mark.claim("P1-F2-PAIR")
def test_factorised_output_attends_less_than_collapsed_output_from_the_same_start_at_equal_loss():
    gain = outcome("FACO", until=0.01)["mass"] - outcome("FAFO, identity start", until=0.01)["mass"]
    assert gain > 0.2
    assert holds("P1-F2-PAIR", pure={"mass_gain": gain})


@pytest.mark.claim("P1-F2-FAIL")
def test_twentyfold_rate_from_random_queries_and_keys_drives_attention_off_the_distinct_tokens():
    floor = 62 * 55 / 155 / 63
    runs = [outcome("FAFO 20x, random query-key start", seed=seed) for seed in (1, 2)]
    assert holds("P1-F2-FAIL", pure={"mass_minus_uniform": np.mean([run["mass"] for run in runs]) - floor})


@pytest.mark.claim("P1-F2-REV")
@pytest.mark.claim("P1-F2-NOQ")
def test_faster_rates_lose_the_distinct_tokens_to_the_own_query_and_win_them_back_without_it():
    five, twenty = (outcome(f"CACO, r = {r}", until=0.1) for r in (5, 20))
    assert holds("P1-F2-REV", pure={"mass_change": twenty["mass"] - five["mass"]})
    assert twenty["top_kind"]["own query"] > 0.5
    alpha = [outcome(f"CACO, r = {r}, query not attended", until=0.1)["mass"] for r in (1, 5, 20)]
    assert holds("P1-F2-NOQ", pure={"alpha": alpha, "smallest_gap": min(np.diff(alpha))})
