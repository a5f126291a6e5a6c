"""Data sets of tokens: records, tokenized once, kept in a file with checksums, and read in batches.

Rows are stored without pads: the ids of all rows follow each other, and offsets mark the start of each row.
N rows, S tokens of all of them.
"""

import json
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain, islice
from operator import index
from typing import Any, final

import numpy as np
import torch
import xxhash
from torch import Tensor

from tdfunc._tensordict import TensorDict
from tdfunc.core.errors import CorruptCheckpointError, as_count, brief, error
from tdfunc.core.system import platform
from tdfunc.llm.datasets.prompts import prompt_rows
from tdfunc.llm.datasets.sources import Records
from tdfunc.llm.encoding.chat import chat_rows
from tdfunc.llm.encoding.padding import EncodedRow, Layout, pad_id_of, row_tree, unmask_first
from tdfunc.llm.encoding.text import added_counts, text_rows, tokenizer_digest, with_eos
from tdfunc.llm.encoding.trained import check_masks, check_untrained, find_loss, report_losses
from tdfunc.llm.messages.columns import Conversation
from tdfunc.llm.messages.message import read_messages, read_tools, with_system
from tdfunc.llm.templates.base import text_tokenizer
from tdfunc.llm.templates.find import find_template
from tdfunc.llm.templates.jinja import JinjaTemplate
from tdfunc.random import permutation
from tdfunc.storage.api import load, save
from tdfunc.storage.disk.commit import Descriptor, make_folder
from tdfunc.storage.disk.remote import local_folder
from tdfunc.storage.progress import progress_bar

# In the key of a cache: another number where stored rows change.
_FORMAT = 6
_CHUNK = 1024
_WHOLE = "rows"
# Entries of a column that are not of one value for each token.
_OFFSETS = "offsets"
_KEPT = "kept"
# One entry of a record, or the entries of a prompt and of its response.
Column = str | tuple[str, str]


