"""Reading the results of `lib.train.agreement`: by arm, at equal loss, at equal steps and at the end, each with its scatter.

Works on what `agreement.summary` returns and on the same after its way through a run card, where NaN has become null.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lib import checks

END = "end"


class Experiment:
    """One training of the run card.

    Attributes:
        arms: names.
        marked: 'verb', or 'subject' where the verb is hidden.
        floor: mass on the marked word under uniform attention, mean over the followed test sentences.
        step: [evaluation].
        levels: test losses at which the arms were compared, in nats.
        seeds: how many.
    """

    def __init__(self, results: Mapping[str, Any], name: str):
        checks.one_of("Experiment", tuple(results), name=name)
        self.raw = results[name]
        self.name = name
        self.arms: list[str] = list(self.raw["arms"])
        self.marked: str = self.raw["marked"]
        self.floor = float(self.raw["floor"]["followed"])
        self.step = np.asarray(self.raw["history"]["step"])
        self.seeds = len(self.raw["history"]["loss"][0])
        self.levels = [float(level) for level in self.raw["at_loss"]]

    def _arm(self, arm: str) -> int:
        checks.one_of("Experiment", self.arms, arm=arm)
        return self.arms.index(arm)

    def curve(self, what: str, arm: str) -> np.ndarray:
        """[seed, evaluation] of 'loss', 'accuracy', 'mass' or 'entropy' over training; the last two are means over heads."""
        return np.asarray(self.raw["history"][what][self._arm(arm)], dtype=float)

    def at(self, what: str, arm: str, moment: float | str, *, heads: bool = False) -> np.ndarray:
        """[seed]: 'step', 'loss', 'accuracy', 'mass' or 'entropy' of an arm.

        Args:
            what: quantity; mass and entropy are means over heads unless `heads`.
            arm: its name.
            moment: a loss level as a float, a step as an int, or 'end' (then on the whole test set).
            heads: return [seed, head] for mass and entropy (at a loss level or at the end).

        Returns:
            [seed], NaN where the run never reached the level.
        """
        index = self._arm(arm)
        if isinstance(moment, int) and not isinstance(moment, bool):
            values = self.curve(what, arm)[:, int(np.flatnonzero(self.step <= moment)[-1])]
        elif moment == END:
            values = np.asarray(self.raw["end"][what][index], dtype=float)
        else:
            checks.one_of("Experiment.at", self.levels, moment=moment)
            if what == "loss":
                return np.full(len(self.curve("loss", arm)), float(moment))
            values = np.asarray(self.raw["at_loss"][f"{moment:g}"][what][index], dtype=float)
        return values.mean(-1) if values.ndim > 1 and not heads else values

    def gain(self, what: str, arm: str, moment: float | str, over: str = "base") -> np.ndarray:
        """[seed]: difference between two arms at one moment, in pairs of equal seed."""
        return self.at(what, arm, moment) - self.at(what, over, moment)

    def table(self, what: str, moments: Sequence[float | str], digits: int = 3) -> pd.DataFrame:
        """Mean ± standard deviation over seeds, one row per arm and one column per moment."""
        columns = {name_of(moment): [spread(self.at(what, arm, moment), digits) for arm in self.arms] for moment in moments}
        return pd.DataFrame(columns, index=pd.Index(self.arms, name="arm"))

    def by_label(self, arm: str) -> np.ndarray:
        """[seed, label]: mass on the marked word at the end, in singular (0) and plural (1) test sentences, mean over heads."""
        return np.asarray(self.raw["end"]["mass_by_label"][self._arm(arm)], dtype=float).mean(-1)

    def path(self, arm: str) -> tuple[np.ndarray, np.ndarray]:
        """Lowest test loss so far and mass, both [seed, evaluation]: a curve that never turns back on the loss axis."""
        return np.minimum.accumulate(self.curve("loss", arm), axis=1), self.curve("mass", arm)

    def linzen(self) -> pd.DataFrame | str:
        """What was measured on Linzen's sentences, mean ± standard deviation over seeds; a sentence where it was not."""
        found = self.raw.get("linzen")
        if found is None:
            return "These results were made without Linzen's sentences."
        columns = {"accuracy": np.asarray(found["accuracy"], dtype=float)}
        for name in ("verb", "subject"):
            columns[f"mass on the {name}"] = np.asarray(found["mass"][name], dtype=float).mean(-1)
        rows = {name: [spread(row) for row in values] for name, values in columns.items()}
        return pd.DataFrame(rows, index=pd.Index(self.arms, name="arm"))

    def ratio_sweep(self, what: str, moment: float | str) -> tuple[list[int], np.ndarray]:
        """Ratios of the arms in which only QK is faster (the base is 1), and [ratio, seed] of a quantity."""
        arms = {1: "base"} | {int(arm.removeprefix("QK ×")): arm for arm in self.arms if arm.startswith("QK ×")}
        ratios = sorted(arms)
        return ratios, np.array([self.at(what, arms[ratio], moment) for ratio in ratios])

    def dtap(self, arm: str) -> np.ndarray:
        """[probability bin, mass bin], share of the test sentences at the end, mean over seeds."""
        return np.asarray(self.raw["dtap"][self._arm(arm)], dtype=float)

    def sentence(self, index: int, arm: str, moment: float | str) -> dict[str, Any]:
        """A sentence as the book shows it: words, label, verb, attention over the words, probability of the true label."""
        one = self.raw["shown"]["sentences"][index]
        key = moment if moment == END else f"{moment:g}"
        return {
            "words": list(one["words"]),
            "label": one["label"],
            "verb": one["verb"],
            "pattern": np.asarray(one[key]["pattern"][self._arm(arm)], dtype=float),
            "probability": float(np.asarray(one[key]["probability"], dtype=float)[self._arm(arm)]),
        }


