"""The Python code of a recorded graph: straight-line calls of torch's bindings, in place where memory is free.

The code computes the same to the last bit as the graph does. Overhead for each call is what it saves: bindings read
arguments faster than overloads of `torch.ops`, numbers are tensors already, and an operation whose operand nothing
uses any more writes into that operand.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from tdfunc._jit.graph import list_moved
from tdfunc._jit.memory import Memory, tensors_of
from tdfunc._jit.replay.kernels import EXACT_DTYPES, find_kernel
from tdfunc._jit.replay.out import find_out
from tdfunc._jit.replay.pool import Pool
from tdfunc._jit.replay.probed import find_probed_pieces
from tdfunc._jit.replay.products import turn_products
from tdfunc._jit.replay.rows import find_row_pieces
from tdfunc._jit.replay.steps import split_steps
from tdfunc.core.memory import storage_id

aten = torch.ops.aten
_PACKETS = """
    add.Tensor sub.Tensor mul.Tensor div.Tensor add.Scalar sub.Scalar mul.Scalar div.Scalar neg.default abs.default
    mm.default bmm.default addmm.default baddbmm.default t.default transpose.int permute.default unsqueeze.default
    squeeze.dim select.int cat.default stack.default index_select.default gather.default where.self full.default
    clone.default sum.default sum.dim_IntList mean.default mean.dim amax.default exp.default log.default sqrt.default
    rsqrt.default square.default reciprocal.default sign.default pow.Tensor_Scalar tanh.default sigmoid.default
    relu.default maximum.default minimum.default eq.Tensor eq.Scalar gt.Scalar ge.Scalar lt.Scalar le.Scalar
    lerp.Scalar addcmul.default addcdiv.default native_layer_norm.default arange.default arange.start
    bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor bitwise_xor.Scalar
    empty.memory_format
"""
# torch's own bindings of these take the same arguments and are called faster than an OpOverload.
BINDINGS: dict[Any, str] = {}
for _spelling in _PACKETS.split():
    _name, _overload = _spelling.split(".")
    if hasattr(torch, _name):
        BINDINGS[getattr(getattr(aten, _name), _overload)] = _name
# Methods that take sizes or dimensions one by one.
_SPREAD: dict[Any, str] = {aten.view.default: "view", aten._unsafe_view.default: "view", aten.expand.default: "expand"}
# With a method of this name and a "_" that overwrites the first operand.
_UNARY = ("neg", "abs", "exp", "log", "sqrt", "rsqrt", "square", "reciprocal", "tanh", "sigmoid", "relu")
_IN_PLACE: dict[Any, str] = {
    **{getattr(aten, name).default: f"{name}_" for name in _UNARY},
    **{getattr(aten, name).Tensor: f"{name}_" for name in ("add", "sub", "mul", "div")},
}
_COMMUTE = (aten.add.Tensor, aten.mul.Tensor)
_BINARY = ("add", "sub", "mul", "div", "bitwise_and", "bitwise_or", "bitwise_xor")
_KINDS = ("Tensor", "Scalar")
# Methods of torch's bindings that write in place, as the function did, or are operators.
METHODS: dict[Any, str] = {
    **{getattr(getattr(aten, f"{name}_"), kind): f"{name}_" for name in _BINARY for kind in _KINDS},
    aten.__rshift__.Scalar: "__rshift__",
}
# Of these, a second operand that is a number is a tensor already.
_ARITHMETIC = {
    getattr(getattr(aten, spelling), kind) for name in _BINARY for spelling in (name, f"{name}_") for kind in _KINDS
}
# Their results are new memory, all of it in use.
_MAKERS = {
    *_IN_PLACE, aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.where.self,
    aten.threshold_backward.default, aten.clone.default, aten.sum.dim_IntList, aten.mean.dim, aten.full.default,
    aten.mul.Scalar, aten.add.Scalar, aten.sub.Scalar, aten.div.Scalar, aten.convolution.default,
    aten._softmax.default, aten._log_softmax.default, aten._softmax_backward_data.default,
    aten.max_pool2d_with_indices_backward.default, aten.stack.default, aten.cat.default,
    aten.native_layer_norm.default, aten.native_layer_norm_backward.default, aten.convolution_backward.default,
    aten.native_batch_norm.default, aten.native_batch_norm_backward.default,
}  # fmt: skip
# Views of a part or of all of a tensor.
_LOOKS = {
    aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.permute.default, aten.transpose.int,
    aten.t.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.select.int, aten.slice.Tensor,
}  # fmt: skip
# Of at most so many elements, what needs no argument is made once.
_KEPT = 4096
_FILLS = (
    aten.full.default, aten.ones.default, aten.zeros.default, aten.scalar_tensor.default, aten.arange.default,
    aten.arange.start,
)  # fmt: skip
# Kinds of nodes that the code does not compute.
_GIVEN = ("placeholder", "get_attr")


def compile_graph(
    graph: fx.Graph, constants: nn.Module, memory: Memory, pool: Pool | None = None
) -> Callable[..., list[Any]]:
    """Return the function of the graph's placeholders that returns a list of its outputs, large ones from a pool.

    `constants` has the tensors that the graph reads besides them.
    """
    _join_views(graph)
    turn_products(graph)
    memory.read(graph)
    if pool is not None:
        split_steps(graph, memory, pool)
    writer = _Writer(graph, constants, memory, pool)
    lines: list[str] = []
    names: list[str] = []
    unpacked: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            names.append(node.name)
        elif node.op == "output":
            lines.append(f"return [{', '.join(map(writer.spell, node.args[0]))}]")
        elif node.op != "get_attr" and node not in writer.constants and node not in unpacked:
            items = _list_items(node)
            unpacked |= set(items)
            # With a comma also after the only item.
            target = "".join([f"{item.name}, " for item in items]) or f"{node.name} "
            lines.append(f"{target}= {writer.call(node)}")
            dead = [name for each in (node, *items) for name in writer.dead.get(each, ())]
            if items:
                dead.remove(node.name)
            if dead:
                lines.append(" = ".join([*dead, "None"]))
    source = "\n    ".join([f"def replay({', '.join(names)}):", *lines])
    if pool is not None:
        pool.expect(writer.taken)
    exec(compile(source, "<jit>", "exec"), writer.scope)
    return writer.scope["replay"]


def _list_items(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that take every item of a node's list, if they follow it in order: one line unpacks them."""
    value = node.meta.get("val")
    if not isinstance(value, (list, tuple)):
        return []
    items: list[fx.Node] = []
    following = node.next
    while following.target is operator.getitem and following.args == (node, len(items)):
        items.append(following)
        following = following.next
    # An item that is None has no node.
    if len(items) == len(node.users) == len(value):
        return items
    return []


