"""One attention layer on one-hot tokens as two circuits, each held as one matrix or as a product of two.

A token is a row, the one-hot x [vocabulary]. One query token scores the keys of its sequence, is not a key itself, and the
mixture of the keys becomes logits:

    scores = scale * x_query @ qk_circuit @ x_key,   pattern = softmax(scores),   logits = (pattern @ x_keys) @ ov_circuit

| ours | paper 1 | shape |
|---|---|---|
| `W_Q`, `W_K` (factorised attention: FAxx) | W_Q, W_K, transposed | [vocabulary, hidden] |
| `W_QK` (collapsed attention: CAxx) | W_QK | [query token, key token] |
| `W_V`, `W_O` (factorised output: xxFO) | W_V, W_O, transposed | [vocabulary, hidden], [hidden, output] |
| `W_OV` (collapsed output: xxCO) | W_OV, transposed | [vocabulary, output] |
| `qk_circuit` = W_Q @ W_K.T | W_QK: where to look | [query token, key token] |
| `ov_circuit` = W_V @ W_O | (W_O W_V)ᵀ: what to say | [vocabulary, output] |
| `attention_scores`, `pattern` | s, a | [..., batch, key] |

Paper 1 writes tokens as columns, so that its W_OV = W_O W_V is the transpose of our `ov_circuit`; its W_QK is ours. The four
parametrisations are named by two letters for the attention side and two for the output side: FAFO, CAFO, FACO, CACO.

All weights may carry leading ensemble axes: many models are then one tensor. Without positions a sequence enters through its
token counts alone, so every method takes `tokens` (ids) or `counts`.
"""

import math
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from lib import checks
from lib.device import device

FACTORISED, COLLAPSED = "factorised", "collapsed"
CODES = ("FAFO", "CAFO", "FACO", "CACO")
INITS = ("random", "identity", "zero", "balanced")
QK, OV = "QK", "OV"
CIRCUIT = {"W_Q": QK, "W_K": QK, "W_QK": QK, "W_V": OV, "W_O": OV, "W_OV": OV}


def parse_code(code: str) -> tuple[str, str]:
    """The two switches that a four-letter code stands for.

    Paper 1, naming of the synthetic models: the first two letters are the attention side, the last two the output side.

    Args:
        code: one of `CODES`.

    Returns:
        (attention, output), each "factorised" or "collapsed".

    Raises:
        ValueError: another code.

    Example:
        >>> parse_code("CAFO")
        ('collapsed', 'factorised')
    """
    checks.one_of("parse_code", CODES, code=code)
    words = {"F": FACTORISED, "C": COLLAPSED}
    return words[code[0]], words[code[2]]


def circuit_of(name: str) -> str:
    """The circuit of a parameter of `TwoCircuits`, by the last part of its dotted name.

    Args:
        name: such as 'W_QK' or 'layer.W_V'.

    Returns:
        "QK" or "OV".

    Raises:
        ValueError: the name belongs to neither circuit; it is never guessed.

    Source: paper 1 gives each circuit its own learning rate.
    """
    last = name.rsplit(".", 1)[-1]
    if last not in CIRCUIT:
        known = "; ".join(f"{', '.join(n for n, c in CIRCUIT.items() if c == circuit)} → {circuit}" for circuit in (QK, OV))
        raise ValueError(f"circuit_of: {name!r} belongs to no circuit. Known: {known}. Rename the parameter or freeze it.")
    return CIRCUIT[last]


def _names(attention: str, output: str) -> tuple[str, ...]:
    return (("W_Q", "W_K") if attention == FACTORISED else ("W_QK",)) + (("W_V", "W_O") if output == FACTORISED else ("W_OV",))


def _uniform(seed: int, name: str, rows: int, columns: int) -> np.ndarray:
    """U(±1/√rows), the default of a linear layer with `rows` inputs; a tensor's draw does not depend on the other tensors."""
    stream = np.random.default_rng([seed, list(CIRCUIT).index(name)])
    return stream.uniform(-1, 1, (rows, columns)) / math.sqrt(rows)


