"""Attention held fixed, output trained: how the loss falls when a given share of attention is on the distinct tokens (Figure 3).

Trained exactly on token counts, as in `lib.train.counts`. Runs of one seed share their data, so their losses are paired.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from lib import checks
from lib.data import synthetic
from lib.train.count_kernels import VOCABULARY, WIDTH, train_fixed
from lib.train.counts import BLOCK, Diverged

MODELS = ("collapsed", "collapsed without bias", "factorised")
TOKENS = synthetic.SLOT_TOKENS
_QUERY, _LABEL = np.array(synthetic.FIG3.query), np.array(synthetic.FIG3.label)


@dataclass(frozen=True)
class FixedArm:
    """One arm of Figure 3.

    Args:
        model: 'collapsed' (one matrix and a bias, as published), 'collapsed without bias' (the control the paper lacks) or
            'factorised' (two matrices, no bias, as published).
        share: alpha, attention on the distinct tokens together, in [0, 1].
        eta: learning rate.
        mean_field: replace every sequence's attention by its expectation.

    Raises:
        ValueError: an unknown model, a share outside [0, 1], a rate <= 0.
    """

    model: str
    share: float
    eta: float = 0.01
    mean_field: bool = False

    def __post_init__(self):
        checks.one_of("FixedArm", MODELS, model=self.model)
        checks.in_closed("FixedArm", 0, 1, share=self.share)
        checks.positive("FixedArm", eta=self.eta)


def pattern(counts: np.ndarray, classes: np.ndarray, share: float) -> np.ndarray:
    """The fixed pattern: `share` spread evenly over distinct positions, the rest over common ones and the last token.

    Args:
        counts: [sequence, slot] of the context; classes: [sequence].
        share: alpha, in [0, 1].

    Returns:
        [sequence, slot], summed over the positions of a slot.
    """
    checks.in_closed("pattern", 0, 1, share=share)
    occurs = counts.astype(float)  # [sequence, slot]
    occurs[np.arange(len(classes)), _QUERY[classes]] += 1
    common, distinct = occurs[:, : synthetic.COMMON], occurs[:, synthetic.COMMON :]
    return np.concatenate(
        [
            (1 - share) * common / common.sum(1, keepdims=True),
            share * distinct / np.maximum(distinct.sum(1, keepdims=True), 1),
        ],
        axis=1,
    )


def mean_pattern(share: float, length: int = 64) -> np.ndarray:
    """Expectation of `pattern` over sequences: four inputs, one per class, on which training has no noise.

    Source: derived in chapter p1_fixed_attention. A distinct token's expected share is its weight over 55. With s = 1 + Bin(L-2, 100/155)
    common positions, the last token has E[1/s] for itself, and the rest is spread evenly over the ten common tokens.

    Args:
        share: alpha, in [0, 1].
        length: L.

    Returns:
        [class, slot], rows sum to 1.
    """
    checks.in_closed("mean_pattern", 0, 1, share=share)
    weights = synthetic.SLOT_WEIGHTS
    common_weight = weights[: synthetic.COMMON].sum()
    n = np.arange(length - 1)  # common tokens of a context
    inverse = (stats.binom.pmf(n, length - 2, common_weight / synthetic.TOTAL) / (1 + n)).sum()
    mean = np.empty((synthetic.CLASSES, synthetic.SLOTS))
    mean[:, : synthetic.COMMON] = (1 - share) * (1 - inverse) / synthetic.COMMON
    mean[np.arange(synthetic.CLASSES), _QUERY] += (1 - share) * inverse
    mean[:, synthetic.COMMON :] = share * weights[synthetic.COMMON :] / weights[synthetic.COMMON :].sum()
    return mean


def initial(arm: FixedArm, seed: int, dtype: str = "float64") -> dict[str, np.ndarray]:
    """Initial weights, uniform in +-1/sqrt(50) as torch's default; the same for all shares of a model and seed.

    Args:
        arm, seed: which.
        dtype: 'float64' or 'float32'.

    Returns:
        W_V [token, hidden] (empty if collapsed), W_O [hidden or token, output, padded to 56], bias [output, padded with -inf].
    """
    checks.one_of("initial", ("float64", "float32"), dtype=dtype)
    rng = np.random.default_rng([seed, 3])
    draws = {name: rng.uniform(-1, 1, (VOCABULARY, VOCABULARY)) / np.sqrt(VOCABULARY) for name in ("W_OV", "W_V", "W_O")}
    factorised = arm.model == "factorised"
    W_O = np.zeros((VOCABULARY, WIDTH))
    W_O[:, :VOCABULARY] = draws["W_O" if factorised else "W_OV"]
    bias = np.full(WIDTH, -np.inf)
    bias[:VOCABULARY] = rng.uniform(-1, 1, VOCABULARY) / np.sqrt(VOCABULARY) if arm.model == "collapsed" else 0
    W_V = draws["W_V"] if factorised else np.empty((0, VOCABULARY))
    return {"W_V": W_V.astype(dtype), "W_O": W_O.astype(dtype), "bias": bias.astype(dtype)}


def losses(weights: dict[str, np.ndarray], attention: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Cross-entropy of each sequence under a given pattern.

    Args:
        weights: as from `initial`.
        attention: [sequence, slot]; classes: [sequence].

    Returns:
        [sequence], nats.
    """
    checks.shape("losses", "attention", attention, (len(classes), synthetic.SLOTS))
    W_O = weights["W_O"][:, :VOCABULARY].astype(float)
    circuit = weights["W_V"].astype(float) @ W_O if len(weights["W_V"]) else W_O  # [token, output]
    result = np.empty(len(classes))
    for c in range(synthetic.CLASSES):
        logits = attention[classes == c] @ circuit[TOKENS[c]] + weights["bias"][:VOCABULARY]  # [sequence, output]
        logits -= logits.max(1, keepdims=True)
        result[classes == c] = np.log(np.exp(logits).sum(1)) - logits[:, _LABEL[c]]
    return result


