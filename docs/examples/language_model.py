"""A small language model from nothing: on text, on chats, and by rewards that a program checks.

It trains on the documentation and the licence that ship with CPython, fine-tunes on chats that roll dice, and
continues with GRPO, which rewards high rolls: four learning rates at once, as the members of one ensemble. With `--out`
it keeps checkpoints, a report and a plot in a folder, and a run that was stopped continues bit for bit.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tdfunc as tdf
from tdfunc import CheckpointManager, TensorDict, random
from tdfunc.llm import (
    CausalLM,
    GenerationOptions,
    History,
    Tokens,
    causal_lm,
    chatml,
    generate,
    score,
    score_ids,
)
from tdfunc.llm.losses import dapo, sft
from tdfunc.llm.losses.advantages import group_normalized

RATES = (5e-5, 1e-4, 2e-4, 4e-4)
DICE, ROLLS = (1, 2, 3), 100
QUESTIONS = [f"Roll {count} dice" for count in DICE]
# Tokens of a window of text; windows and chats of a step; responses to a question.
WINDOW, WINDOWS, CHATS, SAMPLES = 96, 12, 32, 16
# Tokens of a response: its dice, and the end.
LONGEST = max(DICE) + 1
# Steps over which the rewards of the report are averaged.
RECENT = 8
_IMITATION, _POLICY = tdf.optim.adam(lr=3e-3), tdf.optim.adam(lr=torch.tensor(RATES))


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
    """Everything that does not change: a function of the seed and the plan."""

    plan: Plan
    lm: CausalLM
    params: TensorDict
    buffers: TensorDict
    # Any: a tokenizer of transformers.
    tokenizer: Any
    text: Tensor
    chats: TensorDict
    prompts: TensorDict
    key: Tensor
    # Any: trees of weights, states and batches.
    imitate: Callable[..., Any]
    reinforce: Callable[..., Any]


# -- data -------------------------------------------------------------------------------------------------------


def load_texts() -> list[str]:
    """Return the documentation that `help()` shows, and the licence where the installation has it."""
    licence = Path(os.__file__).parent / "LICENSE.txt"
    return [
        *topics.values(),
        *([licence.read_text("utf-8")] if licence.exists() else []),
    ]


# Any: a tokenizer of transformers.
def train_tokenizer(texts: list[str]) -> Any:
    """Return a byte-level BPE tokenizer of 512 tokens, in which each digit is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


def make_chats(key: Tensor) -> History:
    """Return chats in which one, two or three dice are rolled, each as often as another."""
    rolls = random.randint(key, (len(DICE), ROLLS, max(DICE)), 1, 7).tolist()
    chats: list[list[dict[str, str]]] = []
    for count, question, rows in zip(DICE, QUESTIONS, rolls, strict=True):
        for row in rows:
            reply = "".join(map(str, row[:count]))
            chats.append(
                [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": reply},
                ]
            )
    return History.from_chats(chats)


def score_roll(text: str, count: int) -> float:
    """Return the mean of the dice in a response as a part of 6; 0 for a text that is not so many dice and an end."""
    reply, end, _ = text.partition("<|im_end|>")
    rolled = end and len(reply) == count and set(reply) <= set("123456")
    return sum(map(int, reply)) / (6 * count) if rolled else 0.0


