"""A program that is interrupted while a server does not answer."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, socket, threading, time
from tdfunc.llm.wrappers.server import Server, ServerOptions
silent = socket.create_server(("127.0.0.1", 0), backlog=8)
options = ServerOptions(f"http://127.0.0.1:{silent.getsockname()[1]}", None, 600.0, 2, 0.5, 4)
server = Server(options)
def interrupt():
    silent.accept()
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
def ask(number):
    return server.request("/v1/completions", {"prompt": number}, lambda objects: objects, where="generate")
try:
    server.each(ask, range(6))
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_program_that_waits_for_a_server():
    """The interpreter does not wait for the threads of the requests."""
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)

    assert found.stderr == ""
    assert found.stdout == "interrupted\n"
    assert found.returncode == 0
