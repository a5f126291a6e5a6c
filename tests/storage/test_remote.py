"""Checkpoints on other machines, as fsspec's file system in memory stands for them."""

import functools
import json
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import safetensors.torch
import torch

import tdfunc
from tdfunc import AsyncSaver, ConcurrencyError, CorruptCheckpointError, TensorDict, UnsupportedError
from tdfunc.cli.sources import open_source
from tdfunc.storage.api import load, save
from tdfunc.storage.disk import remote
from tests.storage.trees import assert_same

# An optional package of the `remote` extra; .ci/run installs it.
fsspec = pytest.importorskip("fsspec")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def system():
    """An empty file system in memory."""
    found = fsspec.filesystem("memory")
    found.store.clear()
    found.pseudo_dirs[:] = [""]
    return found


@pytest.fixture
def tree():
    """A tree with some of everything."""
    return TensorDict({"a": {"w": torch.randn(100, 3)}, "b": torch.arange(10), "s": "text"})


def to_bytes(leaves):
    """Return the bytes of a file of ours."""
    with tempfile.TemporaryDirectory() as folder:
        save(leaves, f"{folder}/m.safetensors")
        return Path(folder, "m.safetensors").read_bytes()


def names(system):
    """All files."""
    return sorted(name.rpartition("/")[2] for name in system.find(""))


def test_shards(system, tree):
    """Shards come back, and those of the replaced checkpoint go."""
    save(tree, "memory://bucket/m/model.safetensors")
    save(tree, "memory://bucket/m/", max_shard_size=500)
    assert_same(load("memory://bucket/m"), tree)
    save(tree, "memory://bucket/m", max_shard_size="1GB")
    assert_same(load("memory://bucket/m/"), tree)
    assert len(names(system)) == 2
    assert INDEX in names(system)

    # An index of another program that names files of another program, and the one that is written.
    index = b'{"weight_map": {"a": "model.safetensors", "b": "model-00001-of-00002.safetensors"}}'
    system.pipe({f"/bucket/m/{INDEX}": index, "/bucket/m/model-00001-of-00002.safetensors": b"mine"})
    before = set(names(system))
    save(tree, "memory://bucket/m/model.safetensors")

    assert set(names(system)) == before - {INDEX} | {"model.safetensors"}
    assert_same(load("memory://bucket/m"), tree)


@pytest.mark.parametrize("options", [{}, {"max_shard_size": 500}], ids=["file", "shards"])
def test_parts_are_fetched_alone(options, system, tree, monkeypatch):
    """Reads of leaves and rows fetch their bytes and no others."""
    path = "memory://bucket/m" if options else "memory://bucket/m.safetensors"
    save(tree, path, **options)
    fetched = []
    plain = type(system).cat_file

    def counted(self, path, start=None, end=None, **more):
        fetched.append(end - start)
        return plain(self, path, start=start, end=end, **more)

    monkeypatch.setattr(type(system), "cat_file", counted)
    monkeypatch.setattr(type(system), "get_file", None)
    with tdfunc.open(path) as f:
        fetched.clear()
        assert torch.equal(f["b"], tree["b"])
        assert fetched == [80]
        fetched.clear()
        assert torch.equal(f.slice(("a", "w"), slice(5, 7)), tree["a", "w"][5:7])
        assert fetched == [24]
        assert_same(f.load(), tree)
    assert_same(load(path, where="b"), TensorDict({"b": tree["b"]}))


def test_damage(system, tree):
    """A damaged leaf is an error that names the URL and the leaf."""
    save(tree, "memory://bucket/t.safetensors")
    raw = bytearray(system.cat_file("/bucket/t.safetensors"))
    raw[-1] ^= 1
    system.pipe_file("/bucket/t.safetensors", bytes(raw))

    with pytest.raises(CorruptCheckpointError, match=r'load memory://bucket/t\.safetensors: leaf "a\.w" is damaged'):
        load("memory://bucket/t.safetensors", where="a.w")
    system.pipe_file("/bucket/t.safetensors", bytes(raw[:-100]))
    with tdfunc.open("memory://bucket/t.safetensors") as f, pytest.raises(CorruptCheckpointError, match="cut short"):
        f.slice(("a", "w"), 99)


