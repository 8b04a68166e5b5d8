"""pytest options of the whole project, and nbval by replay.

`pytest --nbval --nbval-replay DIR chapters` compares the references with notebooks that papermill has just executed,
instead of executing every chapter a second time: nbval's comparison, sanitiser, tags and reports are its own; only its kernel is
one that answers from the executed notebook. Without the option the same command is plain nbval.
"""

from collections import deque
from pathlib import Path

import nbformat
import pytest

# Pictures are not kept in references, and nbval demands the same kinds of output on both sides.
SKIPPED_KINDS = ("image/png", "image/svg+xml", "image/jpeg", "application/papermill.record/image/png")


class ReplayKernel:
    """What nbval asks of a kernel, answered from an executed notebook."""

    def __init__(self, path: Path):
        if not path.exists():
            raise FileNotFoundError(f"nbval replay: {path.name} has not been executed; run `make book` first")
        self.cells = deque(cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code")
        self.messages: deque = deque()
        self.number = 0

    def execute_cell_input(self, source, allow_stdin=None):
        if not self.cells:
            raise RuntimeError("the executed notebook has fewer cells than the reference: run the chapter again")
        cell, self.number = self.cells.popleft(), self.number + 1
        if cell.source.strip() != source.strip():
            raise RuntimeError(f"cell {self.number} differs from the executed notebook: run the chapter again")
        if cell.execution_count is None:
            raise RuntimeError(f"cell {self.number} was not executed")
        contents = [(output.output_type, {"metadata": {}, **output}) for output in cell.outputs]
        contents.append(("status", {"execution_state": "idle"}))
        self.messages = deque(
            {"msg_type": kind, "content": content, "parent_header": {"msg_id": self.number}} for kind, content in contents
        )
        return self.number

    def get_message(self, stream, timeout=None):
        return self.messages.popleft()

    def is_alive(self):
        return True

    def await_reply(self, msg_id, timeout=None):
        return {}

    await_idle = await_reply

    def interrupt(self):
        """Nothing runs."""

    stop = interrupt


def pytest_addoption(parser):
    group = parser.getgroup("book")
    group.addoption(
        "--nbval-replay",
        default=None,
        metavar="DIR",
        help="compare with executed notebooks in DIR instead of executing",
    )
    group.addoption("--html-root", default="_build/html", help="built pages to check")


def pytest_configure(config):
    import nbval.plugin as nbval

    nbval.IPyNbFile.__init__ = _with_skipped_kinds(nbval.IPyNbFile.__init__)
    if config.getoption("--nbval-replay"):

        def setup(self):
            self.kernel = ReplayKernel(Path(config.getoption("--nbval-replay")) / self.path.name)
            self.setup_sanitize_files()

        nbval.IPyNbFile.setup = setup


def _with_skipped_kinds(init):
    def __init__(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.skip_compare = tuple(self.skip_compare) + SKIPPED_KINDS

    return __init__


@pytest.fixture
def html_root(request) -> Path:
    return Path(request.config.getoption("--html-root")).resolve()
