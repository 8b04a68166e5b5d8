"""What a chapter says about itself: numbers for its prose, and records of claims with their computed verdicts.

Both live in the notebook's outputs. So they exist exactly when the chapter ran, nbval compares them, and the scoreboard,
`make claims` and the README read them from there.
"""

import html
import json
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from lib.book import claims
from lib.book.toc import ROOT, chapters, slug

MIME = "application/vnd.book.claim+json"
_profile = "quick"  # of the running chapter; `chapter.begin` sets it
DIGITS = 5  # significant digits kept: far above rounding differences between processors, enough for every tolerance


def use_profile(profile: str) -> None:
    """Name the profile that the records of this chapter belong to."""
    global _profile
    _profile = profile


def _plain(name: str, value: Any) -> Any:
    """Python numbers, lists and dicts out of numpy and torch ones, rounded; anything else is refused."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if isinstance(value, bool | np.bool_):
        return float(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        if not np.isfinite(float(value)):
            raise ValueError(f"records: {name} = {value!r}; expected a finite number. Find out why it is not before it enters a page.")
        return float(f"{float(value):.{DIGITS}g}")
    raise ValueError(f"records: {name} is a {type(value).__name__}; expected numbers, lists or dicts of them.")


def say(name: str, value: Any) -> None:
    """Make a computed value available to the prose: {glue:text}`name:.2f`.

    Args:
        name: key, unique in the chapter.
        value: float, int or str. Arrays and tensors of one element are taken as a number.

    Raises:
        ValueError: NaN, infinity, or anything with more than one element.
    """
    from myst_nb import glue

    if isinstance(value, str):
        glue(name, value, display=False)
        return
    if np.size(value) != 1:
        raise ValueError(f"say: {name} has {np.size(value)} elements; say one number at a time.")
    plain = _plain(name, value.item() if hasattr(value, "item") else value)
    glue(name, plain, display=False)


def published(claim_id: str) -> Any:
    """The value that the paper prints for a claim, from the ledger."""
    return claims.get(claim_id).published


class Record:
    """A record as a notebook shows it: a small table with the verdict, and the same as JSON."""

    def __init__(self, judgement: claims.Judgement, data: dict):
        self.judgement, self.data = judgement, data

    def rows(self) -> list[list[str]]:
        """One row a check: side, quantity, ours, published, rule, met."""
        rows = []
        for check in self.judgement.checks:
            ours = "[" + ", ".join(f"{v:.4g}" for v in check.ours) + "]" if isinstance(check.ours, list) else f"{check.ours:.5g}"
            if check.scatter is not None:
                ours += f" ± {check.scatter:.2g}"
            if check.rule.resolution is not None and check.ours == check.rule.resolution:
                ours = f"≤ {check.rule.resolution:.0e}"
            paper = "" if check.published is None else f"{check.published:.5g}"
            met = {1.0: "yes", 0.0: "no"}.get(check.score, "in part")
            rows.append([check.side, check.quantity or "value", ours, paper, str(check.rule), met])
        return rows

    def __repr__(self) -> str:
        head = ["side", "quantity", "ours", "published", "expected", "met"]
        table = [head, *self.rows()]
        if not any(row[3] for row in table[1:]):
            table = [row[:3] + row[4:] for row in table]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
        return "\n".join([f"{self.data['id']}: {self.judgement.verdict}", *lines])

    def _repr_html_(self) -> str:
        verdict = self.judgement.verdict
        head = ["side", "quantity", "ours", "published", "expected", "met"]
        rows = self.rows()
        keep = [i for i, name in enumerate(head) if name != "published" or any(row[i] for row in rows)]
        body = "".join("<tr>" + "".join(f"<td>{html.escape(row[i])}</td>" for i in keep) + "</tr>" for row in rows)
        heads = "".join(f"<th>{head[i]}</th>" for i in keep)
        seeds = f" · {self.data['seeds']} seeds" if self.data["seeds"] else ""
        return (
            f'<div class="verdict verdict-{verdict.replace(" ", "-")}"><p><strong>{self.data["id"]}</strong>: '
            f'<span class="verdict-word">{verdict}</span>{seeds}<br>{html.escape(self.judgement.claim.statement)}</p>'
            f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        return {"text/plain": repr(self), "text/html": self._repr_html_(), MIME: self.data}


def record(
    claim_id: str,
    *,
    theory: Any = None,
    official: Any = None,
    pure: Any = None,
    scatter: dict | None = None,
    seeds: int | None = None,
    source: str = "live",
) -> Record:
    """Record what this chapter measured for a claim, and show the verdict that follows.

    Args:
        claim_id: as in `data/claims.yml`, a literal in the chapter.
        theory: value(s) from the theory as derived in the book.
        official: value(s) from the published recipe, run by us.
        pure: value(s) when only the named cause is changed.
        scatter: side -> standard deviation over seeds, in the shape of the value.
        seeds: how many seeds.
        source: 'live', or the run card that the values come from.
    """
    from myst_nb import glue

    sides = {
        side: _plain(f"{claim_id} {side}", value)
        for side, value in zip(claims.SIDES, (theory, official, pure), strict=True)
        if value is not None
    }
    if not sides:
        raise ValueError(f"record: {claim_id} has no side; give theory=, official= or pure=.")
    spread = {side: _plain(f"{claim_id} scatter", value) for side, value in (scatter or {}).items()}
    judgement = claims.judge(claim_id, sides, spread, seeds)
    for check in judgement.checks:  # rounding-size values differ between processors: keep the floored ones
        if check.rule.resolution is not None:
            _put(sides[check.side], check.quantity, check.ours, sides, check.side)
    data = {
        "id": claim_id,
        "ours": sides,
        "scatter": spread or None,
        "seeds": seeds,
        "profile": _profile,
        "source": source,
    }
    glue(claim_id, judgement.verdict, display=False)
    return Record(judgement, data)


def _put(value: Any, quantity: str, new: Any, sides: dict, side: str) -> None:
    if not quantity:
        sides[side] = new
        return
    *path, last = quantity.split(".")
    for key in path:
        value = value[int(key) - 1] if isinstance(value, list) else value[key]
    value[int(last) - 1 if isinstance(value, list) else last] = new


def notebook_of(entry: str, profile: str = "quick") -> Path:
    """The notebook that tells a chapter's results: the executed one if there is one, else the committed reference."""
    executed = ROOT / "_build" / "executed" / profile / f"{slug(entry)}.ipynb"
    return executed if executed.exists() else reference_of(entry)


