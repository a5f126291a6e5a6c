"""Engines in processes of their own against the model of transformers that they run, also after a push."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

import httpx2
import pytest
import torch
from safetensors.torch import load_file, save_file

from tdfunc import ConcurrencyError, CorruptCheckpointError, RemoteError
from tdfunc.llm import RemoteWrapper, causal_lm
from tdfunc.llm.generation.options import GenerationOptions
from tdfunc.llm.wrappers import remote
from tests.engines.tiny import CLOSE, check_equal, make_model, make_tokenizer

OPTIONS = GenerationOptions.parse({"max_new_tokens": 16})


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A server of the first model, with the endpoints that replace its weights: its address, and its process."""
    folder = tmp_path_factory.mktemp("served")
    make_model(0).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "256", "--max-num-seqs", "8", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", str(64 << 20)]
    env = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with open(folder / "log", "w") as log:
        # In a session of its own, so that its workers can be ended with it.
        server = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server, folder / "log")
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


@pytest.fixture
def address(engine):
    """The address of the server."""
    return engine[0]


def wait_for(url, server, log, limit_s=240):
    """Wait until a server answers."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s and server.poll() is None:
        try:
            if httpx2.get(url, timeout=5).status_code == 200:
                return
        except httpx2.TransportError:
            time.sleep(0.5)
    pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}")


def rows():
    """Rows of several lengths, one longer than a block of the cache."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 320, (length,), generator=generator) for length in (1, 7, 150)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_server_is_the_model(address, stream):
    """Tokens and log-probs of responses and prompts, and scores of rows."""
    check_equal(RemoteWrapper("tiny", base_url=address, input_mode="tokens", stream=stream), make_model(0), rows())


class Trainer:
    """This process, which pushes the weights of models into the server.

    Attributes:
        alter: What happens to the folder of a push before the server reads it; it returns the folder to read.
    """

    def __init__(self, address, folder):
        self.wrapper = RemoteWrapper("tiny", base_url=address, input_mode="tokens", max_retries=1)
        self.folder, self.alter = folder, lambda place: place

    def push(self, model, **options):
        """Push a model."""
        lm, params, buffers = causal_lm(model)
        before = params.clone()
        try:
            return self.wrapper.push(params, lm=lm, buffers=buffers, folder=self.folder, **options)
        finally:
            assert (params == before).all()
            assert list(self.folder.iterdir()) == []


@pytest.fixture
def trainer(address, tmp_path, monkeypatch):
    """A trainer with a folder that it shares with the server."""
    (tmp_path / "shared").mkdir()
    made, send = Trainer(address, tmp_path / "shared"), remote.send_by_folder
    monkeypatch.setattr(
        remote, "send_by_folder", lambda leaves, where, reload: send(leaves, where, lambda at: reload(made.alter(at)))
    )
    return made


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("version", "proof", "unread"), [(5, "prompt", None), (6, "full", {})], ids=["one prompt", "every id"]
)
def test_pushes_into_a_server(trainer, version, proof, unread):
    """Proven by one prompt or by every id: the server is the model that was pushed."""
    other = make_model(version)

    done = trainer.push(other, version=version, proof=proof, tolerance=CLOSE)

    assert done.unread == unread
    check_equal(trainer.wrapper, other, rows())


def torn(place):
    """Weights of which a part was not written."""
    with open(f"{place}/model.safetensors", "r+b") as file:
        file.seek(-4096, 2)
        file.write(bytes(4096))
    return place


def half(place):
    """A copy of the weights, one leaf of which is that of another push."""
    leaves = load_file(f"{place}/model.safetensors")
    leaves["model.layers.1.mlp.up_proj.weight"] *= 1.05
    copy = tempfile.mkdtemp()
    save_file(leaves, f"{copy}/model.safetensors")
    return copy


def old(place):
    """The weights of an earlier push."""
    copy = tempfile.mkdtemp()
    save_file(make_model(5).state_dict(), f"{copy}/model.safetensors")
    return copy


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("alter", "error"), [(torn, CorruptCheckpointError), (half, ValueError), (old, ValueError)])
def test_faulty_pushes_into_a_server(trainer, alter, error):
    """Checksums or the proof notice them, nothing is generated, and the next push mends it."""
    good = make_model(7)
    trainer.push(make_model(5), version="between")
    trainer.alter = alter
    with pytest.raises(error):
        trainer.push(good, version="good")
    with pytest.raises(ConcurrencyError, match="are not proven"):
        trainer.wrapper.generate_tokens([torch.tensor([5])], OPTIONS)
    trainer.alter = lambda place: place
    trainer.push(good, version="good")
    check_equal(trainer.wrapper, good, rows())


def test_a_push_into_an_engine_with_workers(tmp_path):
    """The weights go through a folder."""
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "tests.engines.workers", str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


# Afterwards there is no server: the last test of it.
def test_a_server_that_dies_in_a_push(engine, trainer):
    """The push raises, and the weights of the trainer are as they were."""

    def kill(place):
        os.killpg(engine[1].pid, signal.SIGKILL)
        return place

    trainer.alter = kill
    with pytest.raises(RemoteError, match="push: http.*/collective_rpc did not answer"):
        trainer.push(make_model(8), version=8)
