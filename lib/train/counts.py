"""Paper 1's synthetic attention models, trained exactly on token counts (Figure 2).

One head, tokens one-hot, no positions, and only the last token is a query: a batch acts through the counts of its tokens, four
query rows are all of the query-key circuit that moves, and each step is the step of the plain loop (`benchmarks/official_loop.py`)
at a hundredth of its cost. A parametrisation has four letters: FA.. is factorised attention (W_Q and W_K), CA.. collapsed (one matrix
W_QK); the last two say the same of the output (W_V and W_O, or one matrix W_OV).
"""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lib import checks
from lib.data import synthetic
from lib.metrics import attention as metrics
from lib.metrics.heatmap import separability
from lib.train.count_kernels import VOCABULARY, WIDTH, train_attention

PARAMETRISATIONS = ("FAFO", "FACO", "CAFO", "CACO")
INITS = ("torch", "identity", "zero")
BLOCK = 50  # steps over which training losses are summed; divides every epoch length in use
WINDOW = 250  # steps of the training-loss mean that decides when a loss level is reached
TOKENS = synthetic.SLOT_TOKENS


class Diverged(ArithmeticError):
    """The loss of a run became infinite or NaN; the message names arm, seed, step and rates."""


@dataclass(frozen=True)
class Arm:
    """One arm of Figure 2: everything but the seed.

    Args:
        name: of the arm, for messages and run cards.
        parametrisation: FAFO, FACO, CAFO or CACO.
        eta_qk, eta_ov: learning rates of the two circuits (their ratio is r).
        ramp: the QK rate grows linearly from eta_qk to ramp * eta_qk over `steps`; 1 = constant.
        steps: at most so many.
        epoch: steps per epoch, for the stop rule.
        stop_loss: the published stop rule: checked after epochs 1, 101, 201, ..., the run stops when the mean loss of that one
            epoch is at most this. None = never.
        until: stop as soon as the mean loss of 250 steps is at most this. None = never.
        length: L, with query and label.
        batch: sequences per step.
        init_qk, init_ov: 'torch' = uniform in +-1/sqrt(50), 'identity' = 1e-6 times the identity, 'zero'; of every matrix.
        attended: whether the query token is among its own keys, as published.

    Raises:
        ValueError: an unknown parametrisation or initialisation, a rate <= 0, factorised attention from zero (a fixed point).
    """

    name: str
    parametrisation: str
    eta_qk: float = 0.01
    eta_ov: float = 0.01
    ramp: float = 1.0
    steps: int = 625_000
    epoch: int = 250
    stop_loss: float | None = None
    until: float | None = None
    length: int = 64
    batch: int = 32
    init_qk: str = "torch"
    init_ov: str = "torch"
    attended: bool = True

    def __post_init__(self):
        where = f"Arm {self.name!r}"
        checks.one_of(where, PARAMETRISATIONS, parametrisation=self.parametrisation)
        checks.positive(where, eta_qk=self.eta_qk, eta_ov=self.eta_ov, ramp=self.ramp)
        checks.one_of(where, INITS, init_qk=self.init_qk, init_ov=self.init_ov)
        for name in ("steps", "epoch"):
            checks.integer_at_least(where, BLOCK, **{name: getattr(self, name)})
            if getattr(self, name) % BLOCK:
                raise ValueError(f"{where}: {name} = {getattr(self, name)}; expected a multiple of {BLOCK}, the block of the loss log.")
        for side, factorised, init in (
            ("attention", self.factorised_attention, self.init_qk),
            ("output", self.factorised_output, self.init_ov),
        ):
            if factorised and init == "zero":
                raise ValueError(
                    f"{where}: a factorised {side} starting from zero never moves (both gradients vanish); use 'identity' or 'torch'."
                )

    @property
    def factorised_attention(self) -> bool:
        """Whether attention scores come from two matrices."""
        return self.parametrisation[0] == "F"

    @property
    def factorised_output(self) -> bool:
        """Whether logits come from two matrices."""
        return self.parametrisation[2] == "F"

    @property
    def eta_slope(self) -> float:
        """What the QK rate gains per step."""
        return self.eta_qk * (self.ramp - 1) / self.steps


