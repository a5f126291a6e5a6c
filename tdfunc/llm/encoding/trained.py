"""The check that rows have something to train on, in particular behind a truncation; every call that truncates uses it.

A row has lost its purpose if truncation removed all tokens that an assistant wrote, or made the two rows of a pair
equal.
"""

import warnings
from collections.abc import Mapping, Sequence
from itertools import combinations

import torch

from tdfunc.core.errors import check_choice, error
from tdfunc.llm.encoding.padding import EncodedRow, Layout, unmask_first
from tdfunc.llm.messages.columns import Conversation
from tdfunc.llm.templates.base import describe

_MASK = "assistant_masks"


def find_loss(
    full: Mapping[str, EncodedRow], truncated: Mapping[str, EncodedRow], *, is_pair: bool | None = None
) -> str | None:
    """Return the reason for which a truncated row has nothing to train on any more; None if it has.

    Args:
        full: The complete row of each column.
        truncated: The truncated row of each column.
        is_pair: The columns are compared with each other; by default those that have masks.
    """
    # The first token of a row is predicted by nothing.
    cut = {name: unmask_first(row) for name, row in truncated.items()}
    for name, row in cut.items():
        had_trained = _MASK in row and bool(full[name][_MASK][1:].any())
        if had_trained and not bool(row[_MASK].any()):
            if len(cut) > 1:
                return f"no token of the response is left in {name!r}"
            return "no trained token is left"
    for first, second in combinations(cut, 2):
        both_have_masks = _MASK in cut[first] and _MASK in cut[second]
        are_compared = both_have_masks if is_pair is None else is_pair
        if are_compared and _are_equal(cut, first, second) and not _are_equal(full, first, second):
            return f"{first!r} and {second!r} are equal"
    return None


def _are_equal(rows: Mapping[str, EncodedRow], first: str, second: str) -> bool:
    return torch.equal(rows[first]["input_ids"], rows[second]["input_ids"])


def check_untrained(call: str, untrained: str) -> None:
    """Raise if the option of a call has an invalid value."""
    check_choice(f"{call}: untrained", untrained, ("raise", "drop"))


def report_losses(call: str, losses: Mapping[int, str], count: int, layout: Layout, *, untrained: str) -> None:
    """Raise an error for the first row with a loss, or warn that these rows are left out.

    Args:
        call: The name of the call.
        losses: The reason of each row without anything to train on, by its number.
        count: The number of all rows.
        layout: The truncation.
        untrained: "raise" or "drop".

    Raises:
        ValueError: A row has nothing to train on, and `untrained` is "raise", or all rows would be left out.
    """
    if not losses:
        return
    row, reason = next(iter(losses.items()))
    if untrained == "drop" and len(losses) < count:
        warnings.warn(
            f"{call}: {len(losses)} of {count} rows are left out, because truncation to {layout.max_length} tokens "
            f"leaves nothing to train on (row {row}: {reason}).",
            stacklevel=3,
        )
        return
    raise error(
        ValueError,
        f"{call}: truncation leaves nothing to train on in row {row}: {reason}.",
        expected=f"rows with a trained token among their {layout.max_length} tokens, and pairs that differ",
        got=f"{len(losses)} of {count} rows without",
        hint="use a larger max_length or the other truncation side; data sets can leave such rows out: "
        "untrained='drop'.",
    )


def check_rows(call: str, rows: Sequence[EncodedRow], layout: Layout) -> None:
    """Raise if truncation leaves nothing to train on in a row.

    Raises:
        ValueError: The message has the number of the row.
    """
    losses: dict[int, str] = {}
    for i, row in enumerate(rows):
        reason = find_loss({"row": row}, {"row": layout.cut(row)})
        if reason is not None:
            losses[i] = reason
    report_losses(call, losses, len(rows), layout, untrained="raise")


def check_masks(
    rows: Sequence[EncodedRow],
    conversations: Sequence[Conversation],
    *,
    first: int = 0,
    call: str = "apply_chat_template",
) -> None:
    """Raise if the assistant mask of a conversation with a reply is empty, or has only the first token of the row.

    Args:
        rows: The rows of the conversations, truncated or complete.
        conversations: The conversations.
        first: The number of the first conversation.
        call: The name of the call.

    Raises:
        ValueError: The message names the reply.
    """
    for i, (row, conversation) in enumerate(zip(rows, conversations, strict=True)):
        replies = [n for n, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if replies and not bool(unmask_first(row)[_MASK].any()):
            raise error(
                ValueError,
                f"{call}: the assistant mask of conversation {first + i} is empty.",
                expected=f"tokens of {describe(conversation, replies[0])}",
                hint="use a larger max_length; a template with {% generation %} must mark its replies.",
            )
