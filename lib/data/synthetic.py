"""Paper 1's synthetic classes: token laws, exact sampling, and the counts that are all a model without positions can see.

A class c has ten common tokens (ids 0-9, shared by all classes) and ten distinct ones (ids 10(c+1) ... 10(c+1)+9). A context
token is common id k with probability 10/155, distinct id j with probability (j+1)/155: whole numbers over 155, so that
uniform integers below 155 give the law exactly. A sequence of a class therefore uses 20 token ids, its *slots*: slot s < 10
is common id s, slot 10+j the class's distinct token j.

Tokens are one-hot and there are no positions, so a sequence acts only through how often each of its 20 tokens occurs.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from lib import checks

CLASSES, COMMON, DISTINCT = 4, 10, 10
SLOTS = COMMON + DISTINCT
VOCABULARY = COMMON + CLASSES * DISTINCT
TOTAL = 155  # weights of one class: ten times 10, and 1 + ... + 10

#: Weight of each slot, over 155.
SLOT_WEIGHTS = np.array([10] * COMMON + list(range(1, DISTINCT + 1)))
#: [class, slot] -> token id.
SLOT_TOKENS = np.array([[*range(COMMON), *(COMMON + DISTINCT * c + j for j in range(DISTINCT))] for c in range(CLASSES)])

_SLOT_OF = np.repeat(np.arange(SLOTS), SLOT_WEIGHTS).astype(np.uint8)  # uniform integer below 155 -> slot
# uniform integer below 155**2 -> two slots, one in each byte
_PAIRS = (np.repeat(_SLOT_OF, TOTAL).astype(np.uint16) << 8) | np.tile(_SLOT_OF, TOTAL)
_PURPOSES = ("train", "test", "other test")


@dataclass(frozen=True)
class Task:
    """Which common token asks and which is the answer, per class (slot = token id, since both are common)."""

    query: tuple[int, ...]
    label: tuple[int, ...]


#: Figure 2: class c ends with token 5+c and must be continued by 1+c. Figure 3 has the two swapped.
FIG2 = Task(query=(5, 6, 7, 8), label=(1, 2, 3, 4))
FIG3 = Task(query=(1, 2, 3, 4), label=(5, 6, 7, 8))

#: What a slot is, seen from its own class; `slot_kinds` gives the index.
KINDS = ("distinct", "own query", "own label", "other query", "other label", "plain common")


def token_weights(label: int) -> np.ndarray:
    """Law of a context token of one class, as whole numbers over 155.

    Source: Paper 1, data of Figures 2 and 3.

    Args:
        label: class, 0 to 3.

    Returns:
        [token], 50 integers that sum to 155.

    Raises:
        ValueError: there is no such class.
    """
    checks.one_of("token_weights", range(CLASSES), label=label)
    weights = np.zeros(VOCABULARY, dtype=int)
    weights[SLOT_TOKENS[label]] = SLOT_WEIGHTS
    return weights


def slot_kinds(task: Task) -> np.ndarray:
    """Kind of each slot in each class.

    Args:
        task: FIG2 or FIG3.

    Returns:
        [class, slot], index into KINDS.
    """
    kinds = np.full((CLASSES, SLOTS), KINDS.index("plain common"))
    kinds[:, list(task.query)] = KINDS.index("other query")
    kinds[:, list(task.label)] = KINDS.index("other label")
    kinds[range(CLASSES), task.query] = KINDS.index("own query")
    kinds[range(CLASSES), task.label] = KINDS.index("own label")
    kinds[:, COMMON:] = KINDS.index("distinct")
    return kinds


@njit(cache=True, nogil=True, error_model="numpy")
def _fill(state, pairs, slots, counts, classes, stratified):
    """Draw classes and contexts; `slots` [sequence, position] keeps the tokens themselves, unless it has no rows.

    The generator is xoshiro256++. One 64-bit word below 55 * 155**8 holds eight independent uniform integers below 155
    (four pairs); 0.7 % of the words are larger and are drawn again, so that the law is exact.
    """
    limit = np.uint64(55) * np.uint64(333160561500390625)
    pair_base = np.uint64(24025)
    a, b, c, d = state[0], state[1], state[2], state[3]
    context = np.uint64(slots.shape[1])
    words = (slots.shape[1] + 7) // 8
    quarter = counts.shape[1] // 4
    keep = slots.shape[0] > 0
    for step in range(counts.shape[0]):
        for i in range(counts.shape[1]):
            row = counts[step, i]
            row[:] = 0
            drawn = -1  # -1: the class is still to be drawn
            position = np.uint64(0)  # unsigned indices: numba then leaves out the test for counting from the end
            while drawn < words:
                s = a + d
                word = ((s << np.uint64(23)) | (s >> np.uint64(41))) + a
                t = b << np.uint64(17)
                c ^= a
                d ^= b
                b ^= c
                a ^= d
                c ^= t
                d = (d << np.uint64(45)) | (d >> np.uint64(19))
                if drawn < 0:
                    classes[step, i] = i // quarter if stratified else word >> np.uint64(62)
                    drawn = 0
                elif word < limit:
                    for _ in range(4):
                        rest = word // pair_base
                        pair = pairs[word - rest * pair_base]
                        word = rest
                        for slot in (pair & np.uint16(255), pair >> np.uint16(8)):
                            if position < context:
                                row[slot] += np.uint8(1)
                                if keep:
                                    slots[step * counts.shape[1] + i, position] = slot
                                position += np.uint64(1)
                    drawn += 1
    state[0], state[1], state[2], state[3] = a, b, c, d


class Stream:
    """An endless, seeded stream of batches. Two streams of one seed, purpose, batch and length give the same sequences.

    Arms of a comparison that share a seed see the same data, whatever their model, rates or initialisation: their differences
    are then paired.

    Args:
        seed: whole number >= 0.
        batch: sequences per step.
        length: L, tokens with query and label; the context has L-2.
        stratified: equal numbers of each class in a batch (Figure 3) instead of independent uniform classes (Figure 2).
        purpose: 'train', 'test' or 'other test': independent streams of one seed.

    Raises:
        ValueError: no room for a context, a count that overflows, or a stratified batch that four classes don't divide.
    """

    def __init__(self, seed: int, *, batch: int = 32, length: int = 64, stratified: bool = False, purpose: str = "train"):
        checks.integer_at_least("Stream", 0, seed=seed)
        checks.integer_at_least("Stream", 1, batch=batch)
        checks.integer_at_least("Stream", 3, length=length)
        checks.one_of("Stream", _PURPOSES, purpose=purpose)
        if length > 256:
            raise ValueError(f"Stream: length = {length}; expected at most 256, since counts are kept in one byte.")
        if stratified and batch % CLASSES:
            raise ValueError(f"Stream: batch = {batch} with stratified classes; expected a multiple of {CLASSES}.")
        self.batch, self.context, self.stratified = batch, length - 2, stratified
        self.state = np.random.SeedSequence([seed, _PURPOSES.index(purpose)]).generate_state(4, np.uint64)

    def counts(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """The next batches as token counts of the context (without the query token).

        Args:
            steps: how many batches.

        Returns:
            counts [step, batch, slot] uint8, rows sum to L-2; classes [step, batch] uint8.
        """
        return self._draw(steps, keep=False)[1:]

    def tokens(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """The next batches as token ids: the very sequences that `counts` would have counted.

        Args:
            steps: how many batches.

        Returns:
            tokens [step, batch, position] (L-2 positions), classes [step, batch].
        """
        slots, _, classes = self._draw(steps, keep=True)
        slots = slots.reshape(steps, self.batch, self.context)
        return SLOT_TOKENS[classes[..., None], slots], classes

    def _draw(self, steps: int, keep: bool):
        checks.integer_at_least("Stream", 1, steps=steps)
        slots = np.empty((steps * self.batch if keep else 0, self.context), np.uint8)
        counts = np.empty((steps, self.batch, SLOTS), np.uint8)
        classes = np.empty((steps, self.batch), np.uint8)
        _fill(self.state, _PAIRS, slots, counts, classes, self.stratified)
        return slots, counts, classes
