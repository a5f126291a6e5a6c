"""`load_pretrained` and `save_pretrained`: folders of transformers, with a check of every leaf."""

import json
import os
import shlex
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tdfunc.core.collection import TensorCollection, iter_leaves
from tdfunc.core.errors import LeafMismatchError, TieError, TreeStructureError, UnsupportedError, error
from tdfunc.core.keys import dotted
from tdfunc.llm.folders.files import read_beside, write_beside
from tdfunc.ops.display.text import count_text
from tdfunc.storage.api import save
from tdfunc.storage.disk.remote import local_folder
from tdfunc.storage.safetensors.index import SINGLE, TORCH_NAMES
from tdfunc.storage.safetensors.saved import open as open_saved

# The entry of a configuration that describes codes in place of numbers, and a file that does.
_CODES = "quantization_config"
_CODES_FILE = "hf_quant_config.json"
# Entries of a configuration that stay as the folder has them: codes, and the code of a model of the hub.
_OF_FOLDER = (_CODES, "auto_map", "architectures", "dtype", "torch_dtype")
# Entries that do not change what a model computes.
_NOT_COMPUTING = ("transformers_version", "use_cache", "attn_implementation")
_CONFIG_FILE = "config.json"
_GENERATION_FILE = "generation_config.json"
# Entries that tell where the options of generation are from.
_ORIGINS = ("transformers_version", "_from_model_config")


def load_pretrained(folder: "str | os.PathLike[str]", *, cls: type[Any] | None = None, **options: Any) -> nn.Module:
    """Load the model of a folder of transformers, and check that every leaf has a place.

    transformers renames and fuses leaves while it loads, such as the experts of a mixture. It only logs leaves without
    a place and places without a leaf; this function raises an error. Use `tdf.functional(model)` to get trees.

    Args:
        folder: The folder, on this machine.
        cls: The class with `from_pretrained`, by default `AutoModelForCausalLM`.
        options: The arguments of `from_pretrained`, such as `dtype=`.

    Raises:
        ImportError: transformers is not installed.
        TreeStructureError: A leaf of the folder has no place in the model, or a leaf of the model is not in the folder.
        LeafMismatchError: A leaf has another shape.
    """
    if cls is None:
        try:
            from transformers import AutoModelForCausalLM
        except ImportError as err:
            raise error(ImportError, "load_pretrained needs transformers.", hint='pip install "tdfunc[llm]".') from err
        cls = AutoModelForCausalLM
    # Any: without stubs.
    found: Any = cls
    model, info = found.from_pretrained(
        folder, output_loading_info=True, local_files_only=True, ignore_mismatched_sizes=True, **options
    )
    if info.get("mismatched_keys"):
        name, got, expected = sorted(info["mismatched_keys"])[0]
        raise LeafMismatchError(f"load_pretrained: {name} has another shape.", expected=list(expected), got=list(got))
    # Any: without stubs.
    missing: list[Any] = sorted(info.get("missing_keys") or ())
    unexpected: list[Any] = sorted(info.get("unexpected_keys") or ())
    if missing or unexpected:
        raise TreeStructureError(
            f"load_pretrained: {os.fspath(folder)} does not have the leaves of {type(model).__name__}.",
            expected=_some(missing),
            got=_some(unexpected),
        )
    return model.eval()