def make_setup(seed: int, plan: Plan) -> Setup:
    """Return the model, the data and the steps of a seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    texts = load_texts()
    tokenizer = train_tokenizer(texts)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=WINDOW,
        eos_token_id=tokenizer.eos_token_id,
        # torch's attention kernels have no rule for vmap on CPUs.
        attn_implementation="eager",
    )
    # transformers draws the first weights from torch's default generator.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm, params, buffers = causal_lm(LlamaForCausalLM(config))
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "chat_template": chatml,
        "padding": True,
        "return_dict": True,
    }
    chats = make_chats(random.key(seed)).apply_chat_template(
        **options,
        padding_side="right",
        add_generation_prompt=False,
        return_assistant_tokens_mask=True,
    )
    asked = History.from_chats(
        [[{"role": "user", "content": question}] for question in QUESTIONS]
    )
    asked = asked.apply_chat_template(**options)
    tokens = Tokens(prompt=asked["input_ids"], batch_size=asked.batch_size)
    prompts = TensorDict(
        {"tokens": tokens, "attention_mask": asked["attention_mask"]}, asked.batch_size
    )
    text = torch.tensor(tokenizer("\n".join(texts))["input_ids"])
    steps = _imitation(lm), _reinforcement(lm)
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
        *steps,
    )


# -- training ---------------------------------------------------------------------------------------------------


def _imitation(lm: CausalLM) -> Callable[..., Any]:
    """Return the step that makes tokens under a mask more probable."""

    def loss(params: Any, buffers: Any, ids: Tensor, mask: Tensor) -> Any:
        # Pads at the right are seen by no token.
        found = score_ids(lm, params, ids, buffers=buffers)
        return sft(found.log_probs, found.mask & mask).loss

    def step(params: Any, state: Any, buffers: Any, ids: Tensor, mask: Tensor) -> Any:
        value, grads = tdf.value_and_grad(loss)(params, buffers, ids, mask)
        return *_IMITATION.update(params, grads, state), value

    return tdf.jit(step)


def _reinforcement(lm: CausalLM) -> Callable[..., Any]:
    """Return the step of all members, each on the responses that it drew."""

    def loss(params: Any, buffers: Any, drawn: Any) -> Any:
        found = score(lm, params, drawn, buffers=buffers)["log_probs"]
        old = drawn["log_probs"]
        return dapo(
            found.full, group_normalized(drawn["reward"]), old.mask, old.full
        ).loss

    def step(members: Any, state: Any, buffers: Any, drawn: Any) -> Any:
        grads = torch.vmap(tdf.grad(loss), (0, None, 0))(members, buffers, drawn)
        return _POLICY.update(members, grads, state)

    return tdf.jit(step)


def start(setup: Setup) -> TensorDict:
    """Return the state before the first step."""
    curves = {"losses": torch.zeros(0), "rewards": torch.zeros(0, len(RATES))}
    return TensorDict({"params": setup.params, "optim": {}, "sample": "", **curves})


def advance(setup: Setup, state: TensorDict, step: int) -> TensorDict:
    """Return the state after a step, which is a function of the state and the number of the step."""
    plan, key = setup.plan, random.fold_in(setup.key, step)
    params, optim, sample, losses, rewards = map(
        state.get, ("params", "optim", "sample", "losses", "rewards")
    )
    if step < plan.text + plan.chats:
        if step in (0, plan.text):
            optim = _IMITATION.init(params)
        ids, mask = _texts(setup, key) if step < plan.text else _chats(setup, key)
        params, optim, loss = setup.imitate(params, optim, setup.buffers, ids, mask)
        losses = torch.cat([losses, loss.unsqueeze(0)])
    else:
        if step == plan.text + plan.chats:
            # The members differ in their learning rates alone.
            params = params.expand(len(RATES)).clone()
            optim = _POLICY.init(params)
        drawn = [
            respond(setup, member, random.fold_in(key, i))
            for i, member in enumerate(params)
        ]
        # The longest responses of two members may differ.
        drawn = tdf.pad_sequence(drawn, -1)
        params, optim = setup.reinforce(params, optim, setup.buffers, drawn)
        rewards = torch.cat([rewards, drawn["reward"].mean((1, 2)).unsqueeze(0)])
    if step + 1 == plan.text:
        sample = continue_text(setup, params, "The statement ", key)
    return TensorDict(
        {
            "params": params,
            "optim": optim,
            "sample": sample,
            "losses": losses,
            "rewards": rewards,
        }
    )


def _texts(setup: Setup, key: Tensor) -> tuple[Tensor, Tensor]:
    begin = random.randint(key, (WINDOWS, 1), 0, len(setup.text) - WINDOW)
    ids = setup.text[begin + torch.arange(WINDOW)]
    return ids, torch.ones_like(ids, dtype=torch.bool)


def _chats(setup: Setup, key: Tensor) -> tuple[Tensor, Tensor]:
    rows = random.randint(key, (CHATS,), 0, len(setup.chats))
    return setup.chats["input_ids"][rows], setup.chats["assistant_masks"][rows]


def respond(setup: Setup, params: Any, key: Tensor) -> TensorDict:
    """Return the responses that one model draws to all questions, with their rewards (questions, samples)."""
    options = GenerationOptions.parse(
        {"max_new_tokens": LONGEST, "temperature": 1.0}, num_samples=SAMPLES
    )
    drawn = generate(
        setup.lm, params, setup.prompts, key=key, buffers=setup.buffers, options=options
    )
    texts = [setup.tokenizer.batch_decode(rows) for rows in drawn["tokens"].response]
    rewards = [
        [score_roll(text, count) for text in row]
        for count, row in zip(DICE, texts, strict=True)
    ]
    return drawn.set("reward", torch.tensor(rewards))


def continue_text(setup: Setup, params: Any, prompt: str, key: Tensor) -> str:
    """Return a text and the words that a model writes after it."""
    ids = torch.tensor([setup.tokenizer(prompt)["input_ids"]])
    td = TensorDict({"tokens": Tokens(prompt=ids, batch_size=[1])}, [1])
    out = generate(
        setup.lm,
        params,
        td,
        key=key,
        buffers=setup.buffers,
        max_new_tokens=40,
        temperature=0.7,
    )
    return setup.tokenizer.decode(out["tokens"].full[0])


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


# -- the report -------------------------------------------------------------------------------------------------


def plot(state: TensorDict, plan: Plan, path: Path) -> None:
    """Draw the losses of the first two phases, and the rewards of each member."""
    from matplotlib.figure import Figure

    # Any: matplotlib is optional.
    figure: Any = Figure(figsize=(10, 3.6), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    losses = state["losses"].tolist()
    left.plot(range(plan.text), losses[: plan.text], color="#2c55b8", label="text")
    left.plot(
        range(plan.text, len(losses)),
        losses[plan.text :],
        color="#e0591b",
        label="chats",
    )
    left.set(
        title="Text, then chats",
        xlabel="step",
        ylabel="negative log-likelihood (nats a token)",
        ylim=(0, None),
    )
    rewards = _smooth(state["rewards"])
    for rate, member, shade in zip(
        RATES, rewards.T.tolist(), (0.75, 0.55, 0.3, 0.0), strict=True
    ):
        right.plot(
            member,
            color=(0.17 + 0.7 * shade, 0.33 + 0.5 * shade, 0.72),
            label=f"{rate:g}",
        )
    right.set(
        title="GRPO: four learning rates at once",
        xlabel="step",
        ylabel="mean reward",
        ylim=(0, 1.02),
    )
    right.legend(title="learning rate", frameon=False)
    left.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _smooth(curve: Tensor) -> Tensor:
    """Return the means of the last steps at each step."""
    return torch.stack(
        [curve[max(i + 1 - RECENT, 0) : i + 1].mean(0) for i in range(len(curve))]
    )


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
    resumed, state = manager.latest() or 0, start(setup)
    with tqdm(total=plan.total, disable=None if progress else True) as bar:
        for step, after in train(setup, manager):
            state = after
            bar.update(step - bar.n)
    plot(state, plan, out / "training.svg")
    # In the first step of the rewards all members are the model of the chats.
    rewards = {"after the chats": state["rewards"][0].mean()}
    rewards |= zip(
        [f"GRPO, learning rate {rate:g}" for rate in RATES],
        _smooth(state["rewards"])[-1],
        strict=True,
    )
    rows = "\n".join(f"| {name} | {reward:.2f} |" for name, reward in rewards.items())
    count = sum([leaf.numel() for leaf in setup.params.leaves()])
    report = "\n\n".join(
        [
            "# A language model from nothing",
            f"{count:,} parameters, {len(setup.text):,} tokens of text, seed {seed}; "
            f"{plan.total - resumed} of {plan.total} steps in {time.perf_counter() - started:.0f} s. "
            "Written by `docs/examples/language_model.py`.",
            "![Losses of text and chats, and the rewards of four learning rates](training.svg)",
            f"## After the text\n\n```text\n{state['sample']}\n```",
            "## Loaded dice",
            "The chats roll fair dice, whose mean is 3.5 / 6 = 0.58. A reply is rewarded with its mean roll, as a part "
            f"of 6, if it has as many dice as were asked for. After GRPO rewards are means of the last {RECENT} steps.",
            f"| model | mean reward |\n|---|---|\n{rows}",
        ]
    )
    (out / "report.md").write_text(report, "utf-8")
    return report


def main() -> None:
    """Run the program from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, help="the folder of checkpoints, report, plot"
    )
    for name, steps in Plan._field_defaults.items():
        parser.add_argument(f"--{name}", type=int, default=steps, help="steps")
    given = vars(parser.parse_args())
    seed, out = given.pop("seed"), given.pop("out")
    # The matrices are small: more threads wait for each other more than they compute.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(run(seed, out or Path(folder), Plan(**given)))


if __name__ == "__main__":
    main()
