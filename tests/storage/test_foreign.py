"""Files of other programs: what the safetensors package opens, `load`, `open` and `tdfunc verify` open."""

import json
import os
import resource
import struct
import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError

import tdfunc
from tdfunc import CorruptCheckpointError, TensorDict, UnsupportedError
from tdfunc.storage.disk.remote import LocalBytes, MappedBytes
from tdfunc.storage.safetensors import contents as contents_file
from tdfunc.storage.tree import foreign, specs
from tests.cli.helpers import run
from tests.helpers import examples

OTHERS = Path(__file__).parent / "golden" / "others"
FILES = sorted(OTHERS.glob("*.safetensors"))
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DATA = struct.pack("<ff", 1.5, 2.5)


def write_header(path, text, data=DATA):
    """A file with this header; lone surrogates stay escapes."""
    raw = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def flat_values(tree):
    """Names and values."""
    return {".".join(path): tree[path].tolist() for path in tree.paths()}


def reference(path):
    """The names and values that the safetensors package reads; None where it refuses."""
    try:
        return {name: value.tolist() for name, value in safetensors.torch.load_file(path).items()}
    except SafetensorError:
        return None


def ours(path):
    """The names and values that `load` reads; None where it refuses."""
    try:
        return flat_values(tdfunc.load(path))
    except (CorruptCheckpointError, UnsupportedError):
        return None


# -- the law ----------------------------------------------------------------------------------------------------

TEXTS = st.text(st.sampled_from([*'ab.:/"\\\n\0 é', "\U0001f600", "\x7f"]), max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=4,
)
CODES = st.sampled_from(["F32", "I32", "U8", "BF16", "F64", "BOOL", "F8_E4M3", "C64", "C128", "f32", "F16"])
BITS = {"F32": 32, "I32": 32, "U8": 8, "BF16": 16, "F64": 64, "BOOL": 8, "F8_E4M3": 8, "C64": 64, "F16": 16}


@st.composite
def headers(draw):
    """The text of a header that is right or nearly right, and the bytes of its data."""
    names = draw(st.lists(TEXTS.filter(lambda name: name not in ("", "__metadata__")), max_size=4, unique=True))
    end, header = 0, {}
    for name in names:
        code, shape = draw(CODES), draw(st.lists(st.integers(0, 3), max_size=3))
        size = BITS.get(code, 32) // 8
        for length in shape:
            size *= length
        entry = {"dtype": code, "shape": shape, "data_offsets": [end, end + size]}
        header[name] = entry | draw(st.dictionaries(TEXTS, JSON, max_size=1))
        end += size
    metadata = draw(st.just(...) | st.none() | st.dictionaries(TEXTS, TEXTS, max_size=2) | JSON)
    if metadata is not ...:
        header["__metadata__"] = metadata
    if names and draw(st.booleans()):
        # One thing is wrong.
        field = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
        header[draw(st.sampled_from(names))][field] = draw(JSON)
    text = json.dumps(dict(draw(st.permutations(list(header.items())))), ensure_ascii=draw(st.booleans()))
    spaces = draw(st.sampled_from(["", " ", "\n\t "]))
    return spaces + text + draw(st.sampled_from(["", "  ", "\0"])), bytes(end + draw(st.sampled_from([0, 0, 0, 1])))


