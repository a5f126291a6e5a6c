"""Write the golden adapters with PEFT installed: `python -m benchmarks.conformance.peft_oracle tests/lora/golden`.

PEFT saves the folders and computes the outputs. The files in Kohya's names are written with safetensors, as
networks/lora.py of the `sd-scripts` names its tensors: `lora_unet_<module with underscores>.lora_down.weight`,
`.lora_up.weight` and `.alpha`; the second file also has LyCORIS' `dora_scale`. Plain torch computes their outputs.
"""

import copy
import shutil
import sys
from pathlib import Path

import peft
import torch
from safetensors.torch import save_file

from tests.lora.golden.model import GOLDEN, IDS, SERVED, Net, folder_name


def tuned_model(base, options, seed=0):
    """PEFT's model with adapters that change something."""
    config = peft.LoraConfig(**{"r": 2, "target_modules": ["q", "k"]} | options)
    model = peft.get_peft_model(copy.deepcopy(base), config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for leaf in model.parameters():
            if leaf.requires_grad:
                leaf.add_(0.1 * torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype))
    return model.eval()


def kohya_file(base, dora):
    """A file in Kohya's names, and the weights that it makes."""
    weights = {name: leaf.clone() for name, leaf in base.state_dict().items()}
    file = {}
    for module, rank, alpha in (("fc", 2, 8.0), ("out.fc", 1, 1.0), ("conv", 2, 1.0), ("layers.0.q", 2, None)):
        weight = weights[f"{module}.weight"]
        down = 0.3 * torch.randn(rank, *weight.shape[1:])
        up = 0.3 * torch.randn(weight.shape[0], rank, *[1] * (weight.ndim - 2))
        name = "lora_unet_" + module.replace(".", "_")
        file |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
        if alpha is not None:
            file[f"{name}.alpha"] = torch.tensor(alpha)
        change = (up.flatten(1) @ down.flatten(1)).view_as(weight) * ((rank if alpha is None else alpha) / rank)
        new = weight + change
        if dora:
            dims = tuple(range(1, weight.ndim))
            file[f"{name}.dora_scale"] = torch.linalg.vector_norm(weight, dim=dims, keepdim=True) * 1.3
            new = new * file[f"{name}.dora_scale"] / torch.linalg.vector_norm(new, dim=dims, keepdim=True)
        weights[f"{module}.weight"] = new
    return file, weights


def main(folder):
    """Write all cases."""
    torch.manual_seed(0)
    base = Net().eval()
    save_file(base.state_dict(), folder / "base.safetensors")
    outputs = {}
    for case in GOLDEN:
        name = folder_name(case)
        shutil.rmtree(folder / name, ignore_errors=True)
        model = tuned_model(base, SERVED[case])
        model.save_pretrained(folder / name)
        (folder / name / "README.md").unlink(missing_ok=True)
        outputs[name] = model(IDS).detach()
    for name, dora in (("kohya", False), ("kohya_dora", True)):
        file, weights = kohya_file(base, dora)
        save_file(file, folder / f"{name}.safetensors")
        model = copy.deepcopy(base)
        model.load_state_dict(weights)
        outputs[name] = model(IDS).detach()
    save_file(outputs, folder / "outputs.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