class FixedRuns:
    """Several arms of one seed trained on one stream of data, batch by batch; can be saved and taken up with the same bits.

    An arm whose loss stops being finite is dropped and noted in `failed`; the others go on.

    Args:
        arms: distinct arms.
        seed: of data and initialisation.
        batch, length: the published 128 (32 per class) and 64.
        dtype: 'float64' or 'float32'.

    Raises:
        ValueError: no arm, or one arm twice.
    """

    def __init__(self, arms: list[FixedArm], seed: int, *, batch: int = 128, length: int = 64, dtype: str = "float64"):
        if not arms or len(set(arms)) < len(arms):
            raise ValueError(f"FixedRuns: {len(arms)} arms, {len(set(arms))} of them distinct; expected at least one, each once.")
        self.arms, self.seed, self.length, self.dtype = list(arms), seed, length, dtype
        self.stream = synthetic.Stream(seed, batch=batch, length=length, stratified=True)
        self.weights = {arm: initial(arm, seed, dtype) for arm in arms}
        self.last_loss = dict.fromkeys(arms, float("nan"))  # mean training loss of the last block, nats
        self.failed: dict[FixedArm, str] = {}
        self.step = 0

    def advance(self, steps: int) -> None:
        """Take some SGD steps with every arm.

        Args:
            steps: a multiple of 50.

        Raises:
            Diverged: no arm is left.
            ValueError: steps is not a multiple of 50.
        """
        checks.integer_at_least("FixedRuns.advance", BLOCK, steps=steps)
        if steps % BLOCK:
            raise ValueError(f"FixedRuns.advance: steps = {steps}; expected a multiple of {BLOCK}.")
        target = self.step + steps
        while self.step < target:
            some = min(target - self.step, 250)
            counts, classes = self.stream.counts(some)
            for arm in self.arms:
                if arm not in self.failed:
                    self._train(arm, counts, classes)
            if len(self.failed) == len(self.arms):
                raise Diverged(f"FixedRuns: no arm is left; the last: {self.failed[self.arms[-1]]}")
            self.step += some

    def _train(self, arm: FixedArm, counts: np.ndarray, classes: np.ndarray) -> None:
        weights, steps = self.weights[arm], len(counts)
        mean = np.empty((0, synthetic.SLOTS))
        if arm.mean_field:
            mean = mean_pattern(arm.share, self.length)
            counts = np.zeros((steps, synthetic.CLASSES, synthetic.SLOTS), np.uint8)
            classes = np.tile(np.arange(synthetic.CLASSES, dtype=np.uint8), (steps, 1))
        logged = np.zeros(steps // BLOCK)
        bad = train_fixed(
            counts, classes, TOKENS, _QUERY, _LABEL, arm.share, mean,
            arm.model == "factorised", arm.model == "collapsed", weights["W_V"], weights["W_O"], weights["bias"], arm.eta, BLOCK, logged,
        )  # fmt: skip
        self.last_loss[arm] = float(logged[-1])
        if bad >= 0:
            self.failed[arm] = (
                f"the loss is not finite at step {self.step + bad} of arm {arm.model}, share {arm.share:g} "
                f"(seed {self.seed}, eta = {arm.eta:g}); lower the rate."
            )

    def save(self, path: Path, **extra) -> None:
        """Write all that is needed to go on, in one step; `extra` must be JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        note = {
            "arms": [asdict(arm) for arm in self.arms],
            "seed": self.seed,
            "dtype": self.dtype,
            "step": self.step,
            "length": self.length,
            "batch": self.stream.batch,
        }
        failed = [[self.arms.index(arm), why] for arm, why in self.failed.items()]
        arrays: dict[str, Any] = {f"{i} {name}": array for i, arm in enumerate(self.arms) for name, array in self.weights[arm].items()}
        part = path.with_suffix(".part.npz")
        np.savez(
            part, note=json.dumps(note), failed=json.dumps(failed), extra=json.dumps(extra),
            state=self.stream.state, last=np.array([self.last_loss[arm] for arm in self.arms]), **arrays,
        )  # fmt: skip
        part.replace(path)

    @classmethod
    def load(cls, path: Path, arms: list[FixedArm], seed: int, **options) -> tuple["FixedRuns", dict]:
        """Take up saved runs.

        Returns:
            the runs, and everything that was noted with them.

        Raises:
            ValueError: the checkpoint belongs to other arms, another seed or precision.
        """
        saved = np.load(path)
        note = json.loads(str(saved["note"]))
        runs = cls(arms, seed, **options)
        mine = {"arms": [asdict(arm) for arm in arms], "seed": seed, "dtype": runs.dtype, "length": runs.length, "batch": runs.stream.batch}
        if any(note[key] != value for key, value in mine.items()):
            raise ValueError(
                f"FixedRuns.load: {path.name} belongs to other arms, seed, batch or precision; delete it, or run what it belongs to."
            )
        runs.weights = {arm: {name: saved[f"{i} {name}"] for name in runs.weights[arm]} for i, arm in enumerate(arms)}
        runs.last_loss = dict(zip(arms, saved["last"].tolist(), strict=True))
        runs.failed = {arms[i]: why for i, why in json.loads(str(saved["failed"]))}
        runs.stream.state, runs.step = saved["state"], note["step"]
        return runs, json.loads(str(saved["extra"]))


def sensitivity(weights: dict[str, np.ndarray], share: float, counts, classes, *, step: float = 0.005, other=None) -> float:
    """How much the loss of a trained model falls per unit of share, by a finite difference.

    The published panel takes [L(share) - L(share + step)] / step with fresh sequences for each term, which multiplies their
    sampling error by 1/step = 200, and is zero by construction at share 1. Deviation: both terms use the same sequences, and
    where share + step would exceed 1 the difference is taken backwards.

    Args:
        weights: trained at `share`.
        share: alpha.
        counts: [sequence, slot]; classes: [sequence].
        step: of the difference.
        other: (counts, classes) for the second term, to see the published panel's noise; None = the same sequences.

    Returns:
        nats per unit of share, positive where more attention would help.
    """
    checks.positive("sensitivity", step=step)
    low, high = (share, share + step) if share + step <= 1 else (share - step, share)
    second_counts, second_classes = other or (counts, classes)
    before = losses(weights, pattern(counts, classes, low), classes).mean()
    after = losses(weights, pattern(second_counts, second_classes, high), second_classes).mean()
    return (before - after) / step
