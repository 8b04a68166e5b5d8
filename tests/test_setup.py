"""What a newcomer installs and types is what the files say."""

import re
import subprocess
import tomllib

import pytest

from lib.book.toc import ROOT


def pins(name: str) -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    parts = (line.split("==") for line in lines if line)
    return {re.sub(r"[-_.]+", "-", package.lower()): version for package, version in parts}


def test_every_requirement_is_pinned_and_the_constraints_agree():
    direct, everything = pins("requirements.txt"), pins("constraints.txt")
    assert {name: version for name, version in direct.items() if everything.get(name) != version} == {}
    assert len(everything) > len(direct)


def test_no_pin_names_a_local_build():
    """`torch==2.13.0+cpu` could not be installed from most indexes."""
    assert [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "+" in line or "@" in line] == []


def test_the_book_builder_is_of_the_line_that_reads_our_configuration():
    assert pins("requirements.txt")["jupyter-book"].startswith("1.")


def test_make_help_lists_every_target_meant_for_people():
    said = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True).stdout
    named = {line.split()[0] for line in said.splitlines() if line and not line.startswith("options")}
    assert {"book", "test", "setup", "accept", "nbval", "claims", "bench", "clean", "help"} <= named


def test_packages_are_found_with_their_data():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["packages"]["find"]["include"] == ["lib", "lib.*"]
    assert (ROOT / "lib/book/book.mplstyle").exists()


TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()


@pytest.mark.skipif(not TRACKED, reason="not a git checkout: tracked files cannot be listed")
def test_no_tracked_file_is_data_or_names_a_machine():
    heavy = [name for name in TRACKED if (ROOT / name).exists() and (ROOT / name).stat().st_size > 1_000_000]
    assert heavy == []
    machine = re.compile(r"(^|[^A-Za-z0-9_.])/(work|tmp|root|home)/")
    texts = {name: (ROOT / name).read_text() for name in TRACKED if (ROOT / name).exists() and not name.endswith(".png")}
    assert [
        name for name, text in texts.items() if machine.search(text) and name not in ("tests/test_setup.py", "tests/test_chapters.py")
    ] == []


def test_the_readme_s_python_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_the_readme_s_commands_name_chapters_and_targets_that_exist():
    text = (ROOT / "README.md").read_text()
    for path in re.findall(r"chapters/\w+\.ipynb", text):
        assert (ROOT / path).exists(), path
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z]+)", text)) <= targets
