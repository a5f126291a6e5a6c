"""Faulty pushes of weights into an engine: how many pass until one is caught, as JSON."""

import json
import random
import statistics
import sys

from tests.llm.models import make
from tests.llm.wrappers.pushing import KINDS, count_pushes, other_weights

TRIALS, MOST, VOCABULARY, PROMPT = 30, 1000, 4096, 256


def main(trials: int) -> None:
    """Print for each kind of fault, and for each proof, how many pushes the trials took."""
    shape = make("qwen3_moe", vocab_size=VOCABULARY, num_experts=32)
    start, model = (other_weights(shape, seed) for seed in (1, 2))
    found = {kind: {} for kind in KINDS}
    for kind in KINDS:
        for proof, count in (("prompt", trials), ("full", max(trials // 5, 1))):
            options = {"proof": proof, "length": PROMPT}
            pushes = [count_pushes(kind, start, model, random.Random(seed), MOST, **options) for seed in range(count)]
            caught = [number for number in pushes if number is not None]
            found[kind][proof] = {
                "trials": count,
                "never caught": count - len(caught),
                "median": statistics.median(caught),
                "most": max(caught),
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else TRIALS)
