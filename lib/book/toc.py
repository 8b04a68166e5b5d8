"""Where the project lies and which chapters it has: `_toc.yml` alone decides set and order."""

from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PROFILES = ("smoke", "quick", "paper")


@cache
def _entries(text: str) -> tuple[str, ...]:
    toc = yaml.safe_load(text)
    found = [toc["root"]]
    for part in toc.get("parts", [toc]):
        found += [chapter["file"] for chapter in part.get("chapters", [])]
    return tuple(found)


def chapters() -> tuple[str, ...]:
    """Paths without suffix in reading order, the index first: ('index', 'chapters/p1_two_circuits', ...)."""
    return _entries((ROOT / "_toc.yml").read_text())


def slug(entry: str) -> str:
    """Last part of a path in the table of contents; the name that the ledger and the command line use."""
    return entry.rsplit("/", 1)[-1]


def select(only: str | None) -> tuple[str, ...]:
    """Entries named by a comma-separated list of slugs; all of them when it is empty."""
    entries = chapters()
    if not only:
        return entries
    wanted = [name.strip().removesuffix(".md").removesuffix(".ipynb") for name in only.split(",")]
    known = {slug(entry): entry for entry in entries}
    unknown = [name for name in wanted if slug(name) not in known]
    if unknown:
        raise ValueError(f"ONLY: no chapter called {', '.join(unknown)}; _toc.yml has {', '.join(known)}.")
    return tuple(known[slug(name)] for name in wanted)
