"""Linzen's sentences: positions, what remains, and files that are missing, damaged or cut short."""

import gzip
import hashlib

import pytest

from lib.data import linzen
from lib.data.sentences import SPECIAL

HEAD = "sentence\tsubj_idx\tverb_idx\tverb_pos\tverb\tinflected_verb\n"
ROWS = [
    "the keys to the , ahem , cabinet are on the table .\t1\t8\tVBP\tare\tis",  # kept; punctuation before the verb
    "the NNS of the world is small and round .\t1\t5\tVBZ\tis\tare",  # kept
    "the dog that barks VBZ at night too .\t1\t4\tVBZ\thowls\thowl",  # another verb, as its tag
    "that is what the keys are for today .\t4\t5\tVBP\tare\tis",  # a second verb of the eight
    "it is so .\t0\t1\tVBZ\tis\tare",  # too short
]


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A folder such as BOOK_DATA_DIR names, with made-up sentences."""

    def write(rows=ROWS, head=HEAD, cut=None):
        lines = []
        for name in linzen.FILES:
            content = gzip.compress((head + "\n".join(rows) + "\n").encode(), mtime=0)
            (tmp_path / name).write_bytes(content[:cut])
            lines.append(f"{hashlib.sha256(content[:cut]).hexdigest()}  {name}")
        (tmp_path / "SHA256SUMS").write_text("\n".join(lines) + "\n")
        return tmp_path

    monkeypatch.setenv(linzen.VARIABLE, str(tmp_path))
    write()
    return write


VOCABULARY = (*SPECIAL, "the", "are", "is", "keys", "cabinet")


def test_without_the_folder_there_is_nothing_and_a_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.delenv(linzen.VARIABLE, raising=False)
    assert linzen.load(VOCABULARY) is None
    monkeypatch.setenv(linzen.VARIABLE, "")
    assert linzen.load(VOCABULARY) is None
    assert linzen.VARIABLE in linzen.HOW
    assert linzen.FILES[0] in linzen.HOW


def test_positions_follow_their_words_when_punctuation_goes(data):
    real = linzen.load(VOCABULARY)
    assert list(real.counts.values()) == [10, 8, 6, 4]  # two files with the same rows
    first, second = real.sentences.text[:2]
    assert first == ("the", "keys", "to", "the", "ahem", "cabinet", "are", "on", "the", "table")
    assert [first[real.sentences.verb[0]], first[real.sentences.subject[0]]] == ["are", "keys"]
    assert [second[real.sentences.verb[1]], second[real.sentences.subject[1]]] == ["is", "nns"]
    assert real.sentences.label.tolist() == [1, 0, 1, 0]


def test_positions_that_count_from_one_are_refused(data):
    data(rows=["the keys to the cabinet are on the table .\t2\t6\tVBP\tare\tis"])
    with pytest.raises(ValueError, match=r"sva_linzen_dev.tsv.gz, row 1: verb_idx 6 does not point at 'are'; positions count from 0"):
        linzen.load(VOCABULARY)


def test_damaged_file_is_named(data):
    path = data() / linzen.FILES[1]
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"sva_linzen_test.tsv.gz has SHA256 .* damaged or cut short"):
        linzen.load(VOCABULARY)


def test_truncated_file_with_a_matching_sum_is_named(data):
    data(cut=60)
    with pytest.raises(ValueError, match=r"sva_linzen_dev.tsv.gz can't be read"):
        linzen.load(VOCABULARY)


def test_file_without_its_columns_is_named(data):
    data(head=HEAD.replace("verb_idx", "verb_index"))
    with pytest.raises(ValueError, match=r"sva_linzen_dev.tsv.gz lacks verb_idx"):
        linzen.load(VOCABULARY)


@pytest.mark.parametrize("name", [linzen.FILES[0], "SHA256SUMS"])
def test_missing_file_is_named(data, name):
    (data() / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is not in the folder"):
        linzen.load(VOCABULARY)


def test_file_without_a_sum_is_named(data):
    folder = data()
    (folder / "SHA256SUMS").write_text("0123  other.txt\n")
    with pytest.raises(ValueError, match=r"SHA256SUMS has no line for sva_linzen_dev.tsv.gz"):
        linzen.load(VOCABULARY)
