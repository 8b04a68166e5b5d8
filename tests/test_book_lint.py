"""Each rule for chapters goes red on a page that breaks it, and stays green on one that does not."""

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from lib.book import claims, lint

PARAMETERS = 'profile = "quick"  # which\nseeds = 0'


def code(source, **metadata):
    return new_code_cell(source, metadata=metadata)


def page(*cells, parameters=PARAMETERS):
    first = [code(parameters, tags=["parameters"])] if parameters else []
    return new_notebook(cells=[*first, *(new_markdown_cell(c) if isinstance(c, str) else c for c in cells)])


GOOD = page(
    "# A claim\n\nOf {glue:text}`n:d` cases, with $M = 20$ and $1.5 < x$, all "
    "{glue:text}`chapters/other.ipynb::y:.2f`. In 2026 too; 3 seeds.",
    code("from lib.book import records\nimport numpy as np\nrecords.say('n', 3)\n\ndef f(x):\n    return x"),
)


def drawing(**mystnb):
    cell = code("plot()", mystnb=mystnb)
    cell.outputs = [new_output("display_data", data={"text/plain": "<Figure size 640x400 with 1 Axes>"})]
    return cell


def talking():
    cell = drawing(figure={"caption": "A caption."}, image={"alt": "curves that rise with the ratio"})
    cell.outputs.insert(0, new_output("execute_result", data={"text/plain": "[(0.0, 1.0)]"}))
    return cell


LONG = "\n".join(f"x{i} = {i}" for i in range(13))
SIX = "def f(x):\n" + "\n".join(f"    x += {i}" for i in range(6))
BAD = {
    "no parameters cell": (page(parameters=""), "0 cells are tagged parameters"),
    "two parameters cells": (page(code("a = 1", tags=["parameters"])), "2 cells are tagged parameters"),
    "derived parameter": (page(parameters=PARAMETERS + "\nn = seeds * 2"), "not the assignment of a literal"),
    "call in parameters": (page(parameters=PARAMETERS + "\nprint(1)"), "not the assignment of a literal"),
    "no seeds": (page(parameters='profile = "quick"'), "lacks seeds"),
    "long cell": (page(code(LONG)), "cell of 13 lines"),
    "long function": (page(code(SIX)), "function f has 6 lines"),
    "class": (page(code("class A:\n    pass")), "class A belongs in lib"),
    "import": (page(code("import json")), "imports json"),
    "import from": (page(code("from requests import get")), "imports requests"),
    "no alt": (page(drawing(figure={"caption": "A caption."})), "without alt text"),
    "short alt": (page(drawing(figure={"caption": "A caption."}, image={"alt": "a plot"})), "without alt text"),
    "no caption": (page(drawing(image={"alt": "curves that rise with the ratio"})), "without caption"),
    "figure with a second output": (page(talking()), "figure cell with 2 outputs"),
    "typed decimal": (page("It reaches 0.93 at the end."), "typed number '0.93'"),
    "typed percent": (page("In 12 % of the cases."), "typed number '12 %'"),
    "typed exponent": (page("Down to 1e-4 in the end."), "typed number '1e-4'"),
    "typed integer": (page("After 1250 steps."), "typed number '1250'"),
    "ignored": (page(code("time()", tags=["nbval-ignore-output"])), "not on the allowlist"),
    "skipped": (page(code("time()", tags=["nbval-skip"])), "not on the allowlist"),
    "unknown claim": (page(code('x = "P1-NOT-THERE"')), "P1-NOT-THERE is not in the ledger"),
    "computed id": (page(code("records.record(name, theory=1)")), "as a literal"),
    "glue of nothing": (page("It is {glue:text}`nowhere:.2f`."), "which no cell says"),
}


def test_a_good_page_passes():
    assert lint.problems(GOOD, "x", {}) == []


@pytest.mark.parametrize("name", BAD)
def test_a_bad_page_is_seen(name):
    notebook, words = BAD[name]
    assert any(words in problem for problem in lint.problems(notebook, "x", {}))


def test_a_claim_of_another_chapter_is_seen():
    entry = next(iter(claims.ledger().values()))
    notebook = page(code(f'records.record("{entry.id}", theory=1)'))
    assert any("the ledger gives it to" in p for p in lint.claim_ids(notebook, "another"))
    assert lint.claim_ids(notebook, entry.chapter) == []


def test_the_allowlist_lets_a_cell_pass():
    notebook = page(code("time()", tags=["nbval-ignore-output"]))
    assert lint.ignored(notebook, {"time()": "differs"}) == []


def test_figure_with_caption_and_alt_passes():
    assert lint.figures(page(drawing(figure={"caption": "A."}, image={"alt": "five curves that rise with r"}))) == []
