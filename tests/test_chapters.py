"""Every chapter keeps the rules, its pair is one notebook, and the lists that name chapters agree."""

import ast

import nbformat
import pytest
import yaml

from lib.book import lint, pairs, readme, records
from lib.book.depends import code_of
from lib.book.toc import ROOT, chapters, slug

QUARANTINE = yaml.safe_load((ROOT / "tests/quarantine.yml").read_text())
ENTRIES = chapters()


def allowed(entry: str) -> dict[str, str]:
    return {item["starts"]: item["why"] for item in QUARANTINE if item["chapter"] == slug(entry)}


def reference(entry: str):
    return nbformat.read(ROOT / f"{entry}.ipynb", 4)


@pytest.mark.parametrize("entry", ENTRIES)
def test_md_and_ipynb_are_one_notebook_run_in_order(entry):
    assert pairs.problems(pairs.read_source(entry), reference(entry)) == []


@pytest.mark.parametrize("entry", ENTRIES)
def test_chapter_keeps_the_rules(entry):
    assert lint.problems(reference(entry), slug(entry), allowed(entry)) == []


def test_the_table_of_contents_names_every_chapter_there_is():
    have = {f"chapters/{path.stem}" for path in (ROOT / "chapters").iterdir() if path.suffix in (".md", ".ipynb")}
    listed = set(ENTRIES) - {"index"}
    assert {"only in chapters/": sorted(have - listed), "only in _toc.yml": sorted(listed - have)} == {
        "only in chapters/": [],
        "only in _toc.yml": [],
    }


def test_slugs_are_unique():
    assert len({slug(entry) for entry in ENTRIES}) == len(ENTRIES)


def test_every_quarantined_cell_is_still_there():
    gone = []
    for item in QUARANTINE:
        entry = next((e for e in ENTRIES if slug(e) == item["chapter"]), None)
        cells = [c.source for c in pairs.read_source(entry).cells if pairs.IGNORED in c.metadata.get("tags", [])] if entry else []
        if not any(source.startswith(item["starts"]) for source in cells):
            gone.append(item)
        assert {"chapter", "starts", "why", "until"} == set(item)
    assert gone == []


@pytest.mark.parametrize("entry", ENTRIES)
def test_references_are_of_profile_quick(entry):
    for data in records.records_in(ROOT / f"{entry}.ipynb"):
        assert data["profile"] == "quick"


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_chapter_begins_by_checking_its_parameters(entry):
    calls = [ast.unparse(n.func) for n in ast.walk(ast.parse(code_of(pairs.read_source(entry)))) if isinstance(n, ast.Call)]
    assert calls[0] == "chapter.begin"


def test_references_name_no_path_of_a_machine():
    for entry in ENTRIES:
        text = (ROOT / f"{entry}.ipynb").read_text()
        assert str(ROOT) not in text
        assert "/home/" not in text


def test_readme_shows_the_verdicts_of_the_references():
    assert readme.current() == (ROOT / "README.md").read_text(), "run `make accept`"
