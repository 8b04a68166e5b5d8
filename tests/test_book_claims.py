"""The ledger is complete and sound, and verdicts follow from it."""

import ast
import re

import pytest

from lib.book import claims
from lib.book.claims import Claim, LedgerError, Rule, judge, read
from lib.book.toc import ROOT, chapters, slug

GOOD = """
- id: A
  paper: 1
  place: Figure 4
  statement: Some words.
  kind: number
  published: 2.0
  tolerance: {relative: 0.1, reason: printed so}
  chapter: p1_sharper
"""


def claim(kind="number", published=None, tolerance=None) -> Claim:
    return Claim("X", 1, "place", "words", kind, published, tolerance or {}, "p1_sharper", 1)


@pytest.mark.parametrize(
    "change, words",
    [
        (("kind: number", "kind: hunch"), r"line 2 \(A\): kind = 'hunch'; expected one of number, sign"),
        (("  tolerance: {relative: 0.1, reason: printed so}\n", ""), r"line 2 \(A\): missing tolerance"),
        (("tolerance: {relative: 0.1, reason: printed so}", "tolerance: {relative: 0.1}"), "has no reason"),
        (("tolerance: {relative: 0.1, reason: printed so}", "tolerance: {}"), "no tolerance"),
        (("relative: 0.1", "relative: 1e-1"), "expected a number"),
        (("relative: 0.1", "nearly: 0.1"), "expected"),
        (("relative: 0.1", "relative: 0.1, at_most: 3"), "expected exactly one of"),
        (("published: 2.0", "published: null"), "needs a published value"),
        (("paper: 1", "paper: 3"), "paper = 3"),
        (("statement: Some words.", "statement: ''"), "statement = ''"),
        (("place: Figure 4", "spot: Figure 4"), "missing place; unknown spot"),
        (("- id: A", "- id: [A"), "not YAML"),
    ],
)
def test_a_bad_ledger_is_refused_with_its_line(change, words):
    assert "A" in read(GOOD)
    with pytest.raises(LedgerError, match=words):
        read(GOOD.replace(*change))


def test_a_double_id_is_refused_with_both_lines():
    with pytest.raises(LedgerError, match="line 11: id A is already used at line 2"):
        read(GOOD + GOOD)


def test_an_id_that_another_entry_absorbed_is_refused():
    with pytest.raises(LedgerError, match="id B is already used"):
        read(GOOD + "  also: [B]\n" + GOOD.replace("id: A", "id: B"))


def rule(name, bound, resolution=None):
    return {"": Rule(name, bound, "reason", resolution)}


@pytest.mark.parametrize(
    "entry, inside, outside",
    [
        (claim(published=2.0, tolerance=rule("relative", 0.1)), 2.19, 2.21),
        (claim(published=2.0, tolerance=rule("absolute", 0.1)), 1.91, 1.89),
        (claim(tolerance=rule("at_most", 1e-10)), 9e-11, 2e-10),
        (claim(tolerance=rule("at_least", 0.1)), 0.11, 0.09),
        (claim(tolerance=rule("between", [1.0, 2.0])), 1.0, 2.01),
        (claim("sign", tolerance=rule("sign", "positive")), 0.1, -0.1),
        (claim("sign", tolerance=rule("sign", "negative")), -0.1, 0.1),
        (claim("property", tolerance=rule("share", 1.0)), 1.0, 0.0),
        (claim(tolerance=rule("strict_order", "increasing")), [1, 2, 3], [1, 3, 3]),
        (claim(tolerance=rule("strict_order", "decreasing")), [3, 2, 1], [1, 2]),
    ],
)
def test_a_value_moved_outside_its_tolerance_fails(entry, inside, outside):
    assert judge(entry, {"theory": inside}).verdict == "holds"
    assert judge(entry, {"theory": outside}).verdict == "fails"


def test_a_number_fails_when_one_of_its_quantities_is_off_and_a_table_holds_in_part():
    published = {"tau": 10.0, "alpha": 0.5}
    for kind, verdict in (("number", "fails"), ("table", "holds in part")):
        entry = claim(kind, published, rule("relative", 0.01))
        assert judge(entry, {"theory": {"tau": 10.0, "alpha": 0.5}}).verdict == "holds"
        assert judge(entry, {"theory": {"tau": 10.0, "alpha": 0.6}}).verdict == verdict
        assert judge(entry, {"theory": {"tau": 11.0, "alpha": 0.6}}).verdict == "fails"