def test_what_is_not_there(system, tree):
    """A wrong name is an error that lists the files that are there."""
    system.pipe_file("/bucket/m/other.txt", b"")
    with pytest.raises(FileNotFoundError, match=r"the folder has no checkpoint[\s\S]*other\.txt"):
        load("memory://bucket/m")


@pytest.mark.parametrize("read", [load, tdfunc.open])
def test_a_file_that_is_not_there(system, tree, read):
    """It is named."""
    with pytest.raises(FileNotFoundError, match=r"No such file.*memory://bucket/no\.safetensors"):
        read("memory://bucket/no.safetensors")


@pytest.mark.parametrize("step", ["open", "mv"])
def test_a_failed_upload_changes_nothing(step, system, tree, monkeypatch):
    """A broken upload leaves the old file and nothing else."""
    path = "memory://bucket/t.safetensors"
    assert AsyncSaver().save(tree, path).result() == path
    with monkeypatch.context() as patch:

        def broken(*_, **__):
            raise OSError("connection lost")

        patch.setattr(type(system), step, broken)
        with pytest.raises(OSError, match="connection lost"):
            save(tree.delete("b"), path)

    assert names(system) == ["t.safetensors"]
    assert_same(load(path), tree)


OLD = {f"w{i}": torch.full((1000,), 10.0 + i) for i in range(4)}
# With another header, and with the same one.
LONGER = {"a": torch.full((500,), 99.0)} | {name: values + 10 for name, values in OLD.items()}
NEWER = {name: values + 10 for name, values in OLD.items()}
READS = {
    "leaf": lambda opened: opened["w1"],
    "rows": lambda opened: opened.slice("w1", slice(0, 3)),
    "tree": lambda opened: opened.load(),
    "filter": lambda opened: opened.load(where="w[23]"),
}


@pytest.mark.parametrize("new", [LONGER, NEWER], ids=["longer", "newer"])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("write", [safetensors.torch.save, to_bytes], ids=["foreign", "ours"])
def test_a_file_that_is_replaced_is_not_read_as_the_old_one(new, read, write, system):
    """Ranges of two files are an error, whichever program wrote them."""
    system.pipe("/m.safetensors", write(OLD))
    with tdfunc.open("memory://m.safetensors") as opened:
        assert torch.equal(opened["w0"], OLD["w0"])
        system.pipe("/m.safetensors", write(new))
        with pytest.raises(ConcurrencyError, match="replaced while it was read in ranges"):
            read(opened)


@pytest.mark.parametrize("where", [None, "*"], ids=["fetched", "in-ranges"])
def test_shards_of_two_saves_are_not_one_checkpoint(where, system, monkeypatch):
    """Another program gives the shards of each save the same names."""
    index = {"weight_map": {"w0": "model-00001-of-00002.safetensors", "w1": "model-00002-of-00002.safetensors"}}
    first, second = [f"/m/{name}" for name in index["weight_map"].values()]
    system.pipe({f"/m/{INDEX}": json.dumps(index).encode()})

    def put(leaves):
        system.pipe({first: safetensors.torch.save({"w0": leaves["w0"]})})
        system.pipe({second: safetensors.torch.save({"w1": leaves["w1"]})})

    put(OLD)
    plain = remote.RemoteFiles.open

    def replaced(files, path):
        if path.endswith(second):
            put(NEWER)
        return plain(files, path)

    monkeypatch.setattr(remote.RemoteFiles, "open", replaced)
    with pytest.raises(ConcurrencyError, match="replaced while"):
        load("memory://m", where=where)


def test_a_command_does_not_read_a_file_that_is_replaced(system):
    """The commands read pieces of leaves."""
    system.pipe("/m.safetensors", safetensors.torch.save(OLD))
    with open_source("memory://m.safetensors") as source:
        system.pipe("/m.safetensors", safetensors.torch.save(NEWER))
        with pytest.raises(ConcurrencyError, match="replaced while it was read in ranges"):
            list(source.pieces(source.tree["w1"]))


