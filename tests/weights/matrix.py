"""The matrix of merging methods: what each row of a registry must satisfy, with models to run it on."""

import json
from pathlib import Path

import torch

import tdfunc as tdf

GOLDEN = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "cases.json").read_text())
# Options under which a method does more than it does by default.
SHARPER = {"density": 0.6, "gamma": 0.1, "select_topk": 0.5}


@tdf.weights.method("b + max w d", source="none")
def largest(base, stacked, weights, *, density=1.0):
    """Take the largest step: a method that a user adds."""
    steps = weights.reshape(-1, *[1] * base.dim()) * (stacked - base)
    return base + steps.amax(0) * density


# A method that was added at run time stands beside the package's own.
METHODS = {**tdf.weights.METHODS, "largest": largest}


def options_of(method):
    """Options that make a method drop, elect and draw."""
    chosen = {name: value for name, value in SHARPER.items() if name in method.options}
    return chosen | ({"key": 7} if method.is_random else {})


def models_of(method, dtype=torch.float64):
    """A base and as many models as a method takes, near enough to each other to be merged."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"matrix": (4, 5), "vector": (6,), "column": (3, 1), "number": (), "none": (0, 3)}
    draw = lambda: {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}  # noqa: E731
    base = tdf.TensorDict({"layer": draw()})
    models = [base.apply(lambda b, d: b + 0.3 * d, tdf.TensorDict({"layer": draw()})) for _ in range(method.most or 3)]
    return base, torch.stack(models)


def weights_of(method, dtype=torch.float64):
    """Weights that are neither equal nor sum to one."""
    return torch.tensor([0.3, 0.5, 0.4], dtype=dtype)[: method.most or 3]
