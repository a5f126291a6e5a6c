"""Trained rows of tables in PEFT's files: `trainable_token_indices`, and the tensors of token adapters."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, UnsupportedError
from tdfunc.core.keys import Entry, dotted
from tdfunc.core.types import Path
from tdfunc.lora.files.config import TokenIndices
from tdfunc.lora.targets import Table
from tdfunc.ops.base.reading import entries, get

# The name of the rows of a table, behind the name of its module.
_ROWS = ".token_adapter.trainable_tokens_delta"


def take_rows(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the rows of a file by the name of their module; they are taken out of the tensors."""
    names = [name for name in tensors if name.endswith(_ROWS)]
    return {name.removesuffix(_ROWS): tensors.pop(name) for name in names}


def read_tables(
    rows: Mapping[str, Tensor], indices: TokenIndices | None, params: TensorCollection, outer: str
) -> list[tuple[Table, Tensor]]:
    """Return the tables of which a file has rows, with these rows.

    Args:
        rows: The rows by the name of their module.
        indices: The entry of the configuration.
        params: The base.
        outer: The beginning that only the names in the configuration have.

    Raises:
        LeafMismatchError: The configuration and the file disagree, or rows do not fit the base.
    """
    by_path: dict[Path, Entry] = {}
    for entry in entries(params):
        by_path |= dict.fromkeys(entry.paths, entry)
    if indices is not None and not rows:
        raise _disagreement("no rows in the file", f"rows, because trainable_token_indices is {indices.shown}")
    tables: list[tuple[Table, Tensor]] = []
    for name, given in rows.items():
        found = None if indices is None else indices.of(outer + name)
        if found is None or len(found) != len(given):
            expected = f"{len(given)} numbers of rows of {name!r}"
            raise _disagreement("no numbers" if found is None else f"{len(found)} numbers", expected)
        entry = by_path.get((*name.split("."), "weight"))
        if entry is None or entry.leaf.ndim != 2 or entry.leaf.shape[1:] != given.shape[1:]:
            raise LeafMismatchError(
                f"lora.load: the rows of tokens of {name!r} do not fit the base.",
                expected="no such table" if entry is None else f"rows of shape {tuple(entry.leaf.shape[1:])}",
                got=f"shape {tuple(given.shape)}",
            )
        if max(found) >= len(entry.leaf):
            raise LeafMismatchError(
                f"lora.load: the table {name!r} has too few rows for the tokens of the file.",
                expected=f"more than {max(found)} rows",
                got=f"{len(entry.leaf)} rows",
                hint=f"model.resize_token_embeddings({max(found) + 1}) before tdf.functional(model).",
            )
        tables.append((Table(entry.paths, entry.leaf, found), given))
    return tables


def _disagreement(got: str, expected: str) -> LeafMismatchError:
    return LeafMismatchError(
        "lora.load: the configuration's 'trainable_token_indices' and the tensors of the file disagree.",
        expected=expected,
        got=got,
        hint="the file or its configuration is not the saved one.",
    )


def write_rows(
    tables: Sequence[Table], given: Mapping[Path, Tensor], module: nn.Module
) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """Return the tensors of trained rows by PEFT's names, and the entry of the configuration.

    Of a tied table PEFT has rows at the embedding alone.
    """
    tensors: dict[str, Tensor] = {}
    indices: dict[str, list[int]] = {}
    for table in tables:
        names = [dotted(path[:-1]) for path in table.paths]
        embeddings = [name for name in names if isinstance(module.get_submodule(name), nn.Embedding)]
        name = (embeddings or names)[0]
        tensors[name + _ROWS] = given[table.key].detach()
        indices[name] = list(table.indices)
    return tensors, indices


def write_embeddings(
    base: TensorCollection, module: nn.Module, adapted: Collection[str], tables: Sequence[Table]
) -> dict[str, Tensor]:
    """Return the leaves of the embeddings and the head of a language model by PEFT's names.

    Args:
        base: The parameters of the model.
        module: Its structure.
        adapted: The names of the modules with adapters.
        tables: The tables of which rows are trained.

    Raises:
        UnsupportedError: The module is not a language model of transformers.
    """
    # Any: transformers is optional.
    model: Any = module
    if not hasattr(model, "get_input_embeddings"):
        raise UnsupportedError(
            "lora.save: base= writes the embeddings of a language model of transformers.",
            got=f"a {type(module).__name__}",
            hint="Lora(..., whole=...) saves other leaves.",
        )
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    with_rows = {dotted(path[:-1]) for table in tables for path in table.paths}
    tensors: dict[str, Tensor] = {}
    for name, layer in module.named_modules():
        if not any([layer is each for each in layers]):
            continue
        inner = ""
        if name in adapted:
            inner = ".base_layer"
        elif name in with_rows and isinstance(layer, nn.Embedding):
            inner = ".token_adapter.base_layer"
        for leaf, _ in layer.named_parameters():
            # A copy: safetensors has no two names of one tensor.
            tensors[f"{name}{inner}.{leaf}"] = get(base, (*name.split("."), leaf)).detach().clone()
    return tensors
