"""A push of weights into an engine, and its verification: an engine with wrong weights also generates text.

The names are compared before anything is sent. Afterwards the engine scores a prompt of random ids, with and without
its cache, and the tree scores the same prompt. Until both agree, the engine's label marks its weights as unproven.
"""

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch
import xxhash
from torch import Tensor

from tdfunc import random
from tdfunc.core.collection import iter_leaves
from tdfunc.core.errors import ConcurrencyError, TreeStructureError, check_choice, error
from tdfunc.core.keys import dotted
from tdfunc.llm.scoring.ids import score_ids
from tdfunc.llm.scoring.model import CausalLM
from tdfunc.random.draws import KeyLike
from tdfunc.storage.api import load, save
from tdfunc.storage.disk.raw import raw_bytes

# The tokens of one prompt of a proof, and how many candidates of the next token it compares.
PROMPT = 256
CANDIDATES = 5
# The label of weights that were sent and not proven.
_UNPROVEN = "unproven: "


class Probe(NamedTuple):
    """The log-probs of an engine for a prompt of L tokens, in nats.

    Attributes:
        log_probs: The log-probs of the prompt's tokens (L,), of which the first is not used.
        candidates: Ids of next tokens (K,).
        next_log_probs: The log-probs of the candidates (K,), computed with the engine's cache.
    """

    log_probs: Tensor
    candidates: Tensor
    next_log_probs: Tensor


class Push(NamedTuple):
    """The record of a verified push.

    Attributes:
        version: The label of the engine's further responses.
        digests: The xxh3 digest of each leaf that was sent, by name.
        difference: The largest difference of a log-prob between engine and tree, in nats.
        unread: With `proof="full"`, the indices along the first dimension of each leaf that the verification did not
            read, by name, such as experts that no token was routed to; otherwise None.
    """

    version: str
    digests: dict[str, str]
    difference: float
    unread: dict[str, list[int]] | None


