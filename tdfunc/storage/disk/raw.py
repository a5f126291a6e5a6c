"""The bytes of a tensor's elements, row by row, as an array that numpy, files and checksums take."""

from typing import Any

import torch
from torch import Tensor


# Any: numpy's arrays offer their bytes, which type checkers learn with Python 3.12.
def raw_view(leaf: Tensor) -> Any:
    """Return the memory of a tensor on the CPU that lies row by row; writing to it is writing to the tensor."""
    # `is_contiguous` ignores the stride of a dimension of one element, and `view` to bytes does not; with
    # `as_strided` one that is 5, say, is 1.
    return leaf.detach().as_strided((leaf.numel(),), (1,)).view(torch.uint8).numpy()


def raw_bytes(leaf: Tensor) -> Any:
    """Return the bytes of any dense tensor with values: its memory where they lie so, else a copy."""
    return raw_view(leaf.detach().cpu().resolve_conj().resolve_neg().contiguous())
