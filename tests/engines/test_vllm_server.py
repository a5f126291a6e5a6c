"""Engines in processes of their own against the model of transformers that they run, also after a push."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import httpx2
import pytest
import torch

from tdfunc.llm import RemoteWrapper, causal_lm, score_ids
from tdfunc.llm.generation.options import GenerationOptions
from tests.engines.tiny import make_model, make_tokenizer

OPTIONS = GenerationOptions.parse({"max_new_tokens": 16})


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A server of the first model, with the endpoint that replaces its weights."""
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
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_server_is_the_model(address, stream):
    """Tokens and log-probs of responses and prompts, and scores of rows."""
    check_equal(RemoteWrapper("tiny", base_url=address, input_mode="tokens", stream=stream), make_model(0))


def test_after_a_push(address, tmp_path):
    """The server with the weights of another model."""
    other = make_model(5)
    other.save_pretrained(tmp_path)
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
    httpx2.post(f"{address}/collective_rpc", json=reload, timeout=60).raise_for_status()
    httpx2.post(f"{address}/reset_prefix_cache", timeout=60).raise_for_status()
    check_equal(RemoteWrapper("tiny", base_url=address, input_mode="tokens"), other)


def test_a_push_into_an_engine_with_workers(tmp_path):
    """The weights go through a folder."""
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "tests.engines.workers", str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


def check_equal(wrapper, model):
    """Compare with transformers, row by row."""
    lm, params, buffers = causal_lm(model)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, 320, (length,), generator=generator) for length in (1, 7, 150)]
    for row, made in zip(rows, wrapper.generate_tokens(rows, OPTIONS, prompt_log_probs=True), strict=True):
        own = model.generate(row[None], max_new_tokens=16, do_sample=False, pad_token_id=0)[0]
        exact = score_ids(lm, params, own[None], buffers=buffers).log_probs[0]
        assert made.tokens.tolist() == own[len(row) :].tolist()
        found = torch.cat([made.prompt_log_probs, made.log_probs])
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-4)
        assert (found - exact).abs().exp().mean() <= 1.0001
        torch.testing.assert_close(wrapper.score_tokens([own])[0], exact, rtol=0, atol=1e-4)
