"""The state of random generators as a tree, which can be saved with the parameters."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Generator

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import TreeStructureError, UnsupportedError, error
from tdfunc.core.nontensor import NonTensorData

_GLOBAL = frozenset(("torch", "cuda", "python", "numpy"))


def get_rng_state(**generators: Generator) -> TensorCollection:
    """Return the state of the global random generators and of others, as a tree that can be saved.

    The global generators are torch's for the CPU and for each CUDA device in use, Python's and numpy's. The state of a
    generator of numpy, `generator.bit_generator.state`, is a plain object that a tree can contain.

    Args:
        generators: Further generators of torch by name.

    Returns:
        A tree with the entries `torch`, `cuda`, `python` and `numpy`, and one for each given generator.

    Raises:
        ValueError: A generator has the name of a global generator.

    Examples:
        >>> generator = torch.Generator().manual_seed(0)
        >>> state = tdf.get_rng_state(data=generator)
        >>> first = torch.rand(2), torch.rand(2, generator=generator)
        >>> tdf.set_rng_state(state, data=generator)
        >>> [bool((a == b).all()) for a, b in zip(first, (torch.rand(2), torch.rand(2, generator=generator)))]
        [True, True]
    """
    taken = sorted(_GLOBAL & generators.keys())
    if taken:
        raise error(ValueError, "get_rng_state: a generator must not have the name of a global one.", got=str(taken))
    devices = 0
    if torch.cuda.is_initialized():
        devices = torch.cuda.device_count()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "cuda": {str(i): torch.cuda.get_rng_state(i) for i in range(devices)},
        "python": _describe_python(random.getstate()),
        "numpy": _describe_numpy(np.random.get_state(legacy=True)),
    }
    for name, generator in generators.items():
        found[name] = generator.get_state()
    return TensorCollection._open(found)


def set_rng_state(state: TensorCollection, **generators: Generator) -> None:
    """Restore the state of the global generators and of others.

    Args:
        state: The tree that `get_rng_state` returned.
        generators: The generators that were given to `get_rng_state`, by the same names.

    Raises:
        TreeStructureError: The tree and the call have different generators.
        UnsupportedError: A generator is of another kind or version than the saved one, or the state has more CUDA
            devices than this machine. No generator has changed.
    """
    found = set(state._data)
    given = {*_GLOBAL, *generators}
    if found != given:
        raise TreeStructureError(
            "set_rng_state: the state and the call have different generators.",
            expected=", ".join(sorted(found)),
            got=", ".join(sorted(given)),
            hint="give the generators by the names that get_rng_state had.",
        )
    before = get_rng_state(**generators)
    try:
        _write(state, generators)
    except BaseException:
        _write(before, generators)
        raise


def _write(state: TensorCollection, generators: Mapping[str, Generator]) -> None:
    what = "global generators"
    try:
        cuda = state._data["cuda"]._data
        numpy = state._data["numpy"]._data
        devices = 0
        if cuda:
            devices = torch.cuda.device_count()
        if len(cuda) > devices:
            raise UnsupportedError(
                "set_rng_state: the state has more CUDA devices than this machine.",
                expected=str(len(cuda)),
                got=str(devices),
            )
        torch.set_rng_state(_bytes(state._data["torch"]))
        for i, value in cuda.items():
            torch.cuda.set_rng_state(_bytes(value), int(i))
        random.setstate(_python_state(state._data["python"]))
        np.random.set_state((numpy["kind"].data, numpy["keys"].cpu().numpy(), *numpy["rest"].data))
        for name, generator in generators.items():
            what = f"generator {name}"
            generator.set_state(_bytes(state._data[name]))
    except UnsupportedError:
        raise
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as err:
        raise UnsupportedError(
            f"set_rng_state: the state does not fit the {what}.",
            expected="the state that get_rng_state returned for it",
            got=f"{type(err).__name__}: {err}"[:300],
        ) from err


def _describe_python(state: tuple[Any, ...]) -> dict[str, Any]:
    version, words, gauss = state
    return {
        "version": NonTensorData(version),
        "words": torch.tensor(words, device="cpu"),
        "gauss": NonTensorData(gauss),
    }


def _describe_numpy(state: Any) -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = state
    return {
        "kind": str(kind),
        "keys": torch.from_numpy(np.array(keys, dtype=np.uint32)),
        "rest": NonTensorData([int(position), int(has_gauss), float(gauss)]),
    }


def _python_state(state: TensorCollection) -> tuple[int, tuple[int, ...], float | None]:
    data = state._data
    return (data["version"].data, tuple(data["words"].tolist()), data["gauss"].data)


def _bytes(state: torch.Tensor) -> torch.Tensor:
    # A copy, because torch keeps the given tensor.
    return state.detach().cpu().clone()
