"""Sampled sequences follow their chain."""

import numpy as np
import pytest

from lib.data.markov import windows

P = np.array([[0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [0.7, 0.2, 0.1]])


def test_every_step_of_a_sequence_follows_the_transition_matrix():
    tokens, following = windows(P, 30, 2000, 0)
    path = np.column_stack([tokens, following])
    assert path.shape == (2000, 31)
    for before, after in ((path[:, :-1], path[:, 1:]), (path[:, -2], path[:, -1])):  # all steps; the last one alone
        seen = np.zeros((3, 3))
        np.add.at(seen, (before.ravel(), after.ravel()), 1)
        size = seen.sum(-1, keepdims=True)
        assert np.all(np.abs(seen / size - P) < 4.5 * np.sqrt(P * (1 - P) / size))


@pytest.mark.parametrize("start", [None, (0.6, 0.0, 0.4)])
def test_first_token_follows_the_start(start):
    first = windows(P, 2, 5000, 1, start).tokens[:, 0]
    law = np.full(3, 1 / 3) if start is None else np.array(start)
    share = np.bincount(first, minlength=3) / 5000
    assert np.all(np.abs(share - law) <= 4.5 * np.sqrt(law * (1 - law) / 5000))


def test_a_seed_gives_the_same_sequences_and_another_seed_others():
    assert np.array_equal(windows(P, 9, 20, 7).tokens, windows(P, 9, 20, 7).tokens)
    assert not np.array_equal(windows(P, 9, 20, 7).tokens, windows(P, 9, 20, 8).tokens)


def test_forbidden_transitions_never_occur():
    tokens, following = windows([[0.0, 1.0], [1.0, 0.0]], 40, 50, 0)
    path = np.column_stack([tokens, following])
    assert np.all(path[:, 1:] + path[:, :-1] == 1)
