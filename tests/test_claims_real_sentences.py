"""The claims about real sentences, on a miniature with the same structure: one pronoun and one verb that agree, and filler.

The miniature is learnt in seconds. The chapter's own numbers come from the run card, which the chapter checks by training part of it again.
"""

import numpy as np
import pytest

from lib.book import cards, claims
from lib.data.sentences import build
from lib.train import agreement, reading

LEVEL = 0.1
RATIOS = {"base": 1, "QK ×2": 2, "QK ×3": 3, "QK ×5": 5, "QK ×10": 10, "QK ×30": 30}


def miniature():
    random = np.random.default_rng(0)
    subjects = {"is": ["it", "he", "she"], "are": ["we", "they"]}
    heads = ["now and then", "today", "as the men say", "in good faith"]
    tails = ["old", "big and grey", "here with them all", "not so very young after all"]
    documents = []
    for _ in range(30):
        verbs = random.choice(["is", "are"], 12)
        documents.append(". ".join(f"{random.choice(heads)} {random.choice(subjects[v])} {v} {random.choice(tails)} now" for v in verbs))
    return build(documents, seed=1, words=40)


def histories(arms, stop, **changes):
    setting = agreement.Setting(arms=arms, seeds=(0, 1), batch=16, epochs=20, rate=1e-3, test_sentences=40,
                                shape={"positions": 20, "outputs": 2}, **changes)  # fmt: skip
    runs = agreement.train(miniature(), setting, stop=stop, looks=range(0, stop + 1, 2))
    return agreement.History.of(runs), reading.Experiment({"mini": agreement.summary(runs, (LEVEL,))}, "mini")


@pytest.fixture(scope="module")
def visible():
    return histories((*RATIOS, "OV ÷10", "embedding ×10"), stop=138)[1]


def judged(claim, value, scatter=None, seeds=None):
    return claims.judge(claim, {"pure": value}, {"pure": scatter} if scatter else None, seeds).verdict


def gain(experiment, arm):
    gains = experiment.gain("mass", arm, LEVEL)
    return {"mass_gain": gains.mean()}, {"mass_gain": gains.std(ddof=1)}, gains.size


@pytest.mark.claim("P1-SOTU-BASE")
def test_with_equal_rates_attention_stays_uniform_while_the_loss_falls(visible):
    lift = visible.at("mass", "base", LEVEL).mean() / visible.floor
    accuracy = visible.at("accuracy", "base", LEVEL).mean()
    assert judged("P1-SOTU-BASE", {"mass_over_uniform": lift, "accuracy": accuracy}) == "holds"


@pytest.mark.claim("P1-SOTU-QK")
def test_faster_query_and_key_put_more_attention_on_the_verb_at_equal_loss(visible):
    value, scatter, seeds = gain(visible, "QK ×10")
    value["accuracy_gap"] = abs(visible.gain("accuracy", "QK ×10", LEVEL).mean())
    assert judged("P1-SOTU-QK", value, scatter, seeds) == "holds"
    assert value["mass_gain"] > visible.floor  # far more than a trace


@pytest.mark.claim("P1-SOTU-OV")
def test_slower_value_and_output_put_more_attention_on_the_verb_at_equal_loss(visible):
    assert judged("P1-SOTU-OV", *gain(visible, "OV ÷10")) == "holds"
    assert gain(visible, "OV ÷10")[0]["mass_gain"] > visible.floor


@pytest.mark.claim("P1-SOTU-RATIO")
def test_attention_at_equal_loss_increases_with_every_step_of_the_ratio(visible):
    ratios, mass = visible.ratio_sweep("mass", LEVEL)
    assert ratios == list(RATIOS.values())
    assert judged("P1-SOTU-RATIO", {"mass": mass.mean(1).tolist()}) == "holds"


@pytest.mark.claim("P1-SOTU-EMB")
def test_faster_embedding_alone_does_not_do_it(visible):
    share = gain(visible, "embedding ×10")[0]["mass_gain"] / gain(visible, "QK ×10")[0]["mass_gain"]
    assert judged("P1-SOTU-EMB", {"share_of_qk_gain": share}) == "holds"


@pytest.mark.claim("P1-SOTU-MASKED")
def test_with_the_verb_hidden_faster_query_and_key_find_the_subject():
    _, masked = histories(("base", "QK ×10"), stop=80, verb_masked=True)
    assert masked.marked == "subject"
    assert judged("P1-SOTU-MASKED", *gain(masked, "QK ×10")) == "holds"


def test_reading_a_card_gives_the_same_numbers_as_reading_the_run(tmp_path):
    history, direct = histories(("base", "QK ×10"), stop=60)
    path = cards.save("mini", config={}, seeds=[0, 1], results={"mini": direct.raw}, seconds=1.0, folder=tmp_path)
    card = reading.Experiment(cards.load("mini", folder=path.parent)["results"], "mini")
    for moment in (LEVEL, 40, reading.END):
        np.testing.assert_allclose(card.at("mass", "QK ×10", moment), direct.at("mass", "QK ×10", moment), rtol=1e-3)
    np.testing.assert_allclose(card.at("mass", "base", LEVEL), history.at_loss("mass", LEVEL)[0].mean(-1), rtol=1e-5)
    assert list(reading.compare(history, card)["same as the card"]) == ["all", "all"]
    card.raw["history"]["mass"][1][0][2] *= 1.01
    with pytest.raises(ValueError, match=r"mass of arm 'QK ×10', seed 0, step 20 is .* older than the code"):
        reading.compare(history, card)
    loss, mass = card.path("base")
    assert (np.diff(loss, axis=1) <= 0).all()
    assert mass.shape == loss.shape == (2, len(card.step))
    assert card.linzen() == "These results were made without Linzen's sentences."
    with pytest.raises(ValueError, match=r"moment = 0.2; expected one of 0.1"):
        card.at("mass", "base", 0.2)
    with pytest.raises(ValueError, match=r"arm = 'QK ×3'"):
        card.at("mass", "QK ×3", LEVEL)


def test_spread_says_how_many_seeds_it_stands_on():
    assert reading.spread(np.array([1.0, 2.0, 3.0]), 1) == "2.0 ± 1.0"
    assert reading.spread(np.array([1.0, np.nan, 3.0]), 1) == "2.0 ± 1.4 (2 of 3)"
    assert reading.spread(np.array([np.nan])) == "–"
    assert [reading.name_of(m) for m in (0.1, 250, "end")] == ["loss 0.1", "step 250", "end"]
