"""What is measured on an attention pattern: mass on marked keys, its uniform floor, entropy, and the joint histogram DTAP."""

import numpy as np

from lib import checks


def _array(value) -> np.ndarray:
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def _marks(where: str, mask, keys: int, allow_empty: bool) -> np.ndarray:
    mask = _array(mask)
    if mask.dtype != bool:
        raise ValueError(f"{where}: mask has dtype {mask.dtype}; expected bool. Pass `mask > 0` or the like.")
    if mask.ndim == 0 or mask.shape[-1] != keys:
        raise ValueError(
            f"{where}: mask has shape {mask.shape}, pattern has {keys} keys; expected the same last axis. Pad both to one length."
        )
    if not mask.any() and not allow_empty:
        raise ValueError(f"{where}: mask of shape {mask.shape} marks no key at all; expected at least one True. Look at how it was built.")
    return mask


def attention_mass(pattern, mask, *, query: int = -1) -> np.ndarray:
    """Share of attention that one query gives to the marked keys.

    Paper 1, mass on the informative tokens alpha(t); on human rationales this is the rationale mass.

    Args:
        pattern: [..., head, query, key], after softmax; rows sum to 1.
        mask: [..., key] over the same leading axes without head, bool; True = marked. Padding must be False.
        query: index of the query position; -1 is the one that predicts.

    Returns:
        [..., head], dimensionless, in [0, 1]. NaN where a mask marks no key (0 would read as "ignored it"); count these.

    Raises:
        ValueError: a row doesn't sum to 1 within 1e-4 or holds NaN, the key axes differ, the mask is not bool or marks
            nothing anywhere, or there is no such query.

    Example:
        >>> attention_mass(np.full((3, 1, 4), 0.25), np.array([True, True, False, False]))
        array([0.5, 0.5, 0.5])
    """
    pattern = _array(pattern)
    if pattern.ndim < 3:
        raise ValueError(
            f"attention_mass: pattern has shape {pattern.shape}; expected [..., head, query, key]. Add the axes with pattern[None]."
        )
    queries = pattern.shape[-2]
    if not -queries <= query < queries:
        raise ValueError(f"attention_mass: query = {query}; expected an index into {queries} query positions.")
    mask = _marks("attention_mass", mask, pattern.shape[-1], allow_empty=False)
    checks.rows_sum_to_one("attention_mass", pattern)
    row = pattern[..., query, :]  # [..., head, key]
    mass = (row * mask[..., None, :]).sum(-1)  # [..., head]
    return np.where(mask.any(-1)[..., None], mass, np.nan)


def uniform_floor(mask, keys) -> np.ndarray:
    """Mass on the marked keys when a query looks at all its keys equally: the number that any measured mass stands beside.

    Source: derived in chapter p1_real_sentences.

    Args:
        mask: [..., key], bool; True = marked.
        keys: [...], how many keys the query can see (real tokens, not padding).

    Returns:
        [...], dimensionless, in [0, 1]; NaN where a mask marks no key.

    Raises:
        ValueError: fewer than one key, or more marks than keys.
    """
    keys = _array(keys)
    mask = _marks("uniform_floor", mask, _array(mask).shape[-1] if _array(mask).ndim else 0, allow_empty=False)
    checks.at_least("uniform_floor", 1, keys=keys)
    marks = mask.sum(-1)
    if np.any(marks > keys):
        worst = np.broadcast_to(marks > keys, np.broadcast_shapes(marks.shape, keys.shape))
        where = tuple(int(i) for i in np.argwhere(worst)[0])
        raise ValueError(
            f"uniform_floor: {marks[where]} keys are marked at {list(where)}, only {np.broadcast_to(keys, worst.shape)[where]} "
            "are visible; keep padding out."
        )
    return np.where(marks > 0, marks / keys, np.nan)


def entropy(pattern, keys=None) -> np.ndarray:
    """Entropy of each row of a pattern: in nats, or as a share of the largest possible when `keys` is given.

    Source: standard; 1 = uniform, 0 = one key takes all.

    Args:
        pattern: [..., key], rows sum to 1; zeros count as 0 (the limit of -a log a).
        keys: [...], how many keys each row can see; broadcasts against the leading axes. The result is divided by log(keys).

    Returns:
        [...], nats, or dimensionless in [0, 1] with `keys`; NaN where only one key is visible (nothing to spread over).

    Raises:
        ValueError: a row doesn't sum to 1 within 1e-4, holds NaN or a negative weight; keys < 1.
    """
    pattern = _array(pattern).astype(float)
    checks.rows_sum_to_one("entropy", pattern)
    checks.at_least("entropy", 0, pattern=pattern)
    logs = np.log(pattern, out=np.zeros_like(pattern), where=pattern > 0)
    nats = -(pattern * logs).sum(-1)
    if keys is None:
        return nats
    keys = _array(keys)
    checks.at_least("entropy", 1, keys=keys)
    most = np.broadcast_to(np.log(keys), nats.shape)
    return np.divide(nats, most, out=np.full_like(nats, np.nan), where=most > 0)


def dtap(mass, probability, *, mass_edges=(0, 0.2, 0.4, 0.6, 0.8, 1), probability_edges=(0, 0.2, 0.4, 0.6, 0.8, 1)) -> np.ndarray:
    """Joint histogram of attention and prediction: which share of the examples has this mass and this probability.

    Paper 1, Figure 2 (DTAP heatmaps). Bins are half-open, [low, high); the last one is closed.

    Args:
        mass: [...], attention on the informative tokens, in [0, 1].
        probability: [...], predicted probability, same shape.
        mass_edges, probability_edges: increasing, any number; they must cover the data.

    Returns:
        [probability bin, mass bin], shares that sum to 1. Row 0 is the lowest probability (drawn at the bottom).

    Raises:
        ValueError: shapes differ, no example, NaN, edges that don't increase, or a value outside the edges.
    """
    columns = {"mass": (_array(mass).astype(float), mass_edges), "probability": (_array(probability).astype(float), probability_edges)}
    first, second = (values for values, _ in columns.values())
    if first.shape != second.shape or first.size == 0:
        raise ValueError(f"dtap: mass has shape {first.shape}, probability {second.shape}; expected the same, with at least one example.")
    bins = []
    for name, (values, edges) in columns.items():
        edges = np.asarray(edges, dtype=float)
        if edges.ndim != 1 or len(edges) < 2 or not np.all(np.diff(edges) > 0):
            raise ValueError(f"dtap: {name}_edges = {edges.tolist()}; expected at least two increasing numbers.")
        checks.finite("dtap", **{name: values})
        for end in (edges[0], edges[-1]):  # a softmax row may sum to 1 + a few roundings; that is still the last bin
            values = np.where(np.abs(values - end) < 1e-9, end, values)
        checks.in_closed("dtap", edges[0], edges[-1], **{name: values})
        bins.append(np.clip(np.searchsorted(edges, values.ravel(), side="right") - 1, 0, len(edges) - 2))
    counts = np.zeros((len(probability_edges) - 1, len(mass_edges) - 1))
    np.add.at(counts, (bins[1], bins[0]), 1)
    return counts / first.size
