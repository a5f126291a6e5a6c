"""Adapter files without PEFT: round trips, orientations of experts, Kohya's names, and what is refused."""

import json
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tdfunc as tdf
from tdfunc.lora import Lora
from tdfunc.lora._peft import short_names
from tests.lora.layers import MODULES, Tied, experts, trained

EXPERTS = ("model", "layers", "0", "mlp", "experts")


def folder_of(path, tensors, **config):
    """A folder of PEFT with these leaves and this configuration."""
    path.mkdir(exist_ok=True)
    names = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(names, path / "adapter_model.safetensors")
    plain = {"peft_type": "LORA", "peft_version": "0.21.2", "r": 2, "lora_alpha": 4}
    (path / "adapter_config.json").write_text(json.dumps(plain | config))
    return path


def pair(inputs, outputs, rank=2):
    """The leaves A and B of PEFT."""
    return {"lora_A.weight": torch.randn(rank, inputs), "lora_B.weight": torch.randn(outputs, rank)}


def under(name, parts):
    """These leaves under the name of a module."""
    return {f"{name}.{part}": leaf for part, leaf in parts.items()}


@pytest.mark.parametrize(
    "options", [{}, {"dora": True}, {"start": "olora"}, {"rslora": True, "alpha": 3.0}, {"alpha": 0.3}], ids=str
)
@pytest.mark.parametrize("name", [*(name for name in MODULES if name not in ("grouped", "scaled")), "tied"])
def test_what_is_saved_loads(name, options, tmp_path):
    """The adapters come back with the choice; a start comes back as plain LoRA of twice the rank."""
    if name == "tied" and "dora" in options:
        pytest.skip("DoRA is refused on a tied weight")
    make, where, inputs = MODULES.get(name) or (Tied, "*.weight", lambda: torch.randint(11, (4, 5)))
    apply, params, _ = tdf.functional(make())
    lora, x = Lora(where, **{"rank": 2, "alpha": 4.0} | options), inputs()
    adapters = trained(lora, params, apply)

    tdf.lora.save(tmp_path / "a", lora, adapters, apply)
    back, same = tdf.lora.load(tmp_path / "a", params, apply=apply)

    torch.testing.assert_close(
        back.attach(apply)((params, same), x), lora.attach(apply)((params, adapters), x), atol=1e-5, rtol=1e-4
    )
    assert (back.rank, back.rslora, back.dora) == (4 if "start" in options else 2, lora.rslora, lora.dora)
    if "start" not in options:
        tdf.assert_close(same, adapters)
        assert back.alpha == lora.alpha


def test_numbers_of_a_configuration_are_kept(tmp_path):
    """`lora_alpha` is the number of the file, where the scale times the rank differs from it in the last bit."""
    base = tdf.TensorDict({"a": {"weight": torch.zeros(60, 60)}})
    tensors = {f"a.{name}": leaf for name, leaf in pair(60, 60, 49).items()}
    folder = folder_of(tmp_path / "a", tensors, r=49, lora_alpha=1, target_modules=["a"])

    lora, _ = tdf.lora.load(folder, base)

    assert (lora.alpha, lora.rank) == (1, 49)


@pytest.mark.parametrize(
    ("chosen", "everything", "expected"),
    [
        (["b.a.q", "a.a.q"], ["a.a.q", "a.a.k", "b.a.q"], ["q"]),
        (["a.l.q"], ["a.l.q", "b.m.q"], ["l.q"]),
        (["z.x.y.q", "a.x.y.q"], ["a.x.y.q", "z.x.y.q", "b.x.y.q"], ["a.x.y.q", "z.x.y.q"]),
    ],
)
def test_targets_are_named_by_their_ends_where_these_choose_no_other(chosen, everything, expected):
    """The last parts of names are enough for PEFT; where they choose another layer, the whole names are written."""
    assert short_names(chosen, everything) == expected


