"""The rules a chapter keeps, each as a function from a notebook to a list of complaints; tests feed each a bad page."""

import ast
import re

from nbformat import NotebookNode

from lib.book import claims
from lib.book.chapter import assigned
from lib.book.depends import code_of, strings

IMPORTS = {"lib", "numpy", "pandas", "matplotlib", "seaborn", "torch", "scipy"}  # ours, and arrays and plots
CELL_LINES = 12
FUNCTION_LINES = 5
DEMANDED = ("profile", "seeds")


def _code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _statement_lines(source: str) -> int:
    """Lines of a cell that are neither empty nor a comment alone."""
    return sum(1 for line in source.splitlines() if line.strip() and not line.strip().startswith("#"))


def parameters(notebook: NotebookNode) -> list[str]:
    """Exactly one parameters cell; it assigns literals only, `profile` and `seeds` among them."""
    cells = [cell for cell in _code(notebook) if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) != 1:
        return [f"{len(cells)} cells are tagged parameters; expected one"]
    found = []
    for node in ast.parse(cells[0].source).body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        try:
            ast.literal_eval(value)  # type: ignore[arg-type]
        except (ValueError, TypeError):
            found.append(f"parameters cell: {ast.unparse(node)!r} is not the assignment of a literal; derive it in the next cell")
    missing = [name for name in DEMANDED if name not in assigned(cells[0].source)]
    return found + [f"parameters cell lacks {name}" for name in missing]


