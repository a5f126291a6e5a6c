"""Trees from and to JAX's pytrees, by DLPack: dicts of flax, modules of equinox, optimizer states of optax.

JAX is imported when a function is called. Names, layouts and dtypes stay as they are: the path of an entry is its path
in the pytree, which is also its name in safetensors files of flax.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, TreeStructureError, UnsupportedError, brief, error, needs
from tdfunc.core.keys import dotted
from tdfunc.core.types import Path
from tdfunc.ops.base.reading import check_trees, get_value, iter_items
from tdfunc.ops.edits.structure import to_dict

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

_EXTRA = "tdfunc[jax]"


# Any: JAX's pytrees and modules; jax is not there when types are checked.
def from_jax(tree: Any) -> "TensorDict":
    """Return a tree of the arrays in a pytree of JAX, which share their memory with it.

    Lists and tuples become trees with the keys `"0"`, `"1"`, ..., and modules trees of their fields. Entries that are
    None are left out. An array that is in the pytree twice is one tensor. Numbers become tensors, and text stays text.

    The arrays must not change: do not write to the tensors in place, or `clone()` the tree first.

    Args:
        tree: A dict, a module of equinox, a state of optax, or any other pytree of arrays.

    Raises:
        ImportError: jax is not installed.
        TypeError: It is one array, or contains an object that is neither an array nor a number.
        UnsupportedError: torch cannot read an array in place: it is a typed random key, of a dtype that torch does not
            have, or spread over several devices.

    Examples:
        >>> model = eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))  # doctest: +SKIP
        >>> tree = tdf.from_jax(eqx.filter(model, eqx.is_array))  # doctest: +SKIP
        >>> tree["layers", "0", "weight"].shape  # doctest: +SKIP
        torch.Size([4, 2])
    """
    jax = _jax("from_jax")
    if isinstance(tree, (jax.Array, np.ndarray, Tensor, TensorCollection)):
        raise error(
            TypeError,
            "from_jax: the argument is not a pytree of JAX.",
            expected="a dict or another container of arrays",
            got=type(tree).__name__,
            hint="torch.from_dlpack(array) reads one array; to_jax converts a tree of tdfunc.",
        )
    return TensorCollection._open(_Reader(jax).read(tree, ()))  # pyright: ignore[reportReturnType]


def to_jax(tree: TensorCollection, *, like: Any = None) -> Any:
    """Return the leaves of a tree as arrays of JAX, which share their memory with the tree.

    A leaf is copied if its memory has gaps, or begins at an address that JAX does not accept (a slice, for example).
    Gradients do not flow through it. The arrays do not change as long as nobody writes to the tensors in place.

    Args:
        tree: Any tree.
        like: A pytree with the structure of the result, such as the module whose arrays `from_jax` read, or the result
            of `jax.eval_shape`. Its arrays are replaced by path, and its other leaves are kept.

    Returns:
        Nested dicts, or with `like` a pytree of its structure.

    Raises:
        ImportError: jax is not installed.
        TreeStructureError: An array of `like` is missing in the tree, or the tree has a leaf that `like` lacks.
        LeafMismatchError: A leaf has another shape or dtype than in `like`, or has 64 bits while JAX has none.
        UnsupportedError: JAX cannot read a leaf.

    Examples:
        >>> model = tdf.to_jax(tree, like=model)  # doctest: +SKIP
    """
    jax = _jax("to_jax")
    check_trees("to_jax", tree)
    if like is None:
        return _arrays(jax, to_dict(tree, "to_jax"), ())
    values = {path: get_value(tree, path) for path, _ in iter_items(tree, True, True)}
    flat, structure = jax.tree_util.tree_flatten_with_path(like)
    found: list[Any] = []
    for keys, leaf in flat:
        path = tuple([_name(key) for key in keys])
        is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        if path in values:
            found.append(_array_like(jax, values.pop(path), leaf if is_array else None, path))
        elif is_array:
            raise TreeStructureError(
                f"to_jax: {dotted(path)!r} is missing in the tree.",
                expected="a leaf for each array of `like`",
                got=brief([dotted(path) for path in values]),
            )
        else:
            found.append(leaf)
    if values:
        raise TreeStructureError(
            f"to_jax: `like` has no entry {dotted(next(iter(values)))!r}.",
            expected="a tree with the arrays of `like`",
            got=f"also {brief([dotted(path) for path in values])}",
            hint="select() the leaves that it has.",
        )
    return jax.tree_util.tree_unflatten(structure, found)


def _jax(call: str) -> Any:
    with needs(call, "jax", _EXTRA):
        import jax  # pyright: ignore[reportMissingImports]

        return jax


def _name(key: Any) -> str:
    """Return the part of a path that a key of JAX stands for: of a dict, a field, or a position."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