def _balanced(where: str, product: np.ndarray, hidden: int) -> tuple[np.ndarray, np.ndarray]:
    """left @ right = product with leftᵀleft = right rightᵀ; hidden directions beyond the rank are zero."""
    u, s, vt = np.linalg.svd(product, full_matrices=False)
    s = np.where(s > s[:1] * max(product.shape) * np.finfo(float).eps, s, 0.0)  # rounding must not seed a hidden direction
    rank = np.count_nonzero(s)
    if rank > hidden:
        raise ValueError(f"{where}: a circuit of rank {rank} with hidden = {hidden}; expected hidden >= {rank}. Widen `hidden`.")
    keep = min(hidden, len(s))
    left, right = np.zeros((product.shape[0], hidden)), np.zeros((hidden, product.shape[1]))
    left[:, :keep], right[:keep] = u[:, :keep] * np.sqrt(s[:keep]), np.sqrt(s[:keep, None]) * vt[:keep]
    return left, right


def _initial(init: str, seed: int, sizes: tuple[int, int, int], scale: float, labels: Sequence[int]) -> dict[str, np.ndarray]:
    """Initial values of one model, all six matrices."""
    vocabulary, hidden, outputs = sizes
    shapes = {
        "W_Q": (vocabulary, hidden), "W_K": (vocabulary, hidden), "W_QK": (vocabulary, vocabulary),
        "W_V": (vocabulary, hidden), "W_O": (hidden, outputs), "W_OV": (vocabulary, outputs),
    }  # fmt: skip
    if init == "zero":
        return {name: np.zeros(shape) for name, shape in shapes.items()}
    if init == "random":
        return {name: scale * _uniform(seed, name, *shape) for name, shape in shapes.items()}
    if init == "balanced":
        collapsed = {name: scale * _uniform(seed, name, *shapes[name]) for name in ("W_QK", "W_OV")}
        (query, key), (value, out) = (_balanced("TwoCircuits", collapsed[name], hidden) for name in ("W_QK", "W_OV"))
        return collapsed | {"W_Q": query, "W_K": key.T, "W_V": value, "W_O": out}
    values = {name: scale * np.eye(*shape) for name, shape in shapes.items()}
    for name in ("W_O", "W_OV"):  # an output's column is the row of its label token
        values[name] = scale * (np.arange(shapes[name][0])[:, None] == np.asarray(labels)[None, :]).astype(float)
    return values