def _join_views(graph: fx.Graph) -> None:
    """Make one view of a view of views that nothing else looks at."""
    moved = list_moved(graph)
    # From the end, so that a chain is found whole.
    for node in reversed(list(graph.nodes)):
        if node in moved or not node.users or node.target not in _LOOKS:
            continue
        # Any: the nodes of a chain.
        root: Any = node.args[0]
        length = 1
        while root.target in _LOOKS and len(root.users) == 1 and root not in moved:
            root = root.args[0]
            length += 1
        if length == 1 or root in moved or not _is_whole_view(node, root):
            continue
        view = node.meta["val"]
        with graph.inserting_before(node):
            new = graph.call_function(aten.view.default, (root, list(view.shape)))
        new.meta["val"] = view
        node.replace_all_uses_with(new)
        while node is not root:
            last = node
            node = node.args[0]
            graph.erase_node(last)


def _is_whole_view(node: fx.Node, root: fx.Node) -> bool:
    """Return whether a node has all elements of another in their order, whatever memory a replay's tensor has."""
    x = node.meta["val"]
    y = root.meta["val"]
    if x.numel() != y.numel() or not x.is_contiguous() or not y.is_contiguous():
        return False
    return storage_id(x) == storage_id(y)


def _copy_each(tensors: list[Tensor], new: list[Tensor]) -> list[Tensor]:
    """Return copies of tensors in the memory of new ones."""
    torch._foreach_copy_(new, tensors)  # pyright: ignore[reportPrivateImportUsage]
    return new


def _find_index(node: fx.Node) -> str | None:
    """Return how Python spells a view, which costs half of the call of its binding."""
    target = node.target
    # Any: arguments of a node.
    args: Any = node.args
    if target is aten.transpose.int:
        dims = node.meta["val"].dim()
        if dims < 2:
            return None
        swapped = {args[1] % dims, args[2] % dims}
        return ".mT" if swapped == {dims - 1, dims - 2} else None
    if target is aten.select.int and args[1] == 0:
        return f"[{args[2]}]"
    if target is aten.slice.Tensor and len(args) == 4 and args[1] == 0:
        return f"[{args[2]}:{args[3]}]"
    return None


