"""Faulty pushes of weights into an engine: how many pass until one is caught, as JSON."""

import json
import random
import sys

from tests.llm.models import make
from tests.llm.wrappers.pushing import KINDS, count_pushes, other_weights

TRIALS, MOST, VOCABULARY, PROMPT = 30, 1000, 4096, 256


def main(trials: int) -> None:
    """Print for each kind of fault, and for each proof, the pushes that each trial took; null for one never caught."""
    shape = make("qwen3_moe", vocab_size=VOCABULARY, num_experts=32)
    start, model = (other_weights(shape, seed) for seed in (1, 2))
    found = {
        kind: {
            proof: [
                count_pushes(kind, start, model, random.Random(seed), MOST, proof=proof, length=PROMPT, key=None)
                for seed in range(trials if proof == "prompt" else max(trials // 5, 1))
            ]
            for proof in ("prompt", "full")
        }
        for kind in KINDS
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else TRIALS)
