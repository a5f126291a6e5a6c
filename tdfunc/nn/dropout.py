"""`with_dropout_rates`: the rates of a module's dropout layers as leaves of its tree."""

from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from tdfunc.core.errors import UnsupportedError, brief, explain, warn_user
from tdfunc.modules.skeletons.copies import duplicate

M = TypeVar("M", bound=nn.Module)


def with_dropout_rates(module: M) -> M:
    """Return a copy of a module whose dropout layers hold their rate as a buffer `p`.

    The rates are then leaves of the tree of buffers: each member of an ensemble can have its own, and a change does not
    record a new trace in `tdfunc.jit`. `buffers.at[tdf.Filter("*.p")].set(rates)` sets them. Rates in attributes of
    other modules, such as the `dropout` of `nn.MultiheadAttention`, remain numbers; a warning names them.

    Args:
        module: A module with `nn.Dropout`, `nn.Dropout1d`, `nn.AlphaDropout` or a similar layer.

    Raises:
        UnsupportedError: The module has no dropout layer.

    Examples:
        >>> make = lambda: with_dropout_rates(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Linear(8, 2)))
        >>> apply, params, buffers = tdf.functional(make())
        >>> buffers["1", "p"]
        tensor(0.1000)
        >>> params, buffers = tdf.split(tdf.init_ensemble(make, 3))
        >>> buffers = buffers.at[tdf.Filter("*.p")].set(torch.tensor([0.0, 0.2, 0.5]))
        >>> tdf.Ensemble(apply.train())(params, torch.zeros(5, 3), buffers=buffers, rng=0).shape
        torch.Size([3, 5, 2])
    """
    new = duplicate(module, {})
    layers = [part for part in new.modules() if isinstance(part, _DropoutNd)]
    if not layers:
        raise UnsupportedError(
            "with_dropout_rates: the module has no dropout layer.",
            expected="nn.Dropout and its kin",
            got=brief(sorted({type(part).__name__ for part in new.modules()})),
            hint="pass a rate as an argument of forward, and to F.dropout.",
        )
    for layer in layers:
        if "p" not in layer._buffers:
            rate = layer.p
            del layer.p
            layer.register_buffer("p", torch.tensor(rate))
    left = _rates_left(new)
    if left:
        warn_user(
            explain(
                "with_dropout_rates: these rates are not of dropout layers, and remain numbers for all members.",
                got=brief(left),
                hint="set them to 0 before the call, or write the layer with an nn.Dropout.",
            )
        )
    return new  # pyright: ignore[reportReturnType]


def _rates_left(module: nn.Module) -> list[str]:
    """Return the attributes of a module and its parts that are called a dropout, with their rates, where these drop."""
    left: list[str] = []
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if "dropout" in name and isinstance(value, float) and value > 0:
                left.append(f"{path}.{name}={value}".lstrip("."))
    return left
