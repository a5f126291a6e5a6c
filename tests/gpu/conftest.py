"""Every test here has one body for both devices: the CPU, in each run of the tests, and a GPU, by `make gpu`."""

import pytest
import torch

NEEDS = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; `make gpu` runs it on one")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS])])
def device(request, monkeypatch):
    """The device of the test, with arithmetic of whole float32 numbers."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return torch.device(request.param)