class _Reader:
    """Reads a pytree, and keeps the tensor of each array."""

    def __init__(self, jax: Any) -> None:
        self._jax = jax
        # With the arrays, so that their ids stay valid.
        self._tensors: dict[int, tuple[Any, Tensor]] = {}

    def read(self, value: Any, path: Path) -> Any:
        """Return the tensor of an array, a dict of the entries of a node, or a value that is neither."""
        if isinstance(value, (self._jax.Array, np.ndarray, np.generic)):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = (value, self._tensor(value, path))
            return self._tensors[id(value)][1]
        if isinstance(value, (bool, int, float, complex)):
            # With JAX's width of a number.
            return self._tensor(self._jax.numpy.asarray(value), path)
        if isinstance(value, str):
            return value
        children = self._jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda node: node is not value)[0]
        if len(children) == 1 and children[0][1] is value:
            raise error(
                TypeError,
                f"from_jax: {dotted(path)!r} is not an array.",
                expected="arrays, numbers and text",
                got=brief(value),
                hint="eqx.filter(model, eqx.is_array) leaves out everything else.",
            )
        result: dict[str, Any] = {}
        for (key,), child in children:
            if child is not None:
                name = _name(key)
                result[name] = self.read(child, (*path, name))
        return result

    def _tensor(self, array: Any, path: Path) -> Tensor:
        if not isinstance(array, self._jax.Array):
            # JAX knows the dtypes that numpy and torch do not share, such as bfloat16 of ml_dtypes.
            if array.dtype.isbuiltin == 1:
                return _of_numpy(array)
            array = self._jax.numpy.asarray(array)
        try:
            return torch.from_dlpack(array)
        # Also of classes of jaxlib.
        except Exception as err:
            raise UnsupportedError(
                f"from_jax: torch cannot read the array {dotted(path)!r} in place.",
                expected="an array on one device, of a dtype that torch has",
                got=f"{array.dtype}, shape {tuple(array.shape)}: {_first_line(err)}",
                hint="jax.random.key_data(key) for a random key; jax.device_get(tree) for an array on many devices.",
            ) from err


def _of_numpy(array: Any) -> Tensor:
    """Return the tensor of an array of numpy; torch warns about one that is read-only, so this is copied."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        array = array.copy()
    return torch.as_tensor(array)


def _arrays(jax: Any, value: Any, path: Path) -> Any:
    """Return nested dicts with arrays in place of tensors."""
    if isinstance(value, dict):
        return {key: _arrays(jax, child, (*path, key)) for key, child in value.items()}
    if isinstance(value, Tensor):
        return _array(jax, value, path)
    return value


def _array_like(jax: Any, value: Any, leaf: Any, path: Path) -> Any:
    """Return a value of the tree as an array that fits an array of the structure asked for; of any shape for None."""
    if not isinstance(value, Tensor):
        return value
    array = _array(jax, value, path)
    if leaf is not None and (tuple(leaf.shape), leaf.dtype) != (tuple(array.shape), array.dtype):
        raise LeafMismatchError(
            f"to_jax: leaf {dotted(path)!r} does not fit `like`.",
            expected=f"shape {tuple(leaf.shape)}, {leaf.dtype}",
            got=f"shape {tuple(array.shape)}, {array.dtype}",
        )
    return array


def _array(jax: Any, tensor: Tensor, path: Path) -> Any:
    try:
        array = jax.dlpack.from_dlpack(_packed(tensor.detach()))
    # Also of classes of jaxlib.
    except Exception as err:
        raise UnsupportedError(
            f"to_jax: JAX cannot read the leaf {dotted(path)!r}.",
            expected="a dense tensor of a dtype that JAX has, on a device that it has",
            got=f"{tensor.dtype} on {tensor.device}: {_first_line(err)}",
            hint="td.to('cpu') moves it, and td.to(dtype) casts it.",
        ) from err
    if array.dtype.itemsize != tensor.element_size():
        raise LeafMismatchError(
            f"to_jax: JAX would round the leaf {dotted(path)!r}.",
            expected=str(array.dtype),
            got=str(tensor.dtype),
            hint='jax.config.update("jax_enable_x64", True) switches 64 bits on; td.to(dtype) casts.',
        )
    return array


def _packed(tensor: Tensor) -> Tensor:
    """Return a tensor whose elements fill a block of memory, in any order of the dimensions; a copy of any other."""
    tensor = tensor.resolve_conj().resolve_neg()
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor


def _first_line(err: Exception) -> str:
    return str(err).partition("\n")[0]
