"""The long runs on synthetic classes, kept as run cards.

    python -m lib.train.synthetic_runs fig2 [--seeds 10] [--only NAME ...] [--first 1234]
    python -m lib.train.synthetic_runs fig3 [--seeds 5]

Every finished run is kept under `_build/synthetic_runs/`, and long runs leave a checkpoint there every 50,000 steps: an interrupted
command, given again, goes on where it was, with equal results. The card (`data/results/p1_fig2.json`, `p1_fig3.json`) is written anew
after each run. Two processes may share the work (`--first 1239 --seeds 5` beside `--seeds 5`); a last call without `--first` gathers
all runs into the card. A run whose loss stops being finite is noted in the card and the others go on.
"""

import argparse
import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lib import checks
from lib.book import cards
from lib.data import synthetic
from lib.train import fixed_attention
from lib.train.counts import WINDOW, Arm, Diverged, Run, summary
from lib.train.fixed_attention import FixedArm, FixedRuns

WORK = cards.FOLDER.parents[1] / "_build" / "synthetic_runs"
FIRST_SEED = 1234
LEVELS = (1.0, 0.1, 0.01, 0.002, 0.001)  # training losses (mean of 250 steps) at which arms are compared
TEST_SEQUENCES = 6400
CHECKPOINT, CHECKPOINT_FIXED = 50_000, 25_000  # steps
SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)

_IDENTITY: dict[str, Any] = {"init_qk": "identity", "init_ov": "identity"}
_MIXED: dict[str, Any] = {"init_qk": "torch", "init_ov": "identity"}

#: Arms of Figure 2: as published, then ours. Names say what is special; L = 64 unless said.
FIG2_ARMS = (
    Arm("FAFO", "FAFO", stop_loss=0.001, **_MIXED),
    Arm("FACO", "FACO", stop_loss=0.001, **_IDENTITY),
    Arm("CAFO", "CAFO", steps=1_000_000, epoch=200, stop_loss=0.001, **_IDENTITY),
    Arm("CACO", "CACO", steps=500_000, epoch=200, stop_loss=0.001),
    Arm("FAFO 20x", "FAFO", eta_qk=0.2, steps=100_000, epoch=100, stop_loss=0.001, **_IDENTITY),
    Arm("FAFO ramp to 40x", "FAFO", ramp=40.0, steps=200_000, epoch=100, **_IDENTITY),
    Arm("CACO 5x, L = 128", "CACO", eta_qk=0.05, steps=200_000, epoch=100, length=128),
    Arm("CACO ramp to 10x, L = 128", "CACO", ramp=10.0, steps=200_000, epoch=100, length=128),
    # not in the paper: the controls
    Arm("CACO 1x, L = 128", "CACO", steps=200_000, epoch=100, length=128),
    Arm("CACO 10x, L = 128", "CACO", eta_qk=0.1, steps=200_000, epoch=100, length=128),
    Arm("FAFO, identity start", "FAFO", stop_loss=0.001, **_IDENTITY),
    Arm("FACO, random query-key start", "FACO", stop_loss=0.001, **_MIXED),
    Arm("FAFO 20x, random query-key start", "FAFO", eta_qk=0.2, steps=100_000, epoch=100, stop_loss=0.001, **_MIXED),
)
#: Arms that go on to their last step after the stop rule has fired: equal steps next to equal loss.
GO_ON = ("FAFO", "FAFO, identity start")


def ratio_arms() -> tuple[Arm, ...]:
    """The equal-loss grid: r = 1, 5, 20 from the published starts, CACO also from zero; query token attended or not."""
    starts: dict[str, dict[str, Any]] = {
        "CACO": {},
        "CACO from zero": {"init_qk": "zero", "init_ov": "zero"},
        "CAFO": _IDENTITY,
        "FACO": _IDENTITY,
        "FAFO": _IDENTITY,
    }
    return tuple(
        Arm(
            f"{name}, r = {ratio}{'' if attended else ', query not attended'}",
            name[:4],
            eta_qk=0.01 * ratio,
            steps=250_000 if name.startswith("CACO") and ratio == 1 else 600_000,  # equal rates: 0.1 at 155,000, 0.01 not by 600,000
            until=0.01,
            attended=attended,
            **start,
        )
        for attended in (True, False)
        for ratio in (1, 5, 20)
        for name, start in starts.items()
    )