def test_sides_that_disagree_hold_in_part():
    entry = claim("sign", tolerance=rule("sign", "positive"))
    assert judge(entry, {"official": 1.0, "pure": -1.0}).verdict == "holds in part"
    assert judge(entry, {"official": 1.0, "pure": None}).verdict == "holds"


def test_a_sign_within_its_scatter_holds_in_part():
    entry = claim("sign", tolerance=rule("sign", "positive"))
    assert judge(entry, {"pure": 1.0}, {"pure": 0.5}, seeds=4).verdict == "holds"
    assert judge(entry, {"pure": 1.0}, {"pure": 2.0}, seeds=4).verdict == "holds in part"
    assert judge(entry, {"pure": -1.0}, {"pure": 2.0}, seeds=4).verdict == "fails"


def test_a_share_between_none_and_all_holds_in_part():
    assert judge(claim("property", tolerance=rule("share", 1.0)), {"theory": 0.7}).verdict == "holds in part"


def test_no_side_is_not_yet_run():
    assert judge(claim(tolerance=rule("at_most", 1)), {}).verdict == "not yet run"


def test_nan_never_meets_a_rule():
    for name, bound in (("at_most", 1), ("at_least", 1), ("sign", "positive")):
        assert judge(claim(tolerance=rule(name, bound)), {"theory": float("nan")}).verdict == "fails"


def test_a_quantity_left_out_is_refused():
    entry = claim("table", {"tau": 1.0, "alpha": 2.0}, rule("relative", 0.1))
    with pytest.raises(ValueError, match="side theory lacks alpha"):
        judge(entry, {"theory": {"tau": 1.0}})
    with pytest.raises(ValueError, match="no rule for 'beta'"):
        judge(claim(tolerance={"alpha": Rule("at_most", 1, "r")}), {"theory": {"beta": 1.0}})
    with pytest.raises(ValueError, match="side 'practice'"):
        judge(entry, {"practice": 1.0})


def test_rounding_is_reported_as_its_resolution():
    entry = claim(tolerance=rule("at_most", 1e-10, resolution=1e-12))
    assert judge(entry, {"theory": 3.1e-16}).checks[0].ours == 1e-12
    assert judge(entry, {"theory": 5e-11}).checks[0].ours == 5e-11


def test_an_unknown_claim_suggests_a_near_one():
    known = next(iter(claims.ledger()))
    with pytest.raises(ValueError, match="did you mean"):
        claims.get(known + "X")


# ---- the ledger itself ------------------------------------------------------------------------------------------


def marked() -> dict[str, list[str]]:
    """Claim ids that tests are marked with -> those tests."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.claim":
                for arg in node.args:
                    found.setdefault(arg.value, []).append(f"{path.name}:{node.lineno}")
    return found


def test_ids_used_by_tests_exist():
    assert sorted(set(marked()) - set(claims.ledger())) == []


def test_every_claim_that_is_not_planned_has_a_test():
    have = marked()
    assert [c.id for c in claims.ledger().values() if not c.planned and c.id not in have] == []


def test_every_claim_that_is_not_planned_is_recorded_by_its_chapter():
    missing = []
    for entry in chapters():
        source = (ROOT / f"{entry}.md").read_text()
        recorded = set(re.findall(r"records\.record\(\s*\"([^\"]+)\"", source))
        owned = {c.id for c in claims.ledger().values() if c.chapter == slug(entry)}
        missing += sorted(f"{slug(entry)}: {name}" for name in owned ^ recorded)
    assert missing == []


def test_chapters_of_claims_are_written_or_named_as_planned():
    odd = {c.chapter for c in claims.ledger().values() if not re.fullmatch(r"p[12]_[a-z_]+", c.chapter)}
    assert odd == set()


def test_every_tolerance_has_a_reason_of_some_words():
    thin = [c.id for c in claims.ledger().values() for r in c.tolerance.values() if len(r.reason.split()) < 2]
    assert thin == []