def test_other_files_stay_and_load_opens_the_folder(tmp_path):
    """A folder keeps its card; `tdf.load` of it is the tree of the file."""
    apply, params, _ = tdf.functional(nn.Sequential(nn.Linear(3, 4)))
    lora = Lora("0.weight", rank=2)
    (tmp_path / "README.md").write_text("card")

    for seed in range(2):
        tdf.lora.save(tmp_path, lora, trained(lora, params, apply, seed), apply, config={"task_type": "CAUSAL_LM"})

    adapters = tdf.lora.load(tmp_path, params)[1]
    assert (tmp_path / "README.md").read_text() == "card"
    assert json.loads((tmp_path / "adapter_config.json").read_text())["task_type"] == "CAUSAL_LM"
    assert torch.equal(tdf.load(tmp_path)["base_model", "model", "0", "lora_A", "weight"], adapters["0", "weight", "A"])
    tdf.assert_close(adapters, trained(lora, params, apply, 1))


@pytest.mark.parametrize("version", ["0.18.1", "0.19.0", "0.22.0.dev0"])
def test_experts_are_oriented_by_their_version(version, tmp_path):
    """Where hidden = 2 x intermediate both orientations fit gate_up_proj; the version tells, or down_proj does."""
    apply, params, _ = tdf.functional(experts(moe_intermediate_size=8))
    a, b = torch.randn(8, 16), torch.randn(16, 8)
    only = {"target_parameters": ["experts.gate_up_proj"], "peft_version": version}
    name = "model.layers.0.mlp.experts"
    leaves = under(name, {"lora_A.weight": a, "lora_B.weight": b})
    folder = folder_of(tmp_path / "a", leaves, **only)
    by_expert = torch.einsum("ore,eri->eoi", b.view(16, 2, 4), a.view(4, 2, 16)) * 2

    lora, adapters = tdf.lora.load(folder, params, apply=apply)

    change = (lora.merge(params, adapters)[EXPERTS] - params[EXPERTS])["gate_up_proj"]
    torch.testing.assert_close(change, by_expert.mT if version == "0.18.1" else by_expert, atol=1e-5, rtol=1e-4)
    folder_of(folder, leaves, **only | {"peft_version": None})
    with pytest.raises(tdf.UnsupportedError, match=r"gate_up_proj.*square(.|\n)*peft_version"):
        tdf.lora.load(folder, params, apply=apply)
    both = under(f"{name}.base_layer", {"lora_A.weight": a, "lora_B.weight": b}) | under(name, pair(8, 16, 8))
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    lora, adapters = tdf.lora.load(folder_of(folder, both, target_parameters=targets, peft_version=None), params)
    change = (lora.merge(params, adapters)[EXPERTS] - params[EXPERTS])["gate_up_proj"]
    torch.testing.assert_close(change, by_expert, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dora", [False, True])
def test_a_file_of_kohya_loads(dora, tmp_path):
    """Modules are found by their names with underscores, scales by alpha over rank; other models are left."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.to_q, self.mid_block = nn.Linear(4, 6), nn.ModuleList([nn.Conv2d(3, 5, 3)])

    params = tdf.from_module(Net())
    down, up = torch.randn(2, 3, 3, 3), torch.randn(5, 2, 1, 1)
    file = under("lora_unet_to_q", {"lora_down.weight": torch.ones(4, 4), "lora_up.weight": torch.ones(6, 4)})
    file |= under("lora_unet_mid_block_0", {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(1.0)})
    other = under("lora_te1_to_q", {"lora_down.weight": torch.ones(4, 9)})
    if dora:
        file |= {
            "lora_unet_to_q.dora_scale": torch.ones(6, 1),
            "lora_unet_mid_block_0.dora_scale": torch.ones(5, 1, 1, 1),
        }
    save_file(file | other, tmp_path / "a.safetensors")

    lora, adapters = tdf.lora.load(tmp_path / "a.safetensors", params, prefix="lora_unet_")

    merged = lora.merge(params, adapters)
    expected = params["mid_block", "0", "weight"] + torch.einsum("or,rikl->oikl", up[..., 0, 0], down) / 2
    linear = params["to_q", "weight"] + 4
    if dora:
        expected = expected / expected.flatten(1).norm(dim=1)[:, None, None, None]
        linear = linear / linear.norm(dim=1, keepdim=True)
    torch.testing.assert_close(merged["to_q", "weight"], linear, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(merged["mid_block", "0", "weight"], expected, atol=1e-5, rtol=1e-4)
    assert lora.dora == dora


def tied():
    """The parameters of a model with a tied head."""
    return tdf.functional(Tied())[1]


def linear():
    """The parameters of a linear layer called `0`."""
    return tdf.functional(nn.Sequential(nn.Linear(3, 4)))[1]


GOOD = under("0", pair(3, 4))
# (params, leaves, configuration, error, pattern)
REFUSED = {
    "a module that is not there": (linear, under("7", pair(3, 4)), {}, tdf.LeafMismatchError, "'7.lora_A.weight'"),
    "a leaf that is not there": (linear, GOOD | {"1.weight": torch.ones(3)}, {}, tdf.LeafMismatchError, "'1.weight'"),
    "a layer of another size": (linear, under("0", pair(3, 5)), {}, tdf.LeafMismatchError, r"'0\.weight'.*fit"),
    "another rank": (linear, GOOD, {"r": 3}, tdf.LeafMismatchError, r"rank of '0\.weight'"),
    "A alone": (linear, {"0.lora_A.weight": torch.ones(2, 3)}, {}, tdf.LeafMismatchError, "must have A and B"),
    "nothing changes": (linear, {name: leaf * 0 for name, leaf in GOOD.items()}, {}, ValueError, "change something"),
    "another method": (linear, GOOD, {"peft_type": "LOHA"}, tdf.UnsupportedError, "LOHA"),
    "an option that is not read": (linear, GOOD, {"use_qalora": True}, tdf.UnsupportedError, "use_qalora"),
    "tokens": (linear, GOOD, {"trainable_token_indices": [1]}, tdf.UnsupportedError, "trainable_token_indices"),
    "a start in the base": (linear, GOOD, {"init_lora_weights": "pissa"}, tdf.UnsupportedError, "pissa"),
    "one of two tied weights": (tied, under("head", pair(6, 11)), {}, tdf.UnsupportedError, "head.weight are one"),
    "too few magnitudes": (
        linear, GOOD | {"0.lora_magnitude_vector": torch.ones(3)}, {}, tdf.LeafMismatchError, r"4 magnitudes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused(case, tmp_path):
    """By the name of the leaf or of the option; nothing is skipped."""
    make, tensors, config, kind, pattern = REFUSED[case]

    with pytest.raises(kind, match=pattern):
        tdf.lora.load(folder_of(tmp_path / "a", tensors, **config), make())


def attach(where, module, **options):
    """The function of a module with adapters, and its parameters and fresh adapters."""
    apply, params, _ = tdf.functional(module)
    lora = Lora(where, rank=2, **options)
    return lora.attach(apply), params, lora.init(params, key=0, apply=apply)


def run_rows():
    """Rows of an input that are not those of the adapters."""
    apply, params, _ = tdf.functional(nn.Sequential(nn.Linear(3, 4)))
    lora = Lora("0.weight", rank=2)
    many = torch.stack([lora.init(params, key=i) for i in range(2)])
    return lora.attach(apply, rows=True)((params, many), torch.ones(5, 3))


def run_attention():
    """A layer whose weight another module reads."""
    run, params, adapters = attach("out_proj.weight", nn.MultiheadAttention(4, 2))
    return run((params, adapters), *[torch.ones(1, 2, 4)] * 3)


def run_other():
    """Adapters of another choice."""
    run, params, _ = attach("0.weight", nn.Sequential(nn.Linear(3, 4)))
    return run((params, Lora("0.weight", rank=3).init(params, key=0)), torch.ones(2, 3))


def save_part(module, where, **options):
    """Adapters that PEFT cannot hold."""
    apply, params, _ = tdf.functional(module)
    lora = Lora(where, rank=2, **options)
    tdf.lora.save("unused", lora, trained(lora, params, apply), apply)


def merge_bias(module):
    """A bias for a layer without one."""
    _, params, adapters = attach("0.weight", module, bias=True)
    return Lora("0.weight", rank=2, bias=True).merge(params, adapters)


NET = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.LSTM(4, 4))
# call -> (error, pattern)
ERRORS = {
    "a norm": (lambda: attach("1.weight", NET), tdf.LeafMismatchError, r"'1\.weight' cannot have an adapter"),
    "a recurrent layer": (lambda: attach("2.weight_ih_l0", NET), tdf.UnsupportedError, "weight_ih_l0.*LSTM"),
    "no leaf": (lambda: attach("9.weight", NET), tdf.FilterError, "matches no leaf"),
    "chosen twice": (lambda: attach("0.*", NET, whole="0.*"), tdf.FilterError, "`where` or by `whole`"),
    "rank 0": (lambda: Lora("0.weight", rank=0).init(linear(), key=0), ValueError, "rank of"),
    "a start": (lambda: Lora("0.weight", rank=2, start="svd"), ValueError, "start must be"),
    "a probability": (lambda: Lora("0.weight", rank=2, dropout=1.0), ValueError, "dropout"),
    "three dimensions": (
        lambda: Lora("0.weight", rank=2).init(tdf.from_module(nn.Sequential(nn.Conv1d(2, 3, 4))), key=0),
        tdf.LeafMismatchError, "apply=apply",
    ),
    "a bias of an embedding": (lambda: attach("0.weight", nn.Sequential(nn.Embedding(3, 4)), bias=True),
        tdf.UnsupportedError, "embedding '0.weight' cannot have a bias"),
    "rows": (run_rows, tdf.LeafMismatchError, "a row for each adapter"),
    "a weight that is read past its adapter": (run_attention, tdf.LeakError, r"'out_proj\.weight' without its adapter"),
    "another rank": (run_other, tdf.LeafMismatchError, "0.weight.A"),
    "no pair": (lambda: attach("0.weight", NET)[0](linear(), torch.ones(2, 3)), TypeError, "must be the parameters"),
    "unmerge of DoRA": (
        lambda: Lora("0.weight", rank=2, dora=True).unmerge(linear(), linear()), tdf.UnsupportedError, "DoRA",
    ),
    "a bias that is not there": (
        lambda: merge_bias(nn.Sequential(nn.Linear(3, 4, bias=False))), tdf.LeafMismatchError, "its layer has none",
    ),
    "a grouped convolution in PEFT": (
        lambda: save_part(nn.Sequential(nn.Conv2d(4, 4, 3, groups=2)), "0.weight"), tdf.UnsupportedError, "grouped",
    ),
    "part of a module in PEFT": (
        lambda: save_part(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), "0.weight", whole="1.weight"),
        tdf.UnsupportedError, "some leaves",
    ),
    "rows of a whole leaf": (
        lambda: Lora("0.weight", rank=2, whole="1.*").attach(tdf.functional(NET[:2])[0], rows=True),
        tdf.UnsupportedError, "trained whole",
    ),
    "a layer without a name": (lambda: save_part(nn.Linear(3, 4), "weight"), tdf.UnsupportedError, "without a name"),
    "a pickle": (lambda: tdf.lora.load(".", linear()), FileNotFoundError, "adapter_config.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_messages(case, monkeypatch, tmp_path):
    """A mistake names the leaf and the way out."""
    monkeypatch.chdir(tmp_path)
    call, kind, pattern = ERRORS[case]

    with pytest.raises(kind, match=pattern):
        call()


def test_the_function_is_a_value():
    """It survives pickling, knows its mode, and extract finds what merge put in."""
    run, params, adapters = attach("*.weight", nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)))
    lora, x = run._lora, torch.randn(5, 3)
    adapters = adapters.apply(torch.randn_like)
    merged = lora.merge(params, adapters)

    again = pickle.loads(pickle.dumps(run.eval()))

    torch.testing.assert_close(again((params, adapters), x), run.eval()((params, adapters), x))
    assert (run.training, run.eval().training) == (True, False)
    tdf.assert_close(lora.merge(params, lora.extract(params, merged)), merged, atol=1e-4, rtol=1e-4)
    drawn = run((params, adapters), x, rng=0)
    torch.testing.assert_close(drawn, run((params, adapters), x, rng=0))
