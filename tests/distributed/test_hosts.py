"""Ranks on three hosts (network namespaces): a cut link is a named error within the timeout, and no file is torn."""

import os
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
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("network namespaces need root and the command ip")
    ip("link", "set", bridge, "up")
    for i, name in enumerate(names):
        ip("netns", "add", name)
        ip("link", "add", f"{bridge}{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", f"{bridge}{i}", "master", bridge, "up")
        ip("-n", name, "address", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")
    yield names
    for i, name in enumerate(names):
        ip("netns", "delete", name)
        subprocess.run(["ip", "link", "delete", f"{bridge}{i}"], capture_output=True)
    ip("link", "delete", bridge)


def program(rank, folder):
    """One rank: a sum and a save on a whole network, then a save while the link of rank 1 is cut."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    address, timeout = "tcp://10.77.0.1:29511", timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=HOSTS, timeout=timeout)
    mesh = init_device_mesh("cpu", (HOSTS,))
    old, new = [
        TensorDict({"x": distribute_tensor(torch.full((30,), v), mesh, [Shard(0)], src_data_rank=None)})
        for v in (1.0, 2.0)
    ]
    assert int(TensorDict({"i": rank}).all_reduce()["i"]) == 3
    tdf.save(old, folder / "x.safetensors")
    (folder / f"ready-{rank}").touch()
    while not (folder / "cut").exists():
        time.sleep(0.05)
    started = time.monotonic()
    try:
        tdf.save(new, folder / "x.safetensors")
    except PeerError as err:
        (folder / f"error-{rank}").write_text(f"{time.monotonic() - started:.1f} {err}")
    os._exit(0)


def test_a_cut_link(hosts, tmp_path):
    """All ranks raise within the timeout, rank 1 is named, and the file is the old one."""
    code = "import sys, pathlib; from tests.distributed.test_hosts import program\n"
    code += "program(int(sys.argv[1]), pathlib.Path(sys.argv[2]))"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(["ip", "netns", "exec", host, sys.executable, "-c", code, str(i), str(tmp_path)], env=env)
        for i, host in enumerate(hosts)
    ]
    while sum((tmp_path / f"ready-{i}").exists() for i in range(HOSTS)) < HOSTS:
        assert all(rank.poll() is None for rank in ranks)
        time.sleep(0.05)
    ip("-n", hosts[1], "link", "set", "eth0", "down")
    (tmp_path / "cut").touch()

    assert [rank.wait(60) for rank in ranks] == [0] * HOSTS
    found = [(tmp_path / f"error-{i}").read_text() for i in range(HOSTS)]
    assert all(float(text.split()[0]) <= TIMEOUT_S + 2 for text in found)
    assert "rank 1 must answer rank 0" in found[0]
    assert "rank 1 must answer rank 0" in found[2]
    assert "rank 0 must answer rank 1" in found[1]
    assert tdf.load(tmp_path / "x.safetensors")["x"].unique().tolist() == [1.0]
