"""`CausalLM`: a Hugging Face language model as a frozen value, apart from its tree of parameters.

The pure functions of this package need both: the `CausalLM` contains the structure and the rules of the model family,
the tree contains all tensors. Only this module reads the attributes of the models.
"""

import copy as copying
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from tdfunc.core.context import is_compiling, is_recording
from tdfunc.core.errors import UnsupportedError, error
from tdfunc.core.types import Path
from tdfunc.llm.scoring.head import Head
from tdfunc.lora import Lora, LoraApply
from tdfunc.modules.functional import Apply, functional

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

# The separation of rows that are packed into one: by positions that begin anew ("positions"), or by a mask of pairs
# ("mask"). Other families are scored in batches of rows of one length.
PACKING = {
    "falcon": "mask",
    "gemma2": "positions",
    "gemma3_text": "positions",
    "glm4_moe": "positions",
    "gpt2": "positions",
    "gpt_neox": "positions",
    "llama": "positions",
    "mistral": "positions",
    "olmo3": "positions",
    "opt": "mask",
    "phi3": "positions",
    "qwen2": "positions",
    "qwen3": "positions",
    "qwen3_moe": "positions",
    "smollm3": "positions",
}


@dataclass(frozen=True)
class CausalLM:
    """The structure of a language model and the rules of its family; made by `causal_lm`.

    Attributes:
        apply: The function that runs functions of the model on a tree of its parameters.
        family: The `model_type` of its configuration.
        head: The steps from hidden states to logits; None if they are unknown, so that all logits are computed at once.
        packing: "positions", "mask", or None if rows cannot be packed.
        max_length: The length up to which positions were trained, or None.
        extendable: True if longer rows can run (rotary positions); their results are not trained.
        by_length: True if rows of different lengths change each other's results and are scored apart.
        first_length: With `by_length`, the length up to which positions do not depend on the longest row.
        eos_ids: The tokens that end a response, from the model's `generation_config`.
        packed: Let several short rows share one row of the batch, if the family allows it; see `explain_scoring`.
        allow_long: Run rows that are longer than the training length of the model, if the model can.
        chunk_size: The number of positions whose logits exist at the same time; None to choose by the vocabulary.
    """

    apply: Apply | LoraApply
    family: str
    head: Head | None
    packing: str | None
    max_length: int | None
    extendable: bool
    by_length: bool
    first_length: int
    eos_ids: tuple[int, ...]
    packed: bool = False
    allow_long: bool = False
    chunk_size: int | None = None

    def with_options(
        self, *, packed: bool | None = None, allow_long: bool | None = None, chunk_size: int | None = None
    ) -> "CausalLM":
        """Return the model with other options; an option that is None does not change.

        Args:
            packed: Let several short rows share one row of the batch, if the family allows it.
            allow_long: Run rows that are longer than the training length of the model, if the model can.
            chunk_size: The number of positions whose logits exist at the same time.
        """
        given = {"packed": packed, "allow_long": allow_long, "chunk_size": chunk_size}
        changes = {name: value for name, value in given.items() if value is not None}
        return replace(self, **changes)

    def train(self, mode: bool = True) -> "CausalLM":
        """Return the model in training mode, in which `rng=` controls dropout."""
        return replace(self, apply=self.apply.train(mode))

    def with_adapters(self, lora: Lora, *, rows: bool = False) -> "CausalLM":
        """Return the model with adapters, as `lora.attach(lm)` does; its parameters are the pair `(params, adapters)`.

        Raises:
            UnsupportedError: `rows` is True: rows of tokens are compacted and sorted before they run.
        """
        if rows:
            raise UnsupportedError(
                "attach: the rows of a CausalLM cannot each have an adapter.",
                got="rows=True",
                hint="score the rows of each adapter apart, or map over the adapters with torch.vmap.",
            )
        run = LoraApply(lora, self.apply, False)  # pyright: ignore[reportArgumentType]
        # The head runs in chunks only without an adapter.
        path = self._head_path()
        head = self.head
        if path is not None and run.has_adapter(path):
            head = None
        return replace(self, apply=run, head=head)

    def _head_path(self) -> Path | None:
        """Return the path of the module of a known head, or None."""
        if self.head is None:
            return None
        module: Any = self.apply.module
        output = module.get_output_embeddings()
        name = next((name for name, layer in module.named_modules() if layer is output), "")
        return tuple(name.split(".")) if name else None

    def base_of(self, params: Any) -> "tuple[CausalLM, Any]":
        """Return the model without adapters, and its parameters."""
        if isinstance(self.apply, LoraApply):
            return replace(self, apply=self.apply._base), params[0]
        return self, params

    # Any: the function's arguments and result.
    def run(self, params: Any, fn: Callable[..., Any], *args: Any, buffers: Any = None, rng: Any = None) -> Any:
        """Return `fn(model, *args)` on a private model with these parameters."""
        return self.apply.call(params, (fn, *args), buffers=buffers, rng=rng)