@final
@dataclass(frozen=True, eq=False)
class TokenDataset:
    """Rows of tokens of different lengths, which are read in batches.

    Args:
        columns: For each column the `input_ids` (S,) of all rows, the `offsets` (N + 1,) at which rows begin and the
            last row ends, and masks (S,), such as `assistant_masks`. `kept` (N, 2) are the numbers of tokens at the
            start and the end of each row that truncation keeps, by default 0.
        pad_id: The id at pads.
        name: The name of the only column; None for several columns.
    """

    columns: TensorDict
    pad_id: int = 0
    name: str | None = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(next(iter(self.columns.values()))["offsets"]) - 1

    @property
    def lengths(self) -> Any:
        """The number of tokens of each row (N,), or a tree of these by column."""
        found = {name: column["offsets"].diff() for name, column in self.columns.items()}
        if self.name is None:
            return TensorDict(found, [len(self)])
        return found[self.name]

    def __getitem__(self, row: int) -> Any:
        """Return a row as a tree without batch and pads."""
        (at,) = self._places([row])
        return self._by_column(lambda column: row_tree(_row_at(column, at)))

    def batch(
        self,
        rows: "Tensor | Sequence[int]",
        *,
        padding: bool | str = True,
        truncation: bool | str = False,
        max_length: int | None = None,
        padding_side: str = "left",
        truncation_side: str = "right",
        untrained: str = "raise",
    ) -> Any:
        """Return rows, padded, as a tree with `input_ids` (B, T), `attention_mask` and other masks.

        Args:
            rows: Row numbers; negative numbers count from the end.
            padding: True or "longest", or "max_length".
            truncation: Truncate rows to `max_length`. The tokens that the tokenizer put around a text are kept; of a
                prompt with its response, those before it.
            max_length: The maximum number of tokens in a row.
            padding_side: "left" or "right".
            truncation_side: The side at which tokens are removed.
            untrained: "raise" an error for a row that truncation leaves without a trained token, or whose columns it
                makes equal; or "drop" such rows, with a warning that counts them.

        Raises:
            ValueError: An option has an invalid value, or truncation leaves nothing to train on in a row.
            TypeError: A row is not a number: a mask has bools.
            IndexError: A row does not exist.
        """
        layout = Layout(padding, truncation, max_length, padding_side, truncation_side)
        layout.check("batch")
        if not layout.pads:
            raise error(
                ValueError, "batch: the rows are not padded.", got=f"padding={padding!r}", hint="data[i] has no pads."
            )
        places = self._trainable("batch", self._places(rows), layout, untrained)

        def one(column: TensorDict) -> TensorDict:
            return layout.pad([unmask_first(_cut_at(column, at, layout)) for at in places], self.pad_id)

        return self._by_column(one, [len(places)])

    def _trainable(
        self, call: str, rows: Sequence[int], layout: Layout, untrained: str, *, is_pair: bool | None = None
    ) -> list[int]:
        """Return the rows that have something to train on if they are truncated.

        Args:
            call: The name of the call, for messages.
            rows: Row numbers.
            layout: The truncation.
            untrained: "raise" an error for other rows, or "drop" them.
            is_pair: The columns are pairs; by default those with masks.

        Raises:
            ValueError: A row has nothing to train on, and `untrained` is "raise".
        """
        check_untrained(call, untrained)
        if not layout.cuts or layout.max_length is None:
            return list(rows)
        # The reason of each row without anything to train on.
        losses: dict[int, str] = {}
        for row in self._longer_rows(rows, layout.max_length):
            if row in losses:
                continue
            full = {name: _row_at(column, row) for name, column in self.columns.items()}
            cut = {name: _cut_at(column, row, layout) for name, column in self.columns.items()}
            reason = find_loss(full, cut, is_pair=is_pair)
            if reason is not None:
                losses[row] = reason
        report_losses(call, losses, len(rows), layout, untrained=untrained)
        return [row for row in rows if row not in losses]

    def _longer_rows(self, rows: Sequence[int], length: int) -> list[int]:
        """Return the rows that a truncation to a length changes in a column: no others can lose anything."""
        # Of these rows alone: an epoch calls this for each of its batches.
        at = torch.tensor(list(rows), dtype=torch.int64)
        offsets = [column[_OFFSETS] for column in self.columns.values()]
        lengths = torch.stack([ends[at + 1] - ends[at] for ends in offsets]).amax(0)
        is_longer: list[bool] = (lengths > length).tolist()
        return [row for row, longer in zip(rows, is_longer, strict=True) if longer]

    def batches(
        self, batch_size: int, *, key: Tensor | None = None, start: int = 0, drop_last: bool = False, **options: Any
    ) -> Iterator[Any]:
        """Return batches of all rows, the same for each call; to resume, start after the last batch that was used.

        Args:
            batch_size: The number of rows in a batch.
            key: The random key of a shuffle; `fold_in(key, epoch)` gives each epoch its own order. Without it the rows
                are in order.
            start: The number of the first batch.
            drop_last: Leave out a last batch with fewer rows.
            **options: The options of `batch`. With `untrained="drop"` all batches are full but the last one.

        Raises:
            ValueError: `batch_size` is not positive, `start` is negative, or truncation leaves nothing to train on in a
                row.
        """
        batch_size = as_count("batches: batch_size", batch_size)
        start = as_count("batches: start", start, 0)
        rows = torch.tensor(self._trained_rows(options), dtype=torch.int64)
        n = len(rows)
        if key is not None:
            rows = rows[permutation(key, n)]
        if drop_last:
            rows = rows[: n - n % batch_size]
        parts = rows[start * batch_size :].split(batch_size)
        return (self.batch(part, **options) for part in parts if len(part))

    def _trained_rows(self, options: Mapping[str, Any]) -> list[int]:
        """Return the numbers of all rows that batches contain; an error comes before the first batch."""
        rows = list(range(len(self)))
        if not options.get("truncation"):
            return rows
        layout = Layout(**{name: value for name, value in options.items() if name != "untrained"})
        layout.check("batches")
        return self._trainable("batches", rows, layout, options.get("untrained", "raise"))

    def _places(self, rows: "Tensor | Sequence[int]") -> list[int]:
        n = len(self)
        given: list[Any] = rows.tolist() if isinstance(rows, Tensor) else list(rows)
        places: list[int] = []
        for number in given:
            row = _row_number(number)
            if not -n <= row < n:
                raise error(IndexError, f"row {row} does not exist.", expected=f"one of {n} rows", got=str(row))
            places.append(row % n)
        return places

    def _by_column(self, fn: Any, size: Sequence[int] = ()) -> Any:
        if self.name is not None:
            return fn(self.columns[self.name])
        return TensorDict({name: fn(column) for name, column in self.columns.items()}, size)


