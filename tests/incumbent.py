"""tensordict, without what its import does to torch: it replaces parts of `torch.vmap` for the whole process."""

import torch._functorch.vmap as torch_vmap

_REPLACED = ("_process_batched_inputs", "_create_batched_inputs", "_unwrap_batched")
_ORIGINALS = {name: getattr(torch_vmap, name) for name in _REPLACED}

import tensordict  # noqa: E402

for _name, _function in _ORIGINALS.items():
    setattr(torch_vmap, _name, _function)

Incumbent = tensordict.TensorDict
IncumbentBase = tensordict.TensorDictBase
IncumbentNonTensor = (tensordict.NonTensorData, tensordict.NonTensorStack)
incumbent_class = tensordict.tensorclass
