"""Real sentences: models side by side with one query computed, against the plain layer trained one model at a time."""

import numpy as np
import torch

from benchmarks.timing import compare
from lib.data.sentences import state_of_the_union
from lib.models import agreement as model
from lib.train import agreement

STEPS = 20
ARMS, SEEDS = ("base", "QK ×10", "OV ÷10", "embedding ×10"), (0, 1)


def plain_logits(p, tokens, length):
    """One model, a batch padded to the longest sentence of the corpus, all queries, keys and values written out."""
    positions = tokens.shape[1]
    x = p["E"][tokens] + p["P"][:positions]  # [batch, position, d_model]
    q, k, v = (torch.einsum("bpd,hde->bhpe", x, p[f"W_{c}"]) + p[f"b_{c}"][:, None] for c in "QKV")
    scores = q @ k.mT / q.shape[-1] ** 0.5  # [batch, head, query, key]
    later = ~torch.ones(positions, positions).tril().bool()
    padding = (torch.arange(positions) >= length[:, None])[:, None, None]
    pattern = scores.masked_fill(later | padding, -1e5).softmax(-1)
    out = torch.einsum("bhpe,hed->bpd", pattern @ v, p["W_O"]) + p["b_O"]
    return (out @ p["W_U"] + p["b_U"])[torch.arange(len(tokens)), length - 1]


def plain_training(corpus, setting, arm: str, seed: int) -> dict:
    """One model through torch.optim.AdamW, with its schedule set by hand."""
    shape = model.Shape(vocabulary=len(corpus.vocabulary), **setting.shape)
    p = {name: stack[0].clone().requires_grad_() for name, stack in model.initial(shape, [seed]).items()}
    rates = setting.rates(arm)
    groups = [{"params": [t], "lr": rates[agreement.circuits.circuit_of(n)], "weight_decay": setting.weight_decay} for n, t in p.items()]
    optimiser = torch.optim.AdamW(groups)
    peak = [group["lr"] for group in optimiser.param_groups]
    order = agreement.batches(len(corpus.train), seed, setting.batch, setting.epochs)
    for step in range(STEPS):
        for group, rate in zip(optimiser.param_groups, peak, strict=True):
            group["lr"] = rate * agreement.schedule(step, len(order), setting.warm_up)
        rows = order[step]
        tokens, length = (torch.as_tensor(a[rows]) for a in (corpus.train.tokens, corpus.train.length))
        loss = torch.nn.functional.cross_entropy(plain_logits(p, tokens, length), torch.as_tensor(corpus.train.label[rows]))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {name: tensor.detach() for name, tensor in p.items()}


def agreement_training() -> dict:
    """Seconds a model for the first steps of eight models."""
    corpus = state_of_the_union(seed=0)
    setting = agreement.Setting(arms=ARMS, seeds=SEEDS)
    last = (ARMS[-1], SEEDS[-1])

    def ours():
        runs = agreement.train(corpus, setting, stop=STEPS, looks=[])
        return {name: stack[runs.order.index(last)].detach() for name, stack in runs.parameters.items()}

    def difference(mine, theirs):
        return max(float(np.abs(mine[name] - theirs[name]).max()) for name in theirs if name != "b_K")

    return compare(
        "real-sentences-training", ours, lambda: plain_training(corpus, setting, *last), difference, ours_per_call=len(ARMS) * len(SEEDS)
    )


BENCHMARKS = [agreement_training]
