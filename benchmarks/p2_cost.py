"""What one exact gradient of paper 2's population loss costs as the vocabulary d and the width m grow.

    python -m benchmarks.p2_cost      # writes data/results/p2_gradient_cost.json

Times belong to the machine that ran it; how they grow does not.
"""

import time

import numpy as np

from lib.book import cards
from lib.theory import markov

VOCABULARIES = (10, 20, 50, 100, 200, 500, 1000)
WIDTHS = (8, 16, 32, 64, 128, 256)
FIXED_WIDTH, FIXED_VOCABULARY = 8, 1000
REPEATS = 7


def seconds(vocabulary: int, width: int) -> list[float]:
    """Wall times of one gradient, [repeat], each the mean over as many calls as fill a tenth of a second."""
    law = 1 / np.arange(1, vocabulary + 1)
    model = markov.PopulationModel(markov.sticky_chain(law / law.sum(), 0.5), width)
    parameters = model.initial(0.5 / np.sqrt(width), 0)
    begun = time.perf_counter()
    model.gradient(parameters)
    calls = max(1, round(0.1 / (time.perf_counter() - begun)))
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        for _ in range(calls):
            model.gradient(parameters)
        times.append((time.perf_counter() - begun) / calls)
    return times


def main() -> None:
    """Measure along both axes and write the card."""
    begun = time.perf_counter()
    results = {
        "vocabulary": {"sizes": VOCABULARIES, "seconds": [seconds(d, FIXED_WIDTH) for d in VOCABULARIES]},
        "width": {"sizes": WIDTHS, "seconds": [seconds(FIXED_VOCABULARY, m) for m in WIDTHS]},
    }
    config = {"width while the vocabulary grows": FIXED_WIDTH, "vocabulary while the width grows": FIXED_VOCABULARY, "repeats": REPEATS}
    cards.save("p2_gradient_cost", config=config, seeds=[0], results=results, seconds=time.perf_counter() - begun)


if __name__ == "__main__":
    main()