def check_lm(call: str, lm: object) -> None:
    """Raise if `lm` is not a `CausalLM`, for example the model itself."""
    if isinstance(lm, CausalLM):
        return
    raise error(
        TypeError,
        f"{call}: the model is not a CausalLM.",
        got=f"a {type(lm).__name__}",
        hint="lm, params, buffers = causal_lm(model); with adapters lora.attach(lm).",
    )


def causal_lm(model: nn.Module, *, copy: bool = True) -> "tuple[CausalLM, TensorDict, TensorDict]":
    """Return a language model as a `CausalLM`, with its parameters and buffers as trees.

    The head of the model is compared with the steps of `Head` on random tokens. If they agree, log-probs are computed
    without the logits of all positions. The `CausalLM` is in evaluation mode.

    Args:
        model: A causal model of transformers.
        copy: Copy the leaves; otherwise the trees share the model's storage.

    Raises:
        TypeError: The model has no configuration.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20)
        >>> lm, params, buffers = causal_lm(GPT2LMHeadModel(config))
        >>> lm.family, lm.head
        ('gpt2', Head(scale=1.0, softcap=None))
    """
    # Any: transformers is optional.
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise error(
            TypeError,
            "causal_lm: the model is not a causal language model of transformers.",
            expected="a module with a config, such as from AutoModelForCausalLM",
            got=type(model).__name__,
        )
    config = config.get_text_config()
    # The class alone differs, so that the tree has the paths of the model.
    host = copying.copy(model)
    host.__class__ = type(type(model).__name__, (type(model),), {"__call__": _run})
    apply, params, buffers = functional(host, copy=copy)
    lm = CausalLM(
        apply=apply.eval(),
        family=config.model_type,
        head=None,
        packing=_packing_of(config),
        **_positions_of(config)._asdict(),
        eos_ids=_eos_ids(model),
    )
    # The head alone would leave out hooks of the whole model.
    if not model._forward_hooks and not model._forward_pre_hooks:
        lm = replace(lm, head=_find_head(lm, params, buffers, config))
    return lm, params, buffers


class _Positions(NamedTuple):
    """The fields of a `CausalLM` about positions."""

    max_length: int | None
    extendable: bool
    by_length: bool
    first_length: int


# Any: transformers is optional.
def _positions_of(config: Any) -> _Positions:
    rope = getattr(config, "rope_parameters", None) or {}
    # Each kind of layer may have its own parameters.
    rope_parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    kinds = [part.get("rope_type") for part in rope_parts]
    return _Positions(
        max_length=getattr(config, "max_position_embeddings", None),
        extendable=bool(rope),
        by_length="dynamic" in kinds or "longrope" in kinds,
        first_length=_first_length(config, rope_parts),
    )


# Any: transformers is optional.
def _packing_of(config: Any) -> str | None:
    """Return how a family keeps packed rows apart; None if it cannot."""
    if getattr(config, "alibi", False):
        return None
    return PACKING.get(config.model_type)


# Any: transformers is optional.
def _first_length(config: Any, rope_parts: list[dict[str, Any]]) -> int:
    """Return the length for which scaled positions were trained first, 0 if it is unknown."""
    name = "original_max_position_embeddings"
    found = [part.get(name) for part in rope_parts]
    found += [getattr(config, name, None), getattr(config, "max_position_embeddings", None)]
    return min([length for length in found if length], default=0)


# Any: transformers is optional.
def _eos_ids(model: Any) -> tuple[int, ...]:
    """Return the tokens that end a response, of which a model may have none, one or several."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if found is None:
        return ()
    if isinstance(found, list):
        return tuple(found)
    return (found,)


# Any: the arguments of a function of the model.
def _run(self: nn.Module, fn: Callable[..., Any], *args: Any) -> Any:
    return fn(self, *args)


# Any: the arguments and the output of a family.
def _call(model: nn.Module, **inputs: Any) -> Any:
    """Run the model's own forward, with its hooks."""
    return nn.Module.__call__(model, **inputs)


