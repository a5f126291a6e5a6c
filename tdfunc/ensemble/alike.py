"""Members are alike: one forward computes the same for all of them, given their weights.

`Outline` compares the modules: classes, the names of their slots and submodules, hooks, modes and hyperparameters.
Hyperparameters are the attributes in a module's `__dict__` except its slots, compared by value through containers,
functions and objects, as far down as forward can read. A module or weight that is registered in its member is
compared by its path; an object whose parts cannot be read is refused.
"""

import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from marshal import dumps
from operator import itemgetter
from typing import Any

from torch import Size, Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.hooks import RemovableHandle

from tdfunc._jit import Jitted
from tdfunc._jit.readers import contents
from tdfunc.core.collection import Static, TensorCollection
from tdfunc.core.errors import TreeStructureError, brief
from tdfunc.core.keys import dotted
from tdfunc.core.types import Kind, Path
from tdfunc.modules.extract import EXTRA_STATE, unwrap
from tdfunc.modules.functional import Apply
from tdfunc.modules.poison import Poison
from tdfunc.storage.disk.raw import raw_bytes

# The attributes that nn.Module itself keeps in every `__dict__`; only the mode is a property of the architecture.
# torch.compile adds marks to the module that it is given.
_BASE = frozenset(nn.Module().__dict__) - {"training"} | {"_is_torch_compile", "_compiled_call_impl"}
# Lists that a recurrent layer makes of its weights, and makes again in forward if a weight is another object. A weight
# that is computed, as by a parametrization, leaves an old tensor in them.
_RECURRENT = frozenset({"_flat_weights", "_flat_weight_refs"})
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_ATOMS = frozenset((int, float, complex, bool, str, type(None)))
_CONTAINERS = frozenset((tuple, list, dict))
# Of a value in a message.
_MAX_TEXT = 200
_SETS = (set, frozenset)
# They hold no numbers; the number of a handle is another for each hook.
_STATELESS = (RemovableHandle, type(threading.Lock()), type(threading.RLock()))
_LRU_CACHE = type(functools.lru_cache(len))
# Reading a member of an enum takes longer than a lookup.
_PARAMETER = Kind.PARAMETER
_BUFFER = Kind.BUFFER
_NON_PERSISTENT = Kind.NON_PERSISTENT


class _Missing:
    def __repr__(self) -> str:
        return "no such attribute"


_MISSING = _Missing()


class ExtraState:
    """A module's extra state among its leaves."""

    shape = dtype = device = None

    # Any: a module returns any object.
    def __init__(self, value: Any) -> None:
        self.value = value


