"""The ledger of claims and its verdicts: what each paper says, how near is near enough, and what came out.

A verdict is computed from the ledger (`data/claims.yml`) and a record (what a chapter measured); nobody types one.

* Each quantity of a claim has a *rule*; comparing the measured value with it gives 1 (met), 0 (not met) or, for a sign
  that scatter does not settle and a share between none and all, one half.
* A *side* (theory as derived here, the official recipe, the pure effect of the named cause) holds when all its
  quantities are met and fails when none is. In between, a number fails, since one of its values is off; a table,
  property or sign holds in part.
* The claim holds when all its sides hold, fails when all fail, and holds in part otherwise.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from lib.book.toc import ROOT, chapters, slug

LEDGER = ROOT / "data" / "claims.yml"
KINDS = ("number", "sign", "property", "table")
SIDES = ("theory", "official", "pure")
RULES = ("relative", "absolute", "at_most", "at_least", "between", "sign", "share", "strict_order")
NEEDED = ("id", "paper", "place", "statement", "kind", "published", "tolerance", "chapter")
OPTIONAL = ("also",)
VERDICTS = ("holds", "holds in part", "fails", "not yet run")
STANDARD_ERRORS = 2.0  # a sign counts as seen when the mean is this many standard errors from zero


class LedgerError(ValueError):
    """The ledger is malformed; the message gives the line."""


@dataclass(frozen=True)
class Rule:
    """How near is near enough for one quantity.

    `name` is one of RULES. `relative` and `absolute` compare with the published value, the others look at the measured
    one alone. Values below `resolution` are rounding and are reported as the resolution.
    """

    name: str
    bound: Any
    reason: str
    resolution: float | None = None

    def __str__(self) -> str:
        words = {
            "relative": f"within {_short(self.bound)} of the published value, relative",
            "absolute": f"within {_short(self.bound)} of the published value",
            "at_most": f"at most {_short(self.bound)}",
            "at_least": f"at least {_short(self.bound)}",
            "between": "from {} to {}".format(*map(_short, self.bound)) if self.name == "between" else "",
            "sign": f"{self.bound}, by {STANDARD_ERRORS:g} standard errors where there are seeds",
            "share": f"in a share of at least {_short(self.bound)} of the cases",
            "strict_order": f"strictly {self.bound}",
        }
        return words[self.name]


@dataclass(frozen=True)
class Claim:
    """One entry of the ledger. `tolerance` maps a quantity (or '' for all) to its rule."""

    id: str
    paper: int
    place: str
    statement: str
    kind: str
    published: Any
    tolerance: dict[str, Rule]
    chapter: str
    line: int
    also: tuple[str, ...] = ()

    def rule(self, quantity: str) -> Rule:
        """Rule for a quantity such as 'alpha' or 'FACO.3' (a row's third value): the most specific that the ledger has."""
        for name in (quantity, quantity.split(".")[0], ""):
            if name in self.tolerance:
                return self.tolerance[name]
        have = ", ".join(self.tolerance)
        raise ValueError(f"{self.id}: the ledger has no rule for {quantity!r}; it has {have}. Record these, or add a rule with its reason.")

    @property
    def planned(self) -> bool:
        """Whether the claim waits for a chapter that is not in the table of contents yet."""
        return self.chapter not in {slug(entry) for entry in chapters()}


@dataclass(frozen=True)
class Check:
    """One quantity of one side against its rule."""

    side: str
    quantity: str
    ours: Any
    published: Any
    scatter: float | None
    rule: Rule
    score: float


@dataclass(frozen=True)
class Judgement:
    """The verdict on a claim and all that led to it."""

    claim: Claim
    verdict: str
    checks: tuple[Check, ...] = field(default=())


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _read_rule(where: str, raw: Mapping) -> Rule:
    names = [key for key in raw if key in RULES]
    odd = [key for key in raw if key not in (*RULES, "reason", "resolution")]
    if odd or len(names) != 1:
        raise LedgerError(
            f"{where}: tolerance {dict(raw)!r}; expected exactly one of {', '.join(RULES)}, a reason, and at most a resolution."
        )
    name, bound, reason = names[0], raw[names[0]], raw.get("reason")
    if not isinstance(reason, str) or not reason.strip():
        raise LedgerError(f"{where}: tolerance {name} has no reason; say why this near is near enough.")
    allowed = {"sign": ("positive", "negative"), "strict_order": ("increasing", "decreasing")}.get(name)
    if allowed:
        good = bound in allowed
    elif name == "between":
        good = isinstance(bound, list) and len(bound) == 2 and all(map(_is_number, bound)) and bound[0] < bound[1]
    else:
        good = _is_number(bound)
    if not good or ("resolution" in raw and not _is_number(raw["resolution"])):
        raise LedgerError(
            f"{where}: tolerance {name} = {bound!r}; expected {' or '.join(allowed) if allowed else 'a number (1.0e-10, not 1e-10)'}."
        )
    return Rule(name, bound, reason.strip(), raw.get("resolution"))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _read_tolerance(where: str, raw: Any) -> dict[str, Rule]:
    if not isinstance(raw, Mapping) or not raw:
        raise LedgerError(f"{where}: no tolerance; expected a rule with a reason, or one for each quantity.")
    if any(key in raw for key in (*RULES, "reason", "resolution")):
        return {"": _read_rule(where, raw)}
    rules = {}
    for quantity, rule in raw.items():
        if not isinstance(rule, Mapping):
            raise LedgerError(f"{where}: tolerance of {quantity} is {rule!r}; expected a rule, one of {', '.join(RULES)}, with a reason.")
        rules[str(quantity)] = _read_rule(f"{where}, {quantity}", rule)
    return rules


def read(text: str) -> dict[str, Claim]:
    """Parse and check a ledger.

    Raises:
        LedgerError: with the line of the entry that is wrong and what it should have.
    """
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.SequenceNode):
            raise LedgerError("line 1: the ledger must be a list of claims.")
        entries = [(child.start_mark.line + 1, loader.construct_object(child, deep=True)) for child in node.value]  # type: ignore[no-untyped-call]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise LedgerError(f"line {mark.line + 1 if mark else '?'}: not YAML: {getattr(error, 'problem', error)}") from error
    claims: dict[str, Claim] = {}
    names: dict[str, int] = {}
    for line, raw in entries:
        claim = _read_entry(line, raw)
        for name in (claim.id, *claim.also):
            if name in names:
                raise LedgerError(f"line {line}: id {name} is already used at line {names[name]}.")
            names[name] = line
        claims[claim.id] = claim
    return claims


