"""Without vLLM there is nothing to test here: it is installed by `make test-vllm`, beside packages of its own."""

import importlib.util
import os

HAS_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore = [] if HAS_VLLM else ["test_vllm.py", "test_vllm_server.py"]

if HAS_VLLM:
    # One process, no compiler, no network.
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCHDYNAMO_DISABLE": "1",
    }
