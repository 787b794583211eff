"""What holds for every test: no network, one thread for each worker, the same random numbers, no GPU where there is none."""

import os


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import random

import numpy as np
import pytest
import torch


if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
if not torch.cuda.is_available():
    # triton.jit reads it while a kernel's module is imported, which any test of this process may do first
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def seeded():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def poison_empty(monkeypatch):
    """Uninitialised float tensors hold NaN, so that an element which a kernel reads before or fails to write shows."""
    poisoned = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

    def poison(make):
        def wrapped(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.dtype in poisoned:
                with torch.no_grad():
                    tensor.fill_(float("nan"))
            return tensor

        return wrapped

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))
