"""Files that are not what was saved: damaged, cut, or made to do harm. Each load raises, naming the file."""

import json
import os
import re
import struct

import pytest
import torch
import xxhash
from torch import nn

from tdfunc import CorruptCheckpointError, LeafMismatchError, TensorDict, UnsupportedError
from tdfunc import open as open_file
from tdfunc.storage.api import load, save
from tests.storage.trees import assert_same, entry, forge, retie

pytestmark = pytest.mark.sample(3)

OURS = (CorruptCheckpointError, UnsupportedError)


@pytest.fixture
def path(tmp_path):
    """A small file with something of everything in it."""
    leaf = nn.Parameter(torch.tensor([1.5]))
    tree = TensorDict({"n": {"w": leaf, "h": torch.ones(2).bfloat16()}, "s": "x", "t": leaf}, names=None)
    save(retie(tree, [[("n", "w"), ("t",)]]), tmp_path / "f.safetensors")
    return tmp_path / "f.safetensors"


def overwrite(path, raw):
    """Change the bytes of a file in place."""
    with open(path, "r+b") as f:
        f.write(raw)
        f.truncate(len(raw))


def result_of(path, **options):
    """The message of the error that a load raises, or "loaded"; other errors pass through."""
    try:
        load(path, **options)
    except OURS as err:
        return str(err)
    return "loaded"


def test_every_flipped_bit_is_detected(path):
    """Each flipped bit of a file is an error that names the file."""
    raw = bytearray(path.read_bytes())
    results = []
    for place in range(len(raw)):
        for bit in range(8):
            raw[place] ^= 1 << bit
            overwrite(path, raw)
            raw[place] ^= 1 << bit
            results.append(result_of(path))

    assert len(results) > 4000
    assert {"loaded" if str(path) not in result else "raised" for result in results} == {"raised"}


def test_unverified_loads_of_flipped_bits(path):
    """Without checksums a damaged header is an error that names the file, or loads."""
    raw = bytearray(path.read_bytes())
    results = []
    for place in range(len(raw)):
        raw[place] ^= 1 << place % 8
        overwrite(path, raw)
        raw[place] ^= 1 << place % 8
        results.append(result_of(path, verify=False))

    # The bytes of values and checksums are not looked at.
    assert results.count("loaded") > 8
    assert all(str(path) in result for result in results if result != "loaded")


def refusal(path):
    """The message of the error that a load raises."""
    try:
        load(path)
    except OURS as err:
        return str(err)
    return "loaded"


def test_every_truncation_is_detected(path):
    """A file that is cut anywhere is refused, and stays as it is."""
    raw, messages, sizes = path.read_bytes(), [], []
    for length in range(len(raw)):
        overwrite(path, raw[:length])
        messages.append(refusal(path))
        sizes.append(path.stat().st_size)

    strange = {i: each for i, each in enumerate(messages) if not re.search("cut short|not a safetensors", each)}
    assert strange == {}
    assert sizes == list(range(len(raw)))


def test_a_longer_file_is_refused(path):
    """With both lengths."""
    raw = path.read_bytes()
    overwrite(path, raw + b"\0")
    with pytest.raises(CorruptCheckpointError, match=rf"longer[\s\S]*{len(raw)} bytes[\s\S]*{len(raw) + 1} bytes"):
        load(path)


# -- files with valid checksums and harmful contents ------------------------------------------------------------


def node(keys=(), items=(), **fields):
    """A node as it stands in the JSON of a tree."""
    return {**fields, "keys": list(keys), "items": list(items)}


def tree(*nodes, specs=(("F32", [2]),), ties=()):
    """The JSON of a tree."""
    return {"specs": list(specs), "nodes": list(nodes), "ties": list(ties)}


W = entry("w", "F32", [2], 0, 8)
DATA = struct.pack("<2f", 1, 2)


def test_the_forger_writes_good_files(tmp_path):
    """A forged file without a lie loads, so the refusals below are those of the lie."""
    (tmp_path / "f.safetensors").write_bytes(forge(tree(node("w", [0])), [W], DATA))

    assert_same(load(tmp_path / "f.safetensors"), TensorDict({"w": torch.tensor([1.0, 2.0])}))
    (tmp_path / "f.safetensors").write_bytes(forge(stack(node(size=[])), [W], DATA))
    assert load(tmp_path / "f.safetensors")["s"].batch_size == (2,)


def test_our_files_are_those_of_the_forger(tmp_path):
    """A file has the bytes that docs/formats.md describes."""
    save(TensorDict({"w": torch.tensor([1.0, 2.0])}), tmp_path / "f.safetensors")
    text = '{"specs":[["F32",[2]]],"nodes":[{"keys":["w"],"items":[0]}],"ties":[]}'

    assert (tmp_path / "f.safetensors").read_bytes() == forge(text, [W], DATA)


