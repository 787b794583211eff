import pytest
import torch


@pytest.fixture(scope="module")
def one_thread():
    """For runs that are compared to the bit: with several threads sums come in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