def _read_entry(line: int, raw: Any) -> Claim:
    where = f"line {line}"
    if not isinstance(raw, Mapping):
        raise LedgerError(f"{where}: {raw!r} is not an entry; expected keys {', '.join(NEEDED)}.")
    where += f" ({raw.get('id', 'no id')})"
    missing = [key for key in NEEDED if key not in raw]
    odd = [key for key in raw if key not in (*NEEDED, *OPTIONAL)]
    if missing or odd:
        raise LedgerError(f"{where}: missing {', '.join(missing) or 'nothing'}; unknown {', '.join(map(str, odd)) or 'nothing'}.")
    if raw["kind"] not in KINDS:
        raise LedgerError(f"{where}: kind = {raw['kind']!r}; expected one of {', '.join(KINDS)}.")
    if raw["paper"] not in (1, 2):
        raise LedgerError(f"{where}: paper = {raw['paper']!r}; expected 1 or 2.")
    for key in ("id", "place", "statement", "chapter"):
        if not isinstance(raw[key], str) or not raw[key].strip():
            raise LedgerError(f"{where}: {key} = {raw[key]!r}; expected some words.")
    tolerance = _read_tolerance(where, raw["tolerance"])
    for rule in tolerance.values():
        if rule.name in ("relative", "absolute") and raw["published"] is None:
            raise LedgerError(f"{where}: tolerance {rule.name} needs a published value to compare with.")
    return Claim(
        **{key: raw[key] for key in NEEDED if key != "tolerance"},
        tolerance=tolerance,
        line=line,
        also=tuple(raw.get("also", ())),
    )


@cache
def _cached(path: Path, stamp: float) -> dict[str, Claim]:
    return read(path.read_text())


def ledger(path: Path = LEDGER) -> dict[str, Claim]:
    """All claims by id, in the order of the file."""
    return _cached(path, path.stat().st_mtime)


