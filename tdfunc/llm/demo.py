"""A program that trains a small language model from nothing: on text, on chats, and by rewards that a program checks.

`python -m tdfunc.llm.demo` trains on the documentation and the licence that ship with CPython, fine-tunes on chats that
roll dice, and goes on with GRPO, which rewards high rolls: four learning rates at once, as the members of one ensemble.
It can be stopped and started again at any time. B rows, P positions of a prompt, R of a response.
"""

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdfunc import random
from tdfunc._gradient import value_and_grad
from tdfunc._jit import jit
from tdfunc._tensordict import TensorDict
from tdfunc.llm.advantages import group_normalized
from tdfunc.llm.generation.options import GenerationOptions
from tdfunc.llm.generation.rows import generate_tokens
from tdfunc.llm.history import History
from tdfunc.llm.losses.policy import dapo
from tdfunc.llm.losses.sft import sft
from tdfunc.llm.model import CausalLM, causal_lm
from tdfunc.llm.scoring import score_ids
from tdfunc.optim import Optimizer, adam
from tdfunc.storage.manager.manager import CheckpointManager

PACKAGES = ("transformers", "tokenizers", "jinja2", "matplotlib", "tqdm", "rich", "typer")
RATES = (5e-5, 1e-4, 2e-4, 4e-4)
DICE, ROLLS = (1, 2, 3), 100
# Tokens of a window of text; windows and chats of a step; responses to a question, and their tokens.
WINDOW, WINDOWS, CHATS, SAMPLES, LONGEST = 96, 12, 32, 16, 5
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Plan(NamedTuple):
    """The steps of the three phases, and how many lie between two checkpoints."""

    text: int = 150
    chats: int = 80
    rewards: int = 60
    every: int = 20

    @property
    def total(self) -> int:
        """All steps."""
        return self.text + self.chats + self.rewards


class Setup(NamedTuple):
    """Everything that does not change: a function of the seed alone."""

    plan: Plan
    lm: CausalLM
    params: TensorDict
    buffers: TensorDict
    # Any: a tokenizer of transformers.
    tokenizer: Any
    text: Tensor
    chats: TensorDict
    prompts: Tensor
    key: Tensor
    imitate: tuple[Callable[..., Any], Callable[..., Any]]
    reinforce: Callable[..., Any]
    optimizers: tuple[Optimizer, Optimizer, Optimizer]


# -- data -------------------------------------------------------------------------------------------------------


def load_texts() -> list[str]:
    """Return the documentation that `help()` shows, and the licence where the installation has it."""
    licence = Path(os.__file__).parent / "LICENSE.txt"
    return [*topics.values(), *([licence.read_text("utf-8")] if licence.exists() else [])]