def initial(arm: Arm, seed: int, dtype: str = "float64") -> dict[str, np.ndarray]:
    """Initial weights. Arms of one seed that draw the same matrix at random draw the same numbers.

    Args:
        arm: says which matrices there are and how they start.
        seed: whole number >= 0.
        dtype: 'float64' or 'float32'.

    Returns:
        W_Q [class, d] (the rows of the four query tokens, the only ones that are ever used) and W_K [token, d], or W_Q holds the
        collapsed circuit's rows [class, token] and W_K is empty; W_V [token, hidden] and W_O [hidden, output], or W_O holds the
        collapsed circuit [token, output] and W_V is empty. Outputs are padded with zeros to 56.
    """
    checks.one_of("initial", ("float64", "float32"), dtype=dtype)
    rng = np.random.default_rng([seed, 7])
    size, names = VOCABULARY, ("W_QK", "W_OV", "W_Q", "W_K", "W_V", "W_O")
    draws = {name: rng.uniform(-1, 1, (size, size)) / np.sqrt(size) for name in names}

    def start(name, side):
        starts = {"torch": draws[name], "identity": 1e-6 * np.eye(size), "zero": np.zeros((size, size))}
        matrix = starts[arm.init_qk if side == "qk" else arm.init_ov]
        padded = np.zeros((VOCABULARY, WIDTH))
        padded[:, :VOCABULARY] = matrix
        return (padded if name in ("W_O", "W_OV") else matrix).astype(dtype)

    two_qk, two_ov = arm.factorised_attention, arm.factorised_output
    none = np.empty((0, VOCABULARY), dtype)
    return {
        "W_Q": start("W_Q" if two_qk else "W_QK", "qk")[list(synthetic.FIG2.query)],
        "W_K": start("W_K", "qk") if two_qk else none,
        "W_V": start("W_V", "ov") if two_ov else none,
        "W_O": start("W_O" if two_ov else "W_OV", "ov"),
    }


def qk_circuit(arm: Arm, weights: dict[str, np.ndarray]) -> np.ndarray:
    """Attention scores of each class's query token before the division by sqrt(50).

    Args:
        arm: which parametrisation the weights have.
        weights: as from `initial`.

    Returns:
        [class, token].
    """
    return weights["W_Q"] @ weights["W_K"].T if arm.factorised_attention else weights["W_Q"]


def ov_circuit(arm: Arm, weights: dict[str, np.ndarray]) -> np.ndarray:
    """What attending to a token adds to the logits.

    Args:
        arm: which parametrisation the weights have.
        weights: as from `initial`.

    Returns:
        [token, output]. The paper's W_OV is the transpose.
    """
    W_O = weights["W_O"][:, :VOCABULARY]
    return weights["W_V"] @ W_O if arm.factorised_output else W_O


def examine(arm: Arm, weights: dict[str, np.ndarray], counts: np.ndarray, classes: np.ndarray) -> dict[str, np.ndarray]:
    """What a model does on given sequences.

    Args:
        arm: which parametrisation the weights have, and whether the query token is among its keys.
        weights: as from `initial`.
        counts: [sequence, slot] of the context; classes: [sequence].

    Returns:
        per sequence: loss (nats), probability (of the label), correct (bool), mass_by_kind [sequence, kind] (attention, in the
        order of `synthetic.KINDS`; the first is the mass on distinct tokens), key [sequence, slot] (attention of ONE key of that
        slot, NaN where the slot doesn't occur).

    Raises:
        ValueError: counts or classes of the wrong shape.
    """
    checks.shape("examine", "counts", counts, (None, synthetic.SLOTS))
    checks.shape("examine", "classes", classes, (len(counts),))
    query, label = np.array(synthetic.FIG2.query), np.array(synthetic.FIG2.label)
    occurs = counts.astype(float)  # [sequence, slot]
    if arm.attended:
        occurs[np.arange(len(classes)), query[classes]] += 1
    scores = np.take_along_axis(qk_circuit(arm, weights).astype(float), TOKENS, 1) / np.sqrt(VOCABULARY)  # [class, slot]
    weight = np.exp(scores - scores.max(1, keepdims=True))[classes]  # [sequence, slot]
    key = weight / (occurs * weight).sum(1, keepdims=True)  # [sequence, slot]
    pattern = occurs * key  # [sequence, slot]
    kinds = synthetic.slot_kinds(synthetic.FIG2)  # [class, slot]
    one_hot = (kinds[..., None] == np.arange(len(synthetic.KINDS)))[classes]  # [sequence, slot, kind]
    circuit = ov_circuit(arm, weights).astype(float)
    logits = np.empty((len(classes), VOCABULARY))  # [sequence, output]
    for c in range(synthetic.CLASSES):
        logits[classes == c] = pattern[classes == c] @ circuit[TOKENS[c]]
    logits -= logits.max(1, keepdims=True)
    total = np.exp(logits).sum(1)
    of_label = logits[np.arange(len(classes)), label[classes]]
    return {
        "loss": np.log(total) - of_label,
        "probability": np.exp(of_label) / total,
        "correct": logits.argmax(1) == label[classes],
        "mass_by_kind": (pattern[..., None] * one_hot).sum(1),
        "key": np.where(occurs > 0, key, np.nan),
    }


