"""Checks of what a caller passes in: each error names the value, what was expected and what to do."""

from collections.abc import Sequence
from typing import Any

import numpy as np

ROW_TOLERANCE = 1e-4  # float32 softmax rows over thousands of keys stay well within this


def _numbers(where: str, name: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value, dtype=float)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {name} = {value!r} is not a number; pass a number or an array of numbers.") from error
    return array


def _first_bad(array: np.ndarray, good: np.ndarray) -> str:
    """The first offending entry, with its index when there is more than one number."""
    if array.ndim == 0:
        return f"{array[()]:g}"
    index = tuple(int(i) for i in np.argwhere(~good)[0])
    return f"{array[index]:g} at index {index}"


def _demand(where: str, named: dict[str, Any], good, expected: str) -> None:
    for name, value in named.items():
        array = _numbers(where, name, value)
        ok = good(array)
        if not np.all(ok):
            raise ValueError(f"{where}: {name} = {_first_bad(array, ok)}; expected {expected}.")


def finite(where: str, **named: Any) -> None:
    """Raise unless every value is finite (neither NaN nor infinite)."""
    _demand(where, named, np.isfinite, "a finite number; look for an overflow or an empty mean before this call")


def positive(where: str, **named: Any) -> None:
    """Raise unless every value is finite and > 0."""
    _demand(where, named, lambda a: np.isfinite(a) & (a > 0), "a finite number > 0")


def at_least(where: str, low: float, **named: Any) -> None:
    """Raise unless every value is finite and >= low."""
    _demand(where, named, lambda a: np.isfinite(a) & (a >= low), f"a finite number >= {low:g}")


def in_open(where: str, low: float, high: float, **named: Any) -> None:
    """Raise unless low < value < high."""
    _demand(where, named, lambda a: (a > low) & (a < high), f"a number strictly between {low:.6g} and {high:.6g}")


def in_closed(where: str, low: float, high: float, **named: Any) -> None:
    """Raise unless low <= value <= high."""
    _demand(where, named, lambda a: (a >= low) & (a <= high), f"a number from {low:.6g} to {high:.6g}")


def integer_at_least(where: str, low: int, **named: Any) -> None:
    """Raise unless every value is a whole number >= low (True and False are refused)."""
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
            raise ValueError(f"{where}: {name} = {value!r}; expected a whole number >= {low}.")


def one_of(where: str, allowed: Sequence[Any], **named: Any) -> None:
    """Raise unless each value is among those allowed."""
    for name, value in named.items():
        if value not in allowed:
            raise ValueError(f"{where}: {name} = {value!r}; expected one of {', '.join(map(repr, allowed))}.")


def shape(where: str, name: str, array: Any, expected: Sequence[int | None]) -> None:
    """Raise unless array.shape matches `expected`, in which None admits any size."""
    got = tuple(array.shape)
    if len(got) != len(expected) or any(e is not None and e != g for g, e in zip(got, expected, strict=True)):
        want = tuple("any" if e is None else e for e in expected)
        raise ValueError(f"{where}: {name} has shape {got}; expected {want}. Transpose or index it first.")


def rows_sum_to_one(where: str, pattern: Any) -> None:
    """Raise unless the last axis of an attention pattern sums to 1 and has no NaN."""
    rows = _numbers(where, "pattern", pattern)
    if rows.ndim == 0 or rows.shape[-1] == 0:
        raise ValueError(f"{where}: pattern has shape {rows.shape}; expected [..., key] with at least one key.")
    sums = rows.sum(-1)
    off = ~(np.abs(sums - 1) <= ROW_TOLERANCE)  # written so that NaN counts as off
    if np.any(off):
        index = tuple(int(i) for i in np.argwhere(off)[0]) if sums.ndim else ()
        raise ValueError(
            f"{where}: pattern rows must sum to 1; row {list(index)} sums to {sums[index]:.4f} "
            f"({int(off.sum())} of {off.size} rows are off). Pass the softmax output, not the scores; after masking keys, renormalise."
        )