@examples(2)
@given(headers())
def test_headers_are_judged_as_by_the_reference(made):
    """A header opens here exactly if the safetensors package opens it, with the same values."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_header(Path(folder) / "m.safetensors", *made)

        assert ours(path) == reference(path)


E = json.dumps(ENTRY)


def field(value):
    """A header whose entry has a field that the format does not have."""
    return '{"w":ENTRY}'.replace("ENTRY", E[:-1] + f',"n":{value}}}')


CASES = {
    "null metadata": '{"__metadata__":null,"w":ENTRY}',
    "metadata of numbers": '{"__metadata__":{"a":1},"w":ENTRY}',
    "a field": field("1.5"),
    "a long integer": field("9" * 300),
    "an integer out of range": field("9" * 400),
    "a float out of range": field("1e400"),
    "NaN": field("NaN"),
    "minus zero in a field": field("-0"),
    "minus zero": '{"w":ENTRY}'.replace("ENTRY", E).replace("[0,", "[-0,"),
    "125 levels": field("[" * 125 + "]" * 125),
    "126 levels": field("[" * 126 + "]" * 126),
    "a scalar in 125 levels": field("[" * 125 + "1" + "]" * 125),
    "a lone surrogate": '{"a\\ud800":ENTRY}',
    "the other half": '{"a\\uDc00":ENTRY}',
    "a surrogate in metadata": '{"__metadata__":{"a":"\\udc00"},"w":ENTRY}',
    "a surrogate in a field": field('"\\ud800"'),
    "a pair": '{"a\\ud83d\\ude00":ENTRY}',
    "a backslash before u": '{"a\\\\ud800":ENTRY}',
    "a key twice in an entry": '{"w":ENTRY}'.replace("ENTRY", E).replace('"shape"', '"dtype":"F32","shape"'),
    "complex128": json.dumps({"w": {**ENTRY, "dtype": "C128", "shape": [], "data_offsets": [0, 16]}}),
    "a byte order mark": "\ufeff" + '{"w":ENTRY}',
    "no leaves": "{}",
    "a colon in a name": '{"a\\":b":ENTRY}',
}


@pytest.mark.parametrize("case", CASES)
def test_corners_of_headers(case, tmp_path):
    """A corner of JSON is judged as by the safetensors package."""
    data = b"" if CASES[case] == "{}" else DATA * (2 if "C128" in CASES[case] else 1)
    path = write_header(tmp_path / "m.safetensors", CASES[case].replace("ENTRY", E), data)

    assert ours(path) == reference(path)


@pytest.mark.parametrize(
    "text",
    ['{"w":ENTRY,"w":ENTRY}', '{"__metadata__":{"a":"b","a":"c"},"w":ENTRY}', '{"w":["F32",[2],[0,8]]}'],
    ids=["a key twice", "a key of metadata twice", "a list of fields"],
)
def test_deliberate_refusals(text, tmp_path):
    """What the format forbids and the package happens to read is refused."""
    path = write_header(tmp_path / "m.safetensors", text.replace("ENTRY", E))

    assert reference(path) is not None
    assert ours(path) is None


# -- files of other programs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_files_load(path):
    """A file of another program has the values that the safetensors package reads."""
    assert flat_values(tdfunc.load(path)) == reference(path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_files_open(path):
    """Each leaf of a file of another program can be read alone."""
    with tdfunc.open(path) as file:
        assert {".".join(at): file[at].tolist() for at in file.paths()} == reference(path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_files_verify(path):
    """The command finds the structure of another program's file whole."""
    assert run("verify", path).code == 3


@pytest.mark.parametrize("name", [".", "model.safetensors.index.fp16.json"])
def test_a_variant_of_transformers_loads(name):
    """A variant loads from its folder or its index."""
    tree = tdfunc.load(OTHERS / "variant" / name)

    expected = {}
    for shard in (OTHERS / "variant").glob("*.safetensors"):
        expected |= safetensors.torch.load_file(shard)
    assert tree.flatten_keys(".").to_dict().keys() == expected.keys()
    assert all(torch.equal(tree[tuple(key.split("."))], value) for key, value in expected.items())


def test_several_variants_are_named(tmp_path):
    """With two variants the error names them, and its hint loads one."""
    for name in ("model.fp16.safetensors", "model.bf16.safetensors"):
        safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / name)

    with pytest.raises(FileNotFoundError, match=r"several variants[\s\S]*model\.bf16[\s\S]*model\.fp16"):
        tdfunc.load(tmp_path)