def summary(arm: Arm, weights: dict[str, np.ndarray], counts: np.ndarray, classes: np.ndarray) -> dict:
    """`examine`, averaged over sequences, with the measures of Figure 2.

    Args:
        arm, weights, counts, classes: as in `examine`.

    Returns:
        loss, accuracy, mass (mean attention on distinct tokens), mass_sd and probability over sequences; mass_by_kind (dict);
        top_kind (dict: share of sequences whose most attended single key is of that kind); separability and separability_sd;
        query_gap, distinct_gap: score of the own query token, and mean score of the distinct tokens, above the mean of the other
        common tokens, averaged over classes (nats, after the division by sqrt(50)); dtap: percent [probability bin, mass bin].
    """
    seen = examine(arm, weights, counts, classes)
    mass = seen["mass_by_kind"][:, 0]
    kinds = synthetic.slot_kinds(synthetic.FIG2)
    key = seen["key"]
    top = kinds[classes, np.nanargmax(key, 1)]
    gap = separability(key, kinds[classes] == 0)
    scores = np.take_along_axis(qk_circuit(arm, weights).astype(float), TOKENS, 1) / np.sqrt(VOCABULARY)  # [class, slot]
    own, distinct = kinds == synthetic.KINDS.index("own query"), kinds == 0
    base = np.mean(scores, axis=1, where=~(own | distinct))
    return {
        "loss": seen["loss"].mean(),
        "accuracy": seen["correct"].mean(),
        "mass": mass.mean(),
        "mass_sd": mass.std(ddof=1),
        "probability": seen["probability"].mean(),
        "mass_by_kind": dict(zip(synthetic.KINDS, seen["mass_by_kind"].mean(0).tolist(), strict=True)),
        "top_kind": {name: float((top == k).mean()) for k, name in enumerate(synthetic.KINDS)},
        "separability": np.nanmean(gap),
        "separability_sd": np.nanstd(gap, ddof=1),
        "query_gap": (np.mean(scores, axis=1, where=own) - base).mean(),
        "distinct_gap": (np.mean(scores, axis=1, where=distinct) - base).mean(),
        "dtap": 100 * metrics.dtap(np.clip(mass, 0, 1), seen["probability"]),
    }


