"""Writes `fp8_blocks.safetensors`, a layer as DeepSeek-V3 stores it: `python -m tests.storage.golden.fp8`.

The weights are quantized in blocks of 128 x 128 as in `inference/kernel.py` of DeepSeek-V3 (`act_quant` and
`weight_dequant`: a code is the number divided by the scale, the scale is the largest number of the block divided by
448), and written by the safetensors package under the names of Hugging Face. Neither size is a multiple of 128.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file

BLOCK, LARGEST = 128, 448.0


def quantize(weight):
    """Return codes and scales of a matrix."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    codes, scales = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            block = (slice(BLOCK * i, BLOCK * (i + 1)), slice(BLOCK * j, BLOCK * (j + 1)))
            scales[i, j] = weight[block].abs().max() / LARGEST
            codes[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def main():
    """Write the file."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(130, 140, generator=generator) * 0.02
    codes, scales = quantize(weight)
    name = "model.layers.0.self_attn.q_proj.weight"
    norm = torch.ones(140, dtype=torch.bfloat16)
    state = {name: codes, f"{name}_scale_inv": scales, "model.layers.0.input_layernorm.weight": norm}
    save_file(state, Path(__file__).parent / "fp8_blocks.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main()
