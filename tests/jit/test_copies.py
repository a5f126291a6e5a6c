"""A chain of copies and views is one copy, and its results have the bits of the function."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import tdfunc as tdf
from tests.helpers import examples

# Of a tensor and a number that chooses a dimension.
STEPS: dict[str, Any] = {
    "turn": lambda x, n: x.permute([(i + n) % x.dim() for i in range(x.dim())]),
    "swap": lambda x, n: x.transpose(0, n % x.dim()),
    "t": lambda x, n: x.reshape(2, -1).t(),
    "flat": lambda x, n: x.reshape(-1),
    "halves": lambda x, n: x.reshape(2, -1),
    "cut": lambda x, n: x.reshape(-1, 4 + n % 2 * 2),
    "thirds": lambda x, n: x.reshape(2, -1, 3),
    "new": lambda x, n: x.unsqueeze(n % (x.dim() + 1)),
    "dropped": lambda x, n: x.squeeze(),
    "detached": lambda x, n: x.detach(),
    "copy": lambda x, n: x.contiguous(),
    "clone": lambda x, n: x.clone(),
    "row": lambda x, n: torch.stack([x, x]).transpose(0, 1).contiguous().select(n % (x.dim() + 1), -1),
    "stack": lambda x, n: torch.stack([x.select(0, i).contiguous() for i in range(x.shape[0])], n % x.dim()),
    "stack plus": lambda x, n: torch.stack([row.clone() for row in x.unbind()], n % x.dim()) + (0, -0.0, 1)[n % 3],
    "cat": lambda x, n: torch.cat([row.transpose(0, -1).clone() for row in x.unbind()], n % (x.dim() - 1)),
    "chunk": lambda x, n: x.chunk(2, n % x.dim())[-1],
    "tail": lambda x, n: x[n:],
    "plus 0": lambda x, n: x + (0 if n % 2 else -0.0),
    "double": lambda x, n: x * 2,
    "add_": lambda x, n: x.add_(1),
    "row_": lambda x, n: x[0].mul_(-1),
}  # fmt: skip
PROGRAMS = st.lists(
    st.tuples(st.sampled_from(list(STEPS)), st.integers(0, 5), st.integers(0, 3)), min_size=2, max_size=9
)


def run(program, x: Tensor) -> list[Tensor]:
    """Run steps, each on the last tensor or an earlier one; return some, a view, and what reads them again."""
    kept = [x * 1.5]
    for name, n, back in program:
        kept.append(STEPS[name](kept[-1 - back % min(len(kept), 2)], n))
    middle = kept[len(kept) // 2]
    return [kept[-1], middle[..., :1], middle + 1, kept[-2] * 1]


def bits(tensors: list[Tensor]) -> Any:
    """Return shapes, strides of more than one element, and the bits of numbers, which tell zeros apart."""
    strides = [[step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1] for x in tensors]
    return [x.shape for x in tensors], strides, [x.contiguous().view(torch.int32).tolist() for x in tensors]


@examples(2)
@given(PROGRAMS, st.sampled_from([(2, 3, 4), (4, 6), (2, 3, 2, 2), (24,), (1, 12, 2)]))
def test_replays_of_chains_equal_the_function(program, shape):
    """Views, copies, stacks and writes in any order give the bits and strides of the function."""
    x = torch.arange(24.0).sub(8).reshape(shape)
    x = torch.where(x == 0, -0.0, x)
    step = tdf.jit(lambda x: run(program, x))
    try:
        expected = bits(run(program, x))
    # torch refuses a step on a tensor of this shape.
    except (RuntimeError, IndexError, ValueError, ZeroDivisionError):
        return
    # Empty tensors have other strides while they are recorded.
    assume(all(map(math.prod, expected[0])))
    step(x + 1)

    assert bits(step(x)) == expected


def turn(x):
    """Return a copy with two dimensions exchanged."""
    return x.transpose(0, 1).contiguous()


def split_heads(x):
    """Return three tensors that are selected from a copy, and copied again with heads before places."""
    parts = x.reshape(6, 5, 3, 8).permute(2, 0, 1, 3).contiguous()
    return [part.reshape(6, 5, 2, 4).transpose(1, 2).contiguous() for part in parts.unbind()]


def chunk_heads(x):
    """Return three tensors that are cut from a copy, and copied again."""
    parts = (x * 2).reshape(6, 5, 24).transpose(0, 1).contiguous().chunk(3, -1)
    return [part.reshape(5, 6, 2, 4).transpose(1, 2).contiguous() for part in parts]


def count_copies(fn, *args):
    """Return the number of operations that copy."""
    code = tdf.jit(fn).graph(*args).code
    return code.count("aten.clone") + code.count("aten.stack")


# Functions of a tensor of shape (30, 24), and the number of operations that copy.
CHAINS = {
    "parts of a copy": (split_heads, 3),
    "slices of a copy": (chunk_heads, 3),
    "there and back": (lambda x: turn(turn((x * 2).reshape(10, 9, 8))) * 2, 0),
    "stacked and turned": (lambda x: turn(torch.stack(split_heads(x), 2)) * 2, 1),
    "joined and turned": (lambda x: turn(torch.cat(split_heads(x), 1)) * 2, 1),
    "stacked, with a number, turned": (lambda x: turn(torch.stack(split_heads(x), 2) + 0.5) * 2, 1),
    "a stack that is read, and turned": (lambda x: (turn(y := torch.stack(split_heads(x), 2)), y.sum()), 2),
    "joined": (lambda x: torch.cat(split_heads(x), -1) * 2, 1),
    "a part, as the whole would be alive": (lambda x: turn(turn((x * 2).reshape(10, 9, 2, 4)[:, :, 0])) * 2, 2),
    "parts of unequal lengths": (lambda x: [turn(y) for y in turn((x * 2).reshape(10, 9, 8)).split([4, 5])], 3),
    "a part from the middle": (lambda x: turn(turn((x * 2).reshape(12, 5, 12))[:, 3:7]), 2),
    "a part of a row": (lambda x: turn(turn((x * 2).reshape(12, 5, 12))[..., 3:6]), 1),
    "a copy that is returned": (lambda x: (y := turn((x * 2).reshape(10, 9, 8)), turn(y)), 2),
    "a copy that is read": (lambda x: ((y := turn((x * 2).reshape(10, 9, 8))).sum(), turn(y)), 2),
    "a copy without rows": (lambda x: turn((x * 2).t().contiguous().reshape(8, 3, 30)), 2),
}


@pytest.mark.parametrize(("fn", "count"), CHAINS.values(), ids=CHAINS)
def test_copies_that_only_copies_read_are_joined(fn, count):
    """A replay copies an element once; a copy stays where something else reads it, or where it lets go of memory."""
    assert count_copies(fn, torch.randn(30, 24)) == count


@pytest.mark.parametrize(("fn", "count"), CHAINS.values(), ids=CHAINS)
def test_joined_copies_have_the_bits_of_the_function(fn, count):
    """Each of these chains replays to the values of the function."""
    x = torch.randn(30, 24)
    step = tdf.jit(fn)
    step(x + 1)

    assert bits(tree_leaves(step(x))) == bits(tree_leaves(fn(x)))


def copy_written(x):
    """Write to the source of a copy before it is copied again."""
    source = x * 2
    before = turn(source.reshape(4, 3, 2))
    source.add_(1)
    return source, turn(before)


def stack_written(x):
    """Write to a part of a stack before the stack is copied."""
    parts = [x * 2, x * 3]
    before = torch.stack(parts, 1)
    parts[0].add_(1)
    return parts, turn(before)


def view_written(x):
    """Write to a copy through a view of it."""
    before = turn((x * 2).reshape(4, 3, 2))
    before[0].add_(1)
    return turn(before)


def source_moved(x):
    """Transpose a part of a stack in place before the stack is copied."""
    part = x * 2
    before = torch.stack([part, part * 3])
    part.t_()
    return turn(before)


def view_returned(x):
    """Return a view of a joined copy, which is read again."""
    copy = turn(turn((x * 2).reshape(4, 3, 2)[1:]))
    return copy[0], copy + 1


def view_of_stack_returned(x):
    """Return a view of a stack that was turned, which is read again."""
    copy = turn(torch.stack([x * 2, x * 3]))
    return copy[0], copy + 1


def view_of_stack_written(x):
    """Write to a view of a stack that was turned and copied."""
    copy = turn(torch.stack([x * 2, x * 3]))
    same = copy * 1
    copy[0].add_(5)
    return same + copy


def turned_twice(x):
    """Copy a copy of a stack."""
    return turn(torch.stack([x * 2, x * 3])).transpose(1, 2).contiguous()


def channels_last(x):
    """Stack tensors of a layout that torch keeps."""
    y = (x * 2).view(2, 3, 2, 2).permute(0, 3, 1, 2)
    turned = torch.stack([y, y * 3], 4).transpose(3, 4).contiguous()
    return turned, turned.view(2, 2, -1) * 1


def one_part(x):
    """Cut a stack into one part."""
    return turn(torch.stack([x * 2, x * 3], 1).split(2, 1)[0])


@pytest.mark.parametrize(
    "fn",
    [
        copy_written, stack_written, view_written, source_moved, view_returned, view_of_stack_returned,
        view_of_stack_written, turned_twice, channels_last, one_part,
    ],
)  # fmt: skip
def test_copies_that_something_else_shares(fn):
    """A joined copy has the values from before a write to its source, and is the memory of its views."""
    x = torch.randn(4, 6)
    step = tdf.jit(fn)
    step(x + 1)

    assert bits(tree_leaves(step(x))) == bits(tree_leaves(fn(x)))


def test_roots_are_not_all_kept_for_a_stack():
    """Of parts of several tensors, a replay keeps the parts, and not the tensors until the stack."""

    def fn(x):
        return torch.stack([turn(torch.sin(x * i)[i].view(4, 3)) for i in range(5)])

    code = tdf.jit(fn).graph(torch.randn(5, 12)).code
    assert code.count("aten.clone") == 5


@pytest.mark.parametrize("batch_first", [True, False])
def test_gradients_of_stacked_attention_copy_each_element_once(batch_first):
    """The step of packed attention has eight copies, of queries, keys, values, their gradients and the two results."""
    module = nn.MultiheadAttention(8, 2, batch_first=batch_first)
    apply, _, _ = tdf.functional(module)
    params = tdf.init_ensemble(lambda: nn.MultiheadAttention(8, 2, batch_first=batch_first), 3)
    x = torch.randn(5, 4, 8)

    def loss(p, x):
        return apply(p, x, x, x, need_weights=False)[0].sin().sum()

    def step(params, x):
        return torch.vmap(torch.func.grad(loss), (0, None))(params, x)

    tdf_step = tdf.jit(step)
    got = tdf_step(params, x)
    expected = step(params, x)

    assert all([torch.equal(got[key], expected[key]) for key in expected.keys(True, True)])
    assert count_copies(step, params, x) <= 8