class Run:
    """One arm with one seed, which can be advanced, saved and taken up again with the same bits.

    Args:
        arm: what to run.
        seed: of data and initialisation; arms with the same seed, batch and length see the same data.
        dtype: 'float64', or 'float32' as in the published runs.
    """

    def __init__(self, arm: Arm, seed: int, dtype: str = "float64"):
        checks.integer_at_least("Run", 0, seed=seed)
        self.arm, self.seed, self.dtype = arm, seed, dtype
        self.weights = initial(arm, seed, dtype)
        self.stream = synthetic.Stream(seed, batch=arm.batch, length=arm.length)
        self.step, self.stopped = 0, False
        self.losses = np.zeros(arm.steps // BLOCK)  # [block], nats, mean training loss of each block

    def advance(self, steps: int) -> None:
        """Take some SGD steps.

        Args:
            steps: a multiple of 50; it is cut at the arm's number of steps.

        Raises:
            Diverged: the loss is no longer finite. Weights are those before that step.
            ValueError: steps is not a multiple of 50.
        """
        checks.integer_at_least("Run.advance", BLOCK, steps=steps)
        if steps % BLOCK:
            raise ValueError(f"Run.advance: steps = {steps}; expected a multiple of {BLOCK}.")
        arm, target = self.arm, min(self.step + steps, self.arm.steps)
        while self.step < target:
            some = min(target - self.step, WINDOW)
            counts, classes = self.stream.counts(some)
            bad = train_attention(
                counts, classes, TOKENS, np.array(synthetic.FIG2.query), np.array(synthetic.FIG2.label), int(arm.attended),
                arm.factorised_attention, arm.factorised_output,
                self.weights["W_Q"], self.weights["W_K"], self.weights["W_V"], self.weights["W_O"],
                arm.eta_qk, arm.eta_slope, arm.eta_ov, self.step, BLOCK, self.losses[self.step // BLOCK :],
            )  # fmt: skip
            if bad >= 0:
                raise Diverged(
                    f"Run: the loss is not finite at step {self.step + bad} of arm {arm.name!r} (seed {self.seed}, "
                    f"eta_qk = {arm.eta_qk:g}, eta_ov = {arm.eta_ov:g}); lower the rates. Other arms are kept."
                )
            self.step += some

    def mean_loss(self, steps: int) -> float:
        """Mean training loss of the last so many steps (a multiple of 50), in nats."""
        return float(self.losses[max(self.step - steps, 0) // BLOCK : self.step // BLOCK].mean())

    def stop_rule(self) -> bool:
        """Whether the published stop rule, or `until`, ends the run at this step."""
        epochs, rest = divmod(self.step, self.arm.epoch)
        official = (
            self.arm.stop_loss is not None and rest == 0 and epochs % 100 == 1 and self.mean_loss(self.arm.epoch) <= self.arm.stop_loss
        )
        wanted = self.arm.until is not None and self.step % WINDOW == 0 and self.step > 0 and self.mean_loss(WINDOW) <= self.arm.until
        return official or wanted

    def save(self, path: Path, **extra) -> None:
        """Write all that is needed to go on, in one step; `extra` must be JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        note = {"arm": asdict(self.arm), "seed": self.seed, "dtype": self.dtype, "step": self.step, "stopped": self.stopped, **extra}
        part = path.with_suffix(".part.npz")
        arrays: dict[str, Any] = {"state": self.stream.state, "losses": self.losses[: self.step // BLOCK], **self.weights}
        np.savez(part, note=json.dumps(note), **arrays)
        part.replace(path)

    @classmethod
    def load(cls, path: Path, arm: Arm, seed: int, dtype: str = "float64") -> tuple["Run", dict]:
        """Take up a saved run.

        Returns:
            the run, and everything that was noted with it.

        Raises:
            ValueError: the checkpoint belongs to another arm, seed or precision.
        """
        saved = np.load(path)
        note = json.loads(str(saved["note"]))
        mine = {"arm": asdict(arm), "seed": seed, "dtype": dtype}
        other = {key: note[key] for key in mine}
        if mine != other:
            raise ValueError(f"Run.load: {path.name} was saved by {other}; expected {mine}. Delete it, or run what it belongs to.")
        run = cls(arm, seed, dtype)
        run.weights = {name: saved[name] for name in run.weights}
        run.stream.state = saved["state"]
        run.step, run.stopped = note["step"], note["stopped"]
        run.losses[: run.step // BLOCK] = saved["losses"]
        return run, note


def hastened(arm: Arm, factor: int) -> Arm:
    """The same flow in fewer steps: rates times `factor`, steps and epochs divided by it.

    SGD tends to the gradient flow, in which only rate times steps counts, so what an arm ends in changes little while it costs a
    `factor`-th. The noise of the batches grows, and the stop rule is looked at more coarsely.

    Args:
        arm: as published.
        factor: whole number >= 1.

    Returns:
        an arm of the same name.
    """
    checks.integer_at_least("hastened", 1, factor=factor)

    def fewer(steps: int) -> int:
        return max(BLOCK, round(steps / factor / BLOCK) * BLOCK)

    return replace(arm, eta_qk=arm.eta_qk * factor, eta_ov=arm.eta_ov * factor, steps=fewer(arm.steps), epoch=fewer(arm.epoch))


def train_all(runs: list[tuple[Arm, int]], *, threads: int = 1, dtype: str = "float64") -> tuple[list[Run | None], list[str]]:
    """Run several arms and seeds to their ends. A run that diverges leaves the others alone.

    Args:
        runs: (arm, seed) pairs.
        threads: how many to run at a time; the results don't depend on it, bit for bit.
        dtype: as in `Run`.

    Returns:
        the finished runs in order, None where one diverged; and what the diverged ones had to say.

    Raises:
        ValueError: no run.
    """
    if not runs:
        raise ValueError("train_all: no runs; expected at least one (arm, seed) pair.")
    checks.integer_at_least("train_all", 1, threads=threads)

    def attempt(pair: tuple[Arm, int]) -> Run | str:
        try:
            return train(*pair, dtype=dtype)
        except Diverged as error:
            return str(error)

    with ThreadPoolExecutor(threads) as pool:
        ends = list(pool.map(attempt, runs))
    return [end if isinstance(end, Run) else None for end in ends], [end for end in ends if isinstance(end, str)]


def train(arm: Arm, seed: int, *, dtype: str = "float64") -> Run:
    """Run an arm to its end: its last step, its stop rule, or `until`.

    Args:
        arm, seed, dtype: as in `Run`.

    Returns:
        the finished run.

    Raises:
        Diverged: as `Run.advance`.
    """
    run = Run(arm, seed, dtype)
    while run.step < arm.steps and not run.stopped:
        run.advance(BLOCK * (1 + _blocks_to_check(run)))
        run.stopped = run.stop_rule()
    return run


def _blocks_to_check(run: Run) -> int:
    """Blocks, less one, to the next step at which something may have to be decided: full windows and ends of epochs 1, 101, ..."""
    arm = run.arm
    window = WINDOW - run.step % WINDOW
    cycle = 100 * arm.epoch
    check = (arm.epoch - run.step) % cycle or cycle
    return min(window, check) // BLOCK - 1
