"""Adapters: public reports of other projects that no other test shows."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tdfunc as tdf
from tdfunc.lora import Lora
from tests.lora.layers import Tied, trained

each_seed = pytest.mark.parametrize("seed", [0, 1])


class Deep(nn.Module):
    """Twelve layers, whose numbers have one or two digits."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_pattern_that_matches_nothing_is_refused():
    """By its text."""
    apply, params, _ = tdf.functional(Deep())

    with pytest.raises(tdf.FilterError, match=r"(?s)'\*\.q_proj\.weight'.*matches no leaf"):
        Lora("*.q_proj.weight", rank=2).init(params, key=0, apply=apply)


def test_a_number_of_one_digit_is_not_the_end_of_another():
    """Layer 1 has an adapter, and layer 11 has none."""
    apply, params, _ = tdf.functional(Deep())

    adapters = Lora("layers.1.weight", rank=2).init(params, key=0, apply=apply)

    assert {path[:2] for path in adapters.paths()} == {("layers", "1")}


@pytest.mark.parametrize(("layer", "rank"), [("1", 3), ("11", 2)])
def test_ranks_by_pattern_are_those_of_complete_names(layer, rank):
    """The rank of layer 1 is not that of layer 11."""
    apply, params, _ = tdf.functional(Deep())

    adapters = Lora("*.weight", rank={"layers.1.*": 3, "*": 2}).init(params, key=0, apply=apply)

    assert adapters["layers", layer, "weight", "A"].shape[-2] == rank


def test_a_layer_at_the_root_has_an_adapter():
    """A module that is one layer."""
    apply, params, _ = tdf.functional(nn.Linear(4, 3))
    lora = Lora("weight", rank=2)
    adapters = trained(lora, params, apply)
    x = torch.randn(5, 4)

    out = lora.attach(apply)((params, adapters), x)

    torch.testing.assert_close(out, apply(lora.merge(params, adapters), x))


@pytest.mark.parametrize(
    "name", ["language_model.layers.0.{}.weight", "layers.0.{}.default.weight", "model.0.{}.weight"]
)
def test_adapters_under_other_names_are_refused(name, tmp_path):
    """A file whose names do not fit the base is not run as the base alone."""
    parts = {"lora_A": torch.randn(2, 4), "lora_B": torch.randn(4, 2)}
    tensors = {"base_model.model." + name.format(part): leaf for part, leaf in parts.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["0"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))

    with pytest.raises((tdf.LeafMismatchError, tdf.UnsupportedError), match="lora_A"):
        tdf.lora.load(tmp_path, tdf.from_module(Deep()).detach())


@each_seed
def test_an_adapter_of_a_tied_table_is_one_of_the_head(seed):
    """Attached and merged, both uses of the weight change."""
    torch.manual_seed(seed)
    apply, params, _ = tdf.functional(Tied().double())
    lora = Lora("embed.weight", rank=2)
    adapters = trained(lora, params, apply, seed)
    ids = torch.randint(11, (4, 5))

    out = lora.attach(apply)((params, adapters), ids)

    changed = lora.merge(params, adapters)["embed", "weight"]
    hidden = nn.functional.linear(changed[ids], params["body", "weight"], params["body", "bias"]).tanh()
    torch.testing.assert_close(out, hidden @ changed.mT)


def merged_in_order(dora, seed, order):
    """A layer into which two adapters are merged, one after the other."""
    torch.manual_seed(seed)
    apply, params, _ = tdf.functional(nn.Sequential(nn.Linear(4, 4)).double())
    lora = Lora("0.weight", rank=2, dora=dora)
    both = [trained(lora, params, apply, number) for number in order]
    return lora.merge(lora.merge(params, both[0]), both[1])


@each_seed
def test_plain_adapters_are_merged_in_any_order(seed):
    """Their sum does not depend on it."""
    tdf.assert_close(merged_in_order(False, seed, (5, 6)), merged_in_order(False, seed, (6, 5)), rtol=1e-12, atol=1e-12)


@each_seed
def test_the_order_of_dora_merges_counts(seed):
    """The second merge sets the magnitudes of what the first one left."""
    one, other = [merged_in_order(True, seed, order)["0", "weight"] for order in ((5, 6), (6, 5))]

    assert not torch.allclose(one, other, rtol=1e-2, atol=1e-2)