def save_pretrained(
    params: TensorCollection,
    folder: "str | os.PathLike[str]",
    *,
    model: nn.Module,
    source: "str | os.PathLike[str] | None" = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a tree as a folder that `from_pretrained` loads, under the names of the checkpoint.

    Renamed and fused leaves get the names of the folder from which the model was loaded. Buffers that are not
    persistent and second paths of tied leaves are left out. Leaves of that folder that transformers does not load, such
    as layers for the prediction of several tokens, are left out with a warning. If the folder has codes with scales,
    and transformers does not quantize the leaves again, the configuration does not describe codes. If the folder's
    configuration or options of generation are not the model's, the model's are written. The shards have checksums and
    replace the shards of an old folder in one step; the files of configuration and tokenizer follow.

    Args:
        params: The parameters, and the persistent buffers if the model has any: `tdf.combine(params, buffers)`.
        folder: The folder to write.
        model: The model of transformers from which the tree was made; it is only read.
        source: The folder with the other files to keep, and with the names to compare; by default the folder from which
            the model was loaded. Without a folder, the configurations of the model are written, and no tokenizer.
        max_shard_size: The maximum size of one shard in bytes.

    Raises:
        TreeStructureError: The tree does not have the leaves of the model.
        LeafMismatchError: A leaf has another shape.
        TieError: Leaves that are tied in the model differ.
        UnsupportedError: The names or shapes would differ from the source.
    """
    place = local_folder(
        folder,
        "save_pretrained",
        reason="the files beside the weights are written here",
        hint="save to a local folder, and upload it.",
    )
    # Any: an attribute of transformers' models.
    config: Any = getattr(model, "config", None)
    if config is None:
        raise UnsupportedError("save_pretrained: this is not a model of transformers.", got=type(model).__name__)
    state = _state_of(params, model)
    loaded = source if source is not None else getattr(config, "_name_or_path", "")
    # The files beside the weights: of the folder, or made from the model.
    beside: dict[str, bytes] = {}
    if loaded and os.path.isdir(loaded):
        beside = read_beside(os.fspath(loaded))
    named = _reverted(state, model)
    if beside:
        shapes = _shapes_in(os.fspath(loaded))
        named = _as_in_source(named, shapes, model)
        _check_names(named, shapes, os.fspath(loaded))
        _warn_of_others(named, shapes, model, os.fspath(loaded))
        scales = [name for name in shapes if _is_scale(name, named)]
        if scales and not any([name in named for name in scales]):
            _remove_codes(beside)
        if _GENERATION_FILE in beside:
            beside |= _generation_file(model, beside[_GENERATION_FILE])
    elif source is not None:
        raise error(FileNotFoundError, f"save_pretrained: {os.fspath(source)} is not a folder with a config.json.")
    else:
        beside = _generation_file(model)
    beside[_CONFIG_FILE] = _config_file(model, beside.get(_CONFIG_FILE), loaded, _dtype_name(named))
    os.makedirs(place, exist_ok=True)
    tree = TensorCollection._open(dict(named)).unflatten_keys(".")
    save(tree, place, max_shard_size=max_shard_size)
    write_beside(place, beside)


def _generation_file(model: nn.Module, given: bytes | None = None) -> dict[str, bytes]:
    """Return the file with the options of generation: it alone may have the tokens that end a response.

    Nothing is returned for a given file that has the options of the model.
    """
    generation: Any = getattr(model, "generation_config", None)
    if generation is None:
        return {}
    if given is not None:
        in_folder = type(generation).from_dict(json.loads(given))
        if _options_of(in_folder) == _options_of(generation):
            return {}
    return {_GENERATION_FILE: generation.to_json_string().encode()}


# Any: a configuration of transformers, and JSON.
def _options_of(generation: Any) -> dict[str, Any]:
    options = json.loads(generation.to_json_string())
    return {name: value for name, value in options.items() if name not in _ORIGINS}


def _config_file(model: nn.Module, given: bytes | None, folder: "str | os.PathLike[str]", dtype: str | None) -> bytes:
    """Return the configuration with a dtype: the file of a folder, which is unchanged if it describes the model."""
    if given is None:
        described = _own_config(model)
    else:
        described = json.loads(given)
        own = _with_own_entries(described, model, folder)
        if own == described and _dtype_in(described) == dtype:
            return given
        described = own
    # Older versions of transformers write `torch_dtype`.
    name = "torch_dtype" if "torch_dtype" in described else "dtype"
    return json.dumps({**described, name: dtype}, indent=2).encode() + b"\n"


# Any: JSON.
def _dtype_in(described: Mapping[str, Any]) -> Any:
    return described.get("torch_dtype", described.get("dtype"))


# Any: JSON.
def _own_config(model: nn.Module) -> dict[str, Any]:
    """Return the configuration that transformers writes for a model."""
    # Any: an attribute of transformers' models.
    config: Any = model.config
    return {"architectures": [type(model).__name__], **config.to_diff_dict()}


# Any: JSON.
def _with_own_entries(described: dict[str, Any], model: nn.Module, folder: "str | os.PathLike[str]") -> dict[str, Any]:
    """Return the entries of a folder, or the model's if it computes with others than these.

    `load_pretrained(folder, rms_norm_eps=...)` makes such a model, and so does an assignment to `model.config`.
    """
    # Any: an attribute of transformers' models.
    config: Any = model.config
    # A model can be one part of what a folder describes.
    if described.get("model_type") != config.model_type:
        return described
    # From the file: transformers writes infinities in its own way.
    in_folder = type(config).from_json_file(os.path.join(folder, _CONFIG_FILE)).to_dict()
    if _computing(in_folder) == _computing(config.to_dict()):
        return described
    own = {name: value for name, value in _own_config(model).items() if name not in _OF_FOLDER}
    return own | {name: described[name] for name in _OF_FOLDER if name in described}


# Any: JSON.
def _computing(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a configuration, at any depth, that decide what a model computes."""
    found: dict[str, Any] = {}
    for name, value in entries.items():
        if name in _OF_FOLDER or name in _NOT_COMPUTING or str(name).startswith("_"):
            continue
        # Any: JSON.
        inner: Any = value
        found[name] = _computing(inner) if isinstance(value, dict) else value
    return found


def _remove_codes(files: dict[str, bytes]) -> None:
    """Remove the description of codes from the files beside weights that are numbers."""
    files.pop(_CODES_FILE, None)
    described = json.loads(files.get(_CONFIG_FILE, b"{}"))
    if _CODES in described:
        del described[_CODES]
        files[_CONFIG_FILE] = json.dumps(described, indent=2).encode() + b"\n"


def _dtype_name(leaves: Mapping[str, Tensor]) -> str | None:
    """Return the name of the dtype of the first leaf of floating point."""
    for leaf in leaves.values():
        if leaf.is_floating_point():
            return str(leaf.dtype).removeprefix("torch.")
    return None


def _state_of(params: TensorCollection, model: nn.Module) -> dict[str, Tensor]:
    """Return the leaves that a checkpoint has, by the names of the module: persistent ones, a tied one once."""
    own = model.state_dict(keep_vars=True)
    given = {dotted(path): leaf for path, leaf in iter_leaves(params)}
    not_persistent = {name for name, _ in model.named_buffers(remove_duplicate=False)} - own.keys()
    # The first name of each leaf: tied leaves are one object.
    first: dict[int, str] = {}
    for name, leaf in own.items():
        first.setdefault(id(leaf), name)
    missing = [name for name in first.values() if name not in given]
    unexpected = [name for name in given if name not in own and name not in not_persistent]
    if missing or unexpected:
        raise TreeStructureError(
            f"save_pretrained: the tree does not have the leaves of {type(model).__name__}.",
            expected=_some(missing),
            got=_some(unexpected),
            hint="pass tdf.combine(params, buffers), which has both.",
        )
    for name, leaf in own.items():
        _check_tied(given, first[id(leaf)], name, model)
    state: dict[str, Tensor] = {}
    for name in first.values():
        leaf = given[name]
        if leaf.shape != own[name].shape:
            what = f"save_pretrained: {name} has another shape than in {type(model).__name__}."
            raise LeafMismatchError(what, expected=list(own[name].shape), got=list(leaf.shape))
        state[name] = leaf.detach()
    return state


def _check_tied(given: Mapping[str, Tensor], first: str, name: str, model: nn.Module) -> None:
    """Raise if leaves that are tied in a model differ; the second one may be missing."""
    one = given[first]
    other = given.get(name, one)
    if one is not other and not torch.equal(one, other):
        what = f"save_pretrained: {name} and {first} are tied in {type(model).__name__}, and differ in the tree."
        raise TieError(what, hint="use a model with tie_word_embeddings=False, which has both.")


def _reverted(state: dict[str, Tensor], model: nn.Module) -> Mapping[str, Tensor]:
    """Return the leaves under the names of the checkpoint."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    # transformers before 5 loads every leaf under its own name.
    except ImportError:
        return state
    # Any: without stubs.
    revert: Any = revert_weight_conversion
    return revert(model, state)


def _shapes_in(source: str) -> dict[str, list[int]]:
    """Return the shapes of the leaves of a folder, by their names."""
    files = os.listdir(source)
    others = sorted(set(files).intersection(TORCH_NAMES))
    if others and not any([name.endswith(".safetensors") for name in files]):
        made = shlex.quote(os.path.join(source, SINGLE))
        raise UnsupportedError(
            f"save_pretrained: {source} has no safetensors, whose names are compared.",
            got=others[0],
            hint=f"tdfunc convert {shlex.quote(source)} {made}, in a shell; then save again.",
        )
    with open_saved(source) as saved:
        return {dotted(path): list(leaf.shape) for path, leaf in iter_leaves(saved.spec())}


def _as_in_source(
    named: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], model: nn.Module
) -> dict[str, Tensor]:
    """Return leaves under the names of a folder.

    A folder of a model without its head, as GPT-2's, has names without a prefix, which transformers adds and removes.
    """
    found: dict[str, Tensor] = {}
    for name, leaf in named.items():
        fitting = [other for other in _spellings(name, model) if other in shapes]
        other = fitting[0] if fitting else name
        found[name if other in named else other] = leaf
    return found


def _spellings(name: str, model: nn.Module) -> list[str]:
    """Return a name as it is, and without or with the prefix of the model without its head."""
    # Any: an attribute of transformers' models.
    prefix: Any = getattr(model, "base_model_prefix", "")
    if not prefix:
        return [name]
    return [name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"]


def _check_names(named: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], source: str) -> None:
    """Raise unless leaves have the names and shapes of a folder; tied ones may be there twice."""
    unexpected = [name for name in named if name not in shapes]
    if unexpected:
        raise UnsupportedError(
            f"save_pretrained: the leaves do not get the names of {source}.",
            expected=_some([name for name in shapes if name not in named]),
            got=_some(unexpected),
            hint="pass the folder from which the model was loaded as source=.",
        )
    for name, leaf in named.items():
        if list(leaf.shape) != shapes[name]:
            raise UnsupportedError(
                f"save_pretrained: {name} has another shape than in {source}.",
                expected=shapes[name],
                got=list(leaf.shape),
            )


def _warn_of_others(
    named: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], model: nn.Module, source: str
) -> None:
    """Warn of the leaves of a folder that the result does not have.

    Second names of tied leaves and buffers of the model are known to be left out. So are the scales of codes, whose
    names begin with the names of their weights.
    """
    own = {*model.state_dict(), *[name for name, _ in model.named_buffers(remove_duplicate=False)]}
    others: list[str] = []
    for name in shapes:
        is_known = any([other in named or other in own for other in _spellings(name, model)])
        if not is_known and not _is_scale(name, named):
            others.append(name)
    if others:
        warnings.warn(
            f"save_pretrained: leaves of {source} are left out, because transformers does not load them into "
            f"{type(model).__name__}: {_some(others)}.",
            stacklevel=3,
        )


def _is_scale(name: str, named: Mapping[str, Tensor]) -> bool:
    """Return whether a name continues the name of a leaf, as `weight_scale_inv` continues `weight`."""
    return any([char in "._" and name[:end] in named for end, char in enumerate(name)])


def _some(names: Sequence[str]) -> str:
    if not names:
        return "no others"
    shown = ", ".join(names[:3])
    if len(names) > 3:
        shown += ", ..."
    return f"{count_text(len(names), 'leaf')} more: {shown}"