# Any: a tokenizer of transformers.
def train_tokenizer(texts: list[str]) -> Any:
    """Return a byte-level BPE tokenizer of 512 tokens, in which each digit is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_chats(key: Tensor) -> History:
    """Return chats in which one, two or three dice are rolled, each as often as another."""
    rolls = random.randint(key, (ROLLS, len(DICE), max(DICE)), 1, 7).tolist()
    chats: list[list[dict[str, str]]] = []
    for count, question in enumerate(questions(), 1):
        for roll in rolls:
            reply = "".join(map(str, roll[count - 1][:count]))
            chats.append([{"role": "user", "content": question}, {"role": "assistant", "content": reply}])
    return History.from_chats(chats)


def questions() -> list[str]:
    """Return a question for each number of dice."""
    return [f"Roll {count} dice" for count in DICE]


def score_roll(text: str, count: int) -> float:
    """Return the mean of the dice in a response as a part of 6; 0 for a text that is not so many dice."""
    reply = text.removesuffix("<|im_end|>")
    rolled = reply != text and len(reply) == count and set(reply) <= set("123456")
    return sum(map(int, reply)) / (6 * count) if rolled else 0.0


def make_setup(seed: int, plan: Plan) -> Setup:
    """Return the model, the data and the steps of a seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = train_tokenizer(load_texts())
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=WINDOW,
        eos_token_id=tokenizer.eos_token_id,
        # torch's attention kernels have no rule for vmap on CPUs.
        attn_implementation="eager",  # pyright: ignore[reportCallIssue]
    )
    # transformers draws the first weights from torch's default generator.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm, params, buffers = causal_lm(LlamaForCausalLM(config))
    options: dict[str, Any] = {"tokenizer": tokenizer, "padding": True, "return_dict": True}
    chats = make_chats(random.key(seed)).apply_chat_template(
        **options, padding_side="right", add_generation_prompt=False, return_assistant_tokens_mask=True
    )
    openings = History.from_chats([[{"role": "user", "content": question}] for question in questions()])
    prompts = openings.apply_chat_template(**options)["input_ids"]
    text = torch.tensor(tokenizer("\n".join(load_texts()))["input_ids"])
    optimizers = adam(lr=3e-3), adam(lr=3e-3), adam(lr=torch.tensor(RATES))

    def imitate(optimizer: Optimizer) -> Callable[..., Any]:
        def step(params: Any, state: Any, buffers: Any, ids: Tensor, mask: Tensor) -> Any:
            def loss(params: Any) -> Any:
                # Pads at the right are seen by no token.
                return sft(score_ids(lm, params, ids, buffers=buffers).log_probs, mask)

            (value, _), grads = value_and_grad(loss, has_aux=True)(params)
            return *optimizer.update(params, grads, state), value

        return jit(step)

    def reinforce(params: Any, state: Any, buffers: Any, ids: Tensor, mask: Tensor, gains: Tensor, old: Tensor) -> Any:
        def loss(params: Any, ids: Tensor, mask: Tensor, gains: Tensor, old: Tensor) -> Any:
            return dapo(score_ids(lm, params, ids, buffers=buffers).log_probs, gains, mask, old)

        (_, metrics), grads = torch.vmap(value_and_grad(loss, has_aux=True))(params, ids, mask, gains, old)
        return *optimizers[2].update(params, grads, state), metrics

    return Setup(
        plan,
        lm,
        params,
        buffers,
        tokenizer,
        text,
        chats,
        prompts,
        random.key(seed),
        (imitate(optimizers[0]), imitate(optimizers[1])),
        jit(reinforce),
        optimizers,
    )


# -- training ---------------------------------------------------------------------------------------------------


def start(setup: Setup) -> TensorDict:
    """Return the state before the first step."""
    plan = setup.plan
    curves = {
        "loss": torch.full((plan.text + plan.chats,), torch.nan),
        "reward": torch.full((plan.rewards, len(RATES)), torch.nan),
    }
    return TensorDict({"params": setup.params, "optim": {}, "curves": curves})


def advance(setup: Setup, state: TensorDict, step: int) -> TensorDict:
    """Return the state after a step, which is a function of the state and the number of the step."""
    plan, key = setup.plan, random.fold_in(setup.key, step)
    starts = (0, plan.text, plan.text + plan.chats)
    phase = sum([step >= begin for begin in starts]) - 1
    params, optim, curves = state["params"], state["optim"], state["curves"]
    if step == starts[phase]:
        # The members differ in their learning rates alone.
        params = params.expand(len(RATES)).clone() if phase == 2 else params
        optim = setup.optimizers[phase].init(params)
    if phase == 2:
        params, optim, rewards = _reinforce(setup, params, optim, key)
        curves = curves.at["reward"].apply(lambda x: _put(x, step - starts[2], rewards))
    else:
        ids, mask = _texts(setup, key) if phase == 0 else _chats(setup, key)
        params, optim, loss = setup.imitate[phase](params, optim, setup.buffers, ids, mask)
        curves = curves.at["loss"].apply(lambda x: _put(x, step, loss))
    return TensorDict({"params": params, "optim": optim, "curves": curves})


def _texts(setup: Setup, key: Tensor) -> tuple[Tensor, Tensor]:
    begin = random.randint(key, (WINDOWS, 1), 0, len(setup.text) - WINDOW)
    # The first token of a window has no log-prob.
    mask = (torch.arange(WINDOW) > 0).expand(WINDOWS, WINDOW)
    return setup.text[begin + torch.arange(WINDOW)], mask


def _chats(setup: Setup, key: Tensor) -> tuple[Tensor, Tensor]:
    rows = random.randint(key, (CHATS,), 0, len(setup.chats))
    return setup.chats["input_ids"][rows], setup.chats["assistant_masks"][rows]


