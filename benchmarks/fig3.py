"""Figure 3: fixed attention on token counts against the plain loop, step for step."""

import numpy as np
import torch

from benchmarks import official_loop
from benchmarks.timing import compare
from lib.data import synthetic
from lib.train.count_kernels import train_fixed
from lib.train.fixed_attention import MODELS, TOKENS, FixedArm, FixedRuns, initial

SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)


def one_step_difference(arm: FixedArm, seed: int) -> float:
    """Take one SGD step on the same sequences with both implementations, in float64.

    Returns:
        the largest absolute difference over the loss and all weights.
    """
    weights = initial(arm, seed)
    model = official_loop.PlainFixed(arm.model == "factorised", arm.model == "collapsed").double()
    official_loop.load(model, weights)
    options = {"batch": 128, "stratified": True}
    tokens, classes = synthetic.Stream(seed, **options).tokens(1)
    counts, _ = synthetic.Stream(seed, **options).counts(1)
    loss = official_loop.step(
        model,
        torch.optim.SGD(model.parameters(), lr=arm.eta),
        *official_loop.with_targets(tokens[0], classes[0].astype(int), synthetic.FIG3),
        arm.share,
    )
    ours = np.zeros(1)
    train_fixed(
        counts, classes, TOKENS, np.array(synthetic.FIG3.query), np.array(synthetic.FIG3.label), arm.share, np.empty((0, 20)),
        arm.model == "factorised", arm.model == "collapsed", weights["W_V"], weights["W_O"], weights["bias"], arm.eta, 1, ours,
    )  # fmt: skip
    return max(abs(loss - ours[0]), official_loop.difference(model, weights))


def _row(model: str, dtype: str) -> dict:
    runs = FixedRuns([FixedArm(model, share) for share in SHARES], 0, dtype=dtype)
    return compare(
        f"fig3-{model.replace(' ', '-')}-step{'' if dtype == 'float32' else '-' + dtype}",
        lambda: runs.advance(500),
        lambda: official_loop.run_fixed(model == "factorised", model == "collapsed", 0.6, 20, seed=0),
        lambda *_: max(one_step_difference(FixedArm(model, share, eta=0.5), 0) for share in SHARES),
        repeats=5,
        ours_per_call=500 * len(SHARES),
        reference_per_call=20,
    )


def fig3_step() -> list[dict]:
    """Each model, five shares trained on one stream of data as the figure needs them; per step of one run, sampling included.

    In float32, the plain loop's precision, and against our float64; the agreement is always that of one float64 step.
    """
    torch.set_num_threads(1)
    return [_row(model, dtype) for dtype in ("float32", "float64") for model in MODELS]


BENCHMARKS = [fig3_step]
