"""Adapter files without PEFT: round trips, orientations of experts, Kohya's names, and what is refused."""

import copy
import json
import os
import pickle
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tdfunc as tdf
from tdfunc.lora import Lora
from tdfunc.lora.files import api
from tdfunc.lora.files.writing import short_names
from tests.lora.layers import MODULES, NO_BIAS, NOT_IN_PEFT, Tied, TiedLinear, experts, trained

pytestmark = pytest.mark.sample(2)

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


OPTIONS = [{}, {"start": "olora"}, {"rslora": True, "alpha": 3.0, "dropout": 0.1}, {"alpha": 0.3}]
SAVED = [
    *((name, option) for name in MODULES for option in OPTIONS),
    *((name, {"dora": True}) for name in MODULES if name not in NO_BIAS or name == "embedding"),
    *((name, {"bias": True}) for name in MODULES if name not in NO_BIAS),
]


def saved_and_loaded(name, options, folder):
    """A choice, its adapters and those that come back, and the outputs of both."""
    make, where, inputs = MODULES[name]
    apply, params, _ = tdf.functional(make().eval())
    lora, x = Lora(where, **{"rank": 2, "alpha": 4.0} | options), inputs()
    adapters = trained(lora, params, apply)
    tdf.lora.save(folder / "a", lora, adapters, apply)
    back, same = tdf.lora.load(folder / "a", params, apply=apply)
    outputs = [one.attach(apply)((params, leaves), x) for one, leaves in ((back, same), (lora, adapters))]
    return lora, adapters, back, same, outputs


def choice(lora):
    """The entries of a choice that a start does not change."""
    return {name: getattr(lora, name) for name in ("rslora", "dora", "bias", "dropout")}


IN_PEFT = [row for row in SAVED if row[0] not in NOT_IN_PEFT]


@pytest.mark.parametrize(("name", "options"), [row for row in IN_PEFT if "start" not in row[1]], ids=str)
def test_what_is_saved_loads(name, options, tmp_path):
    """The adapters come back with the choice."""
    lora, adapters, back, same, outputs = saved_and_loaded(name, options, tmp_path)

    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-4)
    tdf.assert_close(same, adapters)
    assert choice(back) == choice(lora)
    assert back.rank == 2
    assert back.alpha == lora.alpha


@pytest.mark.parametrize(("name", "options"), [row for row in IN_PEFT if "start" in row[1]], ids=str)
def test_a_start_loads_as_plain_lora(name, options, tmp_path):
    """Of twice the rank."""
    lora, _, back, _, outputs = saved_and_loaded(name, options, tmp_path)

    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-4)
    assert choice(back) == choice(lora)
    assert back.rank == 4


class TiedExperts(nn.Module):
    """Two layers of experts with the same weights."""

    def __init__(self):
        super().__init__()
        self.first = MODULES["experts"][0]()
        self.second = copy.deepcopy(self.first)
        for name in ("gate_up_proj", "down_proj"):
            setattr(self.second.experts, name, getattr(self.first.experts, name))

    def forward(self, x):
        return self.second(self.first(x))


def test_tied_experts_that_are_saved_load(tmp_path):
    """Each of the layers has the adapters of both parameters."""
    apply, params, _ = tdf.functional(TiedExperts())
    lora = Lora("*_proj", rank=2)
    adapters = trained(lora, params, apply)

    tdf.lora.save(tmp_path / "a", lora, adapters, apply)

    tdf.assert_close(tdf.lora.load(tmp_path / "a", params, apply=apply)[1], adapters)


NOTHING = tdf.Filter(lambda path, leaf: False)


@pytest.mark.parametrize(
    ("where", "whole", "bias", "modules"),
    [
        ("0.weight", "1.*", "none", ["1"]),
        ("0.weight", "*.bias", "all", None),
        ("0.weight", "0.bias", "lora_only", None),
        ("0.weight", tdf.Filter("0.bias") | "1.*", "lora_only", ["1"]),
        (NOTHING, "2.0.*", "none", ["2.0"]),
    ],
)
def test_whole_leaves_are_biases_or_modules_of_peft(where, whole, bias, modules, tmp_path):
    """They come back, with or without adapters, and a layer with another name that ends alike is not chosen."""
    apply, params, _ = tdf.functional(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4))))
    lora = Lora(where, rank=2, whole=whole)
    adapters = trained(lora, params, apply)

    tdf.lora.save(tmp_path, lora, adapters, apply)
    same = tdf.lora.load(tmp_path, params)[1]

    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["bias"] == bias
    assert config["modules_to_save"] == modules
    tdf.assert_close(same, adapters)