def name_of(moment: float | str) -> str:
    """How a moment is called in a table: 'loss 0.1', 'step 250' or 'end'."""
    if moment == END:
        return END
    return f"step {moment}" if isinstance(moment, int) else f"loss {moment:g}"


def spread(values: np.ndarray, digits: int = 3) -> str:
    """'mean ± sd' over the seeds that have a value; '(k of n)' behind it when some have none; a dash when none has."""
    values = np.asarray(values, dtype=float)
    there = values[np.isfinite(values)]
    if there.size == 0:
        return "–"
    text = f"{there.mean():.{digits}f}"
    if there.size > 1:
        text += f" ± {there.std(ddof=1):.{digits}f}"
    return text if there.size == values.size else f"{text} ({there.size} of {values.size})"


def compare(live: Any, card: Experiment, quantities: Sequence[str] = ("loss", "mass"), relative: float = 2e-3) -> pd.DataFrame:
    """Set a live run beside the run card, at every evaluation that both have.

    Args:
        live: `lib.train.agreement.History`; its arms and its seeds (as the first ones of the card) must be in the card.
        card: the experiment that the live run repeats.
        quantities: of the history.
        relative: largest difference that counts as the same; the card keeps four digits.

    Returns:
        one row per arm: evaluations and numbers compared, and whether all agree.

    Raises:
        ValueError: nothing in common, or a number that differs; arm, quantity, seed, step and both values are named.
    """
    common = np.intersect1d(live.step, card.step)
    if common.size == 0:
        raise ValueError(f"compare: live run was measured at steps {live.step.tolist()}, the card at others; expected common ones.")
    mine, theirs = (np.flatnonzero(np.isin(steps, common)) for steps in (live.step, card.step))
    rows = []
    for i, arm in enumerate(live.arms):
        count = 0
        for what in quantities:
            a = getattr(live, what)[i][:, mine]
            a = a.mean(-1) if a.ndim > 2 else a
            b = card.curve(what, arm)[: len(live.seeds)][:, theirs]
            off = ~(np.abs(a - b) <= relative * np.abs(b) + 1e-6)  # NaN counts as different
            if off.any():
                at = tuple(int(k) for k in np.argwhere(off)[0])
                raise ValueError(
                    f"compare: {what} of arm {arm!r}, seed {live.seeds[at[0]]}, step {common[at[1]]} is {a[at]:.5g} live and {b[at]:.5g} "
                    "in the run card; expected the same. The card is older than the code; redo it: python -m lib.train.agreement --card."
                )
            count += a.size
        rows.append({"arm": arm, "evaluations": len(common), "numbers compared": count, "same as the card": "all"})
    return pd.DataFrame(rows).set_index("arm")
