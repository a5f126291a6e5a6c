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
from tdfunc.lora.layers import Adapted, Setting
from tdfunc.lora.math import factors, gain


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
        x = hidden_states[routes.tokens_S]
        if self.has_gate:
            x = own._apply_gate(self._project("gate_up_proj", x, routes))
        else:
            x = own.act_fn(self._project("up_proj", x, routes))
        x = self._project("down_proj", x, routes)
        if self.has_post_expert_norm:
            x = own.post_expert_norm(x)
        x = x * top_k_weights.reshape(-1)[order_S][:, None]
        if ends_E is not None:
            # Back from the order of the experts to the order of the tokens.
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
            out = (out + self._low(name, setting, x, out, routes)).to(out.dtype)
        if not self.has_bias:
            return out
        bias = self._parameters[f"{name}_bias"]
        if bias is None:
            return out
        return out + bias[routes.experts_S]

    def _low(self, name: str, setting: Setting, x: Tensor, out: Tensor, routes: _Routes) -> Tensor:
        """Return the part of the adapter of one weight, given the inputs and the part of the weight."""
        weight: Any = self._parameters[name]
        dropped = x
        if setting.dropout and self.training:
            dropped = F.dropout(x, setting.dropout)
        given: dict[str, Any] = {part: self._parameters[f"{name}:{part}"] for part in setting.names}
        # Factors and inputs meet in the wider dtype of the two.
        wide = torch.promote_types(given["A"].dtype, x.dtype)
        parts: dict[str, Tensor] = {part: value.to(wide) for part, value in given.items()}
        if setting.rows:
            factored = _factor_rows(setting, parts, routes)
        else:
            factored = _factor_experts(parts, routes)
        if self.is_transposed:
            first = factored.b
            second = factored.a
        else:
            first = factored.a.mT
            second = factored.b.mT
        inner = _times(dropped.to(wide), first, factored.routes) * setting.scale
        low = _times(inner, second, factored.routes)
        if "magnitude" not in parts:
            return low
        gain_of = functools.partial(gain, weight, scale=setting.scale)
        if setting.rows:
            gain_of = torch.vmap(gain_of)
        c = gain_of(parts)[factored.at]
        if dropped is not x:
            matrix = weight if self.is_transposed else weight.mT
            out = _times(dropped, matrix, routes)
        return c * low + (c - 1) * out


class _Factored(NamedTuple):
    """The factors of one weight's adapters, and the pairs that use them.

    Attributes:
        a: A of each expert, or of each pair.
        b: B of each expert, or of each pair.
        routes: The pairs, whose experts are the numbers of these factors.
        at: The index of the adapter of each pair in a tensor of all adapters.
    """

    a: Tensor
    b: Tensor
    routes: _Routes
    at: Tensor | tuple[Tensor, Tensor]


def _factor_rows(setting: Setting, parts: dict[str, Tensor], routes: _Routes) -> _Factored:
    """Return the factors of adapters of which each has a row of tokens: a matrix for each pair."""
    rows = parts["A"].shape[0]
    if routes.num_tokens % rows:
        raise LeafMismatchError(
            f"lora: the tokens of {dotted(setting.path)!r} do not come row by row.",
            expected=f"a multiple of {rows} tokens",
            got=f"{routes.num_tokens} tokens",
        )
    # The tokens come row by row, as many in each row.
    rows_S = routes.tokens_S // (routes.num_tokens // rows)
    # The adapter of each pair: the row of its token, and its expert.
    at = (rows_S, routes.experts_S)
    a, b = torch.vmap(factors)(parts)
    pairs = torch.arange(len(routes.experts_S), device=routes.experts_S.device)
    return _Factored(a[at], b[at], routes._replace(ends_E=None, experts_S=pairs), at)


def _factor_experts(parts: dict[str, Tensor], routes: _Routes) -> _Factored:
    """Return the factors of one adapter: a matrix for each expert."""
    a, b = factors(parts)
    more = 0
    if routes.ends_E is not None:
        # The kernel takes strides of whole 16 bytes.
        more = -a.shape[-2] % (16 // a.element_size())
    return _Factored(F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more)), routes, routes.experts_S)


def _times(x: Tensor, matrices: Tensor, routes: _Routes) -> Tensor:
    """Return each input times the matrix of its expert."""
    if routes.ends_E is None:
        return (x[:, None] @ matrices[routes.experts_S])[:, 0]
    # It takes torch's kernel where that can run.
    from transformers.integrations.moe import _grouped_mm  # pyright: ignore[reportMissingImports]

    return _grouped_mm(x, matrices, routes.ends_E)