DEEP = 100_000
STACK = {"size": [2], "class": "tdfunc._lazystack.stack:LazyStack", "own": -1}


def stack(second, *, keys="01", first=(), **fields):
    """The JSON of a tree with a leaf and a lazy stack of two empty trees."""
    trees = node(keys, [{"tree": 2}, {"tree": 3}], **{**STACK, **fields})
    return tree(node("ws", [0, {"tree": 1}]), trees, node(size=list(first)), second)


TREES = {
    "no nodes": tree(),
    "no tree": "[]",
    "no JSON": "{",
    "empty": "",
    "deep JSON": "[" * DEEP,
    "deep value": '{"specs":[],"ties":[],"nodes":[{"keys":["s"],"items":[{"value":' + "[" * DEEP + "]" * DEEP + "}]}]}",
    "long number": '{"specs":[["F32",[' + "1" * 5000 + ']]],"nodes":[],"ties":[]}',
    "nan": '{"specs":[["F32",[2]]],"nodes":[{"keys":["w","s"],"items":[0,{"value":NaN}]}],"ties":[]}',
    "a key twice in JSON": '{"specs":[["F32",[2]]],"nodes":[{"keys":["x"],"keys":["w"],"items":[0]}],"ties":[]}',
    "a key twice": tree(node(["w", "w"], [0, {"value": 1}])),
    "an empty key": tree(node(["w", ""], [0, {"value": 1}])),
    "a key that is no str": tree(node(["w", 3], [0, {"value": 1}])),
    "more keys than items": tree(node(["w", "x"], [0])),
    "an unknown spec": tree(node("w", [1])),
    "a negative spec": tree(node("w", [-1])),
    "a bool for a spec": tree(node("w", [False])),
    "negative sizes": tree(node("w", [0]), specs=[("F32", [-2])]),
    "two negative sizes": tree(node("w", [0]), specs=[("F32", [-1, -2])]),
    "a fraction for a size": tree(node("w", [0]), specs=[("F32", [2.0])]),
    "a huge shape": tree(node("w", [0]), specs=[("F32", [2**62, 2**62])]),
    "a huge shape of nothing": tree(node("wx", [0, 1]), specs=[("F32", [2]), ("F32", [0, 2**62, 2**62])]),
    "a long shape": tree(node("w", [0]), specs=[("F32", [2] * 200_000)]),
    "a long batch size": tree(node("w", [0], size=[2] * 200_000)),
    "an odd float4": tree(node("w", [0]), specs=[("F4", [3])]),
    "an unknown dtype": tree(node("w", [0]), specs=[("F31", [2])]),
    "a leaf that the entries lack": tree(node("wx", [0, 0])),
    "another dtype": tree(node("w", [0]), specs=[("I32", [2])]),
    "another name": tree(node("x", [0])),
    "one name twice": tree(node("wx", [0, [0, "", "w"]])),
    "no leaf": tree(node()),
    "a batch size that the leaf lacks": tree(node("w", [0], size=[3])),
    "a negative batch size": tree(node("w", [0], size=[-1])),
    "a huge batch size": tree(node("ws", [0, {"value": 1, "shape": [2**62] * 3}])),
    "a batch size past 64 bits": tree(node("ws", [0, {"value": 1, "shape": [2**64]}])),
    "a batch size that the value lacks": tree(node("ws", [0, {"value": 1, "shape": [3]}], size=[2])),
    "too few values": tree(node("ws", [0, {"values": [1], "shape": [2]}], size=[2])),
    "a sub-tree of another batch": tree(node("wt", [0, {"tree": 1}], size=[2]), node(size=[3])),
    "a sub-tree that is not there": tree(node("wt", [0, {"tree": 1}])),
    "a sub-tree in itself": tree(node("wt", [0, {"tree": 0}])),
    "a sub-tree twice": tree(node("wtu", [0, {"tree": 1}, {"tree": 1}]), node()),
    "keys of no list": '{"specs":[["F32",[2]]],"nodes":[{"keys":"w","items":[0]}],"ties":[]}',
    "a cycle": tree(node("w", [0]), node("t", [{"tree": 2}]), node("t", [{"tree": 1}])),
    "a node outside": tree(node("w", [0]), node()),
    "an item of no kind": tree(node("wx", [0, {"other": 1}])),
    "an item of text": tree(node("wx", [0, "text"])),
    "an empty item": tree(node("wx", [0, []])),
    "too many names": tree(node("w", [0], names=["a"])),
    "a device of no kind": tree(node("w", [0], device="nowhere")),
    "a device of no type": tree(node("w", [0], device=0)),
    "a tie of one": tree(node("w", [0]), ties=[[[0, "w"]]]),
    "a tie to nothing": tree(node("w", [0]), ties=[[[0, "w"], [0, "x"]]]),
    "a tie to a number": tree(node("wx", [0, {"tie": 0}]), ties=[[[0, "w"], [5, "x"]]]),
    "a tie without a group": tree(node("wx", [0, {"tie": 0}])),
    "a tie to another group": tree(node("wx", [0, {"tie": 1}]), ties=[[[0, "w"], [0, "x"]]]),
    "a tie that comes first": tree(node("wx", [{"tie": 0}, 0]), ties=[[[0, "w"], [0, "x"]]]),
    "a tie between values": tree(node("wst", [0, {"value": 1}, {"tie": 0}]), ties=[[[0, "s"], [0, "t"]]]),
    "a path in two ties": tree(node("wx", [0, {"tie": 0}]), ties=[[[0, "w"], [0, "x"]], [[0, "w"], [0, "x"]]]),
    "a tie of a number that is none": tree(node("wx", [0, {"tie": 0}]), ties=[[["0", "w"], [0, "x"]]]),
    "flags of a number": tree(node("w", [[0, 5]])),
    "flags of two kinds": tree(node("w", [[0, "pb"]])),
    "flags of a value in a list": tree(node("ws", [0, {"value": 1, "flags": [0, "n"]}])),
    "flags of a value that only a tensor has": tree(node("ws", [0, {"value": 1, "flags": "P"}])),
    "flags of an alias in a list": tree(node("wx", [0, {"tie": 0, "flags": ["b"]}]), ties=[[[0, "w"], [0, "x"]]]),
    "a value and values": tree(node("ws", [0, {"value": [1], "values": [1], "shape": [1]}])),
    "a tree and a value": tree(node("ws", [0, {"value": 1, "tree": 1}]), node()),
    "a number for a name": tree(node("w", [[0, "", 7]])),
    "a gradient for ints": tree(node("w", [[0, "g"]]), specs=[("I32", [2])]),
    "a Parameter of ints": tree(node("w", [[0, "Pg"]]), specs=[("I32", [2])]),
    "flags in a list": tree(node("w", [[0, ["P"]]])),
    "an unknown flag": tree(node("w", [[0, "?"]])),
    "a device without values": tree(node("w", [0], device="meta")),
    "a number that only a class has": tree(node("w", [0], own=0)),
    "no description": {},
    "nodes of a number": {"specs": [], "nodes": 3, "ties": []},
    "a tie in a tree in itself": tree(
        node("xa", [{"tie": 0}, {"tree": 1}]), node("bw", [{"tree": 1}, 0]), ties=[[[1, "w"], [0, "x"]]]
    ),
    "flags of a tree": tree(node("wt", [0, {"tree": 1, "flags": "b"}]), node()),
    "a stack without a tree": tree(node("ws", [0, {"tree": 1}]), node(**STACK)),
    "a stack out of order": stack(node(size=[]), keys="02"),
    "a stack of values": tree(node("ws", [0, {"tree": 1}]), node("01", [{"value": 1}, {"value": 2}], **STACK)),
    "a stack of two kinds": stack(node(size=[2])),
    "a stack of larger trees": stack(node(size=[2]), first=[2]),
    **{f"a stack along {dim}": stack(node(size=[]), own=dim) for dim in (-2, None, 0)},
    "a stack of another size": stack(node(size=[]), size=[3]),
}
WHOLE = {
    "load": load,
    "unverified": lambda path: load(path, verify=False),
    "handle": lambda path: _opened(path, lambda f: f.load()),
}
# A leaf that is read alone is checked with the nodes on the way to it.
PARTS = {
    "leaf": lambda path: _opened(path, lambda f: f["w"]),
    "chosen": lambda path: load(path, where="w"),
    "compared": lambda path: load(path, like={"w": torch.zeros(2)}),
    "meta": lambda path: load(path, device="meta"),
    "spec": lambda path: _opened(path, lambda f: f.spec()),
}
LEAVES = [
    "an unknown spec", "negative sizes", "a huge shape", "an unknown dtype", "flags of a number", "flags in a list",
    "an unknown flag", "a gradient for ints", "a Parameter of ints", "no nodes", "no description", "nodes of a number",
    "a device without values",
]  # fmt: skip


