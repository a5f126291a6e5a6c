"""The comparison of a checkpoint with an expected spec: keys, shapes and dtypes, with every difference in one error."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, TreeStructureError, error
from tdfunc.core.keys import dotted, unravel
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.core.types import Kind, Path
from tdfunc.storage.disk.ranks import Ranks
from tdfunc.storage.tree.specs import Spec

_SHOWN = 200
# Shape and dtype (by name, as numpy and torch call it) of each leaf; None where any will do.
Found: TypeAlias = dict[Path, tuple[tuple[int, ...] | None, str | None]]


def check_like(tree: TensorCollection, like: Any, path: str) -> None:
    """Compare leaves with a tree or spec of anything that has a shape and a dtype.

    Of the paths that `like` ties, one is enough: other programs store a tied leaf under one of its names. They do not
    store buffers that are not persistent, so a tree without kinds may lack these: a state dict, or a copy of one.

    Raises:
        TreeStructureError: Keys differ; the message lists all differences.
        LeafMismatchError: Only shapes or dtypes differ; the message lists all of them.
    """
    expected = read_specs(like)
    found = read_specs(tree)
    held = _tied_to(like, found)
    if not any([node._kinds for _, node in _nodes(tree)]):
        held |= _computed_buffers(like)
    lacking = [at for at in expected if at not in found and at not in held]
    others = [at for at in found if at not in expected]
    dots = _dots_hint(lacking, others)
    # Where dots are the difference, the two names are the same.
    name = dotted if dots is None else repr
    kind, lines = list_differences(expected, found, lacking, others, name)
    if lines:
        count = "1 difference"
        if len(lines) > 1:
            count = f"{len(lines)} differences"
        raise kind(
            "\n    ".join([f"load {path}: the checkpoint is not like like=; {count}:", *lines]),
            hint=dots or "where= chooses leaves, dtype= casts floating ones; a spec without a dtype takes any.",
        )


def _tied_to(like: Any, found: Found) -> set[Path]:
    """Return all paths that an expected tree ties to a leaf that was found."""
    held: set[Path] = set()
    if isinstance(like, TensorCollection):
        for group in like._ties:
            if any([at in found for at in group]):
                held.update(group)
    return held


def _dots_hint(lacking: Sequence[Path], others: Sequence[Path]) -> str | None:
    """Return the hint for keys with dots on one side, as in a state dict, that are paths on the other."""
    names = {dotted(at): at for at in others}
    for at in lacking:
        other = names.get(dotted(at))
        if other is None:
            continue
        if len(at) < len(other):
            return "like= has keys with dots: give like=TensorDict(like).unflatten_keys('.')."
        return "the checkpoint has keys with dots: load(path, like=like.flatten_keys('.')).unflatten_keys('.')."
    return None


def _computed_buffers(like: Any) -> set[Path]:
    """Return the paths of the buffers that a module computes itself, which no state dict has."""
    return {(*at, key) for at, node in _nodes(like) for key, kind in node._kinds.items() if kind is Kind.NON_PERSISTENT}


def _nodes(like: Any) -> Iterator[tuple[Path, TensorCollection]]:
    """Yield every tree in a tree, or in a mapping of trees, with its path."""
    stack: list[tuple[Path, Any]] = [((), like)]
    while stack:
        at, node = stack.pop()
        items: Mapping[Any, Any] = {}
        if isinstance(node, TensorCollection):
            yield at, node
            items = node._data
        elif isinstance(node, Mapping):
            items = node
        stack.extend([((*at, *unravel(key)), child) for key, child in items.items()])


def list_differences(
    expected: Found, found: Found, lacking: Sequence[Path], others: Sequence[Path], name: Callable[[Path], str] = dotted
) -> tuple[type[TreeStructureError] | type[LeafMismatchError], list[str]]:
    """Return a line for each leaf that is missing, unexpected, or of another shape or dtype, and the class of error."""
    lines = [f"missing:    {name(at)} ({_shown(expected[at])})" for at in lacking]
    lines += [f"unexpected: {name(at)} ({_shown(found[at])})" for at in others]
    kind = TreeStructureError if lines else LeafMismatchError
    for at, (shape, dtype) in expected.items():
        if at not in found:
            continue
        own_shape, own_dtype = found[at]
        own_shape = own_shape or ()
        if shape is not None and not _fits(shape, own_shape):
            lines.append(f"shape:      {dotted(at)}: expected {list(shape)}, got {list(own_shape)}")
        if dtype is not None and dtype != own_dtype:
            lines.append(f"dtype:      {dotted(at)}: expected {dtype}, got {own_dtype}")
    return kind, lines


def _fits(shape: tuple[int, ...], own: tuple[int, ...]) -> bool:
    """Return whether a leaf has an expected shape, in which -1 is any length."""
    return len(shape) == len(own) and all([n in (-1, size) for n, size in zip(shape, own, strict=True)])


def check_ranks(ranks: Ranks, found: Found | None, text: str | None = None) -> NoReturn:
    """Raise the difference between the first two trees that differ, on every rank.

    Args:
        ranks: The ranks.
        found: The leaves of this rank's tree; None for a rank without a tree.
        text: The description of the tree, if all of it is compared.
    """

    def tell() -> bytes:
        if found is None:
            return b""
        return json.dumps([describe_found(found).decode(), text]).encode()

    def name(told: list[bytes]) -> bytes:
        trees = [(rank, *json.loads(raw)) for rank, raw in enumerate(told) if raw]
        first, first_found, first_text = trees[0]
        for rank, other_found, other_text in trees[1:]:
            who = f"rank {ranks.world_rank(first)} (expected) and rank {ranks.world_rank(rank)}"
            expected = parse_found(first_found.encode())
            got = parse_found(other_found.encode())
            if expected != got:
                raise mismatch(ranks.call, who, expected, got)
            if first_text != other_text:
                place, own, theirs = _first_difference(first_text, other_text)
                raise TreeStructureError(
                    f"{ranks.call}: the trees of the ranks differ in values, batch sizes, kinds or classes.",
                    expected=f"{place}: {own}, as on rank {ranks.world_rank(first)}",
                    got=f"{place}: {theirs} on rank {ranks.world_rank(rank)}",
                    hint="td.broadcast(0) gives all ranks one tree.",
                )
        raise TreeStructureError(f"{ranks.call}: the trees of the ranks do not have the same leaves.")

    ranks.agree(tell, name)
    raise AssertionError("the first rank has raised")


def _first_difference(first: str, other: str) -> tuple[str, str, str]:
    """Return where two descriptions with equal leaves differ first, and what is there in each."""
    nodes = json.loads(first)["nodes"]
    others = json.loads(other)["nodes"]
    for node, twin in zip(nodes, others, strict=False):
        for field in sorted(node.keys() | twin.keys()):
            if field != "items" and node.get(field) != twin.get(field):
                where = f"{field} of the tree with {', '.join(node['keys'])}"
                return where[:_SHOWN], _shown_value(node, field), _shown_value(twin, field)
        for key, item, own in zip(node["keys"], node["items"], twin["items"], strict=True):
            if item != own:
                return key, json.dumps(item)[:_SHOWN], json.dumps(own)[:_SHOWN]
    return "the tree", "one order of trees, specs and ties", "another"


def _shown_value(node: dict[str, Any], field: str) -> str:
    return json.dumps(node.get(field, "that of the tree around it"))[:_SHOWN]


def mismatch(call: str, who: str, expected: Found, got: Found) -> TreeStructureError | LeafMismatchError:
    """Return the error that lists the differences between the trees of two ranks."""
    lacking = [at for at in expected if at not in got]
    others = [at for at in got if at not in expected]
    kind, lines = list_differences(expected, got, lacking, others)
    return kind(
        "\n    ".join([f"{call}: {who} do not have the same leaves; {len(lines)} difference(s):", *lines]),
        hint="select(), set() and to() make trees alike; tdfunc.distributed.recv(src) takes any tree.",
    )


def describe_found(found: Found) -> bytes:
    """Return the shape and dtype of each leaf as bytes, for the other side of a mismatch."""
    return json.dumps([[path[0], shape, dtype] for path, (shape, dtype) in found.items()]).encode()


def parse_found(raw: bytes) -> Found:
    """Return the shapes and dtypes that `describe_found` described."""
    return {(name,): (tuple(shape), dtype) for name, shape, dtype in json.loads(raw)}


def found_in(names: Sequence[str], specs: Sequence[Spec]) -> Found:
    """Return the shape and dtype of each leaf by its name in a header."""
    shapes = [(tuple(spec.size), str(spec.dtype).removeprefix("torch.")) for spec in specs]
    return {(name[1:-1],): shape for name, shape in zip(names, shapes, strict=True)}


def read_specs(like: Any) -> Found:
    """Return the shape and dtype of every leaf that `like` describes.

    Raises:
        TypeError: An entry is neither a mapping nor has a shape and dtype.
    """
    found: Found = {}
    stack: list[tuple[Path, Any]] = [((), like)]
    while stack:
        at, node = stack.pop()
        if isinstance(node, TensorCollection):
            # Not by its keys: a lazy stack has only those that its trees share.
            stack.extend(((*at, key), child) for key, child in reversed(node._data.items()))
        elif hasattr(node, "items"):
            items: list[tuple[Any, Any]] = list(node.items())
            stack.extend(((*at, *unravel(key)), child) for key, child in reversed(items))
        elif not isinstance(node, NonTensorBase) and not getattr(node, "_is_non_tensor", False) and at:
            found[at] = _spec_of(node, at)
        elif not at:
            raise _no_spec(at, node)
    return found


def _spec_of(leaf: Any, at: Path) -> tuple[tuple[int, ...] | None, str | None]:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise _no_spec(at, leaf)
    shape = None
    if leaf.shape is not None:
        shape = tuple(leaf.shape)
    dtype = None
    if leaf.dtype is not None:
        # A class (numpy.float32) goes by its own name.
        name = getattr(leaf.dtype, "__name__", None) or str(leaf.dtype)
        dtype = name.removeprefix("torch.")
    return shape, dtype


def _no_spec(at: Path, node: Any) -> TypeError:
    where = ""
    if at:
        where = f" at {dotted(at)!r}"
    return error(
        TypeError,
        f"load: like= has no shape and dtype{where}.",
        expected="a tree (tdfunc.from_module(module)), a mapping, or anything with .shape and .dtype",
        got=f"{type(node).__name__}",
    )


def _shown(spec: tuple[tuple[int, ...] | None, str | None]) -> str:
    shape, dtype = spec
    size = "of any shape"
    if shape is not None:
        size = str(list(shape))
    return f"{dtype or 'any dtype'} {size}"
