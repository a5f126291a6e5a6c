"""The leaves that a `Lora` adapts: their layouts, ranks and scales, and their tree of adapters.

An adapter has the orientation of its weight: the change of a weight W of shape (*, M, N) is `scale * B @ A`, B of
shape (*, M, R) and A of shape (*, R, N), also where a layer multiplies by the transpose. A convolution's weight of
shape (M, N, *K) counts as a matrix (M, N * K), whose A keeps the shape (R, N, *K).
"""

import enum
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tdfunc._tensordict import TensorDict
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import (
    BatchSizeError,
    FilterError,
    LeafMismatchError,
    TreeStructureError,
    UnsupportedError,
    as_count,
    error,
)
from tdfunc.core.keys import Entry, Filter, FilterLike, assign, dotted
from tdfunc.core.types import Kind, Path
from tdfunc.lora.choice import Choice
from tdfunc.ops.base.reading import entries, get, iter_items
from tdfunc.ops.edits.edit import set_
from tdfunc.storage.scales import find_scaled, may_have_codes, refusal

FROZEN = ("A0", "B0")
# The trained rows of a table.
ROWS = "rows"
_EXPERTS = ("gate_up_proj", "up_proj", "down_proj")
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Layout(enum.Enum):
    """The use of a weight in its layer."""

    LINEAR = "linear"
    TRANSPOSED = "transposed"
    EMBEDDING = "embedding"
    CONV = "conv"
    EXPERTS = "experts"
    EXPERTS_TRANSPOSED = "experts_transposed"

    @property
    def has_output_last(self) -> bool:
        """Whether the outputs are the last dimension of the weight."""
        return self in (Layout.TRANSPOSED, Layout.EMBEDDING, Layout.EXPERTS_TRANSPOSED)

    @property
    def is_experts(self) -> bool:
        """Whether the weight has a matrix for each expert."""
        return self in (Layout.EXPERTS, Layout.EXPERTS_TRANSPOSED)


class Target(NamedTuple):
    """One weight and its adapter."""

    # All paths of a tied weight; the adapter has the first.
    paths: tuple[Path, ...]
    leaf: Tensor
    layout: Layout
    rank: int
    scale: float

    @property
    def path(self) -> Path:
        """The path of the adapter."""
        return self.paths[0]

    @property
    def outputs(self) -> int:
        """The number of outputs of the layer."""
        return self.leaf.shape[-1 if self.layout.has_output_last else 0]


def transposed_class() -> type[nn.Module] | None:
    """Return the class of GPT2's linear layers, whose weight is (inputs, outputs); None while nothing imported it."""
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


