"""The tensor- and expert-parallel plans are true: two processes compute what one does, each with half of what is split.

The test starts this file twice, as rank 0 and rank 1 (gloo, CPU); each compares with the whole model that it also holds.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import distributed as dist
from transformers.distributed import DistributedConfig

from modeling_moe_lc import MoeLcForCausalLM, MoeLcTextModel
from modeling_moe_lc.configuration.presets import load_preset


LIMIT = 1e-11  # FP64, relative, for every tensor; measured: at most 3e-14
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}
KIMI_LINEAR = {
    "num_hidden_layers": 4,
    "vocab_size": 512,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "linear_attn_config": {"num_heads": 2, "head_dim": 16},
    "num_experts": 8,
    "tie_word_embeddings": True,
}
MODELS = {"k3": ("tiny", {}), "kimi-linear": ("nano-kimi-linear", KIMI_LINEAR)}
PARALLEL = {
    "tensor": {"tp_size": 2, "tp_plan": "auto"},
    "expert": {"tp_size": 2, **({"ep_size": 2} if hasattr(DistributedConfig, "ep_size") else {"enable_expert_parallel": True})},
}  # fmt: skip
# The modules whose parameters every rank holds whole; whatever is not named here is split.
WHOLE = {
    *("input_layernorm", "post_attention_layernorm", "norm", "self_attention_res", "mlp_res", "output_attn_res"),
    *("q_conv1d", "k_conv1d", "v_conv1d", "f_a_proj", "decay", "g_a_proj", "o_norm"),
    *("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"),
    *("gate", "routed_expert_down_proj", "routed_expert_norm", "routed_expert_up_proj"),
}
THREE_KDA_HEADS = load_preset("tiny").linear_attn_config | {"num_heads": 3}
REFUSED = {
    "num_attention_heads: expected a multiple of the tensor-parallel size 2, got 3": {"num_attention_heads": 3},
    "linear_attn_config.num_heads: expected a multiple": {"linear_attn_config": THREE_KDA_HEADS},
    "mlp.gate_up_proj.weight: expected an intermediate size": {"intermediate_size": 97},
    "experts.gate_up_proj: expected an intermediate size": {"moe_intermediate_size": 31, "num_shared_experts": 0},
}


def two_ranks(folder: Path) -> list[dict]:
    """What rank 0 and rank 1 found; `main` below is what they run."""
    for name, (preset, overrides) in MODELS.items():
        torch.manual_seed(0)
        model = MoeLcForCausalLM(load_preset(preset, **overrides))
        with torch.no_grad():
            for tensor in model.state_dict().values():  # nothing stays in its starting state
                tensor.add_(0.1 * torch.randn(tensor.shape))
        model.save_pretrained(folder / name)
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    logs = [(folder / f"{rank}.log").open("w", encoding="utf-8") for rank in range(2)]
    command = [sys.executable, __file__, str(folder)]
    ranks = [subprocess.Popen([*command, str(r)], env=env, stdout=logs[r], stderr=logs[r]) for r in range(2)]
    try:
        failed = [rank for rank, process in enumerate(ranks) if process.wait(timeout=300)]
    finally:
        for process, log in zip(ranks, logs, strict=True):
            process.kill()
            log.close()
    assert not failed, "\n".join((folder / f"{r}.log").read_text(encoding="utf-8")[-3000:] for r in failed)
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


def test_two_ranks_equal_one(tmp_path):
    for rank in two_ranks(tmp_path):
        for case, found in rank["cases"].items():
            assert found["loaded"] == found["saved"] == [], (case, found)
            assert found["logits"] < LIMIT and found["loss"] < LIMIT, (case, found)
            assert found["gradients"][0] < LIMIT and found["gradients with a cache"][0] < LIMIT, (case, found)
            assert found["greedy"] and found["experts"] == 0.5, (case, found)
            if case.startswith("tensor"):
                assert found["split"] == 0.5 and set(found["whole"]) <= WHOLE, (case, found)
        for expected, message in rank["refused"].items():
            assert expected in message


def test_every_rule_names_something_in_some_model():
    rules, names = set(), set()
    for preset, overrides in MODELS.values():
        with torch.device("meta"):
            model = MoeLcTextModel(load_preset(preset, **overrides))
        rules |= {*model.tp_plan, *model.ep_plan} if hasattr(model, "ep_plan") else {*model._tp_plan, *model._ep_plan}
        named = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
        names |= {".".join("*" if part.isdigit() else part for part in name.split(".")) for name in named}
    assert rules - names == set()


def relative(x: torch.Tensor, reference: torch.Tensor) -> float:
    """NaN counts as infinite; the first site of the attention residuals has gradients that are exactly zero."""
    return ((x - reference).norm() / reference.norm().clamp_min(1e-30)).nan_to_num(math.inf).item()


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def differing(one: dict, two: dict) -> list[str]:
    """The names of `one` that `two` lacks or has with other values; a sharded model writes a tied head twice."""
    return [name for name in one if name not in two or not torch.equal(one[name], gathered(two[name]))]


def worst_gradient(one, two, batches) -> tuple[float, str]:
    """The largest relative difference of a gradient, over several backward passes that accumulate."""
    for batch in batches:
        for model in (one, two):
            model(**batch).loss.backward()
    whole = dict(one.named_parameters())
    gradients = [(relative(gathered(p.grad), whole[name].grad), name) for name, p in two.named_parameters()]
    one.zero_grad()
    two.zero_grad()
    return max(gradients)


def compare(folder: Path, kind: str) -> dict:
    from safetensors.torch import load_file

    one = MoeLcForCausalLM.from_pretrained(folder, dtype=torch.float64)
    config = DistributedConfig(**PARALLEL[kind])
    two = MoeLcForCausalLM.from_pretrained(folder, dtype=torch.float64, distributed_config=config)
    found: dict = {"loaded": differing(one.state_dict(), two.state_dict())}

    for name, model in (("whole", one), ("sharded", two)):
        model.save_pretrained(folder / f"{kind}-{name}")
    dist.barrier()
    found["saved"] = differing(
        *(load_file(folder / f"{kind}-{name}" / "model.safetensors") for name in ("whole", "sharded"))
    )

    ids = torch.randint(3, 512, (2, 37), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        outputs = [model(ids, attention_mask=mask, labels=ids) for model in (one, two)]
        found["logits"] = relative(outputs[1].logits, outputs[0].logits)
        found["loss"] = relative(outputs[1].loss, outputs[0].loss)
        found["greedy"] = torch.equal(*(m.generate(ids, attention_mask=mask, **GREEDY) for m in (one, two)))
    short = {"input_ids": ids[:, :7], "labels": ids[:, :7], "use_cache": True}
    found["gradients with a cache"] = worst_gradient(one, two, [short])
    one.train()
    two.train()
    packed = {"input_ids": ids.view(1, -1), "labels": ids.view(1, -1), "seq_idx": torch.arange(74)[None] // 29}
    found["gradients"] = worst_gradient(one, two, [{"input_ids": ids, "attention_mask": mask, "labels": ids}, packed])

    parameters = dict(two.named_parameters())
    split = [p for p in parameters.values() if hasattr(p, "to_local")]
    experts = [p for name, p in parameters.items() if ".experts." in name]
    for key, chosen in (("split", split), ("experts", experts)):
        found[key] = sum(local(p).nbytes for p in chosen) / sum(p.nbytes for p in chosen)
    found["whole"] = sorted({name.split(".")[-2] for name, p in parameters.items() if not hasattr(p, "to_local")})
    return found


def refusal(folder: Path, overrides: dict) -> str:
    try:
        config = DistributedConfig(**PARALLEL["tensor"])
        MoeLcForCausalLM.from_pretrained(folder, config=load_preset("tiny", **overrides), distributed_config=config)
    except ValueError as error:
        return str(error)
    return "loaded"


def main(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    cases = {f"{kind}, {name}": compare(folder / name, kind) for kind in PARALLEL for name in MODELS}
    refused = {expected: refusal(folder / "k3", overrides) for expected, overrides in REFUSED.items()}
    (folder / f"{rank}.json").write_text(json.dumps({"cases": cases, "refused": refused}), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
