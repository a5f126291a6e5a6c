"""Folders of PEFT, next to PEFT itself: what it saved loads, what we save loads there, and both compute the same.

`make test-peft` installs PEFT into a folder of its own and runs this file.
"""

import copy
import dataclasses
import json
import tempfile

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

import tdfunc as tdf
from tdfunc import Filter
from tdfunc.lora import Lora
from tests.lora.golden.model import IDS as SMALL_IDS
from tests.lora.golden.model import SERVED, Net
from tests.lora.layers import experts, llama, logits, trained

peft = pytest.importorskip("peft", reason="`make test-peft` installs it")
from benchmarks.conformance.peft_oracle import tuned_model  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def gpt2():
    """A GPT2, whose linear layers store (inputs, outputs)."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)).eval()


def qwen3():
    """A Qwen3 with biases."""
    size = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    more = dict(num_key_value_heads=2, head_dim=8, attention_bias=True, use_cache=False)
    return Qwen3ForCausalLM(Qwen3Config(**size, **more)).eval()


class Images(nn.Module):
    """Convolutions of one, two and three dimensions, of random images."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv1d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1), nn.Conv3d(1, 2, 2)

    def forward(self, ids):
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
        x = self.b(self.a(x)[..., None].expand(-1, -1, -1, 4).tanh())
        return self.c(x[:, None].tanh())


ATTENTION = ["q_proj", "v_proj", "down_proj"]
# name -> (model, options of LoraConfig)
CASES = {
    "llama": (llama, {"target_modules": ATTENTION, "lora_alpha": 3}),
    "llama, all linear": (llama, {"target_modules": "all-linear", "use_rslora": True}),
    "llama, patterns": (
        llama,
        {"target_modules": ATTENTION, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"layers.1.*q_proj": 5}},
    ),
    "llama, dora": (llama, {"target_modules": [*ATTENTION, "embed_tokens"], "use_dora": True}),
    "llama, tied": (
        lambda: llama(tie_word_embeddings=True),
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "ensure_weight_tying": True},
    ),
    "llama, head": (llama, {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]}),
    "gpt2": (gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "use_dora": True}),
    "gpt2, one square": (gpt2, {"target_modules": ["attn.c_proj"], "fan_in_fan_out": True, "bias": "lora_only"}),
    "qwen3, bias": (qwen3, {"target_modules": ATTENTION[:2], "lora_bias": True, "bias": "all"}),
    "experts": (
        experts,
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
    "one of the experts' parameters": (experts, {"target_modules": [], "target_parameters": ["experts.down_proj"]}),
    "images": (Images, {"target_modules": ["a", "b", "c"], "use_dora": True}),
    "tokens": (llama, {"target_modules": ATTENTION, "trainable_token_indices": {"embed_tokens": [5, 1, 17]}}),
    "tokens of the inputs": (llama, {"target_modules": ATTENTION, "trainable_token_indices": [5, 1, 17]}),
    "tokens, tied": (
        lambda: llama(tie_word_embeddings=True),
        {"target_modules": ATTENTION, "trainable_token_indices": [5, 1, 17]},
    ),
}
IDS = torch.randint(32, (3, 7), generator=torch.Generator().manual_seed(1))


def output(run, *trees, **options):
    """The logits, or the images."""
    out = run(*trees, IDS, **options)
    return out if isinstance(out, torch.Tensor) else out.logits


def copied(make, state):
    """A module with these weights."""
    module = make()
    module.load_state_dict(state)
    return module


