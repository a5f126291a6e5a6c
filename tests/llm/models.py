"""Tiny language models of each family, with weights so large that wrong attention shows."""

import functools

import torch
import transformers as hf

VOCAB = 97
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_WIDE = {**_COMMON, "head_dim": 8}
_WINDOW = {**_WIDE, "sliding_window": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_SMALL = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 1, "hidden_size": 32, "num_hidden_layers": 2}
_SMALL |= {"num_attention_heads": 4, "initializer_range": 0.3}

# name -> (name of the classes, options of the configuration)
FAMILIES = {
    "llama": ("Llama", _COMMON),
    "qwen2": ("Qwen2", _COMMON),
    "qwen3": ("Qwen3", _COMMON),
    "mistral": ("Mistral", _COMMON),
    "mistral, window": ("Mistral", _WINDOW),
    "gemma2": ("Gemma2", _WIDE),
    "gemma2, window": ("Gemma2", _WINDOW),
    "phi3": ("Phi3", _COMMON),
    "gpt2": ("GPT2", {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}),
    "gpt_neox": ("GPTNeoX", {**_SMALL, "intermediate_size": 64}),
    "opt": (
        "OPT",
        {"vocab_size": VOCAB, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"init_std": 0.3, "word_embed_proj_dim": 16},
    ),
    "falcon": ("Falcon", _SMALL),
    "falcon, alibi": ("Falcon", {**_SMALL, "alibi": True}),
    "bloom": ("Bloom", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}),
    "granite": ("Granite", {**_COMMON, "logits_scaling": 3.0}),
    "cohere": ("Cohere", {**_COMMON, "logit_scale": 0.3}),
    "gemma3": ("Gemma3", _WINDOW),
    "gpt_oss": ("GptOss", {**_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3Moe", {**_WIDE, **_EXPERTS}),
    "glm4_moe": (
        "Glm4Moe",
        {**_WIDE, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
        | {"topk_group": 1, "first_k_dense_replace": 1},
    ),
    "smollm3": ("SmolLM3", _WIDE),
    "olmo3": ("Olmo3", _WINDOW),
    "lfm2": ("Lfm2", {**_COMMON, "layer_types": ["conv", "full_attention"]}),
    "qwen3_next": ("Qwen3Next", {**_WIDE, **_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 16}),
    "qwen3_5": ("Qwen3_5", {**_WIDE, **_DELTA}),
    "bamba": (
        "Bamba",
        {**_COMMON, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}
        | {"mamba_d_state": 8, "mamba_expand": 2},
    ),
    "mamba": ("Mamba", {**_COMMON, "state_size": 8}),
    "falcon_h1": (
        "FalconH1",
        {**_WIDE, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_ssm": 32, "mamba_n_groups": 1, "mamba_d_state": 8},
    ),
}
_CONFIGS = {"Gemma3": "Gemma3TextConfig", "Qwen3_5": "Qwen3_5TextConfig"}
_MODELS = {"GPT2": "GPT2LMHeadModel"}


@functools.cache
def make(family, **options):
    """Return a model of a family, the same each time."""
    name, config = FAMILIES[family]
    torch.manual_seed(0)
    made = getattr(hf, _CONFIGS.get(name, f"{name}Config"))(**{**config, **options})
    return getattr(hf, _MODELS.get(name, f"{name}ForCausalLM"))(made).eval()


def row_log_probs(model, ids, temperature=1.0):
    """The log-probs of a row alone: the oracle."""
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
