"""`TensorDictModuleBase`: a module from trees to trees, the keys that it reads and writes, and `dispatch`."""

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from torch import nn
from torch.fx import Proxy

from tdfunc._tensordict import TensorDict, TreeMethods
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import MissingKeyError, UnsupportedError, brief, error
from tdfunc.core.keys import unravel
from tdfunc.core.types import NestedKey
from tdfunc.nn.reset import reset_module, reset_tree
from tdfunc.ops.base.reading import get, has

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T", bound=TensorCollection)
# One key, or several; where each value goes to a keyword argument, a mapping from their names.
Keys: TypeAlias = "NestedKey | Iterable[NestedKey]"
InKeys: TypeAlias = "Keys | Mapping[str, NestedKey]"
# The out key of a value that is thrown away.
DISCARDED = "_"
# What a bare module holds: its mode, its slots and its hooks.
_TABLES = tuple(nn.Module().__dict__)


def as_key(key: NestedKey) -> NestedKey:
    """Return a key in its shortest form: a str where it has one part."""
    path = unravel(key)
    if len(path) == 1:
        return path[0]
    return path


def split_keys(in_keys: InKeys) -> tuple[list[str] | None, list[NestedKey]]:
    """Return the names of the keyword arguments, None where arguments go by position, and the keys of the values."""
    if isinstance(in_keys, Mapping):
        # A key is not a mapping.
        named: Mapping[str, NestedKey] = in_keys  # pyright: ignore[reportAssignmentType]
        return list(named), as_keys(list(named.values()))
    return None, as_keys(in_keys)


def as_keys(keys: Keys) -> list[NestedKey]:
    """Return one key (a str or tuple) or several (any other iterable) as a list."""
    if isinstance(keys, (str, tuple)):
        return [as_key(keys)]
    return [as_key(key) for key in keys]


