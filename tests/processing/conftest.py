"""A processor as `moe-lc prepare` and the image processor's defaults make it."""

import pytest

from modeling_moe_lc import MoeLcImageProcessor, MoeLcProcessor
from modeling_moe_lc.training.tokenizer import train_tokenizer


TEXTS = [
    "def picture(size):\n    return size * 2 + 17\n",
    'role="assistant" What is in the image? think response message',
] * 20


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(TEXTS, 400, 4096)


@pytest.fixture
def processor(tokenizer):
    return MoeLcProcessor(MoeLcImageProcessor(), tokenizer)
