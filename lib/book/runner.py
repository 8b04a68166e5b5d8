"""Run the chapters: papermill, two at a time, only those whose inputs changed, losing nothing when interrupted.

For each chapter `_build/executed/<profile>/` holds `<slug>.ipynb` (finished), `<slug>.key` (what it depends on) and, after
a failure, `<slug>.failed.ipynb`. A chapter is written under a working name and moved into place when done, so a kill at
any moment leaves either a finished chapter or none.
"""

import base64
import json
import os
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import nbformat

from lib.book import chapter, depends, pairs
from lib.book.toc import ROOT, chapters, select, slug

COVER = ROOT / "docs" / "cover.png"
CELL_SECONDS = 1800  # a cell at profile `paper` may take its time
_PARSING = threading.Lock()  # ast.parse in two threads at once can fail with a SystemError (CPython 3.11)
HEARTBEAT = 60.0  # seconds after which a silent terminal says what is still running
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "NUMBA_NUM_THREADS")


@dataclass(frozen=True)
class Outcome:
    """What became of a chapter: `state` is ran, unchanged or FAILED."""

    entry: str
    state: str
    seconds: float
    message: str = ""


def folder(profile: str) -> Path:
    """Where the executed notebooks of a profile lie."""
    return ROOT / "_build" / "executed" / profile


def _say(line: str) -> None:
    print(line, flush=True)


def _error_text(error: BaseException) -> str:
    """Chapter, cell and the error's own last lines, without the frames of the machinery."""
    from papermill.exceptions import PapermillExecutionError

    if isinstance(error, PapermillExecutionError):
        last = "\n".join(str(error.evalue).splitlines()[-6:])
        source = "\n".join(f"    | {line}" for line in str(error.source).splitlines()[:12])
        return f"cell {error.exec_count}:\n{source}\n    {error.ename}: {last}"
    if type(error).__name__ == "CellTimeoutError":
        return f"a cell took longer than {CELL_SECONDS} s"
    return f"{type(error).__name__}: {error}"


def _execute(entry: str, out: Path, parameters: dict) -> None:
    """Run one chapter into `out`; the caller sees papermill's exceptions."""
    import papermill

    name = slug(entry)
    source = out / f"{name}.source.work.ipynb"
    work = out / f"{name}.work.ipynb"
    pairs.write(pairs.read_source(entry), source)
    try:
        papermill.execute_notebook(
            source, work, parameters=parameters, kernel_name="python3", cwd=str((ROOT / entry).parent), progress_bar=False,
            execution_timeout=CELL_SECONDS, record_timing=False, extra_arguments=["--IPKernelApp.log_level=50"],
        )  # fmt: skip
        executed = nbformat.read(work, 4)
        pairs.write(pairs.clean(executed), out / f"{name}.ipynb")
    except BaseException:
        if work.exists():
            work.replace(out / f"{name}.failed.ipynb")
        raise
    finally:
        source.unlink(missing_ok=True)
        work.unlink(missing_ok=True)


def _forget(entry: str, out: Path) -> None:
    """Remove a chapter's results and pages first: a stale notebook must be neither built nor compared."""
    name = slug(entry)
    stale = [out / f"{name}.ipynb", out / f"{name}.key", out / f"{name}.failed.ipynb"]
    stale += [ROOT / "_build/book" / f"{entry}.ipynb", ROOT / "_build/html" / f"{entry}.html"]
    for path in stale:
        path.unlink(missing_ok=True)


def _fresh(entry: str, out: Path, found: dict) -> bool:
    """Whether the executed notebook is there and was made from just these inputs."""
    done, stamp = out / f"{slug(entry)}.ipynb", out / f"{slug(entry)}.key"
    if not (done.exists() and stamp.exists()):
        return False
    return json.loads(stamp.read_text())["key"] == depends.key(found)


def _refresh_prose(entry: str, out: Path) -> None:
    """Put the stored outputs under the chapter's present prose: an edit of a sentence runs nothing."""
    path = out / f"{slug(entry)}.ipynb"
    pairs.write(pairs.with_outputs(pairs.read_source(entry), nbformat.read(path, 4)), path)


def _why(entry: str, out: Path, found: dict) -> str:
    """Which inputs changed since the last run, for the line that says a chapter starts."""
    stamp = out / f"{slug(entry)}.key"
    if not stamp.exists():
        return "first run"
    old = json.loads(stamp.read_text()).get("inputs", {})
    flat_old, flat_new = _flat(old), _flat(json.loads(json.dumps(found, default=str)))
    changed = sorted({name for name in flat_old.keys() | flat_new.keys() if flat_old.get(name) != flat_new.get(name)})
    return ", ".join(changed[:3]) + (" …" if len(changed) > 3 else "") or "output missing"


def _flat(found: dict) -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in found.items():
        if isinstance(value, dict):
            flat |= {str(key): repr(item) for key, item in value.items()}
        else:
            flat[name] = repr(value)
    return flat


class _Lines:
    """The running commentary: one line when a chapter starts, one when it ends, and a sign of life in between."""

    def __init__(self, total: int):
        self.total, self.started, self.lock = total, 0, threading.Lock()
        self.running: dict[str, float] = {}

    def start(self, entry: str, why: str) -> None:
        with self.lock:
            self.started += 1
            self.running[entry] = time.monotonic()
            _say(f"[{self.started}/{self.total}] {slug(entry)} starts ({why})")

    def end(self, outcome: Outcome) -> None:
        with self.lock:
            if outcome.state == "unchanged":
                self.started += 1
                _say(f"[{self.started}/{self.total}] {slug(outcome.entry)} unchanged")
                return
            self.running.pop(outcome.entry, None)
            _say(f"      {slug(outcome.entry)} {outcome.state}, {outcome.seconds:.1f} s")
            if outcome.message:
                _say(f"  {slug(outcome.entry)}, {outcome.message}")

    def alive(self) -> None:
        with self.lock:
            now = time.monotonic()
            for entry, since in self.running.items():
                _say(f"      {slug(entry)} still running, {now - since:.0f} s")


