"""The model of the golden files, and the configurations of PEFT that they were saved with."""

import torch
from torch import nn


class Block(nn.Module):
    """A block with two linear layers, of which one has no bias, and a norm."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.norm = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.LayerNorm(4)

    def forward(self, x):
        return x + self.norm(self.q(x).tanh() + self.k(x))


class Net(nn.Module):
    """A table, three blocks, a convolution and a head, whose name `fc` is also the end of `out.fc`."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(7, 4), nn.ModuleList([Block() for _ in range(3)])
        self.conv, self.fc, self.out = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(4, 4), nn.ModuleDict()
        self.out["fc"] = nn.Linear(4, 3)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.layers:
            x = block(x)
        return self.out["fc"](self.fc(self.conv(x[:, None]).mean(1)))


IDS = torch.arange(7)[None]
# name -> options of LoraConfig, over {"r": 2, "target_modules": ["q", "k"]}. PEFT computes with these.
SERVED = {
    "plain": {},
    "r": {"r": 3},
    "lora_alpha": {"lora_alpha": 5},
    "a pattern": {"target_modules": r".*\.(q|k)"},
    "names that end alike": {"target_modules": r"layers\.[02]\.q|fc"},
    "exclude_modules": {"exclude_modules": ["layers.1.q"]},
    "exclude_modules by a pattern": {"exclude_modules": r".*1\.q"},
    "lora_dropout": {"lora_dropout": 0.3},
    "bias all": {"bias": "all"},
    "bias lora_only": {"bias": "lora_only"},
    "use_rslora": {"use_rslora": True},
    "modules_to_save": {"modules_to_save": ["out.fc"]},
    "modules_to_save and bias": {"modules_to_save": ["norm", "out.fc"], "bias": "all"},
    "layers_to_transform": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "rank_pattern": {"rank_pattern": {r"layers\.1.*q": 1, "k": 3}},
    "alpha_pattern": {"alpha_pattern": {"^layers.0.q": 3, r".*2\.[qk]": 1}},
    "use_dora": {"use_dora": True},
    "use_dora of a table and a convolution": {"use_dora": True, "target_modules": ["embed", "q", "conv"]},
    "lora_bias": {"lora_bias": True, "target_modules": ["q", "conv"]},
    "target_parameters": {"target_modules": ["k"], "target_parameters": ["q.weight"], "rank_pattern": {"q.weight": 3}},
    "init_lora_weights gaussian": {"init_lora_weights": "gaussian"},
    "init_lora_weights false": {"init_lora_weights": False},
    "init_lora_weights orthogonal": {"init_lora_weights": "orthogonal"},
    "all-linear": {"target_modules": "all-linear"},
    "fan_in_fan_out": {"fan_in_fan_out": True},
}
# The cases that are kept as files.
GOLDEN = (
    "plain", "a pattern", "bias all", "bias lora_only", "modules_to_save and bias", "layers_to_transform",
    "rank_pattern", "alpha_pattern", "use_dora of a table and a convolution", "lora_bias", "target_parameters",
    "names that end alike",
)  # fmt: skip


def folder_name(case):
    """The name of a case as a folder."""
    return case.replace(" ", "_")
