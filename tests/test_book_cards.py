"""Run cards are written whole, hold what is needed to judge them, and refuse what they cannot hold."""

import json

import numpy as np
import pytest

from lib.book import cards


def save(folder, **kwargs):
    given = {
        "config": {"rate": 0.1},
        "seeds": [1, 2],
        "results": {"mass": np.array([0.1, 0.2])},
        "seconds": 1.23,
        "folder": folder,
    }
    return cards.save("x", **(given | kwargs))


def test_a_card_comes_back_with_its_provenance(tmp_path):
    save(tmp_path)
    card = cards.load("x", tmp_path)
    assert card["results"]["mass"] == [0.1, 0.2]
    assert card["seeds"] == [1, 2]
    assert {"commit", "date", "seconds", "host", "versions"} <= set(card["provenance"])


def test_nan_becomes_null_so_that_not_reached_is_not_a_number(tmp_path):
    save(tmp_path, results={"step": np.array([np.nan, 3.0])})
    assert cards.load("x", tmp_path)["results"]["step"] == [None, 3.0]


def test_nothing_but_the_card_is_left(tmp_path):
    save(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_missing_card_names_those_there_are(tmp_path):
    save(tmp_path)
    with pytest.raises(ValueError, match="no run card 'y'; there are: x"):
        cards.load("y", tmp_path)


def test_a_card_cut_short_is_named(tmp_path):
    path = save(tmp_path)
    path.write_text(path.read_text()[:50])
    with pytest.raises(ValueError, match="run card 'x' is not JSON"):
        cards.load("x", tmp_path)
    path.write_text(json.dumps({"name": "x"}))
    with pytest.raises(ValueError, match="lacks config, seeds"):
        cards.load("x", tmp_path)


def test_things_without_a_place_in_a_card_are_refused(tmp_path):
    with pytest.raises(ValueError, match="object"):
        save(tmp_path, results={"model": object()})
    assert not (tmp_path / "x.json").exists()


def test_no_card_holds_a_path():
    bad = [p.name for p in cards.FOLDER.glob("*.json") if '"/' in p.read_text()]
    assert bad == []


def test_the_compact_text_is_the_same_card():
    card = {"words": ["a, b ]", "[c"], "none": [], "numbers": [1.5, None, True, [2, 3]], "deep": {"x": [[0.1], [0.2, 0.3]]}}
    text = cards._text(card)
    assert json.loads(text) == card
    assert "[0.2, 0.3]" in text
