"""Counts the files of `tdfunc/llm` that a wrapper's forward passes, and how often it comes back to one.

A stay is a run of consecutive frames in one file, below the two calls of a backend; returns are the stays less the
files. `python -m benchmarks.stays` prints the counts and the stays.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tdfunc as tdf
from tdfunc import TensorDict
from tdfunc.llm import ChatHistory, History, Text, Tokens, TransformersWrapper
from tests.llm.tokens import make_tokenizer

ROOT = Path(tdf.__file__).parent / "llm"
BACKEND = ("generate_tokens", "score_tokens")


def stays(call: Callable[[], Any]) -> list[str]:
    """Run a call, and return the files of `tdfunc/llm` that it is in, one after the other."""
    found: list[str] = []
    below = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal below
        path = frame.f_code.co_filename
        if frame.f_code.co_name in BACKEND and path.startswith(str(ROOT)):
            below += {"call": 1, "return": -1}.get(event, 0)
        if event == "call" and not below and path.startswith(str(ROOT)):
            name = str(Path(path).relative_to(ROOT))
            if found[-1:] != [name]:
                found.append(name)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def ways() -> dict[str, Callable[[], Any]]:
    """A forward of each input mode, with two rows of a small Llama: scoring and generation."""
    tokenizer = make_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes))
    chats = [[{"role": "user", "content": "a b"}], [{"role": "user", "content": "c"}]]
    history, ids = History.from_chats(chats), torch.tensor([[3, 4, 5], [6, 7, 8]])
    answered = history.append(History(role="assistant", content=["x", "y"], batch_size=[2]))
    trees = {
        "tokens": (Tokens(prompt=ids, batch_size=[2]), Tokens(full=ids, batch_size=[2])),
        "text": (Text(prompt=["a b", "c"], batch_size=[2]), Text(full=["a b", "c"], batch_size=[2])),
        "history": (ChatHistory(prompt=history, batch_size=[2]), ChatHistory(full=answered, batch_size=[2])),
    }
    found: dict[str, Callable[[], Any]] = {}
    for mode, (prompts, full) in trees.items():
        options: dict[str, Any] = {"tokenizer": tokenizer, "input_mode": mode}
        scorer = TransformersWrapper(model, generate=False, **options)
        sampler = TransformersWrapper(model, generate_kwargs={"max_new_tokens": 2}, **options)
        found[f"{mode}, scoring"] = lambda scorer=scorer, mode=mode, full=full: scorer(TensorDict({mode: full}, [2]))
        found[f"{mode}, generation"] = lambda wrapper=sampler, mode=mode, prompts=prompts: wrapper(
            TensorDict({mode: prompts}, [2])
        )
    return found


if __name__ == "__main__":
    for name, call in ways().items():
        call()
        passed = stays(call)
        print(f"{name}: {len({*passed})} files, {len(passed) - len({*passed})} returns\n  {' '.join(passed)}")
