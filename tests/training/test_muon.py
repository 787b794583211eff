"""Muon is its definition on matrices, heads and stacks; sharded it equals whole; saved and loaded it goes on as if nothing was.

The test of two processes starts this file twice, as rank 0 and rank 1 (gloo, CPU); each compares with the whole model
that it also holds.
"""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard

from modeling_moe_lc import MoeLcForCausalLM
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.training import muon as muon_module
from modeling_moe_lc.training.muon import COEFFICIENTS, Muon, orthogonalise
from modeling_moe_lc.training.optim import clip_grad_norm, muon, set_learning_rate


LIMIT = 1e-9  # FP64, relative; measured: at most 3e-14
RATES = (0.02, 0.03, 0.01, 0.02, 0.005)
DECAY, MOMENTUM = 0.1, 0.95
CUTS = {  # shape of a parameter, `rows`, and the borders of the blocks written out
    "wide": ((5, 7), None, [(0, 5)]),
    "tall": ((9, 4), None, [(0, 9)]),
    "heads": ((12, 5), (3,), [(0, 3), (3, 6), (6, 9), (9, 12)]),
    "keys and values": ((14, 9), (4, 3), [(0, 4), (4, 7), (7, 11), (11, 14)]),
    "gate and up": ((8, 7), (4,), [(0, 4), (4, 8)]),
    "experts, gate and up": ((6, 8, 5), (4,), [(0, 4), (4, 8)]),
    "experts, down": ((6, 5, 4), (5,), [(0, 5)]),
    "like some heads": ((3, 5), None, [(0, 3)]),
}
UNEVEN = {  # no size divides by two ranks, nor by what a rank gets
    "num_attention_heads": 3,
    "linear_attn_config": load_preset("tiny").linear_attn_config | {"num_heads": 3},
    "num_experts": 7,
    "routed_expert_hidden_size": 45,
    "intermediate_size": 97,
}


def polynomial(matrix: torch.Tensor) -> torch.Tensor:
    a, b, c = COEFFICIENTS
    x = matrix / max(torch.linalg.norm(matrix).item(), 1e-7)
    for _ in range(5):
        x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
    return x


def definition(parameter, gradients, rates, borders) -> torch.Tensor:
    """One matrix at a time, one block at a time, as the papers write it."""
    stack = parameter.reshape(-1, *parameter.shape[-2:]).clone()
    for index, matrix in enumerate(stack):
        past = torch.zeros_like(matrix)
        for gradient, rate in zip(gradients, rates):
            gradient = gradient.reshape(stack.shape)[index]
            past = MOMENTUM * past + gradient
            nesterov = gradient + MOMENTUM * past
            update = torch.empty_like(matrix)
            for start, stop in borders:
                block = nesterov[start:stop]
                update[start:stop] = 0.2 * max(block.shape) ** 0.5 * polynomial(block)
            matrix = matrix - rate * DECAY * matrix - rate * update
        stack[index] = matrix
    return stack.view_as(parameter)


def relative(x: torch.Tensor, reference: torch.Tensor) -> float:
    return ((x - reference).norm() / reference.norm().clamp_min(1e-30)).nan_to_num(1e9).item()


def optimise(optimizer, parameters, gradients, rates) -> None:
    for step, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for parameter, steps in zip(parameters, gradients, strict=True):
            parameter.grad = steps[step].clone()
        optimizer.step()


@pytest.mark.parametrize("workspace", [2**30, 3000, 1], ids=["one batch", "cut batches", "one block at a time"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, LIMIT), (torch.float32, 1e-5)], ids=str)
def test_muon_is_its_definition(dtype, limit, workspace, monkeypatch):
    monkeypatch.setattr(muon_module, "WORKSPACE", workspace)
    starts = [torch.randn(shape, dtype=torch.float64) for shape, _, _ in CUTS.values()]
    gradients = [[torch.randn_like(start) for _ in RATES] for start in starts]
    parameters = [nn.Parameter(start.to(dtype, copy=True)) for start in starts]
    groups = [{"params": [p], "rows": rows} for p, (_, rows, _) in zip(parameters, CUTS.values(), strict=True)]
    optimizer = Muon(groups, weight_decay=DECAY, momentum=MOMENTUM)
    optimise(optimizer, parameters, [[g.to(dtype) for g in steps] for steps in gradients], RATES)
    for name, start, steps, parameter in zip(CUTS, starts, gradients, parameters, strict=True):
        expected = definition(start, steps, RATES, CUTS[name][2])
        assert relative(parameter.double(), expected) < limit, name
        assert optimizer.state[parameter]["momentum_buffer"].dtype == dtype


