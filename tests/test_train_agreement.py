"""Training many agreement models side by side: equal to one at a time with torch's own optimiser, resumable, robust."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lib.data.sentences import build
from lib.models import agreement as model
from lib.train import agreement, groups

NOUNS = {"is": ["cat", "dog", "tree", "house", "king"], "are": ["cats", "dogs", "trees", "houses", "kings"]}
SHAPE = {"d_model": 12, "heads": 2, "d_head": 8, "positions": 41}


def small_corpus():
    """Documents of made-up sentences; the noun and the verb agree."""
    random = np.random.default_rng(0)
    documents = []
    for _ in range(30):
        lines = []
        for _ in range(12):
            verb = random.choice(["is", "are"])
            tail = random.choice(["old", "big and grey", "here today with them", "not so very young after all"])
            lines.append(f"the {random.choice(['nice', 'small', 'tall'])} {random.choice(NOUNS[verb])} {verb} {tail} now")
        documents.append(". ".join(lines))
    return build(documents, seed=1, words=40)


@pytest.fixture(scope="module")
def corpus():
    return small_corpus()


def setting(**changes):
    small = {"arms": ("base", "QK ×10", "OV ÷10"), "seeds": (0, 1), "batch": 8, "test_sentences": 20, "shape": SHAPE, "rate": 3e-3}
    return agreement.Setting(**(small | changes))


def plain_training(corpus, config, arm, seed, steps):
    """One model at a time: autograd through everything, torch.optim.AdamW in its plain loop, its own schedule."""
    start = model.initial(model.Shape(len(corpus.vocabulary), **SHAPE), [seed])
    p = {name: stack[0].clone().requires_grad_() for name, stack in start.items()}
    order = agreement.batches(len(corpus.train), seed, config.batch, config.epochs)
    rates = config.rates(arm)
    optimiser = torch.optim.AdamW(
        [{"params": [p[n]], "lr": rates[groups.circuit_of(n)]} for n in p if n != "b_K"], weight_decay=config.weight_decay, foreach=False
    )
    rise = config.warm_up * len(order)
    lr = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda s: s / rise if s < rise else (1 + math.cos(math.pi * (s - rise) / (len(order) - rise))) / 2
    )
    for index in order[:steps]:
        optimiser.zero_grad(set_to_none=False)
        tokens, length, label = (torch.from_numpy(getattr(corpus.train, n)[index]) for n in ("tokens", "length", "label"))
        logits, _ = model.forward({n: v[None] for n, v in p.items()}, tokens[None], length[None])
        torch.nn.functional.cross_entropy(logits[0], label).backward()
        for v in p.values():  # torch skips a parameter without gradient; with the stacks it counts as zero, as it should
            v.grad = torch.zeros_like(v) if v.grad is None else v.grad
        optimiser.step()
        lr.step()
    return {name: value.detach() for name, value in p.items()}


def test_models_side_by_side_equal_single_models_under_torch_adamw(corpus):
    config = setting()
    runs = agreement.train(corpus, config, stop=40, looks=[])
    for i, (arm, seed) in enumerate(runs.order):
        for name, want in plain_training(corpus, config, arm, seed, 40).items():
            torch.testing.assert_close(runs.parameters[name][i], want, rtol=0, atol=1e-12, msg=lambda t, n=name, a=arm: f"{a} {n}: {t}")


def test_models_of_one_seed_see_the_same_batches_in_every_arm(corpus):
    runs = agreement.Runs(corpus, setting())
    per_arm = runs.stream.reshape(runs.total, 3, 2, -1)
    assert (per_arm == per_arm[:, :1]).all()
    assert (per_arm[:, 0, 0] != per_arm[:, 0, 1]).any()


def test_a_pass_visits_every_sentence_at_most_once_and_orders_differ():
    order = agreement.batches(50, seed=3, batch=8, epochs=2).reshape(2, 48)
    assert all(len(set(epoch)) == 48 for epoch in order)
    assert (order[0] != order[1]).any()
    with pytest.raises(ValueError, match=r"7 sentences don't fill a batch of 8"):
        agreement.batches(7, seed=0, batch=8, epochs=1)


def test_schedule_rises_to_one_and_ends_at_zero():
    factors = [agreement.schedule(s, 200, 0.1) for s in range(201)]
    assert factors[0] == 0
    assert factors[10] == pytest.approx(0.5)
    assert max(factors) == factors[20] == 1
    assert factors[110] == pytest.approx(0.5)
    assert factors[200] == pytest.approx(0, abs=1e-15)


def test_evaluations_are_dense_early_and_include_the_end():
    steps = agreement.evaluation_steps(1234)
    assert steps[:3] == [0, 5, 10]
    assert {500, 550, 1200, 1234} <= set(steps)
    assert 505 not in steps


def test_measured_numbers_equal_those_worked_out_sentence_by_sentence(corpus):
    runs = agreement.train(corpus, setting(), stop=30, looks=[])
    seen = runs.measure(runs.test)
    model_index = 3
    p = {name: stack[model_index][None] for name, stack in runs.parameters.items()}
    losses, masses, entropies = [], [], []
    for i in range(len(runs.test)):
        n = runs.test.length[i]
        logits, pattern = model.forward(p, torch.from_numpy(runs.test.tokens[i, :n])[None, None], torch.tensor([[n]]))
        losses.append(-logits.log_softmax(-1)[0, 0, runs.test.label[i]].item())
        masses.append(pattern[0, 0, :, runs.test.verb[i]].numpy())
        entropies.append((-(pattern * pattern.log()).sum(-1)[0, 0] / math.log(n)).numpy())
    assert seen.loss[model_index] == pytest.approx(np.mean(losses), rel=1e-10)
    np.testing.assert_allclose(seen.mass[model_index], np.mean(masses, 0), rtol=1e-10)
    np.testing.assert_allclose(seen.entropy[model_index], np.mean(entropies, 0), rtol=1e-10)
    plural = np.array(masses)[runs.test.label == 1]
    np.testing.assert_allclose(seen.mass_by_label[model_index, 1], plural.mean(0), rtol=1e-10)
    np.testing.assert_allclose(seen.probability_each[model_index], np.exp(-np.array(losses)), rtol=1e-10)


def test_mass_counts_only_sentences_whose_marked_word_is_known(corpus):
    runs = agreement.Runs(corpus, setting(arms=("base",), seeds=(0,)))
    position = np.full(len(runs.test), -1)
    position[2] = 0
    seen = runs.measure(runs.test, position)
    assert np.isfinite(seen.mass_each).sum() == 1
    assert seen.mass.mean() == pytest.approx(seen.mass_each[0, 2])
    with pytest.raises(ValueError, match=r"position marks no word in \d+ sentences"):
        runs.measure(runs.test, np.full(len(runs.test), -1))


def test_verb_is_out_of_the_models_sight_when_masked(corpus):
    runs = agreement.Runs(corpus, setting(verb_masked=True))
    verbs = [corpus.vocabulary.index(verb) for verb in ("is", "are")]
    assert not np.isin(runs.train.tokens, verbs).any()
    assert not np.isin(runs.test.tokens, verbs).any()
    assert runs.marked == "subject"


def test_a_resumed_run_gives_equal_numbers(corpus, tmp_path):
    path = tmp_path / "run.pt"
    whole = agreement.train(corpus, setting(), stop=45, looks=range(0, 46, 5))
    agreement.train(corpus, setting(), stop=23, looks=range(0, 46, 5), checkpoint=path)
    resumed = agreement.train(corpus, setting(), stop=45, looks=range(0, 46, 5), checkpoint=path)
    a, b = agreement.History.of(whole), agreement.History.of(resumed)
    for name in ("step", "loss", "mass", "entropy"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    for name, stack in whole.parameters.items():
        assert torch.equal(stack, resumed.parameters[name]), name


def test_a_killed_run_goes_on_from_its_last_checkpoint_with_equal_numbers(corpus, tmp_path):
    path = tmp_path / "run.pt"
    code = (
        "import sys, test_train_agreement as t; from pathlib import Path; from lib.train import agreement as a;"
        "a.train(t.small_corpus(), t.setting(), looks=range(0, 46, 5), checkpoint=Path(sys.argv[1]), every=7)"
    )
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent)])
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths})
    for _ in range(3000):
        if path.exists() or child.poll() is not None:
            break
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    reached = torch.load(path, weights_only=False)["step"]
    assert 0 < reached < 45
    resumed = agreement.train(corpus, setting(), stop=45, looks=range(0, 46, 5), checkpoint=path)
    whole = agreement.train(corpus, setting(), stop=45, looks=range(0, 46, 5))
    assert np.array_equal(agreement.History.of(whole).loss, agreement.History.of(resumed).loss)
    assert torch.equal(whole.parameters["E"], resumed.parameters["E"])


def test_checkpoint_of_another_setting_or_cut_short_is_refused(corpus, tmp_path):
    path = tmp_path / "run.pt"
    agreement.train(corpus, setting(), stop=2, looks=[], checkpoint=path)
    with pytest.raises(ValueError, match=r"run.pt was made with another rate"):
        agreement.Runs(corpus, setting(rate=1e-3)).restore(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"run.pt can't be read"):
        agreement.Runs(corpus, setting()).restore(path)


def test_a_run_that_is_lost_is_named_and_the_others_go_on(corpus):
    told = []
    runs = agreement.Runs(corpus, setting())
    bad = runs.order.index(("QK ×10", 1))
    runs.parameters["W_V"][bad, 0, 0, 0] = math.nan
    for _ in range(12):
        runs.advance()
    told = [str(failure) for failure in runs.failures]
    assert len(told) == 1
    for word in ("'QK ×10'", "seed 1", "step 0", "QK 0.03", "OV 0.003"):
        assert word in told[0]
    runs.look()
    history = agreement.History.of(runs)
    assert np.isnan(history.loss[1, 1]).all()
    others = np.delete(history.loss.reshape(6, -1), bad, axis=0)
    assert np.isfinite(others).all()
    healthy = agreement.train(corpus, setting(), stop=12, looks=[])
    assert torch.equal(runs.parameters["E"][0], healthy.parameters["E"][0])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"arms": ("QK ×7",)}, r"arm = 'QK ×7'"),
        ({"seeds": ()}, r"seeds = 0"),
        ({"rate": 0.0}, r"rate = 0"),
        ({"warm_up": 1.0}, r"warm_up = 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        setting(**changes)


def test_summary_has_every_arm_at_every_level_and_shares_that_sum_to_one(corpus):
    runs = agreement.train(corpus, setting(), looks=range(0, 1000, 10))
    result = agreement.summary(runs, levels=(0.5, 0.1))
    assert np.asarray(result["at_loss"]["0.1"]["mass"]).shape == (3, 2, 2)
    np.testing.assert_allclose(np.sum(result["dtap"], axis=(1, 2)), 1)
    assert result["shown"] is None  # the book's sentences are not in this corpus
    history = agreement.History.of(runs)
    step = history.at_loss("step", 0.5)
    before = history.loss[0, 0][history.step <= step[0, 0]]
    assert (before[:-1] > 0.5).all()
    assert history.at_step("loss", 40)[0, 0] == history.loss[0, 0, 4]