class TwoCircuits(nn.Module):
    """Paper 1, the synthetic model: softmax attention of one query over a sequence, with the two circuits as two switches.

    Args:
        vocabulary: number of token ids.
        outputs: number of logits (classes, or the vocabulary).
        attention: "factorised" (W_Q, W_K) or "collapsed" (W_QK).
        output: "factorised" (W_V, W_O) or "collapsed" (W_OV).
        hidden: width of the factorised products; None = vocabulary (as published, so that no circuit loses rank).
        score_scale: factor on the scores: 1 as in the theory, 1/sqrt(hidden) as in the published synthetic runs.
        ensemble: leading axes of every weight, () for a single model.
        init: "random": U(±init_scale/√rows), the default of a linear layer; "identity": init_scale on the diagonal; "zero";
            "balanced": a random circuit, whose factors are split evenly (W_Qᵀ W_Q = W_Kᵀ W_K, W_Vᵀ W_V = W_O W_Oᵀ). For one seed
            all four codes then start as the same function.
        init_scale: > 0, dimensionless.
        seed: whole number (member i of an ensemble draws with seed + i), or an array of them that broadcasts to `ensemble`:
            equal seeds give equal members.
        label_tokens: [output] ids whose rows carry the outputs under "identity"; None = the first `outputs` ids.
        dtype: float64 for theory.

    Raises:
        ValueError: sizes < 1, unknown switches, init_scale or score_scale <= 0, seeds that don't broadcast to `ensemble`, or
            "balanced" with `hidden` below the rank.
    """

    W_Q: nn.Parameter
    W_K: nn.Parameter
    W_QK: nn.Parameter
    W_V: nn.Parameter
    W_O: nn.Parameter
    W_OV: nn.Parameter

    def __init__(
        self,
        vocabulary: int,
        outputs: int,
        *,
        attention: str = FACTORISED,
        output: str = FACTORISED,
        hidden: int | None = None,
        score_scale: float = 1.0,
        ensemble: tuple[int, ...] = (),
        init: str = "random",
        init_scale: float = 1.0,
        seed: int | Sequence[int] | np.ndarray = 0,
        label_tokens: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float64,
    ):
        super().__init__()
        hidden = vocabulary if hidden is None else hidden
        checks.integer_at_least("TwoCircuits", 1, vocabulary=vocabulary, outputs=outputs, hidden=hidden)
        checks.one_of("TwoCircuits", (FACTORISED, COLLAPSED), attention=attention, output=output)
        checks.one_of("TwoCircuits", INITS, init=init)
        checks.positive("TwoCircuits", init_scale=init_scale, score_scale=score_scale)
        for size in ensemble:
            checks.integer_at_least("TwoCircuits", 1, ensemble=size)
        if not dtype.is_floating_point:
            raise ValueError(f"TwoCircuits: dtype = {dtype}; expected a floating type such as torch.float64.")
        self.vocabulary, self.outputs, self.score_scale = vocabulary, outputs, float(score_scale)
        self.attention, self.output, self.ensemble = attention, output, tuple(ensemble)
        labels = self._labels(label_tokens, init)
        members = [_initial(init, int(s), (vocabulary, hidden, outputs), init_scale, labels) for s in self._seeds(seed)]
        for name in _names(attention, output):
            stack = np.stack([member[name] for member in members]).reshape(*self.ensemble, *members[0][name].shape)
            self.register_parameter(name, nn.Parameter(torch.as_tensor(stack, dtype=dtype, device=device())))

    def _seeds(self, seed) -> np.ndarray:
        """One seed a member, flat."""
        count = math.prod(self.ensemble)
        seeds = np.asarray(seed)
        if seeds.dtype.kind not in "iu" or np.any(seeds < 0):
            raise ValueError(f"TwoCircuits: seed = {seed!r}; expected whole numbers >= 0.")
        if seeds.ndim == 0:
            return np.arange(count) + int(seeds)
        try:
            return np.broadcast_to(seeds, self.ensemble).ravel()
        except ValueError as error:
            raise ValueError(
                f"TwoCircuits: seed has shape {seeds.shape}; expected one that broadcasts to ensemble = {self.ensemble}."
            ) from error

    def _labels(self, label_tokens: Sequence[int] | None, init: str) -> list[int]:
        if init != "identity":
            return []
        labels = list(range(self.outputs)) if label_tokens is None else [int(i) for i in label_tokens]
        if len(set(labels)) != self.outputs or min(labels) < 0 or max(labels) >= self.vocabulary:
            raise ValueError(
                f"TwoCircuits: label_tokens = {labels}; expected {self.outputs} different ids below vocabulary = {self.vocabulary}."
            )
        return labels

    @classmethod
    def from_code(cls, code: str, vocabulary: int, outputs: int, **options) -> Self:
        """`TwoCircuits` with its switches as a four-letter code; other arguments as there. Source: paper 1's names."""
        attention, output = parse_code(code)
        return cls(vocabulary, outputs, attention=attention, output=output, **options)

    @classmethod
    def from_weights(cls, *, score_scale: float = 1.0, **weights: Tensor) -> Self:
        """A model with given weights; their names say which parametrisation it is.

        Args:
            score_scale: factor on the scores.
            weights: W_Q and W_K, or W_QK; and W_V and W_O, or W_OV. Leading axes are the ensemble's.

        Raises:
            ValueError: other names, shapes that don't fit each other, NaN.

        Source: derived in chapter p1_two_circuits.
        """
        tensors = {name: torch.as_tensor(value).detach() for name, value in weights.items()}
        attention = COLLAPSED if "W_QK" in tensors else FACTORISED
        output = COLLAPSED if "W_OV" in tensors else FACTORISED
        names = _names(attention, output)
        if set(tensors) != set(names):
            raise ValueError(f"from_weights: got {', '.join(tensors) or 'nothing'}; expected W_Q, W_K or W_QK, and W_V, W_O or W_OV.")
        checks.finite("from_weights", **tensors)
        first, last = tensors[names[0]], tensors[names[-1]]
        ensemble, vocabulary, outputs = tuple(first.shape[:-2]), int(first.shape[-2]), int(last.shape[-1])
        d_qk, d_ov = (int(tensors[name].shape[-1]) for name in (names[0], "W_V" if output == FACTORISED else names[-1]))
        sizes = {
            "W_Q": (vocabulary, d_qk), "W_K": (vocabulary, d_qk), "W_QK": (vocabulary, vocabulary),
            "W_V": (vocabulary, d_ov), "W_O": (d_ov, outputs), "W_OV": (vocabulary, outputs),
        }  # fmt: skip
        for name in names:
            checks.shape("from_weights", name, tensors[name], (*ensemble, *sizes[name]))
        model = cls(vocabulary, outputs, attention=attention, output=output, hidden=1, score_scale=score_scale, ensemble=ensemble,
                    init="zero", dtype=first.dtype)  # fmt: skip
        for name in names:
            model.register_parameter(name, nn.Parameter(tensors[name].to(first.dtype).to(device(), copy=True)))
        return model

    @property
    def code(self) -> str:
        """Four-letter name of the parametrisation, such as "CAFO"."""
        return f"{self.attention[0]}A{self.output[0]}O".upper()

    @property
    def qk_circuit(self) -> Tensor:
        """Where to look: x_query @ qk_circuit @ x_key is the score before scaling; [*ensemble, query token, key token]."""
        return self.W_Q @ self.W_K.mT if self.attention == FACTORISED else self.W_QK

    @property
    def ov_circuit(self) -> Tensor:
        """What to say: x @ ov_circuit are the logits of a sequence whose attention lies on x; [*ensemble, vocabulary, output]."""
        return self.W_V @ self.W_O if self.output == FACTORISED else self.W_OV

    def _integers(self, where: str, name: str, ids: Tensor, below: int) -> Tensor:
        ids = torch.as_tensor(ids, device=self._weight.device)
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"{where}: {name} has dtype {ids.dtype}; expected whole numbers (ids). Pass `counts=` for token counts.")
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= below):
            worst = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise ValueError(f"{where}: {name} holds {worst}; expected ids from 0 to {below - 1}.")
        return ids.long()

    @property
    def _weight(self) -> Tensor:
        return self.W_Q if self.attention == FACTORISED else self.W_QK

    def _query(self, where: str, query: Tensor) -> Tensor:
        query = self._integers(where, "query", query, self.vocabulary)
        if query.ndim == 0 or tuple(query.shape[:-1]) not in ((), self.ensemble):
            raise ValueError(
                f"{where}: query has shape {tuple(query.shape)}; expected [batch] (shared by all models) or {(*self.ensemble, 'batch')}."
            )
        return query

    def _spread(self, data: Tensor) -> Tensor:
        """Data of all models from shared data [batch, ...]; data that already has the ensemble's axes stay as they are."""
        return data.expand(*self.ensemble, *data.shape) if data.ndim == 2 else data

    def attention_scores(self, query: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Scores before the softmax, scaled.

        Paper 1: s_j = W_QK[query, j]; W_QK here is `qk_circuit` times `score_scale`.

        Args:
            query: [batch] ids shared by all members, or [*ensemble, batch].
            tokens: [..., batch, key] ids with the leading axes of `query`; None = every token of the vocabulary as key.

        Returns:
            [*ensemble, batch, key], dimensionless.

        Raises:
            ValueError: ids outside the vocabulary or not whole, wrong shapes.
        """
        query = self._query("attention_scores", query)
        first = self._weight  # W_Q or W_QK
        rows = first[..., query, :] if query.ndim == 1 else torch.take_along_dim(first, query[..., None], -2)  # [*ensemble, batch, :]
        scores = self.score_scale * (rows @ self.W_K.mT if self.attention == FACTORISED else rows)  # [*ensemble, batch, vocabulary]
        if tokens is None:
            return scores
        tokens = self._tokens("attention_scores", query, tokens)
        return scores.gather(-1, self._spread(tokens))  # [*ensemble, batch, key]

    def _tokens(self, where: str, query: Tensor, tokens: Tensor) -> Tensor:
        tokens = self._integers(where, "tokens", tokens, self.vocabulary)
        checks.shape(where, "tokens", tokens, (*query.shape, None))
        if tokens.shape[-1] == 0:
            raise ValueError(f"{where}: tokens has shape {tuple(tokens.shape)}; expected at least one key a sequence.")
        return tokens

    def _counts(self, where: str, query: Tensor, counts: Tensor) -> Tensor:
        counts = torch.as_tensor(counts, device=self._weight.device).to(self._weight.dtype)
        checks.shape(where, "counts", counts, (*query.shape, self.vocabulary))
        checks.at_least(where, 0, counts=counts)
        empty = counts.sum(-1) == 0
        if bool(empty.any()):
            raise ValueError(
                f"{where}: counts of {int(empty.sum())} of {empty.numel()} sequences are all 0; expected at least one key each."
            )
        return counts

    def pattern(self, query: Tensor, *, tokens: Tensor | None = None, counts: Tensor | None = None) -> Tensor:
        """Attention after the softmax; rows sum to 1.

        Paper 1: a = softmax(s). In the form of counts the row holds, for each token of the vocabulary, the mass on all its
        occurrences, a_v = n_v exp(s_v) / sum_u n_u exp(s_u): equal tokens get equal scores, so this is the same pattern summed.

        Args:
            query: [batch] or [*ensemble, batch] ids.
            tokens: [..., batch, key] ids, or
            counts: [..., batch, vocabulary] numbers of occurrences >= 0; exactly one of the two.

        Returns:
            [*ensemble, batch, key] for tokens, [*ensemble, batch, vocabulary] for counts.

        Raises:
            ValueError: both or none given, negative counts, a sequence without keys, NaN, wrong shapes.
        """
        if tokens is not None and counts is None:
            return self.attention_scores(query, tokens).softmax(-1)
        if counts is None or tokens is not None:
            raise ValueError("pattern: expected exactly one of tokens= and counts=; counts are the tokens' exact summary.")
        query = self._query("pattern", query)
        weights = self._spread(self._counts("pattern", query, counts).log())  # log 0 = -inf gives exactly no attention
        return (self.attention_scores(query) + weights).softmax(-1)

    def logits(self, pattern: Tensor, *, tokens: Tensor | None = None) -> Tensor:
        """What the OV circuit says about a given pattern, learned or fixed.

        Paper 1: z = W_OV sum_j a_j x_j.

        Args:
            pattern: [*ensemble, batch, key] with tokens, else [*ensemble, batch, vocabulary]; rows sum to 1.
            tokens: [..., batch, key] ids, or None where the pattern is per token of the vocabulary.

        Returns:
            [*ensemble, batch, output].

        Raises:
            ValueError: rows that don't sum to 1 within 1e-4, NaN, wrong shapes.
        """
        checks.rows_sum_to_one("logits", pattern)
        return self._logits(pattern, tokens)

    def _logits(self, pattern: Tensor, tokens: Tensor | None) -> Tensor:
        if tokens is None:
            checks.shape("logits", "pattern", pattern, (*self.ensemble, None, self.vocabulary))
            seen = pattern
        else:
            tokens = self._integers("logits", "tokens", tokens, self.vocabulary)
            checks.shape("logits", "pattern", pattern, (*self.ensemble, *tokens.shape[-2:]))
            # pattern @ x without forming the one-hots x
            seen = pattern.new_zeros(*pattern.shape[:-1], self.vocabulary).scatter_add(-1, self._spread(tokens), pattern)
        # seen: [*ensemble, batch, vocabulary]
        return seen @ self.W_V @ self.W_O if self.output == FACTORISED else seen @ self.W_OV

    def forward(self, query: Tensor, *, tokens: Tensor | None = None, counts: Tensor | None = None) -> Tensor:
        """Logits [*ensemble, batch, output]; arguments as in `pattern`."""
        return self._logits(self.pattern(query, tokens=tokens, counts=counts), tokens)

    def loss(self, query: Tensor, label: Tensor, *, tokens: Tensor | None = None, counts: Tensor | None = None) -> Tensor:
        """Mean cross-entropy of each member.

        Args:
            query: [batch] or [*ensemble, batch] ids.
            label: class of each sequence, same shape as `query`.
            tokens, counts: as in `pattern`.

        Returns:
            [*ensemble], nats. Members don't share weights: the gradient of the sum is each member's own gradient.

        Raises:
            ValueError: as `pattern`, or labels outside the outputs.

        Source: paper 1's training objective.
        """
        return self._cross_entropy(self(query, tokens=tokens, counts=counts), query, label)

    def loss_and_pattern(self, query: Tensor, label: Tensor, *, counts: Tensor) -> tuple[Tensor, Tensor]:
        """`loss` and `pattern` in one pass, for training loops that watch both. Source: as these two."""
        pattern = self.pattern(query, counts=counts)
        return self._cross_entropy(self._logits(pattern, None), query, label), pattern

    def _cross_entropy(self, logits: Tensor, query: Tensor, label: Tensor) -> Tensor:
        label = self._integers("loss", "label", label, self.outputs)
        checks.shape("loss", "label", label, tuple(torch.as_tensor(query).shape))
        target = self._spread(label[..., None])  # [*ensemble, batch, 1]
        return -logits.log_softmax(-1).gather(-1, target).mean((-1, -2))

    def parameter_groups(self, eta_qk: float, eta_ov: float) -> list[dict]:
        """Groups for `torch.optim`, one per circuit.

        Paper 1: eta_QK and eta_OV; their quotient is r.

        Args:
            eta_qk: learning rate of W_Q, W_K or W_QK, > 0.
            eta_ov: learning rate of W_V, W_O or W_OV, > 0.

        Returns:
            list of dicts with keys params, names, circuit, lr.

        Raises:
            ValueError: a rate <= 0 or NaN, or a parameter that belongs to no circuit.
        """
        checks.positive("parameter_groups", eta_qk=eta_qk, eta_ov=eta_ov)
        members: dict[str, list[str]] = {QK: [], OV: []}
        for name, _ in self.named_parameters():
            members[circuit_of(name)].append(name)
        rates = {QK: float(eta_qk), OV: float(eta_ov)}
        return [
            {"params": [self.get_parameter(n) for n in names], "names": names, "circuit": circuit, "lr": rates[circuit]}
            for circuit, names in members.items()
        ]

    def extra_repr(self) -> str:
        """What `print` shows of the model."""
        return (
            f"{self.code}, vocabulary={self.vocabulary}, outputs={self.outputs}, ensemble={self.ensemble}, score_scale={self.score_scale:g}"
        )


def twin(model: TwoCircuits, code: str, *, hidden: int | None = None) -> TwoCircuits:
    """The same function in another parametrisation: equal circuits, hence equal patterns and logits for every input.

    Collapsing multiplies the factors. Factorising splits a matrix by its singular values into balanced factors
    (leftᵀleft = right rightᵀ). A side that stays as it is keeps its weights.

    Args:
        model: any member of the class.
        code: parametrisation of the twin, one of `CODES`.
        hidden: width of new factors; None = the vocabulary.

    Returns:
        A new model with its own weights.

    Raises:
        ValueError: an unknown code, or `hidden` below the rank of a circuit that is to be split: no such twin exists.

    Source: derived in chapter p1_two_circuits.
    """
    attention, output = parse_code(code)
    hidden = model.vocabulary if hidden is None else hidden
    checks.integer_at_least("twin", 1, hidden=hidden)
    weights: dict[str, Tensor] = {}
    for side, now, wanted, circuit, pair in (
        (QK, model.attention, attention, model.qk_circuit, ("W_Q", "W_K")),
        (OV, model.output, output, model.ov_circuit, ("W_V", "W_O")),
    ):
        if now == wanted:
            weights |= {name: value.detach() for name, value in model.named_parameters() if circuit_of(name) == side}
        elif wanted == COLLAPSED:
            weights["W_QK" if side == QK else "W_OV"] = circuit.detach()
        else:
            flat = circuit.detach().double().cpu().numpy().reshape(-1, *circuit.shape[-2:])
            split = [np.stack(parts) for parts in zip(*(_balanced("twin", matrix, hidden) for matrix in flat), strict=True)]
            left, right = (torch.as_tensor(part.reshape(*model.ensemble, *part.shape[1:])).to(circuit) for part in split)
            weights |= {pair[0]: left, pair[1]: right.mT if side == QK else right}
    return TwoCircuits.from_weights(score_scale=model.score_scale, **weights)
