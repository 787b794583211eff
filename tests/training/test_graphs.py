"""A step replayed as CUDA graphs is the step: losses, parameters, biases, whatever documents the batches hold."""

import pytest
import torch

from modeling_moe_lc import MoeLcForCausalLM
from modeling_moe_lc.adapters import lora_targets
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.router import Router
from modeling_moe_lc.training.batches import Batches, OneShape
from modeling_moe_lc.training.graphs import Graphs, Pool
from modeling_moe_lc.training.low_precision import LowPrecision
from modeling_moe_lc.training.optim import adamw, initialise, muon
from modeling_moe_lc.training.packing import Pack
from modeling_moe_lc.training.processes import processes
from modeling_moe_lc.training.random_model import PACKED, PLAIN, build
from modeling_moe_lc.training.step import Step


pytestmark = pytest.mark.gpu
LENGTH, SIZE = 256, 2
PACKS = ([[100, 90, 30], [256]], [[256], [256]], [[17, 1, 200], [3] * 60], [[256], [256]], [[256], [4, 5]])


class Data:
    """As often as needed the same packs, of other tokens each time."""

    def slice(self, step, rank, world):
        generator = torch.Generator().manual_seed(step)
        borders = [torch.tensor([0, *lengths]).cumsum(0).tolist() for lengths in PACKS[step % len(PACKS)]]
        return [Pack((torch.rand(b[-1], generator=generator) ** 2 * 32_000).long().tolist(), b) for b in borders]


def configuration(**overrides):
    layers = load_preset("200m-a90m").linear_attn_config | {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}
    return load_preset("200m-a90m", num_hidden_layers=4, linear_attn_config=layers, loss_chunk_size=256, **overrides)


def make(checkpointing=False):
    torch.manual_seed(0)
    model = MoeLcForCausalLM(configuration()).cuda().train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    return model


def step_of(model, ours, *, graphs, make_optimizer=muon):
    precision = LowPrecision(model, torch.bfloat16)
    precision.refresh()
    return Step(model, make_optimizer(model), ours, precision, clip_norm=1.0, graphs=graphs)


def batches(ours, steps):
    for [batch] in Batches(ours.mesh(1), SIZE, ours, OneShape(SIZE, LENGTH)).steps(Data(), 0, steps):
        yield batch


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def routers(model):
    return [module for module in model.modules() if isinstance(module, Router)]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_replayed_gradients_are_the_gradients(checkpointing):
    model = make(checkpointing)
    with processes() as ours:
        step = step_of(model, ours, graphs=True)
        for batch in batches(ours, len(PACKS)):
            losses, gradients, counted = [], [], []
            for _ in range(3):  # as it is, captured, replayed
                step.is_first = True
                step.balance()
                for router in routers(model):
                    router.e_score_correction_bias.zero_()
                model.zero_grad(set_to_none=False)
                losses.append(step.backward(batch.inputs).item())
                gradients.append([p.grad.clone() for p in model.parameters()])
                counted.append([router.statistics().clone() for router in routers(model)])
            assert max(losses) - min(losses) < 1e-4 * losses[0]
            for others in gradients[1:]:
                for one, other in zip(gradients[0], others, strict=True):
                    # attention's backward pass sums in any order
                    assert relative(other, one) < 1e-2 or other.norm() < 1e-9
            assert all(some.any() and some.equal(a) and some.equal(b) for some, a, b in zip(*counted, strict=True))


