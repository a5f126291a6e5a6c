"""`jit`, with its options."""

from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar, overload

from tdfunc._jit.call import Jitted
from tdfunc._jit.chunked import Chunked, ChunkSize, InDims
from tdfunc.core.errors import as_count, check_choice, check_least, error

P = ParamSpec("P")
R = TypeVar("R")
Captures: TypeAlias = Literal["refused", "constants"]


@overload
def jit(
    fn: Callable[P, R],
    *,
    backend: str | Callable[..., Any] | None = None,
    cache_size: int = 64,
    captures: Captures = "refused",
    keep_bytes: int | None = None,
    chunk_size: None = None,
    in_dims: None = None,
) -> Jitted[P, R]: ...
@overload
def jit(
    fn: None = None,
    *,
    backend: str | Callable[..., Any] | None = None,
    cache_size: int = 64,
    captures: Captures = "refused",
    keep_bytes: int | None = None,
    chunk_size: None = None,
    in_dims: None = None,
) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...
@overload
def jit(
    fn: Callable[P, R],
    *,
    backend: str | Callable[..., Any] | None = None,
    cache_size: int = 64,
    captures: Captures = "refused",
    keep_bytes: int | None = None,
    chunk_size: ChunkSize,
    in_dims: InDims,
) -> Chunked[P, R]: ...
@overload
def jit(
    fn: None = None,
    *,
    backend: str | Callable[..., Any] | None = None,
    cache_size: int = 64,
    captures: Captures = "refused",
    keep_bytes: int | None = None,
    chunk_size: ChunkSize,
    in_dims: InDims,
) -> Callable[[Callable[P, R]], Chunked[P, R]]: ...
def jit(
    fn: Any = None,
    *,
    backend: str | Callable[..., Any] | None = None,
    cache_size: int = 64,
    captures: Captures = "refused",
    keep_bytes: int | None = None,
    chunk_size: ChunkSize | None = None,
    in_dims: InDims | None = None,
) -> Any:
    """Record a function of tensors and trees once for each kind of arguments, and replay the record from then on.

    The first call runs the function on fake tensors and records every operation; no compiler is needed. A replay
    skips Python, `torch.vmap` and `torch.func.grad`, which cost more than the arithmetic of small models.

    The function is recorded anew when any of these change:

    - the structure, batch sizes, devices, names, kinds and key order of trees;
    - shapes, strides, dtypes, devices, `requires_grad` and identity of tensors, and other arguments;
    - Python values that the code of the function reads: closure cells, defaults, globals, attributes (`cfg.lr`,
      `self.cfg.lr`), and the mode of modules among these. The code of functions and methods of its package counts, and
      the forward of modules;
    - grad mode, autocast, default dtype and device, deterministic algorithms;
    - values that the function reads (`if`, `.item()`, `.tolist()`), if they depend only on integers and booleans among
      the arguments, such as tokens and masks. Each call computes these values first, to find its record.

    Libraries that call `torch.compiler.is_compiling()` get the answer yes while a record is made. Tensors in plain
    attributes of the module of a pure function (`tdf.functional`) are constants of the record.

    State that the function reaches in another way (`getattr`, `__getattr__`, attributes of items and of results,
    containers and arrays of over 1000 items, files, the clock), or changes itself, is read once, and its side effects
    happen once. Every replay draws torch's random numbers anew.

    Gradients are taken inside the function: its results are not differentiable.

    Args:
        fn: A function that returns tensors, trees, numbers, or containers of these. Without it, a decorator with
            these options.
        backend: A backend of `torch.compile` that the record is handed to. Or, experimental, `"cudagraphs"`: the
            record is captured once as a CUDA graph, and a call launches it as a whole. It takes tensors on one GPU,
            random draws by keys, and nothing that waits for the device. Results are copies; donated leaves are written
            in place, and the record keeps them alive. Not run yet on a GPU.
        cache_size: The number of records to keep; the one not used for longest goes first. Where calls are of more
            kinds, further ones run the function itself, with a warning that names the dimension that varies: pad it, or
            use batch sizes that divide the data.
        captures: The treatment of tensors that the function uses besides its arguments: `refused`, or kept as
            `constants` of the record. If the variable, attribute or module of a constant holds another tensor, the
            function is recorded anew. If a constant was written, the call raises.
        keep_bytes: The most bytes of large blocks (16 MB and more, on the CPU) that are kept for the next calls, or 0
            for none. By default they are what the results of two calls and all intermediate results take, in the
            record that takes most. A block is used again when nothing else refers to its memory, and `cache_clear()`
            frees them.
        chunk_size: The number of members to compute at a time, or "auto". Where the activations of all members leave
            the processor's cache, fewer at a time are faster, and need less memory; "auto" chooses by the largest
            activation. The results are equal, to the last bit where a member is computed alike among any others. The
            first call raises an error if the results of one member depend on another member.
        in_dims: With `chunk_size`, 0 or None for each positional argument, as for `torch.vmap`: 0 for trees and tensors
            with the members along their first dimension. All results have them there.

    Returns:
        The function, with `cache_info()`, `cache_clear()` and `graph(*args)`.

    Raises:
        CaptureError: The function uses tensors that are not among its arguments; the message names all of them. Or
            a captured constant was written since it was recorded.
        ImmutableError: The function writes to an argument in place, other than through `donate=True`.
        UnsupportedError: An argument requires grad while grad mode is on; the function uses the value of a parameter,
            of another float or of an intermediate result; it reads `.grad` or `.storage_offset()` of an argument; it
            assigns to `.data`; it seeds a generator, or draws from numpy's or Python's; it keeps a tensor outside of
            its result; an argument cannot be part of the key; a result cannot be made again.
        BatchSizeError: With `chunk_size`, the arguments do not have one number of members, or a result does not have
            them along its first dimension.
        ConcurrencyError: Another thread assigned a closure's variable or a global during the first call.

    Examples:
        >>> @tdf.jit
        ... def member_grads(params, x):
        ...     loss = lambda p: (x @ p["w"]).square().mean()
        ...     return torch.vmap(torch.func.grad(loss))(params)
        >>> params = TensorDict({"w": torch.ones(4, 3)}, [4])
        >>> member_grads(params, torch.ones(2, 3))["w"].shape
        torch.Size([4, 3])
        >>> member_grads(params, torch.zeros(2, 3)) is not None, member_grads.cache_info().misses
        (True, 1)
    """
    check_least("jit: cache_size", cache_size)
    check_choice("jit: captures", captures, ("refused", "constants"))
    if keep_bytes is not None:
        check_least("jit: keep_bytes", keep_bytes, 0)
    _check_chunks(chunk_size, in_dims)

    def wrap(fn: Any) -> Any:
        jitted = Jitted(fn, backend, cache_size, constants=captures == "constants", keep_bytes=keep_bytes)
        if chunk_size is None or in_dims is None:
            return jitted
        return Chunked(jitted, chunk_size, in_dims)

    if fn is None:
        return wrap
    return wrap(fn)


def _check_chunks(chunk_size: Any, in_dims: Any) -> None:
    if (chunk_size is None) != (in_dims is None):
        raise error(
            ValueError,
            "jit: chunk_size and in_dims are given together.",
            got=f"chunk_size={chunk_size!r}, in_dims={in_dims!r}",
            hint="in_dims has 0 for each positional argument that holds members, and None for others.",
        )
    if in_dims is not None and (not isinstance(in_dims, tuple) or any([dim not in (0, None) for dim in in_dims])):
        raise error(
            ValueError,
            "jit: in_dims is a tuple of 0 and None.",
            got=repr(in_dims),
            hint="members are along the first dimension: move it there by x.movedim(dim, 0).",
        )
    if chunk_size is not None and chunk_size != "auto":
        as_count("jit: chunk_size", chunk_size)
