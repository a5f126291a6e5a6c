"""Damaged files and folders, and what each library makes of them.

A load of damaged input is `refused` (an error), `equal` (the saved values), `wrong` (anything else, without a word),
`crashed` (the process is gone), or `wrote` (it changed the files).

`python -m benchmarks.reliability.damage` prints counts.
"""

import json
import os
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.reliability.children import forked
from benchmarks.reliability.loads import OURS, snapshot
from tdfunc import TensorDict, load, save
from tdfunc.core.collection import iter_leaves
from tests.storage.trees import same_bytes

VALUES = {"w": torch.arange(6.0).reshape(2, 3), "n": {"b": torch.tensor([1, 2**40]), "m": torch.tensor([True, False])}}
# What a test of ours may not let happen.
OTHER = "another error"


class Library(NamedTuple):
    """A writer and a reader of one format."""

    save: Callable[[Path], None]
    # Returns leaves by dotted path.
    load: Callable[[Path], dict[str, torch.Tensor]]
    # The errors that it may raise; of others' any counts.
    errors: tuple[type[BaseException], ...]
    # torch.load looks at it.
    suffix: str = ".safetensors"


def _flat(tree: Any) -> dict[str, torch.Tensor]:
    return {".".join(path): leaf for path, leaf in iter_leaves(tree)}


def _load_ours(path: Path) -> dict[str, torch.Tensor]:
    return _flat(load(path))


def _save_safetensors(path: Path) -> None:
    import safetensors.torch

    safetensors.torch.save_file(_flat(TensorDict(VALUES)), path)


def _load_safetensors(path: Path) -> dict[str, torch.Tensor]:
    import safetensors.torch

    return safetensors.torch.load_file(path)


def _save_torch(path: Path) -> None:
    torch.save(_flat(TensorDict(VALUES)), path)


def _load_torch(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)


def _save_tensordict(path: Path) -> None:
    from tests.incumbent import Incumbent

    Incumbent(VALUES, []).memmap(str(path))


def _load_tensordict(path: Path) -> dict[str, torch.Tensor]:
    from tests.incumbent import Incumbent

    tree = Incumbent.load_memmap(str(path))
    return {".".join([key] if isinstance(key, str) else key): leaf for key, leaf in tree.items(True, True)}


FILES = {
    "tdfunc.load": Library(lambda path: save(TensorDict(VALUES), path), _load_ours, OURS),
    "safetensors load_file": Library(_save_safetensors, _load_safetensors, (Exception,)),
    "torch.load(weights_only=True)": Library(_save_torch, _load_torch, (Exception,), ".pt"),
}
FOLDERS = {
    "TensorDict.load_memmap": Library(
        lambda path: TensorDict(VALUES).memmap(path), lambda path: _flat(TensorDict.load_memmap(path)), OURS
    ),
    "tensordict load_memmap": Library(_save_tensordict, _load_tensordict, (Exception,)),
}
SHARDS = Library(lambda path: save(TensorDict(VALUES), path, max_shard_size=20), _load_ours, OURS)


# -- damage -----------------------------------------------------------------------------------------------------


def flips(raw: bytes) -> Iterator[bytes]:
    """Every bit, flipped alone."""
    for place in range(len(raw)):
        for bit in range(8):
            yield raw[:place] + bytes([raw[place] ^ 1 << bit]) + raw[place + 1 :]


def cuts(raw: bytes) -> Iterator[bytes]:
    """Every shorter length."""
    for length in range(len(raw)):
        yield raw[:length]


def extensions(raw: bytes) -> Iterator[bytes]:
    """Longer files."""
    for more in (b"\0", b"{", bytes(8), bytes(4096), raw):
        yield raw + more


def bytes_changed(raw: bytes) -> Iterator[bytes]:
    """Every byte, set to each of some others."""
    for place in range(len(raw)):
        for new in b'\x00 "0-9,:[]{}~\xff':
            if raw[place] != new:
                yield raw[:place] + bytes([new]) + raw[place + 1 :]


