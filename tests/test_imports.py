"""Imports inside `lib` point one way."""

import ast
from pathlib import Path

import pytest

from lib.book.toc import ROOT

ALLOWED = {
    "checks": set(),
    "device": set(),
    "theory": {"checks", "theory"},
    "metrics": {"checks", "metrics"},
    "models": {"checks", "device", "models"},
    "data": {"checks", "data"},
    "train": {"checks", "device", "models", "data", "metrics", "train", "book.cards"},
    "book": {"checks", "book"},
}
FILES = sorted((ROOT / "lib").rglob("*.py"))


def concept(path: Path) -> str:
    parts = path.relative_to(ROOT / "lib").with_suffix("").parts
    return parts[0]


def imported(source: str) -> set[str]:
    """Dotted names below `lib` that a source imports, as deep as they are written."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, "relative import: write it out, the runner follows absolute ones"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("lib.") for name in names if name.startswith("lib.")}


def trespasses(where: str, source: str) -> list[str]:
    allowed = ALLOWED[where]
    return sorted(name for name in imported(source) if not any(name == a or name.startswith(a + ".") for a in allowed))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    if path == ROOT / "lib/__init__.py":
        return
    assert trespasses(concept(path), path.read_text()) == []


@pytest.mark.parametrize("path", [p for p in FILES if p.name == "__init__.py"], ids=lambda p: str(p.relative_to(ROOT)))
def test_packages_hold_a_docstring_only(path):
    body = ast.parse(path.read_text()).body
    assert len(body) == 1
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", [p for p in FILES if "theory" in p.parts], ids=lambda p: p.name)
def test_theory_does_without_torch(path):
    source = ast.parse(path.read_text())
    roots = {a.name.split(".")[0] for n in ast.walk(source) if isinstance(n, ast.Import) for a in n.names}
    roots |= {(n.module or "").split(".")[0] for n in ast.walk(source) if isinstance(n, ast.ImportFrom)}
    assert "torch" not in roots


@pytest.mark.parametrize(
    "where, source",
    [
        ("theory", "from lib.train import loops"),
        ("theory", "def f():\n    from lib.models import circuits"),
        ("metrics", "import lib.theory.markov"),
        ("data", "from lib.book import cards"),
        ("models", "from lib import train"),
        ("train", "from lib.book import figures"),
    ],
)
def test_a_trespass_is_seen(where, source):
    assert trespasses(where, source)


def test_public_functions_have_docstrings():
    bare = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            private = isinstance(node, ast.ClassDef) and node.name.startswith("_")
            if isinstance(node, ast.Module | ast.ClassDef) and not private:
                for item in node.body:
                    public = isinstance(item, ast.FunctionDef | ast.ClassDef) and not item.name.startswith("_")
                    if public and not ast.get_docstring(item) and not (isinstance(node, ast.ClassDef) and item.name == "forward"):
                        bare.append(f"{path.relative_to(ROOT)}:{item.lineno} {item.name}")
    assert bare == []