def test_numbers_of_a_configuration_are_kept(tmp_path):
    """`lora_alpha` is the number of the file, where the scale times the rank differs from it in the last bit."""
    base = tdf.TensorDict({"a": {"weight": torch.zeros(60, 60)}})
    # As for a resized vocabulary, the file has the weight, which is the base's.
    tensors = under("a", pair(60, 60, 49)) | {"a.weight": torch.zeros(60, 60)}
    folder = folder_of(tmp_path / "a", tensors, r=49, lora_alpha=1, target_modules=["a"])

    lora, _ = tdf.lora.load(folder, base)

    assert lora.alpha == 1
    assert lora.rank == 49
    assert lora.whole is None


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
    for known, options, what in ((None, {"apply": apply}, "peft_version in"), ("0.19.0", {}, "apply=, which")):
        folder_of(folder, leaves, **only | {"peft_version": known})
        with pytest.raises(tdf.UnsupportedError, match=rf"gate_up_proj.*square(.|\n)*{what}"):
            tdf.lora.load(folder, params, **options)
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
    file = under("lora_unet_to_q", {"lora_down.weight": torch.ones(3, 4), "lora_up.weight": torch.ones(6, 3)})
    file |= under("lora_unet_mid_block_0", {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(1.0)})
    other = under("lora_te1_to_q", {"lora_down.weight": torch.ones(4, 9)})
    if dora:
        file |= under("lora_unet_to_q", {"dora_scale": torch.ones(6, 1)})
        file |= under("lora_unet_mid_block_0", {"dora_scale": torch.ones(5, 1, 1, 1)})
    save_file(file | other, tmp_path / "a.safetensors")

    lora, adapters = tdf.lora.load(tmp_path / "a.safetensors", params, prefix="lora_unet_")

    merged = lora.merge(params, adapters)
    expected = params["mid_block", "0", "weight"] + torch.einsum("or,rikl->oikl", up[..., 0, 0], down) / 2
    linear = params["to_q", "weight"] + 3
    if dora:
        expected = expected / expected.flatten(1).norm(dim=1)[:, None, None, None]
        linear = linear / linear.norm(dim=1, keepdim=True)
    torch.testing.assert_close(merged["to_q", "weight"], linear, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(merged["mid_block", "0", "weight"], expected, atol=1e-5, rtol=1e-4)
    assert lora.dora == dora


def test_a_base_of_kohya_may_have_the_names_of_peft(tmp_path):
    """The beginning that PEFT's names have is removed only from PEFT's names."""
    path = ("base_model", "model", "0", "weight")
    params = tdf.TensorDict({path: torch.zeros(4, 3)})
    save_file(under("lora_te_base_model_model_0", DOWN), tmp_path / "a.safetensors")

    _, adapters = tdf.lora.load(tmp_path / "a.safetensors", params)

    torch.testing.assert_close(adapters[(*path, "A")], DOWN["lora_down.weight"])


# The parameters of bases.
TIED = lambda: tdf.functional(Tied())[1]  # noqa: E731
LINEAR = lambda: tdf.functional(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)))[1]  # noqa: E731
GROUPED = lambda: tdf.functional(nn.Sequential(nn.Conv2d(4, 4, 1, groups=2)))[1]  # noqa: E731
EXPERTS_OF_0 = lambda: tdf.TensorDict({"0": {"w": torch.zeros(3, 4, 5)}})  # noqa: E731
ALIKE = lambda: tdf.TensorDict({"a": {"b": {"weight": ROW}}, "a_b": {"weight": ROW}})  # noqa: E731
ROW, GOOD, GOOD_1 = torch.ones(2, 3), under("0", pair(3, 4)), under("1", pair(4, 3))
CHANNELS = under("0", {"lora_A.weight": torch.ones(2, 4, 1, 1), "lora_B.weight": torch.ones(4, 2, 1, 1)})
TIED_LINEAR = lambda: tdf.functional(TiedLinear())[1]  # noqa: E731
ONES = {"lora_A.weight": torch.ones(2, 6), "lora_B.weight": torch.ones(6, 2)}
ONE_BIAS = under("a", ONES) | under(
    "b", {name: leaf.clone() for name, leaf in ONES.items()} | {"lora_B.bias": torch.ones(6)}
)
NORM = lambda: tdf.functional(NET)[1]  # noqa: E731
MAGNITUDES = {"lora_magnitude_vector": torch.ones(3)}
TOKEN_ROWS = {"1.token_adapter.trainable_tokens_delta": torch.ones(2, 4)}
DOWN = {"lora_down.weight": ROW, "lora_up.weight": torch.ones(4, 2)}
SCALED = under("lora_te_0", DOWN | {"dora_scale": torch.ones(4, 1)})
DOWN_1 = {"lora_down.weight": torch.ones(2, 4), "lora_up.weight": torch.ones(3, 2)}
OF_0 = under("0", pair(5, 4, 6) | MAGNITUDES)
MISFIT, UNSUPPORTED, OTHER = tdf.LeafMismatchError, tdf.UnsupportedError, tdf.TreeStructureError


