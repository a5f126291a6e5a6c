"""Folders that PEFT wrote, and files in Kohya's names, give the outputs that PEFT and plain torch compute."""

from pathlib import Path

import pytest
import torch

import tdfunc as tdf
from tests.lora.golden.model import GOLDEN, IDS, Net, folder_name

FOLDER = Path(__file__).parent / "golden"
FILES = {**{folder_name(case): folder_name(case) for case in GOLDEN}, **dict.fromkeys(["kohya", "kohya_dora"])}
EXPECTED = {"atol": 1e-5, "rtol": 1e-5}


def loaded(name):
    """The function and the parameters of the base, the adapters of a file, and its outputs."""
    base = tdf.load(FOLDER / "base.safetensors")
    model = Net().eval()
    model.load_state_dict({".".join(path): leaf for path, leaf in base.items(True, True)})
    apply, params, _ = tdf.functional(model)
    where = FOLDER / (FILES[name] or f"{name}.safetensors")
    return apply, params, *tdf.lora.load(where, params), tdf.load(FOLDER / "outputs.safetensors")[name]


@pytest.mark.parametrize("name", FILES)
def test_attached_adapters_of_a_golden_file_compute_its_outputs(name):
    """As PEFT runs them."""
    apply, params, lora, adapters, outputs = loaded(name)

    torch.testing.assert_close(lora.attach(apply)((params, adapters), IDS), outputs, **EXPECTED)


@pytest.mark.parametrize("name", FILES)
def test_merged_adapters_of_a_golden_file_compute_its_outputs(name):
    """As PEFT runs them."""
    apply, params, lora, adapters, outputs = loaded(name)

    torch.testing.assert_close(apply(lora.merge(params, adapters), IDS), outputs, **EXPECTED)


@pytest.mark.parametrize("name", FILES)
def test_a_golden_file_that_is_saved_again_has_the_same_adapters(name, tmp_path):
    """In a folder of our own."""
    apply, params, lora, adapters, _ = loaded(name)

    tdf.lora.save(tmp_path / "a", lora, adapters, apply)

    tdf.assert_close(tdf.lora.load(tmp_path / "a", params)[1], adapters, atol=0, rtol=0)
