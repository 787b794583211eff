"""`load_state_dict` takes released names as well: `Trainer` reads its checkpoints, which carry them, by nothing else."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import load_sharded_checkpoint

from modeling_moe_lc import MoeLcForCausalLM, MoeLcForConditionalGeneration, MoeLcMxfp4Config, MoeLcTextModel
from modeling_moe_lc.configuration.presets import load_multimodal_preset, load_preset
from modeling_moe_lc.training.callback import MoeLcCallback


MXFP4 = Path(__file__).parents[1] / "fixtures" / "k3-text-tiny-mxfp4"
ROWS = [{"input_ids": (torch.arange(24) * 7 % 50 + i).tolist()} for i in range(32)]
ROWS = [{**row, "labels": row["input_ids"]} for row in ROWS]


def text_model(seed=0, **overrides):
    torch.manual_seed(seed)
    return randomised(MoeLcForCausalLM(load_preset("tiny", **overrides)))


def multimodal_model(seed=0):
    torch.manual_seed(seed)
    return randomised(MoeLcForConditionalGeneration(load_multimodal_preset("tiny")))


def randomised(model):
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor), alpha=0.01)
    return model


def assert_same(model, other):
    assert model.state_dict().keys() == other.state_dict().keys()
    for (name, tensor), its in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert tensor.dtype == its.dtype and torch.equal(tensor, its), name


def released(model, folder):
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("make", [text_model, multimodal_model])
@pytest.mark.parametrize("strict", [True, False])
def test_released_names_load_all_tensors(make, strict, tmp_path):
    model, other = make(), make(seed=1)
    given = released(model, tmp_path)
    assert given.keys() != model.state_dict().keys()
    result = other.load_state_dict(given, strict)
    assert not result.missing_keys and not result.unexpected_keys
    assert_same(model, other)


@pytest.mark.parametrize("overrides", [{"tie_word_embeddings": True}, {"checkpoint_layout": "kimi_linear"}])
def test_other_layouts_and_tied_embeddings(overrides, tmp_path):
    model, other = text_model(**overrides), text_model(seed=1, **overrides)
    other.load_state_dict(released(model, tmp_path))
    assert_same(model, other)
    assert (other.lm_head.weight is other.model.embed_tokens.weight) == ("tie_word_embeddings" in overrides)


def test_a_model_in_bfloat16_keeps_its_dtypes(tmp_path):
    model, other = text_model().bfloat16(), text_model(seed=1)
    model = MoeLcForCausalLM.from_pretrained(saved(model, tmp_path / "16"), dtype=torch.bfloat16)
    other = MoeLcForCausalLM.from_pretrained(saved(other, tmp_path / "32"), dtype=torch.bfloat16)
    other.load_state_dict(released(model, tmp_path / "given"))
    assert_same(model, other)


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_experts_in_mxfp4_get_back_their_bytes(packed, tmp_path):
    given, quantization = load_file(MXFP4 / "model.safetensors"), {}
    if packed:
        quantization["quantization_config"] = MoeLcMxfp4Config(dequantize=False)
    model, other = (MoeLcForCausalLM.from_pretrained(MXFP4, dtype=torch.bfloat16, **quantization) for _ in range(2))
    for tensor in other.state_dict().values():
        tensor.zero_()
    other.load_state_dict(given)
    assert_same(model, other)
    for name, tensor in released(other, tmp_path).items():
        assert torch.equal(tensor, given[f"language_model.{name}"]), name


def test_own_names_go_the_ordinary_way(monkeypatch):
    model, other = text_model(), text_model(seed=1)
    monkeypatch.setattr(MoeLcForCausalLM, "from_pretrained", None)
    assert not other.load_state_dict(model.state_dict()).missing_keys
    assert_same(model, other)


def test_strict_names_what_is_missing_and_what_nobody_knows(tmp_path):
    model, other = text_model(), text_model(seed=1)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    given = released(model, tmp_path) | {"model.unknown": torch.zeros(2)}
    del given["model.layers.1.self_attn.A_log"]
    with pytest.raises(RuntimeError, match=r"(?s)Missing.*layers\.1\.self_attn\.decay\.A_log.*|Unexpected.*unknown"):
        text_model(seed=1).load_state_dict(given)
    result = other.load_state_dict(given, strict=False)
    assert result.missing_keys == ["model.layers.1.self_attn.A_log"]
    assert result.unexpected_keys == ["model.unknown"]
    kept = "model.layers.1.self_attn.decay.A_log"
    assert torch.equal(other.state_dict()[kept], before[kept])


def test_wrong_shapes_are_refused(tmp_path):
    given = released(text_model(), tmp_path)
    given["model.layers.0.mlp.gate_proj.weight"] = torch.zeros(3, 64)
    with pytest.raises(RuntimeError, match="mismatch"):
        text_model(seed=1).load_state_dict(given, strict=False)


def test_a_checkpoint_in_many_files_splits_experts(tmp_path):
    model, other = text_model(), text_model(seed=1)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    load_sharded_checkpoint(other, tmp_path, strict=False)
    assert_same(model, other)


def test_the_text_model_without_a_head_reads_the_whole(tmp_path):
    model, other = text_model(), MoeLcTextModel(load_preset("tiny"))
    other.load_state_dict(released(model, tmp_path), strict=False)
    assert_same(model.model, other)


def trainer(folder, model, *callbacks, **arguments):
    settings = {
        "per_device_train_batch_size": 4, "learning_rate": 3e-3, "report_to": [], "use_cpu": True, "disable_tqdm": True,
        "save_strategy": "steps", "save_steps": 1, "max_steps": 4, "lr_scheduler_type": "constant",
    } | arguments  # fmt: skip
    arguments = TrainingArguments(folder, **settings)
    callbacks = [MoeLcCallback(), *callbacks]
    return Trainer(model=model, args=arguments, train_dataset=ROWS, eval_dataset=ROWS[:4], callbacks=callbacks)


def test_two_and_two_steps_are_four(tmp_path):
    whole = text_model()
    trainer(tmp_path / "whole", whole).train()
    trainer(tmp_path / "halves", text_model(), max_steps=2).train()
    resumed = text_model(seed=1)
    trainer(tmp_path / "halves", resumed).train(resume_from_checkpoint=True)
    assert_same(whole, resumed)


def test_the_best_model_comes_back(tmp_path):
    class Ruin(TrainerCallback):
        """Makes the model worse after the second step."""

        def on_step_begin(self, args, state, control, model, **kwargs):
            if state.global_step == 2:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(3)

    model = text_model()
    run = trainer(
        tmp_path, model, Ruin(), eval_strategy="steps", eval_steps=1, max_steps=3, load_best_model_at_end=True
    )
    run.train()
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert_same(MoeLcForCausalLM.from_pretrained(tmp_path / "checkpoint-2"), model)