@pytest.mark.parametrize("name", [".", "pytorch_model.bin.index.json"])
def test_shards_of_torch_are_named(name):
    """`load` says what `.bin` shards are, and the command that reads them."""
    with pytest.raises(UnsupportedError, match=r"files of torch\.save[\s\S]*tdfunc convert"):
        tdfunc.load(OTHERS / "bin" / name)


def test_the_command_converts_shards_of_torch(tmp_path):
    """The command of the hint writes the tensors of `.bin` shards, bit for bit."""
    result = run("convert", OTHERS / "bin", tmp_path / "model.safetensors")

    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    expected = {}
    for shard in (OTHERS / "bin").glob("*.bin"):
        expected |= torch.load(shard, weights_only=True)
    assert result.code == 0
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


# -- an index that names a part ---------------------------------------------------------------------------------


@pytest.fixture
def part(tmp_path):
    """A folder whose index names one of two leaves."""
    safetensors.torch.save_file({"a": torch.ones(2), "b": torch.zeros(2)}, tmp_path / "x.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    return tmp_path


def test_an_index_may_name_a_part(part):
    """The named leaves are read, and a warning names the others."""
    with pytest.warns(UserWarning, match=r'does not name 1 leaves of its files[\s\S]*"b"'):
        tree = tdfunc.load(part)

    assert flat_values(tree) == {"a": [1.0, 1.0]}


def test_the_command_shows_what_an_index_leaves_out(part):
    """`show` names the leaves that an index does not name."""
    assert "left out: b: a leaf that the index does not name" in run("show", part).out


def test_the_command_does_not_drop_what_an_index_leaves_out(part):
    """`convert` refuses to drop a tensor, unless it is excluded."""
    assert run("convert", part, part / "o.safetensors").code == 2
    assert run("extract", part, "-o", part / "o.safetensors", "--exclude", "b").code == 0


# -- many shards ------------------------------------------------------------------------------------------------


@pytest.fixture
def many(tmp_path):
    """A folder of 50 shards, and its tree."""
    tree = TensorDict({f"l{i}": torch.full((4,), float(i)) for i in range(50)})
    tdfunc.save(tree, tmp_path / "many", max_shard_size=16, fsync=False)
    return tmp_path / "many", tree


@pytest.fixture
def few_files():
    """Room for 30 more open files in this process."""
    taken = len(os.listdir("/proc/self/fd"))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_many_shards_load(many, few_files):
    """More shards than a process may have open files load."""
    assert flat_values(tdfunc.load(many[0])) == flat_values(many[1])


def test_one_leaf_of_many_shards_loads(many, few_files):
    """One leaf of many shards loads."""
    assert tdfunc.load(many[0], where="l7")["l7"].tolist() == [7.0] * 4


def test_handles_of_many_shards_keep_few_descriptors(many, few_files):
    """Handles that are kept do not keep the files open."""
    files = [tdfunc.open(many[0]) for _ in range(5)]

    values = [file["l40"].tolist() for file in files]
    for file in files:
        file.close()
    assert values == [[40.0] * 4] * 5


def test_a_save_over_many_shards_does_not_change_a_handle(many):
    """A handle reads the values that were there when it was opened."""
    path, tree = many
    with tdfunc.open(path) as file:
        tdfunc.save(tree * 0 - 1, path, max_shard_size=16, fsync=False)

        assert file["l40"].tolist() == [40.0] * 4


def test_a_tree_of_many_shards_is_its_own(many):
    """A write to a loaded leaf does not change what the handle reads next."""
    with tdfunc.open(many[0]) as file:
        file.load()["l3"].zero_()

        assert file["l3"].tolist() == [3.0] * 4


@pytest.mark.parametrize("command", ["show", "verify", "average", "merge", "convert"])
def test_commands_read_many_shards(command, many, few_files, tmp_path):
    """A command reads a checkpoint of more shards than a process may have open files."""
    path = str(many[0])
    options = {
        "average": [path, "-o", str(tmp_path / "o.safetensors")],
        "merge": ["-o", str(tmp_path / "o.safetensors"), "--method", "linear", "--weight", "1"],
        "convert": [str(tmp_path / "o.safetensors")],
    }

    assert run(command, path, *options.get(command, [])).code == 0


def test_mapped_bytes_count_to_the_end(tmp_path):
    """A read at the end of a mapped file is as short as one of an open file."""
    (tmp_path / "x").write_bytes(b"abcdef")
    data = MappedBytes(LocalBytes(str(tmp_path / "x")))
    view = bytearray(10)

    assert data.read_into(memoryview(view), 4) == 2
    assert bytes(view[:2]) == b"ef"
    assert data.read_into(memoryview(view), 6) == 0


# -- one leaf of many -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [100, 400])
def test_one_leaf_builds_no_tree(count, tmp_path, monkeypatch):
    """Opening another program's file and reading a leaf makes the specs of its dtypes and shapes, and no tree."""
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({f"layers.{i}.weight": torch.ones(3) for i in range(count)}, path)
    made = []
    monkeypatch.setattr(foreign, "spec_of", lambda *args: made.append(args) or specs.spec_of(*args))
    monkeypatch.setattr(contents_file, "describe", None)

    with tdfunc.open(path) as file:
        assert file["layers", "7", "weight"].tolist() == [1.0] * 3
    assert len(made) == 1


@pytest.mark.parametrize("count", [100, 400])
def test_a_glob_describes_what_it_chooses(count, tmp_path, monkeypatch):
    """A load of one leaf of another program's file describes one leaf."""
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({f"layers.{i}.weight": torch.ones(3) for i in range(count)}, path)
    described = []
    plain = contents_file.describe
    monkeypatch.setattr(
        contents_file, "describe", lambda entries, **options: described.extend(entries) or plain(entries, **options)
    )

    assert flat_values(tdfunc.load(path, where="layers.7.weight")) == {"layers.7.weight": [1.0] * 3}
    assert len(described) == 1


@pytest.mark.parametrize("glob", ["a.b", "*b", "c*", "*", "*.b"])
@pytest.mark.parametrize("names", [["a.b", "c", "d.b.x"], ["a", "a.b", "c.b"]], ids=["nested", "flat"])
def test_a_glob_chooses_as_partition_does(names, glob, tmp_path):
    """A load of a part is the part of the load of everything."""
    tensors = {name: torch.full((2,), float(i)) for i, name in enumerate(names)}
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors")

    found = tdfunc.load(tmp_path / "m.safetensors", where=glob)

    expected = tdfunc.partition(tdfunc.load(tmp_path / "m.safetensors"), glob)[0]
    assert found.paths() == expected.paths()
    assert flat_values(found) == flat_values(expected)


@pytest.mark.parametrize("names", [["a.b", "c"], ["a", "a.b"], ["a..b", "c"]], ids=["nested", "flat", "empty keys"])
def test_one_leaf_is_at_the_path_of_the_tree(names, tmp_path):
    """A leaf read alone has the path that it has in the loaded tree, and no other."""
    safetensors.torch.save_file({name: torch.ones(2) for name in names}, tmp_path / "m.safetensors")
    paths = set(tdfunc.load(tmp_path / "m.safetensors").paths())
    tried = {tuple(name.split(".")) for name in names} | {(name,) for name in names}

    with tdfunc.open(tmp_path / "m.safetensors") as file:
        assert {path for path in tried if "" not in path and path in file} == paths
        assert all(file[path].tolist() == [1.0, 1.0] for path in paths)


def test_a_leaf_of_a_dtype_that_torch_lacks(tmp_path):
    """The other leaves of the file can be read, and the error names this one."""
    header = {
        "a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]},
        "b": {"dtype": "U8", "shape": [5], "data_offsets": [3, 8]},
    }
    path = write_header(tmp_path / "m.safetensors", json.dumps(header))

    with tdfunc.open(path) as file:
        assert file["b"].numel() == 5
        with pytest.raises(UnsupportedError, match=r"leaf 'a'[\s\S]*F6_E2M3"):
            file["a"]