DAMAGE = {"one bit flipped": flips, "cut short": cuts, "made longer": extensions}


# -- outcomes ---------------------------------------------------------------------------------------------------


def judge(library: Library, path: Path) -> str:
    """Load the damaged input and return the verdict."""
    folder = path if path.is_dir() else path.parent
    before = snapshot(folder)
    try:
        leaves = library.load(path)
        result = "equal" if _equal(leaves) else "wrong"
    except library.errors:
        result = "refused"
    except Exception as err:
        print(f"{type(err).__name__}: {err}", file=sys.stderr)
        result = OTHER
    return result if snapshot(folder) == before else "wrote"


def _equal(leaves: dict[str, torch.Tensor]) -> bool:
    expected = _flat(TensorDict(VALUES))
    return leaves.keys() == expected.keys() and all(same_bytes(leaves[name], expected[name]) for name in expected)


def survey(cases: list[Any], attempt: Callable[[Any], str]) -> Counter[str]:
    """Try each case in a child process, since some end it; count the outcomes."""
    counts: Counter[str] = Counter()

    def try_from(at: int, into: int) -> None:
        warnings.simplefilter("ignore")
        for case in cases[at:]:
            os.write(into, f"{attempt(case)}\n".encode())

    at = 0
    while at < len(cases):
        status, said = forked(partial(try_from, at))
        done = said.split("\n")[:-1]
        counts.update(done)
        at += len(done)
        if at < len(cases):
            assert status, "the child ended too early"
            counts["crashed"] += 1
            at += 1
    return counts


def damaged_file(library: Library, damage: Callable[[bytes], Iterator[bytes]], folder: Path) -> Counter[str]:
    """Damage one small file in each way."""
    path = folder / f"f{library.suffix}"
    library.save(path)
    assert judge(library, path) == "equal"

    def attempt(raw: bytes) -> str:
        path.write_bytes(raw)
        return judge(library, path)

    return survey(list(damage(path.read_bytes())), attempt)


def damaged_folder(
    library: Library, suffix: str, damage: Callable[[bytes], Iterator[bytes]], folder: Path, *, every: int = 1
) -> Counter[str]:
    """Damage every file of a folder whose name ends so, one at a time, in each way or in some of them."""
    good, path = folder / "good", folder / "d"
    library.save(good)
    names = sorted(str(file.relative_to(good)) for file in good.rglob(f"*{suffix}"))
    cases = [(name, raw) for name in names for raw in damage((good / name).read_bytes())]

    def attempt(case: tuple[str, bytes]) -> str:
        # Whole again, whatever the load before did to it.
        shutil.copytree(good, path, dirs_exist_ok=True)
        (path / case[0]).write_bytes(case[1])
        return judge(library, path)

    return survey(cases[::every], attempt)


def count_all() -> dict[str, dict[str, dict[str, int]]]:
    """Every damage of every format, by library."""
    torch.set_num_threads(1)
    result: dict[str, dict[str, dict[str, int]]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as scratch:
        numbers = iter(range(1000))

        def fresh() -> Path:
            made = Path(scratch, str(next(numbers)))
            made.mkdir()
            return made

        for what, damage in DAMAGE.items():
            for name, library in FILES.items():
                result.setdefault(f"file: {what}", {})[name] = dict(damaged_file(library, damage, fresh()))
            result[f"shards: {what}"] = {
                "tdfunc.load": dict(damaged_folder(SHARDS, ".safetensors", damage, fresh())),
                "tdfunc.load, index": dict(damaged_folder(SHARDS, ".json", damage, fresh())),
            }
            for name, library in FOLDERS.items():
                for suffix, part in ((".json", "meta.json"), (".memmap", "a leaf")):
                    counts = damaged_folder(library, suffix, damage, fresh())
                    result.setdefault(f"memmap, {part}: {what}", {})[name] = dict(counts)
    return result


if __name__ == "__main__":
    print(json.dumps(count_all(), indent=1))