def lengths(notebook: NotebookNode) -> list[str]:
    """No code cell over CELL_LINES lines, no function over FUNCTION_LINES."""
    found = []
    for cell in _code(notebook):
        count = _statement_lines(cell.source)
        if count > CELL_LINES:
            found.append(f"cell of {count} lines (at most {CELL_LINES}): {cell.source[:50]!r}")
        for node in ast.walk(ast.parse(code_of(_single(cell)))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = node.end_lineno - node.lineno  # type: ignore[operator]
                if size > FUNCTION_LINES:
                    found.append(f"function {node.name} has {size} lines (at most {FUNCTION_LINES}); it belongs in lib")
            if isinstance(node, ast.ClassDef):
                found.append(f"class {node.name} belongs in lib")
    return found


def _single(cell: NotebookNode) -> NotebookNode:
    from nbformat.v4 import new_notebook

    return new_notebook(cells=[cell])


def imports(notebook: NotebookNode) -> list[str]:
    """Only lib and the array and plot libraries are imported."""
    found = []
    for node in ast.walk(ast.parse(code_of(notebook))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "."]
        found += [f"imports {name}; a chapter imports {', '.join(sorted(IMPORTS))}" for name in names if name.split(".")[0] not in IMPORTS]
    return found


def figures(notebook: NotebookNode) -> list[str]:
    """Every cell whose output is a picture has an alt text of some length, and a caption."""
    found = []
    for cell in _code(notebook):
        draws = any("<Figure size" in str(output.get("data", {}).get("text/plain", "")) for output in cell.get("outputs", []))
        mystnb = cell.metadata.get("mystnb", {})
        if not draws and "figure" not in mystnb:
            continue
        alt = mystnb.get("image", {}).get("alt", "")
        if len(alt.split()) < 5:
            found.append(f"figure without alt text: {cell.source[:50]!r}")
        if len(cell.get("outputs", [])) > 1:
            found.append(
                f"figure cell with {len(cell.outputs)} outputs, each would be the figure (end it with a semicolon): {cell.source[:50]!r}"
            )
        if not mystnb.get("figure", {}).get("caption"):
            found.append(f"figure without caption: {cell.source[:50]!r}")
    return found


NUMBER = re.compile(r"(?<![\w.,/:-])[-−+]?(?:\d+\.\d+|\.\d+|\d{3,}|\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)?\s?%|\d+(?:\.\d+)?e[-+]?\d+)(?![\w/])")
PROSE_FREE = (
    re.compile(r"(?s)(`{3,}|:{3,})\{(?:figure|glue[\w:]*|bibliography|image|math)\}.*?\1"),
    re.compile(r"(?s)`{3,}(?:python|text|bash|console)\n.*?`{3,}"),
    re.compile(r"(?s)\$\$.*?\$\$"),
    re.compile(r"(?s)\\begin\{(\w+\*?)\}.*?\\end\{\1\}"),
    re.compile(r"\$[^$\n]+(?:\n[^$\n]+)*\$"),
    re.compile(r"\{[\w:-]+\}`[^`]*`"),
    re.compile(r"`[^`\n]*`"),
    re.compile(r"\]\([^)]*\)"),
    re.compile(r"(?m)^:\w+:.*$"),
    re.compile(r"<[^>]+>"),
)
ALLOWED_NUMBERS = re.compile(r"^(19|20)\d\d$")  # years


def typed_numbers(notebook: NotebookNode) -> list[str]:
    """Numbers in prose that were typed: results must be glued, constants of the setting stand in formulas."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        text = cell.source
        for pattern in PROSE_FREE:
            text = pattern.sub(" ", text)
        for match in NUMBER.finditer(text):
            if not ALLOWED_NUMBERS.match(match.group().strip()):
                around = " ".join(text[max(0, match.start() - 30) : match.end() + 20].split())
                found.append(f"typed number {match.group()!r} in “{around}”; glue it, or put a setting into $…$")
    return found


def ignored(notebook: NotebookNode, allowed: dict[str, str]) -> list[str]:
    """Cells whose outputs are not compared must be on the allowlist (start of the cell's code -> reason)."""
    found = []
    for cell in _code(notebook):
        tags = [tag for tag in cell.metadata.get("tags", []) if tag in ("nbval-ignore-output", "nbval-skip", "raises-exception")]
        if tags and not any(cell.source.startswith(start) for start in allowed):
            found.append(f"{', '.join(tags)} on a cell that is not on the allowlist: {cell.source[:60]!r}")
    return found


def claim_ids(notebook: NotebookNode, chapter: str) -> list[str]:
    """Strings that look like claim ids must be in the ledger, and claims recorded here must belong here."""
    found = []
    source = code_of(notebook)
    known = claims.ledger()
    for word in sorted(strings(source)):
        if re.fullmatch(r"P[12]-[A-Za-z0-9.-]+", word) and word not in known:
            found.append(f"{word} is not in the ledger")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "record" and node.args:
            first = node.args[0]
            if not (isinstance(first, ast.Constant) and isinstance(first.value, str)):
                found.append(f"record({ast.unparse(first)}): write the claim's id as a literal")
            elif first.value in known and known[first.value].chapter != chapter:
                found.append(f"{first.value} is recorded here, but the ledger gives it to {known[first.value].chapter}")
    return found


def loose_glue(notebook: NotebookNode) -> list[str]:
    """Glued keys that no cell of the chapter says (cross-page keys, with ::, are the builder's to check)."""
    source = code_of(notebook)
    said = strings(source)
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for key in re.findall(r"\{glue(?::text)?\}`([^`]+)`", cell.source):
                name = key.rsplit(":", 1)[0] if ":" in key and "::" not in key else key
                if "::" not in key and name not in said and not _made_by_format(name, source):
                    found.append(f"{{glue}} of {name!r}, which no cell says")
    return found


def _made_by_format(name: str, source: str) -> bool:
    """Whether an f-string of the chapter could have made the key."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            pattern = "".join(re.escape(str(v.value)) if isinstance(v, ast.Constant) else ".+" for v in node.values)
            if re.fullmatch(pattern, name):
                return True
    return False


def problems(notebook: NotebookNode, chapter: str, allowed: dict[str, str]) -> list[str]:
    """All complaints about one chapter."""
    found = parameters(notebook) + lengths(notebook) + imports(notebook) + figures(notebook) + typed_numbers(notebook)
    return found + ignored(notebook, allowed) + claim_ids(notebook, chapter) + loose_glue(notebook)
