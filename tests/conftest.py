"""A seeded generator, one CPU thread, hypothesis profiles. Warnings are errors: see pyproject.toml."""

import os
import zlib

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from tdfunc.storage import progress

torch.set_num_threads(1)

# The first call of an operation is slow, so a deadline would only be flaky. Examples are the same in every run of the
# same code; the thorough profile looks for new ones.
settings.register_profile("default", deadline=None, max_examples=25, derandomize=True)
settings.register_profile("ci", deadline=None, max_examples=60, derandomize=True, print_blob=True)
settings.register_profile("thorough", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def seed(request):
    """The test's own seed, given to torch's default generator; TDFUNC_TEST_SEED is mixed into it."""
    seed = zlib.crc32((os.environ.get("TDFUNC_TEST_SEED", "") + request.node.nodeid).encode())
    # torch.manual_seed keeps three stack traces of each call for accelerators that are not there.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    return seed


@pytest.fixture
def generator(seed):
    """A generator with the test's own seed."""
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def terminal(monkeypatch, capfd):
    """What is printed, where progress bars find a terminal."""
    monkeypatch.setattr(progress, "_is_off", lambda tqdm: False)
    return capfd


@pytest.fixture(scope="module")
def process_group():
    """The default process group, of this process alone: without files and without the machine's name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
