"""What is saved is the released layout: the same names, shapes, dtypes and bytes, however often it goes round."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from modeling_moe_lc import MoeLcForCausalLM, MoeLcTextModel
from modeling_moe_lc.configuration.presets import load_preset


FIXTURES = Path(__file__).parents[1] / "fixtures"


def text_tensors(folder):
    tensors = load_file(Path(folder) / "model.safetensors")
    tensors = {name.removeprefix("language_model."): tensor for name, tensor in tensors.items()}
    return {n: t for n, t in tensors.items() if not n.startswith(("vision_tower.", "mm_projector."))}


def assert_same_files(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].shape, ours[name].dtype) == (tensor.shape, tensor.dtype), name
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("name", ["k3-text-tiny", "kimi-linear-tiny"])
def test_released_folder_goes_round_twice(name, tmp_path):
    released = text_tensors(FIXTURES / name)
    source = FIXTURES / name
    for trip in ("one", "two"):
        model, info = MoeLcForCausalLM.from_pretrained(source, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        source = tmp_path / trip
        model.save_pretrained(source)
        assert_same_files(text_tensors(source), released)


@pytest.mark.parametrize("layout", ["kimi_k3", "kimi_linear"])
def test_model_made_from_scratch_goes_round(layout, tmp_path):
    model = MoeLcForCausalLM(load_preset("tiny", checkpoint_layout=layout))
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.block_sparse_moe.gate.e_score_correction_bias.copy_(0.5 + 1e-4 * torch.arange(8))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for (name, tensor), other in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), name
    assert "model.layers.1.block_sparse_moe.experts.7.w2.weight" in text_tensors(tmp_path)


def test_layout_decides_shapes_and_loses_nothing(tmp_path):
    model = MoeLcForCausalLM(load_preset("tiny", checkpoint_layout="kimi_linear"))
    model.save_pretrained(tmp_path)
    saved = text_tensors(tmp_path)
    assert saved["model.layers.0.self_attn.A_log"].shape == (1, 1, 4, 1)
    assert saved["model.layers.0.self_attn.o_norm.weight"].dtype == torch.bfloat16
    assert saved["model.layers.0.self_attn.q_conv1d.weight"].dtype == torch.float32  # random: bf16 would lose bits


def test_base_model_reads_a_causal_lm_folder(tmp_path):
    model = MoeLcForCausalLM(load_preset("tiny"))
    model.save_pretrained(tmp_path)
    base = MoeLcTextModel.from_pretrained(tmp_path)
    assert torch.equal(base.layers[1].block_sparse_moe.experts.down_proj,
                       model.model.layers[1].block_sparse_moe.experts.down_proj)  # fmt: skip


def rewritten(tmp_path, change):
    """A copy of the K3 fixture whose tensors went through `change`."""
    source = FIXTURES / "k3-text-tiny"
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    return tmp_path


A_LOG = "language_model.model.layers.0.self_attn.A_log"
CONV = "language_model.model.layers.0.self_attn.q_conv1d.weight"


def test_every_released_shape_of_conv_and_a_log_reads_the_same(tmp_path):
    def change(tensors):
        tensors[CONV] = tensors[CONV][:, 0].contiguous()
        tensors[A_LOG] = tensors[A_LOG][:5].view(1, 1, 5, 1).contiguous()

    ours = MoeLcForCausalLM.from_pretrained(rewritten(tmp_path, change)).model.layers[0].self_attn
    theirs = MoeLcForCausalLM.from_pretrained(FIXTURES / "k3-text-tiny").model.layers[0].self_attn
    assert torch.equal(ours.q_conv1d.weight, theirs.q_conv1d.weight)
    assert torch.equal(ours.decay.A_log, theirs.decay.A_log)


@pytest.mark.parametrize(
    ("name", "value"),
    [(A_LOG, torch.ones(128)), (A_LOG, torch.zeros(4)), (CONV, torch.zeros(160, 5)), (CONV, torch.zeros(4, 160))],
    ids=["A_log padded with ones", "A_log too short", "conv too wide", "conv transposed"],
)
def test_a_shape_that_nobody_released_is_refused(tmp_path, name, value):
    folder = rewritten(tmp_path, lambda tensors: tensors.update({name: value}))
    with pytest.raises(RuntimeError):
        MoeLcForCausalLM.from_pretrained(folder)


def test_a_missing_expert_is_refused(tmp_path):
    missing = "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight"
    with pytest.raises(RuntimeError):
        MoeLcForCausalLM.from_pretrained(rewritten(tmp_path, lambda tensors: tensors.pop(missing)))


def test_saving_in_shards_changes_nothing(tmp_path):
    model = MoeLcForCausalLM(load_preset("tiny"))
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    again = MoeLcForCausalLM.from_pretrained(tmp_path)
    for (name, tensor), other in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), name
