"""The random states of one process: taken for a checkpoint, put back, or begun anew."""

import random

import numpy as np
import torch


def random_state() -> dict:
    """The states of Python's, NumPy's and torch's CPU generators, and of the current CUDA device where one is in use."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict) -> None:
    """Puts back what `random_state` took: the next random numbers are those that followed then."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_all(seed: int, step: int, rank: int) -> None:
    """Seeds all generators from three numbers, none of which can stand in for another."""
    python, numpy, cpu = np.random.SeedSequence([seed, step, rank]).generate_state(3)
    random.seed(int(python))
    np.random.seed(numpy)
    torch.manual_seed(int(cpu))  # of every CUDA device as well
