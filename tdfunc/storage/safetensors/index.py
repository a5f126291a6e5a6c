"""The bytes of `model.safetensors.index.json`: the shard of each leaf, the tree, and the digest of each shard."""

import os
import re
import shlex
from collections.abc import Sequence
from json.encoder import encode_basestring as quote
from typing import Any, NamedTuple

from tdfunc.core.errors import UnsupportedError, brief, damaged
from tdfunc.storage.safetensors.header import ALGORITHM, DIGITS, VERSION, altered, check_own, digest
from tdfunc.storage.tree.specs import find_surrogate, parse_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# The leaves of an adapter in a folder of PEFT.
ADAPTER = "adapter_model.safetensors"
# The files of torch.save in a folder of Hugging Face.
TORCH_SINGLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"
TORCH_NAMES = (TORCH_SINGLE, TORCH_INDEX)
_MAX_NAME_BYTES = 255
# transformers puts the name of a variant before the last suffix of any name; others put it before the first.
_INDEX_NAME = re.compile(r".*\.safetensors\.index(\.[^.]+)?\.json", re.DOTALL)
_VARIANT_NAME = re.compile(
    r"model\.safetensors\.index\.[^.]+\.json|model\.[^.]+\.safetensors\.index\.json|model\.[^.]+\.safetensors"
)
# A shard: the name before its number says nothing of it.
_SHARD_NUMBER = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")
_START = '{"metadata":{"tdfunc.index":"'
_OURS = re.compile(re.escape(_START.encode()) + rb'([^":]{1,40}):([0-9a-f]+)"')
_DIGEST_AT = len(_START) + len(ALGORITHM) + 1


class Index(NamedTuple):
    """The contents of an index."""

    metadata: dict[str, str]
    # Name of a leaf as JSON -> number of its file.
    homes: dict[str, int]
    files: list[str]
    # The digest of each file's header; None in an index of another program.
    digests: list[str] | None
    # True if its bytes have a field of tdfunc, which one flipped bit cannot remove but another program can.
    is_marked: bool


def is_index(path: str) -> bool:
    """Return whether a name belongs to an index of shards, also of a variant or of shards of torch.save."""
    separators = "/"
    if os.sep == "\\":
        separators = r"[/\\]"
    name = re.split(separators, path)[-1]
    return _INDEX_NAME.fullmatch(name) is not None or name == TORCH_INDEX


def is_variant(name: str) -> bool:
    """Return whether a name belongs to a model's variant: `model.fp16.safetensors` or the index of one."""
    return _VARIANT_NAME.fullmatch(name) is not None and _SHARD_NUMBER.search(name) is None


def torch_refusal(path: str) -> UnsupportedError:
    """Return the error for a checkpoint in files of torch.save."""
    return UnsupportedError(
        f"load {path}: these are files of torch.save, which load never reads.",
        expected="safetensors files",
        got="an index or file of .bin shards",
        hint=f"tdfunc convert {shlex.quote(path)} model.safetensors, in a shell, reads their tensors.",
    )


def render_index(
    tree: str, names: Sequence[str], homes: Sequence[str], shards: dict[str, str], size_bytes: int
) -> bytes:
    """Return the bytes of an index: names of leaves as JSON, the file of each, and each file's digest."""
    files = ",".join([f'"{name}":"{digest}"' for name, digest in shards.items()])
    weights = ",".join([f'{name}:"{home}"' for name, home in zip(names, homes, strict=True)])
    text = f'{_START}{ALGORITHM}:{"0" * DIGITS}","total_size":{size_bytes},"tdfunc.version":"{VERSION}",'
    text += f'"tdfunc.tree":{quote(tree)},"tdfunc.shards":{{{files}}}}},"weight_map":{{{weights}}}}}\n'
    raw = bytearray(text.encode())
    raw[_DIGEST_AT : _DIGEST_AT + DIGITS] = digest(raw, _DIGEST_AT).encode()
    return bytes(raw)


def parse_index(raw: bytes, path: str, *, verify: bool) -> Index:
    """Read an index of ours or of another program.

    Raises:
        UnsupportedError: It names files of torch.save.
        CorruptCheckpointError: It is damaged, or names files outside of its folder.
    """
    found = _OURS.match(raw)
    if found is not None and verify:
        check_own("index", raw, found[1].decode("latin-1"), found[2].decode(), _DIGEST_AT)
    doc = parse_json(raw)
    weights = _weight_map(doc)
    metadata = _dict_in(doc, "metadata") or {}
    shards = _dict_in(metadata, "tdfunc.shards")
    files = _list_files(shards or {}, weights, path)
    is_ours = any([key.startswith("tdfunc") for key in metadata])
    is_complete = found is not None and shards is not None and len(shards) == len(files)
    if is_ours and verify and not is_complete:
        raise altered("index", f"an index that starts with {_START} and has the digest of each file", repr(raw[:60]))
    texts = {key: value for key, value in metadata.items() if isinstance(value, str)}
    numbers = {name: i for i, name in enumerate(files)}
    homes = {quote(name): numbers[home] for name, home in weights.items()}
    digests = None
    if shards is not None:
        digests = [str(shards.get(name)) for name in files]
    return Index(texts, homes, files, digests, b'"tdfunc.' in raw)


# Any: JSON of any program.
def _dict_in(doc: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return an entry that is an object; None for anything else."""
    found = doc.get(name)
    return found if isinstance(found, dict) else None


# Any: JSON of any program.
def _weight_map(doc: Any) -> dict[str, str]:
    """Return the file of each leaf."""
    weights: Any = None
    if isinstance(doc, dict):
        weights = doc.get("weight_map")
    if not isinstance(weights, dict) or not all([type(home) is str for home in weights.values()]):
        raise damaged("the index is malformed.", "a weight_map of names and files", brief(weights))
    return weights


def _list_files(shards: dict[str, Any], weights: dict[str, str], path: str) -> list[str]:
    """Return the checked names of all files of an index, of which a shard may have no leaf."""
    files = list(dict.fromkeys([*shards, *weights.values()]))
    for name in files:
        _check_name(name, path)
    return files


def _check_name(name: str, path: str) -> None:
    """Raise unless a name in an index belongs to a safetensors file of its folder."""
    is_plain = _is_plain(name)
    if is_plain and name.endswith((".bin", ".pt", ".pth")):
        raise torch_refusal(path)
    if not is_plain or name in (".", "..") or not name.endswith(".safetensors"):
        raise damaged("the index names a file that is not a safetensors file of its folder.", got=brief(name))


def _is_plain(name: str) -> bool:
    """Return whether a file of a folder can have a name: no path, no half of a character, and not too long."""
    if not name or "\0" in name or any([separator in name for separator in ("/", "\\", os.sep)]):
        return False
    return find_surrogate([name]) is None and len(name.encode()) <= _MAX_NAME_BYTES
