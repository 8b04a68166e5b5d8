"""Real sentences from Linzen's agreement corpus (dev and test), for evaluation only; optional, never needed to build.

The files are not part of this project. `BOOK_DATA_DIR` names a folder that holds `sva_linzen_dev.tsv.gz`,
`sva_linzen_test.tsv.gz` (columns sentence, subj_idx, verb_idx, verb_pos, verb, inflected_verb) and `SHA256SUMS`.
Positions in these files count words from 0, punctuation included (checked on load: at verb_idx stands the verb,
or its tag where the verb is rare).
"""

import hashlib
import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

from lib.data.sentences import VERBS, Sentences, encode, words_of

VARIABLE = "BOOK_DATA_DIR"
FILES = ("sva_linzen_dev.tsv.gz", "sva_linzen_test.tsv.gz")
COLUMNS = ("sentence", "subj_idx", "verb_idx", "verb_pos", "verb", "inflected_verb")
HOW = (
    f"Set {VARIABLE} to a folder with {' and '.join(FILES)} and their SHA256SUMS "
    "(real sentences of Linzen et al., as tab-separated values) to evaluate on them."
)


@dataclass(frozen=True)
class Linzen:
    """Sentences that the model's vocabulary of verbs can judge, and how many each rule left.

    Attributes:
        sentences: as `lib.data.sentences.Sentences`, subject known in all.
        counts: rule -> sentences that remained after it, in order.
    """

    sentences: Sentences
    counts: dict[str, int]


def folder() -> Path | None:
    """The folder that `BOOK_DATA_DIR` names, or None when it is unset or empty."""
    value = os.environ.get(VARIABLE, "")
    return Path(value).expanduser() if value else None


def verify(path: Path) -> None:
    """Compare a file with the SHA256SUMS beside it.

    Raises:
        ValueError: the file, the list or its line is missing, or the sums differ; the message names the file.
    """
    sums = path.with_name("SHA256SUMS")
    for needed in (sums, path):
        if not needed.is_file():
            raise ValueError(f"linzen: {needed.name} is not in the folder that {VARIABLE} names. {HOW}")
    lines = [line.split(maxsplit=1) for line in sums.read_text().splitlines() if line.strip()]
    wanted = {line[-1].strip().lstrip("*"): line[0] for line in lines}
    if path.name not in wanted:
        raise ValueError(f"linzen: SHA256SUMS has no line for {path.name}; expected one. Fetch the list that belongs to the files.")
    got = hashlib.sha256(path.read_bytes()).hexdigest()
    if got != wanted[path.name]:
        raise ValueError(
            f"linzen: {path.name} has SHA256 {got[:12]}…, expected {wanted[path.name][:12]}…; "
            "the file is damaged or cut short. Fetch it again."
        )


def _rows(path: Path) -> list[dict]:
    """One file through the csv builder of `datasets`, in a cache that is thrown away."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress not found")  # said in notebooks without widgets; no bar is wanted here
        import datasets

    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with tempfile.TemporaryDirectory() as cache:
            table = datasets.load_dataset(
                "csv", data_files=str(path), split="train", delimiter="\t", quoting=3, cache_dir=cache, keep_in_memory=True
            )
            rows = table.to_list()
    except Exception as error:  # the builder wraps whatever it met; say which file it was
        raise ValueError(f"linzen: {path.name} can't be read as tab-separated values ({error}); fetch it again.") from error
    finally:
        if not shown:
            datasets.enable_progress_bars()
    missing = [name for name in COLUMNS if not rows or name not in rows[0]]
    if missing:
        raise ValueError(f"linzen: {path.name} lacks {', '.join(missing)}; expected the columns {', '.join(COLUMNS)} and at least one row.")
    return rows


def _cleaned(words: list[str], positions: tuple[int, int]) -> tuple[list[str], list[int]] | None:
    """Words without punctuation, and the two positions moved along; None when one of them held no word."""
    kept: list[str] = []
    moved = [-1, -1]
    for i, word in enumerate(words):
        pieces = words_of(word)
        for which, position in enumerate(positions):
            if i == position and pieces:
                moved[which] = len(kept)
        kept += pieces
    return None if min(moved) < 0 else (kept, moved)


def load(vocabulary: tuple[str, ...]) -> Linzen | None:
    """Dev and test sentences that a model trained on `lib.data.sentences` can judge.

    Args:
        vocabulary: of the corpus that the model was trained on.

    Returns:
        `Linzen`, or None when `BOOK_DATA_DIR` is unset (`HOW` says how to get the data).

    Raises:
        ValueError: a file is missing, damaged or cut short, or its positions don't point at the verb; the file is named.
    """
    where = folder()
    if where is None:
        return None
    every = []
    for name in FILES:
        verify(where / name)
        rows = _rows(where / name)
        for i, row in enumerate(rows):
            words = row["sentence"].split()
            there = words[row["verb_idx"]] if row["verb_idx"] < len(words) else None
            if there not in (row["verb"], row["verb"].lower(), row["verb_pos"]):  # rare verbs stand as their tag in the sentence
                raise ValueError(
                    f"linzen: {name}, row {i + 1}: verb_idx {row['verb_idx']} does not point at {row['verb']!r}; positions count from 0."
                )
        every += rows
    counts = {"dev and test": len(every)}
    known = [row for row in every if row["verb"].lower() in VERBS]
    counts["a verb that the model knows"] = len(known)
    cleaned = [_cleaned(row["sentence"].lower().split(), (row["subj_idx"], row["verb_idx"])) for row in known]
    fits = [pair for pair in cleaned if pair is not None and 5 <= len(pair[0]) <= 40]
    counts["5 to 40 words"] = len(fits)
    single = [(words, at) for words, at in fits if sum(word in VERBS for word in words) == 1]
    counts["no second verb of the eight"] = len(single)
    sentences = encode([w for w, _ in single], [at[1] for _, at in single], vocabulary, subjects=[at[0] for _, at in single])
    return Linzen(sentences, counts)
