"""The decorator that makes a plain class a typed one."""

import inspect
from typing import Any

from tdfunc._tensorclass.define import Meta
from tdfunc._tensorclass.typed import TensorClass
from tdfunc.core.errors import error


def tensorclass(cls: Any = None, /, **options: bool) -> Any:
    """Make a plain class with annotated fields a `TensorClass`.

    No type checker understands that a decorator adds a base class: derive from `TensorClass` where that matters.

    Args:
        cls: The class; without it, a decorator with these options.
        **options: `autocast`, `nocast`, `frozen`, `tensor_only`, `shadow`, as for `TensorClass`.

    Raises:
        TypeError: The class is a dataclass, or a `TensorClass` without these options.

    Examples:
        >>> @tensorclass
        ... class Point:
        ...     x: torch.Tensor
        ...     y: torch.Tensor
        >>> Point(torch.zeros(3), torch.ones(3), batch_size=[3])[0].y
        tensor(1.)
    """
    if cls is None:
        return lambda plain: tensorclass(plain, **options)
    if not isinstance(cls, type):
        raise error(
            TypeError,
            "tensorclass: not a class.",
            expected="a class",
            got=repr(cls),
            hint="options go by keyword: @tensorclass(autocast=True).",
        )
    if issubclass(cls, TensorClass):
        if any(getattr(cls._options, option, None) is not on for option, on in options.items()):
            given = ", ".join(f"{option}={on}" for option, on in options.items())
            raise error(
                TypeError,
                f"tensorclass: {cls.__name__} is a TensorClass already.",
                got=given,
                hint=f"class {cls.__name__}(..., {given}), without the decorator.",
            )
        return cls
    if "__dataclass_fields__" in vars(cls):
        raise error(
            TypeError,
            f"tensorclass: {cls.__name__} is a dataclass, whose constructor would be lost.",
            hint="leave @dataclass out.",
        )
    skipped = {"__dict__", "__weakref__", "__slots__"}
    namespace = {key: value for key, value in vars(cls).items() if key not in skipped}
    namespace["__qualname__"] = cls.__qualname__
    new = Meta(
        cls.__name__, (*(base for base in cls.__bases__ if base is not object), TensorClass), namespace, **options
    )
    _point_super(cls, new)
    return new


def _point_super(old: type, new: Any) -> None:
    """Make zero-argument `super()` of the methods, which all share one cell, mean the new class."""
    for value in vars(old).values():
        for member in (value, *(getattr(value, name, None) for name in ("__func__", "fget", "fset", "fdel"))):
            for cell in getattr(inspect.unwrap(member), "__closure__", None) or () if callable(member) else ():
                # An empty cell has no contents to ask for.
                if _contents(cell) is old:
                    cell.cell_contents = new


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
