"""The film strip shows the run it is given."""

from dataclasses import dataclass, field

import matplotlib.pyplot as plt
import numpy as np
import pytest

from lib.book import cover


@dataclass
class Run:
    times: np.ndarray = field(default_factory=lambda: np.arange(0.0, 11.0))
    loss: np.ndarray = field(default_factory=lambda: np.linspace(1.4, 0.6, 11))
    patterns: np.ndarray = field(default_factory=lambda: np.random.default_rng(0).dirichlet(np.ones(4), size=(11, 4)))
    levels: dict = field(default_factory=lambda: {"uniform": 1.386, "unigram": 0.73, "rank one": 0.63, "floor": 0.55})


@pytest.fixture
def figure():
    figure = plt.figure(figsize=(6.4, 4.6))
    yield figure
    plt.close(figure)


def test_frames_show_attention_at_their_moments_and_stairs_show_the_levels(figure):
    run = Run()
    cover.film_strip(figure, run, {"start": 0, "middle": 3.2, "end": 10})
    stairs, *frames = figure.axes
    assert [ax.get_title() for ax in frames] == ["start", "middle", "end"]
    for ax, i in zip(frames, (0, 3, 10), strict=True):
        np.testing.assert_array_equal(ax.images[0].get_array(), run.patterns[i])
        assert ax.images[0].get_clim() == (0, 1)
    drawn = {round(float(line.get_ydata()[0]), 6) for line in stairs.lines if len(line.get_ydata()) == 2}
    assert drawn == {round(run.levels[name] - 0.55, 6) for name in ("uniform", "unigram", "rank one")}
    curve = max(stairs.lines, key=lambda line: len(line.get_ydata()))
    np.testing.assert_allclose(curve.get_ydata(), run.loss - 0.55)
    assert [t.get_text() for t in frames[0].get_yticklabels()] == list("abcd")


def test_printed_numbers_are_the_large_entries(figure):
    run = Run(patterns=np.tile([[0.99, 0.01], [0.3, 0.7]], (11, 1, 1)))
    run.patterns[0, 0] = [1, 0]
    cover.film_strip(figure, run, {"first": 0, "last": 10}, tokens=["the", "of"])
    first, last = ({t.get_text() for t in ax.texts} - {"query", "looks at"} for ax in figure.axes[1:])
    assert first == {"1", ".30", ".70"}
    assert last == {".99", ".30", ".70"}


@pytest.mark.parametrize(
    "moments, tokens, words",
    [
        ({"one": 1}, None, "at least two, increasing"),
        ({"one": 2, "two": 1}, None, r"moments = \[2.0, 1.0\]"),
        ({"one": 2, "two": 99}, None, "moments = 99 at index"),
        ({"one": 1, "two": 2}, ["a", "b"], r"tokens has shape \(2,\); expected \(4,\)"),
    ],
)
def test_bad_moments_and_names_are_refused(figure, moments, tokens, words):
    with pytest.raises(ValueError, match=words):
        cover.film_strip(figure, Run(), moments, tokens=tokens)