class Outline:
    """The structure of the first member, which reads the leaves of the others and builds the stacked tree.

    Leaves come in the order of `state_dict`: parameters, buffers and extra state of a module, then its children. Slots
    that hold None are read as None.

    Args:
        module: The first member.
        values: Its leaves are appended here.
        call: The name of the call in messages.
        plain: Classes of modules that are not wrappers; grows as they are met.
        at: The path of the module in its member.
    """

    __slots__ = (
        "_at", "_children", "_count", "_dump", "_extra", "_get", "_is_compared", "_module", "_names", "_others",
        "_slots", "_type",
    )  # fmt: skip

    def __init__(self, module: nn.Module, values: list[Any], call: str, plain: set[type], at: Path = ()) -> None:
        if type(module) not in plain:
            module = unwrap(module, call)
            plain.add(type(module))
        own = module.__dict__
        self._at = at
        self._module = module
        self._type = type(module)
        self._count = len(own)
        names = list(own.keys() - _BASE)
        dumped = names
        self._others: list[str] = []
        if not _are_plain([own[name] for name in names]):
            dumped = [name for name in names if _are_plain([own[name]])]
            self._others = [name for name in names if name not in dumped]
        # "training" is always among them.
        self._get: Callable[[dict[str, Any]], Any] = itemgetter(*dumped)
        # Equal bytes mean equal types, signs of zeros and order of keys. Later versions of the format depend on
        # reference counts.
        self._dump = dumps(self._get(own), 2)
        self._is_compared = bool(self._others) or any(map(own.__getitem__, _HOOKS))
        self._names = list(own["_parameters"]), list(own["_buffers"]), list(own["_modules"])
        self._slots = [*self._names[0], None, *self._names[1], None, *self._names[2]]
        self._extra = self._type.get_extra_state is not nn.Module.get_extra_state
        values += own["_parameters"].values()
        values += own["_buffers"].values()
        if self._extra:
            values.append(ExtraState(module.get_extra_state()))
        self._children: list[Outline | None] = []
        for name, child in own["_modules"].items():
            outline = None
            if child is not None:
                outline = Outline(child, values, call, plain, (*at, name))
            self._children.append(outline)

    def read(self, module: Any, values: list[Any], pair: "Pair") -> None:
        """Append the leaves of a module of another member.

        Raises:
            TreeStructureError: Classes, slots, children, hooks, modes or hyperparameters differ; the message names the
                first difference.
        """
        # One function for speed: it runs for each module of each member.
        if type(module) is not self._type:
            module = unwrap(module, pair.call)
            self._check_class(module, pair)
        own = module.__dict__
        parameters = own["_parameters"]
        buffers = own["_buffers"]
        children = own["_modules"]
        if [*parameters, None, *buffers, None, *children] != self._slots:
            self._check_names(own, pair)
        # One comparison in C for each module: a large model has thousands of attributes.
        try:
            same = len(own) == self._count and dumps(self._get(own), 2) == self._dump
        except (KeyError, ValueError):
            same = False
        hooks = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"]
        if not same:
            self._compare(own, list(dict.fromkeys([*self._module.__dict__, *own])), pair)
        elif self._is_compared or hooks or own["_backward_pre_hooks"]:
            self._compare(own, self._others, pair)
        if parameters:
            values += parameters.values()
        if buffers:
            values += buffers.values()
        if self._extra:
            values.append(ExtraState(module.get_extra_state()))
        if children:
            for (name, child), outline in zip(children.items(), self._children, strict=True):
                if (child is None) is not (outline is None):
                    raise self._child_error(name, child, pair)
                if outline is not None:
                    outline.read(child, values, pair)

    def _check_class(self, module: nn.Module, pair: "Pair") -> None:
        # Every parametrized module has its own class.
        mine = type_before_parametrizations(self._module)
        other = type_before_parametrizations(module)
        if mine is other:
            return
        expected = f"{mine.__module__}.{mine.__qualname__}"
        got = f"{other.__module__}.{other.__qualname__}"
        if got == expected:
            got += " (another class)"
        raise pair.differ(self._at, "class", expected, got)

    def _check_names(self, own: dict[str, Any], pair: "Pair") -> None:
        for table, names in zip(("_parameters", "_buffers", "_modules"), self._names, strict=True):
            found = list(own[table])
            if found != names:
                raise pair.differ(self._at, table[1:], names, found)

    def _child_error(self, name: str, child: nn.Module | None, pair: "Pair") -> TreeStructureError:
        """Return the error for a submodule that is None on one side only."""
        both: list[str] = []
        for module in (self._module._modules[name], child):
            both.append("None" if module is None else type(module).__name__)
        return pair.differ(self._at, f"modules.{name}", *both)

    def _compare(self, own: dict[str, Any], names: list[str], pair: "Pair") -> None:
        """Raise unless the hooks and the attributes of these names are alike."""
        mine = self._module.__dict__
        for table in _HOOKS:
            if not pair.is_alike(_hooks_of(mine, table), _hooks_of(own, table)):
                texts = pair.show(list(mine[table].values()), list(own[table].values()))
                raise pair.differ(self._at, table, *texts)
        skipped = _BASE.union(map(_recomputed, mine["_forward_pre_hooks"].values()))
        if isinstance(self._module, nn.RNNBase):
            skipped |= _RECURRENT
        for name in names:
            a = mine.get(name, _MISSING)
            b = own.get(name, _MISSING)
            if name not in skipped and not pair.is_alike(a, b):
                raise pair.differ(self._at, name, *pair.show(a, b))

    def build(self, leaves: Iterator[Any], size: Size) -> Any:
        """Return the tree around leaves in the same order; submodules without leaves are left out."""
        static = None
        data: dict[str, Any] = {}
        kinds = self._kinds()
        if kinds:
            static = Static(kinds)
            data = {name: next(leaves) for name in kinds}
        for name, child in zip(self._names[2], self._children, strict=True):
            if child is not None:
                node = child.build(leaves, size)
                if node._data:
                    data[name] = node
        return TensorCollection._open._make(data, size, None, None, static)

    def _kinds(self) -> dict[str, Kind]:
        """Return the kinds of the module's own leaves, by their names."""
        own = self._module.__dict__
        kinds: dict[str, Kind] = {}
        for name, value in own["_parameters"].items():
            if value is not None:
                kinds[name] = _PARAMETER
        hidden = own["_non_persistent_buffers_set"]
        for name, value in own["_buffers"].items():
            if value is not None:
                kinds[name] = _NON_PERSISTENT if name in hidden else _BUFFER
        if self._extra:
            kinds[EXTRA_STATE] = Kind.EXTRA_STATE
        return kinds


