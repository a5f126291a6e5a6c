"""Records: the dicts of a data set, from a file or an iterable, and a digest of them."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import xxhash

from tdfunc.core.context import cached_property
from tdfunc.core.errors import ConcurrencyError, MissingKeyError, UnsupportedError, brief, error
from tdfunc.llm.conversations.jsonl import json_lines
from tdfunc.llm.messages.message import as_lists

_PIECE_BYTES = 4 << 20
_ROWS = 1024


def read_records(path: "str | os.PathLike[str]") -> Iterator[dict[str, Any]]:
    """Yield the records of a file: the lines of `.jsonl`, the lines of `.txt` as `text`, or the rows of `.parquet`.

    Raises:
        ValueError: The file has another suffix, or a line is not a JSON object; the error names it.
        UnsupportedError: pyarrow is not installed.
    """
    name = os.fspath(path)
    suffix = os.path.splitext(name)[1]
    readers = {".jsonl": _json_lines, ".txt": _text_lines, ".parquet": _parquet}
    if suffix not in readers:
        raise error(
            ValueError,
            f"read_records {name}: the name does not end in .jsonl, .txt or .parquet.",
            got=suffix or "none",
            hint="pass an iterable of dicts instead.",
        )
    return readers[suffix](name)


def _json_lines(name: str) -> Iterator[dict[str, Any]]:
    for number, line, record in json_lines(name, name):
        if not isinstance(record, dict):
            raise error(ValueError, f"{name}: line {number} is not a JSON object.", got=brief(line))
        yield record


def _text_lines(name: str) -> Iterator[dict[str, Any]]:
    # Only ends of lines separate records, not the other characters of str.splitlines.
    # Programs of Windows begin a file with a mark, which is not text.
    with open(name, encoding="utf-8-sig") as file:
        for line in file:
            yield {"text": line.removesuffix("\n")}


def _parquet(name: str) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import parquet  # pyright: ignore[reportMissingImports]
    except ImportError as err:
        raise UnsupportedError(f"{name}: parquet files need pyarrow.", hint="pip install pyarrow.") from err
    # Any: without stubs.
    file: Any = parquet.ParquetFile(name)
    for batch in file.iter_batches(_ROWS):
        yield from batch.to_pylist()


class Records:
    """The records of a source, reduced to the entries that are read.

    Args:
        source: A file, which is read at each iteration, or an iterable of dicts or texts, which is read now.
        entries: The entries that each record must have.
        optional: Further entries, which are kept where a record has them.

    Raises:
        TypeError: The source has columns instead of records, or a record is neither a dict nor a text.
        MissingKeyError: A record lacks an entry.
    """

    def __init__(self, source: Any, entries: Sequence[str], optional: Sequence[str] = ()) -> None:
        self._entries = entries
        self._optional = optional
        self._path = os.fspath(source) if isinstance(source, (str, os.PathLike)) else ""
        # Data frames are also iterables of the names of their columns.
        if isinstance(source, Mapping) or hasattr(source, "iterrows"):
            raise error(
                TypeError,
                "the source is a table, not an iterable of records.",
                got=f"a {type(source).__name__} of columns",
                hint='pass frame.to_dict("records").',
            )
        given: Any = source
        self._records = None if self._path else [*self._select(given)]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield each record."""
        if self._records is not None:
            return iter(self._records)
        return self._select(read_records(self._path))

    @property
    def count(self) -> int | None:
        """The number of records; None for a file, which is not read for it."""
        if self._records is None:
            return None
        return len(self._records)

    def _select(self, records: Iterable[Any]) -> Iterator[dict[str, Any]]:
        for i, given in enumerate(records):
            record = {"text": given} if isinstance(given, str) else given
            if not isinstance(record, Mapping):
                raise error(TypeError, f"Record {i} is not a dict or a text.", got=brief(record))
            for name in self._entries:
                if name not in record:
                    raise _no_entry(i, name, record)
            names = [name for name in (*self._entries, *self._optional) if name in record]
            yield {name: as_lists(record[name]) for name in names}

    @cached_property
    def digest(self) -> str:
        """The digest of the file's suffix and bytes, or of all records."""
        return self._current()

    def _current(self) -> str:
        state = xxhash.xxh3_128()
        if self._records is not None:
            for record in self._records:
                # Not sorted: a template may write a dict, such as a tool, in its own order.
                state.update(json.dumps(record).encode() + b"\n")
        else:
            state.update(os.path.splitext(self._path)[1].encode())
            with open(self._path, "rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    state.update(piece)
        return state.hexdigest()

    def check_unchanged(self) -> None:
        """Raise if the file has changed since its digest was taken.

        Raises:
            ConcurrencyError: The file has changed.
        """
        if self._records is None and self._current() != self.digest:
            raise ConcurrencyError(f"{self._path} changed while it was read.", hint="load it again.")


def _no_entry(number: int, name: str, record: Mapping[str, Any]) -> MissingKeyError:
    """Return the error of a record that lacks an entry."""
    hint = None
    if name == "prompt":
        hint = "PairwiseDataset.from_dataset(..., prompt=None) reads pairs whose conversations contain the prompt."
    return MissingKeyError(f"Record {number} has no {name!r}.", got=brief(list(record)), hint=hint)