def load_peft(tensors, make=LINEAR, **config):
    """Load a folder of PEFT."""
    return tdf.lora.load(folder_of(Path("a"), tensors, **config), make())


def load_text(text):
    """Load a folder of PEFT with this text as its configuration."""
    (folder_of(Path("a"), GOOD) / "adapter_config.json").write_text(text)
    return tdf.lora.load("a", LINEAR())


def load_file(tensors, make=LINEAR):
    """Load a file, as Kohya's scripts write them."""
    save_file({name: leaf.clone() for name, leaf in tensors.items()}, "a.safetensors")
    return tdf.lora.load("a.safetensors", make())


def attach(where, module, **options):
    """The function of a module with adapters, and its parameters and fresh adapters."""
    apply, params, _ = tdf.functional(module)
    lora = Lora(where, rank=2, **options)
    return lora.attach(apply), params, lora.init(params, key=0, apply=apply)


def run_rows(name):
    """Rows of an input that are not those of the adapters."""
    make, where, inputs = MODULES[name]
    apply, params, _ = tdf.functional(make())
    lora = Lora(where, rank=2)
    many = torch.stack([lora.init(params, key=i, apply=apply) for i in range(5)])
    return lora.attach(apply, rows=True)((params, many), inputs())


def call(run, params, adapters, *args):
    """The output of a function with adapters."""
    return run((params, adapters), *args)


def init(where="0.weight", rank=2):
    """Fresh adapters of linear layers."""
    return Lora(where, rank=rank).init(LINEAR(), key=0)


def save_part(module, where, **options):
    """Adapters that PEFT cannot hold."""
    apply, params, _ = tdf.functional(module)
    lora = Lora(where, rank=2, **options)
    tdf.lora.save("unused", lora, trained(lora, params, apply), apply)


