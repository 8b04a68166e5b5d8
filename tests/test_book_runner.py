"""The runner on a small book of its own: what runs again, what is kept, what a failure leaves."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

from lib.book import depends, pairs
from lib.book.toc import ROOT

HEAD = """---
jupytext:
  formats: ipynb,md:myst
  text_representation: {extension: .md, format_name: myst}
kernelspec: {display_name: Python 3 (ipykernel), language: python, name: python3}
---

# Title

"""
PARAMETERS = '```{code-cell} ipython3\n:tags: [parameters]\n\nprofile = "quick"\nseeds = 0\n```\n\n'


def cell(source: str) -> str:
    return f"```{{code-cell}} ipython3\n{source}\n```\n\n"


def _answer_to_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Book:
    """A copy of `lib` with three small chapters."""

    def __init__(self, root: Path):
        self.root = root
        shutil.copytree(ROOT / "lib", root / "lib", ignore=shutil.ignore_patterns("__pycache__"))
        (root / "data/results").mkdir(parents=True)
        shutil.copy(ROOT / "data/claims.yml", root / "data/claims.yml")
        (root / "lib/one.py").write_text('"""One."""\n\nVALUE = 1\n')
        (root / "lib/two.py").write_text('"""Two."""\n\nVALUE = 2\n')
        (root / "_toc.yml").write_text("format: jb-book\nroot: index\nchapters:\n- file: chapters/one\n- file: chapters/two\n")
        (root / "chapters").mkdir()
        self.write("index", cell("print('index')"))
        self.write("chapters/one", cell("from lib import one\nprint(one.VALUE)"))
        self.write("chapters/two", cell("from lib import two\nprint(two.VALUE)"))

    def write(self, entry: str, cells: str, prose: str = "Words.\n\n") -> None:
        (self.root / f"{entry}.md").write_text(HEAD + prose + PARAMETERS + cells)

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "lib.book", *words]

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(self.root), "PYTHONUNBUFFERED": "1"}

    def run(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            self.command("run", *words),
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def start(self) -> subprocess.Popen:
        """Start a run that answers to Ctrl-C even when these tests were started in the background, where it is ignored."""
        return subprocess.Popen(
            self.command("run"), cwd=self.root, env=self.environment, stdout=subprocess.PIPE, text=True, preexec_fn=_answer_to_ctrl_c
        )

    def executed(self, name: str) -> Path:
        return self.root / "_build/executed/quick" / f"{name}.ipynb"

    def printed(self, name: str) -> str:
        cells = nbformat.read(self.executed(name), 4).cells
        return "".join(o.get("text", "") for c in cells if c.cell_type == "code" for o in c.outputs).strip()


@pytest.fixture
def book(tmp_path) -> Book:
    return Book(tmp_path)


def test_a_chapter_runs_again_only_when_its_own_inputs_change(book):
    first = book.run()
    assert first.count(" ran,") == 3
    assert "[3/3]" in first
    assert book.run().count("unchanged") == 3

    (book.root / "lib/two.py").write_text('"""Two."""\n\nVALUE = 22\n')
    again = book.run()
    assert "two ran" in again
    assert again.count("unchanged") == 2
    assert book.printed("two") == "22"

    book.write("chapters/one", cell("from lib import one\nprint(one.VALUE)"), prose="Better words.\n\n")
    assert book.run().count("unchanged") == 3
    assert "Better words." in book.executed("one").read_text()
    assert book.printed("one") == "1"


def test_a_failing_chapter_stops_neither_the_others_nor_hides(book):
    book.run()
    book.write(
        "chapters/one",
        cell("kept = 'partial'\nprint(kept)") + cell("from lib import one\nraise ValueError('the value was 7')"),
    )
    page = book.root / "_build/html/chapters/one.html"
    page.parent.mkdir(parents=True)
    page.write_text("old")
    (book.root / "lib/two.py").write_text('"""Two."""\n\nVALUE = 3\n')
    said = book.run(code=1)
    assert "one FAILED" in said
    assert "cell 3" in said
    assert "ValueError: the value was 7" in said
    assert "two ran" in said
    assert not book.executed("one").exists(), "a stale notebook must not be built"
    assert not page.exists(), "a stale page must not be read"
    assert "partial" in (book.root / "_build/executed/quick/one.failed.ipynb").read_text()
    staged = subprocess.run(book.command("build"), cwd=book.root, env=book.environment, capture_output=True, text=True)
    assert staged.returncode == 1
    assert "one has not been run" in staged.stderr


def test_a_chapter_that_cannot_be_read_fails_like_any_other(book):
    book.run()
    book.write("chapters/one", cell("this is no python"))
    (book.root / "lib/two.py").write_text('"""Two."""\n\nVALUE = 3\n')
    said = book.run(code=1)
    assert "one FAILED" in said
    assert "SyntaxError" in said
    assert "two ran" in said
    assert not book.executed("one").exists()


def test_unknown_parameters_are_refused_with_the_known_ones(book):
    said = book.run("--only", "one", "-p", "seds=3", code=1)
    assert "unknown parameter 'seds'; this chapter takes profile, seeds. Did you mean seeds?" in said
    assert book.run("--only", "one", "-p", "seeds=3").count(" ran,") == 1


def test_an_unknown_chapter_is_refused_with_the_known_ones(book):
    done = subprocess.run(book.command("run", "--only", "three"), cwd=book.root, env=book.environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no chapter called three; _toc.yml has index, one, two" in done.stderr


@pytest.mark.parametrize("how, code", [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_an_interrupted_run_goes_on_where_it_was(book, how, code):
    book.write(
        "chapters/two",
        cell("import time, pathlib\nif not pathlib.Path('go').exists():\n    time.sleep(60)\nprint('done')"),
    )
    process = book.start()
    for line in process.stdout:
        if "one ran" in line:
            break
    time.sleep(0.3)
    process.send_signal(how)
    begun = time.monotonic()
    assert process.wait(20) == code
    assert time.monotonic() - begun < 10
    assert book.executed("one").exists()
    assert not book.executed("two").exists()
    (book.root / "chapters/go").touch()
    again = book.run()
    assert "one unchanged" in again
    assert "two ran" in again
    assert not list(book.executed("two").parent.glob("*.work.ipynb"))


def test_other_profiles_are_kept_apart_and_get_their_parameter(book):
    book.write("chapters/one", cell("print(profile)"))
    book.run("--only", "one")
    book.run("--only", "one", "--profile", "smoke")
    assert book.printed("one") == "quick"
    assert "smoke" in (book.root / "_build/executed/smoke/one.ipynb").read_text()


def test_modules_are_followed_through_lib(book):
    (book.root / "lib/one.py").write_text(
        '"""One."""\n\n\ndef f():\n    """Late import."""\n    from lib.two import VALUE\n\n    return VALUE\n'
    )
    names = [p.name for p in depends.modules("from lib import one", book.root)]
    assert {"one.py", "two.py", "__init__.py"} == set(names)


def test_inputs_name_the_ledger_entries_and_cards_a_chapter_uses():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x = 'P1-CIRCUITS'")])
    found = depends.inputs(pairs.clean(notebook), {}, "quick")
    assert list(found["claims"]) == ["P1-CIRCUITS"]
    assert found["cards"] == {}
    other = depends.inputs(pairs.clean(notebook), {"seeds": 3}, "quick")
    assert depends.key(other) != depends.key(found)
    assert json.dumps(found, default=str)


@pytest.mark.parametrize("where", ["root", "elsewhere"])
def test_a_chapter_runs_alone_with_plain_papermill(tmp_path, where):
    out = tmp_path / "out.ipynb"
    command = [
        sys.executable,
        "-m",
        "papermill",
        str(ROOT / "chapters/p1_two_circuits.ipynb"),
        str(out),
        "-p",
        "profile",
        "smoke",
        "-p",
        "seeds",
        "1",
    ]
    done = subprocess.run(command, cwd=ROOT if where == "root" else tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert out.exists()


def test_plain_papermill_refuses_a_misspelt_parameter(tmp_path):
    command = [
        sys.executable,
        "-m",
        "papermill",
        str(ROOT / "chapters/p1_two_circuits.ipynb"),
        str(tmp_path / "o.ipynb"),
        "-p",
        "profil",
        "smoke",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "unknown parameter 'profil'" in done.stderr