def _hooks_of(own: dict[str, Any], table: str) -> list[tuple[Any, list[bool]]]:
    """Return the hooks in a table of a module's `__dict__`, each with its flags."""
    hooks: list[tuple[Any, list[bool]]] = []
    for number, hook in own[table].items():
        hooks.append((hook, [number in own[flag] for flag in _FLAGS]))
    return hooks


class Pair:
    """The first member and another one.

    Args:
        first: The first member.
        other: The other.
        call: The name of the call in messages.
        name: The name of the other member in messages.
    """

    def __init__(self, first: nn.Module, other: nn.Module, call: str, name: str) -> None:
        self.call = call
        self._name = name
        self._roots = (first, other)
        self._paths: list[dict[int, str]] = []

    def differ(self, at: Path, attribute: str, expected: object, got: object) -> TreeStructureError:
        """Return the error that names an attribute and the module that it belongs to."""
        where = "the root"
        if at:
            where = repr(dotted(at))
        hint = "one forward runs all members, so their structure must agree; average the outputs of others."
        if attribute == "training":
            hint = "call train() or eval() on all of them."
        return TreeStructureError(
            f"{self.call}: {self._name} differs from member 0 in {attribute!r} of {where}.",
            expected=expected,
            got=got,
            hint=hint,
        )

    # Any: attributes are of every type.
    def is_alike(self, a: Any, b: Any, around: frozenset[tuple[int, int]] = frozenset()) -> bool:
        """Return whether forward reads the same in both values; `around` has the pairs that hold them, by identity."""
        kind: Any = type(a)
        if isinstance(a, (Tensor, nn.Module)):
            places = [self._find(i, value) for i, value in enumerate((a, b))]
            if places != [None, None]:
                return places[0] == places[1]
        if a is b:
            return True
        if kind is not type(b):
            return False
        if kind in _ATOMS or kind is bytes:
            atoms: list[Any] = [a, b]
            return dumps(atoms[0], 2) == dumps(atoms[1], 2)
        if kind in _SETS:
            return a == b
        if isinstance(a, _STATELESS):
            return True
        if (id(a), id(b)) in around:
            return True
        try:
            mine = _parts(a)
            theirs = _parts(b)
        # A class's own reduction may raise anything; an object without one, and a sparse tensor, cannot be read.
        except Exception:
            return False
        around |= {(id(a), id(b))}
        pairs = zip(mine, theirs, strict=True)
        return len(mine) == len(theirs) and all([self.is_alike(x, y, around) for x, y in pairs])

    def show(self, a: Any, b: Any) -> tuple[str, str]:
        """Return texts of two values that are not alike; where these are equal, with the parts that differ."""
        whole = _text(a)
        if whole != _text(b):
            return whole, _text(b)
        seen = {id(a)}
        parts = self._find_unlike(a, b)
        while parts is not None and id(parts[0]) not in seen:
            a, b = parts
            seen.add(id(a))
            if _text(a) != _text(b):
                return f"{whole}, which holds {_text(a)}", f"{whole}, which holds {_text(b)}"
            parts = self._find_unlike(a, b)
        if isinstance(a, Tensor):
            return whole, f"{whole}, with other numbers"
        kind = type(a).__qualname__
        return whole, f"{whole}, which is or holds another {kind}; two such objects are not compared"

    def _find_unlike(self, a: Any, b: Any) -> tuple[Any, Any] | None:
        """Return the first parts of two values that are not alike; None if the values have no parts."""
        if isinstance(a, (Tensor, *_SETS)) or type(a) in _ATOMS or type(a) is not type(b):
            return None
        try:
            mine = _parts(a)
            theirs = _parts(b)
        # As in `is_alike`.
        except Exception:
            return None
        if len(mine) != len(theirs):
            return (len(mine), len(theirs))
        for x, y in zip(mine, theirs, strict=True):
            if not self.is_alike(x, y):
                return x, y
        return None

    def _find(self, member: int, value: Any) -> str | None:
        """Return the first path under which a module or tensor is registered in a member."""
        if not self._paths:
            for root in self._roots:
                named = [*root.named_modules(), *root.named_parameters(), *root.named_buffers()]
                self._paths.append({id(found): name for name, found in named})
        return self._paths[member].get(id(value))


