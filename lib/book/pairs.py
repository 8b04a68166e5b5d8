"""A chapter is one notebook in two files: the `.md` is the truth, the `.ipynb` beside it holds the reference outputs."""

import json
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

from lib.book.toc import ROOT

KEPT = ("tags", "mystnb")  # cell metadata that mean something to the book
IMAGES = ("image/png", "image/jpeg", "image/svg+xml", "application/papermill.record/image/png")
IGNORED = "nbval-ignore-output"


def clean(notebook: NotebookNode) -> NotebookNode:
    """Drop all that differs between two equal runs: injected cell, ids, timings, versions; counts run from 1."""
    notebook.cells = [cell for cell in notebook.cells if "injected-parameters" not in cell.metadata.get("tags", [])]
    count = 0
    for i, cell in enumerate(notebook.cells):
        cell.id = f"c{i:03d}"
        cell.metadata = nbformat.from_dict({key: cell.metadata[key] for key in KEPT if cell.metadata.get(key)})
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count if cell.execution_count else None
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = count
    notebook.metadata = nbformat.from_dict({
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python", "pygments_lexer": "ipython3"},
    })  # fmt: skip
    return notebook


def read_source(entry: str) -> NotebookNode:
    """The `.md` of a chapter as a notebook without outputs."""
    path = ROOT / f"{entry}.md"
    if not path.exists():
        raise FileNotFoundError(f"_toc.yml lists {entry}, but there is no {entry}.md")
    return clean(jupytext.read(path))


def needs_all(entry: str) -> bool:
    """Whether a chapter reads the results of all others (front matter `book: {needs: all}`) and so runs last."""
    return jupytext.read(ROOT / f"{entry}.md").metadata.get("book", {}).get("needs") == "all"


def with_outputs(source: NotebookNode, executed: NotebookNode) -> NotebookNode:
    """The cells of `source` with the outputs of `executed`, whose code cells must be the same; prose may differ."""
    ran = [cell for cell in executed.cells if cell.cell_type == "code"]
    code = [cell for cell in source.cells if cell.cell_type == "code"]
    if [cell.source for cell in ran] != [cell.source for cell in code]:
        raise ValueError("the executed notebook has other code cells than the chapter; run the chapter again.")
    for cell, done in zip(code, ran, strict=True):
        cell.outputs, cell.execution_count = done.outputs, done.execution_count
    return source


def reference(executed: NotebookNode) -> NotebookNode:
    """What is committed of an executed notebook: text, tables, glued numbers; no pictures, nothing that is not compared."""
    for cell in executed.cells:
        if cell.cell_type != "code":
            continue
        if IGNORED in cell.metadata.get("tags", []):
            cell.outputs = []
        for output in cell.outputs:
            for mime in IMAGES:
                output.get("data", {}).pop(mime, None)
    return executed


def problems(source: NotebookNode, ref: NotebookNode) -> list[str]:
    """What is wrong with a pair: differing cells, cells not run or run out of order, errors, pictures left in."""
    found = []
    strip = lambda cell: (cell.cell_type, cell.source.strip(), json.dumps({k: cell.metadata.get(k) for k in KEPT}))  # noqa: E731
    ours, theirs = [strip(cell) for cell in source.cells], [strip(cell) for cell in ref.cells]
    for cell in ours:
        if cell not in theirs:
            found.append(f"only in .md: {cell[1][:70]!r}")
    for cell in theirs:
        if cell not in ours:
            found.append(f"only in .ipynb: {cell[1][:70]!r}")
    if not found and ours != theirs:
        found.append("the same cells in another order")
    code = [cell for cell in ref.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    if counts != list(range(1, len(code) + 1)):
        found.append(f"reference not run in order: execution counts {counts}")
    for cell in code:
        for output in cell.outputs:
            if output.output_type == "error":
                found.append(f"reference holds an error: {output.get('ename')} in {cell.source[:50]!r}")
            if output.get("name") == "stderr":
                found.append(f"reference holds stderr: {output.get('text', '')[:70]!r}")
            if any(mime in output.get("data", {}) for mime in IMAGES):
                found.append(f"reference holds a picture in {cell.source[:50]!r}")
    return found


def write(notebook: NotebookNode, path: Path) -> bool:
    """Write a notebook if its text changed; says whether it did."""
    text = nbformat.writes(notebook, version=4) + "\n"
    if path.exists() and path.read_text() == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)
    return True