def _opened(path, read):
    with open_file(path) as f:
        return read(f)


D0, D1 = (xxhash.xxh3_64_hexdigest(DATA[4 * i : 4 * i + 4]) for i in range(2))
# Rows of the table of leaf w of two elements, and a part of the error.
BLOCKS = {
    "no list": ("3", "malformed"),
    "no rows": ('[[0,1,"x"]]', "malformed"),
    "half": (f'[[[0],[1],"{D0}"]]', "blocks of all 2 elements"),
    "outside": (f'[[[0],[1],"{D0}"],[[2],[1],"{D1}"]]', "blocks inside leaf"),
    "negative": (f'[[[0],[1],"{D0}"],[[-1],[1],"{D1}"]]', "blocks inside leaf"),
    "a bool": (f'[[[0],[1],"{D0}"],[[true],[1],"{D1}"]]', "blocks inside leaf"),
    "two dimensions": (f'[[[0,0],[1,2],"{D0}"]]', "blocks inside leaf"),
    "another table": (f'[[[0],[1],"{D0}"], [[1],[1],"{D1}"]]', "the table of leaf"),
    "values": (f'[[[0],[1],"{D0}"],[[1],[1],"{D0}"]]', r"from \[1\] to \[2\] is damaged"),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_harmful_tables_of_blocks(tmp_path, case):
    """A table of blocks that is not one of the leaf's, or not of its values, is refused; a good one is read."""
    for rows, message in (BLOCKS[case], (f'[[[0],[1],"{D0}"],[[1],[1],"{D1}"]]', None)):
        text = json.dumps('{"w":' + rows + "}")
        extra = f',"tdfunc.blocks":{text}'
        root = xxhash.xxh3_64_hexdigest(rows.encode())
        raw = forge(tree(node("w", [0])), [W], DATA, version="2", leaves=root, extra=extra)
        (tmp_path / "f.safetensors").write_bytes(raw)
        if message is not None:
            with pytest.raises(CorruptCheckpointError, match=message):
                load(tmp_path / "f.safetensors")
    assert load(tmp_path / "f.safetensors")["w"].shape == (2,)


@pytest.mark.parametrize("read", WHOLE)
@pytest.mark.parametrize("case", TREES)
@pytest.mark.timeout(20)
def test_hostile_trees(case, read, tmp_path):
    """A description that lies is refused by an error that names the file, whichever way it is read."""
    entries = [entry("w", "I32", [2], 0, 8)] if "ints" in case else [W]
    (tmp_path / "f.safetensors").write_bytes(forge(TREES[case], entries, DATA))

    with pytest.raises(OURS, match=r"load .*f\.safetensors"):
        WHOLE[read](tmp_path / "f.safetensors")


@pytest.mark.parametrize("read", PARTS)
@pytest.mark.parametrize("case", LEAVES)
def test_hostile_leaves(case, read, tmp_path):
    """A leaf whose own entry lies is refused when a part of the tree, or its description, is read."""
    entries = [entry("w", "I32", [2], 0, 8)] if "ints" in case else [W]
    (tmp_path / "f.safetensors").write_bytes(forge(TREES[case], entries, DATA))

    with pytest.raises((*OURS, LeafMismatchError), match=r"load .*f\.safetensors"):
        PARTS[read](tmp_path / "f.safetensors")


HEADERS = {
    "overlap": f"{{{entry('a', 'U8', [4], 0, 4)},{entry('b', 'U8', [4], 2, 6)}}}",
    "hole": f"{{{entry('a', 'U8', [4], 0, 4)},{entry('b', 'U8', [2], 6, 8)}}}",
    "outside": '{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}',
    "too little": '{"a":{"dtype":"U8","shape":[7],"data_offsets":[0,7]}}',
    "backwards": '{"a":{"dtype":"U8","shape":[8],"data_offsets":[8,0]}}',
    "negative": '{"a":{"dtype":"U8","shape":[8],"data_offsets":[-8,0]}}',
    "negative size": '{"a":{"dtype":"U8","shape":[-8],"data_offsets":[0,8]}}',
    "fraction": '{"a":{"dtype":"U8","shape":[8.0],"data_offsets":[0,8]}}',
    "bool": '{"a":{"dtype":"U8","shape":[true,8],"data_offsets":[0,8]}}',
    "twice, same place": f"{{{entry('a', 'U8', [8], 0, 8)},{entry('a', 'I8', [8], 0, 8)}}}",
    "overflow": '{"a":{"dtype":"F32","shape":[4294967296,4294967296,2],"data_offsets":[0,8]}}',
    "unknown dtype": '{"a":{"dtype":"F99","shape":[8],"data_offsets":[0,8]}}',
    "no dtype": '{"a":{"shape":[8],"data_offsets":[0,8]}}',
    "metadata of numbers": '{"__metadata__":{"a":1},"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
    "metadata of a list": '{"__metadata__":[],"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
    "a list": "[]",
    "not JSON": "hello",
    "no text": "\udcff\udcfe",
    "nan": '{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,8]}}',
    "deep": "[" * DEEP,
    "long number": '{"a":{"dtype":"U8","shape":[' + "9" * 5000 + '],"data_offsets":[0,8]}}',
    "three offsets": '{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,4,8]}}',
    "fields in a list": '{"a":["U8",[8],[0,8]]}',
    "an empty name": '{"":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
}


@pytest.mark.parametrize("case", HEADERS)
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
def test_hostile_headers_of_other_programs(case, verify, tmp_path):
    """A header without our metadata that lies is refused by an error that names the file."""
    raw = HEADERS[case].encode("utf-8", "surrogateescape")
    (tmp_path / "f.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + b"\0" * 8)

    with pytest.raises(OURS, match=r"load .*f\.safetensors"):
        load(tmp_path / "f.safetensors", verify=verify)


GOOD = tree(node("w", [0]))
OTHER = forge(GOOD, [W], DATA, algorithm="blake3", leaves="ab" * 32)
# Names that are longer than the header together, and two leaves of one name.
DEEP_PATHS = tree(*[node("k", [{"tree": i + 1}]) for i in range(2000)], node([str(i) for i in range(2000)], [0] * 2000))
TWICE = {name: tree(node("wx", [0, [0, "", name]])) for name in ("w", "__metadata__")}
# The bytes of a file, the class of the error, and words of the message.
FILES = {
    "empty": (b"", CorruptCheckpointError, "cut short"),
    "7 bytes": (b"\0" * 7, CorruptCheckpointError, "cut short"),
    "huge length": (b"\xff" * 8, CorruptCheckpointError, "the bytes b.\\\\xff"),
    "a program": (b"import torch\n", CorruptCheckpointError, "the bytes b.import t"),
    "long length": (
        (2**20).to_bytes(8, "little") + b"{}", CorruptCheckpointError, r"cut short[\s\S]*at most 2, [\s\S]*1048576"
    ),
    "no header": (b"\0" * 8, CorruptCheckpointError, "malformed"),
    "zip": (b"PK\x03\x04" + b"\0" * 100, UnsupportedError, r"never reads[\s\S]*tdfunc convert"),
    "pickle": (b"\x80\x02}q\x00." + b"\xff" * 20, UnsupportedError, r"a pickle of Python[\s\S]*any code"),
    "a later version": (
        forge(GOOD, [W], DATA, version="3"), UnsupportedError, r"expected: 1 or 2[\s\S]*got: +'3'[\s\S]*newer"
    ),
    "metadata of numbers": (forge(GOOD, [W], DATA, extra=',"x":1'), CorruptCheckpointError, "a map of strings"),
    "another algorithm": (OTHER, CorruptCheckpointError, r"xxh3-64[\s\S]*'blake3'[\s\S]*verify=False"),
    "deep paths": (forge(DEEP_PATHS, [W], DATA), CorruptCheckpointError, "names that fit"),
    **{
        f"{name} twice": (
            forge(TWICE[name], [W, entry(name, "F32", [2], 8, 16)], DATA * 2, leaves="0" * 32),
            CorruptCheckpointError, "distinct names",
        )
        for name in TWICE
    },
    **{
        f"{len(leaves)} digits": (forge(GOOD, [W], DATA, leaves=leaves), CorruptCheckpointError, "checksum")
        for leaves in ("", "0" * 15, "0" * 17, "0" * 32)
    },
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_other_files(case, tmp_path):
    """A file of another kind or version, or whose parts do not fit, is refused by name."""
    raw, kind, says = FILES[case]
    (tmp_path / "f.safetensors").write_bytes(raw)

    with pytest.raises(kind, match=rf"f\.safetensors[\s\S]*{says}"):
        load(tmp_path / "f.safetensors")


def test_checksums_of_another_algorithm_are_not_needed(tmp_path):
    """A file with checksums of another algorithm loads unverified."""
    (tmp_path / "f.safetensors").write_bytes(OTHER)

    assert load(tmp_path / "f.safetensors", verify=False)["w"].tolist() == [1.0, 2.0]


def test_special_files(tmp_path):
    """A pipe is refused at once."""
    os.mkfifo(tmp_path / "f.safetensors")

    with pytest.raises(CorruptCheckpointError, match="this is not a regular file"):
        load(tmp_path / "f.safetensors")
