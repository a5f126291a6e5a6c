"""Language models: log-probs against the model's own call, and chat templates against the tokenizer's."""

import json
import os
import random
from collections.abc import Callable
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

import tdfunc as tdf
from benchmarks.rows import OURS, Case, Row, Suite
from tdfunc.llm import (
    ChatHistory,
    GenerationOptions,
    History,
    Text,
    Tokens,
    TransformersWrapper,
    causal_lm,
    generate_tokens,
    score,
)

MODEL, PADDED, TOKENIZER, GENERATE = "model and log_softmax", "padded", "tokenizer", "model.generate and log_softmax"
WHOLE = "tokenizer, model.generate, batch_decode"
NEW_TOKENS = 32
LENGTHS, UNEVEN = (256, 241, 250, 233), (400, 30, 40, 20, 60, 10, 80, 25)
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DRAWN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ (m.content or '') | trim }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {"turns only": TURNS, "with calls and thinking": CALLS, "with {% generation %}": DRAWN}


def make_model() -> nn.Module:
    """Return a Llama of four layers with a vocabulary of 32,000."""
    config = transformers.LlamaConfig(
        vocab_size=32_000,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,
    )
    return transformers.LlamaForCausalLM(config).eval()


def make_rows(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return random ids, padded at the right, and their mask."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    return torch.randint(32_000, mask.shape) * mask, mask


def score_ways(lengths: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, Callable[[], Any]]:
    model = make_model().to(dtype)
    lm, params, buffers = causal_lm(model)
    ids, mask = make_rows(lengths)
    td = tdf.TensorDict({"tokens": Tokens(full=ids, batch_size=[len(ids)]), "attention_mask": mask}, [len(ids)])

    def ours(**options: Any) -> Tensor:
        with torch.no_grad():
            return score(lm.with_options(**options), params, td, buffers=buffers)["log_probs"].full

    def theirs() -> Tensor:
        with torch.no_grad():
            logits = model(ids, attention_mask=mask.long(), use_cache=False).logits[:, :-1]
            return logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1) * mask[:, 1:]

    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 0.1, "rtol": 0.1}
    torch.testing.assert_close(ours()[:, 1:], theirs(), **tolerance)
    torch.testing.assert_close(ours(packed=True), ours(), **tolerance)
    return {OURS: ours, f"{OURS}, packed": lambda: ours(packed=True), MODEL: theirs}


def score_cases() -> list[Case]:
    ways, uneven = score_ways(LENGTHS), score_ways(UNEVEN)
    return [
        Case("score 4 rows of about 256 tokens", {name: ways[name] for name in (OURS, MODEL)}),
        Case(
            "score 8 rows of 10 to 400 tokens, packed",
            {OURS: uneven[f"{OURS}, packed"], PADDED: uneven[OURS], MODEL: uneven[MODEL]},
        ),
    ]


def make_generator() -> Any:
    """Return the model, of which no response ends before the last token."""
    # Any: a model of transformers.
    model: Any = make_model()
    model.generation_config.eos_token_id = None
    return model


# Any: a model of transformers, and options of generation.
def generate_theirs(model: Any, ids: Tensor, mask: Tensor, options: dict[str, Any]) -> list[Tensor]:
    """Return the responses of transformers and their log-probs."""
    sampling = {"do_sample": True, "top_k": 0, **options} if options else {"do_sample": False}
    out: Any = model.generate(
        ids,
        attention_mask=mask.long(),
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **sampling,
    )
    new = out.sequences[:, ids.shape[1] :]
    return [new, torch.stack(out.logits, 1).log_softmax(-1).gather(-1, new.unsqueeze(-1)).squeeze(-1)]


