"""Rows of tokens of different lengths as tensors: truncated, padded or left ragged, with masks from lengths.

N rows, T positions of the longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tdfunc._lazystack import lazy_stack
from tdfunc._tensordict import TensorDict
from tdfunc.core.errors import as_count, check_choice, error

# The `input_ids` of a row and its masks, each of shape (T,).
EncodedRow = dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """The truncation and padding of rows.

    Args:
        padding: True or "longest", "max_length", or False for ragged rows.
        truncation: True to truncate rows to `max_length`.
        max_length: The maximum number of tokens in a row.
        padding_side: "left" or "right".
        truncation_side: The side at which tokens are removed.
    """

    padding: bool | str = False
    truncation: bool | str = False
    max_length: int | None = None
    padding_side: str = "left"
    truncation_side: str = "right"

    def check(self, call: str) -> None:
        """Raise if an option has an invalid value.

        Raises:
            ValueError: An option has an invalid value, or `max_length` is missing.
        """
        sides = ("left", "right")
        choices = {
            "padding": (True, False, "longest", "max_length", "do_not_pad"),
            "truncation": (True, False, "longest_first", "do_not_truncate"),
            "padding_side": sides,
            "truncation_side": sides,
        }
        for name, allowed in choices.items():
            check_choice(f"{call}: {name}", getattr(self, name), allowed)
        if self.max_length is None and (self.padding == "max_length" or self.cuts):
            raise error(ValueError, f"{call}: max_length is missing.", got="None")
        if self.max_length is not None:
            as_count(f"{call}: max_length", self.max_length, 0)

    @property
    def limit(self) -> int | None:
        """The number of tokens of a row as a plain int."""
        if self.max_length is None:
            return None
        return as_count("max_length", self.max_length, 0)

    @property
    def pads(self) -> bool:
        """True if rows are padded to one length."""
        return self.padding not in (False, "do_not_pad")

    @property
    def cuts(self) -> bool:
        """True if rows are truncated."""
        return self.truncation not in (False, "do_not_truncate")

    def cut(self, row: EncodedRow, *, first: int = 0, last: int = 0) -> EncodedRow:
        """Return a row of at most `max_length` tokens, which keeps its `first` and `last` tokens."""
        length = len(row["input_ids"])
        limit = self.limit
        if not self.cuts or limit is None or length <= limit:
            return row
        room = max(limit - first - last, 0)
        end = length - last
        if self.truncation_side == "right":
            kept = slice(first, first + room)
        else:
            kept = slice(end - room, end)
        if first or last:
            return {name: torch.cat([x[:first], x[kept], x[end:]]) for name, x in row.items()}
        return {name: x[kept] for name, x in row.items()}

    def pad(self, rows: Sequence[EncodedRow], pad_id: int) -> TensorDict:
        """Return rows as tensors (N, T), with their `attention_mask`; the other masks are False at pads."""
        lengths = torch.tensor([len(row["input_ids"]) for row in rows], dtype=torch.int64)
        width = int(lengths.max()) if rows else 0
        if self.padding == "max_length" and self.limit is not None:
            width = max(width, self.limit)
        positions = torch.arange(width)
        if self.padding_side == "left":
            real = positions >= width - lengths.unsqueeze(-1)
        else:
            real = positions < lengths.unsqueeze(-1)
        names = list(rows[0]) if rows else ["input_ids"]
        made: dict[str, Tensor] = {}
        for name in names:
            padded = torch.full(real.shape, pad_id) if name == "input_ids" else torch.zeros_like(real)
            if rows:
                padded[real] = torch.cat([row[name] for row in rows]).to(padded.dtype)
            made[name] = padded
        return TensorDict({**made, "attention_mask": real}, [len(rows)])


def unmask_first(row: EncodedRow) -> EncodedRow:
    """Return a row whose masks are False at its first token: nothing predicts it, so that it cannot be trained."""
    masks = [name for name in row if name != "input_ids"]
    if not any(bool(row[name][:1].any()) for name in masks):
        return row
    changed = dict(row)
    for name in masks:
        changed[name] = row[name].clone()
        changed[name][:1] = False
    return changed


def pad_id_of(tokenizer: Any) -> int:
    """Return the padding id of a tokenizer, or any other id, since masks mark the pads."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return token_id
    return 0


def row_tree(row: EncodedRow) -> TensorDict:
    """Return one row as a tree without a batch."""
    real = torch.ones(len(row["input_ids"]), dtype=torch.bool)
    return TensorDict({**unmask_first(row), "attention_mask": real})


def arrange(nested: Any, rows: Sequence[EncodedRow], layout: Layout, pad_id: int, *, ragged: bool = False) -> Any:
    """Return truncated rows as a tree, whose batch is nested as the row numbers in `nested`.

    Args:
        nested: The number of a row, or (nested) lists of numbers.
        rows: The rows.
        layout: The padding; without it the tree is a lazy stack in each dimension.
        pad_id: The id at pads.
        ragged: Allow lists of different lengths in `nested`: the tree is a lazy stack even with padding.
    """
    rows = [unmask_first(row) for row in rows]
    if layout.pads:
        padded = layout.pad(rows, pad_id)
        if not ragged:
            return padded.reshape(sizes_of(nested))
        trees = padded.unbind(0)
    else:
        trees = [row_tree(row) for row in rows]
    # A lazy stack has at least one tree.
    empty = layout.pad([], pad_id)

    def stacked(part: Any) -> Any:
        if not isinstance(part, list):
            return trees[part]
        if not part:
            return empty
        return lazy_stack([stacked(each) for each in part])

    return stacked(nested)


def sizes_of(nested: Any) -> list[int]:
    """Return the lengths of nested lists, which are equal in each dimension."""
    if not isinstance(nested, list):
        return []
    if not nested:
        return [0]
    return [len(nested), *sizes_of(nested[0])]