class AbstractEngine(ABC):
    """The operations of an engine that a push needs; the engine keeps the label, so that all its users can read it."""

    @abstractmethod
    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Replace the weights."""

    @abstractmethod
    def reset_cache(self) -> bool:
        """Drop the results of earlier weights; return True if they were dropped."""

    @abstractmethod
    def limits(self) -> tuple[int, int]:
        """Return the number of ids, and the length of a prompt that fills a part of the cache."""

    @abstractmethod
    def probe(self, ids: Tensor) -> Probe:
        """Score a prompt (L,)."""

    @abstractmethod
    def label(self) -> str:
        """Return the version of the weights."""

    @abstractmethod
    def set_label(self, label: str) -> None:
        """Set the version of the weights."""


def proven_label(label: str) -> str:
    """Return the version that an engine's label has.

    Raises:
        ConcurrencyError: A push has not ended, or has failed.
    """
    if label.startswith(_UNPROVEN):
        raise ConcurrencyError(
            "generate: the engine's weights are not proven.",
            got=f"version {label.removeprefix(_UNPROVEN)!r}, whose push has not ended or failed",
            hint="push again.",
        )
    return label


def send_by_folder(weights: Iterator[tuple[str, Tensor]], folder: str | None, reload: Callable[[str], object]) -> None:
    """Write weights into a new folder for an engine in another process, which reads them in `reload`.

    Afterwards the checksums of the file are verified again.
    """
    # An engine may cache a folder by its name (https://github.com/vllm-project/vllm/issues/32718).
    with TemporaryDirectory(prefix="push-", dir=folder) as place:
        path = f"{place}/model.safetensors"
        save(dict(weights), path)
        reload(place)
        load(path)


# Any: trees.
def push_tree(
    engine: AbstractEngine,
    lm: CausalLM,
    tree: Any,
    own_buffers: Any,
    *,
    version: str,
    tolerance: float,
    proof: Literal["prompt", "full"] = "prompt",
    key: KeyLike | None = None,
) -> Push:
    """Send a tree to an engine and verify that the engine uses it; `vLLMWrapper.push` describes the limits.

    Args:
        engine: The engine.
        lm: The model, with which the tree is scored.
        tree: The tree, whose leaves are sent by the names of a state_dict.
        own_buffers: The model's buffers, for a tree without them.
        version: The label.
        tolerance: The largest difference of a log-prob, in nats.
        proof: One prompt of random ids, or prompts that have every id.
        key: The key of the ids; None for a new key from the operating system.

    Raises:
        TreeStructureError: Names or shapes differ; nothing was sent.
        ValueError: The engine and the tree have different log-probs.
        ConcurrencyError: The engine did not read all leaves, or kept its cache.
    """
    check_choice("push: proof", proof, ("prompt", "full"))
    is_full = proof == "full"
    leaves, buffers = _leaves_of(tree, own_buffers, lm.apply.module)
    if key is None:
        key = random.key(int.from_bytes(os.urandom(7), "big"))
    else:
        key = random.key_of(key)
    vocabulary, length = engine.limits()
    # The tree scores one token more.
    if lm.max_length is not None:
        length = min(length, lm.max_length - 1)
    prompts = draw_prompts(key, vocabulary, length, whole=is_full)
    # The cache now has this prompt under the present weights. If it were kept, the verification would fail.
    engine.probe(prompts[0])
    engine.set_label(_UNPROVEN + version)
    digests = _send(engine, leaves)
    difference = max([_difference(lm, tree, buffers, ids, engine.probe(ids)) for ids in prompts])
    # A NaN is above every tolerance.
    if not difference <= tolerance:
        raise error(
            ValueError,
            "push: the log-probs of the engine and the tree differ.",
            expected=f"a difference of at most {tolerance} nats on {sum(map(len, prompts))} tokens",
            got=f"{difference:.3g}, key={key.tolist()}",
            hint="push again; until then the engine generates nothing. For 16 bits pass a larger tolerance=.",
        )
    unread = None
    if is_full:
        found = _unread(lm, tree, buffers, prompts)
        unread = {name: places for name, places in found.items() if name in leaves}
    engine.set_label(version)
    return Push(version, digests, difference, unread)


def _send(engine: AbstractEngine, leaves: dict[str, Tensor]) -> dict[str, str]:
    """Send leaves to an engine that drops its cache, and return their digests.

    Raises:
        ConcurrencyError: The engine did not read all leaves, or kept its cache.
    """
    digests: dict[str, str] = {}
    engine.load(_digested(leaves, digests))
    left = [name for name in leaves if name not in digests]
    if left:
        raise ConcurrencyError(
            f"push: the engine did not read every leaf; it left {left[0]!r}.",
            expected=f"{len(leaves)} leaves",
            got=f"{len(digests)} leaves",
            hint="push again; until then the engine generates nothing.",
        )
    if not engine.reset_cache():
        raise ConcurrencyError(
            "push: the engine did not drop its prefix cache, which contains results of earlier weights.",
            got="a refusal: requests may be running",
            hint="push between requests.",
        )
    return digests


def draw_prompts(key: Tensor, vocabulary: int, length: int, *, whole: bool) -> list[Tensor]:
    """Return a prompt of different ids, or prompts in which each id follows another token once.

    A prompt begins with the last id of the prompt before. The log-prob of an id reads its row of the head, and the next
    log-prob reads its embedding.
    """
    ids = random.permutation(key.cpu(), vocabulary)
    ids = torch.cat([ids[-1:], ids])
    step = max(length, 2) - 1
    end = vocabulary if whole else 1
    return [ids[at : at + step + 1] for at in range(0, end, step)]


# Any: trees, and a module of transformers.
def _leaves_of(tree: Any, own_buffers: Any, module: Any) -> tuple[dict[str, Tensor], Any]:
    """Return the leaves of a tree by the names of the model's state_dict, and the buffers that it lacks."""
    shapes = {name: leaf.shape for name, leaf in module.state_dict().items()}
    flat = {dotted(path): leaf for path, leaf in iter_leaves(tree)}
    # A tree may also have the buffers, some of which checkpoints contain.
    own = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    leaves = {name: leaf for name, leaf in flat.items() if name in shapes or name not in own}
    _check_names(leaves, shapes, _tied_names(module))
    for name, leaf in leaves.items():
        if leaf.shape != shapes[name]:
            raise TreeStructureError(
                f"push: leaf {name!r} does not have the shape of the engine's leaf.",
                expected=list(shapes[name]),
                got=f"{list(leaf.shape)}; nothing was sent",
            )
    has_buffers = own <= flat.keys()
    return leaves, None if has_buffers else own_buffers


# Any: a module of transformers.
def _tied_names(module: Any) -> list[str]:
    """Return the names in a model's state_dict that a tree may leave out, since they are tied to others."""
    if not getattr(module.config, "tie_word_embeddings", False):
        return []
    return list(getattr(module, "_tied_weights_keys", None) or [])


