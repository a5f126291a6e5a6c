"""`TensorClassModuleBase`: modules from one typed tree to another."""

from typing import Any, Generic, TypeVar, get_args, get_origin

from torch import nn

from tdfunc._tensorclass import TensorClass
from tdfunc.core.errors import error
from tdfunc.core.types import NestedKey
from tdfunc.nn.base import TensorDictModuleBase, as_key, dispatch

In = TypeVar("In")
Out = TypeVar("Out")


class TensorClassModuleBase(nn.Module, Generic[In, Out]):
    """A module whose forward takes an instance of one class and returns one of another.

    Subclasses name both as `TensorClassModuleBase[In, Out]`, which sets `input_type` and `output_type`.

    Raises:
        TypeError: A subclass does not name its classes.

    Examples:
        >>> class Point(tdf.TensorClass):
        ...     x: torch.Tensor
        >>> class Norm(tdf.TensorClass):
        ...     r: torch.Tensor
        >>> class Length(TensorClassModuleBase[Point, Norm]):
        ...     def forward(self, point):
        ...         return Norm(point.x.norm(dim=-1), batch_size=point.batch_size)
        >>> Length()(Point(torch.ones(2, 4), batch_size=[2])).r
        tensor([2., 2.])
        >>> Length().as_td_module()(TensorDict({"x": torch.ones(2, 4)}, [2])).paths()
        [('x',), ('r',)]
    """

    input_type: Any
    output_type: Any

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for base in getattr(cls, "__orig_bases__", ()):
            if get_origin(base) is TensorClassModuleBase:
                cls.input_type, cls.output_type = get_args(base)
        if not hasattr(cls, "input_type"):
            raise error(
                TypeError,
                f"{cls.__name__} does not name the classes that it takes and returns.",
                hint=f"class {cls.__name__}(TensorClassModuleBase[In, Out])",
            )

    def as_td_module(self) -> TensorDictModuleBase:
        """Return a module that reads the fields of `input_type` from a tree and adds the fields of `output_type`."""
        return _OnTrees(self)


class _OnTrees(TensorDictModuleBase):
    """A module of typed trees as a module of trees."""

    _is_traceable = False

    def __init__(self, module: TensorClassModuleBase[Any, Any]) -> None:
        super().__init__()
        self.tc_module = module
        self.in_keys = _keys_of(module.input_type)
        self.out_keys = _keys_of(module.output_type)

    @dispatch
    def forward(self, tensordict: Any) -> Any:
        """Return the tree with the fields of the module's result."""
        if tensordict._is_lazy:
            return tensordict._each(self.forward)
        fields = [field.name for field in self.tc_module.input_type.fields()]
        given = self.tc_module.input_type.from_tensordict(tensordict.select(*fields, strict=False))
        return tensordict.update(self.tc_module(given))


def _keys_of(cls: Any) -> list[NestedKey]:
    """Return the keys of the fields of a typed tree; a typed field gives nested keys."""
    keys: list[NestedKey] = []
    for name in cls._fields:
        hint = cls._hints.get(name)
        if isinstance(hint, type) and issubclass(hint, TensorClass):
            inner = _keys_of(hint)
        else:
            inner = [()]
        keys += [as_key((name, key) if key else name) for key in inner]
    return keys