NET = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ConvTranspose1d(4, 4, 2))
UNBIASED, CONV = nn.Sequential(nn.Linear(3, 4, bias=False)), nn.Sequential(nn.Conv1d(2, 3, 4))
TUNED = tdf.TensorDict({"0": {"weight": ROW}})
HEADS, X = nn.MultiheadAttention(4, 2), [torch.ones(1, 2, 4)] * 3
NAMED = type("Named", (nn.Linear,), {"forward": lambda self, input, rng=None: input})(3, 4)
PLAIN, BIAS, WHOLE = (Lora("0.weight", rank=2, **more) for more in ({}, {"bias": True}, {"whole": "1.*"}))
DORA, PISSA = Lora("0.weight", rank=2, dora=True), Lora("0.weight", rank=2, start="pissa")
ZERO, ZERO_PISSA = Lora("0.weight", rank=2, alpha=0.0), Lora("0.weight", rank=2, alpha=0.0, start="pissa")
BOTH = {"dora": True, "bias": True}
MAGNITUDES_OF_0 = under("0", {"lora_magnitude_vector": torch.ones(4)})
TWICE = {"1.bias": torch.ones(3), "1.modules_to_save.bias": torch.zeros(3)}
STATISTICAL = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
STATISTICS = lambda: tdf.from_module(STATISTICAL)  # noqa: E731
BOUNDED = lambda: nn.Sequential(nn.Embedding(5, 4, max_norm=1.0))  # noqa: E731
ALPHA_1, OTHER_MODEL = {"lora_te_1.alpha": torch.tensor(1.0)}, under("lora_unet_0", DOWN)
ENDS = lambda: nn.ModuleDict({"a": nn.Linear(3, 4), "head": nn.Linear(4, 4), "subhead": nn.Linear(4, 4)})  # noqa: E731
INSIDE = lambda: nn.ModuleDict({"x": nn.ModuleDict({"n": nn.Linear(3, 4)}), "n": nn.Linear(4, 4)})  # noqa: E731
# call -> (error, pattern)
ERRORS = {
    "a module that is not there": (lambda: load_peft(under("7", pair(3, 4))), MISFIT, "'7.lora_A.weight'"),
    "a leaf that is not there": (lambda: load_peft(GOOD | {"7.weight": torch.ones(3)}), MISFIT, "'7.weight'"),
    "a layer of another size": (lambda: load_peft(under("0", pair(3, 5))), MISFIT, r"'0\.weight'.*fit"),
    "a whole leaf of another size": (lambda: load_peft(GOOD | {"0.bias": torch.ones(5)}), MISFIT, r"'0\.bias' does"),
    "another table": (lambda: load_peft(GOOD | {"0.weight": torch.ones(4, 3)}), UNSUPPORTED, "another table"),
    "unequal parts": (lambda: load_file(SCALED | under("lora_te_1", DOWN_1)), MISFIT, "different parts"),
    "another rank": (lambda: load_peft(GOOD, r=3), MISFIT, r"rank of '0\.weight'"),
    "magnitudes that are lost": (lambda: load_peft(GOOD, use_dora=True), MISFIT, "'use_dora' and the tensors"),
    "magnitudes without the option": (lambda: load_peft(GOOD | MAGNITUDES_OF_0), MISFIT, "'use_dora' and the tensors"),
    "biases that are lost": (lambda: load_peft(GOOD, lora_bias=True), MISFIT, "'lora_bias' and the tensors"),
    "a layer that is lost": (lambda: load_peft(GOOD, target_modules=["0", "1"]), MISFIT, "adapter of '1.weight'"),
    "a layer not named": (lambda: load_peft(GOOD, target_modules=["1"]), MISFIT, "no adapter of '0.weight'"),
    "trained biases that are lost": (lambda: load_peft(GOOD, bias="all"), MISFIT, "values of '0.bias', '1.bias'"),
    "a module that is lost": (lambda: load_peft(GOOD, modules_to_save=["1"]), MISFIT, "values of '1.weight', '1.bias'"),
    "two values": (lambda: load_peft(GOOD | TWICE), MISFIT, "two values of '1.bias'"),
    "a buffer": (lambda: load_peft(GOOD | {"1.running_mean": ROW}, STATISTICS), MISFIT, "'1.running_mean'"),
    "alpha as text": (lambda: load_peft(GOOD, lora_alpha="8"), UNSUPPORTED, "value of 'lora_alpha'"),
    "alpha NaN": (lambda: load_peft(GOOD, lora_alpha=float("nan")), UNSUPPORTED, "value of 'lora_alpha'"),
    "a rank of 0": (lambda: load_peft(GOOD, r=0), UNSUPPORTED, "value of 'r'"),
    "an option as text": (lambda: load_peft(GOOD, use_rslora="false"), UNSUPPORTED, "value of 'use_rslora'"),
    "patterns as a list": (lambda: load_peft(GOOD, rank_pattern=["0"]), UNSUPPORTED, "value of 'rank_pattern'"),
    "targets as a number": (lambda: load_peft(GOOD, target_modules=3), UNSUPPORTED, "value of 'target_modules'"),
    "layers as text": (lambda: load_peft(GOOD, layers_to_transform="3"), UNSUPPORTED, "value of 'layers_to_transform'"),
    "a kind of biases": (lambda: load_peft(GOOD, bias="some"), UNSUPPORTED, "value of 'bias'"),
    "no pattern": (lambda: load_peft(GOOD, target_modules="(?i)a"), UNSUPPORTED, "pattern.*'target_modules'"),
    "no JSON": (lambda: load_text("{"), tdf.CorruptCheckpointError, "adapter_config.json.* is not JSON"),
    "deep JSON": (lambda: load_text("[" * 100000), tdf.CorruptCheckpointError, "is not JSON"),
    "a list in JSON": (lambda: load_text("[]"), tdf.CorruptCheckpointError, "is not a configuration"),
    "an alpha alone": (lambda: load_file(under("lora_te_0", DOWN) | ALPHA_1), MISFIT, "'1' has an alpha, and no"),
    "an alpha of many": (lambda: load_file(under("lora_te_0", DOWN | {"alpha": ROW})), MISFIT, "not an alpha"),
    "two files of Kohya": (lambda: load_file(under("lora_te_0", DOWN) | OTHER_MODEL), UNSUPPORTED, "two adapters"),
    "a scale of 0": (lambda: ZERO.extract(LINEAR(), LINEAR()), ValueError, "scale of '0.weight' is 0"),
    "a start of scale 0": (lambda: ZERO_PISSA.init(LINEAR(), key=0), ValueError, "scale of '0.weight' is 0"),
    "no function": (lambda: PLAIN.init(LINEAR(), key=0, apply=LINEAR()), TypeError, "not the function of a module"),
    "max_norm in PEFT": (lambda: save_part(BOUNDED(), "0.weight"), UNSUPPORTED, "max_norm"),
    "DoRA with a bias in PEFT": (lambda: save_part(NET[:1], "0.weight", **BOTH), UNSUPPORTED, "DoRA with a bias"),
    "a norm with statistics": (lambda: save_part(STATISTICAL, "0.weight", whole="1.*"), UNSUPPORTED, "with buffers"),
    "a name that ends another": (lambda: save_part(ENDS(), "a.weight", whole="head.*"), UNSUPPORTED, "also the end of"),
    "a part of an adapted name": (lambda: save_part(INSIDE(), "x.n.weight", whole="n.*"), UNSUPPORTED, "end of"),
    "A alone": (lambda: load_peft({"0.lora_A.weight": ROW}), MISFIT, "have both A and B"),
    "nothing changes": (lambda: load_peft({name: leaf * 0 for name, leaf in GOOD.items()}), ValueError, "change noth"),
    "another method": (lambda: load_peft(GOOD, peft_type="LOHA"), UNSUPPORTED, "LOHA"),
    "an option that is not read": (lambda: load_peft(GOOD, use_qalora=True), UNSUPPORTED, "use_qalora"),
    "tokens without rows": (lambda: load_peft(GOOD, trainable_token_indices=[1]), MISFIT, "trainable_token_indices"),
    "rows without tokens": (lambda: load_peft(GOOD | TOKEN_ROWS), MISFIT, "trainable_token_indices"),
    "other tokens": (lambda: load_peft(GOOD | TOKEN_ROWS, trainable_token_indices=[1]), MISFIT, "got:      1 numbers"),
    "a token beyond": (lambda: load_peft(GOOD | TOKEN_ROWS, trainable_token_indices=[1, 9]), MISFIT, "too few rows"),
    "tokens by name": (lambda: load_peft(GOOD, trainable_token_indices=["a"]), UNSUPPORTED, "numbers of r"),
    "a start in the base": (lambda: load_peft(GOOD, init_lora_weights="pissa"), UNSUPPORTED, "pissa"),
    "one of two tied weights": (lambda: load_peft(under("head", pair(6, 11)), TIED), UNSUPPORTED, "weight are one"),
    "parts of one tied weight": (lambda: load_peft(ONE_BIAS, TIED_LINEAR), UNSUPPORTED, "adapters that differ"),
    "an adapter of a norm": (lambda: load_peft(under("1", pair(4, 4)), NORM), MISFIT, "'1.weight' cannot have an ad"),
    "too few magnitudes": (lambda: load_peft(GOOD | under("0", MAGNITUDES)), MISFIT, r"4 magnitudes"),
    "magnitudes of experts": (lambda: load_peft(OF_0, EXPERTS_OF_0, target_parameters=["0.w"]), MISFIT, "no experts"),
    "channels of all groups": (lambda: load_peft(CHANNELS, GROUPED), UNSUPPORTED, "grouped convolution"),
    "a norm": (lambda: attach("1.weight", NET), MISFIT, r"'1\.weight' cannot have an adapter"),
    "another layer": (lambda: attach("2.weight", NET), UNSUPPORTED, r"2\.weight.*ConvTranspose1d"),
    "a bias of experts": (lambda: attach("*gate_up_proj_bias", MODULES["experts"][0]()), UNSUPPORTED, "up_proj_bias"),
    "no leaf": (lambda: attach("9.weight", NET), tdf.FilterError, "matches no leaf"),
    "no choice": (lambda: init(NOTHING), tdf.FilterError, "chooses no leaf"),
    "chosen twice": (lambda: attach("0.*", NET, whole="0.*"), tdf.FilterError, "`where` and `whole` both"),
    "rank 0": (lambda: init(rank=0), ValueError, "rank of"),
    "a start": (lambda: Lora("0.weight", rank=2, start="svd"), ValueError, "start must be"),
    "a probability": (lambda: Lora("0.weight", rank=2, dropout=1.0), ValueError, "dropout"),
    "three dimensions": (lambda: PLAIN.init(tdf.from_module(CONV), key=0), MISFIT, "apply=apply"),
    "a bias of an embedding": (lambda: attach("embed.weight", Tied(), bias=True), UNSUPPORTED, "cannot have a bias"),
    "DoRA of tied layers": (lambda: attach("embed.weight", Tied(), dora=True), UNSUPPORTED, "'head.weight', and DoRA"),
    "rows": (lambda: run_rows("linear"), MISFIT, "a row for each adapter"),
    "rows of experts": (lambda: run_rows("experts"), MISFIT, "do not come row by row"),
    "a read past the adapter": (lambda: call(*attach("out_proj.weight", HEADS), *X), tdf.LeakError, "out_proj.weight"),
    "another rank in a run": (lambda: call(*attach("0.weight", NET[:1])[:2], init(rank=3), ROW), MISFIT, "0.weight.A"),
    "no adapters": (lambda: call(*attach("0.weight", NET[:1])[:2], LINEAR(), ROW), OTHER, "the leaves of this Lora"),
    "other leaves": (lambda: PLAIN.merge(LINEAR(), init("*.weight")), OTHER, "the leaves of this Lora"),
    "a merge of another rank": (lambda: PLAIN.merge(LINEAR(), init(rank=3)), MISFIT, "does not fit the base"),
    "a name in a call": (lambda: call(*attach("weight", NAMED), ROW), UNSUPPORTED, "argument called 'rng'"),
    "a name in with_buffers": (lambda: attach("weight", NAMED)[0].with_buffers(({}, {}), {}, ROW), UNSUPPORTED, "rng"),
    "no pair": (lambda: attach("0.weight", NET)[0](LINEAR(), ROW), TypeError, "not a pair of the para"),
    "unmerge of DoRA": (lambda: DORA.unmerge(LINEAR(), LINEAR()), UNSUPPORTED, "DoRA"),
    "extract of a start": (lambda: PISSA.extract(LINEAR(), LINEAR()), UNSUPPORTED, "with a start cannot be"),
    "extract of another shape": (lambda: PLAIN.extract(LINEAR(), TUNED), MISFIT, "does not fit the base"),
    "a bias that is not there": (lambda: BIAS.merge(*attach("0.weight", UNBIASED, bias=True)[1:]), MISFIT, "has none"),
    "a grouped convolution in PEFT": (lambda: save_part(MODULES["grouped"][0](), "0.weight"), UNSUPPORTED, "grouped"),
    "experts in PEFT": (lambda: save_part(MODULES["experts"][0](), "*_proj", dora=True), UNSUPPORTED, "DoRA of fused"),
    "a tied leaf in PEFT": (lambda: save_part(Tied(), "body.weight", whole="embed.*"), UNSUPPORTED, "tied weight that"),
    "part of a module in PEFT": (lambda: save_part(NET[:2], "0.weight", whole="1.weight"), UNSUPPORTED, "some leaves"),
    "rows of a whole leaf": (lambda: WHOLE.attach(tdf.functional(NET[:2])[0], rows=True), UNSUPPORTED, "trained whole"),
    "a layer without a name": (lambda: save_part(nn.Linear(3, 4), "weight"), UNSUPPORTED, "without a name"),
    "no tensors": (lambda: tdf.lora.load(".", LINEAR()), FileNotFoundError, r"got: +adapter_config\.json"),
    "no module of Kohya": (lambda: load_file(under("lora_unet_7", DOWN)), UNSUPPORTED, "0 modules of that name"),
    "two modules of Kohya": (lambda: load_file(under("lora_te_a_b", DOWN), ALIKE), UNSUPPORTED, "2 modules"),
    "a part of Kohya": (lambda: load_file(under("lora_te_0", DOWN | {"hada_w1": ROW + 1})), UNSUPPORTED, "'hada_w1'"),
    "scales of inputs": (lambda: load_file(under("lora_te_0", DOWN | {"dora_scale": X[0]})), UNSUPPORTED, "to the out"),
    "another file": (lambda: load_file({"x": ROW}), UNSUPPORTED, "PEFT nor a file of Kohya"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_messages(case, monkeypatch, tmp_path):
    """A mistake names the leaf, the option or the way out; nothing is skipped."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    call, kind, pattern = ERRORS[case]

    with pytest.raises(kind, match=pattern):
        call()


def test_the_function_is_a_value():
    """It survives pickling, and has its mode and its module."""
    run, params, adapters = attach("*.weight", nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)))
    x, adapters = torch.randn(5, 3), adapters.apply(torch.randn_like)

    again = pickle.loads(pickle.dumps(run.eval()))

    torch.testing.assert_close(again((params, adapters), x), run.eval()((params, adapters), x))
    assert run.training is True
    assert run.eval().training is False
    drawn = run((params, adapters), x, rng=0)
    torch.testing.assert_close(drawn, run((params, adapters), x, rng=0))


class Nested(nn.Module):
    """Containers and layers with names that end alike."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)])
        self.fc, self.layer = nn.Linear(4, 4), nn.ModuleDict({"fc": nn.Linear(4, 4)})


@pytest.mark.parametrize(
    "where", ["blocks.*.0.weight", "blocks.1.*.weight", "fc.weight", "layer.fc.weight", "*.1.weight"]
)
def test_what_a_folder_selects_is_what_has_adapters(where, tmp_path):
    """Of all modules, containers included, by the rule of PEFT."""
    module = Nested()
    apply, params, _ = tdf.functional(module)
    lora = Lora(where, rank=2)
    adapters = trained(lora, params, apply)

    tdf.lora.save(tmp_path, lora, adapters, apply)

    targets = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    names = [name for name, _ in module.named_modules()]
    if isinstance(targets, str):
        selected = {name for name in names if re.fullmatch(targets, name)}
    else:
        selected = {name for name in names if any(f".{name}".endswith(f".{target}") for target in targets)}
    assert selected == {".".join(path[:-2]) for path in adapters.paths()}


def test_alphas_of_kohya_belong_to_their_modules(tmp_path):
    """`fc` is also the end of `layer.fc`."""
    params = tdf.from_module(Nested())
    file = {
        f"lora_unet_{name}.lora_{part}.weight": torch.eye(4) for name in ("fc", "layer_fc") for part in ("down", "up")
    }
    file |= {"lora_unet_fc.alpha": torch.tensor(8.0), "lora_unet_layer_fc.alpha": torch.tensor(1.0)}
    save_file(file, tmp_path / "a.safetensors")

    lora, adapters = tdf.lora.load(tmp_path / "a.safetensors", params)

    merged = lora.merge(params, adapters)
    torch.testing.assert_close(merged["fc", "weight"], params["fc", "weight"] + 2 * torch.eye(4))
    torch.testing.assert_close(merged["layer", "fc", "weight"], params["layer", "fc", "weight"] + torch.eye(4) / 4)


def test_patterns_are_those_of_complete_names(tmp_path):
    """`prefix=` cuts the names of the base, and the configuration has complete ones."""
    tensors = under("text.0", pair(3, 4)) | under("image.0", pair(3, 4))
    config = {"target_modules": ["text.0", "image.0"], "alpha_pattern": {"^text.0": 6}}
    folder = folder_of(tmp_path / "a", tensors, **config)

    lora, _ = tdf.lora.load(folder, LINEAR(), prefix="base_model.model.text.")

    assert lora.alpha == 6


class Chain(nn.Module):
    """Many layers, each with its own name."""

    def __init__(self, length):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(length)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.slow
def test_layers_of_a_thousand_names_load(tmp_path):
    """The choice is by complete paths, where names have more ends than can be globs; PEFT names each one's rank."""
    apply, params, _ = tdf.functional(Chain(1000))
    tensors = {}
    for i in range(0, 1000, 2):
        tensors |= under(f"layers.{i}", pair(2, 2))
    ranks = {f"layers.{i}": 2 for i in range(0, 1000, 2)}
    folder = folder_of(tmp_path / "a", tensors, r=1, rank_pattern=ranks, target_modules=list(ranks))

    lora, adapters = tdf.lora.load(folder, params, apply=apply)

    again = copy.deepcopy(lora).init(params, key=0, apply=apply)
    assert again.paths() == adapters.paths()


def saved_beside(folder, **kwargs):
    """Save an adapter to a folder that has other files."""
    apply, params, _ = tdf.functional(nn.Sequential(nn.Linear(3, 4)))
    lora = Lora("0.weight", rank=2)
    tdf.lora.save(folder, lora, trained(lora, params, apply, 0), apply, **kwargs)


@pytest.mark.parametrize("name", ["log.txt", "runs/a/events"])
def test_an_open_log_in_the_folder_goes_on(name, tmp_path):
    """A program that has another file of the folder open writes to the file that stays."""
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)

    with open(tmp_path / name, "w") as log:
        log.write("before ")
        log.flush()
        saved_beside(tmp_path)
        log.write("after")

    assert (tmp_path / name).read_text() == "before after"


def test_other_files_are_not_copied(tmp_path):
    """A folder may have checkpoints that are larger than the disk has room for twice."""
    (tmp_path / "big.bin").write_bytes(b"1")
    before = (tmp_path / "big.bin").stat().st_ino

    saved_beside(tmp_path)

    assert (tmp_path / "big.bin").stat().st_ino == before


@pytest.mark.parametrize("files", [[], ["log.txt"]])
def test_the_current_folder_stays_itself(files, tmp_path, monkeypatch):
    """A process in a folder that was replaced could write no file there."""
    monkeypatch.chdir(tmp_path)
    for name in files:
        Path(name).write_text("")

    saved_beside(".")

    assert sorted(os.listdir()) == sorted([*files, "adapter_config.json", "adapter_model.safetensors"])


def test_a_run_in_the_folder_goes_on_in_the_background(tmp_path):
    """Steps that a thread saves meanwhile are in the folder that stays."""
    tree = tdf.TensorDict({"a": torch.zeros(100_000)})
    manager = tdf.CheckpointManager(tmp_path / "run", async_save=True)

    for step in range(8):
        manager.save(step, tree)
        saved_beside(tmp_path)
    manager.wait()

    assert manager.steps() == list(range(8))


@pytest.mark.parametrize("before", ["no folder", "an empty folder", "an adapter"])
def test_files_that_appear_during_the_save_stay(before, tmp_path, monkeypatch):
    """A program may begin to use the folder after the save has looked at it."""
    folder = tmp_path / "out"
    if before != "no folder":
        folder.mkdir()
    if before == "an adapter":
        saved_beside(folder)

    def save_late(*args, **kwargs):
        tdf.save(*args, **kwargs)
        folder.mkdir(exist_ok=True)
        (folder / "log.txt").write_text("kept")

    monkeypatch.setattr(api, "save_tree", save_late)
    saved_beside(folder)

    assert sorted(os.listdir(folder)) == ["adapter_config.json", "adapter_model.safetensors", "log.txt"]


def test_a_link_to_the_folder_stays(tmp_path):
    """An adapter saved through a link is in the folder that the link leads to, for example on another disk."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")

    saved_beside(tmp_path / "out")

    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "adapter_config.json").exists()
