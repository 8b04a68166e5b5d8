"""Stage the book for its builder: executed notebooks take the chapters' places, figures included.

The committed notebooks hold no pictures and stand beside `.md` files of the same name, which the builder refuses; so the
book is built from a copy under `_build/book`, in which only changed files are written and builds stay incremental.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from lib.book.runner import folder
from lib.book.toc import ROOT, chapters, slug

STATIC = ("_config.yml", "_toc.yml", "references.bib")


def _copy(source: Path, target: Path) -> None:
    if target.exists() and target.read_bytes() == source.read_bytes():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def stage(profile: str) -> Path:
    """Fill `_build/book` from a profile's executed notebooks; files that no longer belong are removed.

    Raises:
        FileNotFoundError: a chapter of the table of contents has not been run at this profile.
    """
    target = ROOT / "_build" / "book"
    wanted = {target / name: ROOT / name for name in STATIC}
    for entry in chapters():
        executed = folder(profile) / f"{slug(entry)}.ipynb"
        if not executed.exists():
            raise FileNotFoundError(f"stage: {slug(entry)} has not been run at profile {profile}; run `make book PROFILE={profile}`.")
        wanted[target / f"{entry}.ipynb"] = executed
    for asset in sorted((ROOT / "lib/book/static").glob("*")):
        wanted[target / "_static" / asset.name] = asset
    for path in [p for p in target.rglob("*") if p.is_file() and p not in wanted] if target.exists() else []:
        path.unlink()
    for path, source in wanted.items():
        _copy(source, path)
    return target


def missing(profile: str) -> list[str]:
    """Chapters that have not been run at a profile."""
    return [slug(entry) for entry in chapters() if not (folder(profile) / f"{slug(entry)}.ipynb").exists()]


def build(profile: str, only: str = "") -> int:
    """Stage and build `_build/html`, warnings as errors; returns the builder's exit status.

    With `only`, chapters that were never run are no error: the pages are then left for a full run, and a line says so.
    """
    if only and missing(profile):
        print(f"no pages built: they need every chapter, and {', '.join(missing(profile))} have not been run; `make book` does both")
        return 0
    target = stage(profile)
    builder = Path(sys.executable).with_name("jupyter-book")
    words = ["build", "-W", "-n", "--keep-going", "-q", "--path-output", str(ROOT), str(target.relative_to(ROOT))]
    done = subprocess.run([builder, *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout + done.stderr)
    else:
        print("open _build/html/index.html")
    return done.returncode
