"""`tdfunc verify`: all damage is found and named; what has no checksums says so."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from tdfunc import CheckpointManager, TensorDict, save
from tests.cli.helpers import make_tree, run, write_as


def flip(path, at):
    """Change one bit of a file."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("format", "code", "text"),
    [
        ("safetensors", 0, "whole (9 leaves, "),
        ("shards", 0, "whole (9 leaves, "),
        ("memmap", 3, "no checksums to compare; the structure is whole"),
        ("torch", 0, "crc32)"),
    ],
)
def test_whole(format, code, text, tmp_path, monkeypatch):
    """A whole checkpoint is whole, and one without checksums is not called verified."""
    path = write_as(format, make_tree(), tmp_path)
    monkeypatch.setattr("tdfunc.cli.verify._MOST_BYTES", 16)

    plain, found = run("verify", path), run("verify", path, "--json")

    assert plain.code == code
    assert found.code == code
    assert found.json["code"] == code
    assert text in plain.out
    assert "{" not in plain.out
    assert found.json["checkpoints"][0]["damage"] == []


def test_every_damaged_leaf_is_named(tmp_path):
    """Every damaged leaf is named."""
    path = tmp_path / "t.safetensors"
    save(TensorDict({key: torch.ones(300_000) for key in "abc"}), path)
    flip(path, -1)
    flip(path, -2_400_001)

    result = run("verify", path)

    assert result.code == 1
    assert [f'leaf "{key}"' in result.out for key in "abc"] == [True, False, True]


@pytest.mark.parametrize(
    ("format", "harm", "text"),
    [
        ("safetensors", lambda p: flip(p, 200), "the header is damaged"),
        ("safetensors", lambda p: p.write_bytes(p.read_bytes()[:-5]), "cut short"),
        ("safetensors", lambda p: p.write_bytes(b""), "cut short"),
        ("shards", lambda p: flip(p / "model.safetensors.index.json", 300), "index is damaged"),
        ("shards", lambda p: next(iter(p.glob("model-*"))).unlink(), "missing"),
        ("shards", lambda p: flip(next(iter(p.glob("model-*-00001-*"))), -1), "is damaged"),
        ("memmap", lambda p: (p / "emb" / "weight.memmap").write_bytes(b"x"), "cut short"),
        ("memmap", lambda p: (p / "norm" / "bias.memmap").unlink(), "file is missing"),
        ("memmap", lambda p: (p / "meta.json").write_text("{"), "malformed"),
        ("torch", lambda p: flip(p, p.read_bytes().index(torch.load(p)["emb.weight"].numpy().tobytes())), "Bad CRC-32"),
        ("torch", lambda p: flip(p, 37), "data.pkl"),
        ("torch", lambda p: p.write_bytes(p.read_bytes()[:-300]), "torch.load cannot read"),
    ],
)
def test_damage(format, harm, text, tmp_path):
    """Damage is found and named, with the code of damage."""
    path = write_as(format, make_tree(), tmp_path)
    harm(path)

    result = run("verify", path)

    assert result.code == 1
    assert text in result.out


def test_files_of_others_have_no_checksums(tmp_path):
    """A file without checksums is not called verified; a torn one is damaged."""
    safetensors.torch.save_file({"a": torch.ones(3)}, tmp_path / "f.safetensors")
    torch.save(torch.ones(2), tmp_path / "old.pt", _use_new_zipfile_serialization=False)

    assert [run("verify", tmp_path / name).code for name in ("f.safetensors", "old.pt")] == [3, 3]
    (tmp_path / "f.safetensors").write_bytes((tmp_path / "f.safetensors").read_bytes()[:-1])
    found = run("verify", tmp_path / "f.safetensors", "--json").json
    assert found["code"] == 1
    assert found["checkpoints"][0]["leaves"] == 0


def test_all_steps_of_a_run(tmp_path):
    """Every step is verified, with its own file."""
    manager = CheckpointManager(tmp_path / "run")
    for step in range(3):
        manager.save(step, TensorDict({"w": torch.ones(3)}), metadata={"loss": 1.0})

    assert run("verify", tmp_path / "run").code == 0
    about = manager.path(1) / "checkpoint.json"
    about.write_text(about.read_text().replace("1.0", "2.0"))
    flip(manager.path(0) / "model.safetensors", -1)
    result, one = run("verify", tmp_path / "run"), run("verify", manager.path(1))

    assert result.code == 1
    assert one.code == 1
    assert result.out.count(": damaged") == 2
    assert "step-0000000002: whole" in result.out
    assert "checkpoint.json is damaged" in one.out


@pytest.mark.parametrize("format", ["safetensors", "shards"])
def test_two_readers_must_agree(format, tmp_path, monkeypatch):
    """Every leaf is read with the safetensors package as well; other values are damage."""
    path = write_as(format, make_tree(), tmp_path)
    read, changes = [], {"norm.bias": torch.exp, "norm.weight": lambda leaf: leaf.view(torch.int32)}

    def other_values(file, framework):
        handle = safetensors.safe_open(file, framework).__enter__()

        def get_tensor(name):
            read.append(name)
            return changes.get(name, torch.clone)(handle.get_tensor(name))

        return nullcontext(SimpleNamespace(get_slice=handle.get_slice, get_tensor=get_tensor))

    monkeypatch.setattr("tdfunc.cli.verify.safe_open", other_values)
    other = run("verify", path)

    assert len({*read}) == 9
    assert other.code == 1
    assert 'leaf "norm.bias": the safetensors package reads other values' in other.out
    assert 'leaf "norm.weight": the safetensors package reads other values' in other.out


@pytest.mark.parametrize("format", ["safetensors", "shards"])
def test_a_file_that_another_reader_refuses_is_damaged(format, tmp_path, monkeypatch):
    """With its reason."""

    def refuse(file, framework):
        raise safetensors.SafetensorError("header too large")

    monkeypatch.setattr("tdfunc.cli.verify.safe_open", refuse)
    refused = run("verify", write_as(format, make_tree(), tmp_path))

    assert refused.code == 1
    assert "the safetensors package cannot read it: header too large" in refused.out