def _one(entry: str, out: Path, profile: str, extra: dict, lines: _Lines, others: dict[str, str] | None) -> Outcome:
    begun = time.monotonic()
    try:
        with _PARSING:
            source = pairs.read_source(entry)
            given = ({} if profile == "quick" else {"profile": profile}) | extra
            found = depends.inputs(source, given, profile, others)
            fresh = _fresh(entry, out, found)
            if fresh:
                _refresh_prose(entry, out)
        outcome = Outcome(entry, "unchanged", 0.0) if fresh else _run(entry, out, source, given, found, lines)
    except Exception as error:
        for kind in ("ipynb", "key"):
            (out / f"{slug(entry)}.{kind}").unlink(missing_ok=True)
        outcome = Outcome(entry, "FAILED", time.monotonic() - begun, _error_text(error))
    lines.end(outcome)
    return outcome


def _run(entry: str, out: Path, source: nbformat.NotebookNode, given: dict, found: dict, lines: _Lines) -> Outcome:
    """Execute one chapter and note what it depends on; errors are the caller's to report."""
    lines.start(entry, _why(entry, out, found))
    _forget(entry, out)
    begun = time.monotonic()
    with _PARSING:
        known = chapter.assigned("\n".join(c.source for c in source.cells if "parameters" in c.metadata.get("tags", [])))
    chapter.refuse_unknown(known, list(given))
    _execute(entry, out, given)
    seconds = time.monotonic() - begun
    stamp = {"key": depends.key(found), "seconds": round(seconds, 1), "inputs": json.loads(json.dumps(found, default=str))}
    (out / f"{slug(entry)}.key").write_text(json.dumps(stamp))
    return Outcome(entry, "ran", seconds)


def _key_of(entry: str, out: Path) -> str:
    stamp = out / f"{slug(entry)}.key"
    return json.loads(stamp.read_text())["key"] if stamp.exists() else "none"


def run(profile: str = "quick", only: str | None = None, jobs: int = 2, parameters: dict | None = None) -> int:
    """Run what needs running.

    Args:
        profile: smoke, quick or paper.
        only: slugs, separated by commas; everything when empty.
        jobs: chapters at a time; the cores are shared out between them.
        parameters: further papermill parameters for the chapters run.

    Returns:
        0, or 1 when a chapter failed (the others were run all the same).
    """
    chapter.pick(profile, smoke=0, quick=0, paper=0)
    out = folder(profile)
    out.mkdir(parents=True, exist_ok=True)
    for left in out.glob("*.work.ipynb"):
        left.unlink()
    threads = str(max(1, (os.cpu_count() or 1) // max(jobs, 1)))
    for name in THREADS:  # more threads than cores make everything two to three times slower
        os.environ.setdefault(name, threads)
    entries = select(only)
    last = [entry for entry in entries if pairs.needs_all(entry)]
    first = [entry for entry in entries if entry not in last]
    lines = _Lines(len(entries))
    pool = ThreadPoolExecutor(max_workers=max(jobs, 1))
    outcomes: list[Outcome] = []
    try:
        for batch, waits in ((first, False), (last, True)):
            # A chapter that reads the others' results depends on all of them that do not do so themselves.
            others = {e: _key_of(e, out) for e in chapters() if not pairs.needs_all(e)} if waits else None
            todo: set[Future] = {pool.submit(_one, e, out, profile, parameters or {}, lines, others) for e in batch}
            while todo:
                done, todo = wait(todo, timeout=HEARTBEAT, return_when=FIRST_COMPLETED)
                outcomes += [future.result() for future in done]
                if not done:
                    lines.alive()
    except KeyboardInterrupt:
        # Kernels run in sessions of their own and end when their parent does; a normal exit would wait for them.
        _say("\ninterrupted: finished chapters are kept, the next run goes on from here")
        sys.stdout.flush()
        os._exit(130)
    failed = [outcome for outcome in outcomes if outcome.state == "FAILED"]
    if failed:
        where = f"_build/executed/{profile}"
        _say(
            f"{len(failed)} of {len(entries)} chapters failed: "
            + ", ".join(f"{slug(o.entry)} ({where}/{slug(o.entry)}.failed.ipynb)" for o in failed)
        )
    return 1 if failed else 0


def accept() -> list[str]:
    """Make the executed notebooks of profile quick the new references; returns the chapters whose reference changed."""
    changed = []
    for entry in chapters():
        path = folder("quick") / f"{slug(entry)}.ipynb"
        if not path.exists():
            raise FileNotFoundError(f"accept: {slug(entry)} has not been run at profile quick; run `make book` first.")
        notebook = pairs.with_outputs(pairs.read_source(entry), nbformat.read(path, 4))
        if entry == "index":
            _save_cover(notebook)
        if pairs.write(pairs.reference(notebook), ROOT / f"{entry}.ipynb"):
            changed.append(slug(entry))
    return changed


def _save_cover(index: nbformat.NotebookNode) -> None:
    """Keep the index page's first picture for the README."""
    outputs = (output for cell in index.cells for output in cell.get("outputs", []))
    image = next((output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})), None)
    if image is None:
        raise ValueError("accept: the index page shows no picture; its first one is the README's cover.")
    COVER.parent.mkdir(exist_ok=True)
    COVER.write_bytes(base64.b64decode(image))
