"""The bytes of a leaf, whatever its strides, by every way in which a leaf is written."""

import pytest
import torch
from torch import nn

from tdfunc.storage.disk.raw import raw_bytes, raw_view

# torch counts a dimension of one element as contiguous whatever its stride is.
ONES = {
    "a column of one row": lambda: torch.arange(5.0).reshape(1, 5)[:, 0],
    "one of every second": lambda: torch.arange(4.0)[::2][:1],
    "an imaginary part": lambda: torch.tensor([1 + 2j]).imag,
    "a negative one": lambda: torch.tensor([1 + 2j]).conj().imag,
    "a negative one in two dimensions": lambda: torch.tensor([[1 + 2j]]).conj().imag,
    "a conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "a negative scalar": lambda: torch.tensor(1 + 2j).conj().imag,
    "no negative ones": lambda: torch.empty(0, dtype=torch.complex64).conj().imag,
    "no column": lambda: torch.empty(0, 5)[:, 3],
    "bfloat16": lambda: torch.arange(4.0).bfloat16()[::2][:1],
    "of a module": lambda: nn.Parameter(torch.arange(5.0).reshape(1, 5)[:, 2]),
    "expanded": lambda: torch.tensor(3.0).expand(1),
}


@pytest.mark.parametrize("name", ONES)
def test_bytes_are_those_of_a_copy(name):
    """The bytes are those of a copy, whatever the strides."""
    leaf = ONES[name]()
    plain = torch.empty(leaf.shape, dtype=leaf.dtype).copy_(leaf.detach())

    assert raw_bytes(leaf).tobytes() == raw_view(plain).tobytes()
    assert raw_bytes(leaf).nbytes == leaf.numel() * leaf.element_size()


def test_what_is_written_to_the_view_is_in_the_tensor():
    """Writes to the view are writes to the tensor."""
    leaf = torch.arange(5.0).reshape(1, 5)[:, 3]

    raw_view(leaf)[:] = raw_bytes(torch.tensor([7.0]))

    assert leaf.item() == 7.0