def _find_head(lm: CausalLM, params: Any, buffers: Any, config: Any) -> Head | None:
    """Return the steps that give the family's own logits on random tokens, if there are any."""
    divisor = getattr(config, "logits_scaling", None)
    if divisor:
        scale = 1.0 / divisor
    else:
        scale = getattr(config, "logit_scale", None) or 1.0
    head = Head(scale=scale, softcap=getattr(config, "final_logit_softcapping", None))
    ids = torch.randint(config.vocab_size, (2, 5), generator=torch.Generator().manual_seed(0))
    ids = ids.to(next(iter(params.leaves())).device)
    try:
        with torch.no_grad():
            path, spread = lm.run(params, _measure_head, ids, buffers=buffers)
            # Larger logits, on which softcaps show.
            params = params.set(path, params[path] * (50.0 / spread))
            own = lm.run(params, own_logits, ids, None, None, buffers=buffers)
            hidden, weight, bias = lm.run(params, hidden_states, ids, None, None, buffers=buffers)
            found = head.logits(hidden, weight, bias)
    # A model may lack a base model or a linear head; on the meta device nothing has values.
    except (AttributeError, TypeError, NotImplementedError, StopIteration):
        return None
    if found.shape != own.shape:
        return None
    is_close = torch.allclose(found, own.to(found.dtype), rtol=1e-3, atol=1e-2)
    return head if is_close else None


def _measure_head(model: Any, ids_BT: Tensor) -> tuple[Path, Tensor]:
    """Return the path of the head's weight, and the spread of the logits."""
    weight = model.get_output_embeddings().weight
    path = next(tuple(name.split(".")) for name, leaf in model.named_parameters() if leaf is weight)
    return path, own_logits(model, ids_BT, None, None).std()


def hidden_states(
    model: Any, ids_BT: Tensor, positions_BT: Tensor | None, mask: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the last hidden states (B, T, D), and the weight and the bias of the head."""
    head = model.get_output_embeddings()
    base = model.base_model
    out = base(**_inputs(model, type(base).forward, ids_BT, positions_BT, mask))
    # State space models keep their states in float32.
    return out.last_hidden_state.to(head.weight.dtype), head.weight, getattr(head, "bias", None)


def own_logits(model: Any, ids_BT: Tensor, positions_BT: Tensor | None, mask: Any) -> Tensor:
    """Return the logits (B, T, V) as the family's own forward computes them."""
    return _call(model, **_inputs(model, type(model).forward, ids_BT, positions_BT, mask)).logits


def new_cache(model: Any) -> Any:
    """Return an empty cache of keys and values, as the family's layers need it."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def next_logits(model: Any, ids_BT: Tensor, mask_BT: Tensor | None, positions_BT: Tensor | None, cache: Any) -> Tensor:
    """Return the logits (B, V) that follow the last position, and extend the cache by the positions.

    The mask is of all positions, those in the cache included. Without a mask rows have no pads; without a cache the
    positions are all there are.
    """
    names = _parameters(type(model).forward)
    inputs: dict[str, Any] = {"input_ids": ids_BT, "use_cache": cache is not None}
    if cache is not None:
        # State space models have another name for it.
        name = "cache_params" if "cache_params" in names else "past_key_values"
        inputs[name] = cache
    if mask_BT is not None:
        inputs["attention_mask"] = mask_BT
    # Not every family adds the length of its cache to its own positions (Bamba).
    if positions_BT is not None and "position_ids" in names:
        inputs["position_ids"] = positions_BT
    if "logits_to_keep" in names:
        inputs["logits_to_keep"] = 1
    return _call(model, **inputs).logits[:, -1]


@functools.lru_cache(maxsize=64)
def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def _inputs(
    model: Any, forward: Callable[..., Any], ids_BT: Tensor, positions_BT: Tensor | None, mask: Any
) -> dict[str, Any]:
    """Return the arguments of a family's forward, without pads and without a cache to keep."""
    inputs = {"input_ids": ids_BT.to(torch.int64), "use_cache": False}
    if positions_BT is not None:
        inputs["position_ids"] = positions_BT
    if mask is not None:
        inputs["attention_mask"] = mask
    if positions_BT is not None or mask is not None:
        return inputs
    # Under torch.compile and torch.export families choose by themselves.
    is_graph = not is_compiling() and is_recording()
    if is_graph and "past_key_values" in _parameters(forward):
        inputs["past_key_values"] = _cache_without_entries(model)
    else:
        # Without a mask, families of transformers 5.23 read values to search for packed rows, which vmap cannot.
        inputs["attention_mask"] = torch.ones(ids_BT.shape, device=ids_BT.device, dtype=torch.int64)
    return inputs


def _cache_without_entries(model: Any) -> Any:
    """Return a cache that stays empty.

    Families choose kernels by the values of a mask, and without one search the positions for packed rows, which a graph
    cannot do. With a cache they do neither.
    """

    # Any: the arguments of a cache of transformers.
    def update(keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        return keys, values

    def update_state(states: Any, *args: Any, **kwargs: Any) -> Any:
        return states

    cache = new_cache(model)
    cache.update = update
    cache.update_conv_state = update_state
    cache.update_recurrent_state = update_state
    return cache
