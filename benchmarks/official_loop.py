"""The synthetic experiments as one writes them down first: every token materialised, torch autograd, one run at a time.

This is our own plain version of the published recipe, with nothing made fast and nothing made slow on purpose: sequences are
drawn by `numpy.random.Generator.choice`, one-hot encoded, and only the last position is a query. It serves two ends: the fast
engine must take the same steps (`load`, `step` and `difference` on shared tokens), and it is what the fast engine is timed against.
"""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from lib.data import synthetic


class PlainAttention(nn.Module):
    """One attention head read at the last position, of which each side is one or two 50 x 50 matrices (Paper 1, Figure 2)."""

    def __init__(self, parametrisation: str):
        super().__init__()
        size = synthetic.VOCABULARY
        self.names = ["W_Q", "W_K"] if parametrisation[0] == "F" else ["W_QK"]
        self.names += ["W_V", "W_O"] if parametrisation[2] == "F" else ["W_OV"]
        for name in self.names:
            setattr(self, name, nn.Linear(size, size, bias=False))

    def forward(self, one_hot: torch.Tensor, attended: bool = True) -> torch.Tensor:
        last = one_hot[:, -1]  # [batch, token]
        keys = one_hot if attended else one_hot[:, :-1]  # [batch, key, token]
        if "W_Q" in self.names:
            scores = torch.einsum("bd,bkd->bk", self.W_Q(last), self.W_K(keys))
        else:
            # W_QK acts on the keys, its rows being queries
            scores = torch.einsum("bt,bkt->bk", last, self.W_QK(keys))
        pattern = torch.softmax(scores / math.sqrt(synthetic.VOCABULARY), -1)  # [batch, key]
        mixed = torch.einsum("bk,bkt->bt", pattern, keys)  # [batch, token]
        return self.W_O(self.W_V(mixed)) if "W_O" in self.names else self.W_OV(mixed)

    def optimiser(self, eta_qk: float, eta_ov: float) -> torch.optim.SGD:
        qk = [p for name, p in self.named_parameters() if name.startswith(("W_Q", "W_K"))]
        ov = [p for name, p in self.named_parameters() if not name.startswith(("W_Q", "W_K"))]
        return torch.optim.SGD([{"params": qk, "lr": eta_qk}, {"params": ov, "lr": eta_ov}])


class PlainFixed(nn.Module):
    """Output side alone, under attention that is given (Paper 1, Figure 3)."""

    def __init__(self, factorised: bool, bias: bool):
        super().__init__()
        size = synthetic.VOCABULARY
        self.layers = (
            nn.Sequential(nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False))
            if factorised
            else nn.Linear(size, size, bias=bias)
        )

    def forward(self, one_hot: torch.Tensor, share: float) -> torch.Tensor:
        distinct = one_hot[..., synthetic.COMMON :].sum(-1)  # [batch, key], 1 where the token is a distinct one
        pattern = share * distinct / distinct.sum(-1, keepdim=True)
        pattern = pattern + (1 - share) * (1 - distinct) / (1 - distinct).sum(-1, keepdim=True)
        return self.layers(torch.einsum("bk,bkt->bt", pattern, one_hot))


def _pairs(model: nn.Module, weights: dict[str, np.ndarray]) -> list[tuple[torch.Tensor, np.ndarray]]:
    """Tensors of a plain model, laid out with tokens as rows, beside the arrays of the fast engine."""
    size, query = synthetic.VOCABULARY, list(synthetic.FIG2.query)
    W_O = weights["W_O"][:, :size]
    if isinstance(model, PlainFixed):
        layers = model.layers
        if isinstance(layers, nn.Sequential):
            return [(layers[0].weight.T, weights["W_V"]), (layers[1].weight.T, W_O)]
        bias = [] if layers.bias is None else [(layers.bias, weights["bias"][:size])]
        return [(layers.weight.T, W_O), *bias]
    rows = {
        "W_Q": lambda: (model.W_Q.weight.T[query], weights["W_Q"]),
        "W_K": lambda: (model.W_K.weight.T, weights["W_K"]),
        "W_QK": lambda: (model.W_QK.weight[query], weights["W_Q"]),  # its rows are queries already
        "W_V": lambda: (model.W_V.weight.T, weights["W_V"]),
        "W_O": lambda: (model.W_O.weight.T, W_O),
        "W_OV": lambda: (model.W_OV.weight.T, W_O),
    }
    return [rows[name]() for name in model.names]


