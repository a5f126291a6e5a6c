"""Write the oracle of the merging methods, with mergekit installed: `python mergekit_oracle.py tests/weights/golden`.

It runs mergekit's `merge_state_dicts` on each case of `cases.json`, and writes inputs and results to one file. The
methods that draw numbers are compared at a density of 1; random parts have laws.
"""

import json
import sys
from pathlib import Path

import torch
from mergekit.merge_methods.api import merge_state_dicts
from safetensors.torch import save_file

RENAMED = {"lambda_": "lambda", "row_wise": "nuslerp_row_wise", "flatten": "nuslerp_flatten"}
WEIGHTS = {"slerp": "t", "nearswap": "t", "passthrough": "scale"}
WITHOUT = {"karcher", "model_stock", "sce", "ram", "ramplus_tl", "arcee_fusion"}


def run(case, base, models):
    """Return what mergekit makes of a case."""
    method, names = case["method"], [f"x{i}" for i in range(case["models"])]
    inputs = {name: models[i] for i, name in enumerate(names)}
    if case.get("base"):
        inputs = {"base": base, **inputs}
    parameters = {}
    for name, value in case.get("options", {}).items():
        value = dict(zip(names, value, strict=True)) if isinstance(value, list) else value
        parameters[RENAMED.get(name, name)] = value
    if method in ("slerp", "nearswap"):
        parameters["t"] = case["weights"][0]
    elif method not in WITHOUT:
        parameters[WEIGHTS.get(method, "weight")] = dict(zip(names, case["weights"], strict=True))
    return merge_state_dicts(inputs, method, parameters=parameters, base="base" if case.get("base") else None)


def main(folder):
    """Draw the inputs, run the cases, write the file."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (6, 5), "vector": (7,), "kernel": (3, 2, 2, 2)}

    def draw():
        return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}

    base = draw()
    # Models that have moved from the base by about half its size.
    models = [{name: base[name] + 0.5 * x for name, x in draw().items()} for _ in range(3)]
    found = {f"base/{name}": x for name, x in base.items()}
    found |= {f"x{i}/{name}": x for i, model in enumerate(models) for name, x in model.items()}
    for i, case in enumerate(json.loads((folder / "cases.json").read_text())):
        found |= {f"{i}/{name}": x.contiguous().clone() for name, x in run(case, base, models).items()}
    save_file(found, folder / "mergekit.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
