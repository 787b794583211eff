"""Small models with weights that are not in their starting state: every gate, query and bias does something."""

import pytest
import torch

from modeling_moe_lc import MoeLcForCausalLM, MoeLcForConditionalGeneration
from modeling_moe_lc.configuration.presets import load_multimodal_preset, load_preset


def shaken(model, seed=0):
    """`model` with random values where initialisation puts zeros and ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator).to(tensor)
            if name.endswith("query"):
                tensor.copy_(0.5 * noise)
            elif "norm" in name or name.endswith("A_log"):
                tensor.add_(0.2 * noise)
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(0.05 * noise)
            elif tensor.dim() > 1 and tensor.shape[-1] > 4:
                tensor.mul_(3)
    return model


@pytest.fixture
def tiny():
    """`tiny(**overrides)`: a small K3-like model in evaluation mode; `tiny("nano-kimi-linear", ...)` another preset."""

    def build(preset="tiny", seed=0, **overrides):
        torch.manual_seed(seed)
        return shaken(MoeLcForCausalLM(load_preset(preset, **overrides)), seed).eval()

    return build


@pytest.fixture
def kimi_linear(tiny):
    """A small Kimi-Linear-like model: softplus gate, low-rank output gate, plain MoE, SwiGLU, ordinary residuals."""
    return tiny("nano-kimi-linear", num_hidden_layers=4, vocab_size=512, hidden_size=64, num_attention_heads=2,
                linear_attn_config={"num_heads": 2, "head_dim": 16}, num_experts=8)  # fmt: skip


@pytest.fixture
def ids():
    """`ids(batch, length)`: token ids of the small vocabulary, the same for the same shape."""

    def make(batch, length, seed=0):
        generator = torch.Generator().manual_seed(1000 * length + batch + seed)
        return torch.randint(3, 512, (batch, length), generator=generator)

    return make


@pytest.fixture
def tiny_multimodal():
    """`tiny_multimodal(**overrides)`: the same with a vision tower of 2 blocks, patches of 4 x 4 pixels."""

    def build(seed=0, **overrides):
        torch.manual_seed(seed)
        return shaken(MoeLcForConditionalGeneration(load_multimodal_preset("tiny", **overrides)), seed).eval()

    return build


@pytest.fixture
def pictures():
    """`pictures((1, 4, 6), ...)`: `pixel_values` and `grid_thws` of items of so many frames, rows and columns."""

    def make(*shapes, seed=0, patch=4):
        generator = torch.Generator().manual_seed(seed)
        patches = sum(t * h * w for t, h, w in shapes)
        pixels = torch.randn(patches, 3, patch, patch, generator=generator)
        return {"pixel_values": pixels, "grid_thws": torch.tensor(shapes).view(-1, 3)}

    return make