def _reinforce(setup: Setup, params: Any, optim: Any, key: Tensor) -> tuple[Any, Any, Tensor]:
    """Draw responses of each member to all questions, learn from them, and return the mean reward of each."""
    members = [respond(setup, params[i], random.fold_in(key, i)) for i in range(len(RATES))]
    ids, mask, old, rewards = (torch.stack(parts) for parts in zip(*members, strict=True))
    gains = group_normalized(rewards).flatten(1)
    params, optim, _ = setup.reinforce(params, optim, setup.buffers, ids, mask, gains, old)
    return params, optim, rewards.mean((1, 2))


def _put(curve: Tensor, at: int, value: Tensor) -> Tensor:
    return torch.cat([curve[:at], value.to(curve.dtype).unsqueeze(0), curve[at + 1 :]])


def respond(setup: Setup, params: Any, key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the responses that one model draws to all questions.

    Returns:
        The tokens (B, P + R), padded at the right; the mask of the responses' tokens; their log-probs when they were
        drawn; and the rewards (questions, samples).
    """
    options = GenerationOptions.parse({"max_new_tokens": LONGEST, "temperature": 1.0}, num_samples=SAMPLES)
    prompts, keys = setup.prompts, random.split(key, len(DICE) * SAMPLES)
    found = generate_tokens(setup.lm, params, list(prompts), options, keys=keys, buffers=setup.buffers)
    width = prompts.shape[1]
    ids = torch.cat([prompts.repeat_interleave(SAMPLES, 0), prompts.new_zeros(len(found), LONGEST)], 1)
    mask, log_probs = torch.zeros_like(ids, dtype=torch.bool), torch.zeros(ids.shape)
    for row, response in enumerate(found):
        assert response.tokens is not None
        assert response.log_probs is not None
        place = slice(width, width + len(response.tokens))
        ids[row, place], mask[row, place], log_probs[row, place] = response.tokens, True, response.log_probs
    texts = [setup.tokenizer.decode(row[valid]) for row, valid in zip(ids, mask, strict=True)]
    counts = [count for count in DICE for _ in range(SAMPLES)]
    rewards = torch.tensor([score_roll(text, count) for text, count in zip(texts, counts, strict=True)])
    return ids, mask, log_probs, rewards.reshape(len(DICE), SAMPLES)


def train(setup: Setup, manager: CheckpointManager) -> Iterator[tuple[int, TensorDict]]:
    """Go on from the last checkpoint, if there is one, and yield each state with the number of steps behind it."""
    done = manager.latest()
    state, step = (start(setup), 0) if done is None else (manager.load(done), done)
    yield step, state
    while step < setup.plan.total:
        state, step = advance(setup, state, step), step + 1
        if step % setup.plan.every == 0 or step == setup.plan.total:
            manager.save(step, state)
        yield step, state


def mean_reward(setup: Setup, params: Any) -> float:
    """Return the mean reward of a model, of draws that no step makes."""
    return float(respond(setup, params, random.fold_in(setup.key, setup.plan.total + 1))[3].mean())


# -- the report -------------------------------------------------------------------------------------------------


def continue_text(setup: Setup, params: Any, prompt: str, key: Tensor) -> str:
    """Return a text and what a model writes after it."""
    options = GenerationOptions.parse({"max_new_tokens": 40, "temperature": 0.7})
    ids = torch.tensor(setup.tokenizer(prompt)["input_ids"])
    (found,) = generate_tokens(setup.lm, params, [ids], options, keys=random.split(key, 1), buffers=setup.buffers)
    return setup.tokenizer.decode(torch.cat([ids, found.tokens]) if found.tokens is not None else ids)


def plot(state: TensorDict, plan: Plan, path: Path) -> None:
    """Draw the losses of the first two phases, and the rewards of each member."""
    from matplotlib.figure import Figure

    # Any: matplotlib is optional.
    figure: Any = Figure(figsize=(10, 3.6), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    losses = state["curves", "loss"].tolist()
    left.plot(range(plan.text), losses[: plan.text], color="#2c55b8", label="text")
    left.plot(range(plan.text, len(losses)), losses[plan.text :], color="#e0591b", label="chats")
    left.set(title="Text, then chats", xlabel="step", ylabel="negative log-likelihood (nats a token)", ylim=(0, None))
    rewards = _smooth(state["curves", "reward"])
    for rate, member, shade in zip(RATES, rewards.T.tolist(), (0.75, 0.55, 0.3, 0.0), strict=True):
        right.plot(member, color=(0.17 + 0.7 * shade, 0.33 + 0.5 * shade, 0.72), label=f"{rate:g}")
    right.set(title="GRPO: four learning rates at once", xlabel="step", ylabel="mean reward", ylim=(0, 1.02))
    right.legend(title="learning rate", frameon=False)
    left.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _smooth(curve: Tensor, width: int = 8) -> Tensor:
    """Return the means of the last steps at each step."""
    return torch.stack([curve[max(i + 1 - width, 0) : i + 1].mean(0) for i in range(len(curve))])


def run(seed: int, out: Path, plan: Plan, *, progress: bool = True) -> str:
    """Train, or go on where an earlier run stopped, write the report and the plot into a folder, and return the report.

    Args:
        seed: Seeds the weights and all draws.
        out: The folder, whose `checkpoints` are those of the same seed and plan.
        plan: The steps.
        progress: Show a bar.
    """
    from tqdm import tqdm

    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    setup = make_setup(seed, plan)
    manager = CheckpointManager(out / "checkpoints", keep_last=2, fsync=False)
    # The models that the report compares, at the ends of the phases.
    kept: dict[str, float] = {}
    sample, state, resumed = "", start(setup), manager.latest() or 0
    bar = tqdm(total=plan.total, disable=None if progress else True)
    for step, state in train(setup, manager):
        bar.n = step
        bar.refresh()
        if step == plan.text:
            sample = continue_text(setup, state["params"], "The statement ", random.fold_in(setup.key, plan.total))
        if step == plan.text + plan.chats:
            kept["after the chats"] = mean_reward(setup, state["params"])
    bar.close()
    for i, rate in enumerate(RATES):
        kept[f"GRPO, learning rate {rate:g}"] = mean_reward(setup, state["params"][i])
    plot(state, plan, out / "training.svg")
    rows = "\n".join(f"| {name} | {share:.2f} |" for name, share in kept.items())
    count = sum([leaf.numel() for leaf in setup.params.leaves()])
    parts = [
        "# A language model from nothing",
        f"{count:,} parameters, {len(setup.text):,} tokens of text, seed {seed}; "
        f"{plan.total - resumed} of {plan.total} steps in {time.perf_counter() - started:.0f} s. "
        "Written by `tdfunc.llm.demo`.",
        "![Losses of text and chats, and the rewards of four learning rates](training.svg)",
    ]
    if sample:
        parts += ["## After the text", f"```text\n{sample}\n```"]
    parts += [
        "## Loaded dice",
        "The chats roll fair dice, whose mean is 3.5 / 6 = 0.58. A reply is rewarded with its mean roll, as a part of "
        "6, if it has as many dice as were asked for.",
        f"| model | mean reward |\n|---|---|\n{rows}",
    ]
    report = "\n\n".join(parts)
    (out / "report.md").write_text(report)
    return report


def main() -> None:
    """Run the demo from the command line."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"tdfunc.llm.demo needs {', '.join(missing)}: pip install -e '.[demo,llm]' in a clone of tdfunc")
    import typer
    from rich.console import Console
    from rich.markdown import Markdown

    # The matrices are small: more threads wait for each other more than they compute.
    torch.set_num_threads(1)

    def command(
        seed: int = typer.Option(0, help="Seeds the weights and all draws."),
        out: Path = typer.Option(  # noqa: B008
            Path("demo-output/llm"), help="Folder for the report, the plot and the checkpoints.", file_okay=False
        ),
    ) -> None:
        """Train a small language model on text, on chats and by rewards, or go on where a run stopped."""
        Console().print(Markdown(f"{run(seed, out, Plan())}\n\nReport, plot and checkpoints: {out / 'report.md'}"))

    typer.run(command)


if __name__ == "__main__":
    main()
