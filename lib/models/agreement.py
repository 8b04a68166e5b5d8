"""The agreement architecture of Paper 1, for many models at once: one layer that has nothing but attention.

| ours | paper 1's code | shape |
|---|---|---|
| E, P | token embedding, learned positions | [model, token, d_model], [model, position, d_model] |
| W_Q, W_K, W_V | per-head maps | [model, head, d_model, d_head] |
| W_O | per-head output map | [model, head, d_head, d_model] |
| b_Q, b_K, b_V, b_O | biases | [model, head, d_head], b_O [model, d_model] |
| W_U, b_U | classifier (three outputs, of which two occur) | [model, d_model, 3], [model, 3] |

x = E[token] + P[position]; logits = head(sum over heads of pattern @ (x W_V + b_V) W_O + b_O) at the last real token. No
residual, no MLP, no LayerNorm. Mask causal and over padding.

Three exact shortcuts, each tested against the plain layer:

* Only the last real token's query is computed: with one layer and no residual, nothing else reaches the logits. It sees
  every real token, so the causal mask never bites.
* (q W_K^T) x^T instead of q (x W_K)^T: the keys are never formed. b_K adds the same number q·b_K to all scores of a row, and
  the softmax doesn't see it: b_K has no effect and a gradient of exactly zero.
* pattern @ (x W_V + b_V) = (pattern @ x) W_V + b_V, because rows of the pattern sum to 1.

Source: Paper 1, subject-verb agreement experiment (official code).
"""

from dataclasses import dataclass

import torch

from lib import checks


@dataclass(frozen=True)
class Shape:
    """Sizes, by default the published ones except for the vocabulary, which the corpus fixes."""

    vocabulary: int
    d_model: int = 64
    heads: int = 4
    d_head: int = 64
    positions: int = 256
    outputs: int = 3
    init_scale: float = 0.02

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of one model's tensors, in the order in which the initial values are drawn."""
        d, h, e = self.d_model, self.heads, self.d_head
        return {
            "E": (self.vocabulary, d), "P": (self.positions, d),
            "W_Q": (h, d, e), "W_K": (h, d, e), "W_V": (h, d, e), "W_O": (h, e, d), "W_U": (d, self.outputs),
            "b_Q": (h, e), "b_K": (h, e), "b_V": (h, e), "b_O": (d,), "b_U": (self.outputs,),
        }  # fmt: skip


def initial(shape: Shape, seeds: list[int]) -> dict[str, torch.Tensor]:
    """Fresh parameters, one model per entry of `seeds`: matrices N(0, init_scale²), biases 0, float64.

    Args:
        shape: sizes.
        seeds: [model]; equal seeds give equal models, so that arms of an experiment can start alike.

    Raises:
        ValueError: no seed, or a size below 1.
    """
    checks.integer_at_least("initial", 1, models=len(seeds), vocabulary=shape.vocabulary, d_model=shape.d_model, heads=shape.heads,
                            d_head=shape.d_head, positions=shape.positions, outputs=shape.outputs)  # fmt: skip
    checks.positive("initial", init_scale=shape.init_scale)
    stacks = {name: torch.zeros(len(seeds), *size, dtype=torch.float64) for name, size in shape.tensors().items()}
    for model, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(int(seed))
        for name, stack in stacks.items():
            if not name.startswith("b_"):
                stack[model].normal_(0, shape.init_scale, generator=generator)
    return stacks


def embed(parameters: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Token plus position: tokens [model, batch, position] -> x [model, batch, position, d_model].

    Raises:
        ValueError: longer than the learned positions, or tokens for another number of models.
    """
    E, P = parameters["E"], parameters["P"]
    models, _, length = tokens.shape
    if length > P.shape[1]:
        raise ValueError(
            f"embed: sentences of {length} tokens; expected at most the {P.shape[1]} learned positions. Cut them or raise Shape.positions."
        )
    if models != E.shape[0]:
        raise ValueError(f"embed: tokens for {models} models, parameters of {E.shape[0]}; expected the same leading axis.")
    offset = torch.arange(models, device=tokens.device)[:, None, None] * E.shape[1]
    return E.flatten(0, 1)[tokens + offset] + P[:, None, :length]  # [model, batch, position, d_model]


def readout(parameters: dict[str, torch.Tensor], x: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and attention at the last real token.

    Args:
        parameters: stacks as from `initial`.
        x: [model, batch, position, d_model], from `embed`.
        length: [model, batch], real tokens.

    Returns:
        logits [model, batch, output]; pattern [model, batch, head, key], the readout's row after softmax.
    """
    p, d_head = parameters, parameters["W_Q"].shape[-1]
    models, batch, positions, d_model = x.shape
    last = (length - 1)[..., None, None].expand(-1, -1, 1, d_model)
    x_last = x.gather(2, last).transpose(1, 2)  # [model, 1, batch, d_model]
    q = x_last @ p["W_Q"] + p["b_Q"][:, :, None]  # [model, head, batch, d_head]
    folded = (q @ p["W_K"].mT / d_head**0.5).transpose(1, 2)  # [model, batch, head, d_model]
    scores = folded @ x.mT  # [model, batch, head, key]
    real = torch.arange(positions, device=x.device) < length[..., None]  # [model, batch, key]
    pattern = scores.masked_fill(~real[:, :, None], -torch.inf).softmax(-1)
    seen = (pattern @ x).transpose(1, 2)  # [model, head, batch, d_model]
    said = seen @ p["W_V"] + p["b_V"][:, :, None]  # [model, head, batch, d_head]
    said = said.transpose(1, 2).reshape(models, batch, -1)  # [model, batch, head * d_head]
    out = said @ p["W_O"].flatten(1, 2) + p["b_O"][:, None]  # [model, batch, d_model]
    return out @ p["W_U"] + p["b_U"][:, None], pattern


def forward(parameters: dict[str, torch.Tensor], tokens: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`readout` of `embed`: tokens [model, batch, position] -> logits, pattern."""
    return readout(parameters, embed(parameters, tokens), length)
