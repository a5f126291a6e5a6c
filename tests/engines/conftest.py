"""Without vLLM there is nothing to test here: it is installed by `make test-vllm`, beside packages of its own."""

import importlib.util
import os

collect_ignore = [] if importlib.util.find_spec("vllm") else ["test_vllm.py", "test_vllm_server.py"]

if not collect_ignore:
    # One process, no compiler, no network.
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCHDYNAMO_DISABLE": "1",
    }
