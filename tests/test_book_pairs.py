"""A pair is one notebook; every way it can come apart is seen."""

import copy

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from lib.book import pairs


def source():
    return pairs.clean(new_notebook(cells=[new_markdown_cell("# A"), new_code_cell("x = 1"), new_code_cell("x")]))


def ran():
    notebook = source()
    for i, cell in enumerate(c for c in notebook.cells if c.cell_type == "code"):
        cell.execution_count = i + 1
    notebook.cells[2].outputs = [new_output("execute_result", data={"text/plain": "1"}, execution_count=2)]
    return notebook


def test_a_good_pair_has_no_problems():
    assert pairs.problems(source(), ran()) == []


def edit(change):
    notebook = ran()
    change(notebook)
    return notebook


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda n: n.cells[1].update(source="x = 2"), "only in .md: 'x = 1'"),
        (lambda n: n.cells.append(new_markdown_cell("more")), "only in .ipynb: 'more'"),
        (lambda n: n.cells[0].update(source="# B"), "only in .md: '# A'"),
        (lambda n: n.cells.reverse(), "another order"),
        (lambda n: n.cells[1].metadata.update(tags=["hide-input"]), "only in .md"),
        (lambda n: n.cells[2].update(execution_count=None), "not run in order"),
        (lambda n: n.cells[1].update(execution_count=5), "not run in order"),
        (
            lambda n: n.cells[1].outputs.append(new_output("error", ename="ValueError", evalue="", traceback=[])),
            "an error: ValueError",
        ),
        (lambda n: n.cells[1].outputs.append(new_output("stream", name="stderr", text="warning")), "stderr"),
        (lambda n: n.cells[2].outputs[0].data.update({"image/png": "AAAA"}), "picture"),
    ],
)
def test_a_bad_pair_is_seen(change, words):
    assert any(words in problem for problem in pairs.problems(source(), edit(change)))


def test_cleaning_makes_equal_runs_equal_bytes():
    one, two = ran(), ran()
    two.cells.insert(1, new_code_cell("# Parameters\nx = 3", metadata={"tags": ["injected-parameters"]}))
    for i, cell in enumerate(two.cells):
        cell.id = f"random{i}"
        cell.metadata["papermill"] = {"duration": 0.1}
        if cell.cell_type == "code":
            cell.execution_count = (cell.execution_count or 0) + 1
    assert nbformat.writes(pairs.clean(one)) == nbformat.writes(pairs.clean(two))


def test_outputs_move_under_edited_prose_but_never_under_edited_code():
    prose = source()
    prose.cells[0].source = "# Better"
    assert pairs.with_outputs(copy.deepcopy(prose), ran()).cells[2].outputs == ran().cells[2].outputs
    prose.cells[1].source = "x = 5"
    with pytest.raises(ValueError, match="run the chapter again"):
        pairs.with_outputs(prose, ran())


def test_references_hold_no_pictures_and_nothing_ignored():
    notebook = ran()
    notebook.cells[2].outputs[0].data["image/png"] = "AAAA"
    notebook.cells[1].metadata["tags"] = [pairs.IGNORED]
    notebook.cells[1].outputs = [new_output("stream", name="stdout", text="12.3 s")]
    made = pairs.reference(notebook)
    assert made.cells[1].outputs == []
    assert list(made.cells[2].outputs[0].data) == ["text/plain"]