@pytest.mark.parametrize("make_optimizer", [muon, adamw])
def test_replayed_updates_are_the_updates(make_optimizer):
    models = make(), make()
    with processes() as ours:
        steps = [step_of(m, ours, graphs=g, make_optimizer=make_optimizer) for m, g in zip(models, (True, False))]
        for number, rate in enumerate((1e-3, 3e-3, 2e-3, 1e-4)):
            norms = []
            for model, step in zip(models, steps, strict=True):
                torch.manual_seed(number)
                for parameter in model.parameters():
                    gradient = torch.randn_like(parameter)
                    if parameter.grad is None:
                        parameter.grad = gradient
                    else:
                        parameter.grad.copy_(gradient)
                norms.append(step.update(rate).item())
            assert norms[0] == pytest.approx(norms[1], rel=1e-6)
            for one, other in zip(*(model.parameters() for model in models), strict=True):
                assert relative(one.detach(), other.detach()) < 1e-6
            for one, other in zip(*(step.precision.narrow for step in steps), strict=True):
                assert relative(one.detach().float(), other.detach().float()) < 1e-4


def test_training_is_the_same():
    histories = []
    with processes() as ours:
        for graphs in (True, False):
            model = make()
            initialise(model)
            step, history = step_of(model, ours, graphs=graphs), []
            for number, batch in enumerate(batches(ours, 15)):
                loss = step.backward(batch.inputs)
                history.append((loss.item(), step.update(1e-3 / (1 + number)).item()))
                step.balance()
            histories.append(torch.tensor(history))
            assert model.model.documents_seen == 0
            assert all(router.e_score_correction_bias.any() for router in routers(model))
    assert histories[0].isfinite().all() and (histories[0] / histories[1] - 1).abs().max() < 2e-2


@pytest.mark.parametrize("experts", [PLAIN, PACKED])
def test_training_an_adapter_is_the_same(experts):
    peft, histories = pytest.importorskip("peft"), []
    config = configuration(router_balance={"method": "none"})
    targets = lora_targets("attention", "experts", config=config)
    with processes() as ours:
        for graphs in (True, False):
            torch.manual_seed(0)
            lora = peft.LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM", **targets)
            model = build(config, experts, torch.device("cuda"), torch.bfloat16, lora).train()
            step = step_of(model, ours, graphs=graphs, make_optimizer=adamw)
            history = [(step.backward(b.inputs).item(), step.update(1e-3).item()) for b in batches(ours, 12)]
            histories.append(torch.tensor(history))
    assert histories[0].isfinite().all() and (histories[0] / histories[1] - 1).abs().max() < 2e-2


def test_graphs_that_are_in_the_way_are_captured_again(monkeypatch):
    gib = 1 << 30
    pool = Pool()

    def call(inputs):
        return (inputs["x"].repeat(gib // 4 // 64) * inputs["factor"]).sum()  # 2 GiB or more on the way

    graphs = Graphs(call, pool)

    def results(factor):
        return [graphs({"x": torch.ones(64, device="cuda"), "factor": factor}).item() for _ in range(3)]

    expected = gib // 4
    assert results(1) == [expected] * 3 and pool.bytes >= 2 * gib and len(graphs.captured) == 1
    assert results(2) == [2 * expected] * 3 and len(graphs.captured) == 2
    reserved = torch.cuda.memory_reserved()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    torch.cuda.empty_cache()
    assert graphs({"x": torch.ones(64, device="cuda"), "factor": 3}).item() == 3 * expected
    assert not graphs.captured and pool.bytes == 0 and torch.cuda.memory_reserved() <= reserved
    assert results(1) == [expected] * 3 and results(2) == [2 * expected] * 3 and len(graphs.captured) == 2


def test_a_graph_is_replayed_with_other_inputs():
    kept = torch.zeros(3, device="cuda")

    def call(inputs):
        kept.add_(inputs["x"])
        return inputs["x"] * inputs["factor"]

    graphs = Graphs(call, Pool())
    results = [graphs({"x": torch.full((3,), float(i), device="cuda"), "factor": 2}) for i in range(5)]
    assert [result[0].item() for result in results] == [0, 2, 4, 6, 8] and kept[0] == 10
    assert graphs({"x": torch.ones(3, device="cuda"), "factor": 3})[0] == 3 and len(graphs.captured) == 1
