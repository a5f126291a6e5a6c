"""Joining copies: a copy of a copy, with views between them, is one copy of the elements that the first one reads.

Attention transposes, copies, merges dimensions, transposes again and copies again. `Layout` follows the elements
through these steps, whatever memory each tensor has, so that the last copy can read the first tensor.
"""

import operator
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx

from tdfunc._jit.memory import Memory

aten = torch.ops.aten

_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_TRANSPOSES = (aten.transpose.int, aten.t.default)
_SQUEEZES = (aten.squeeze.dim, aten.squeeze.dims)
_SAME = (aten.detach.default, aten.alias.default)
_LOOKS = {
    *_RESHAPES, *_TRANSPOSES, *_SQUEEZES, *_SAME, aten.permute.default, aten.unsqueeze.default, aten.select.int,
    aten.slice.Tensor,
}  # fmt: skip
# They return lists of views.
_SPLITS = (aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default)
# These write new memory, whatever the layout of their operands is.
_COPY = aten.clone.default
_STACKS = (aten.stack.default, aten.cat.default)


class Digit(NamedTuple):
    """A digit of an element's place in a tensor: the number of its values, and the places between two of them."""

    size: int
    stride: int


class Layout(NamedTuple):
    """The elements of a tensor as elements of a root: each dimension is written in digits of the place in the root."""

    dims: list[list[Digit]]
    # Digits that have one value, by a selection.
    fixed: dict[Digit, int]

    def digits(self) -> list[Digit]:
        """Return the digits in the order of the dimensions."""
        return [digit for dim in self.dims for digit in dim]

    def sizes(self) -> list[list[int]]:
        """Return the sizes of the digits of each dimension."""
        return [[digit.size for digit in dim] for dim in self.dims]

    def with_dim(self, place: int, *dims: list[Digit]) -> "Layout":
        """Return the layout with other dimensions in place of one."""
        return Layout([*self.dims[:place], *dims, *self.dims[place + 1 :]], self.fixed)


def lay_out(shape: Sequence[int]) -> Layout:
    """Return the layout of a root itself."""
    dims: list[list[Digit]] = []
    for i, size in enumerate(shape):
        dims.append([Digit(size, prod(shape[i + 1 :]))] if size != 1 else [])
    return Layout(dims, {})


def follow(layout: Layout, node: fx.Node) -> Layout | None:
    """Return the layout of a view or a copy of a tensor; None where it cuts a digit of the root."""
    # Any: arguments of a node.
    args: Any = node.args
    target = node.target
    dims = layout.dims
    if target is operator.getitem:
        return _follow_item(layout, node)
    if target in _RESHAPES:
        regrouped = _regroup(layout.digits(), node.meta["val"].shape)
        return None if regrouped is None else Layout(regrouped, layout.fixed)
    if target is aten.permute.default:
        return Layout([dims[dim] for dim in args[1]], layout.fixed)
    if target in _TRANSPOSES:
        return _swap(layout, *args[1:])
    if target is aten.unsqueeze.default:
        place = args[1] % (len(dims) + 1)
        return Layout([*dims[:place], [], *dims[place:]], layout.fixed)
    if target in _SQUEEZES:
        dropped = {dim % max(len(dims), 1) for dim in _as_list(args[1])}
        return Layout([dim for i, dim in enumerate(dims) if dim or i not in dropped], layout.fixed)
    if target is aten.select.int:
        return _fix(layout, *args[1:])
    if target is aten.slice.Tensor:
        return _follow_slice(layout, node)
    # A copy, or another tensor of the same elements.
    return layout


def _follow_slice(layout: Layout, node: fx.Node) -> Layout | None:
    """Return the layout of a range of a dimension."""
    # Any: arguments of a node, and those that are left out.
    given: Any = [*node.args[1:], *(0, 0, None, 1)[len(node.args) - 1 :]]
    place, start, _, step = given
    if step != 1:
        return None
    return _cut(layout, place, start or 0, node.meta["val"].shape[place])


def _follow_item(layout: Layout, item: fx.Node) -> Layout | None:
    """Return the layout of an item of a list of views."""
    # Any: a node, a number, and the arguments of the node.
    given: Any = item.args
    split, index = given
    args: Any = split.args
    if split.target is aten.unbind.int:
        return _fix(layout, args[1] if len(args) > 1 else 0, index)
    place = args[2] if len(args) > 2 else 0
    start = sum([part.shape[place] for part in split.meta["val"][:index]])
    return _cut(layout, place, start, item.meta["val"].shape[place])