def _digits(value, digits: int = 5):
    """Numbers to so many significant digits, arrays as lists: what a card needs, no more."""
    if isinstance(value, dict):
        return {key: _digits(item, digits) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return [_digits(item, digits) for item in value.tolist()]
    if isinstance(value, list | tuple):
        return [_digits(item, digits) for item in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.{digits}g}")
    return value


def evaluation_steps(last: int, points: int = 26) -> list[int]:
    """Where a run is looked at: multiples of 250 steps, evenly spaced in the logarithm, from 250 to the last.

    Args:
        last: steps of the run, a multiple of 50.
        points: about how many.
    """
    grid = np.geomspace(WINDOW, last, points)
    return sorted({round(step / WINDOW) * WINDOW for step in grid if round(step / WINDOW) * WINDOW <= last} | {last})


def record_run(arm: Arm, seed: int, *, levels=LEVELS, go_on: bool = False, brief: bool = False, checkpoint: Path | None = None) -> dict:
    """Run an arm to its end and note what Figure 2 and the comparisons need.

    Args:
        arm, seed: what to run.
        levels: training losses in nats (mean of 250 steps) at whose first crossing the model is examined.
        go_on: continue after the stop rule to the arm's last step.
        brief: without trajectory and DTAP (for large grids).
        checkpoint: file to go on from and to save to every 50,000 steps.

    Returns:
        seed, steps, stopped, final (at the stop rule or the last step; `summary` and train_loss), beyond (at the last step, if it went
        on after stopping), levels {level: {step, ...} or None}, trajectory {step, train_loss, loss, mass}, seconds (of one core).

    Raises:
        Diverged: as `Run.advance`.
    """
    began = time.process_time()
    counts, classes = (one[0] for one in synthetic.Stream(seed, batch=TEST_SEQUENCES, length=arm.length, purpose="test").counts(1))
    notes: dict = {"final": None, "levels": {f"{level:g}": None for level in levels}, "trajectory": [], "seconds": 0.0}
    run = Run(arm, seed)
    if checkpoint is not None and checkpoint.exists():
        run, saved = Run.load(checkpoint, arm, seed)
        notes = {key: saved[key] for key in notes}
    looks = set(() if brief else evaluation_steps(arm.steps))

    def look():
        return {"step": run.step, "train_loss": run.mean_loss(WINDOW)} | summary(arm, run.weights, counts, classes)

    while run.step < arm.steps and not (run.stopped and not go_on):
        check = arm.epoch - run.step % arm.epoch  # ends of epochs and windows are where something may be decided
        run.advance(min(check, WINDOW - run.step % WINDOW))
        if not run.stopped and run.stop_rule():
            run.stopped, notes["final"] = True, look()
        if run.step % WINDOW == 0:
            loss = run.mean_loss(WINDOW)
            for level in levels:
                if notes["levels"][f"{level:g}"] is None and loss <= level:
                    notes["levels"][f"{level:g}"] = _short(look(), brief)
            if run.step in looks:
                seen = look()
                notes["trajectory"].append([run.step, loss, float(seen["loss"]), float(seen["mass"])])
            if checkpoint is not None and run.step % CHECKPOINT == 0:
                elapsed = notes["seconds"] + time.process_time() - began
                run.save(checkpoint, **_digits(notes, 17) | {"seconds": elapsed})
    last = look()
    final = notes["final"] or last
    result = {
        "seed": seed,
        "steps": int(final["step"]),
        "stopped": run.stopped,
        "final": final,
        "beyond": last if run.stopped and go_on else None,
        "levels": notes["levels"],
        "seconds": round(notes["seconds"] + time.process_time() - began, 1),
    }
    if brief:
        result["final"] = _short(final, brief)
        del result["beyond"]
    else:
        columns = ("step", "train_loss", "loss", "mass")
        result["trajectory"] = {name: [row[i] for row in notes["trajectory"]] for i, name in enumerate(columns)}
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return _digits(result)


def _short(seen: dict, kinds: bool) -> dict:
    """What is kept at a loss level."""
    top = max(seen["top_kind"], key=seen["top_kind"].get)
    short = {key: seen[key] for key in ("step", "train_loss", "loss", "mass", "probability")} | {"top": top}
    if kinds:
        short |= {key: seen[key] for key in ("query_gap", "distinct_gap")}
        short |= {"top_share": seen["top_kind"][top], "query_mass": seen["mass_by_kind"]["own query"]}
    return _digits(short)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def _kept(path: Path, key: dict, make: Callable[[], dict]) -> dict:
    """A finished run from its file, or made and kept; a file made with other settings is made anew."""
    if path.exists():
        old = json.loads(path.read_text())
        if old["key"] == key:
            return old["result"]
    result = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"key": key, "result": result}))
    part.replace(path)
    return result


