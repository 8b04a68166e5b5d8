"""Plain gradient descent of the two circuits on a fixed sample, with the loss and the attention at every step."""

from dataclasses import dataclass

import numpy as np
import torch

from lib import checks
from lib.data.two_pools import Sample, TwoPools, token_counts
from lib.models.circuits import TwoCircuits


@dataclass(frozen=True, eq=False)
class Descent:
    """One run of an ensemble.

    Attributes:
        loss: [step, *ensemble], mean cross-entropy in nats before each step; the last one is after the last step.
        mass: [step, *ensemble], attention on the distinct tokens, mean over the sample.
    """

    loss: np.ndarray
    mass: np.ndarray


def descend(model: TwoCircuits, law: TwoPools, sample: Sample, *, eta_qk: float, eta_ov: float, steps: int) -> Descent:
    """Train a model in place: full-batch gradient descent, one rate for each circuit.

    Args:
        model: its vocabulary is the law's, its outputs are the classes.
        law: the data.
        sample: sequences of the law, shared by all members; `law.every_sequence()` makes the gradient exact.
        eta_qk: learning rate of the QK circuit's matrices, > 0.
        eta_ov: learning rate of the OV circuit's, > 0.
        steps: number of steps, >= 1.

    Returns:
        Descent; `model` holds the weights after the last step.

    Raises:
        ValueError: a model of other sizes, rates <= 0, or a loss that stops being finite (with step and rates).

    Source: paper 1, training of the synthetic models (there with fresh batches).
    """
    checks.integer_at_least("descend", 1, steps=steps)
    if (model.vocabulary, model.outputs) != (law.vocabulary, law.classes):
        raise ValueError(
            f"descend: model of vocabulary {model.vocabulary} and {model.outputs} outputs; expected {law.vocabulary} and {law.classes}."
        )
    where = next(model.parameters())
    query, label = (torch.as_tensor(x, device=where.device) for x in (sample.query, sample.label))
    counts = torch.as_tensor(token_counts(sample.tokens, law.vocabulary), dtype=where.dtype, device=where.device)
    distinct = torch.as_tensor(law.is_distinct(np.arange(law.vocabulary)), dtype=where.dtype, device=where.device)
    optimiser = torch.optim.SGD(model.parameter_groups(eta_qk, eta_ov))
    losses, masses = [], []
    for step in range(steps + 1):
        loss, pattern = model.loss_and_pattern(query, label, counts=counts)  # [*ensemble], [*ensemble, batch, vocabulary]
        if not bool(torch.isfinite(loss).all()):
            raise ValueError(f"descend: the loss is not finite at step {step} (eta_qk = {eta_qk:g}, eta_ov = {eta_ov:g}); lower the rates.")
        losses.append(loss.detach().cpu().numpy())
        masses.append((pattern.detach() @ distinct).mean(-1).cpu().numpy())
        if step < steps:
            optimiser.zero_grad()
            loss.sum().backward()
            optimiser.step()
    return Descent(np.stack(losses), np.stack(masses))
