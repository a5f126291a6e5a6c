"""Files and folders that were made to do harm, and what comes of loading them.

Each is loaded in a process of its own that notes every attempt to run code, to open other files or to write, and how
much memory it took. `python -m benchmarks.reliability.hostile` prints counts.
"""

# The tables of inputs are easier to check with several on a line.
# ruff: noqa: E501

import json
import os
import pickle
import resource
import signal
import struct
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.reliability.children import in_child
from benchmarks.reliability.loads import OURS, snapshot
from tdfunc import TensorDict, load, save
from tdfunc import open as open_file
from tdfunc.core.collection import iter_leaves
from tests.storage.trees import entry, forge

DEEP = 100_000
_W = entry("w", "F32", [1], 0, 4)
# Audit events of code that is run, or could be.
_CODE = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "exec", "compile", "import")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Payload:
    """An object whose pickle runs a command when it is read."""

    def __reduce__(self):
        return os.system, ("touch /tmp/tdfunc-payload-ran",)


# -- files ------------------------------------------------------------------------------------------------------


def _raw(header: str | bytes, data: bytes = bytes(4), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else header.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _leaf(name: str = "w", dtype: str = '"F32"', shape: str = "[1]", offsets: str = "[0,4]") -> str:
    return f'{{{json.dumps(name)}:{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}'


def _foreign() -> dict[str, bytes]:
    """Safetensors files of other programs."""
    good = _leaf()[1:-1]
    cases = {
        f"length {length}": _raw(_leaf(), length=length) for length in (0, 1, 2**31, 2**32, 2**62, 2**63, 2**64 - 1)
    }
    cases |= {f"shape {shape}": _raw(_leaf(shape=shape)) for shape in (
        "[-1]", "[1.0]", "[true]", "[1e0]", f"[{2**63}]", f"[{2**64 + 1}]", f"[{2**32},{2**32}]", f"[0,{2**63}]",
        "[" * DEEP, '["1"]', "null", "{}", "[" + "1," * 100_000 + "1]", "[0," + "9" * 5000 + "]",
    )}  # fmt: skip
    cases |= {f"offsets {offsets}": _raw(_leaf(offsets=offsets)) for offsets in (
        "[0,8]", "[4,0]", "[-4,0]", "[0.0,4.0]", "[true,4]", f"[{2**64},{2**64 + 4}]", "[0]", "[0,4,4]", "null", "[1,5]",
    )}  # fmt: skip
    cases |= {f"dtype {dtype}": _raw(_leaf(dtype=dtype)) for dtype in ('"F99"', "null", "3", '["F32"]', '"os.system"')}
    cases |= {f"name {name!r}"[:60]: _raw(_leaf(name)) for name in (
        "..", "../../x", "/etc/passwd", "a\0b", "", ".", "a..b", "\ud800", "__proto__", "x" * 1_000_000, "a." * 50_000 + "a",
        "__class__", "_data", "\u202e", "a/b",
    )}  # fmt: skip
    cases |= {
        "overlap": _raw(f'{{{good},"b":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}'),
        "hole": _raw(f'{{{good},"b":{{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}}}', bytes(12)),
        "one key twice": _raw(f"{{{good},{good}}}"),
        "one key twice, spelled otherwise": _raw(f'{{{good},{good.replace("w", chr(92) + "u0077", 1)}}}'),
        "metadata twice": _raw(f'{{"__metadata__":{{}},"__metadata__":{{}},{good}}}'),
        "metadata of numbers": _raw(f'{{"__metadata__":{{"a":1}},{good}}}'),
        "metadata a list": _raw(f'{{"__metadata__":[],{good}}}'),
        "deep lists": _raw("[" * DEEP),
        "deep objects": _raw('{"a":' * DEEP),
        "deep metadata": _raw(f'{{"__metadata__":{"[" * DEEP}'),
        "NaN": _raw('{"w":NaN}'),
        "a huge number": _raw('{"w":' + "9" * 100_000 + "}"),
        "no JSON": _raw(b"\xff" * 100),
        "UTF-16": _raw(_leaf().encode("utf-16")),
        "byte order mark": _raw(b"\xef\xbb\xbf" + _leaf().encode()),
        "many empty leaves": _raw(
            "{" + ",".join(f'"{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(20_000)) + "}", b""
        ),
        "nothing": b"", "zeros": bytes(4096), "a pickle": pickle.dumps(Payload()), "a text": b"hello world, a text",
    }  # fmt: skip
    return cases


def _node(keys: list[str], items: list[Any], **more: Any) -> dict[str, Any]:
    return {"keys": keys, "items": items, **more}


def _tree(*nodes: Any, specs: Any = (("F32", (1,)),), ties: Any = ()) -> str:
    return json.dumps({"specs": specs, "nodes": nodes, "ties": ties})


def _ours() -> dict[str, bytes]:
    """Files with good checksums around a description that lies."""
    values = [10**4000, "\ud800", [1] * 100_000, {"a" * 100_000: None}, 1e308, -0.0]
    trees = {f"class {name!r}": _tree(_node(["w"], [0], **{"class": name})) for name in (
        "os:system", "builtins:eval", "posix:system", "subprocess:Popen", "tdfunc:load", "tdfunc:save", "os:path.join",
        "pickle:loads", "torch:Tensor", "antigravity:x", ":", "", "tdfunc._tensordict:TensorDict", "sys:modules", 5, None,
    )}  # fmt: skip
    trees |= {f"size {size}"[:60]: _tree(_node(["w", "v"], [0, {"value": 1}], size=size)) for size in (
        [2**62], [2**63], [2**31, 2**31], [2**40, 0, 2**40], [-1], [1.0], [True], "1", [1] * 5000, {"a": 1},
    )}  # fmt: skip
    trees |= {f"a value over {size}": _tree(_node(["w", "v"], [0, {"value": 1, "shape": size}])) for size in (
        [2**62], [2**40, 2**22], [2**63], [0, 2**62],
    )}  # fmt: skip
    trees |= {f"value {i}": _tree(_node(["w", "v"], [0, {"value": value}])) for i, value in enumerate(values)}
    trees |= {f"own {own}": _tree(_node(["w"], [0], own=own)) for own in (0, -1, 10**9, "x", [0], None, {"a": 1})}
    trees |= {f"device {name!r}": _tree(_node(["w"], [0], device=name)) for name in (
        "cuda:99", "meta", "xla", "cpu:7", "x" * 10_000, 3, "", "os.system",
    )}  # fmt: skip
    trees |= {f"names {names!r}": _tree(_node(["w"], [0], size=[1], names=names)) for names in (
        [], ["a", "a"], [1], "a", [None, None], [["a"]],
    )}  # fmt: skip
    chain = [_node(["a"], [{"tree": i + 1}]) for i in range(20_000)]
    trees |= {
        "deep": _tree(*chain, _node(["w"], [0])),
        "itself": _tree(_node(["w", "a"], [0, {"tree": 0}])),
        "twice": _tree(_node(["w", "a", "b"], [0, {"tree": 1}, {"tree": 1}]), _node([], [])),
        "a circle": _tree(_node(["a"], [{"tree": 1}]), _node(["w", "b"], [0, {"tree": 0}])),
        "ties of nothing": _tree(_node(["w"], [0]), ties=[[[0, "x"], [0, "y"]]]),
        "ties far away": _tree(_node(["w"], [0]), ties=[[[10**9, "x"], [-5, "y"]]]),
        "one tie of many": _tree(
            _node(["w", *map(str, range(2000))], [0, *[{"tie": 0}] * 2000]), ties=[[[0, "w"], *([0, str(i)] for i in range(2000))]]
        ),
        "no nodes": _tree(), "deep JSON": "[" * DEEP, "deep objects": '{"a":' * DEEP, "a string": '"x"', "no JSON": "x",
        "many specs": _tree(_node(["w"], [0]), specs=[["F32", [1]]] * 50_000),
        "a spec of 50,000 dimensions": _tree(_node(["w"], [0]), specs=[["F32", [1] * 50_000]]),
        "a leaf of another size": _tree(_node(["w"], [0]), specs=[["F32", [2**40]]]),
        "a leaf of another dtype": _tree(_node(["w"], [0]), specs=[["I64", [1]]]),
        "keys of odd names": _tree(_node(["w", "..", "a/b", "\0", "__class__"], [0, *[{"value": 1}] * 4])),
    }  # fmt: skip
    return {f"description: {name}": forge(text, [_W], bytes(4)) for name, text in trees.items()}


# -- memmap folders ---------------------------------------------------------------------------------------------


def _meta(**more: Any) -> dict[str, Any]:
    return {"shape": [], "device": "None", "_type": "<class 'tensordict._td.TensorDict'>", **more}


def _entry(**more: Any) -> dict[str, Any]:
    return {"device": "cpu", "shape": [3], "dtype": "torch.float32", "is_nested": False, **more}


def _metas() -> dict[str, str]:
    """Texts of a meta.json beside `w.memmap` of 12 bytes and `n`, a folder of the same kind."""
    cases: dict[str, Any] = {f"shape {shape}"[:50]: _meta(w=_entry(shape=shape)) for shape in (
        [4], [2**40], [2**62], [2**63], [-3], [3.0], [True], "3", None, [2**32, 2**32], [0, 2**62], [1] * 5000, [],
    )}  # fmt: skip
    cases |= {f"dtype {dtype!r}": _meta(w=_entry(dtype=dtype)) for dtype in (
        "torch.float64", "torch.os.system", "os.system", "torch.load", None, 3, "torch.qint8", "torch.bool", "torch.uint8",
    )}  # fmt: skip
    cases |= {
        f"batch {size}"[:50]: _meta(w=_entry()) | {"shape": size} for size in ([2**62], [3, 1], [-1], "x", [1.5], None)
    }
    cases |= {f"type {kind}": _meta(w=_entry()) | {"_type": kind} for kind in (
        "<class 'os.system'>", "os.system", "<function os.system>", None, 5, "", "<class 'tensordict.tensorclass.NonTensorData'>",
        "<class 'tensordict._lazy.LazyStackedTensorDict'>",
    )}  # fmt: skip
    cases |= {f"key {key!r}"[:50]: _meta(**{key: _entry(shape=[8], dtype="torch.uint8")}) for key in (
        "../outside", "..", ".", "/etc/passwd", "n/../../outside", "a\0b", "\ud800", "%2e%2e/outside", "x" * 300, "C:\\x",
    )}  # fmt: skip
    cases |= {
        f"sub-tree {key!r}": _meta(**{key: {"type": "TensorDict"}})
        for key in ("..", ".", "../d", "/", "n/..", "w.memmap")
    }
    cases |= {f"class {name!r}": _meta(w=_entry()) | {"": {"tdfunc": 1, "class": name}} for name in (
        "os:system", "builtins:eval", "subprocess:Popen", "tdfunc:load", "pickle:loads", 5, ":", "antigravity:x",
    )}  # fmt: skip
    cases |= {f"special {value!r}"[:50]: _meta() | {"": {"tdfunc": 1, "special": value, "order": ["w"]}} for value in (
        {"w": _entry()}, {"../w": _entry()}, {"w": {"value": 1}}, {"w": {"values": [1] * 9}}, [], {"w": 5},
    )}  # fmt: skip
    texts = {name: json.dumps(case) for name, case in cases.items()}
    good = json.dumps(_meta(w=_entry()))
    return texts | {
        "deep lists": "[" * DEEP, "deep objects": '{"a":' * DEEP, "deep value": '{"shape":' + "[" * DEEP, "nothing": "",
        "NaN": good.replace("3", "NaN"), "one key twice": good.replace("{", '{"w":{},', 1), "a huge number": "9" * 100_000,
        "a list": "[]", "UTF-16": good.encode("utf-16").decode("latin-1"), "no type": "{}", "nested": json.dumps(_meta(w=_entry(is_nested=True))),
        "a pickle": pickle.dumps(Payload(), 0).decode("latin-1"),
    }  # fmt: skip


def _write_meta(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "meta.json").write_bytes(text.encode("utf-8", "surrogatepass"))


def _in_place(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def _add(name: str, raw: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(raw) and None


def _link_folder(folder: Path) -> None:
    os.rename(folder / "n", folder.parent / "moved")
    (folder / "n").symlink_to(folder.parent / "moved")


def _truncate(size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / "w.memmap", size)


def folder_cases() -> dict[str, Callable[[Path], None]]:
    """Changes of a good folder, which lies beside a file and a folder called `outside`."""
    cases = {f"meta.json: {name}": _write_meta(text) for name, text in _metas().items()}
    pipes = {f"{name} is a pipe": _in_place(name, os.mkfifo) for name in ("meta.json", "w.memmap")}
    return cases | pipes | {
        "leaf links out": _in_place("w.memmap", lambda at: at.symlink_to("../outside.memmap")),
        "leaf links to /etc/passwd": _in_place("w.memmap", lambda at: at.symlink_to("/etc/passwd")),
        "leaf links to /dev/zero": _in_place("w.memmap", lambda at: at.symlink_to("/dev/zero")),
        "leaf links to itself": _in_place("w.memmap", lambda at: at.symlink_to("w.memmap")),
        "leaf links inside": _in_place("w.memmap", lambda at: at.symlink_to("n/w.memmap")),
        "leaf is a hard link": _in_place("w.memmap", lambda at: os.link(at.parent.parent / "outside.memmap", at)),
        "leaf is a folder": _in_place("w.memmap", os.mkdir),
        "leaf is missing": _in_place("w.memmap", lambda at: None),
        "meta.json links out": _in_place("meta.json", lambda at: at.symlink_to("../outside.json")),
        "meta.json is a folder": _in_place("meta.json", os.mkdir),
        "folder links out": _link_folder,
        "other.pickle": _add("other.pickle", pickle.dumps(Payload())),
        "pickle.pkl": _add("pickle.pkl", pickle.dumps(Payload())),
        "pickle in a sub-tree": _add("n/other.pickle", pickle.dumps(Payload())),
        **{f"leaf of {size} bytes": _truncate(size) for size in (0, 1, 11, 13, 4096, 2**33)},
    }  # fmt: skip


def make_folder(root: Path) -> Path:
    """Write the good folder, and the files outside of it."""
    folder = root / "d"
    (folder / "n").mkdir(parents=True)
    for place, more in ((folder, {"n": {"type": "TensorDict"}}), (folder / "n", {})):
        (place / "meta.json").write_text(json.dumps(_meta(w=_entry(), **more)))
        np.arange(3, dtype=np.float32).tofile(place / "w.memmap")
    (root / "outside.memmap").write_bytes(b"SECRETSECRET")
    (root / "outside.json").write_text(json.dumps(_meta()))
    return folder


# -- what a load does -------------------------------------------------------------------------------------------


class Report(NamedTuple):
    """The result of one load."""

    # "refused", "loaded", "another error", "crashed"
    result: str
    # What it tried: "ran code", "left the folder", "wrote".
    tried: list[str]
    extra_bytes: int


def watch(
    call: Callable[[], Any], errors: tuple[type[BaseException], ...], inside: Path, timeout_s: int = 60
) -> Report:
    """Run a load in a process of its own, and note what it does."""
    before = snapshot(inside)

    def child() -> str:
        # pytest's timeout has a handler of its own.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(timeout_s)
        warnings.simplefilter("ignore")
        tried: list[str] = []
        _audit(tried, str(inside))
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            tree = call()
            result = "loaded" if _fits(tree, inside) else "larger than the files"
        except errors:
            result = "refused"
        except Exception as err:
            result = f"another error: {type(err).__name__}: {err}"[:200]
        extra = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)
        return json.dumps([result, sorted(set(tried)), extra])

    status, said = in_child(child)
    ended = Report("hung" if status == signal.SIGALRM else "crashed", [], 0)
    report = ended if status else Report(*json.loads(said))
    return report if snapshot(inside) == before else report._replace(tried=[*report.tried, "wrote"])


def _audit(tried: list[str], inside: str) -> None:
    # The hook sees its own list grow until the process ends; names of files are compared after links are followed.
    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in _CODE[:5]:
            tried.append("ran code")
        elif event == "open" and isinstance(args[0], str | bytes):
            name = os.fsdecode(args[0])
            if args[2] & _WRITES:
                tried.append("wrote")
            elif os.path.isabs(name) and not name.startswith(
                (inside, "/proc/self", "/sys/", sys.prefix, sys.base_prefix)
            ):
                tried.append(f"left the folder: {name}"[:60])

    sys.addaudithook(hook)


def _fits(tree: Any, inside: Path) -> bool:
    leaves = [leaf for _, leaf in iter_leaves(tree)] if not isinstance(tree, dict) else list(tree.values())
    storages = {leaf.data_ptr(): leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor)}
    for leaf in leaves:
        # Every page is read, so that one that the file lacks ends the process.
        if isinstance(leaf, torch.Tensor) and leaf.nbytes:
            leaf.reshape(-1).view(torch.uint8).sum()
    return sum(storages.values()) <= sum(size for _, size, _ in snapshot(inside).values()) + 4096


def _read_whole(path: Path) -> Any:
    return load(path)


def _read_unverified(path: Path) -> Any:
    return load(path, verify=False)


def _read_opened(path: Path) -> Any:
    with open_file(path) as f:
        f.spec()
        for key in ("w", "v", "a"):
            if key in f:
                f[key]
        return f.load()


READERS = {"load": _read_whole, "load, verify=False": _read_unverified, "open": _read_opened}


def file_cases() -> dict[str, bytes]:
    """All hostile files."""
    return _foreign() | _ours()


def check_files(cases: dict[str, bytes], root: Path) -> Iterator[tuple[str, str, int, Report]]:
    """Load each file in each way: case, way, size of the file, report."""
    for number, (name, raw) in enumerate(cases.items()):
        folder = root / str(number)
        folder.mkdir()
        path = folder / "f.safetensors"
        path.write_bytes(raw)
        for way, read in READERS.items():
            yield name, way, len(raw), watch(lambda read=read, path=path: read(path), OURS, folder)


def check_folders(
    cases: dict[str, Callable[[Path], None]],
    root: Path,
    read: Callable[[Path], Any] = TensorDict.load_memmap,
    errors: tuple[type[BaseException], ...] = (*OURS, FileNotFoundError),
) -> Iterator[tuple[str, int, Report]]:
    """Load each folder: case, size of its files, report."""
    for number, (name, change) in enumerate(cases.items()):
        made = make_folder(root / str(number))
        change(made)
        size = sum(size for _, size, _ in snapshot(made).values())
        yield name, size, watch(lambda made=made: read(made), errors, made)


def _tally(reports: Iterator[Report]) -> dict[str, int]:
    counts = {"inputs": 0, "refused": 0, "loaded": 0, "another error": 0, "hung": 0, "crashed": 0}
    counts |= {"ran code": 0, "left the folder": 0, "wrote": 0}
    for report in reports:
        counts["inputs"] += 1
        kind = report.result.split(":")[0]
        counts[kind] = counts.get(kind, 0) + 1
        for tried in {text.split(":")[0] for text in report.tried}:
            counts[tried] = counts.get(tried, 0) + 1
    return counts


def _load_tensordict(folder: Path) -> Any:
    from tests.incumbent import Incumbent

    tree = Incumbent.load_memmap(str(folder))
    return {str(key): leaf for key, leaf in tree.items(True, True)}


def _load_safetensors(path: Path) -> Any:
    import safetensors.torch

    return safetensors.torch.load_file(path)


def count_all() -> dict[str, Any]:
    """All inputs, ours and the incumbents."""
    import safetensors.torch  # noqa: F401

    from tests.incumbent import Incumbent

    assert Incumbent
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for name in ("ours", "theirs", "folders", "their folders"):
            (root / name).mkdir()
        found = list(check_files(file_cases(), root / "ours"))
        for way in READERS:
            results[f"files, tdfunc.{way}"] = _tally(report for _, w, _, report in found if w == way)
        theirs = []
        for number, (_, raw) in enumerate(file_cases().items()):
            folder = root / "theirs" / str(number)
            folder.mkdir()
            (folder / "f.safetensors").write_bytes(raw)
            path = folder / "f.safetensors"
            theirs.append(watch(lambda path=path: _load_safetensors(path), (Exception,), folder))
        results["files, safetensors load_file"] = _tally(iter(theirs))
        folders = list(check_folders(folder_cases(), root / "folders"))
        results["folders, TensorDict.load_memmap"] = _tally(report for _, _, report in folders)
        others = check_folders(folder_cases(), root / "their folders", _load_tensordict, (Exception,))
        results["folders, tensordict load_memmap"] = _tally(report for _, _, report in others)
        # A forked process copies what it touches: what a small good file takes is no part of the load.
        (root / "good").mkdir()
        save(TensorDict({"w": torch.zeros(1)}), root / "good" / "f.safetensors")
        good = [watch(lambda: _read_whole(root / "good" / "f.safetensors"), OURS, root / "good") for _ in range(5)]
        usual = max(report.extra_bytes for report in good)
        sizes = [(max(0, report.extra_bytes - usual), size, name) for name, _, size, report in found]
        sizes += [(max(0, report.extra_bytes - usual), size, name) for name, size, report in folders]
        results["memory"] = max(sizes)
        for name, *_, report in [*found, *folders]:
            if report.result not in ("refused", "loaded") or report.tried:
                print(name, report, file=sys.stderr)
    return results


if __name__ == "__main__":
    print(json.dumps(count_all(), indent=1))