def fig2(
    seeds: int = 10,
    only: tuple[str, ...] = (),
    *,
    first: int = FIRST_SEED,
    arms: tuple[Arm, ...] | None = None,
    work: Path = WORK,
    folder: Path = cards.FOLDER,
) -> None:
    """All arms of Figure 2 and the equal-loss grid, seed by seed, into the card p1_fig2.

    Args:
        seeds: how many.
        only: names of arms; empty = all.
        first: the first seed.
        arms: other arms than the published and the grid's (for tests).
        work, folder: where runs and card are kept.

    Raises:
        ValueError: no seed, or an unknown arm.
    """
    checks.integer_at_least("fig2", 1, seeds=seeds)
    grid = ratio_arms() if arms is None else ()
    arms = FIG2_ARMS + grid if arms is None else arms
    for name in only:
        checks.one_of("fig2", [arm.name for arm in arms], arm=name)
    chosen = [arm for arm in arms if not only or arm.name in only]
    if not chosen:
        raise ValueError("fig2: no arm to run; expected at least one.")
    found: dict[str, list[dict]] = {arm.name: [] for arm in chosen}
    failed: list[str] = []
    for seed in range(first, first + seeds):
        for arm in chosen:
            stem = work / "fig2" / f"{_slug(arm.name)}-{seed}"
            brief = arm in grid
            options: dict[str, Any] = {"go_on": arm.name in GO_ON, "brief": brief, "levels": LEVELS[:3] if brief else LEVELS}
            key = json.loads(json.dumps({"arm": asdict(arm), "seed": seed, **options}))
            began = time.perf_counter()
            try:
                run = _kept(
                    stem.with_suffix(".json"),
                    key,
                    partial(record_run, arm, seed, checkpoint=stem.with_suffix(".npz"), **options),
                )
            except Diverged as error:
                failed.append(str(error))
                print(f"FAILED {error}", flush=True)
                continue
            found[arm.name].append(run)
            print(
                f"{arm.name} | seed {seed} | {run['steps']} steps | loss {run['final']['train_loss']:.4f} | "
                f"distinct {run['final']['mass']:.3f} | {time.perf_counter() - began:.0f} s",
                flush=True,
            )
            _save_fig2(chosen, found, failed, folder)
    _save_fig2(chosen, found, failed, folder)


def _save_fig2(arms: list[Arm], found: dict[str, list[dict]], failed: list[str], folder: Path) -> None:
    runs = [run for several in found.values() for run in several]
    cards.save(
        "p1_fig2",
        config={
            "arms": {arm.name: {key: value for key, value in asdict(arm).items() if key != "name"} for arm in arms},
            "test_sequences": TEST_SEQUENCES,
            "levels": list(LEVELS),
            "go_on": list(GO_ON),
            "kinds": list(synthetic.KINDS),
            "dtype": "float64",
            "data": "fresh at every step, lib.data.synthetic, FIG2",
        },
        seeds=sorted({run["seed"] for run in runs}),
        results={"arms": found, "failed": failed},
        seconds=sum(run["seconds"] for run in runs),
        folder=folder,
    )


def fig3_arms() -> list[FixedArm]:
    """Five shares, each model, with data and in mean field."""
    return [FixedArm(model, share, mean_field=mean) for mean in (False, True) for model in fixed_attention.MODELS for share in SHARES]