@pytest.mark.parametrize("shape", [(48, 96), (96, 48), (64, 64)])
def test_an_update_is_nearly_orthogonal_and_as_large_as_one_of_adamw(shape):
    blocks = torch.randn(3, *shape, dtype=torch.float64)
    u, s, v = torch.linalg.svd(blocks, full_matrices=False)
    a, b, c = COEFFICIENTS
    for step in range(5):
        s = s / s.norm(dim=1, keepdim=True) if step == 0 else s
        s = a * s + b * s**3 + c * s**5
    update = orthogonalise(blocks.clone())
    torch.testing.assert_close(update, 0.2 * max(shape) ** 0.5 * (u * s[:, None]) @ v)
    values = torch.linalg.svdvals(update) / (0.2 * max(shape) ** 0.5)
    if shape[0] != shape[1]:  # a square random matrix has singular values near zero
        assert values.min() > 0.65 and values.max() < 1.21
    assert update.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.2)


def test_bfloat16_is_close_enough():
    blocks = torch.randn(4, 64, 128)
    update, expected = orthogonalise(blocks.bfloat16()), orthogonalise(blocks.double())
    assert update.dtype == torch.bfloat16
    assert relative(update.double(), expected) < 0.06  # measured: up to 0.041; the rounding of the input alone: 0.002


def test_other_groups_are_adamw():
    ours, theirs = ([nn.Parameter(torch.full(shape, 0.5)) for shape in ((7,), (3, 4))] for _ in range(2))
    gradients = [[torch.randn_like(p) for _ in RATES] for p in ours]
    options = {"weight_decay": 0.3, "betas": (0.8, 0.9)}
    optimise(Muon([{"params": ours, "use_muon": False}], **options), ours, gradients, RATES)
    optimise(torch.optim.AdamW(theirs, fused=True, **options), theirs, gradients, RATES)
    assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))


def test_a_matrix_without_gradient_rests_and_one_of_zeros_only_decays():
    resting, zeros = (nn.Parameter(torch.ones(3, 4)) for _ in range(2))
    optimizer = Muon([resting, zeros], lr=0.5)
    zeros.grad = torch.zeros_like(zeros)
    optimizer.step()
    assert torch.equal(resting, torch.ones(3, 4)) and torch.equal(zeros, torch.full((3, 4), 0.95))


