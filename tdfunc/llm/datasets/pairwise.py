"""`RewardData`, rows of tokens with their rewards, and `PairwiseDataset`, pairs of a chosen and a rejected row.

B rows, T positions; N pairs.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tdfunc._tensorclass import TensorClass
from tdfunc._tensordict import TensorDict
from tdfunc.llm.datasets.tokens import TokenDataset, load_tokens
from tdfunc.llm.encoding.padding import Layout

if TYPE_CHECKING:
    from typing_extensions import Self


class RewardData(TensorClass):
    """Rows of tokens with their rewards.

    Args:
        input_ids: The token ids, shape (B, T).
        attention_mask: True at tokens, False at pads, shape (B, T).
        rewards: A reward for each token, shape (B, T).
        end_scores: The reward of each row, at its last token, shape (B,).
        assistant_masks: True at the tokens of the response, shape (B, T): the mask of losses of preferences.

    Raises:
        TypeError: `input_ids` or `attention_mask` is missing.

    Source:
        `torchrl.data.RewardData`.

    Examples:
        >>> import torch
        >>> ids = torch.ones(2, 4, dtype=torch.int64)
        >>> data = RewardData(input_ids=ids, attention_mask=ids.bool(), batch_size=[2])
        >>> data.replace(end_scores=torch.tensor([0.5, -1.0]))[1].end_scores
        tensor(-1.)
    """

    input_ids: Tensor
    attention_mask: Tensor
    rewards: Tensor | None = None
    end_scores: Tensor | None = None
    assistant_masks: Tensor | None = None


class PairwiseDataset(TensorClass):
    """Pairs of a chosen and a rejected row.

    Args:
        chosen_data: The chosen rows.
        rejected_data: The rejected rows.

    Source:
        `torchrl.data.PairwiseDataset`.

    Examples:
        >>> import torch
        >>> ids = torch.ones(2, 4, dtype=torch.int64)
        >>> row = RewardData(input_ids=ids, attention_mask=ids.bool(), batch_size=[2])
        >>> pairs = PairwiseDataset(chosen_data=row, rejected_data=row, batch_size=[2])
        >>> [batch.rejected_data.input_ids.shape for batch in pairs.split(1)]
        [torch.Size([1, 4]), torch.Size([1, 4])]
    """

    chosen_data: RewardData
    rejected_data: RewardData

    @classmethod
    def from_rows(cls, rows: TensorDict) -> "Self":
        """Return padded rows as pairs.

        Args:
            rows: A tree with `chosen` and `rejected`, each with `input_ids`, `attention_mask`, and `assistant_masks` if
                responses are known.
        """

        def side(name: str) -> RewardData:
            part = rows[name]
            masks = part.get("assistant_masks", None)
            return RewardData(
                part["input_ids"], part["attention_mask"], assistant_masks=masks, batch_size=rows.batch_size
            )

        return cls(side("chosen"), side("rejected"), batch_size=rows.batch_size)

    @classmethod
    def from_dataset(
        cls,
        tokenizer: Any,
        source: "str | os.PathLike[str] | Iterable[Any]",
        *,
        prompt: str | None = "prompt",
        chosen: str = "chosen",
        rejected: str = "rejected",
        max_length: int | None = 550,
        add_eos_token: bool = False,
        padding_side: str = "left",
        untrained: str = "raise",
        cache_dir: "str | os.PathLike[str] | None" = None,
    ) -> "Self":
        """Return all pairs of a data set, padded; `split` and `unbind` make batches of them.

        Args:
            tokenizer: A tokenizer or processor of transformers.
            source: A file or iterable of records, as `load_tokens` reads them.
            prompt: The entry with the text or the messages before both responses; None if the others are complete
                texts or conversations. Replies with which both conversations begin belong to the prompt.
            chosen: The entry with the chosen response, a text or a list of messages.
            rejected: The entry with the rejected response.
            max_length: The maximum number of tokens in a row; None for no truncation.
            add_eos_token: End each response that is a text with the tokenizer's `eos_token`.
            padding_side: "left" or "right".
            untrained: "raise" an error for a pair that truncation makes equal, or leaves without a token of a response;
                or "drop" such pairs, with a warning that counts them.
            cache_dir: A folder for the tokens.

        Raises:
            MissingKeyError: A record lacks an entry.
            TypeError: The prompt is a text and the responses are conversations, or the reverse.
            ValueError: Truncation leaves nothing to train on in a pair.
        """
        columns = {"chosen": chosen, "rejected": rejected}
        if prompt is None:
            given = columns
        else:
            given = {name: (prompt, entry) for name, entry in columns.items()}
        data = load_tokens(tokenizer, source, columns=given, cache_dir=cache_dir, add_eos_token=add_eos_token)
        data = _without_shared_replies(data)
        layout = Layout(truncation=max_length is not None, max_length=max_length)
        pairs = data._trainable("from_dataset", range(len(data)), layout, untrained, is_pair=True)
        rows = data.batch(
            pairs,
            truncation=max_length is not None,
            max_length=max_length,
            padding_side=padding_side,
        )
        return cls.from_rows(rows)


def _without_shared_replies(data: TokenDataset) -> TokenDataset:
    """Return pairs whose masks are False at the replies with which both rows begin: these are not what was chosen.

    A pair of which one row has no other replies keeps its masks.
    """
    names = ("chosen", "rejected")
    if not all(["assistant_masks" in data.columns[name] for name in names]):
        return data
    columns = data.columns
    masks = {name: columns[name, "assistant_masks"].clone() for name in names}
    starts = {name: columns[name, "offsets"].tolist() for name in names}
    for row in range(len(data)):
        pair = data[row]
        shared = _shared_replies(pair["chosen"], pair["rejected"])
        if all([bool(pair[name]["assistant_masks"][shared:].any()) for name in names]):
            for name in names:
                start = starts[name][row]
                masks[name][start : start + shared] = False
    for name in names:
        columns = columns.set((name, "assistant_masks"), masks[name])
    return replace(data, columns=columns)


def _shared_replies(chosen: TensorDict, rejected: TensorDict) -> int:
    """Return the number of tokens up to the end of the last complete reply with which both rows begin."""
    size = min(len(chosen["input_ids"]), len(rejected["input_ids"]))
    mask = chosen["assistant_masks"][:size]
    is_equal = (chosen["input_ids"][:size] == rejected["input_ids"][:size]) & (
        mask == rejected["assistant_masks"][:size]
    )
    common = int(is_equal.long().cumprod(0).sum())
    inside = mask[:common]
    # A token of a reply before one that is of none.
    ends = (inside[:-1] & ~inside[1:]).nonzero()
    return int(ends[-1]) + 1 if len(ends) else 0