def _check_names(leaves: dict[str, Tensor], shapes: dict[str, torch.Size], tied: list[str]) -> None:
    """Raise unless leaves have the names of the model.

    Raises:
        TreeStructureError: A name is missing or unknown.
    """
    missing = [name for name in shapes if name not in leaves and name not in tied]
    unknown = [name for name in leaves if name not in shapes]
    if missing:
        text = f"lacks {missing[0]!r}"
    elif unknown:
        text = f"has the unknown {unknown[0]!r}"
    else:
        return
    raise TreeStructureError(
        f"push: the tree {text}.",
        expected=f"the {len(shapes)} names of the engine's model",
        got=f"{len(leaves)} leaves, {len(missing)} missing, {len(unknown)} unknown; nothing was sent",
    )


def _digested(leaves: Mapping[str, Tensor], digests: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield leaves, and note the digest of each after the engine has asked for the next one."""
    for name, leaf in leaves.items():
        whole = leaf.detach().cpu().contiguous()
        yield name, whole
        digests[name] = xxhash.xxh3_128_hexdigest(raw_bytes(whole).data)


# Any: trees.
def _difference(lm: CausalLM, tree: Any, buffers: Any, ids: Tensor, found: Probe) -> float:
    """Return the largest difference between the log-probs of an engine and a tree; NaN counts as infinite."""
    device = next(iter(tree.leaves())).device
    # One more place, at which the candidates continue the prompt.
    row = torch.cat([ids, ids[:1]]).to(device)
    count = len(found.candidates)
    repeated = ids.unsqueeze(1).expand(-1, count)
    at = torch.cat([repeated, found.candidates.unsqueeze(0)]).to(device)
    with torch.no_grad():
        scores = score_ids(lm, tree, row.unsqueeze(0), buffers=buffers, at=at.unsqueeze(0))
    own = scores.log_probs[0].cpu()
    of_prompt = own[1:-1, 0] - found.log_probs[1:]
    of_next = own[-1] - found.next_log_probs
    gaps = torch.cat([of_prompt, of_next])
    return gaps.abs().nan_to_num(torch.inf).max().item()


# Any: trees.
def _unread(lm: CausalLM, tree: Any, buffers: Any, prompts: Sequence[Tensor]) -> dict[str, list[int]]:
    """Return the places along the first dimension of leaves that no log-prob of prompts depends on, by name."""
    own = tree.apply(_with_gradient)
    # True at the places that were read.
    read: dict[str, Tensor] = {}
    # Tied leaves come once.
    for path, leaf in zip(own.paths(), own.leaves(), strict=True):
        if leaf.requires_grad:
            name = ".".join(path)
            read[name] = torch.zeros(leaf.shape[0] if leaf.dim() else 1, dtype=torch.bool)
            leaf.register_post_accumulate_grad_hook(functools.partial(_note_gradient, read[name]))
    module: Any = lm.apply.module
    for name, each in module.named_modules():
        weight = f"{name}.weight"
        # torch gives the embedding of a pad no gradient, though it is read.
        if isinstance(each, torch.nn.Embedding) and each.padding_idx is not None and weight in read:
            read[weight][each.padding_idx] = True
    device = next(iter(tree.leaves())).device
    with torch.enable_grad():
        for ids in prompts:
            row = torch.cat([ids, ids[:1]]).to(device)
            score_ids(lm, own, row.unsqueeze(0), buffers=buffers).log_probs.sum().backward()
    unread: dict[str, list[int]] = {}
    for name, places in read.items():
        if not places.all():
            unread[name] = (~places).nonzero().flatten().tolist()
    return unread


def _with_gradient(leaf: Tensor) -> Tensor:
    """Return a leaf that collects a gradient, if it can have one."""
    if leaf.is_floating_point():
        return leaf.detach().requires_grad_()
    return leaf


def _note_gradient(read: Tensor, leaf: Tensor) -> None:
    """Mark the places along the first dimension of a leaf that have a gradient, and drop the gradient."""
    # A leaf that was read without a gradient, such as a buffer of positions, has none.
    if leaf.grad is not None:
        read |= (leaf.grad != 0).reshape(len(read), -1).any(1).cpu()
    # One gradient exists at a time.
    leaf.grad = None
