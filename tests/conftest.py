"""A seeded generator, one CPU thread, hypothesis profiles. Warnings are errors: see pyproject.toml."""

import os
import zlib

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# The first call of an operation is slow, so a deadline would only be flaky.
settings.register_profile("default", deadline=None, max_examples=50)
settings.register_profile("ci", deadline=None, max_examples=100, print_blob=True)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def generator(request):
    """A generator with a seed of the test's own; TDFUNC_TEST_SEED replaces it."""
    seed = int(os.environ.get("TDFUNC_TEST_SEED", zlib.crc32(request.node.nodeid.encode())))
    # pytest shows what a fixture prints when the test fails.
    print(f"TDFUNC_TEST_SEED={seed}")
    return torch.Generator().manual_seed(seed)