def generate_cases() -> list[Case]:
    model = make_generator()
    lm, params, buffers = causal_lm(model)
    ids, mask = make_rows(LENGTHS)
    rows = [row[valid] for row, valid in zip(ids, mask, strict=True)]
    width = max(LENGTHS)
    left = torch.stack([nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    valid = torch.arange(width) >= width - torch.tensor(LENGTHS).unsqueeze(1)
    keys = tdf.random.split(tdf.random.key(0), len(rows))
    cases: list[Case] = []
    for name, options in {
        "greedy": {},
        "sampled": {"temperature": 0.8},
        "sampled with top_k 50": {"temperature": 0.8, "top_k": 50},
        "sampled with top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
    }.items():
        parsed = GenerationOptions.parse({"max_new_tokens": NEW_TOKENS, **options})

        def ours(parsed: GenerationOptions = parsed) -> list[Tensor]:
            found = generate_tokens(lm, params, rows, parsed, keys=keys, buffers=buffers)
            return [torch.stack([getattr(row, name) for row in found]) for name in ("tokens", "log_probs")]

        def theirs(options: dict[str, Any] = options) -> list[Tensor]:
            return generate_theirs(model, left, valid, options)

        if not options:
            torch.testing.assert_close(ours(), theirs(), atol=1e-4, rtol=1e-4)
        cases.append(Case(f"generate {NEW_TOKENS} tokens, {name}", {OURS: ours, GENERATE: theirs}))
    return cases


def make_chats(count: int = 64) -> list[list[dict[str, str]]]:
    """Return conversations of 8 messages of 5 to 40 words."""
    draw = random.Random(0)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "user", "assistant", "yes"]

    def text() -> str:
        return " ".join(draw.choices(words, k=draw.randint(5, 40)))

    return [[{"role": ("user", "assistant")[i % 2], "content": text()} for i in range(8)] for _ in range(count)]


def make_tokenizer(texts: list[str], template: str) -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False),
    )
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=special[0], eos_token=special[2])
    made.chat_template = template
    return made


def with_more_tokens(tokenizer: Any, count: int) -> Any:
    """Return a tokenizer with so many tokens: those that are added are in no text, and decode to one of their own."""
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = data["model"]["vocab"]
    vocabulary |= {f"w{number}": number for number in range(len(vocabulary), count)}
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(data)),
        pad_token=tokenizer.pad_token,
        eos_token=tokenizer.eos_token,
    )
    made.chat_template = tokenizer.chat_template
    return made


def wrapper_cases() -> list[Case]:
    model, chats = make_generator(), [chat[:7] for chat in make_chats(4)]
    texts = [" ".join([message["content"] for message in chat]) for chat in chats]
    tokenizer = with_more_tokens(make_tokenizer(texts, TURNS), 32_000)
    inputs = {
        "text": tdf.TensorDict({"text": Text(prompt=texts, batch_size=[4])}, [4]),
        "history": tdf.TensorDict({"history": ChatHistory(prompt=History.from_chats(chats), batch_size=[4])}, [4]),
    }
    tokenizer.padding_side = "left"
    batched = {"padding": True, "return_tensors": "pt"}
    # Any: a batch of a tokenizer.
    encode: dict[str, Callable[[], Any]] = {
        "text": lambda: tokenizer(texts, **batched),
        "history": lambda: tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_dict=True, tokenize=True, **batched
        ),
    }
    cases: list[Case] = []
    for mode, td in inputs.items():
        for name, options in {"greedy": {}, "sampled": {"temperature": 0.8}}.items():
            wrapper = TransformersWrapper(
                model,
                tokenizer=tokenizer,
                input_mode=mode,
                pad_output=True,
                generate_kwargs={"max_new_tokens": NEW_TOKENS, **options},
            )

            def ours(wrapper: Any = wrapper, td: Any = td) -> Any:
                return wrapper(td, key=0)

            def theirs(mode: str = mode, options: dict[str, Any] = options) -> Any:
                batch = encode[mode]()
                new, log_probs = generate_theirs(model, batch["input_ids"], batch["attention_mask"], options)
                return new, log_probs, tokenizer.batch_decode(new)

            if not options:
                out, (new, log_probs, decoded) = ours(), theirs()
                torch.testing.assert_close(out["tokens"].response, new)
                torch.testing.assert_close(out["log_probs"].response, log_probs, atol=1e-4, rtol=1e-4)
                assert out["text"].response == decoded
            cases.append(Case(f"{mode} mode, {NEW_TOKENS} tokens, {name}", {OURS: ours, WHOLE: theirs}))
    return cases


