"""Folders of PEFT, next to PEFT itself: what it saved loads, what we save loads there, and both compute the same.

`make test-peft` installs PEFT into a folder of its own and runs this file.
"""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

import tdfunc as tdf
from tdfunc.lora import Lora
from tests.lora.layers import experts, llama, logits

peft = pytest.importorskip("peft", reason="`make test-peft` installs it")
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
