"""The official token laws, exact sampling, and the metrics that belong to them."""

import numpy as np
import pytest
from scipy import stats

from lib.data import synthetic
from lib.data.synthetic import SLOT_TOKENS, SLOT_WEIGHTS, Stream
from lib.metrics.heatmap import separability, uniform_row

MANY = 400


@pytest.fixture(scope="module")
def sample():
    counts, classes = Stream(11, batch=512).counts(MANY)
    return counts.reshape(-1, 20).astype(int), classes.ravel()


@pytest.mark.parametrize("label", range(4))
def test_a_class_has_ten_common_tokens_of_weight_ten_and_its_own_ten_of_weight_one_to_ten(label):
    weights = synthetic.token_weights(label)
    assert weights.sum() == 155
    assert weights[:10].tolist() == [10] * 10
    assert weights[10 * (label + 1) : 10 * (label + 2)].tolist() == list(range(1, 11))
    assert np.count_nonzero(weights) == 20


def test_counts_have_the_mean_and_covariance_of_the_multinomial_law(sample):
    counts, _ = sample
    p, n, size = SLOT_WEIGHTS / 155, 62, len(counts)
    assert np.all(counts.sum(1) == n)
    z = (counts.mean(0) - n * p) / np.sqrt(n * p * (1 - p) / size)
    assert np.abs(z).max() < 4.5
    covariance = n * (np.diag(p) - np.outer(p, p))
    standard_error = np.sqrt((covariance**2 + np.outer(np.diag(covariance), np.diag(covariance))) / size)
    assert (np.abs(np.cov(counts.T) - covariance) / standard_error).max() < 5.5


def test_each_position_of_a_context_follows_the_law():
    tokens, classes = Stream(12, batch=512).tokens(100)
    for position in (0, 1, 7, 8, 61):  # ends and borders of the 64-bit words
        seen = np.bincount(tokens[..., position][classes == 2], minlength=50)
        law = synthetic.token_weights(2)
        assert np.all(seen[law == 0] == 0)
        assert stats.chisquare(seen[law > 0], seen.sum() * law[law > 0] / 155).pvalue > 1e-4


def test_neighbouring_tokens_are_independent():
    tokens, _ = Stream(13, batch=512).tokens(100)
    distinct = tokens >= 10
    for gap in (1, 2, 4, 8):
        r = np.corrcoef(distinct[..., :-gap].ravel(), distinct[..., gap:].ravel())[0, 1]
        assert abs(r) < 4.5 / np.sqrt(distinct[..., gap:].size)


def test_classes_are_independent_and_uniform_or_exactly_balanced(sample):
    _, classes = sample
    assert stats.chisquare(np.bincount(classes, minlength=4)).pvalue > 1e-4
    assert np.var([np.sum(part == 0) for part in classes.reshape(MANY, -1)]) == pytest.approx(512 * 3 / 16, rel=0.25)
    _, balanced = Stream(11, batch=128, stratified=True).counts(5)
    assert all(np.bincount(batch, minlength=4).tolist() == [32] * 4 for batch in balanced)


@pytest.mark.parametrize("length", [64, 128])
def test_tokens_and_counts_are_the_same_sequences(length):
    tokens, classes = Stream(3, length=length).tokens(4)
    counts, same = Stream(3, length=length).counts(4)
    assert np.array_equal(classes, same)
    again = [
        [np.bincount(row, minlength=50)[SLOT_TOKENS[c]] for row, c in zip(batch, cs, strict=True)]
        for batch, cs in zip(tokens, classes, strict=True)
    ]
    assert np.array_equal(again, counts)
    assert tokens.shape == (4, 32, length - 2)


def test_a_seed_gives_one_stream_however_it_is_cut_and_purposes_and_seeds_differ():
    whole = Stream(5).counts(3)[0]
    parts = Stream(5)
    assert np.array_equal(whole, np.concatenate([parts.counts(1)[0], parts.counts(2)[0]]))
    assert not np.array_equal(whole, Stream(6).counts(3)[0])
    assert not np.array_equal(whole, Stream(5, purpose="test").counts(3)[0])


