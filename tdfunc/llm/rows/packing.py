"""Layouts of rows of tokens: compacted to the left, put into batches of one length, packed into bins; and back.

B rows, T positions, L positions of the longest row, G rows of a batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tdfunc.core.context import is_known
from tdfunc.core.errors import LeafMismatchError


class Rows(NamedTuple):
    """Rows of tokens with all pads at the right, where a causal model never reads them.

    Attributes:
        ids: The tokens (B, L); 0 at pads.
        mask: True at tokens (B, L).
        order: For each position the one that it came from (B, L).
        width: The number of positions T of the rows that were given.
    """

    ids: Tensor
    mask: Tensor
    order: Tensor
    width: int

    def gather(self, values_BTK: Tensor) -> Tensor:
        """Return values at the given positions in the order of `ids`."""
        return values_BTK.gather(1, self.order.unsqueeze(-1).expand(-1, -1, values_BTK.shape[-1]))

    def scatter(self, values_BLK: Tensor) -> Tensor:
        """Return values in the order of `ids` at the given positions, 0 elsewhere."""
        index = self.order.unsqueeze(-1).expand(values_BLK.shape)
        base = values_BLK.new_zeros((values_BLK.shape[0], self.width, values_BLK.shape[-1]))
        return base.scatter(1, index, values_BLK)


def pad_rows(rows: Sequence[Tensor], *, side: str) -> tuple[Tensor, Tensor]:
    """Return rows of any lengths with 0 at the pads (B, T), and the mask (B, T), True at tokens."""
    if not rows:
        return torch.zeros(0, 0, dtype=torch.int64), torch.zeros(0, 0, dtype=torch.bool)
    ids = pad_sequence(list(rows), batch_first=True, padding_side=side)
    lengths = torch.tensor([len(row) for row in rows], device=ids.device).unsqueeze(1)
    at = torch.arange(ids.shape[1], device=ids.device)
    if side == "right":
        return ids, at < lengths
    return ids, at >= ids.shape[1] - lengths


def as_mask(mask: Tensor, call: str) -> Tensor:
    """Return a mask of bools or integers as bools.

    Raises:
        LeafMismatchError: The mask has numbers to add to attention scores, which are 0 at tokens.
    """
    if mask.dtype is torch.bool:
        return mask
    if mask.is_floating_point():
        wrong = f"{mask.dtype}"
    elif is_known(mask) and bool((mask < 0).any()):
        wrong = "numbers below 0"
    else:
        return mask.bool()
    raise LeafMismatchError(
        f"{call}: the mask must be True or 1 at tokens.",
        expected="torch.bool, or integers from 0",
        got=wrong,
        hint="mask == 0 for a mask that is added to attention scores; mask.bool() for ones and zeros.",
    )


def compact(ids_BT: Tensor, mask_BT: Tensor) -> Rows:
    """Return the rows with their tokens moved to the left, in order, whatever sides the pads were on."""
    order = (~mask_BT).to(torch.uint8).sort(dim=1, stable=True).indices
    if is_known(mask_BT):
        # Without tokens one position of pads is left.
        longest = 0
        if mask_BT.numel():
            longest = int(mask_BT.sum(1).max())
        order = order[:, : max(longest, 1)]
    mask = mask_BT.gather(1, order)
    ids = torch.where(mask, ids_BT.gather(1, order), 0)
    return Rows(ids, mask, order, ids_BT.shape[1])


def equal_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Return the rows of each length, shortest first; rows without tokens are left out."""
    found: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        found.setdefault(length, []).append(row)
    return [found[length] for length in sorted(found) if length]


def bins(lengths: Sequence[int]) -> list[list[int]]:
    """Return rows for each bin, by first fit, the longest first; no bin is longer than the longest row."""
    found: list[list[int]] = []
    # A binary tree of the free places, at each node the most of its bins: a look at every bin would count pairs.
    leaves = 1 << len(lengths).bit_length()
    room = [max(lengths, default=0)] * (2 * leaves)
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    for row in longest_first:
        length = lengths[row]
        if not length:
            break
        # Down to the first bin with room: to the left child, unless only the right one has room.
        at = 1
        while at < leaves:
            at = 2 * at
            if room[at] < length:
                at += 1
        bin_at = at - leaves
        if bin_at == len(found):
            found.append([])
        found[bin_at].append(row)
        room[at] -= length
        at = at // 2
        while at:
            room[at] = max(room[2 * at], room[2 * at + 1])
            at = at // 2
    return found


class Packed(NamedTuple):
    """Rows that follow each other in bins.

    Attributes:
        ids: The tokens (G, L); 0 after the last row of a bin.
        positions: The positions within the rows (G, L).
        rows: The number of the row of each position in its bin (G, L).
        place: The place in the flattened bins of each position of the rows (B, L); 0 at pads.
    """

    ids: Tensor
    positions: Tensor
    rows: Tensor
    place: Tensor

    def mask(self, dtype: torch.dtype) -> Tensor:
        """Return the mask (G, 1, L, L) to add to attention scores: of earlier positions of the same row."""
        is_same_row = self.rows.unsqueeze(-1) == self.rows.unsqueeze(-2)
        length = self.ids.shape[1]
        is_earlier = torch.ones(length, length, dtype=torch.bool, device=self.ids.device).tril()
        zeros = torch.zeros(is_same_row.shape, dtype=dtype, device=is_same_row.device)
        mask = zeros.masked_fill(~(is_same_row & is_earlier), torch.finfo(dtype).min)
        return mask[:, None]


def pack(rows: Rows) -> Packed:
    """Return the rows packed into bins no longer than the longest of them."""
    lengths = rows.mask.sum(1).tolist()
    size = max(rows.ids.shape[1], 1)
    found = bins(lengths)
    # A batch without tokens is one empty bin.
    shape = (max(len(found), 1), size)
    ids = torch.zeros(shape, dtype=torch.int64)
    positions = torch.zeros(shape, dtype=torch.int64)
    row_numbers = torch.zeros(shape, dtype=torch.int64)
    place = torch.zeros(rows.ids.shape, dtype=torch.int64)
    tokens = rows.ids.cpu()
    for i, members in enumerate(found):
        start = 0
        for number, row in enumerate(members):
            length = lengths[row]
            part = slice(start, start + length)
            ids[i, part] = tokens[row, :length]
            positions[i, part] = torch.arange(length)
            row_numbers[i, part] = number
            place[row, :length] = i * size + torch.arange(start, start + length)
            start += length
        # The rest of a bin is also a row.
        positions[i, start:] = torch.arange(size - start)
        row_numbers[i, start:] = len(members)
    device = rows.ids.device
    return Packed(ids.to(device), positions.to(device), row_numbers.to(device), place.to(device))