def _as_list(dims: int | Sequence[int]) -> Sequence[int]:
    return [dims] if isinstance(dims, int) else dims


def _swap(layout: Layout, first: int = 0, second: int = -1) -> Layout:
    order = list(layout.dims)
    if len(order) > 1:
        order[first], order[second] = order[second], order[first]
    return Layout(order, layout.fixed)


def _fix(layout: Layout, place: int, index: int) -> Layout:
    """Return the layout of an index of a dimension."""
    place %= len(layout.dims)
    dim = layout.dims[place]
    index %= prod([digit.size for digit in dim])
    fixed = dict(layout.fixed)
    for digit in reversed(dim):
        fixed[digit] = index % digit.size
        index //= digit.size
    return Layout(layout.with_dim(place).dims, fixed)


def _cut(layout: Layout, place: int, start: int, length: int) -> Layout | None:
    """Return the layout of one of the parts of equal length of a dimension; None for other ranges."""
    place %= len(layout.dims)
    size = prod([digit.size for digit in layout.dims[place]])
    start = max(start + size, 0) if start < 0 else start
    if not length or size % length or start % length:
        return None
    parts = _regroup(layout.dims[place], (size // length, length))
    return None if parts is None else _fix(layout.with_dim(place, *parts), place, start // length)


def _regroup(digits: list[Digit], shape: Sequence[int]) -> list[list[Digit]] | None:
    """Return digits as the dimensions of a shape of as many elements; a digit is cut in two where a dimension ends."""
    rest = digits[::-1]
    dims: list[list[Digit]] = []
    for size in shape:
        dim: list[Digit] = []
        while size > 1:
            digit = rest.pop()
            if digit.size > size:
                inner = digit.size // size
                if digit.size % size:
                    return None
                rest.append(Digit(inner, digit.stride))
                digit = Digit(size, digit.stride * inner)
            if size % digit.size:
                return None
            dim.append(digit)
            size //= digit.size
        dims.append(dim)
    return dims


def join_copies(graph: fx.Graph, memory: Memory, moved: set[Any]) -> bool:
    """Have the last of a chain of copies read the first tensor, and drop the copies between.

    `moved` has the nodes whose tensors get another shape or memory in place. Return whether there was a chain.
    """
    joiner = _Joiner(graph, memory, moved)
    # A stack that comes of one round may be the one that the next round moves.
    while any([node.target is _COPY and joiner.stack_in_place(node) for node in list(graph.nodes)]):
        memory.read(graph)
    # From the end, so that a chain is found whole.
    for node in reversed(list(graph.nodes)):
        if not node.users:
            joiner.drop(node)
        elif node.target is _COPY:
            joiner.join_copy(node)
        elif node.target in _STACKS:
            joiner.join_stack(node)
    memory.read(graph)
    return joiner.joined


class _CopiedStack(NamedTuple):
    """A stack, the views between it and a copy, and the numbers that are added in between, in their order."""

    stack: fx.Node
    looks: list[fx.Node]
    # Any: numbers.
    added: list[Any]


class _Joiner:
    def __init__(self, graph: fx.Graph, memory: Memory, moved: set[Any]) -> None:
        self._graph = graph
        self._memory = memory
        self._moved = moved
        self.joined = False

    def drop(self, node: fx.Node) -> None:
        """Erase a node of a chain that nothing uses."""
        if node.target is _COPY or node.target in (*_STACKS, *_SPLITS) or _is_look(node) or _adds_number(node):
            self._graph.erase_node(node)

    def join_copy(self, copy: fx.Node) -> None:
        """Have a copy of copies read what the first of them reads."""
        if not self._can_replace(copy):
            return
        found = self._find_root(_operand(copy), copy)
        if found is None:
            return
        with self._graph.inserting_before(copy):
            self._replace(copy, self._emit(_COPY, self._spread(*found), memory_format=torch.contiguous_format))

    def join_stack(self, stack: fx.Node) -> None:
        """Have a stack of copies read what the first of them read."""
        if not self._can_replace(stack):
            return
        # Any: nodes.
        operands: Any = stack.args[0]
        # All parts of one root together may have its memory; of several roots, each part for itself.
        roots = self._find_roots(operands, stack, len(operands))
        if len({node for node, _ in roots}) != 1:
            roots = self._find_roots(operands, stack, 1)
        if not roots:
            return
        sizes = roots[0][1].sizes()
        if any([layout.sizes() != sizes for _, layout in roots]):
            return
        place = sum(map(len, sizes[: _dim_of(stack)]))
        with self._graph.inserting_before(stack):
            self._replace(stack, self._emit(aten.stack.default, [self._spread(*each) for each in roots], place))

    def stack_in_place(self, copy: fx.Node) -> bool:
        """Stack along the dimension where a copy of the stack has it, and return whether there was such a copy.

        A number may be added in between.
        """
        found = self._find_stack(copy)
        if found is None:
            return False
        layout, along = _lay_out_stack(found.stack)
        turned = _follow_all(layout, found.looks)
        if turned is None or turned.fixed or along not in turned.digits():
            return False
        others = [digit for digit in turned.digits() if digit != along]
        part = Layout([[_leave_out(along, digit)] for digit in others], {})
        # Any: nodes.
        operands: Any = found.stack.args[0]
        with self._graph.inserting_before(copy):
            parts = [self._spread(operand, part) for operand in operands]
            new = self._emit(aten.stack.default, parts, turned.digits().index(along))
            for number in found.added:
                new = self._emit(aten.add.Tensor, new, number)
            return self._replace(copy, new)

    def _find_stack(self, copy: fx.Node) -> "_CopiedStack | None":
        """Return the stack that a copy reads through views that nothing else uses; None if it may not be made later."""
        looks: list[fx.Node] = []
        added: list[Any] = []
        node = _operand(copy)
        while len(node.users) == 1 and (node.target in _LOOKS or _adds_number(node)):
            if node.target in _LOOKS:
                looks.insert(0, node)
            else:
                added.insert(0, node.args[1])
            node = _operand(node)
        if node.target not in _STACKS or len(node.users) > 1 or not looks:
            return None
        if not self._can_replace(copy) or not self._can_replace(node) or not self._memory.knows(node):
            return None
        # Any: nodes.
        operands: Any = node.args[0]
        if not all([self._is_unchanged(operand, node, copy) for operand in operands]):
            return None
        return _CopiedStack(node, looks, added)

    def _can_replace(self, node: fx.Node) -> bool:
        """Return whether another tensor of the same elements and strides may be in place of a copy or a stack."""
        value = node.meta["val"]
        if node in self._moved or not value.is_contiguous() or not value.numel():
            return False
        # Any: nodes.
        operands: Any = node.args[0]
        # torch promotes types, and takes parts of any length.
        return node.target is _COPY or len({(str(x.meta["val"].dtype), x.meta["val"].shape) for x in operands}) == 1

    def _find_roots(self, operands: list[fx.Node], stack: fx.Node, count: int) -> list[tuple[fx.Node, Layout]]:
        """Return the roots of all operands of a stack, with their layouts; none if an operand is not a copy."""
        roots: list[tuple[fx.Node, Layout]] = []
        for operand in operands:
            found = self._find_root(operand, stack, count)
            if found is None:
                return []
            roots.append(found)
        return roots

    def _find_root(self, node: fx.Node, sink: fx.Node, count: int = 1) -> tuple[fx.Node, Layout] | None:
        """Return the first tensor of a chain of copies and views, and the layout of its end; None without a copy.

        `count` chains like this one end at the sink.
        """
        chain = [node]
        while _is_look(chain[-1]) or self._can_skip(chain[-1]):
            chain.append(_operand(chain[-1]))
        while len(chain) > 1:
            root = chain.pop()
            copies = [each for each in chain if each.target is _COPY]
            if not copies:
                return None
            if self._is_unchanged(root, copies[-1], sink) and _may_live_on(root, copies, count):
                layout = _follow_all(lay_out(root.meta["val"].shape), chain[::-1])
                if layout is not None and _keeps_rows(root, layout):
                    return root, layout
        return None

    def _can_skip(self, copy: fx.Node) -> bool:
        """Return whether nothing reads a copy but further copies, so that it is dropped when these are joined."""
        if copy.target is not _COPY or copy in self._moved:
            return False
        pending = list(copy.users)
        while pending:
            user = pending.pop()
            if _is_look(user) or user.target in _SPLITS:
                pending += user.users
            elif user.target is not _COPY and user.target not in _STACKS:
                return False
        return True

    def _is_unchanged(self, root: fx.Node, first: fx.Node, sink: fx.Node) -> bool:
        """Return whether nothing writes to a root between the first copy of it and the last."""
        return root not in self._moved and self._memory.version(root, first) == self._memory.version(root, sink)

    def _spread(self, root: fx.Node, layout: Layout) -> fx.Node:
        """Return a view of a root with a dimension for each digit of a layout."""
        order = sorted([*layout.digits(), *layout.fixed], key=lambda digit: -digit.stride)
        node = self._reshape(root, [digit.size for digit in order])
        for place in reversed(range(len(order))):
            if order[place] in layout.fixed:
                node = self._emit(aten.select.int, node, place, layout.fixed[order[place]])
        free = [digit for digit in order if digit not in layout.fixed]
        permutation = [free.index(digit) for digit in layout.digits()]
        if permutation == sorted(permutation):
            return node
        return self._emit(aten.permute.default, node, permutation)

    def _reshape(self, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        if list(node.meta["val"].shape) == list(shape):
            return node
        return self._emit(aten.view.default, node, list(shape))

    # Any: an operation and its arguments.
    def _emit(self, operation: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a node, with its fake value."""
        node = self._graph.call_function(operation, args, kwargs)
        values: Any = fx.map_arg(args, lambda operand: operand.meta["val"])
        with torch.no_grad():
            node.meta["val"] = operation(*values, **kwargs)
        return node

    def _replace(self, old: fx.Node, new: fx.Node) -> bool:
        """Have a tensor, in the shape of another one, in place of that one; return whether it has the same strides."""
        # torch stacks tensors with channels last in this layout.
        if not new.meta["val"].is_contiguous():
            return False
        self.joined = True
        new = self._reshape(new, old.meta["val"].shape)
        # Views of the old tensor are views of the new one.
        self._memory.merge(old, new)
        old.replace_all_uses_with(new)
        self._graph.erase_node(old)
        return True


def _is_look(node: fx.Node) -> bool:
    """Return whether a node is a view of the elements of another one, or of some of them."""
    if node.target is operator.getitem:
        # Any: the list.
        items: Any = node.args[0]
        return items.target in _SPLITS
    return node.target in _LOOKS


# Any: a node.
def _operand(node: fx.Node) -> Any:
    """Return the tensor that a view, an item of a list of views, or a copy has its elements from."""
    operand: Any = node.args[0]
    return operand.args[0] if node.target is operator.getitem else operand


def _adds_number(node: fx.Node) -> bool:
    """Return whether a node adds a number to each element."""
    if node.target is not aten.add.Tensor or len(node.args) != 2 or isinstance(node.args[1], fx.Node) or node.kwargs:
        return False
    return node.meta["val"].dtype == _operand(node).meta["val"].dtype


def _may_live_on(root: fx.Node, copies: list[fx.Node], count: int) -> bool:
    """Return whether the memory of a root may be alive for longer, in place of copies, of which there are `count`."""
    if root.op == "placeholder":
        return True
    size_bytes = root.meta["val"].untyped_storage().nbytes()
    return all([copy.meta["val"].nbytes * count >= size_bytes for copy in copies])


def _keeps_rows(root: fx.Node, layout: Layout) -> bool:
    """Return whether neighbours in memory stay neighbours: without rows, one copy may take longer than two."""
    digits = layout.digits()
    value = root.meta["val"]
    strides = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1]
    return not digits or digits[-1].stride == strides[-1] == 1


def _follow_all(layout: Layout | None, chain: Sequence[fx.Node]) -> Layout | None:
    for node in chain:
        if layout is None:
            return None
        layout = follow(layout, node)
    return layout


def _dim_of(stack: fx.Node) -> int:
    """Return the dimension along which tensors are stacked, or joined."""
    # Any: arguments of a node.
    args: Any = stack.args[1:]
    dim = args[0] if args else 0
    return dim % stack.meta["val"].dim()


def _lay_out_stack(stack: fx.Node) -> tuple[Layout, Digit]:
    """Return the layout of a stack of equal parts, and the digit of its parts."""
    # Any: nodes.
    operands: Any = stack.args[0]
    shape = stack.meta["val"].shape
    dim = _dim_of(stack)
    layout = lay_out(shape)
    along = Digit(len(operands), prod(shape[dim:]) // len(operands))
    # Of tensors that are joined, the dimension has a digit within a part.
    within = lay_out([shape[dim] // len(operands), *shape[dim + 1 :]]).dims[0]
    return layout.with_dim(dim, [along, *within]), along


def _leave_out(left: Digit, digit: Digit) -> Digit:
    """Return a digit of a tensor as a digit of a tensor without another one of its digits."""
    if digit.stride > left.stride:
        return Digit(digit.size, digit.stride // left.size)
    return digit
