"""Run every benchmark, print the ratios, save `_build/bench.json`. `python -m benchmarks fig4` runs those whose name begins so."""

import importlib
import json
import pkgutil
import sys

import benchmarks
from lib.book.toc import ROOT


def collect() -> list:
    """The functions that the modules of this package list in BENCHMARKS; each returns one row or several."""
    found = []
    for module in pkgutil.iter_modules(benchmarks.__path__):
        if not module.name.startswith("__"):
            found += getattr(importlib.import_module(f"benchmarks.{module.name}"), "BENCHMARKS", [])
    return found


def main(prefix: str = "") -> list[dict]:
    """Run and report."""
    rows: list[dict] = []
    path = ROOT / "_build" / "bench.json"
    path.parent.mkdir(exist_ok=True)
    print(f"{'benchmark':34} {'ours':>12} {'reference':>12} {'ratio':>9}  agreement")
    for function in collect():
        if prefix and not function.__name__.startswith(prefix):
            continue
        made = function()
        for row in made if isinstance(made, list) else [made]:
            print(
                f"{row['name']:34} {row['ours_s']:10.3g} s {row['reference_s']:10.3g} s {row['ratio']:8.1f}x  {row['agreement']:.1e}",
                flush=True,
            )
            rows.append(row)
            path.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"written to {path.relative_to(ROOT)}")
    return rows


if __name__ == "__main__":
    main(*sys.argv[1:2])
