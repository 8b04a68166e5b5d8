"""Paper 2's gradient flow against plain gradient descent by automatic differentiation, and what a gradient costs as the model grows."""

from functools import cache

import numpy as np
import torch

from benchmarks.timing import compare
from lib.theory import flow, markov

LAW = (0.75, 0.19, 0.05, 0.01)
T_END = 760.0  # a whole cycle and the start of the next
STEP = 0.02  # of gradient descent, first order: its loss is then off by half a thousandth at most
RTOL = 1e-5  # of the flow, which is then off by a millionth: stability and not accuracy limits its steps, so less gains nothing
EVERY = 10.0  # units of time between two samples of the loss


def torch_loss(parts, pi, P):
    """The population loss as one would write it for autograd."""
    W_E, W_U, W_Q, W_K = parts
    pattern = ((W_E @ W_Q) @ (W_E @ W_K).mT + pi.log()).softmax(-1)
    return -(pi[:, None] * P * (pattern @ W_E @ W_U).log_softmax(-1)).sum()


def as_torch(model: markov.PopulationModel, parameters: np.ndarray) -> tuple[list, torch.Tensor, torch.Tensor]:
    """Leaf tensors of the four matrices, and pi and P."""
    parts = [torch.tensor(np.array(w), requires_grad=True) for w in model.split(parameters)]
    return parts, torch.tensor(model.chain.stationary), torch.tensor(model.chain.transition)


def descend(model: markov.PopulationModel, start: np.ndarray, t_end: float = T_END) -> np.ndarray:
    """Loss of plain gradient descent, sampled every EVERY units of time."""
    parts, pi, P = as_torch(model, start)
    optimiser = torch.optim.SGD(parts, lr=STEP)
    losses = []
    for step in range(round(t_end / STEP) + 1):
        loss = torch_loss(parts, pi, P)
        if step % round(EVERY / STEP) == 0:
            losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return np.array(losses)


@cache
def exact(width: int) -> np.ndarray:
    """The same losses from a flow integrated far more tightly."""
    model = markov.PopulationModel(markov.sticky_chain(LAW, 0.5), width)
    return flow.flow(model, model.initial(1e-3, 0), T_END, times=np.arange(0, T_END + 1, EVERY), rtol=1e-10, certify=False).loss


def p2_cycle() -> list[dict]:
    """One whole cycle, m = 8, at equal accuracy or better; then ten seeds at five stickinesses, per run, against a tenth of that loop."""
    torch.set_num_threads(1)
    model = markov.PopulationModel(markov.sticky_chain(LAW, 0.5), 8)
    start, times = model.initial(1e-3, 0), np.arange(0, T_END + 1, EVERY)

    def error(mine: np.ndarray, theirs: np.ndarray) -> float:
        ours, reference = (float(np.abs(loss - exact(8)[: len(loss)]).max()) for loss in (mine, theirs))
        if ours > reference:
            raise AssertionError(f"p2_cycle: the flow errs by {ours:.2e}, descent by {reference:.2e}; tighten RTOL.")
        return ours

    def one() -> np.ndarray:
        return flow.flow(model, start, T_END, times=times, rtol=RTOL, certify=False).loss

    stickiness = np.repeat([0.2, 0.35, 0.5, 0.65, 0.8], 10)
    many = markov.PopulationModel(markov.sticky_chain(LAW, stickiness), 8)
    starts = model.initial(1e-3, list(range(10)) * 5)

    def fifty() -> np.ndarray:
        return flow.flows(many, starts, T_END, times=times, rtol=RTOL, certify=False)[20].loss

    return [
        compare("p2-cycle", one, lambda: descend(model, start), error, repeats=1),
        compare(
            "p2-cycle-fifty-runs",
            fifty,
            lambda: descend(model, start, T_END / 10),
            error,
            repeats=1,
            ours_per_call=50,
            reference_per_call=0.1,
        ),
    ]


def p2_gradient_cost() -> list[dict]:
    """One loss gradient against autograd's, for growing vocabulary d and width m."""
    torch.set_num_threads(1)
    rows = []
    for d, m in ((10, 8), (100, 8), (1000, 8), (100, 32), (100, 256), (1000, 256)):
        law = 1 / np.arange(1, d + 1)
        model = markov.PopulationModel(markov.sticky_chain(law / law.sum(), 0.5), m)
        parameters = model.initial(0.5 / np.sqrt(m), 0)
        parts, pi, P = as_torch(model, parameters)

        def by_torch(parts=parts, pi=pi, P=P, model=model) -> np.ndarray:
            for part in parts:
                part.grad = None
            torch_loss(parts, pi, P).backward()
            return model.join(*(part.grad.numpy() for part in parts))

        def difference(a: np.ndarray, b: np.ndarray) -> float:
            return float(np.abs(a - b).max())

        rows.append(compare(f"p2-gradient-d{d}-m{m}", lambda m=model, p=parameters: m.gradient(p), by_torch, difference, repeats=9))
    return rows


BENCHMARKS = [p2_cycle, p2_gradient_cost]