def records_in(path: Path) -> list[dict]:
    """All records in a notebook's outputs, in order."""
    if not path.exists():
        return []
    cells = json.loads(path.read_text())["cells"]
    outputs = (output for cell in cells for output in cell.get("outputs", []))
    return [output["data"][MIME] for output in outputs if MIME in output.get("data", {})]


def reference_of(entry: str) -> Path:
    """The committed reference notebook of a chapter."""
    return ROOT / f"{entry}.ipynb"


def gather(profile: str = "quick", references: bool = False) -> list[dict]:
    """Every claim of the ledger with what was measured and the verdict, as `make claims` writes them.

    Args:
        profile: whose executed notebooks to read.
        references: read the committed notebooks only, whatever has been executed here.

    Returns:
        one mapping a claim: id, paper, place, statement, chapter, kind, published, ours, scatter, seeds, profile,
        tolerance, verdict, provenance.

    Raises:
        ValueError: two chapters record one claim, or a chapter records one that the ledger gives to another.
    """
    found: dict[str, tuple[str, dict]] = {}
    for entry in chapters():
        for data in records_in(reference_of(entry) if references else notebook_of(entry, profile)):
            if data["id"] in found:
                raise ValueError(f"{data['id']} is recorded in {found[data['id']][0]} and in {slug(entry)}; a claim has one chapter.")
            found[data["id"]] = (slug(entry), data)
    rows = []
    for claim in claims.ledger().values():
        where, data = found.pop(claim.id, (claim.chapter, {}))
        if where != claim.chapter:
            raise ValueError(f"{claim.id} is recorded in {where}, but the ledger gives it to {claim.chapter}; change one of them.")
        judgement = claims.judge(claim, data.get("ours", {}), data.get("scatter"), data.get("seeds"))
        rows.append({
            "id": claim.id,
            "paper": claim.paper,
            "place": claim.place,
            "statement": claim.statement,
            "chapter": claim.chapter,
            "kind": claim.kind,
            "published": claim.published,
            "ours": data.get("ours"),
            "scatter": data.get("scatter"),
            "seeds": data.get("seeds"),
            "profile": data.get("profile"),
            "tolerance": {name or "value": f"{rule}: {rule.reason}" for name, rule in claim.tolerance.items()},
            "verdict": judgement.verdict,
            "provenance": f"chapter {where}, {data['source']}" if data else None,
        })  # fmt: skip
    if found:
        raise ValueError(f"recorded but not in the ledger: {', '.join(found)}.")
    return rows
