"""A push into an engine with a process of its own, as a program: such an engine starts by spawning."""

import sys

import torch
from vllm import LLM

from tdfunc.llm import GenerationOptions, causal_lm, vLLMWrapper
from tests.engines.tiny import CLOSE, make_model, make_tokenizer


def main(folder):
    """Push the weights of two other models, and compare with them."""
    make_model(0).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    options = {"enforce_eager": True, "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8}
    wrapper = vLLMWrapper(LLM(model=folder, kv_cache_memory_bytes=64 << 20, **options), input_mode="tokens")
    row = torch.tensor([5, 6, 7])
    for seed in (3, 4):
        other = make_model(seed)
        done = wrapper.push(causal_lm(other)[1], version=seed)
        (made,) = wrapper.generate_tokens([row], GenerationOptions.parse({"max_new_tokens": 8}))
        own = other.generate(row[None], max_new_tokens=8, do_sample=False, pad_token_id=0)[0, 3:]

        assert not wrapper.engine._in_process
        assert done.difference < CLOSE
        assert made.tokens.tolist() == own.tolist()
        assert made.version == str(seed)


if __name__ == "__main__":
    main(sys.argv[1])