def test_wrong_parameters_are_refused():
    with pytest.raises(ValueError, match="FP32 or FP64 masters, got torch.bfloat16"):
        Muon([nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))])
    with pytest.raises(ValueError, match=r"got shape \(2,\)"):
        Muon([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=r"divides 8 rows, got \(3,\)"):
        Muon([{"params": [nn.Parameter(torch.ones(8, 2))], "rows": (3,)}])
    with pytest.raises(ValueError, match="momentum"):
        Muon([nn.Parameter(torch.ones(2, 2))], momentum=1.0)


def whole_model() -> nn.Module:
    torch.manual_seed(0)
    return MoeLcForCausalLM(load_preset("tiny", **UNEVEN)).double()


def train(model: nn.Module, optimizer: Muon, steps: range) -> None:
    """Gradients that depend on name and step alone."""
    for step in steps:
        set_learning_rate(optimizer, RATES[step])
        for index, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(1000 * step + index)
            gradient = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            if isinstance(parameter, DTensor):
                layout = parameter.device_mesh, parameter.placements
                gradient = distribute_tensor(gradient, *layout, src_data_rank=None)
            parameter.grad = gradient
        optimizer.step()
    optimizer.zero_grad()


def by_name(model: nn.Module, optimizer: Muon) -> dict[str, torch.Tensor]:
    """Everything that training changes, whole."""
    found = {}
    for name, parameter in model.named_parameters():
        for key, tensor in {"": parameter.detach(), **optimizer.state[parameter]}.items():
            found[f"{name} {key}"] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


def differing(one: dict, two: dict) -> list[str]:
    return sorted(one.keys() ^ two.keys()) + [n for n in one.keys() & two.keys() if not torch.equal(one[n], two[n])]


def worst(one: dict, two: dict) -> float:
    assert one.keys() == two.keys()
    return max(relative(one[name], two[name]) for name in one)


def test_a_resumed_run_is_bit_equal(tmp_path):
    model = whole_model()
    optimizer = muon(model)
    train(model, optimizer, range(3))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    resumed = whole_model()
    resumed.load_state_dict(saved["model"])
    resumed_optimizer = muon(resumed)
    resumed_optimizer.load_state_dict(saved["optimizer"])
    for each in ((model, optimizer), (resumed, resumed_optimizer)):
        train(*each, range(3, 5))
    assert differing(by_name(model, optimizer), by_name(resumed, resumed_optimizer)) == []


def two_ranks(folder: Path) -> list[dict]:
    """What rank 0 and rank 1 found; `main` below is what they run."""
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


def test_two_ranks_equal_one_and_one_goes_on_from_their_checkpoint(tmp_path):
    for found in two_ranks(tmp_path):
        assert found["fsdp"] < LIMIT and found["layouts"] < LIMIT, found
        assert found["dealt"] > 10 and found["turns"] > 1, found  # nothing of this is trivially true
        assert found["norm"] < LIMIT and found["clipped"] < LIMIT, found

    model = whole_model()
    optimizer = muon(model)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert differing(by_name(model, optimizer), torch.load(tmp_path / "saved.pt", weights_only=True)) == []
    train(model, optimizer, range(3, 5))
    uninterrupted = whole_model()
    uninterrupted_optimizer = muon(uninterrupted)
    train(uninterrupted, uninterrupted_optimizer, range(5))
    assert worst(by_name(model, optimizer), by_name(uninterrupted, uninterrupted_optimizer)) < LIMIT


class Layouts(nn.Module):
    """Parameters in the layouts of tensor and expert parallelism, and a plain one."""

    PLACES = {
        "columns": ((6, 10), None, Shard(1)),
        "heads": ((12, 5), (3,), Shard(0)),
        "packed": ((12, 5), (6,), _StridedShard(0, split_factor=2)),
        "packed experts": ((3, 12, 5), (6,), _StridedShard(1, split_factor=2)),
        "expert rows": ((3, 5, 8), (5,), Shard(2)),
        "one expert": ((1, 5, 8), (5,), Shard(0)),
        "rows": ((3, 8), None, Shard(0)),
        "replicated": ((4, 6), None, Replicate()),
        "plain": ((4, 6), None, None),
    }

    def __init__(self, mesh=None):
        super().__init__()
        torch.manual_seed(0)
        for name, (shape, _, place) in self.PLACES.items():
            value = torch.randn(shape, dtype=torch.float64)
            if mesh is not None and place is not None:
                value = distribute_tensor(value, mesh, [place], src_data_rank=None)
            self.register_parameter(name, nn.Parameter(value))

    def optimizer(self) -> Muon:
        groups = [
            {"params": [parameter], "rows": rows, "rate": 1.0}
            for parameter, (_, rows, _) in zip(self.parameters(), self.PLACES.values(), strict=True)
        ]
        return Muon(groups)


def clipped(model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    for index, parameter in enumerate(model.parameters()):
        gradient = torch.full(parameter.shape, 0.1 * (index + 1), dtype=parameter.dtype)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = gradient
    norm = clip_grad_norm(model.parameters(), 1.0).item()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return norm, {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}


def main(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    muon_module.WORKSPACE = 60_000  # bytes: several turns
    found: dict = {"dealt": 0, "turns": 0}
    update_dealt = muon_module._update_dealt

    def counting(turn, group):
        found["dealt"] += sum(map(len, turn))
        found["turns"] += 1
        update_dealt(turn, group)

    muon_module._update_dealt = counting
    mesh = init_device_mesh("cpu", (2,))
    one = whole_model()
    two = copy.deepcopy(one)
    for layer in two.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(two, mesh=mesh)
    optimizers = [muon(model) for model in (one, two)]
    for model, optimizer in zip((one, two), optimizers, strict=True):
        train(model, optimizer, range(3))
    saved = by_name(two, optimizers[1])
    found["fsdp"] = worst(saved, by_name(one, optimizers[0]))
    state = {"model": two.state_dict(), "optimizer": get_optimizer_state_dict(two, optimizers[1])}
    dcp.save(state, checkpoint_id=folder / "checkpoint")
    if rank == 0:
        torch.save(saved, folder / "saved.pt")

    layouts = [Layouts(), Layouts(mesh)]
    optimizers = [model.optimizer() for model in layouts]
    for model, optimizer in zip(layouts, optimizers, strict=True):
        train(model, optimizer, range(3))
    found["layouts"] = worst(*map(by_name, layouts, optimizers))

    found["norm"] = found["clipped"] = 0.0
    for pair in ((one, two), layouts):
        (expected_norm, expected), (norm, gradients) = map(clipped, pair)
        found["norm"] = max(found["norm"], abs(norm / expected_norm - 1.0))
        found["clipped"] = max(found["clipped"], worst(gradients, expected))
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