def test_kinds_of_slots_name_own_and_other_queries_and_labels():
    kinds = synthetic.slot_kinds(synthetic.FIG2)
    names = [[synthetic.KINDS[k] for k in row] for row in kinds]
    assert names[2][:10] == [
        "plain common", "other label", "other label", "own label", "other label",
        "other query", "other query", "own query", "other query", "plain common",
    ]  # fmt: skip
    assert names[2][10:] == ["distinct"] * 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed = -1"),
        ({"seed": 1, "length": 2}, "length = 2"),
        ({"seed": 1, "length": 300}, "length = 300; expected at most 256"),
        ({"seed": 1, "batch": 30, "stratified": True}, "batch = 30 .*multiple of 4"),
        ({"seed": 1, "purpose": "dev"}, "purpose = 'dev'"),
    ],
)
def test_streams_refuse_what_they_cannot_draw(options, message):
    with pytest.raises(ValueError, match=message):
        Stream(**options)


def test_streams_refuse_no_steps_and_unknown_classes():
    with pytest.raises(ValueError, match="steps = 0"):
        Stream(1).counts(0)
    with pytest.raises(ValueError, match="label = 4"):
        synthetic.token_weights(4)


@pytest.mark.parametrize(("length", "row", "mean"), [(64, [0.4, 82.0, 17.6, 0, 0], 0.349), (128, [0, 85.9, 14.1, 0, 0], 0.352)])
def test_uniform_attention_is_the_binomial_row_and_what_counts_show(length, row, mean):
    shares, average = uniform_row(length - 2, length - 1, 55 / 155)
    assert np.round(100 * shares, 1).tolist() == row
    assert average == pytest.approx(mean, abs=5e-4)
    counts, _ = Stream(2, length=length, batch=2000).counts(10)
    mass = counts[..., 10:].sum(-1).ravel() / (length - 1)
    assert np.histogram(mass, [0, 0.2, 0.4, 0.6, 0.8, 1])[0] / mass.size == pytest.approx(shares, abs=0.012)


def test_separability_of_two_sequences_by_hand():
    key = np.array([[0.1, 0.3, 0.2, 0.4], [0.5, np.nan, 0.3, 0.2], [0.5, 0.5, np.nan, np.nan]])
    informative = np.array([[True, True, False, False]] * 3)
    assert separability(key, informative)[:2] == pytest.approx([0.3 - 0.2, 0.5 - 0.2])
    assert np.isnan(separability(key, informative)[2])


def test_heatmap_measures_refuse_bad_input():
    with pytest.raises(ValueError, match="keys = 60"):
        uniform_row(62, 60, 0.3)
    with pytest.raises(ValueError, match=r"probability = 1\.2"):
        uniform_row(62, 63, 1.2)
    with pytest.raises(ValueError, match="edges"):
        uniform_row(62, 63, 0.3, edges=(0.2, 0.4))
    with pytest.raises(ValueError, match="expected the same, bool"):
        separability(np.ones(3) / 3, np.ones(3))
    with pytest.raises(ValueError, match=r"key = 1\.5"):
        separability(np.array([1.5, 0.1]), np.array([True, False]))


def plain_draws(state, contexts: int, length: int):
    """The sampler in whole numbers of any size: xoshiro256++, words of 55 * 155**8 and more drawn again, eight base-155 digits a word."""
    mask, table = 2**64 - 1, np.repeat(np.arange(20), SLOT_WEIGHTS)
    a, b, c, d = (int(word) for word in state)
    refused = 0

    def word():
        nonlocal a, b, c, d
        s = (a + d) & mask
        result = ((((s << 23) | (s >> 41)) & mask) + a) & mask
        t = (b << 17) & mask
        c ^= a
        d ^= b
        b ^= c
        a ^= d
        c ^= t
        d = ((d << 45) | (d >> 19)) & mask
        return result

    rows = []
    for _ in range(contexts):
        label, slots = word() >> 62, []
        while len(slots) < length:
            number = word()
            if number >= 55 * 155**8:
                refused += 1
                continue
            for _ in range(4):
                number, pair = divmod(number, 155**2)
                slots += [table[pair % 155], table[pair // 155]]
        rows.append((label, slots[:length]))
    return rows, refused


def test_compiled_sampler_is_the_plain_one_in_whole_numbers_rejections_included():
    stream = Stream(21)
    rows, refused = plain_draws(stream.state, 320, 62)
    counts, classes = stream.counts(10)
    assert refused >= 5
    assert classes.ravel().tolist() == [label for label, _ in rows]
    assert np.array_equal(counts.reshape(-1, 20), [np.bincount(slots, minlength=20) for _, slots in rows])
