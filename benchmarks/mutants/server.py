"""Runs tests in forked processes that have torch already, for the requests on standard input: the paths and options.

Each line is a list of pytest's arguments in JSON. The answer is a line with its exit status, or -1 for a signal, and
the tests that failed. tdfunc itself is imported anew by each process.
"""

import json
import os
import re
import sys
import tempfile
from typing import Any

import numpy as np
import pytest
import torch
import transformers

# pytest cannot rewrite the assertions of plugins that these import.
_IMPORTED = np, torch, transformers
_QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")


def run(arguments: list[str]) -> tuple[int, list[str]]:
    """Run pytest in a process with its own group; return its exit status and the tests that failed."""
    with tempfile.TemporaryFile("w+") as out:
        child = os.fork()
        if not child:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
            status: Any = 3
            try:
                status = pytest.main([*_QUIET, *arguments])
            finally:
                sys.stdout.flush()
                os._exit(int(status))
        # The group's identity, for a caller that gives up.
        print(json.dumps(child), flush=True)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        return status, re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", out.read(), flags=re.MULTILINE)


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