# Any: the value is what the caller passed.
def _row_number(number: Any) -> int:
    """Return the number of a row; a bool of a mask would be row 0 or 1, and is an error."""
    if isinstance(number, (bool, np.bool_)):
        raise error(
            TypeError,
            "a row is a bool and not a number.",
            got=str(number),
            hint="mask.nonzero().flatten() has them.",
        )
    return index(number)


def _row_at(column: TensorDict, at: int) -> EncodedRow:
    start, stop = column["offsets"][at : at + 2].tolist()
    row = {name: leaf[start:stop] for name, leaf in column.items() if name not in (_OFFSETS, _KEPT)}
    return {**row, "input_ids": row["input_ids"].to(torch.int64)}


def _cut_at(column: TensorDict, at: int, layout: Layout) -> EncodedRow:
    """Return a truncated row, which keeps the tokens around its text."""
    kept = column.get(_KEPT, None)
    first, last = (0, 0) if kept is None else kept[at].tolist()
    return layout.cut(_row_at(column, at), first=first, last=last)


# -- loading ----------------------------------------------------------------------------------------------------


def load_tokens(
    tokenizer: Any,
    source: "str | os.PathLike[str] | Iterable[Any]",
    *,
    columns: "Column | Mapping[str, Column]" = "text",
    cache_dir: "str | os.PathLike[str] | None" = None,
    chat_template: Any = None,
    add_special_tokens: bool = True,
    add_eos_token: bool = False,
    verify: bool = True,
    progress: bool = False,
) -> TokenDataset:
    """Tokenize the records of a file or an iterable, or read the tokens from the cache if nothing has changed.

    A cache is one safetensors file with checksums. Its name is a digest of the tokenizer, the options and the data, so
    that a change makes another file. The file is always complete; a damaged file is made again. If several processes
    need the same file, the first makes it and the others wait.

    Args:
        tokenizer: A tokenizer or processor of transformers; it is not changed.
        source: A file that `read_records` reads, or an iterable of dicts (such as a `datasets.Dataset`) or texts. A
            text counts as a dict with `text`. Files are streamed; the records of an iterable are kept in memory while
            they are tokenized.
        columns: The entry of a record to tokenize. It is a text, or a conversation (a list of messages of OpenAI or
            ShareGPT), which the chat template renders with the record's `tools` (a list or its JSON text) and behind
            its `system` (a text). A tuple of two entries is a prompt with its response, which are two texts or two
            lists of messages. A dict makes several columns, by name. Conversations and responses have
            `assistant_masks`. A response that is a text has no end of turn unless its text has one.
        cache_dir: The folder of caches; without it the tokens are in a temporary file.
        chat_template: A template of `tdfunc.llm` or a Jinja text; by default the tokenizer's own template.
        add_special_tokens: Add the tokens that the tokenizer puts around a text, unless the text begins with the first.
        add_eos_token: End each text, or each response to a prompt, with the tokenizer's `eos_token`, unless it already
            ends with it. A conversation ends as its template writes it.
        verify: Verify the checksums of a cache, which reads it once.
        progress: Show a progress bar of the records while they are tokenized. Requires tqdm.

    Raises:
        TypeError: A record, or an entry of it, has another type; the error names its number.
        MissingKeyError: A record lacks an entry.
        ValueError: The tokenizer has no `eos_token` to add.
        UnsupportedError: The chat template leaves out a field of a message; the error names the field.
        ConcurrencyError: The file changed while it was read.

    Source:
        `torchrl.data.TokenizedDatasetLoader`.
    """
    if isinstance(columns, Mapping):
        name = None
        entries = dict(columns)
    else:
        name = _WHOLE
        entries = {_WHOLE: columns}
    plan = _Plan(tokenizer, entries, chat_template, add_special_tokens, add_eos_token)
    pad_id = pad_id_of(text_tokenizer(tokenizer))
    records = Records(source, plan.entries, ("tools", "system"))
    if cache_dir is None:
        made = _tokenize(plan, records, None, progress)
    else:
        folder = local_folder(cache_dir, "load_tokens: cache_dir")
        made = _cached(plan, records, os.path.abspath(folder), verify=verify, progress=progress)
    return TokenDataset(made, pad_id, name)


