"""Format version 1 byte by byte: a file that was written once must load for ever."""

import torch
from torch import nn

from tdfunc import Kind, NonTensorData, NonTensorStack, TensorDict
from tdfunc.storage.api import load, save
from tests.storage.trees import assert_same, retie


def rich():
    """A small tree that uses every part of the format."""
    shared = nn.Parameter(torch.tensor([1.0, 2.0]))
    layer = TensorDict({"w": shared, "count": torch.tensor(3)})
    layer = layer._replace(layer._data, kinds={"w": Kind.PARAMETER, "count": Kind.NON_PERSISTENT})
    state = TensorDict({"x": NonTensorData(torch.tensor([True])), "y": NonTensorData({"a": [1, None, "ü"]})})
    state = state._replace(state._data, kinds={"x": Kind.EXTRA_STATE})
    rows = TensorDict({"r": torch.ones(2, 1).bfloat16(), "s": NonTensorStack("p", "q")}, [2], names=["n"], device="cpu")
    data = {"a": {"b": torch.tensor([7], dtype=torch.uint8)}, "a.b": torch.zeros(0, 2), "layer": layer, "t": shared}
    return retie(TensorDict({**data, "state": state, "rows": rows}), [[("layer", "w"), ("t",)]])


# One long line, broken anywhere.
HEADER = (
    r'{"__metadata__":{"tdfunc.header":"xxh3-64:1a9b6b793e8710d9","format":"pt","tdfunc.version":"1","'
    r'tdfunc.leaves":"4d922029c1f42e7d2d06800538d394c24de8d78f7134f4b735a49a581ca8e481e12ef9d2eb86ceeb'
    r'4c5cca45d0f4811f","tdfunc.tree":"{\"specs\":[[\"F32\",[0,2]],[\"U8\",[1]],[\"F32\",[2]],[\"I64\"'
    r",[]],[\"BOOL\",[1]],[\"BF16\",[2,1]]],\"nodes\":[{\"keys\":[\"a\",\"a.b\",\"layer\",\"t\",\"stat"
    r"e\",\"rows\"],\"items\":[{\"tree\":1},0,{\"tree\":2},{\"tie\":0},{\"tree\":3},{\"tree\":4}]},{\""
    r"keys\":[\"b\"],\"items\":[[1,\"\",\"a.b~1\"]]},{\"keys\":[\"w\",\"count\"],\"items\":[[2,\"pPg\""
    r"],[3,\"n\"]]},{\"keys\":[\"x\",\"y\"],\"items\":[[4,\"xv\"],{\"value\":{\"a\":[1,null,\"ü\"]}}]}"
    r",{\"size\":[2],\"device\":\"cpu\",\"names\":[\"n\"],\"keys\":[\"r\",\"s\"],\"items\":[5,{\"value"
    r's\":[\"p\",\"q\"]}]}],\"ties\":[[[2,\"w\"],[0,\"t\"]]]}"},"layer.count":{"dtype":"I64","shape":['
    r'],"data_offsets":[0,8]},"a.b":{"dtype":"F32","shape":[0,2],"data_offsets":[8,8]},"layer.w":{"dty'
    r'pe":"F32","shape":[2],"data_offsets":[8,16]},"rows.r":{"dtype":"BF16","shape":[2,1],"data_offset'
    r's":[16,20]},"state.x":{"dtype":"BOOL","shape":[1],"data_offsets":[20,21]},"a.b~1":{"dtype":"U8",'
    r'"shape":[1],"data_offsets":[21,22]}}'
) + " " * 19
DATA = "03000000000000000000803f00000040803f803f0107"


def test_version_1_is_written(tmp_path):
    """Files of one version would differ: a program that follows docs/storage.md could not read them."""
    save(rich(), tmp_path / "f.safetensors")
    raw = (tmp_path / "f.safetensors").read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")

    assert raw[8:end].decode() == HEADER
    assert raw[end:].hex() == DATA


def test_version_1_is_read(tmp_path):
    """A file of an older tdfunc would no longer load."""
    raw = HEADER.encode()
    (tmp_path / "f.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes.fromhex(DATA))

    assert_same(load(tmp_path / "f.safetensors"), rich())
