"""A tiny Llama and its tokenizer in a folder, as an engine reads them."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tdfunc.llm import GenerationOptions, causal_lm, score_ids

TEXT = ["the quick brown fox jumps over the lazy dog", "hello world, this is some text"]

CLOSE = 3e-4  # nats; in these models, float32 is up to 1e-4 away from float64


def make_model(seed, **options):
    """A Llama of two layers; an engine on a CPU wants heads of 32."""
    torch.manual_seed(seed)
    config = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    return LlamaForCausalLM(LlamaConfig(**(config | options))).eval()


def make_tokenizer():
    """Bytes, and a few merges."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet)
    backend.train_from_iterator(TEXT * 10, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def check_equal(wrapper, model, rows, **options):
    """Assert that greedy tokens are those of transformers, row by row, and log-probs those of the row alone."""
    lm, params, buffers = causal_lm(model)
    options = GenerationOptions.parse({"max_new_tokens": 16, **options})
    for row, made in zip(rows, wrapper.generate_tokens(rows, options, prompt_log_probs=True), strict=True):
        own = model.generate(row[None], max_new_tokens=16, do_sample=False, eos_token_id=1, pad_token_id=0)[0]
        exact = score_ids(lm, params, own[None], buffers=buffers).log_probs[0]
        assert made.tokens.tolist() == own[len(row) :].tolist()
        found = torch.cat([made.prompt_log_probs, made.log_probs])
        torch.testing.assert_close(found, exact, rtol=0, atol=CLOSE)
        assert (found - exact).abs().exp().mean() <= 1.0001
        torch.testing.assert_close(wrapper.score_tokens([own])[0], exact, rtol=0, atol=CLOSE)
