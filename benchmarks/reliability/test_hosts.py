"""Ranks on three hosts (network namespaces): a lost one is a named error within the timeout, and no file is torn."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import tdfunc as tdf
from tdfunc import PeerError, TensorDict
from tdfunc.storage.disk.ranks import Ranks
from tdfunc.storage.safetensors import ranks

ROOT = Path(__file__).parents[2]
HOSTS, TIMEOUT_S = 3, 10
pytestmark = pytest.mark.slow


def ip(*args):
    """Run the command `ip`."""
    subprocess.run(["ip", *map(str, args)], check=True, capture_output=True)


@pytest.fixture
def hosts():
    """Three namespaces on one bridge; each has the interface `eth0`."""
    bridge, names = f"tdb{os.getpid()}", [f"td{os.getpid()}-{i}" for i in range(HOSTS)]
    try:
        ip("link", "add", bridge, "type", "bridge")
    except (OSError, subprocess.CalledProcessError) as err:
        pytest.skip(f"this system does not let the test make networks: {err}, {getattr(err, 'stderr', b'').decode()}")
    try:
        ip("link", "set", bridge, "up")
        for i, name in enumerate(names):
            ip("netns", "add", name)
            ip("link", "add", f"{bridge}{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{bridge}{i}", "master", bridge, "up")
            ip("-n", name, "address", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for i, name in enumerate(names):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
            subprocess.run(["ip", "link", "delete", f"{bridge}{i}"], capture_output=True)
        ip("link", "delete", bridge)


def sharded(mesh, value):
    """A tree of 30 equal values over all hosts."""
    whole = torch.full((30,), value)
    return TensorDict({"x": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)})


def save(rank, mesh, folder, lost):
    """Save over the file; when the part of a rank is written, it asks to be lost, and goes on when it should be."""
    real = ranks.write_box

    def write_and_ask(*args):
        real(*args)
        if rank == 1:
            lost()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "write_box", write_and_ask)
        tdf.save(sharded(mesh, 2.0), folder / "x.safetensors")


def send(rank, mesh, folder, lost):
    """Rank 0 sends three large leaves to rank 1, which is lost before the last one; rank 2 waits for rank 1."""
    if rank == 0:
        TensorDict({str(i): torch.ones(2_000_000) for i in range(3)}).send(1)
    elif rank == 2:
        tdf.distributed.recv(1)
    else:
        real, large = Ranks.post_into, []

        def post_or_ask(self, data, *args):
            large.extend([data] if len(data) > 1 << 20 else [])
            if len(large) == 3:
                lost()
            return real(self, data, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ranks, "post_into", post_or_ask)
            tdf.distributed.recv(0)


def program(rank, folder, call):
    """One rank: a sum and a save on a whole network, then a call during which rank 1 is lost."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    address, timeout = "tcp://10.77.0.1:29511", timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=HOSTS, timeout=timeout)
    mesh = init_device_mesh("cpu", (HOSTS,))
    assert int(TensorDict({"i": rank}).all_reduce()["i"]) == 3
    tdf.save(sharded(mesh, 1.0), folder / "x.safetensors")
    (folder / f"ready-{rank}").touch()

    def lost():
        (folder / "now").touch()
        while not (folder / "done").exists():
            time.sleep(0.01)

    started = time.monotonic()
    try:
        globals()[call](rank, mesh, folder, lost)
    except PeerError as err:
        (folder / f"error-{rank}").write_text(f"{time.monotonic() - started:.1f} {err}")
    os._exit(0)


@pytest.mark.parametrize("how", ["cut", "killed"])
@pytest.mark.parametrize("call", ["save", "send"])
def test_a_lost_host(hosts, tmp_path, call, how):
    """In the middle of a call rank 1 is lost: the others name it within the timeout, and the file is the old one."""
    code = "import sys, pathlib; from benchmarks.reliability.test_hosts import program\n"
    code += "program(int(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3])"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    children = [
        subprocess.Popen(["ip", "netns", "exec", host, *command, str(i), str(tmp_path), call], env=env)
        for i, host in enumerate(hosts)
    ]
    while not (tmp_path / "now").exists():
        assert all(child.poll() is None for child in children)
        time.sleep(0.02)
    if how == "cut":
        ip("-n", hosts[1], "link", "set", "eth0", "down")
    else:
        # `ip netns exec` becomes the program.
        children[1].kill()
    (tmp_path / "done").touch()

    ends = [child.wait(90) for child in children]

    assert ends == [0, 0 if how == "cut" else -signal.SIGKILL, 0]
    found = {i: path.read_text() for i in range(HOSTS) if (path := tmp_path / f"error-{i}").exists()}
    assert [*found] == ([0, 1, 2] if how == "cut" else [0, 2])
    assert all(float(text.split()[0]) <= TIMEOUT_S + 4 for text in found.values()), found
    assert "rank 1 did not answer rank 0" in found[0]
    assert "rank 1 did not answer rank" in found[2]
    assert how == "killed" or "rank 0 did not answer rank 1" in found[1]
    assert tdf.load(tmp_path / "x.safetensors")["x"].unique().tolist() == [1.0]
    tdf.save(TensorDict({"x": torch.ones(1)}), tmp_path / "x.safetensors")
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp") or name.startswith(".x")]