def chat_cases() -> list[Case]:
    # The CPU time of this thread counts.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # The templates without {% generation %} give masks of zeros there, with a warning.
    transformers.logging.set_verbosity_error()
    chats = make_chats()
    history, texts = History.from_chats(chats), [message["content"] for chat in chats for message in chat]
    cases: list[Case] = []
    for name, template in TEMPLATES.items():
        tokenizer = make_tokenizer(texts, template)
        forms = {
            "text": {"tokenize": False},
            "ids": {"tokenize": True, "padding": True, "return_tensors": "pt", "return_dict": True},
        }
        forms["masks"] = {**forms["ids"], "return_assistant_tokens_mask": True}
        for form, options in forms.items():

            def ours(tokenizer: Any = tokenizer, options: dict[str, Any] = options) -> Any:
                return history.apply_chat_template(tokenizer=tokenizer, add_generation_prompt=False, **options)

            def theirs(tokenizer: Any = tokenizer, options: dict[str, Any] = options) -> Any:
                return tokenizer.apply_chat_template(chats, **options)

            cases.append(Case(f"chat template {name}, {form}", {OURS: ours, TOKENIZER: theirs}))
    return cases


def llm_cases() -> list[Case]:
    return score_cases() + generate_cases() + wrapper_cases() + chat_cases()


DICTS = (
    "transformers renders for 3.9 of 4.7 ms, as for the rival; the rest makes 512 dicts of messages out of the columns"
    " of the history, and the rival is given these dicts"
)


def _of(form: str) -> tuple[str, ...]:
    return tuple(f"chat template {name}, {form}" for name in TEMPLATES)


SUITE = Suite(
    "llm",
    "Language models",
    "The model is a Llama with 4 layers, width 256 and a vocabulary of 32,000, in float32 and without "
    "gradients. With `packed`, short sequences share one row of the batch. Generation has 4 prompts of about "
    "256 tokens and returns responses with log-probs. The rival is `model.generate` with the same options and"
    " `output_logits=True`. The modes of the wrapper read and return texts or conversations. Their rival is "
    "the tokenizer's call, `model.generate` and `batch_decode`. Chat templates render 64 conversations of 8 "
    "messages. Their rival is the tokenizer's own call with the same arguments on lists of dicts, which "
    "returns no masks for a template without `{% generation %}`. The part `memory` has the memory of scoring.",
    llm_cases,
    (
        Row("log-probs of tokens", MODEL, 1.0, "at most", ("score 4 rows of about 256 tokens",)),
        Row("packed rows", PADDED, 1.5, "faster", ("score 8 rows of 10 to 400 tokens, packed",)),
        Row(
            "responses with log-probs",
            GENERATE,
            1.05,
            "at most",
            tuple(
                f"generate {NEW_TOKENS} tokens, {name}"
                for name in ("greedy", "sampled", "sampled with top_k 50", "sampled with top_p 0.9")
            ),
            why="for top_p, both sort 32,000 logits for each token, which takes more than the model (*greedy* has no "
            "sort); a run on a faster processor gave 1.02x",
        ),
        Row(
            "text and history modes",
            WHOLE,
            1.3,
            "at most",
            tuple(
                f"{mode} mode, {NEW_TOKENS} tokens, {name}"
                for mode in ("text", "history")
                for name in ("greedy", "sampled")
            ),
        ),
        Row("conversations as text", TOKENIZER, 1.2, "at most", _of("text"), why=DICTS),
        Row("conversations as ids", TOKENIZER, 1.2, "at most", _of("ids")),
        Row("conversations as ids with masks", TOKENIZER, 2.0, "at most", _of("masks")),
    ),
    (score_ways, score_cases, generate_cases, wrapper_cases, chat_cases),
)
