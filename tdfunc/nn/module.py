"""`TensorDictModule`: a function or module of tensors as a module of trees."""

from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

from torch import nn
from torch.fx import Proxy

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import TreeStructureError, brief
from tdfunc.core.types import NestedKey
from tdfunc.nn.base import (
    DISCARDED,
    InKeys,
    Keys,
    TensorDictModuleBase,
    as_key,
    as_keys,
    dispatch,
    read_inputs,
    split_keys,
)
from tdfunc.ops.base.reading import get, has


class TensorDictModule(TensorDictModuleBase):
    """A function or module of tensors that reads its arguments from a tree and adds its outputs to it.

    `td = module(td)` returns a new tree: the entries of `td`, which share memory with it, and the outputs. Called with
    the arguments themselves, `module(x)`, it returns the outputs. On a lazy stack it runs for each tree.

    Args:
        module: The function. A module is registered as `module`, so that `state_dict` has its names after `module.`.
        in_keys: The keys of the arguments, in order, or a dict from keyword arguments to keys.
        out_keys: A key for each output; `"_"` discards an output. If the function returns a dict or a tree with these
            keys, the outputs are its entries.

    Raises:
        MissingKeyError: In a call: an in key is not in the tree.
        TreeStructureError: In a call: the function returns more or fewer outputs than there are out keys.

    Examples:
        >>> module = TensorDictModule(nn.Linear(3, 2), in_keys=["x"], out_keys=[("head", "logits")])
        >>> td = module(TensorDict({"x": torch.zeros(5, 3)}, [5]))
        >>> td["head", "logits"].shape, td["head"].batch_size
        (torch.Size([5, 2]), torch.Size([5]))
        >>> scale = TensorDictModule(lambda x, *, by: (x * by, x), {"x": "a", "by": "b"}, ["scaled", "_"])
        >>> scale(a=torch.ones(2), b=torch.tensor(3.0))
        tensor([3., 3.])
    """

    def __init__(self, module: Callable[..., Any], in_keys: InKeys, out_keys: Keys) -> None:
        super().__init__()
        self._keywords, keys = split_keys(in_keys)
        self.in_keys: Sequence[NestedKey] = keys
        self.out_keys: Sequence[NestedKey] = as_keys(out_keys)
        self.module = module

    @dispatch
    def forward(self, tensordict: Any, **kwargs: Any) -> Any:
        """Return the tree with the outputs.

        Args:
            tensordict: Any tree, or the arguments themselves.
            **kwargs: Further keyword arguments of the function.
        """
        if not isinstance(tensordict, Proxy) and tensordict._is_lazy:
            return tensordict._each(lambda tree: self.forward(tree, **kwargs))
        inputs = read_inputs(self, tensordict, self.in_keys)
        if self._keywords is None:
            out = self.module(*inputs, **kwargs)
        else:
            out = self.module(**dict(zip(self._keywords, inputs, strict=True)), **kwargs)
        keys = self.out_keys_source
        if isinstance(out, Proxy):
            # The graph finds its kind when it runs. Any: a node that is indexed.
            values: Any = out.tracer.create_proxy("call_function", outputs_of, (self._get_name(), out, list(keys)), {})
            outputs: Any = [values[i] for i in range(len(keys))]
        else:
            outputs = outputs_of(self._get_name(), out, keys)
        for key, value in zip(keys, outputs, strict=True):
            if key != DISCARDED:
                tensordict = tensordict.set(key, value)
        return tensordict

    def extra_repr(self) -> str:
        """Return the function, unless it is a module, and the keys."""
        own = ""
        if not isinstance(self.module, nn.Module):
            own = f"module={self.module!r}, "
        return own + super().extra_repr()


class _Decorated(TensorDictModule):
    """A decorated function: it is pickled by name, as functions are, and binds as a method."""

    def __init__(self, module: Callable[..., Any], in_keys: InKeys, out_keys: Keys) -> None:
        super().__init__(module, in_keys, out_keys)
        self.__doc__ = module.__doc__
        self.__module__ = module.__module__

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        bound = TensorDictModule(MethodType(self.module, instance), self.in_keys, self.out_keys)
        bound._keywords = self._keywords
        return bound

    def _get_name(self) -> str:
        return "TensorDictModule"

    def _shell(self) -> Any:
        new: Any = super()._shell()
        # A pickle by name would be the function without the selection.
        new.__class__ = TensorDictModule
        return new

    def __reduce__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.module.__qualname__


def as_tensordict_module(*, in_keys: InKeys, out_keys: Keys) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a function of tensors a `TensorDictModule`; methods are bound to their instance.

    Args:
        in_keys: The keys of the arguments, as for `TensorDictModule`.
        out_keys: The keys of the outputs, as for `TensorDictModule`.

    Examples:
        >>> @as_tensordict_module(in_keys="c", out_keys="d")
        ... def increment(c):
        ...     return c + 1
        >>> increment(TensorDict({"c": torch.zeros(())}))["d"]
        tensor(1.)
    """
    return lambda function: _Decorated(function, in_keys, out_keys)


# Any: a function returns what it likes. Graphs of torch.fx call it.
def outputs_of(name: str, out: Any, keys: Sequence[NestedKey]) -> tuple[Any, ...]:
    """Return a value for each out key from the result of a function.

    Raises:
        TreeStructureError: There are more or fewer values; the message has the name of the module's class.
    """
    outputs = _outputs_of(out, keys)
    if len(outputs) != len(keys):
        raise TreeStructureError(
            f"{name}: the function returned {len(outputs)} values for {len(keys)} out keys.",
            expected=f"{len(keys)}: {brief(list(keys))}",
            got=f"{len(outputs)}: {brief([type(each).__name__ for each in outputs])}",
            hint='"_" is the key of an output that is thrown away.',
        )
    return outputs


def _outputs_of(out: Any, keys: Sequence[NestedKey]) -> tuple[Any, ...]:
    """Return the values that a function returned: in a tree or mapping with the keys, in a tuple, or one by itself."""
    if isinstance(out, TensorCollection) and all([has(out, key) for key in keys]):
        return tuple([get(out, key) for key in keys])
    if isinstance(out, Mapping):
        found = {as_key(key): value for key, value in out.items()}
        if found.keys() >= set(keys):
            return tuple([found[key] for key in keys])
    if isinstance(out, tuple):
        return out
    if out is None:
        return ()
    return (out,)
