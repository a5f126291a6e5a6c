"""The plain twin of a module that FSDP2 or DistributedDataParallel has taken over: the same layers and tensors."""

import sys
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Under these names torch's composable functions keep their state in a module.
_STATE = "__composable_api"
# The hooks that FSDP2 registers.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")


class DataParallelTwin(nn.Module):
    """Runs the module inside a `DistributedDataParallel`, without its collectives."""

    def __init__(self, module: nn.Module, training: bool) -> None:
        super().__init__()
        self.module = module
        self.training = training

    # Any: the arguments of the module.
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output."""
        return self.module(*args, **kwargs)


def unsharded(module: nn.Module) -> nn.Module:
    """Return a module that runs only the layers; the module itself if nothing has wrapped them.

    Parameters and buffers are the same tensors under the same paths: under FSDP2, DTensors.
    """
    # Without an import, which is slow: before it no module is of that class.
    fsdp: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", DistributedDataParallel)
    modules = list(module.modules())
    if not any([isinstance(m, (fsdp, DistributedDataParallel)) for m in modules]):
        return module
    twins: dict[int, nn.Module] = {}
    # A module comes before those in it.
    for m in reversed(modules):
        if isinstance(m, DistributedDataParallel):
            twins[id(m)] = DataParallelTwin(twins[id(m.module)], m.training)
            continue
        cls = type(m)
        if isinstance(m, fsdp):
            # The class that `fully_shard` derived its own from; torch's FSDPModule also finds it so.
            cls = cls.__mro__[2]
        twins[id(m)] = _make_twin(m, cls, twins)
    return twins[id(module)]


def _make_twin(module: nn.Module, cls: type[nn.Module], twins: dict[int, nn.Module]) -> nn.Module:
    """Return a module of a class with the same tensors, the twins of the submodules, and no hooks of FSDP2."""
    twin: nn.Module = object.__new__(cls)
    kept = {name: value for name, value in module.__dict__.items() if not name.startswith(_STATE)}
    twin.__dict__.update(kept)
    for name in _HOOKS:
        hooks = {key: hook for key, hook in kept[name].items() if not _is_of_fsdp(hook)}
        twin.__dict__[name] = type(kept[name])(hooks)
    twin.__dict__["_modules"] = {name: child and twins[id(child)] for name, child in module._modules.items()}
    return twin


def _is_of_fsdp(hook: Any) -> bool:
    return type(getattr(hook, "__self__", hook)).__module__.startswith("torch.distributed.fsdp.")
