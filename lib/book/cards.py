"""Run cards: the results of runs too long for a chapter, with all that is needed to judge or repeat them."""

import json
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from lib.book.toc import ROOT

FOLDER = ROOT / "data" / "results"
NEEDED = ("name", "config", "seeds", "results", "provenance")


def _commit() -> str:
    """Commit of the code that ran, with a + when files under lib/ differ from it; 'unknown' outside a checkout."""

    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)

    head = git("rev-parse", "--short=12", "HEAD")
    if head.returncode:
        return "unknown"
    return head.stdout.strip() + ("+" if git("status", "--porcelain", "lib").stdout.strip() else "")


def _host() -> str:
    """Class of the machine, never its name."""
    gpu = ""
    try:
        import torch

        gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    except ImportError:
        pass
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores{gpu}"


def _plain(value: Any) -> Any:
    """Numbers and arrays as JSON has them: floats to 7 significant digits, no NaN (null stands for 'not reached')."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(f"{value:.7g}") if np.isfinite(value) else None
    if value is None or isinstance(value, str):
        return value
    raise ValueError(
        f"cards.save: {type(value).__name__} {value!r} has no place in a run card; pass numbers, strings, lists, dicts or arrays."
    )


def _text(card: dict) -> str:
    """JSON with one line a list of numbers: small, and a change shows as a line."""
    text = json.dumps(card, indent=1, ensure_ascii=False)
    lists = re.compile(r'\[\s+([^\[\]{}"]*?)\s+\]')  # innermost ones, of anything but strings
    return lists.sub(lambda found: "[" + re.sub(r",\s+", ", ", found[1]) + "]", text) + "\n"


def save(name: str, *, config: dict, seeds: list[int], results: dict, seconds: float, folder: Path = FOLDER) -> Path:
    """Write data/results/<name>.json in one step, so that an interrupted write never leaves half a card.

    Args:
        name: of the card, as chapters load it.
        config: everything that was set: sizes, rates, steps, data and its checksums.
        seeds: all seeds that were run.
        results: what was measured, per seed.
        seconds: wall time of the run.
        folder: where cards lie.
    """
    card = {
        "name": name,
        "config": _plain(config),
        "seeds": _plain(seeds),
        "provenance": {
            "commit": _commit(),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "seconds": round(seconds, 1),
            "host": _host(),
            "versions": {package: metadata.version(package).split("+")[0] for package in ("numpy", "scipy", "torch")},
        },
        "results": _plain(results),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    part = path.with_suffix(".part")
    part.write_text(_text(card))
    part.replace(path)
    return path


def load(name: str, folder: Path = FOLDER) -> dict:
    """Read a run card.

    Raises:
        ValueError: there is no such card, or the file is cut short or lacks a part.
    """
    path = folder / f"{name}.json"
    if not path.exists():
        have = ", ".join(sorted(p.stem for p in folder.glob("*.json"))) or "none"
        raise ValueError(f"cards.load: no run card {name!r}; there are: {have}. Run the command in the chapter to make it.")
    try:
        card = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"cards.load: run card {name!r} is not JSON ({error}); restore it from version control.") from error
    missing = [part for part in NEEDED if part not in card]
    if missing:
        raise ValueError(f"cards.load: run card {name!r} lacks {', '.join(missing)}; it was not written by cards.save.")
    return card
