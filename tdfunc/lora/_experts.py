"""Fused experts of transformers with adapters: a token goes to some experts, whose matrices are factored.

S pairs of a token and an expert, E experts, R rows.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tdfunc.core.errors import LeafMismatchError
from tdfunc.core.keys import dotted
from tdfunc.lora._layers import Adapted
from tdfunc.lora._math import factors, gain


@functools.cache
def experts_class(cls: type[Any]) -> type[Any]:
    """Return the class of fused experts with adapters."""
    return type(f"Lora{cls.__name__}", (_Experts, cls), {})


class _Routes(NamedTuple):
    """The pairs of a token and an expert."""

    experts_S: Tensor
    tokens_S: Tensor
    num_tokens: int
    # The end of each expert's pairs, where these are sorted by expert; else each pair gathers its matrices.
    ends_E: Tensor | None


class _Experts(Adapted):
    """Fused experts: each pair gathers its matrices (`batched_mm`), or pairs are sorted by expert (`grouped_mm`)."""

    # Attributes of the classes that transformers decorates.
    config: Any
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    has_post_expert_norm: bool
    num_experts: int

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        own: Any = self
        num_tokens, top_k = top_k_index.shape
        experts_S = top_k_index.reshape(-1)
        order_S = torch.arange(num_tokens * top_k, device=experts_S.device)
        ends_E = None
        # The kernel for sorted pairs does not take float64.
        if self.config._experts_implementation != "batched_mm" and hidden_states.dtype is not torch.float64:
            order_S = torch.argsort(experts_S, stable=True)
            experts_S = experts_S[order_S]
            numbers = torch.arange(self.num_experts, device=experts_S.device)
            ends_E = (experts_S[:, None] == numbers).sum(0).cumsum(0).to(torch.int32)
        routes = _Routes(experts_S, order_S // top_k, num_tokens, ends_E)
        x = self._project("gate_up_proj" if self.has_gate else "up_proj", hidden_states[routes.tokens_S], routes)
        if self.has_gate:
            x = own._apply_gate(x)
        else:
            x = own.act_fn(x)
        x = self._project("down_proj", x, routes)
        if self.has_post_expert_norm:
            x = own.post_expert_norm(x)
        x = x * top_k_weights.reshape(-1)[order_S][:, None]
        if ends_E is not None:
            x = x[torch.argsort(order_S)]
        return x.unflatten(0, (num_tokens, top_k)).sum(1).to(hidden_states.dtype)

    def _project(self, name: str, x: Tensor, routes: _Routes) -> Tensor:
        """Return the inputs times the matrices of their experts, with the part of the adapter."""
        weight = self._parameters[name]
        setting = self._lora.get(name)
        assert weight is not None
        matrix = weight if self.is_transposed else weight.mT
        out = _times(x, matrix, routes)
        if setting is not None:
            parts: dict[str, Any] = {part: self._parameters[f"{name}:{part}"] for part in setting.names}
            dropped = F.dropout(x, setting.dropout) if setting.dropout and self.training else x
            # Factors and inputs meet in the wider dtype of the two.
            wide = torch.promote_types(parts["A"].dtype, x.dtype)
            parts = {part: value.to(wide) for part, value in parts.items()}
            if setting.rows:
                n = parts["A"].shape[0]
                if routes.num_tokens % n:
                    raise LeafMismatchError(
                        f"lora: the tokens of {dotted(setting.path)!r} must come row by row.",
                        expected=f"a multiple of {n} tokens",
                        got=f"{routes.num_tokens} tokens",
                    )
                # A matrix for each pair, by its row and its expert.
                at = (routes.tokens_S // (routes.num_tokens // n), routes.experts_S)
                a, b = (matrices[at] for matrices in torch.vmap(factors)(parts))
                one = routes._replace(ends_E=None, experts_S=torch.arange(len(at[1]), device=x.device))
            else:
                at = routes.experts_S
                one = routes
                a, b = factors(parts)
                # The kernel takes strides of whole 16 bytes.
                more = 0
                if routes.ends_E is not None:
                    more = -a.shape[-2] % (16 // a.element_size())
                a = F.pad(a, (0, 0, 0, more))
                b = F.pad(b, (0, more))
            if self.is_transposed:
                first, second = (b, a)
            else:
                first, second = (a.mT, b.mT)
            low = _times(_times(dropped.to(wide), first, one) * setting.scale, second, one)
            if "magnitude" in parts:
                scaled = functools.partial(gain, weight, scale=setting.scale)
                c = (torch.vmap(scaled)(parts) if setting.rows else scaled(parts))[at]
                low = c * low + (c - 1) * (out if dropped is x else _times(dropped, matrix, routes))
            out = (out + low).to(out.dtype)
        bias = None
        if self.has_bias:
            bias = self._parameters[f"{name}_bias"]
        if bias is None:
            return out
        return out + bias[routes.experts_S]


def _times(x: Tensor, matrices: Tensor, routes: _Routes) -> Tensor:
    """Return each input times the matrix of its expert."""
    if routes.ends_E is None:
        return (x[:, None] @ matrices[routes.experts_S])[:, 0]
    # It takes torch's kernel where that can run.
    from transformers.integrations.moe import _grouped_mm  # pyright: ignore[reportMissingImports]

    return _grouped_mm(x, matrices, routes.ends_E)