def load(model: nn.Module, weights: dict[str, np.ndarray]) -> None:
    """Give a plain model the weights of the fast engine."""
    with torch.no_grad():
        if isinstance(model, PlainAttention):
            query = list(synthetic.FIG2.query)
            for name, row in (("W_Q", "column"), ("W_QK", "row")):
                if name in model.names:
                    target = getattr(model, name).weight
                    (target.T if row == "column" else target)[query] = torch.as_tensor(weights["W_Q"], dtype=target.dtype)
        for tensor, array in _pairs(model, weights):
            tensor.copy_(torch.as_tensor(array, dtype=tensor.dtype))


def difference(model: nn.Module, weights: dict[str, np.ndarray]) -> float:
    """Largest absolute difference between a plain model's weights and those of the fast engine."""
    return max(float(np.abs(tensor.detach().numpy() - array).max()) for tensor, array in _pairs(model, weights))


def draw(rng: np.random.Generator, batch: int, length: int, task: synthetic.Task, stratified: bool = False):
    """Sequences [batch, L-1] with the query last, and targets [batch], drawn token by token."""
    laws = [synthetic.token_weights(c) / synthetic.TOTAL for c in range(synthetic.CLASSES)]
    classes = np.repeat(np.arange(4), batch // 4) if stratified else rng.integers(0, synthetic.CLASSES, batch)
    tokens = [[*rng.choice(synthetic.VOCABULARY, size=length - 2, p=laws[c]), task.query[c]] for c in classes]
    return with_targets(np.array(tokens)[:, :-1], classes, task)


def with_targets(context: np.ndarray, classes: np.ndarray, task: synthetic.Task):
    """Append the query token to contexts [batch, L-2]; the labels as targets."""
    query, label = np.array(task.query)[classes], np.array(task.label)[classes]
    return torch.as_tensor(np.concatenate([context, query[:, None]], 1)), torch.as_tensor(label)


def step(model: nn.Module, optimiser: torch.optim.Optimizer, tokens: torch.Tensor, targets: torch.Tensor, *extra) -> float:
    """One SGD step on materialised tokens; the loss before it."""
    one_hot = functional.one_hot(tokens, synthetic.VOCABULARY).to(next(model.parameters()).dtype)
    optimiser.zero_grad()
    loss = functional.cross_entropy(model(one_hot, *extra), targets)
    loss.backward()
    optimiser.step()
    return loss.item()


def run(parametrisation: str, steps: int, *, seed: int, eta_qk: float = 0.01, eta_ov: float = 0.01, length: int = 64, batch: int = 32):
    """Figure 2's loop for some steps; the losses."""
    torch.manual_seed(seed)
    rng, model = np.random.default_rng(seed), PlainAttention(parametrisation)
    optimiser = model.optimiser(eta_qk, eta_ov)
    return [step(model, optimiser, *draw(rng, batch, length, synthetic.FIG2)) for _ in range(steps)]


def run_fixed(factorised: bool, bias: bool, share: float, steps: int, *, seed: int, eta: float = 0.01, batch: int = 128):
    """Figure 3's loop for some steps; the losses."""
    torch.manual_seed(seed)
    rng, model = np.random.default_rng(seed), PlainFixed(factorised, bias)
    optimiser = torch.optim.SGD(model.parameters(), lr=eta)
    return [step(model, optimiser, *draw(rng, batch, 64, synthetic.FIG3, stratified=True), share) for _ in range(steps)]