def _operands_of(node: fx.Node) -> list[Tensor]:
    # A generator has no value.
    values = [operand.meta.get("val") for operand in node.all_input_nodes]
    return [value for value in values if isinstance(value, Tensor)]


def _find_last_users(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return the last node that uses each node; its own, if none does."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op not in _GIVEN:
            last |= dict.fromkeys([node, *node.all_input_nodes], node)
    return last


class _Writer:
    """Spells nodes, and binds what has no spelling to names of the code's scope."""

    def __init__(self, graph: fx.Graph, constants: nn.Module, memory: Memory, pool: Pool | None) -> None:
        self.scope: dict[str, Any] = {}
        self._given = constants
        self._memory = memory
        self._pool = pool
        # The bytes of each block that the code takes from the pool.
        self.taken: list[int] = []
        # The names of bound values, by their keys.
        self._bound: dict[Any, str] = {}
        # The names of tensors that need no argument and are made once.
        self.constants: dict[fx.Node, str] = {}
        for node in graph.nodes:
            if self._is_constant(node):
                self.constants[node] = self.bind(node.target(*node.args, **node.kwargs))
        # The first node that has a storage made it.
        self._makers: dict[int, fx.Node] = {}
        for node in graph.nodes:
            for storage in memory.of(node):
                self._makers.setdefault(storage, node)
        # The names that nothing uses after a node.
        self.dead: dict[fx.Node, list[str]] = {}
        for node, user in _find_last_users(graph).items():
            if user.op != "output" and node.op not in _GIVEN and node not in self.constants:
                self.dead.setdefault(user, []).append(node.name)

    def _is_constant(self, node: fx.Node) -> bool:
        return node.target in _FILLS and node.meta["val"].numel() <= _KEPT and self._memory.is_private(node)

    def bind(self, value: Any, key: Any = None) -> str:
        """Return the name of a value in the code's scope; values of one key, by default the object, have one name."""
        if key is None:
            key = ("id", id(value))
        if key not in self._bound:
            self._bound[key] = name = f"_{len(self._bound)}"
            self.scope[name] = value
        return self._bound[key]

    def spell(self, value: Any) -> str:
        """Return the code of an argument."""
        if isinstance(value, fx.Node):
            if value.op == "get_attr":
                return self.bind(operator.attrgetter(str(value.target))(self._given))
            return self.constants.get(value, value.name)
        if value is None or isinstance(value, (bool, str)) or type(value) is int:
            return repr(value)
        if isinstance(value, (list, tuple)) and any(isinstance(item, fx.Node) for item in value):
            return f"[{', '.join(map(self.spell, value))}]"
        # Kernels take no subclass of complex.
        if isinstance(value, complex):
            value = complex(value)
        return self.bind(value)

    def call(self, node: fx.Node) -> str:
        """Return the code that computes a node."""
        view = self._spell_view(node)
        if view is not None:
            return view
        target: Any = node.target
        args = [self.spell(arg) for arg in node.args]
        if target in _ARITHMETIC:
            number = self._number(node)
            if number is not None:
                args[1] = number
        overwritten = self._find_overwritten(node)
        if overwritten is not None:
            others = [arg for i, arg in enumerate(args) if i != overwritten]
            return f"{args[overwritten]}.{_IN_PLACE[target]}({', '.join(others)})"
        args += [f"{name}={self.spell(value)}" for name, value in node.kwargs.items()]
        pooled = self._spell_pooled(node, args)
        if pooled is not None:
            return pooled
        if target in METHODS:
            return f"{args[0]}.{METHODS[target]}({', '.join(args[1:])})"
        return f"{self._function_of(node)}({', '.join(args)})"

    def _spell_pooled(self, node: fx.Node, args: list[str]) -> str | None:
        """Return the code of a call whose large results are taken from the pool; None for other nodes."""
        made = tensors_of(node)
        if self._pool is None or not any(map(self._pool.takes, [*made, *_operands_of(node)])):
            return None
        pieces = find_row_pieces(node) or find_probed_pieces(node)
        if pieces is not None:
            outs = f"outs=[{', '.join(map(self._spell_new, made))}]"
            return f"{self.bind(pieces)}({', '.join([*args, outs])})"
        if not any(map(self._pool.takes, made)):
            return None
        if node.target is aten._foreach_clone.default:
            return f"{self.bind(_copy_each)}({args[0]}, [{', '.join(map(self._spell_new, made))}])"
        call = find_out(node.target)
        if call is None or len(made) != len(call.names):
            return None
        outs = [f"{name}={self._spell_new(value)}" for name, value in zip(call.names, made, strict=True)]
        return f"{self.bind(call.fn)}({', '.join([*args, *outs])})"

    def _spell_new(self, like: Tensor) -> str:
        """Return the code that makes a tensor of any values."""
        assert self._pool is not None
        layout = f"{tuple(like.shape)}, {like.stride()}, dtype={self.bind(like.dtype)}"
        if not self._pool.takes(like):
            return f"{self.bind(torch.empty_strided)}({layout}, device={self.bind(like.device)})"
        size_bytes = like.numel() * like.element_size()
        self.taken.append(size_bytes)
        return f"{self.bind(self._pool.take, 'take')}({layout}, size_bytes={size_bytes})"

    def _spell_view(self, node: fx.Node) -> str | None:
        """Return the code of an item or a view that is shorter than a call; None for other nodes."""
        target: Any = node.target
        if target is operator.getitem:
            return f"{self.spell(node.args[0])}[{self.spell(node.args[1])}]"
        if target in _SPREAD:
            sizes: Any = node.args[1]
            # Without sizes these are other methods.
            spread = ", ".join(map(repr, sizes)) or "()"
            method = _SPREAD[target]
            if method == "view" and not self._memory.is_written(node):
                # A few fake kernels (batch norm, hardswish's derivative) have other strides than the kernels, which may
                # have no view of this shape.
                method = "reshape"
            return f"{self.spell(node.args[0])}.{method}({spread})"
        index = _find_index(node)
        if index is None:
            return None
        return f"{self.spell(node.args[0])}{index}"

    def _function_of(self, node: fx.Node) -> str:
        """Bind the fastest function that computes a node."""
        target: Any = node.target
        kernel = find_kernel(node)
        if kernel is not None:
            return self.bind(kernel)
        if target in BINDINGS:
            return self.bind(getattr(torch, BINDINGS[target]))
        # Without the frame of OpOverload.__call__, or of a deferred call.
        return self.bind(getattr(target, "_op", getattr(target, "fn", target)))

    def _number(self, node: fx.Node) -> str | None:
        """Bind the number of `x + number` and its kind as a tensor, which torch would make at each call."""
        x = node.args[0]
        number = node.args[1]
        value = node.meta["val"]
        if not isinstance(x, fx.Node) or type(number) not in (int, float) or len(node.args) > 2 or node.kwargs:
            return None
        # Of narrower dtypes, kernels compute with the number as it is.
        if value.dtype not in EXACT_DTYPES or x.meta["val"].dtype != value.dtype or value.device.type != "cpu":
            return None
        made = torch.tensor(number, dtype=value.dtype, device="cpu")
        return self.bind(made, ("number", repr(number), value.dtype))

    def _find_overwritten(self, node: fx.Node) -> int | None:
        """Return the place of an operand that the result can overwrite."""
        if node.target not in _IN_PLACE or node.kwargs or len(node.args) > 2:
            return None
        operands = node.args[:1]
        if node.target in _COMMUTE:
            operands = node.args[:2]
        for i, operand in enumerate(operands):
            if isinstance(operand, fx.Node) and self._is_free(operand, node):
                return i
        return None

    def _is_free(self, operand: fx.Node, node: fx.Node) -> bool:
        """Return whether nothing uses the memory of an operand after a node, and the node's result fits in it."""
        own = self._memory.of(operand)
        memory = self._memory
        maker = self._makers[next(iter(own))]
        if maker.target not in _MAKERS or maker in self.constants or not memory.dies_at(operand, node):
            return False
        x = operand.meta["val"]
        y = node.meta["val"]
        if not isinstance(y, Tensor) or (x.shape, x.stride(), x.dtype) != (y.shape, y.stride(), y.dtype):
            return False
        if x.numel() not in [made.numel() for made in tensors_of(maker) if memory.find(made) in own]:
            return False
        return all(other is operand or own.isdisjoint(memory.of(other)) for other in node.all_input_nodes)