def _cached(plan: "_Plan", records: Records, folder: str, *, verify: bool, progress: bool) -> TensorDict:
    """Return the columns of records from the cache in a folder, which is made if there is none."""
    key = f"{plan.digest()}{records.digest}"
    make_folder(folder, fsync=False)
    stem = os.path.join(folder, f"tokens-{xxhash.xxh3_128_hexdigest(key.encode())}")
    path = f"{stem}.safetensors"
    found = _read_cache(path, key, verify)
    if found is not None:
        return found
    with Descriptor(f"{stem}.lock", platform.LOCK_FILE, 0o666) as fd:
        # Without locks two processes both make the file, each as a whole.
        with suppress(OSError):
            platform.lock_file(fd, wait=True)
        # Another process may have made it while this one waited.
        found = _read_cache(path, key, verify)
        if found is None:
            made = _tokenize(plan, records, folder, progress)
            records.check_unchanged()
            save(TensorDict({"key": key, "columns": made}), path)
            found = _read_cache(path, key, verify=False)
            assert found is not None
        return found


def _read_cache(path: str, key: str, verify: bool) -> TensorDict | None:
    """Return the columns of a cache; None if it has to be made."""
    try:
        tree = load(path, verify=verify)
    except (FileNotFoundError, CorruptCheckpointError):
        return None
    if tree.get("key", None) == key:
        return tree["columns"]
    return None


@dataclass(frozen=True)
class _Plan:
    """The entries that are tokenized, by column, and the tokenizer and its options."""

    tokenizer: Any
    columns: dict[str, Column]
    chat_template: Any
    add_special_tokens: bool
    add_eos_token: bool

    @property
    def entries(self) -> list[str]:
        found: list[str] = []
        for entries in self.columns.values():
            found += [entries] if isinstance(entries, str) else entries
        return list(dict.fromkeys(found))

    def digest(self) -> str:
        template: Any = self.chat_template
        if isinstance(template, JinjaTemplate):
            own = template.tokenizer
            # Another tokenizer than the one of the ids may have other special tokens, which a template writes.
            special = [] if own is self.tokenizer else [text_tokenizer(own).special_tokens_map]
            template = [template.source, dict(template.options), *special]
        options = [_FORMAT, list(self.columns.items()), template, self.add_special_tokens, self.add_eos_token]
        return tokenizer_digest(self.tokenizer) + json.dumps(options, default=repr)

    def rows(self, entries: Column, records: Sequence[dict[str, Any]], first: int, kind: type) -> list[EncodedRow]:
        """Return a row of each record; `kind` is the type of the entry in the first record."""
        names = (entries,) if isinstance(entries, str) else entries
        _check_kind(records, names, first, kind)
        if kind is list:
            return self._chat_rows(names, records, first)
        values = [record[names[0]] for record in records]
        if len(names) == 2:
            responses = [record[names[1]] for record in records]
            options = {"add_special_tokens": self.add_special_tokens, "add_eos_token": self.add_eos_token}
            return prompt_rows(self.tokenizer, values, responses, **options)
        return self._text_rows(values)

    def _text_rows(self, texts: Sequence[str]) -> list[EncodedRow]:
        rows = text_rows(self.tokenizer, texts, add_special_tokens=self.add_special_tokens)
        if not self.add_eos_token:
            return rows
        own = text_tokenizer(self.tokenizer)
        counts = [(0, 0)] * len(texts)
        if self.add_special_tokens:
            counts = added_counts(own, texts)
        ended: list[EncodedRow] = []
        for row, (_, added) in zip(rows, counts, strict=True):
            ids = with_eos(own, row["input_ids"].tolist(), added)
            ended.append({"input_ids": torch.tensor(ids, dtype=torch.int64)})
        return ended

    def _chat_rows(self, names: Sequence[str], records: Sequence[dict[str, Any]], first: int) -> list[EncodedRow]:
        """Return the rows of conversations: an entry of the records, or a prompt followed by its response."""
        chats: list[Conversation] = []
        # The numbers of messages in front of the responses.
        prompts: list[int] = []
        for i, record in enumerate(records, first):
            where = f"Record {i}"
            parts = [read_messages(record[name], where) for name in names]
            parts[0] = with_system(parts[0], record, where)
            prompts.append(len(parts[0]) if len(parts) == 2 else 0)
            chats.append(Conversation([*chain(*parts)], read_tools(record.get("tools"), where)))
        template = find_template(self.chat_template, self.tokenizer)
        rows = chat_rows(self.tokenizer, template, chats, masks=True, prompts=prompts)
        check_masks(rows, chats, first=first, call="load_tokens")
        return rows

    def kept(self, entries: Column, records: Sequence[dict[str, Any]], kind: type) -> list[tuple[int, int]]:
        """Return the numbers of tokens at the start and the end of each row that truncation keeps."""
        if kind is not str or not self.add_special_tokens:
            return [(0, 0)] * len(records)
        if isinstance(entries, str):
            return added_counts(self.tokenizer, [record[entries] for record in records])
        # A response that is truncated does not end.
        before = added_counts(self.tokenizer, [record[entries[0]] for record in records])
        return [(first, 0) for first, _ in before]


