"""The messages of saves in the background and of the checkpoints of a run: call, class, pattern."""

import os

import pytest
import torch

from tdfunc import AsyncSaver, CheckpointManager, TensorDict, save
from tests.storage.scripts import tree_of

RUN = "run"
ROWS = {
    "steps below 0": (lambda: CheckpointManager(RUN).save(-1, tree_of(1)), ValueError, r"save: .*0 or more(.|\n)*-1"),
    "steps that are text": (lambda: CheckpointManager(RUN).save("1", tree_of(1)), AttributeError, "__index__"),
    "lists for trees": (lambda: CheckpointManager(RUN).save(0, [1]), TypeError, "a mapping or a tree"),
    "tensors for trees": (lambda: save(torch.ones(1), "x.safetensors"), AttributeError, "'Tensor' object"),
    "no step kept": (lambda: CheckpointManager(RUN, keep_last=0), ValueError, r"1 or more(.|\n)*keep_last=0"),
    "no best kept": (lambda: CheckpointManager(RUN, keep_best=0, metric="m"), ValueError, r"more(.|\n)*keep_best=0"),
    "best of what": (lambda: CheckpointManager(RUN, keep_best=1), ValueError, r"keep_best needs a metric"),
    "modes": (lambda: CheckpointManager(RUN, mode="low"), ValueError, r"'min' or 'max'(.|\n)*'low'"),
    "queues without a place": (lambda: AsyncSaver(max_pending=0), ValueError, r"max_pending(.|\n)*1 or more(.|\n)*0"),
    "of a manager": (lambda: CheckpointManager(RUN, max_pending=0), ValueError, r"max_pending(.|\n)*1 or more(.|\n)*0"),
    "best without a metric": (lambda: CheckpointManager(RUN).best(), ValueError, r"best: (.|\n)*metric="),
    "metrics that are text": (
        lambda: CheckpointManager(RUN, metric="loss").save(0, tree_of(1), metadata={"loss": "low"}),
        TypeError, r"metric 'loss'(.|\n)*int or float(.|\n)*'low'",
    ),
    "suffixes": (lambda: AsyncSaver().save(tree_of(1), "t.pt"), ValueError, r"expected: \.safetensors\n.*\.pt"),
    "sizes of shards": (lambda: AsyncSaver().save(tree_of(1), "m", max_shard_size=0), ValueError, "max_shard_size"),
    "sizes of shards of a step": (lambda: CheckpointManager(RUN, max_shard_size=0), ValueError, "max_shard_size"),
    "files for folders": (
        lambda: AsyncSaver().save(tree_of(1), "m.safetensors", max_shard_size=9), ValueError, "name of a folder"
    ),
    "folders that are not there": (lambda: save(tree_of(1), "no/x.safetensors"), OSError, "the folder must exist"),
    "folders without a name": (lambda: save(tree_of(1), "", max_shard_size=9), OSError, "the folder above must exist"),
    "files for trees": (lambda: TensorDict.load_memmap(3), TypeError, "int"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_messages(name, tmp_path, monkeypatch):
    """A mistake is an error of the class that a user would catch, which says what to write, and nothing is written."""
    call, kind, pattern = ROWS[name]
    monkeypatch.chdir(tmp_path)

    with pytest.raises(kind, match=pattern):
        call()
    assert os.listdir(tmp_path) == []
