"""Where the caller runs: eager, or inside a compiler, a transform of torch.func, or a mode that sees every operation.

Every test of this kind in the package is one of these predicates; each says when to use it. Modes use `is_random`. The
locks of the package are made here, because the caller may be in a forked process.
"""

import threading
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from tdfunc.core.system import platform

# torch has no public names for these.
_peek: Callable[[], Any] = _functorch.peek_interpreter_stack
_count_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_PROXY = torch._C._TorchDispatchModeKey.PROXY

# While dynamo or export reads the Python source. Use it around code that dynamo cannot read, such as C methods passed
# to `map` or a change of class. Under its own name: the lookup in torch.compiler costs as much as the call.
is_compiling: Callable[[], bool] = torch.compiler.is_compiling


T = TypeVar("T")
# Any: the class of reentrant locks has no name, and its methods for forks are not in the stubs.
_locks: "weakref.WeakSet[Any]" = weakref.WeakSet()


def make_lock() -> Any:
    """Return a reentrant lock; in a process that is forked while another thread has it, it is free.

    The thread that would give it up is missing there. So the process (a worker of a DataLoader, for example) would
    wait for ever.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


class cached_property(Generic[T]):
    """An attribute that is computed when it is first read, without a lock.

    Before Python 3.12, the one of functools has a lock for all objects of a class. A process that is forked while
    another thread has it would wait for ever.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function = function
        self._name = ""
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> "cached_property[T]": ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    # The next read finds the value in the object itself, since this class has no __set__.
    def __get__(self, instance: object | None, owner: type) -> "cached_property[T] | T":
        if instance is None:
            return self
        value = self._function(instance)
        instance.__dict__[self._name] = value
        return value


def _free_locks() -> None:
    for lock in list(_locks):
        # The thread that forks continues in both processes, and gives up its locks itself.
        if not lock._is_owned():
            lock._at_fork_reinit()


platform.call_in_forks(_free_locks)


def in_functorch() -> bool:
    """Return True if `vmap`, `grad` or `jvp` of torch.func runs the caller.

    Use it for kernels without a vmap rule (`torch._foreach_*`), and where a new tensor would be wrapped.
    """
    return _peek() is not None


# Dynamo runs it while it traces. torch.compiler.assume_constant_result also sets this mark, and imports all of dynamo.
in_functorch._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def in_vmap() -> bool:
    """Return True if a `vmap` runs the caller, at any level; dynamo reads False.

    Use it for functions that torch cannot batch.
    """
    # Where dynamo leaves a forward to Python (recurrent layers), it reads this function alone, and not the last line.
    if is_compiling() or _peek() is None:
        return False
    return any([level.key() == _functorch.TransformType.Vmap for level in _functorch.get_interpreter_stack()])


def is_tracing() -> bool:
    """Return True if a dispatch mode (make_fx, `jit`, FakeTensorMode) sees every operation of the caller.

    Use it where an operation whose result is thrown away would be recorded.
    """
    return _count_modes() > 0


def is_recording() -> bool:
    """Return True if a graph of the caller's operations is made: make_fx, export or `jit`.

    Use it before branching on a value: the graph would hold one branch.
    """
    return torch._C._get_dispatch_mode(_PROXY) is not None


def is_known(tensor: Tensor) -> bool:
    """Return True if Python may read the value of this tensor, which may come from outside of a `vmap` that runs.

    Use it where a branch on one tensor is better than a rule for all.
    """
    if torch.compiler.is_dynamo_compiling() or is_recording():
        return False
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return False
        tensor = _functorch.get_unwrapped(tensor)
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def in_transform() -> bool:
    """Return True if tensors made here cannot outlive the code that runs: a transform, dual level, trace or compiler.

    Use it before keeping a tensor (in a module, a cache), and before decisions that a replay would not repeat.
    """
    if is_compiling() or in_functorch():
        return True
    return forward_ad._current_level >= 0 or is_recording()


def has_values() -> bool:
    """Return True if the values of tensors may be read here: no transform, trace or compiler runs the caller.

    Use it for checks of values. A tensor on the meta device has none anywhere.
    """
    return not in_transform() and not is_tracing()


# Any: the call of `jit`'s recorder, which is in a higher layer.
def deferral() -> Callable[[Callable[[list[Tensor]], list[Tensor]], Callable[[], Tensor], list[Tensor]], Tensor] | None:
    """Return `make(fn, like, reads)` of the trace that the caller runs in, if it takes deferred calls.

    Use it for work on real tensors that a replay does as one operation: `fn(reads)` returns a list of one new tensor,
    like the one that `like()` returns.
    """
    if is_compiling() or not is_tracing():
        return None
    modes: list[Any] = [mode for mode in _get_current_dispatch_mode_stack() if getattr(mode, "deferred", False)]
    if modes:
        return modes[-1].make
    return None


def recorded_writes() -> list[int]:
    """Return the storages that operations of the trace that the caller runs in wrote so far; empty if none notes them.

    Use it to find the tensors that code writes where they have no values. The list grows.
    """
    for mode in _get_current_dispatch_mode_stack():
        writes = getattr(mode, "writes", None)
        if writes is not None:
            return writes
    return []


def is_fake(device: torch.device | None) -> bool:
    """Return True if tensors made for this device have no values: it is meta, or a FakeTensorMode is active.

    Use it before reading bytes for a tensor, and before mapping a file under one.
    """
    return (device is not None and device.type == "meta") or type(torch.empty(0, device="cpu")) is not Tensor


@contextmanager
def outside() -> Generator[None]:
    """Run the code inside as if no transform, trace or mode ran the caller.

    Use it for operations on tensors that are unrelated to the caller's tensors.
    """
    with _disable_current_modes(), temporarily_clear_interpreter_stack(), torch._C.DisableTorchFunction():
        yield


# Any: the arguments of an operation, or the nodes of a graph that stand for them.
def is_random(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a call of an operation draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for i, argument in enumerate(func._schema.arguments):
        # Attention and recurrent layers are tagged as random whether they drop anything or not.
        if argument.name in ("dropout_p", "dropout", "train", "training"):
            if i < len(args):
                given = args[i]
            else:
                given = kwargs.get(argument.name, argument.default_value)
            if isinstance(given, (float, bool)) and not given:
                return False
    return True


def require_values(holds: Tensor, failure: Callable[[], Exception]) -> None:
    """Raise an error unless a condition holds everywhere: for all members under `vmap`, at each replay of a trace.

    Use it for checks of values inside transforms. A replay raises RuntimeError; compiled code checks nothing.
    """
    if is_compiling():
        return
    while _functorch.is_functorch_wrapped_tensor(holds):
        holds = _functorch.get_unwrapped(holds)
    if is_recording():
        torch.ops.aten._assert_async.msg(holds.all(), str(failure()))
    elif is_known(holds) and not bool(holds.all()):
        raise failure()