class TensorDictModuleBase(nn.Module):
    """A module whose forward takes a tree and returns a new one.

    Subclasses set `in_keys` and `out_keys`, on the class or in the constructor. Forward returns the given tree with
    new entries (`tensordict.set(...)`, `tensordict.update(...)`); `dispatch` lets it take tensors as well.

    Examples:
        >>> class Shift(TensorDictModuleBase):
        ...     in_keys = ["a"]
        ...     out_keys = ["b", "c"]
        ...
        ...     @dispatch
        ...     def forward(self, tensordict):
        ...         return tensordict.update({"b": tensordict["a"] + 1, "c": tensordict["a"] + 2})
        >>> module, td = Shift(), TensorDict({"a": torch.zeros(())})
        >>> list(module(td).keys()), list(module.select_out_keys("c")(td).keys()), module(torch.zeros(()))
        (['a', 'b', 'c'], ['a', 'c'], (tensor(1.), tensor(2.)))
    """

    in_keys: Sequence[NestedKey]
    out_keys: Sequence[NestedKey]
    # The out keys before any were selected; None where none are.
    _source: Sequence[NestedKey] | None = None
    # True if forward takes `interaction_type`.
    _interacts: ClassVar[bool] = False
    # False if forward depends on values or types that torch.fx hides; in a graph the module is one node.
    _is_traceable: bool = True

    # Around forward and hooks, rather than a hook: torch.compile makes one graph of it.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and its hooks, and keep the selected outputs."""
        if args:
            tree = args[0]
        else:
            tree = kwargs.get("tensordict")
        if isinstance(tree, Proxy):
            return self._traced(tree, args, kwargs)
        out = super().__call__(*args, **kwargs)
        # `dispatch` returns selected values.
        if self._source is None or not isinstance(tree, TreeMethods):
            return out
        return self._keep_selected(tree, out)

    # Any: nodes of a graph.
    def _traced(self, tree: Any, args: Any, kwargs: Any) -> Any:
        """Return what stands for the result in a graph of torch.fx."""
        if not self._is_traceable:
            return as_node(self, tree, args, kwargs)
        out = super().__call__(*args, **kwargs)
        return self._selected_in_graph(tree, out)

    def _selected_in_graph(self, tree: Any, out: Any) -> Any:
        if self._source is None:
            return out
        for key in self.out_keys:
            if key != DISCARDED:
                tree = tree.set(key, out[key])
        return tree

    @staticmethod
    def is_tdmodule_compatible(module: Any) -> bool:
        """Return True if a module has `in_keys` and `out_keys`, so that it can be part of a `TensorDictSequential`."""
        return hasattr(module, "in_keys") and hasattr(module, "out_keys")

    # torch.vmap names its function for each output; without a name it prints the module, which dynamo (torch 2.13)
    # cannot trace.
    @property
    def __name__(self) -> str:
        return self._get_name()

    @property
    def out_keys_source(self) -> Sequence[NestedKey]:
        """The out keys of the module without any selection."""
        return self.out_keys if self._source is None else self._source

    def select_out_keys(self, *out_keys: NestedKey) -> "Self":
        """Return a module over the same submodules that writes only some of its outputs.

        Its result is the given tree and the selected outputs: an entry that another output would replace stays.

        Args:
            *out_keys: Keys of `out_keys`.

        Raises:
            MissingKeyError: A key is not among `out_keys`.

        Examples:
            >>> from tdfunc.nn import TensorDictModule, TensorDictSequential
            >>> seq = TensorDictSequential(
            ...     TensorDictModule(lambda x: x + 1, ["x"], ["y"]), TensorDictModule(lambda y: y + 1, ["y"], ["z"])
            ... )
            >>> list(seq.select_out_keys("z")(TensorDict({"x": torch.zeros(())})).keys())
            ['x', 'z']
        """
        new = self._shell()
        new._select(as_keys(list(out_keys)))
        return new

    def reset_out_keys(self) -> "Self":
        """Return a module over the same submodules that writes all its outputs."""
        new = self._shell()
        if new._source is not None:
            new.out_keys = new._source
            new._source = None
        return new

    def reset_parameters_recursive(self, parameters: T | None = None) -> T | None:
        """Draw new values for all parameters, in this module or in a tree of its parameters.

        Each submodule's own `reset_parameters` draws them, from torch's default generator. Parameters of modules that
        have no such method keep their values, with a warning that names them.

        Args:
            parameters: A tree of this module's parameters, or of a part of them; without it the module itself is
                written.

        Returns:
            A new tree with the structure of `parameters`, or None without one.

        Raises:
            TreeStructureError: The module has no parameter for a leaf of the tree.
            LeafMismatchError: A leaf has another shape or dtype than the module's.

        Examples:
            >>> from tdfunc.nn import TensorDictModule
            >>> module = TensorDictModule(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), ["x"], ["y"])
            >>> old = tdf.from_module(module)
            >>> new = module.reset_parameters_recursive(old)
            >>> bool((new == old).any()), bool((tdf.from_module(module) == old).all())
            (False, True)
        """
        if parameters is None:
            reset_module(self)
            return None
        return reset_tree(self, parameters)

    def extra_repr(self) -> str:
        """Return the keys, as they show in the text of the module."""
        return f"in_keys={list(self.in_keys)}, out_keys={list(self.out_keys)}"

    def _keep_selected(self, tree: Any, out: Any) -> Any:
        """Return a tree with the selected entries of the result of a call on it."""
        if tree._is_lazy:
            return tree._each(self._keep_selected, out)
        tolerant = getattr(self, "partial_tolerant", False)
        for key in self.out_keys:
            if key != DISCARDED and not (tolerant and not has(out, key)):
                tree = tree.set(key, get(out, key))
        return tree

    def _shell(self) -> "Self":
        """Return a module with its own tables around the same submodules, parameters and buffers."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.__dict__.update({name: copy.copy(self.__dict__[name]) for name in _TABLES})
        # What `compile()` made calls the other one.
        new.__dict__.pop("_compiled_call_impl", None)
        return new

    def _select(self, keys: list[NestedKey]) -> None:
        """Select out keys of this very module: one that nobody else has yet."""
        known = as_keys(list(self.out_keys))
        for key in keys:
            if key not in known:
                raise MissingKeyError(
                    f"select_out_keys: {key!r} is not an out key of {type(self).__name__}.",
                    expected=f"keys of {brief(known)}",
                    hint="reset_out_keys() first." if key in as_keys(list(self.out_keys_source)) else None,
                )
        self._source = self.out_keys_source
        self.out_keys = keys


def dispatch(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    separator: str = "_",
    source: str | Sequence[NestedKey] = "in_keys",
    dest: str | Sequence[NestedKey] = "out_keys",
) -> Any:
    """Let a forward on trees also take the values of its in keys, and then return the values of its out keys.

    Values are given by position, in the order of the keys, or by keyword, and make a tree of batch size []. A call with
    a tree goes through unchanged. The result is a tuple, or one value where there is one out key.

    Args:
        fn: The method, whose first argument after `self` is called `tensordict`; without it, a decorator with these
            options.
        separator: The text that joins the parts of a nested key to the name of its keyword.
        source: The keys to read, or the name of the attribute that holds them.
        dest: The keys to return, or the name of the attribute that holds them.

    Raises:
        TypeError: A value is given by position and by keyword, or the first value is a dict with all in keys, which
            would be the value of the first of them.

    Examples:
        >>> class Sum(nn.Module):
        ...     @dispatch(source=["a", ("n", "b")], dest=["c"])
        ...     def forward(self, tensordict):
        ...         return tensordict.set("c", tensordict["a"] + tensordict["n", "b"])
        >>> Sum()(torch.ones(2), n_b=torch.ones(2))
        tensor([2., 2.])
    """
    if fn is None:
        return lambda method: dispatch(method, separator=separator, source=source, dest=dest)
    names = list(inspect.signature(fn).parameters)
    if names[1:2] != ["tensordict"]:
        raise error(
            TypeError,
            "dispatch: the method's first argument is not called 'tensordict'.",
            got=f"{fn.__qualname__}({', '.join(names)})",
        )

    @wraps(fn)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(args, Proxy):
            return _trace_root(fn, self, args, kwargs)
        first = args[0] if args else kwargs.get("tensordict")
        if isinstance(first, TreeMethods):
            return fn(self, *args, **kwargs)
        if isinstance(first, Proxy):
            return _select_at_root(self, first, fn(self, *args, **kwargs))
        in_keys = getattr(self, source) if isinstance(source, str) else source
        if isinstance(first, dict):
            _refuse_entries(self, first, in_keys)
        values = _take_values(self, in_keys, separator, args, kwargs)
        rest = args[len(in_keys) :]
        out = fn(self, TensorDict(values), *rest, **kwargs)
        keys = getattr(self, dest) if isinstance(dest, str) else dest
        found = tuple([out[key] for key in keys if key != DISCARDED])
        if len(found) == 1:
            return found[0]
        return found

    return forward


# Any: the arguments of a call.
def as_node(module: nn.Module, given: Proxy, args: Any, kwargs: Any) -> Proxy:
    """Return what stands for the result of a module that is one node of the graph of an argument."""
    path = given.tracer.path_of_module(module)  # pyright: ignore[reportAttributeAccessIssue]
    return given.tracer.create_proxy("call_module", path, args, kwargs)


# Any: a method, and nodes of a graph.
def _trace_root(fn: Any, module: Any, tree: Any, rest: Any) -> Any:
    """Return what stands for the result of the module that `torch.fx.symbolic_trace` is given.

    torch (2.13) runs the code of a forward with `*args` or keyword arguments with a node in each of its variables: the
    tree is in `args`. Further arguments keep their defaults, and the graph does not have them.
    """
    if isinstance(rest, Proxy):
        rest.node.graph.erase_node(rest.node)
    if not getattr(module, "_is_traceable", True):
        raise UnsupportedError(
            f"torch.fx.symbolic_trace: {type(module).__name__} decides by values or types, which a graph hides.",
            expected="a module whose operations do not depend on the tree",
            hint="put it into a TensorDictSequential, where it is one node of the graph.",
        )
    return _select_at_root(module, tree, fn(module, tree))


# Any: nodes of a graph.
def _select_at_root(module: Any, tree: Any, out: Any) -> Any:
    """Return a result with the selected outputs of the module that is traced, whose forward torch.fx calls itself."""
    if isinstance(module, TensorDictModuleBase) and tree.tracer.root is module:
        return module._selected_in_graph(tree, out)
    return out


# Any: values of trees.
def _take_values(
    module: Any, in_keys: Sequence[NestedKey], separator: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[NestedKey, Any]:
    """Return the values of the in keys that are given by position or keyword; take the keywords out of `kwargs`."""
    values: dict[NestedKey, Any] = {}
    for place, key in enumerate(in_keys):
        name = separator.join(unravel(key))
        if place < len(args):
            if name in kwargs:
                raise error(TypeError, f"{type(module).__name__}: {name!r} is given by position and by keyword.")
            values[key] = args[place]
        elif name in kwargs:
            values[key] = kwargs.pop(name)
    return values


def _refuse_entries(module: Any, given: dict[Any, Any], in_keys: Sequence[NestedKey]) -> None:
    """Raise if a dict has the in keys of a module, and so is meant as its tree."""
    first_parts = [unravel(key)[0] for key in in_keys]
    if first_parts and all([part in given for part in first_parts]):
        raise error(
            TypeError,
            f"{type(module).__name__}: a dict is not a tree; it would be the value of {in_keys[0]!r}.",
            got=f"a dict with {brief(list(given))}",
            hint="TensorDict(values) makes a tree of it, and module(**values) gives the values of the in keys.",
        )


def read_inputs(module: nn.Module, tensordict: Any, keys: Sequence[NestedKey]) -> list[Any]:
    """Return the values of the in keys of a module.

    Raises:
        MissingKeyError: A key is not in the tree; the message names it, the module, and the keys of the tree.
    """
    values: list[Any] = []
    for key in keys:
        try:
            values.append(tensordict[key])
        except MissingKeyError as err:
            found = list(tensordict.keys(True, True))
            raise MissingKeyError(
                f"{type(module).__name__}{_wrapped_by(module)}: the tree has no {key!r}, which the module reads.",
                expected=brief(list(keys)),
                got=brief(found) if found else "(no keys)",
            ) from err
    return values


def _wrapped_by(module: Any) -> str:
    inner = getattr(module, "module", None)
    if inner is None:
        return ""
    if isinstance(inner, nn.Module):
        name = type(inner).__name__
    else:
        name = getattr(inner, "__name__", type(inner).__name__)
    return f"({name})"