@pytest.fixture(params=CASES, name="case")
def _case(request, tmp_path):
    make, options = CASES[request.param]
    torch.manual_seed(0)
    module = make()
    state = {name: leaf.clone() for name, leaf in module.state_dict().items()}
    options = dict(options)
    model = peft.get_peft_model(copied(make, state), peft.LoraConfig(**{"r": 4} | options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.eval().save_pretrained(tmp_path / "theirs")
    return make, state, output(model), tmp_path


def test_a_folder_of_peft_loads(case):
    """The adapters of the file give PEFT's outputs, attached and merged."""
    make, state, expected, folder = case
    apply, params, buffers = tdf.functional(copied(make, state))

    lora, adapters = tdf.lora.load(folder / "theirs", params)

    attached = output(lora.attach(apply), (params, adapters), buffers=buffers)
    merged = output(apply, lora.merge(params, adapters), buffers=buffers)
    torch.testing.assert_close(attached, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(merged, expected, atol=1e-5, rtol=1e-4)
    assert (output(apply, params, buffers=buffers) - expected).abs().max() > 1e-3


def test_peft_loads_what_we_save(case):
    """The same adapters saved by us load in PEFT, with the same leaves."""
    make, state, expected, folder = case
    module = copied(make, state)
    apply, params, _ = tdf.functional(module)
    lora, adapters = tdf.lora.load(folder / "theirs", params)

    tdf.lora.save(folder / "ours", lora, adapters, apply)

    model = peft.PeftModel.from_pretrained(module, folder / "ours").eval()
    torch.testing.assert_close(output(model), expected, atol=1e-5, rtol=1e-4)
    again, same = tdf.lora.load(folder / "ours", params)
    tdf.assert_close(same, adapters)
    assert (again.dora, again.bias, again.rslora) == (lora.dora, lora.bias, lora.rslora)
    ours, theirs = (load_file(folder / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert set(ours) <= set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


K, STEPS, RANK, ALPHA = 64, 50, 2, 4.0


def test_sixty_four_adapters_equal_sixty_four_runs_of_peft():
    """A tiny Llama: after 50 steps at rates up to 5e-4 no leaf differs by more than 1e-5."""
    torch.manual_seed(0)
    module = llama()
    weights = {name: leaf.clone() for name, leaf in module.state_dict().items()}
    apply, params, buffers = tdf.functional(module)
    lora = Lora("*_proj.weight", rank=RANK, alpha=ALPHA)
    run, rates = lora.attach(apply), torch.logspace(-5, -3.3, K)
    adapters = torch.stack([lora.init(params, key=i) for i in range(K)])
    ids = torch.randint(32, (STEPS, K, 2, 8))
    opt, start = tdf.optim.adam(lr=rates), adapters

    @tdf.jit
    def step(params, buffers, adapters, state, ids):
        def loss(adapters, ids):
            out = logits(run, (params, adapters), buffers, ids)
            return F.cross_entropy(out[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

        return opt.update(adapters, torch.vmap(torch.func.grad(loss))(adapters, ids), state)

    state = opt.init(adapters)
    for batch in ids:
        adapters, state = step(params, buffers, adapters, state, batch)

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    for i in range(K):
        own = llama()
        own.load_state_dict(weights)
        model = peft.get_peft_model(own, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets))
        names = {name.removeprefix("base_model.model."): p for name, p in model.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, leaf in names.items():
                leaf.copy_(start[i][_path(name)])
        torch_opt = torch.optim.Adam(names.values(), lr=float(rates[i]))
        for batch in ids[:, i]:
            torch_opt.zero_grad()
            out = model(batch).logits
            F.cross_entropy(out[:, :-1].flatten(0, 1), batch[:, 1:].flatten()).backward()
            torch_opt.step()
        assert max((adapters[i][_path(name)] - leaf).abs().max() for name, leaf in names.items()) < 1e-5


def _path(name):
    """The path of the adapter's leaf of a parameter of PEFT, `....q_proj.lora_A.default.weight`."""
    module, _, part = name.removesuffix(".default.weight").rpartition(".lora_")
    return (*module.split("."), "weight", part)


# Entries that change what PEFT computes, or the base, in a way that is not LoRA's.
REFUSED = {
    "init_lora_weights": "pissa",
    "layer_replication": [[0, 2]],
    "alora_invocation_tokens": [1],
    "use_qalora": True,
    "megatron_config": {"a": 1},
    "arrow_config": {"a": 1},
    "kasa_config": {"a": 1},
    "velora_config": {"a": 1},
    "monteclora_config": {"a": 1},
    "use_bdlora": {"a": 1},
}
# Entries that tell of the origin and the training of an adapter.
WITHOUT_EFFECT = {
    "task_type": "CAUSAL_LM",
    "peft_type": "LORA",
    "auto_mapping": {"a": "b"},
    "peft_version": "0.20.0",
    "base_model_name_or_path": "x",
    "revision": "main",
    "inference_mode": False,
    "megatron_core": "other",
    "loftq_config": {"loftq_bits": 4},
    "eva_config": {"rho": 2.0},
    "corda_config": {"a": 1},
    "lora_ga_config": {"a": 1},
    "qalora_group_size": 8,
    "ensure_weight_tying": True,
    "runtime_config": {"ephemeral_gpu_offload": False},
}


def small(seed=0):
    """The model of the golden files in float64."""
    torch.manual_seed(seed)
    return Net().double().eval()


def test_each_field_of_peft_is_in_a_table():
    """A field of a later PEFT is in none, and then fails here."""
    served = {name for options in SERVED.values() for name in options}

    fields = {each.name for each in dataclasses.fields(peft.LoraConfig)}

    served |= {name for _, options in CASES.values() for name in options}
    assert fields - served - REFUSED.keys() - WITHOUT_EFFECT.keys() == set()


@pytest.mark.parametrize("case", SERVED)
def test_each_field_that_is_served_is_served_as_by_peft(case, tmp_path):
    """In float64: attached, merged, and in PEFT again after we saved it."""
    base = small()
    model = tuned_model(base, SERVED[case])
    model.save_pretrained(tmp_path / "theirs")
    apply, params, _ = tdf.functional(copy.deepcopy(base))

    lora, adapters = tdf.lora.load(tmp_path / "theirs", params)
    tdf.lora.save(tmp_path / "ours", lora, adapters, apply)

    again = peft.PeftModel.from_pretrained(base, tmp_path / "ours", autocast_adapter_dtype=False).eval()
    exact = {"atol": 1e-10, "rtol": 1e-10}
    wanted = model(SMALL_IDS)
    torch.testing.assert_close(lora.attach(apply).eval()((params, adapters), SMALL_IDS), wanted, **exact)
    torch.testing.assert_close(apply(lora.merge(params, adapters), SMALL_IDS), wanted, **exact)
    torch.testing.assert_close(again(SMALL_IDS), wanted, **exact)


def edited(folder, **entries):
    """A folder of PEFT whose configuration has other entries."""
    tuned_model(small(), {}).save_pretrained(folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return folder


@pytest.mark.parametrize("field", REFUSED)
def test_each_other_field_is_refused_by_name(field, tmp_path):
    """With a value that is not the default."""
    folder = edited(tmp_path / "a", **{field: REFUSED[field]})

    with pytest.raises(tdf.UnsupportedError, match=field):
        tdf.lora.load(folder, tdf.from_module(small()))


@pytest.mark.parametrize("field", WITHOUT_EFFECT)
def test_fields_without_effect_have_none(field, tmp_path):
    """With a value that is not the default."""
    params = tdf.from_module(small())
    plain = tdf.lora.load(edited(tmp_path / "a"), params)[1]

    other = tdf.lora.load(edited(tmp_path / "b", **{field: WITHOUT_EFFECT[field]}), params)[1]

    tdf.assert_close(other, plain, atol=0, rtol=0)


WEIGHTS = ("embed", "conv", "fc", "out.fc", *(f"layers.{i}.{name}" for i in range(3) for name in "qk"))
# `fc` is the end of `out.fc`, so that `modules_to_save` cannot name it alone.
MODULES_OF_SMALL = (*[name for name in WEIGHTS if name != "fc"], *(f"layers.{i}.norm" for i in range(3)))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_choices_give_the_same_function_in_peft(data):
    """Random layers, ranks, scales and options of ours, which PEFT loads and saves, and we load again."""
    chosen = data.draw(st.sets(st.sampled_from(WEIGHTS), min_size=1), label="chosen")
    dora = data.draw(st.booleans())
    whole = data.draw(st.sets(st.sampled_from(MODULES_OF_SMALL), max_size=2).map(lambda found: found - chosen))
    ranks = {name: data.draw(st.integers(1, 3)) for name in chosen}
    alphas = {name: data.draw(st.sampled_from([0.5, 1.0, 3.0, -2.0])) for name in chosen}
    bias = not dora and "embed" not in chosen and data.draw(st.booleans())
    lora = Lora(
        Filter(lambda path, leaf: ".".join(path[:-1]) in chosen and path[-1] == "weight"),
        rank={f"{name}.weight": rank for name, rank in ranks.items()},
        alpha={f"{name}.weight": alpha for name, alpha in alphas.items()},
        rslora=data.draw(st.booleans()),
        dora=dora,
        bias=bias,
        start=data.draw(st.sampled_from(["kaiming", "pissa"])),
        whole=Filter(lambda path, leaf: ".".join(path[:-1]) in whole) if whole else None,
    )
    base = small(data.draw(st.integers(0, 3)))
    apply, params, _ = tdf.functional(copy.deepcopy(base))
    adapters = trained(lora, params, apply, seed=data.draw(st.integers(0, 9)))
    with tempfile.TemporaryDirectory() as folder:
        tdf.lora.save(f"{folder}/ours", lora, adapters, apply)
        model = peft.PeftModel.from_pretrained(copy.deepcopy(base), f"{folder}/ours", autocast_adapter_dtype=False)
        model.eval().save_pretrained(f"{folder}/theirs")
        again, same = tdf.lora.load(f"{folder}/theirs", params)

    wanted = lora.attach(apply)((params, adapters), SMALL_IDS)
    exact = {"atol": 1e-9, "rtol": 1e-9}
    torch.testing.assert_close(model(SMALL_IDS), wanted, **exact)
    torch.testing.assert_close(again.attach(apply)((params, same), SMALL_IDS), wanted, **exact)


# -- several adapters as one -----------------------------------------------------------------------------------

COMBINED = {
    "llama": (llama, {"target_modules": ATTENTION, "lora_alpha": 3}),
    "gpt2": (gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "images": (Images, {"target_modules": ["a", "b", "c"]}),
    "embedding": (llama, {"target_modules": ["embed_tokens", "q_proj"]}),
}


@pytest.mark.parametrize("combination_type", ["cat", "linear", "svd"])
@pytest.mark.parametrize("name", COMBINED)
def test_weighted_adapters_are_those_of_peft(name, combination_type, tmp_path):
    """Two folders of PEFT, with a negative weight: the outputs are PEFT's own combination."""
    if name == "images" and combination_type == "svd":
        pytest.skip("PEFT makes no matrix of the kernels of Conv1d and Conv3d")
    make, options = COMBINED[name]
    torch.manual_seed(0)
    module = make()
    state = {key: leaf.clone() for key, leaf in module.state_dict().items()}
    model = peft.get_peft_model(copied(make, state), peft.LoraConfig(r=4, **options), adapter_name="first")
    model.add_adapter("second", peft.LoraConfig(r=4, **options))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.eval().save_pretrained(tmp_path)
    apply, params, buffers = tdf.functional(copied(make, state))
    pairs = [tdf.lora.load(tmp_path / each, params, apply=apply) for each in ("first", "second")]

    lora, tree = tdf.lora.add_weighted(params, pairs, [0.7, -0.4], combination_type=combination_type, apply=apply)

    model.add_weighted_adapter(["first", "second"], [0.7, -0.4], "both", combination_type=combination_type)
    model.set_adapter("both")
    found = output(lora.attach(apply), (params, tree), buffers=buffers)
    torch.testing.assert_close(found, output(model.eval()), atol=1e-4, rtol=1e-3)


# -- a vocabulary that was resized -----------------------------------------------------------------------------

WIDE_IDS = torch.randint(35, (3, 7), generator=torch.Generator().manual_seed(2))
RESIZED = {
    "layers": {"target_modules": ["q_proj"]},
    "a table": {"target_modules": ["q_proj", "embed_tokens"]},
    "both tables": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [32, 33, 5]},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}


def resized(folder, seed):
    """A model of a folder with three new tokens, whose rows depend on the seed."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(seed)
    model.resize_token_embeddings(35)
    return model


@pytest.fixture(params=RESIZED, name="wide")
def _wide(request, tmp_path):
    torch.manual_seed(0)
    llama().save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(resized(tmp_path / "base", 1), peft.LoraConfig(r=4, **RESIZED[request.param]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.eval().save_pretrained(tmp_path / "theirs")
    return tmp_path, model(WIDE_IDS).logits


def test_a_resized_folder_of_peft_loads(wide):
    """In a fresh model that was resized, with other rows of the new tokens."""
    folder, expected = wide
    apply, params, buffers = tdf.functional(resized(folder / "base", 2))

    base = tdf.lora.load_base(folder / "theirs", params)
    lora, adapters = tdf.lora.load(folder / "theirs", base, apply=apply)

    found = lora.attach(apply)((base, adapters), WIDE_IDS, buffers=buffers).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_peft_loads_a_resized_folder_of_ours(wide):
    """With the tables of `base=`."""
    folder, expected = wide
    model = resized(folder / "base", 2)
    apply, params, _ = tdf.functional(model)
    base = tdf.lora.load_base(folder / "theirs", params)
    lora, adapters = tdf.lora.load(folder / "theirs", base, apply=apply)

    tdf.lora.save(folder / "ours", lora, adapters, apply, base=base)

    fresh = peft.PeftModel.from_pretrained(resized(folder / "base", 3), folder / "ours").eval()
    torch.testing.assert_close(fresh(WIDE_IDS).logits, expected, atol=1e-5, rtol=1e-4)
