"""A push of weights into an engine, and its proof: an engine that took the wrong ones generates all the same.

The names are compared before anything is sent. Afterwards the engine scores a prompt, with and without its cache, and
the tree scores it, too. Until both agree the engine's label says that its weights are not proven.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from tdfunc.core.errors import ConcurrencyError, TreeStructureError, error
from tdfunc.llm.scoring.ids import logits_of_ids
from tdfunc.llm.scoring.model import CausalLM
from tdfunc.storage.disk.raw import raw_bytes

# The label of weights that were sent and not proven.
_UNPROVEN = "unproven: "


class Probe(NamedTuple):
    """How an engine continues a prompt of L tokens: log-probs in nats.

    Attributes:
        log_probs: Of the prompt's tokens (L,), the first of which has none.
        candidates: Ids of next tokens (K,).
        next_log_probs: Theirs (K,), by way of the engine's cache.
    """

    log_probs: Tensor
    candidates: Tensor
    next_log_probs: Tensor


class Push(NamedTuple):
    """What a proven push sent.

    Attributes:
        version: The label that the engine's responses carry from now on.
        digests: The xxh3 digest of each leaf as it was handed over, by name.
        difference: The largest difference of a log-prob between engine and tree, in nats.
    """

    version: str
    digests: dict[str, str]
    difference: float


class AbstractEngine(ABC):
    """What a push needs of an engine; its label is kept by the engine, so that all who use the engine see it."""

    @abstractmethod
    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Replace the weights."""

    @abstractmethod
    def reset_cache(self) -> bool:
        """Drop what was computed from earlier weights; return whether it was done."""

    @abstractmethod
    def probe(self, ids: Tensor) -> Probe:
        """Score a prompt (L,)."""

    @abstractmethod
    def label(self) -> str:
        """Return the version of the weights."""

    @abstractmethod
    def set_label(self, label: str) -> None:
        """Set the version of the weights."""


def proven_label(engine: AbstractEngine) -> str:
    """Return the engine's version.

    Raises:
        ConcurrencyError: A push has not ended, or failed.
    """
    label = engine.label()
    if label.startswith(_UNPROVEN):
        raise ConcurrencyError(
            "generate: the engine's weights must be proven.",
            got=f"version {label.removeprefix(_UNPROVEN)!r}, whose push has not ended or failed",
            hint="push again.",
        )
    return label


def push_weights(
    engine: AbstractEngine,
    lm: CausalLM,
    leaves: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    optional: Iterable[str],
    ids: Tensor,
    *,
    tree: Any,
    buffers: Any = None,
    version: str,
    tolerance: float,
) -> Push:
    """Send leaves to an engine and prove that it uses them.

    Args:
        engine: The engine.
        lm: The model as a specification, for scoring by the tree.
        leaves: The tree's leaves by the engine's names.
        shapes: The names that the engine's model has, and their shapes.
        optional: Names that may be missing, such as those of tied weights.
        ids: The prompt (L,) of the proof.
        tree: The tree itself.
        buffers: Its buffers, unless the tree has them.
        version: The label.
        tolerance: The largest difference of a log-prob, in nats.

    Raises:
        TreeStructureError: Names or shapes differ; nothing was sent.
        ValueError: The engine's log-probs are not those of the tree.
        ConcurrencyError: The engine did not take all leaves, or kept its cache.
    """
    _check_names(leaves, shapes, set(optional))
    # The cache now has this prompt under the present weights: if it stayed, the proof would read them.
    engine.probe(ids)
    engine.set_label(_UNPROVEN + version)
    digests: dict[str, str] = {}
    engine.load(_digested(leaves, digests))
    if len(digests) < len(leaves):
        left = [name for name in leaves if name not in digests]
        raise ConcurrencyError(
            f"push: the engine must read every leaf; it left {left[0]!r}.",
            expected=f"{len(leaves)} leaves",
            got=f"{len(digests)} leaves",
            hint="push again; until then the engine generates nothing.",
        )
    if not engine.reset_cache():
        raise ConcurrencyError(
            "push: the engine must drop its prefix cache, which has results of earlier weights.",
            got="a refusal: requests may be running",
            hint="push between requests.",
        )
    found = engine.probe(ids)
    difference = _difference(lm, tree, buffers, ids, found)
    if not difference <= tolerance:
        raise error(
            ValueError,
            "push: the engine's log-probs must be those of the tree.",
            expected=f"a difference of at most {tolerance} nats on {len(ids)} tokens",
            got=f"{difference:.3g}",
            hint="push again; until then the engine generates nothing. In 16 bits give a larger tolerance=.",
        )
    engine.set_label(version)
    return Push(version, digests, difference)


def _check_names(leaves: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], optional: set[str]) -> None:
    missing = [name for name in shapes if name not in leaves and name not in optional]
    unknown = [name for name in leaves if name not in shapes]
    for names, text in ((missing, "lacks"), (unknown, "has the unknown")):
        if names:
            raise TreeStructureError(
                f"push: the tree {text} {names[0]!r}.",
                expected=f"the {len(shapes)} names of the engine's model",
                got=f"{len(leaves)} leaves, {len(missing)} missing, {len(unknown)} unknown; nothing was sent",
            )
    for name, leaf in leaves.items():
        if leaf.shape != shapes[name]:
            raise TreeStructureError(
                f"push: leaf {name!r} must have the shape of the engine's.",
                expected=list(shapes[name]),
                got=f"{list(leaf.shape)}; nothing was sent",
            )


def _digested(leaves: Mapping[str, Tensor], digests: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield leaves, and note the digest of each after the engine has asked for the next one."""
    for name, leaf in leaves.items():
        whole = leaf.detach().cpu().contiguous()
        yield name, whole
        digests[name] = xxhash.xxh3_128_hexdigest(raw_bytes(whole).data)


# Any: trees.
def _difference(lm: CausalLM, tree: Any, buffers: Any, ids: Tensor, found: Probe) -> float:
    """Return the largest difference between an engine's log-probs and those of a tree; NaN counts as infinite."""
    device = next(iter(tree.leaves())).device
    # One more token, whose logits continue the prompt.
    row = torch.cat([ids, ids[:1]]).to(device)
    with torch.no_grad():
        logits = logits_of_ids(lm, tree, row.unsqueeze(0), buffers=buffers).log_probs[0]
    own = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1).cpu()
    prompt = own[1:-1].gather(-1, ids[1:].unsqueeze(-1)).squeeze(-1)
    gaps = torch.cat([prompt - found.log_probs[1:], own[-1][found.candidates] - found.next_log_probs])
    return gaps.abs().nan_to_num(torch.inf).max().item()