def base_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class of layers that can be adapted of which a module is an instance."""
    for cls in (nn.Linear, nn.Embedding, *_CONVS, transposed_class()):
        if cls is not None and isinstance(module, cls):
            return cls
    return None


def layout_in(module: nn.Module, path: Path) -> Layout:
    """Return the layout of a weight in its layer.

    Raises:
        UnsupportedError: Layers of this class cannot have adapters.
    """
    name = path[-1]
    base = base_class(module)
    attributes = module.__dict__
    # The decorator of transformers gives fused experts these attributes.
    if name in _EXPERTS and {"has_gate", "has_bias", "is_transposed"} <= attributes.keys():
        return Layout.EXPERTS_TRANSPOSED if attributes["is_transposed"] else Layout.EXPERTS
    if name != "weight" or base is None:
        cls = type(module)
        raise UnsupportedError(
            f"lora: the weight {dotted(path)!r} of a {cls.__name__} cannot have an adapter.",
            expected="the weight of a Linear, Conv1D, Conv1d, Conv2d, Conv3d or Embedding, or fused experts",
            got=f"{cls.__module__}.{cls.__qualname__}.{name}",
            hint="leave it out: `where & ~Filter(...)`; or train it whole: Lora(..., whole=...).",
        )
    if base is nn.Linear:
        return Layout.LINEAR
    if base is nn.Embedding:
        return Layout.EMBEDDING
    return Layout.CONV if base in _CONVS else Layout.TRANSPOSED


def _guessed_layout(path: Path, leaf: Tensor) -> Layout:
    if leaf.ndim == 3:
        raise LeafMismatchError(
            f"lora: the layer of {dotted(path)!r} is not clear from its shape.",
            expected="2 dimensions (a linear layer), or 4 or 5 (a convolution)",
            got=f"shape {tuple(leaf.shape)}: a Conv1d or fused experts",
            hint="lora.init(params, key=key, apply=apply) reads the layer.",
        )
    return Layout.LINEAR if leaf.ndim == 2 else Layout.CONV


def find_targets(
    lora: Choice, found: Sequence[Entry], layouts: Callable[[Path], Layout] | None
) -> tuple[list[Target], list[Entry]]:
    """Return the weights with adapters, and the leaves that are trained whole.

    Args:
        lora: The choice.
        found: The leaves of the base, of which buffers are left out.
        layouts: The layout of a weight by its path; without it the shape decides.

    Raises:
        FilterError: A pattern matches no leaf, or a leaf is chosen twice.
        LeafMismatchError: A chosen leaf is not a matrix.
        UnsupportedError: A chosen leaf has codes, such as FP8 weights beside a scale.
    """
    trainable = [entry for entry in found if entry.kind in (None, Kind.PARAMETER)]
    adapted = _chosen(trainable, lora.where)
    whole: list[Entry] = []
    if lora.whole is not None:
        whole = _chosen(trainable, lora.whole)
    _check_codes(found, [*adapted, *whole])
    if not adapted and not whole and not lora.trainable_token_indices:
        raise FilterError("lora: `where` chooses no leaf.", got=repr(lora.where))
    twice = {entry.paths[0] for entry in adapted} & {entry.paths[0] for entry in whole}
    if twice:
        raise FilterError(f"lora: `where` and `whole` both choose the leaf {dotted(min(twice))!r}.")
    ranks = _assigned(adapted, lora.rank, "rank")
    alphas = _assigned(adapted, lora.alpha, "alpha")
    targets = [
        _make_target(lora, entry, rank, alpha, layouts)
        for entry, rank, alpha in zip(adapted, ranks, alphas, strict=True)
    ]
    return targets, whole


class Table(NamedTuple):
    """A table of which some rows are trained."""

    # All paths of a tied table; the adapters have the first.
    paths: tuple[Path, ...]
    leaf: Tensor
    indices: tuple[int, ...]

    @property
    def path(self) -> Path:
        """The path of the table."""
        return self.paths[0]

    @property
    def key(self) -> Path:
        """The path of the rows in adapters."""
        return (*self.path, ROWS)

    @property
    def shape(self) -> torch.Size:
        """The shape of the rows."""
        return torch.Size((len(self.indices), *self.leaf.shape[1:]))

    def rows_in(self, table: Tensor) -> Tensor:
        """Return a copy of the rows in a table."""
        return table[torch.tensor(self.indices, device=table.device)]

    def with_rows(self, table: Tensor, rows: Tensor) -> Tensor:
        """Return a table in which rows replace the rows of these tokens."""
        where = torch.tensor(self.indices, device=table.device)
        return table.index_copy(0, where, rows.to(table.dtype))


def find_tables(lora: Choice, found: Sequence[Entry]) -> list[Table]:
    """Return the tables of which rows are trained.

    Args:
        lora: The choice.
        found: The leaves of the base.

    Raises:
        FilterError: A filter matches no leaf, or a table is also adapted or trained whole.
        LeafMismatchError: A chosen leaf is not a matrix.
        ValueError: An index is not the number of a row, or is given twice.
    """
    tables: dict[Path, Table] = {}
    trainable = [entry for entry in found if entry.kind in (None, Kind.PARAMETER)]
    for where, given in (lora.trainable_token_indices or {}).items():
        for entry in _chosen(trainable, where):
            path = entry.paths[0]
            if path in tables:
                raise FilterError(f"lora: two filters of `trainable_token_indices` choose {dotted(path)!r}.")
            tables[path] = _table_of(entry, given)
    if tables:
        others: set[Path] = set()
        for where in (lora.where, lora.whole):
            if where is not None:
                others |= {entry.paths[0] for entry in _matching(trainable, where)}
        twice = others & tables.keys()
        if twice:
            raise FilterError(
                f"lora: `trainable_token_indices` and another filter both choose the leaf {dotted(min(twice))!r}.",
                expected="rows of a table that has no adapter and is not trained whole",
                got="`where` or `whole` matches it",
            )
    return list(tables.values())


def _matching(found: Sequence[Entry], where: FilterLike) -> list[Entry]:
    """Return the leaves that a filter matches; none if it matches none."""
    try:
        return _chosen(found, where)
    except FilterError:
        return []


def _table_of(entry: Entry, given: Sequence[int]) -> Table:
    name = dotted(entry.paths[0])
    leaf = entry.leaf
    if not isinstance(leaf, Tensor) or leaf.ndim != 2 or not leaf.is_floating_point():
        raise LeafMismatchError(
            f"lora: the leaf {name!r} has no rows of tokens.",
            expected="a table of floating-point numbers with 2 dimensions",
            got=f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__,
        )
    indices = tuple(map(index, given))
    wrong = [one for one in indices if not 0 <= one < len(leaf)]
    if wrong or len(set(indices)) < len(indices) or not indices:
        raise error(
            ValueError,
            f"lora: `trainable_token_indices` of {name!r} are not different rows of the table.",
            expected=f"numbers from 0 to {len(leaf) - 1}, each once",
            got=wrong[:10] or list(indices[:10]),
            hint="model.resize_token_embeddings(size) makes rows for new tokens.",
        )
    return Table(entry.paths, leaf, indices)


# Any: the rank and alpha are as the user gave them.
def _make_target(lora: Choice, entry: Entry, rank: Any, alpha: Any, layouts: Callable[[Path], Layout] | None) -> Target:
    """Return a chosen leaf as a weight with an adapter.

    Raises:
        LeafMismatchError: The leaf is not a matrix.
        UnsupportedError: Its layer cannot have an adapter of this kind.
    """
    name = dotted(entry.paths[0])
    leaf = entry.leaf
    if not isinstance(leaf, Tensor) or leaf.ndim < 2 or not leaf.is_floating_point():
        if isinstance(leaf, Tensor):
            got = f"shape {tuple(leaf.shape)}, {leaf.dtype}"
        else:
            got = type(leaf).__name__
        raise LeafMismatchError(
            f"lora: the leaf {name!r} cannot have an adapter.",
            expected="a floating-point tensor of 2 or more dimensions",
            got=got,
            hint='choose the weights of layers, such as "*_proj.weight"; whole= trains other leaves.',
        )
    rank = as_count(f"lora: the rank of {name!r}", rank)
    layout = _layout_of(lora, entry, layouts)
    if lora.bias and (layout is Layout.EMBEDDING or layout.is_experts):
        raise UnsupportedError(f"lora: the {layout.value} {name!r} cannot have a bias.", got="bias=True")
    scale = 1.0
    if alpha is not None:
        scale = alpha / (math.sqrt(rank) if lora.rslora else rank)
    return Target(entry.paths, leaf, layout, rank, scale)


def _layout_of(lora: Choice, entry: Entry, layouts: Callable[[Path], Layout] | None) -> Layout:
    """Return the layout of a weight, of which all layers of a tied weight are a part.

    Raises:
        UnsupportedError: DoRA scales the outputs of the layers in different directions.
    """
    if layouts is not None:
        kinds = [layouts(path) for path in entry.paths]
    else:
        kinds = [_guessed_layout(entry.paths[0], entry.leaf)]
    if lora.dora and len(set(kinds)) > 1:
        raise UnsupportedError(
            f"lora: {dotted(entry.paths[0])!r} is tied to {dotted(entry.paths[1])!r}, and DoRA scales their outputs.",
            expected="one direction of scaling for all layers of a tied weight",
            got=", ".join([kind.value for kind in kinds]),
            hint="Lora(..., dora=False), or leave the tied weight out.",
        )
    # Of a tied weight the embedding counts, which is what PEFT's `ensure_weight_tying` starts from.
    if Layout.EMBEDDING in kinds:
        return Layout.EMBEDDING
    return kinds[0]


def _check_codes(found: Sequence[Entry], chosen: Sequence[Entry]) -> None:
    """Raise if a chosen leaf has codes and not numbers; a look at the dtypes is enough for an ordinary base."""
    dtypes = [entry.leaf.dtype for entry in chosen if isinstance(entry.leaf, Tensor)]
    if not may_have_codes(dtypes, ()):
        return
    specs: dict[str, tuple[torch.dtype, torch.Size]] = {}
    for entry in found:
        if isinstance(entry.leaf, Tensor):
            specs |= dict.fromkeys(map(dotted, entry.paths), (entry.leaf.dtype, entry.leaf.shape))
    names = {dotted(entry.paths[0]) for entry in chosen}
    for scaled in find_scaled(specs):
        if scaled.name in names:
            raise refusal("lora", scaled, specs)


def _chosen(found: Sequence[Entry], where: FilterLike) -> list[Entry]:
    mask = Filter(where).mask(found)
    return [entry for entry, is_chosen in zip(found, mask, strict=True) if is_chosen]


# Any: a value for all leaves, or a dict of values by filter.
def _assigned(chosen: Sequence[Entry], given: Any, name: str) -> list[Any]:
    if isinstance(given, dict):
        return assign(chosen, given, f"lora: {name}")
    return [given] * len(chosen)


def check_single(call: str, params: TensorCollection, targets: Sequence[Target]) -> None:
    """Raise if the weight of a convolution has a dimension of members, which would count as its outputs."""
    kernels = [dotted(target.path) for target in targets if target.layout is Layout.CONV]
    if params._batch_size and kernels:
        raise BatchSizeError(
            f"{call}: the base is stacked, and {kernels[0]!r} is the weight of a convolution.",
            expected="one model",
            got=f"batch size {list(params._batch_size)}",
            hint="make the adapters of one member at a time, with params[i], and tdf.stack them.",
        )


def check_scale(call: str, target: Target) -> None:
    """Raise if an adapter has a scale of zero, by which a change cannot be divided."""
    if target.scale == 0:
        raise error(
            ValueError,
            f"{call}: the scale of {dotted(target.path)!r} is 0, so that no factors give a change.",
            expected="another alpha than 0",
            got="alpha=0",
        )


# Any: whatever came in the place of a function.
def module_of(apply: Any) -> nn.Module:
    """Return the structure of the module of a function.

    Raises:
        TypeError: It is not a function of a module.
    """
    module = getattr(apply, "module", None)
    if not isinstance(module, nn.Module):
        # A language model has its function as an attribute.
        hint = "pass lm.apply." if hasattr(apply, "apply") else None
        raise error(
            TypeError,
            "lora: `apply` is not the function of a module.",
            expected="the function that tdf.functional(module) returns",
            got=type(apply).__name__,
            hint=hint,
        )
    return module


def layouts_of(module: nn.Module) -> Callable[[Path], Layout]:
    """Return the function that gives the layout of a weight of a module by its path."""

    def layout_of(path: Path) -> Layout:
        return layout_in(module.get_submodule(dotted(path[:-1])), path)

    return layout_of


def parts_of(lora: Choice, target: Target) -> dict[str, torch.Size]:
    """Return the shape of each leaf of an adapter."""
    shape = target.leaf.shape
    rank = target.rank
    if target.layout is Layout.CONV:
        a = (rank, *shape[1:])
        b = (shape[0], rank)
        magnitude = (shape[0], *[1] * (len(shape) - 1))
    else:
        *experts, m, n = shape
        a = (*experts, rank, n)
        b = (*experts, m, rank)
        if target.layout.has_output_last:
            magnitude = (*experts, 1, n)
        else:
            magnitude = (*experts, m, 1)
    parts: dict[str, Any] = {"A": a, "B": b}
    if lora.start != "kaiming":
        parts |= {"A0": a, "B0": b}
    if lora.dora:
        parts["magnitude"] = magnitude
    if lora.bias:
        parts["bias"] = (target.outputs,)
    return {name: torch.Size(size) for name, size in parts.items()}


def make_tree(leaves: Mapping[Path, Tensor]) -> TensorDict:
    """Return the tree of adapters; the frozen parts of a start are recorded as buffers."""
    tree = TensorDict({})
    for path, leaf in leaves.items():
        kind = Kind.BUFFER if path[-1] in FROZEN else Kind.PARAMETER
        tree = set_(tree, path, leaf, kind)
    return tree


def read_parts(
    lora: Choice, params: TensorCollection, adapters: TensorCollection, call: str
) -> tuple[list[tuple[Target, dict[str, Tensor]]], dict[Path, Tensor]]:
    """Return each weight of `params` that is adapted with the leaves of its adapter, and the leaves trained whole.

    Raises:
        TreeStructureError: `adapters` and the choice have different leaves.
        LeafMismatchError: A leaf has another shape.
    """
    targets, whole = find_targets(lora, entries(params), lambda _: Layout.LINEAR)
    found: list[tuple[Target, dict[str, Tensor]]] = []
    expected: dict[Path, torch.Size | None] = {entry.paths[0]: entry.leaf.shape for entry in whole}
    for target in targets:
        # The factor B of a convolution is a matrix.
        b = get(adapters, (*target.path, "B"), None)
        if b is not None and b.ndim < target.leaf.ndim:
            target = target._replace(layout=Layout.CONV)
        parts: dict[str, Tensor] = {}
        for name, shape in parts_of(lora, target).items():
            path = (*target.path, name)
            # The weight does not determine the outputs of a layer, which a bias has; a magnitude has one of two forms.
            expected[path] = None if name in ("magnitude", "bias") else shape
            parts[name] = get(adapters, path, None)
        found.append((target, parts))
    for table in find_tables(lora, entries(params)):
        expected[table.key] = table.shape
    given = check_leaves(call, expected, adapters)
    return found, {entry.paths[0]: given[entry.paths[0]] for entry in whole}


def check_leaves(
    call: str, expected: Mapping[Path, torch.Size | None], adapters: TensorCollection
) -> dict[Path, Tensor]:
    """Return the leaves of adapters by path; raise if their paths or shapes are not the expected ones."""
    given = dict(iter_items(adapters, True, True))
    missing = [dotted(path) for path in expected if path not in given]
    unknown = [dotted(path) for path in given if path not in expected]
    if missing or unknown:
        raise TreeStructureError(
            f"{call}: the adapters do not have the leaves of this Lora.",
            expected=_number_of_leaves(expected, missing),
            got=_number_of_leaves(given, unknown),
            hint="lora.init(params, key=key) makes them; tdf.lora.load returns both.",
        )
    for path, shape in expected.items():
        leaf = given[path]
        if shape is not None and leaf.shape != shape:
            hint = None
            if leaf.shape[1:] == shape:
                hint = "the adapters are stacked: use torch.vmap, or one of them, adapters[i]."
            raise LeafMismatchError(
                f"{call}: the leaf {dotted(path)!r} does not fit the base.",
                expected=f"shape {tuple(shape)}",
                got=f"shape {tuple(leaf.shape)}",
                hint=hint,
            )
    return given


def _number_of_leaves(leaves: Collection[Path], only_here: Sequence[str]) -> str:
    """Return the number of leaves of one side, and the first of those that the other side lacks, for messages."""
    number = f"{len(leaves)} leaves"
    if only_here:
        return f"{number}, also {only_here[:5]}"
    return number