def test_file_urls(tmp_path, tree):
    """A URL of a file of this machine is its path."""
    save(tree, f"file://{tmp_path}/t.safetensors")

    assert_same(load(tmp_path / "t.safetensors"), tree)
    assert_same(load(f"file://{tmp_path}/t.safetensors"), tree)
    assert not remote.is_remote(f"file://{tmp_path}/t.safetensors")
    assert tdfunc.CheckpointManager(f"file://{tmp_path}").path(1).parent == tmp_path


def test_a_remote_memmap_folder_is_named(tmp_path, system):
    """The hint fetches a folder whose leaves cannot be mapped where they are."""
    TensorDict({"a": torch.ones(3)}).memmap(tmp_path / "d")
    system.put(str(tmp_path / "d"), "/mapped", recursive=True)

    with pytest.raises(FileNotFoundError, match=r"this is a memmap folder[\s\S]*get\(path, folder, recursive=True\)"):
        load("memory://mapped")
    system.get("memory://mapped", str(tmp_path / "o"), recursive=True)

    assert load(tmp_path / "o")["a"].tolist() == [1.0] * 3


def test_without_fsspec(monkeypatch, tree):
    """A missing package is named with the line that installs it."""
    monkeypatch.setitem(sys.modules, "fsspec", None)

    with pytest.raises(UnsupportedError, match=r"memory://x[\s\S]*need fsspec[\s\S]*tdfunc\[remote\]"):
        save(tree, "memory://x/t.safetensors")


# -- servers of HTTP ---------------------------------------------------------------------------------------------


@pytest.fixture
def serve():
    """A function that serves bytes by HTTP, whole, as `python -m http.server` does, and gives the address."""
    pytest.importorskip("aiohttp")
    servers = []

    def serve(raw):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_HEAD(self):  # noqa: N802
                self.send_response(200)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()

            def do_GET(self):  # noqa: N802
                self.do_HEAD()
                self.wfile.write(raw)

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/x.safetensors"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def served(serve, tmp_path):
    """A tree, and the address of its file."""
    tree = TensorDict({"a": torch.randn(50, 40), "c": torch.arange(7)})
    save(tree, tmp_path / "x.safetensors")
    return tree, serve((tmp_path / "x.safetensors").read_bytes())


def test_a_server_without_ranges_is_named(served):
    """`open` names the address and the reason, and the line of the hint reads the file."""
    tree, url = served

    with pytest.raises(UnsupportedError, match=rf"{url}: the server ignores ranges[\s\S]*tdfunc\.load\(url\)"):
        tdfunc.open(url)["c"]
    assert_same(load(url), tree)


@pytest.mark.parametrize("options", [{}, {"max_shard_size": 64}], ids=["file", "shards"])
def test_a_system_that_cannot_be_written_to_is_named(options, served):
    """`save` names the address and the reason."""
    tree, url = served

    with pytest.raises(UnsupportedError, match=r"save http://[\s\S]*cannot be written to"):
        save(tree, url.removesuffix(".safetensors") if options else url, **options)


class SignedFiles(SimpleHTTPRequestHandler):
    """The files of a folder for who has a key, as a signed address gives it."""

    query = "?sig=a/b&download=true"

    def log_message(self, *_):
        """Say nothing."""

    def send_head(self):
        """Refuse a request without the query."""
        if not self.path.endswith(self.query):
            self.send_error(403)
            return None
        return super().send_head()


def test_an_index_with_a_query_gives_it_to_its_shards(tmp_path):
    """An address with a key or an option, as a hub's link for downloads, reads as the folder does."""
    pytest.importorskip("aiohttp")
    tree = TensorDict({"a": torch.randn(50, 40), "c": torch.arange(7)})
    save(tree, tmp_path, max_shard_size=64)
    handler = functools.partial(SignedFiles, directory=tmp_path)

    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/model.safetensors.index.json{SignedFiles.query}"
        assert_same(load(url), tree)
        server.shutdown()