def _text(value: object) -> str:
    """Return the repr of a value if it is short; a value with many numbers by its parts."""
    whole = repr(value)
    if len(whole) <= _MAX_TEXT:
        return whole
    return " ".join(brief(value).split())


def _are_plain(values: Iterable[Any]) -> bool:
    """Return whether `marshal` writes everything about values: numbers, text, and built-in containers of these."""
    kinds = set(map(type, values))
    if not kinds <= _ATOMS | _CONTAINERS:
        return False
    items: list[Any] = []
    for value in values:
        if type(value) in _CONTAINERS:
            items += value
        if type(value) is dict:
            items += value.values()
    return not items or _are_plain(items)


def _recomputed(hook: object) -> str | None:
    """Return the attribute that a hook of torch's before forward computes anew, so that it may differ."""
    if isinstance(hook, (WeightNorm, SpectralNorm)):
        return hook.name
    if isinstance(hook, BasePruningMethod):
        return hook._tensor_name
    return None


def _parts(value: Any) -> list[Any]:
    """Return everything that makes a value: its items, or the class and state that `copy` would take."""
    kind = type(value)
    if kind is tuple or kind is list:
        return value
    if kind is dict:
        return [*value, *value.values()]
    if kind is weakref.ref:
        return [value()]
    if isinstance(value, Poison):
        return [value.shape, value.dtype, value.device, value.path, hasattr(value, "_is_param")]
    if isinstance(value, Tensor):
        numbers = b"" if value.is_meta else raw_bytes(value).tobytes()
        return [value.shape, value.dtype, value.device, numbers]
    if kind is types.FunctionType:
        # Code objects are alike only if they are one: equal code may read other globals.
        cells = map(contents, value.__closure__ or ())
        return [value.__code__, value.__defaults__, value.__kwdefaults__, value.__dict__, *cells]
    if kind is types.MappingProxyType:
        return [dict(value)]
    if kind is functools.partial:
        # Its reduction has None in place of attributes until somebody asks for them.
        return [value.func, value.args, value.keywords, vars(value)]
    if isinstance(value, Apply):
        # Without its copies, and what its calls have noted.
        return [value.module, value._spec.name, value.paths, value._spec.first, value._reserved]
    if isinstance(value, Jitted):
        # Without its records, which depend on the calls so far.
        return value.options()
    if isinstance(value, _LRU_CACHE):
        return [value.__wrapped__, value.cache_parameters()]
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):
        raise TypeError("a global is alike only if it is the same object")
    return [list(part) if isinstance(part, Iterator) else part for part in reduced]
