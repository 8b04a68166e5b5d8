"""What every chapter does first: accept its parameters or refuse them, and choose its scale."""

import ast
import difflib
from itertools import pairwise
from typing import Any

from lib.book import figures, records
from lib.book.toc import PROFILES

PAPERMILL_MARK = "# Parameters"  # first line of the cell that papermill injects


def assigned(source: str) -> list[str]:
    """Names assigned at the top level of a cell."""
    names = []
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        names += [target.id for target in targets if isinstance(target, ast.Name)]
    return names


def refuse_unknown(known: list[str], given: list[str]) -> None:
    """Raise if a parameter was given that the chapter does not have.

    Papermill itself only logs such a name, so a misspelt `-p ratoi 10` would run the defaults and look like a result.
    """
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ValueError(f"unknown parameter {name!r}; this chapter takes {', '.join(known)}.{hint}")


def quiet_semicolon(lines: list[str]) -> list[str]:
    """Make a final semicolon silence a cell whoever runs it.

    IPython looks for the semicolon in its history, and nbval runs cells without keeping any: there every plotting cell would
    print the object that its last line returns. A last value of None is silent everywhere.
    """
    text = "".join(lines).rstrip()
    return [*lines, "\nNone\n"] if text.endswith(";") else lines


def _shell():
    """The running IPython shell, or None in plain Python."""
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    return get_ipython()


def _check_injected() -> None:
    shell = _shell()
    if shell is None:  # plain Python has no cells, hence nothing injected
        return
    cells = shell.user_ns.get("In", [])
    for before, cell in pairwise(cells):
        if cell.startswith(PAPERMILL_MARK):
            refuse_unknown(assigned(before), assigned(cell))


def begin(profile: str) -> None:
    """Start a chapter: refuse unknown parameters and profiles, set the figure style.

    Args:
        profile: 'smoke' (does it run), 'quick' (a laptop minute) or 'paper' (the published scale).

    Raises:
        ValueError: a parameter that the chapter's parameters cell does not assign, or another profile.
    """
    _check_injected()
    pick(profile, **dict.fromkeys(PROFILES))
    shell = _shell()
    if shell is not None and quiet_semicolon not in shell.input_transformers_post:
        shell.input_transformers_post.append(quiet_semicolon)
    records.use_profile(profile)
    figures.use_style()


def pick(profile: str, **scale: Any) -> Any:
    """The value that belongs to a profile: `pick(profile, smoke=1, quick=2, paper=10)`."""
    if profile not in PROFILES:
        raise ValueError(f"profile = {profile!r}; expected one of {', '.join(PROFILES)} (-p profile quick).")
    missing = [name for name in PROFILES if name not in scale]
    if missing:
        raise ValueError(f"pick: no value for profile {', '.join(missing)}; give one for each of {', '.join(PROFILES)}.")
    return scale[profile]
