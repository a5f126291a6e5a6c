"""A callback for transformers' Trainer: checkpoints, averaged weights, a soup.

The Trainer keeps its loop. A callback reads the module's weights as a tree after each
step, keeps their exponential average, and saves both with a CheckpointManager: whole
or not at all, with checksums. At the end the soup, the mean of the checkpoints, is a
line of arithmetic on trees.

Run it with: python hf_trainer.py
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

import tdfunc as tdf
from tdfunc import TensorDict

SAVE_STEPS, DECAY = 20, 0.9


def weights_of(model: nn.Module) -> TensorDict:
    """Return a copy of a module's parameters as a tree; tied ones are one leaf."""
    return tdf.split(tdf.from_module(model))[0].detach().clone()


class TreeCallback(TrainerCallback):
    """Keeps the average of the weights, and the last checkpoints of both."""

    def __init__(self, folder: Path) -> None:
        self.manager = tdf.CheckpointManager(folder, keep_last=3)

    def on_train_begin(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        """Begin with the weights that the run begins with."""
        self.ema = weights_of(model)

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Average; save at each 20th step."""
        weights = weights_of(model)
        self.ema = self.ema.lerp(weights, 1 - DECAY)
        if state.global_step % SAVE_STEPS == 0:
            run = TensorDict({"model": weights, "ema": self.ema})
            self.manager.save(state.global_step, run)


class Cycles(torch.utils.data.Dataset):
    """Sentences that count up to 15 and begin again."""

    def __len__(self) -> int:
        return 320

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(12) + i) % 16
        return {"input_ids": ids, "labels": ids}


def main(folder: Path) -> None:
    """Train a language model, then compare its last weights, their average, the soup."""
    logging.disable_progress_bar()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 16}
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "bos_token_id": 0}
    config = LlamaConfig(**sizes, **shape, eos_token_id=0, tie_word_embeddings=True)
    torch.manual_seed(0)
    model, callback = LlamaForCausalLM(config), TreeCallback(folder / "trees")
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        num_train_epochs=3,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        use_cpu=True,
    )
    Trainer(model, arguments, train_dataset=Cycles(), callbacks=[callback]).train()

    # The last three checkpoints, as one stacked tree.
    manager = callback.manager
    saved = tdf.stack([manager.load(step) for step in manager.steps()])
    weights = {"last": saved[-1]["model"], "ema": saved[-1]["ema"]}
    weights["soup"] = saved["model"].mean(0)
    assert (weights["last"] == weights_of(model)).all()

    batch = torch.stack([Cycles()[i]["input_ids"] for i in range(16)])
    apply, _, buffers = tdf.functional(model.eval())
    for name, params in weights.items():
        loss = apply(params, batch, labels=batch, buffers=buffers).loss
        print(f"{name}: loss {loss:.4f}")
        assert loss < 0.5  # log(16) = 2.77 before training

    # A tree of weights goes back into the model, for good.
    weights["ema"].to_module(model, strict=False)
    model.save_pretrained(folder / "ema")
    files = sorted(path.name for path in (folder / "ema").iterdir())
    print(f"saved with the averaged weights: {', '.join(files)}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