def _check_kind(records: Sequence[dict[str, Any]], names: Sequence[str], first: int, kind: type) -> None:
    """Raise if an entry of a record has another type than the first one in the first record."""
    expected = "text" if kind is str else "list of messages"
    for i, record in enumerate(records, first):
        for name in names:
            if isinstance(record[name], kind):
                continue
            if name == names[0]:
                hint = None
            else:
                hint = "responses that are complete conversations have no entry for the prompt: prompt=None."
            raise error(
                TypeError,
                f"Record {i}: {name!r} is not a {expected} as {names[0]!r} is in the first record.",
                expected=f"a {expected}",
                got=brief(record[name]),
                hint=hint,
            )


class _Column:
    """The rows of a column, on disk as they come."""

    def __init__(self, stack: ExitStack, folder: str | None) -> None:
        self._stack = stack
        self._folder = folder
        self._files: dict[str, Any] = {"input_ids": self._open()}
        self._offsets = array("q", [0])
        self._kept = array("b")

    def _open(self) -> Any:
        # Without a name: nothing is left of it when the process ends.
        return self._stack.enter_context(tempfile.TemporaryFile(dir=self._folder))

    def add(self, rows: Sequence[EncodedRow], kept: Sequence[tuple[int, int]]) -> None:
        """Append rows, with the numbers of tokens at both ends that truncation keeps."""
        for row in rows:
            self._offsets.append(self._offsets[-1] + len(row["input_ids"]))
        for pair in kept:
            self._kept.extend(pair)
        for name in rows[0]:
            if name not in self._files:
                self._files[name] = self._open()
            values = torch.cat([row[name] for row in rows])
            if name == "input_ids":
                values = values.to(torch.int32)
            self._files[name].write(values.numpy().tobytes())

    def tree(self) -> TensorDict:
        """Return the rows as a tree of mapped files."""
        kept = torch.tensor(self._kept, dtype=torch.int8).reshape(-1, 2)
        leaves = {_OFFSETS: torch.tensor(self._offsets, dtype=torch.int64), _KEPT: kept}
        size = self._offsets[-1]
        for name, file in self._files.items():
            file.flush()
            dtype = np.int32 if name == "input_ids" else np.bool_
            # A file without bytes cannot be mapped.
            values = np.memmap(file, dtype, "r+", shape=(size,)) if size else np.empty(0, dtype)
            leaves[name] = torch.from_numpy(values)
        return TensorDict(leaves)


def _tokenize(plan: _Plan, records: Records, folder: str | None, progress: bool) -> TensorDict:
    with ExitStack() as stack:
        bar = progress_bar("load_tokens: progress=True", show=progress, unit="record", total=records.count)
        report = stack.enter_context(bar)
        made = {name: _Column(stack, folder) for name in plan.columns}
        # The type of the entry of each column: that in the first record.
        kinds: dict[str, type] = {}
        remaining = iter(records)
        first = 0
        while chunk := list(islice(remaining, _CHUNK)):
            for name, entries in plan.columns.items():
                if name not in kinds:
                    leading = entries if isinstance(entries, str) else entries[0]
                    kinds[name] = list if isinstance(chunk[0][leading], list) else str
                rows = plan.rows(entries, chunk, first, kinds[name])
                made[name].add(rows, plan.kept(entries, chunk, kinds[name]))
            first += len(chunk)
            report(len(chunk))
        return TensorDict({name: column.tree() for name, column in made.items()})
