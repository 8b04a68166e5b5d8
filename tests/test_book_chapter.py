"""Chapters accept their parameters or refuse them by name; numbers for the prose are plain numbers or refused."""

import numpy as np
import pytest

from lib.book import chapter, records


def test_a_profile_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="profile = 'fast'; expected one of smoke, quick, paper"):
        chapter.begin("fast")
    with pytest.raises(ValueError, match="no value for profile paper"):
        chapter.pick("quick", smoke=1, quick=2)


def test_pick_gives_the_profiles_own_value():
    assert [chapter.pick(p, smoke=1, quick=2, paper=3) for p in ("smoke", "quick", "paper")] == [1, 2, 3]


def test_unknown_parameters_get_a_hint():
    with pytest.raises(ValueError, match=r"unknown parameter 'ratoi'.*Did you mean ratio"):
        chapter.refuse_unknown(["profile", "ratio"], ["profile", "ratoi"])


@pytest.mark.parametrize("value", [float("nan"), np.inf, np.zeros(3), [1.0, 2.0], None])
def test_say_refuses_what_is_not_one_finite_number(value):
    with pytest.raises(ValueError, match=r"say|records"):
        records.say("x", value)


def test_say_takes_numpy_and_rounds(monkeypatch):
    said = {}
    monkeypatch.setattr("myst_nb.glue", lambda name, value, display: said.update({name: value}))
    records.say("x", np.float64(0.123456789))
    records.say("n", np.int64(3))
    records.say("s", "words")
    assert said == {"x": 0.12346, "n": 3, "s": "words"}
    assert type(said["x"]) is float
    assert type(said["n"]) is int


def test_a_record_shows_and_carries_its_verdict(monkeypatch):
    monkeypatch.setattr("myst_nb.glue", lambda *a, **k: None)
    made = records.record("P1-CIRCUITS", theory=_met("P1-CIRCUITS"))
    bundle = made._repr_mimebundle_()
    assert bundle["text/plain"].startswith("P1-CIRCUITS: holds")
    assert "holds" in bundle["text/html"]
    assert bundle[records.MIME]["id"] == "P1-CIRCUITS"


def _met(claim_id):
    """Values far inside an at_most tolerance, in the shape that the ledger asks for."""
    from lib.book import claims

    names = list(claims.get(claim_id).tolerance)
    return 0.0 if names == [""] else dict.fromkeys(names, 0.0)


def test_a_record_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no side"):
        records.record("P1-CIRCUITS")


def test_a_final_semicolon_silences_a_cell_that_leaves_no_history():
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    shell = InteractiveShell()
    shell.input_transformers_post.append(chapter.quiet_semicolon)
    said = {}
    for cell in ("'loud'", "'quiet';", "'quiet';  \n"):
        with capture_output() as captured:
            shell.run_cell(cell, store_history=False)
        said[cell] = captured.stdout
    assert "loud" in said["'loud'"]
    assert [said["'quiet';"], said["'quiet';  \n"]] == ["", ""]
