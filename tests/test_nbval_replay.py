"""Comparison by replay sees what nbval sees: another value, another cell, a cell that never ran."""

import shutil
import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from lib.book.toc import ROOT


def notebook(value="1", source="x", count=1, glued="0.5"):
    cell = new_code_cell(source, execution_count=count)
    cell.outputs = [
        new_output("execute_result", data={"text/plain": value}, execution_count=count or 1),
        new_output("display_data", data={"application/papermill.record/text/plain": glued}),
        new_output("display_data", data={"text/plain": "<Figure size 640x400 with 1 Axes>"}),
    ]
    book = new_notebook(cells=[cell])
    book.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    return book


def compare(tmp_path, executed) -> tuple[int, str]:
    (tmp_path / "executed").mkdir()
    shutil.copy(ROOT / "conftest.py", tmp_path / "conftest.py")
    nbformat.write(notebook(), tmp_path / "a.ipynb")
    if executed is not None:
        executed.cells[0].outputs[2].data["image/png"] = "AAAA"
        nbformat.write(executed, tmp_path / "executed/a.ipynb")
    words = ["--nbval", "--nbval-current-env", "--nbval-replay", str(tmp_path / "executed"), "-p", "no:cacheprovider"]
    words += ["--nbval-sanitize-with", str(ROOT / "tests/nbval_sanitize.cfg"), "a.ipynb"]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_equal_outputs_pass_and_pictures_are_not_compared(tmp_path):
    code, said = compare(tmp_path, notebook())
    assert code == 0, said


@pytest.mark.parametrize(
    "executed, words",
    [
        (notebook(value="2"), "::Cell 0"),
        (notebook(glued="0.6"), "::Cell 0"),
        (notebook(source="y"), "differs from the executed notebook"),
        (notebook(count=None), "was not executed"),
        (None, "has not been executed"),
    ],
)
def test_a_difference_is_seen(tmp_path, executed, words):
    code, said = compare(tmp_path, executed)
    assert code != 0
    assert words in said