def get(claim_id: str) -> Claim:
    """One claim; an unknown id is refused with the nearest known ones."""
    import difflib

    claims = ledger()
    if claim_id not in claims:
        near = difflib.get_close_matches(claim_id, claims, n=3) or list(claims)[:3]
        raise ValueError(f"claim {claim_id!r} is not in the ledger; did you mean {', '.join(near)}?")
    return claims[claim_id]


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings and lists as one mapping with dotted names; a list's items count from 1; a scalar has the name ''."""
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, list | tuple):
        pairs = list(enumerate(value, start=1))
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in pairs:
        flat |= flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _score(rule: Rule, ours: Any, published: Any, scatter: float | None, seeds: int | None) -> float:
    bound = rule.bound
    if rule.name == "strict_order":
        steps = [b - a for a, b in pairwise(ours)]
        return float(all((step > 0) == (bound == "increasing") and step != 0 for step in steps) and len(steps) > 0)
    if not _is_number(ours):
        return 0.0
    if rule.name == "relative":
        return float(abs(ours - published) <= bound * abs(published))
    if rule.name == "absolute":
        return float(abs(ours - published) <= bound)
    if rule.name == "at_most":
        return float(ours <= bound)
    if rule.name == "at_least":
        return float(ours >= bound)
    if rule.name == "between":
        return float(bound[0] <= ours <= bound[1])
    if rule.name == "share":
        return 1.0 if ours >= bound else 0.5 if ours > 0 else 0.0
    signed = ours if bound == "positive" else -ours
    error = scatter / math.sqrt(seeds) if scatter is not None and seeds else 0.0
    return 0.0 if signed <= 0 else 1.0 if signed > STANDARD_ERRORS * error else 0.5


def _check_side(claim: Claim, side: str, value: Any, scatter: Any, seeds: int | None) -> list[Check]:
    published = flatten(claim.published) if claim.published is not None else {}
    scatters = flatten(scatter) if scatter is not None else {}
    ordered = any(rule.name == "strict_order" for rule in claim.tolerance.values())
    values = _keep_lists(claim, value) if ordered else flatten(value)
    checks = []
    for quantity, ours in values.items():
        rule = claim.rule(quantity)
        if rule.resolution is not None and _is_number(ours) and abs(ours) < rule.resolution:
            ours = math.copysign(rule.resolution, ours) if rule.name != "at_most" else rule.resolution
        target = published.get(quantity)
        if rule.name in ("relative", "absolute") and target is None:
            raise ValueError(f"{claim.id}: nothing published under {quantity!r}; the ledger has {', '.join(published)}.")
        spread = scatters.get(quantity)
        checks.append(Check(side, quantity, ours, target, spread, rule, _score(rule, ours, target, spread, seeds)))
    return checks


def _keep_lists(claim: Claim, value: Any) -> dict[str, Any]:
    """Like `flatten`, but a list stays whole where the rule is about its order."""
    if isinstance(value, list | tuple):
        return {"": list(value)}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        whole = isinstance(item, list | tuple) and claim.rule(str(key)).name == "strict_order"
        flat |= {str(key): list(item)} if whole else flatten(item, str(key))
    return flat


def _missing(claim: Claim, checks: list[Check]) -> list[str]:
    """Quantities with a rule of their own, or published, that a side left out: silence must not pass."""
    named = {name for name in claim.tolerance if name}
    if claim.published is not None and any(rule.name in ("relative", "absolute") for rule in claim.tolerance.values()):
        named |= {name for name in flatten(claim.published) if claim.rule(name).name in ("relative", "absolute")}
    seen = {check.quantity for check in checks}
    return sorted(name for name in named if not any(s == name or s.startswith(f"{name}.") for s in seen))


def judge(claim: str | Claim, sides: Mapping[str, Any], scatter: Mapping[str, Any] | None = None, seeds: int | None = None) -> Judgement:
    """Compare what was measured with the ledger.

    Args:
        claim: id or entry.
        sides: 'theory', 'official', 'pure' -> number, list or mapping of quantities; None sides are left out.
        scatter: the same sides -> standard deviation over seeds, in the same shape.
        seeds: number of seeds behind the scatter.

    Returns:
        verdict and all checks. Without any side the verdict is 'not yet run'.

    Raises:
        ValueError: an unknown side or quantity, or a quantity of the ledger that a side does not give.
    """
    entry = get(claim) if isinstance(claim, str) else claim
    given = {side: value for side, value in sides.items() if value is not None}
    unknown = [side for side in given if side not in SIDES]
    if unknown:
        raise ValueError(f"{entry.id}: side {unknown[0]!r}; expected one of {', '.join(SIDES)}.")
    checks: list[Check] = []
    outcomes = []
    for side, value in given.items():
        found = _check_side(entry, side, value, (scatter or {}).get(side), seeds)
        missing = _missing(entry, found)
        if missing:
            raise ValueError(f"{entry.id}: side {side} lacks {', '.join(missing)}; the ledger has a rule for each, so record them all.")
        scores = [check.score for check in found]
        low = min(scores)
        outcomes.append(1.0 if low == 1 else 0.0 if max(scores) == 0 or (entry.kind == "number" and low == 0) else 0.5)
        checks += found
    if not outcomes:
        verdict = "not yet run"
    else:
        verdict = "holds" if min(outcomes) == 1 else "fails" if max(outcomes) == 0 else "holds in part"
    return Judgement(entry, verdict, tuple(checks))
