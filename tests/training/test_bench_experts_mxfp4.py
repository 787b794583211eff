"""`moe-lc bench experts --mxfp4`: its inputs are one problem in two forms, and every default size has limits."""

import pytest
import torch

from modeling_moe_lc.kernels.mxfp4 import expert_mlp_mxfp4
from modeling_moe_lc.training import bench, bench_experts, bench_operator
from modeling_moe_lc.training import bench_experts_mxfp4 as packed
from modeling_moe_lc.training.bench_operator import BACKWARD, FORWARD
from modeling_moe_lc.training.cli import main


CPU = torch.device("cpu")
CASE = {"E": 4, "D": 32, "I": 64, "k": 2, "T": 40}


def test_packed_and_plain_weights_are_the_same_problem(monkeypatch):
    monkeypatch.setattr(packed, "expert_mlp_mxfp4", lambda *args, impl, **caps: expert_mlp_mxfp4(*args, **caps))
    rival, ours = packed.implementations()
    assert rival.is_rival and ours.name == bench.OURS
    short = bench_operator.check_short(packed.PROBLEM, [ours], CASE, "skewed", CPU, True)
    errors = short[ours.name]()
    assert errors.keys() == {"o", "d x", "d weights"} and bench.wrong(errors, packed.PROBLEM.limits) is None
    x = packed.make_inputs(CASE, "balanced", CPU, 0)
    at_size = bench_operator.check_rows(packed.PROBLEM, ours, x, True)
    assert bench.wrong(at_size, packed.PROBLEM.limits) is None
    assert torch.equal(packed.call(x)["o"], bench_experts.call("reference", x)["o"])


def test_every_default_size_has_directions():
    problem = packed.PROBLEM
    assert all(problem.directions(problem.case(size)) for size in problem.sizes)
    assert problem.parts == ["forward", "backward", "decode"]


def test_the_floor_is_that_of_packed_weights():
    x = packed.make_inputs(CASE, "balanced", CPU, 0)
    weights = 4 * 3 * 32 * 64 * 17 / 32
    forward = weights + 40 * (4 * 32 + 24)
    assert packed.cost(CASE, x, FORWARD) == (forward, 6 * 32 * 64 * 80)
    assert packed.cost(CASE, x, BACKWARD) == (2 * forward + 40 * (2 * 32 + 8), 12 * 32 * 64 * 80)


@pytest.mark.parametrize("option, name", [((), "experts"), (("--mxfp4",), "experts-mxfp4")])
def test_the_option_chooses_the_problem(option, name, monkeypatch):
    seen = []
    monkeypatch.setattr(bench_operator, "run", lambda problem, implementations, args: seen.append(problem.name) or 0)
    assert main(["bench", "experts", *option]) == 0 and seen == [name]
