"""The corpus of sentences: what is kept, how it is split, what the arrays hold."""

import numpy as np
import pytest

from lib.data import sentences as s

TEXT = (
    "We are here today, and happy! It is so. The old king of the hills was not at home; is it so that "
    "they are? He who has the keys does it."
)


def test_only_sentences_with_exactly_one_of_the_verbs_and_the_right_length_are_kept():
    found = s.sentences_of(TEXT)
    assert [" ".join(words) for words, _ in found] == ["we are here today and happy", "the old king of the hills was not at home"]
    assert [words[verb] for words, verb in found] == ["are", "was"]
    assert [len(words) for words, _ in s.sentences_of(TEXT, 3, 6)] == [6, 3]


def test_words_keep_apostrophes_and_drop_punctuation_and_case():
    assert s.words_of("The NATION's debt -- $1,000 -- isn't (yet) paid") == ["the", "nation's", "debt", "1", "000", "isn't", "yet", "paid"]


def test_encode_gives_ids_lengths_labels_and_positions():
    vocabulary = s.vocabulary_of([["we", "are", "it"], ["we", "is"]], 3)
    assert vocabulary == (*s.SPECIAL, "we", "are", "is")  # by count, then by alphabet
    coded = s.encode([("we", "are", "friends"), ("so", "it", "is", "we", "say")], [1, 2], vocabulary)
    assert coded.tokens.tolist() == [[3, 4, 1, 0, 0], [1, 1, 5, 3, 1]]
    assert coded.length.tolist() == [3, 5]
    assert coded.label.tolist() == [1, 0]
    assert coded.subject.tolist() == [0, 1]
    assert coded.marked(np.array([-1, 4])).tolist() == [[False] * 5, [False] * 4 + [True]]


def test_masking_removes_the_verb_and_nothing_else():
    corpus = s.build([TEXT] * 5, words=30)
    masked = corpus.train.verb_masked()
    rows = np.arange(len(masked))
    assert (masked.tokens[rows, masked.verb] == s.MASK).all()
    assert (masked.tokens != corpus.train.tokens).sum() == len(masked)
    assert not {word for words in masked.text for word in words} & set(s.VERBS)


def test_subject_rule_speaks_only_for_a_nominative_pronoun_directly_before_the_verb():
    assert s.subject_position(["we", "are", "here"], 1) == 0
    for words, verb in ((["are", "we", "here"], 0), (["they", "all", "are"], 2), (["the", "hills", "are"], 2), (["you", "are"], 1)):
        assert s.subject_position(words, verb) == -1


def test_split_is_by_document_and_vocabulary_comes_from_training_alone():
    documents = [f"the word{i} of the people is heard. " * 3 for i in range(10)]
    corpus = s.build(documents, seed=3)
    assert not set(corpus.train.document) & set(corpus.test.document)
    assert len(set(corpus.train.document)) == 8
    assert {f"word{i}" for i in set(corpus.train.document)} <= set(corpus.vocabulary)
    assert not {f"word{i}" for i in set(corpus.test.document)} & set(corpus.vocabulary)
    assert (corpus.test.tokens[:, 1] == s.UNKNOWN).all()


def test_split_depends_on_the_seed_and_on_nothing_else():
    documents = [f"the word{i} of the people is heard" for i in range(30)]
    first, again, other = (s.build(documents, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(first.train.tokens, again.train.tokens)
    assert set(first.test.document) != set(other.test.document)


def test_take_keeps_rows_together():
    corpus = s.build([TEXT] * 10)
    part = corpus.train.take(np.array([3, 0]))
    assert part.text == (corpus.train.text[3], corpus.train.text[0])
    assert np.array_equal(part.tokens, corpus.train.tokens[[3, 0]])


def test_state_of_the_union_has_ten_thousand_training_sentences_and_no_shared_speech():
    corpus = s.state_of_the_union()
    assert len(corpus.train) >= 10_000
    assert not set(corpus.train.document) & set(corpus.test.document)
    for side in (corpus.train, corpus.test):
        verbs = np.isin(side.tokens, [corpus.vocabulary.index(verb) for verb in s.VERBS])
        assert (verbs.sum(1) == 1).all()
        assert (verbs.argmax(1) == side.verb).all()
        assert ((side.length >= 5) & (side.length <= 40)).all()
        assert ((side.tokens != s.PADDING).sum(1) == side.length).all()
        assert 0.4 < side.label.mean() < 0.5


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: s.encode([], [], s.SPECIAL), r"no sentence came"),
        (lambda: s.encode([("we", "are")], [0], s.SPECIAL), r"verb position 0 holds 'we'"),
        (lambda: s.encode([("we", "are")], [2], s.SPECIAL), r"holds 'nothing \(sentence of 2 words\)'"),
        (lambda: s.encode([("we", "are")], [1], ("we", "are")), r"vocabulary begins with \('we', 'are'\)"),
        (lambda: s.build(["nothing to see"] * 5), r"the train side has 4 documents and no usable sentence"),
        (lambda: s.build([TEXT], train_share=1.0), r"train_share = 1"),
        (lambda: s.vocabulary_of([["a"]], 0), r"size = 0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