def record_fixed(arms: list[FixedArm], seed: int, *, steps: int = 125_000, tests: int = 1000, checkpoint: Path | None = None) -> dict:
    """Train all arms of Figure 3 on one seed's data and note losses along the way, final losses and sensitivities.

    Args:
        arms, seed: what to run.
        steps: published 125,000.
        tests: test batches of 128 for the final losses (published 1000); a tenth of them along the way.
        checkpoint: file to go on from and to save to every 25,000 steps.

    Returns:
        seed, seconds, failed, arms: list of {model, share, mean_field, loss (nats, test), standard_error, sensitivity and
        sensitivity_noisy (second term on other sequences) in nats per unit share, trajectory {step, loss}}.
        A mean-field arm is tested on the mean-field inputs that it is trained on, and has no sensitivity.
    """
    began = time.process_time()
    test = _sequences(seed, "test", tests)
    few = (test[0][: len(test[0]) // 10], test[1][: len(test[1]) // 10])
    trajectory: list[list] = [[] for _ in arms]
    runs, spent = FixedRuns(arms, seed), 0.0
    if checkpoint is not None and checkpoint.exists():
        runs, saved = FixedRuns.load(checkpoint, arms, seed)
        trajectory, spent = saved["trajectory"], saved["seconds"]
    looks = [0, *evaluation_steps(steps, 20)]
    while True:
        if runs.step in looks:
            for arm, column in zip(arms, trajectory, strict=True):
                if column and column[-1][0] == runs.step:
                    continue  # the checkpoint was written after this look
                column.append([runs.step, float(_test(runs, arm, few).mean())])
        if checkpoint is not None and runs.step and runs.step % CHECKPOINT_FIXED == 0:
            runs.save(checkpoint, trajectory=trajectory, seconds=spent + time.process_time() - began)
        if runs.step >= steps:
            break
        ahead = [look for look in looks if look > runs.step] + [runs.step + CHECKPOINT_FIXED - runs.step % CHECKPOINT_FIXED]
        runs.advance(min(ahead) - runs.step)
    other = _sequences(seed, "other test", tests)
    result = []
    for arm, column in zip(arms, trajectory, strict=True):
        if arm in runs.failed:
            continue
        values = _test(runs, arm, test)
        entry = {"model": arm.model, "share": arm.share, "mean_field": arm.mean_field, "loss": float(values.mean())}
        if not arm.mean_field:
            weights = runs.weights[arm]
            entry["standard_error"] = float(values.std(ddof=1) / np.sqrt(len(values)))
            entry["sensitivity"] = fixed_attention.sensitivity(weights, arm.share, *test)
            entry["sensitivity_noisy"] = fixed_attention.sensitivity(weights, arm.share, *test, other=other)
        result.append(entry | {"trajectory": {"step": [row[0] for row in column], "loss": [row[1] for row in column]}})
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    seconds = round(spent + time.process_time() - began, 1)
    return _digits({"seed": seed, "seconds": seconds, "failed": list(runs.failed.values()), "arms": result}, 6)


def _sequences(seed: int, purpose: str, batches: int) -> tuple[np.ndarray, np.ndarray]:
    counts, classes = synthetic.Stream(seed, batch=128, stratified=True, purpose=purpose).counts(batches)
    return counts.reshape(-1, synthetic.SLOTS), classes.reshape(-1)


def _test(runs: FixedRuns, arm: FixedArm, test: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    if arm.mean_field:
        return fixed_attention.losses(runs.weights[arm], fixed_attention.mean_pattern(arm.share), np.arange(synthetic.CLASSES))
    return fixed_attention.losses(runs.weights[arm], fixed_attention.pattern(*test, arm.share), test[1])


def fig3(seeds: int = 5, *, steps: int = 125_000, tests: int = 1000, work: Path = WORK, folder: Path = cards.FOLDER) -> None:
    """All arms of Figure 3, seed by seed, into the card p1_fig3.

    Args:
        seeds: how many, from 1234 on.
        steps, tests: as in `record_fixed` (for tests).
        work, folder: where runs and card are kept.

    Raises:
        ValueError: no seed.
    """
    checks.integer_at_least("fig3", 1, seeds=seeds)
    arms, found = fig3_arms(), []
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        key = json.loads(json.dumps({"arms": [asdict(arm) for arm in arms], "seed": seed, "steps": steps, "tests": tests}))
        stem = work / "fig3" / f"seed-{seed}"
        result = _kept(
            stem.with_suffix(".json"), key,
            partial(record_fixed, arms, seed, steps=steps, tests=tests, checkpoint=stem.with_suffix(".npz")),
        )  # fmt: skip
        found.append(result)
        line = ", ".join(f"{arm['model']} {arm['share']:g}: {arm['loss']:.5f}" for arm in result["arms"] if not arm["mean_field"])
        print(f"seed {seed} | {result['seconds']:.0f} s | {line}", flush=True)
        cards.save(
            "p1_fig3",
            config={
                "shares": list(SHARES), "models": list(fixed_attention.MODELS), "steps": steps, "batch": 128, "eta": 0.01,
                "test_sequences": 128 * tests, "step_of_difference": 0.005, "dtype": "float64",
                "data": "fresh at every step, 32 sequences of each class, lib.data.synthetic, FIG3",
            },
            seeds=[one["seed"] for one in found], results={"runs": found}, seconds=sum(one["seconds"] for one in found), folder=folder,
        )  # fmt: skip


def values(card: dict, arm: str, *path: str) -> np.ndarray:
    """One quantity of one arm of the card p1_fig2, over its seeds.

    Args:
        card: from `cards.load("p1_fig2")`.
        arm: its name.
        path: where in a run, such as "final", "mass" or "levels", "0.1", "mass" or "trajectory", "loss".

    Returns:
        [seed, ...], NaN where a level was not reached. Runs must agree in shape (trajectories of stopped runs don't: take them one by one).

    Raises:
        ValueError: an unknown arm, or a path that no run has.
    """
    arms = card["results"]["arms"]
    checks.one_of("values", list(arms), arm=arm)
    found = []
    for run in arms[arm]:
        item = run
        for key in path:
            if isinstance(item, dict) and key not in item:
                raise ValueError(f"values: {key!r} is not in a run of {arm!r}; there are: {', '.join(item)}.")
            item = None if item is None else item[key]
        found.append(np.nan if item is None else item)
    return np.array(found)


def fixed_values(card: dict, model: str, quantity: str = "loss", *, mean_field: bool = False) -> np.ndarray:
    """One quantity of one model of the card p1_fig3.

    Args:
        card: from `cards.load("p1_fig3")`.
        model: 'collapsed', 'collapsed without bias' or 'factorised'.
        quantity: 'loss', 'standard_error', 'sensitivity' or 'sensitivity_noisy'.
        mean_field: the runs on mean inputs instead of data.

    Returns:
        [seed, share], shares in the order of the card's config.

    Raises:
        ValueError: an unknown model, or a quantity that these runs don't have.
    """
    checks.one_of("fixed_values", fixed_attention.MODELS, model=model)
    rows = []
    for run in card["results"]["runs"]:
        mine = {arm["share"]: arm for arm in run["arms"] if arm["model"] == model and arm["mean_field"] == mean_field}
        lacking = [share for share in card["config"]["shares"] if quantity not in mine.get(share, {})]
        if lacking:
            raise ValueError(f"fixed_values: no {quantity!r} for {model}, share {lacking[0]:g}, seed {run['seed']}.")
        rows.append([mine[share][quantity] for share in card["config"]["shares"]])
    return np.array(rows)


def main() -> None:
    """Command line; see the module's head."""
    parser = argparse.ArgumentParser(prog="python -m lib.train.synthetic_runs", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="figure", required=True)
    two = commands.add_parser("fig2", help="attention trained: DTAP, equal loss, with and without the query token")
    two.add_argument("--seeds", type=int, default=10, help="how many")
    two.add_argument("--first", type=int, default=FIRST_SEED, help="the first seed")
    two.add_argument("--only", nargs="*", default=[], metavar="NAME", help="names of arms")
    three = commands.add_parser("fig3", help="attention held fixed")
    three.add_argument("--seeds", type=int, default=5, help="how many, from 1234 on")
    given = parser.parse_args()
    if given.figure == "fig2":
        fig2(given.seeds, tuple(given.only), first=given.first)
    else:
        fig3(given.seeds)


if __name__ == "__main__":
    main()
