"""The state of random generators as a tree."""

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tdfunc import TreeStructureError, UnsupportedError, get_rng_state, load, save, set_rng_state


def draw_global():
    """Draws from all global generators, an odd number of normal ones, which come in pairs."""
    return [
        *torch.randn(3).tolist(), random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())
    ]  # fmt: skip


@given(before=st.integers(0, 3), between=st.integers(0, 3))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
def test_the_global_generators_go_on_where_they_were(before, between, tmp_path):
    """After a restore the global generators draw what they drew after the save."""
    for _ in range(before):
        draw_global()
    save(get_rng_state(), tmp_path / "rng.safetensors")
    expected = draw_global()
    for _ in range(between):
        draw_global()
    set_rng_state(load(tmp_path / "rng.safetensors"))

    assert draw_global() == expected


@pytest.mark.parametrize(("in_use", "values"), [(False, {}), (True, {"0": 0, "1": 1})], ids=["not in use", "in use"])
def test_reading_changes_nothing(in_use, values, monkeypatch):
    """Reading the state does not advance a generator, or start CUDA; devices in use are read."""
    before = draw_state()
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.tensor)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)

    assert get_rng_state()["cuda"].to_dict() == values
    assert draw_state() == before


def test_own_generators(tmp_path):
    """Generators of torch, and the global ones with them, draw what they drew after the save; numpy's are data."""
    own, other = (torch.Generator().manual_seed(seed) for seed in range(2))
    numpys = [np.random.default_rng(seed) for seed in range(2)]

    def draw(torchs, numpys):
        return {"torch": torch.rand(3, generator=torchs).tolist(), "global": draw_global(), "numpy": numpys.normal()}

    torch.rand(1, generator=own)
    save({"rng": get_rng_state(dropout=own), "data": numpys[0].bit_generator.state}, tmp_path / "rng.safetensors")
    expected = draw(own, numpys[0])
    loaded = load(tmp_path / "rng.safetensors")
    set_rng_state(loaded["rng"], dropout=other)
    numpys[1].bit_generator.state = loaded["data"]

    assert draw(other, numpys[1]) == expected


@pytest.mark.parametrize(
    ("own", "got"),
    [({}, "numpy, python, torch"), ({"other": torch.Generator()}, "numpy, other")],
    ids=["none", "other"],
)
def test_generators_of_other_names_are_refused(own, got):
    """With the names that are there and that are given."""
    state = get_rng_state(data=torch.Generator())
    with pytest.raises(TreeStructureError, match=rf"expected: cuda, data, numpy.*\n.*got: +cuda, {got}"):
        set_rng_state(state, **own)


def test_states_of_another_form_are_refused():
    """No generator changes."""
    state = get_rng_state(data=torch.Generator())
    torch.rand(1)
    before = draw_state()
    with pytest.raises(UnsupportedError, match=r"does not fit the generator data(.|\n)*got: "):
        set_rng_state(state.set("data", torch.zeros(3)), data=torch.Generator())
    assert draw_state() == before


def test_names_of_global_generators_are_refused():
    """They have their own."""
    with pytest.raises(ValueError, match=r"name of a global one.\s*got: .*'cuda', 'numpy', 'python', 'torch'"):
        get_rng_state(**dict.fromkeys(["torch", "cuda", "python", "numpy"], torch.Generator()))


@pytest.mark.parametrize("key", ["torch", "cuda", "python", "numpy"])
def test_a_global_state_of_another_form(key):
    """A damaged state is refused by name, and no generator changes."""
    state, before = get_rng_state().set(key, torch.zeros(3)), draw_state()
    with pytest.raises(UnsupportedError, match=r"global generators(.|\n)*get_rng_state(.|\n)*got: +\w+Error"):
        set_rng_state(state)

    assert draw_state() == before


def draw_state():
    """The state of all global generators."""
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def test_fewer_devices():
    """The state of a device that is not here is refused, and no generator changes."""
    state, before = get_rng_state().set(("cuda", "0"), torch.zeros(16, dtype=torch.uint8)), draw_state()
    if torch.cuda.device_count():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(UnsupportedError, match=r"^set_rng_state: the state has more CUDA devices(.|\n)*1(.|\n)*0"):
        set_rng_state(state)

    assert draw_state() == before
