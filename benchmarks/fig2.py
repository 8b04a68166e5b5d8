"""Figure 2: SGD on token counts against the plain loop, step for step."""

import numpy as np
import torch

from benchmarks import official_loop
from benchmarks.timing import compare
from lib.data import synthetic
from lib.train.count_kernels import train_attention
from lib.train.counts import PARAMETRISATIONS, TOKENS, Arm, Run, initial
from lib.train.counts_batched import BatchedRuns


def one_step_difference(arm: Arm, seed: int) -> float:
    """Take one SGD step from large random weights on the same sequences with both implementations, in float64.

    Returns:
        the largest absolute difference over the loss and all weights.
    """
    rng = np.random.default_rng(seed)
    weights = initial(arm, seed)
    for name in weights:
        weights[name][:, :50] += rng.normal(size=weights[name][:, :50].shape)
    model = official_loop.PlainAttention(arm.parametrisation).double()
    official_loop.load(model, weights)
    options = {"batch": arm.batch, "length": arm.length}
    tokens, classes = synthetic.Stream(seed, **options).tokens(1)
    counts, _ = synthetic.Stream(seed, **options).counts(1)
    loss = official_loop.step(
        model,
        model.optimiser(arm.eta_qk, arm.eta_ov),
        *official_loop.with_targets(tokens[0], classes[0].astype(int), synthetic.FIG2),
        arm.attended,
    )
    ours = np.zeros(1)
    train_attention(
        counts, classes, TOKENS, np.array(synthetic.FIG2.query), np.array(synthetic.FIG2.label), int(arm.attended),
        arm.factorised_attention, arm.factorised_output,
        weights["W_Q"], weights["W_K"], weights["W_V"], weights["W_O"], arm.eta_qk, 0.0, arm.eta_ov, 0, 1, ours,
    )  # fmt: skip
    return max(abs(loss - ours[0]), official_loop.difference(model, weights))


def _row(parametrisation: str, length: int, dtype: str) -> dict:
    arm = Arm("bench", parametrisation, eta_qk=0.3, eta_ov=0.7, steps=1_000_000, length=length)
    run = Run(Arm("bench", parametrisation, length=length), 0, dtype)
    return compare(
        f"fig2-{parametrisation}-L{length}-step{'' if dtype == 'float32' else '-' + dtype}",
        lambda: run.advance(2500),
        lambda: official_loop.run(parametrisation, 30, seed=0, length=length),
        lambda *_: one_step_difference(arm, 0),
        repeats=5,
        ours_per_call=2500,
        reference_per_call=30,
    )


def fig2_compiled() -> list[dict]:
    """Each parametrisation at L = 64 and 128 in float32, the plain loop's precision; at L = 64 also against our float64.

    Sampling is included on both sides, one thread. The agreement is always that of one float64 step on shared data.
    """
    torch.set_num_threads(1)
    settings = [(length, "float32") for length in (64, 128)] + [(64, "float64")]
    return [_row(parametrisation, length, dtype) for length, dtype in settings for parametrisation in PARAMETRISATIONS]


def fig2_batched() -> dict:
    """The torch path in float32, 40 runs at once (FAFO, eight ratios by five seeds), per step of one run."""
    torch.set_num_threads(1)
    arms = [Arm(f"r = {r}", "FAFO", eta_qk=0.01 * r) for r in range(1, 9)]
    runs = BatchedRuns([(arm, seed) for arm in arms for seed in range(5)], dtype=torch.float32)

    def agreement(*_) -> float:
        batched, run = BatchedRuns([(arms[0], 0)]), Run(arms[0], 0)
        batched.advance(50)
        run.advance(50)
        return max(float(np.abs(array - run.weights[name][:, :50]).max()) for name, array in batched.weights(0).items())

    return compare(
        "fig2-FAFO-L64-step-torch-40-runs",
        lambda: runs.advance(50),
        lambda: official_loop.run("FAFO", 30, seed=0),
        agreement,
        ours_per_call=50 * 40,
        reference_per_call=30,
    )


BENCHMARKS = [fig2_compiled, fig2_batched]
