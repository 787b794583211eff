"""What a step's record says is what the step did, whatever the micro-batches and ranks, for one wait on the device."""

import math
import random

import pytest
import torch

from modeling_moe_lc import MoeLcForCausalLM, update_router_bias
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.conversion.count import count
from modeling_moe_lc.kernels.router import sampling_floor
from modeling_moe_lc.training.balance import routers
from modeling_moe_lc.training.flops import measure_peak, training_flops
from modeling_moe_lc.training.metrics import SpikeDetector, StepMeter, routing_numbers
from modeling_moe_lc.training.observation import observe


TIMES = ("seconds", "tokens_per_second", "mfu")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return MoeLcForCausalLM(load_preset("tiny")).train()


def batch(rows, seed=0):
    return torch.randint(3, 512, (rows, 24), generator=torch.Generator().manual_seed(seed))


def feed(meter, model, input_ids):
    loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
    predictions = input_ids.shape[0] * (input_ids.shape[1] - 1)
    meter.add(loss * predictions, predictions, input_ids.numel(), 1e6 * input_ids.numel())
    return loss.item()


def forget(model):
    for router in routers(model):
        router.counts.zero_()


def read(model, parts, **kwargs):
    meter = StepMeter(model, peak_flops=1e9, **kwargs)
    for part in parts:
        feed(meter, model, part)
    record = meter.read(torch.tensor(2.0))
    forget(model)
    return record


def without_times(record):
    return {name: value for name, value in record.items() if name not in TIMES}


def test_micro_batches_of_any_size_give_the_record_of_the_whole_batch(model):
    whole = batch(6)
    expected = read(model, [whole])
    loss = model(input_ids=whole, labels=whole, use_cache=False).loss.item()
    forget(model)
    assert expected["loss"] == pytest.approx(loss, rel=1e-6)
    assert expected["step_tokens"] == 6 * 24 and expected["gradient_norm"] == 2.0
    parts = read(model, whole.split([1, 5]))
    assert parts["loss"] == pytest.approx(loss, rel=1e-6)
    assert without_times(parts) | {"loss": 0} == without_times(expected) | {"loss": 0}


def test_ranks_give_the_record_of_one_process(model):
    one, other = batch(6).split([2, 4])
    sent = []
    read(model, [other], all_reduce=lambda tensor: sent.append(tensor.clone()))
    assert len(sent) == 1, "one collective for all sums"
    got = read(model, [one], all_reduce=lambda tensor: tensor.add_(sent.pop()))
    expected = read(model, [one, other])
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    assert without_times(got) | {"loss": 0} == without_times(expected) | {"loss": 0}
    # The same work in the same time on two devices is half of what they could do.
    assert got["mfu"] * got["seconds"] * 2 == pytest.approx(expected["mfu"] * expected["seconds"], rel=1e-12)


def test_a_record_waits_for_the_device_once(model, monkeypatch):
    observation = observe(model, {"input_ids": batch(1)})
    meter = StepMeter(model, peak_flops=1e9, all_reduce=lambda tensor: None, all_reduce_max=lambda tensor: None)
    waits = []

    def counted(name, real):
        return lambda *args: waits.append(name) or real(*args)

    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
    for _ in range(2):
        meter.start_step()
        meter.add(torch.tensor(3.0), 2, 2, 1.0)
    assert waits == []
    meter.read(torch.tensor(1.0), observation)
    assert waits == ["tolist"]


def test_loss_is_of_the_step_and_rates_are_of_all_steps_since_the_last_record(model, monkeypatch):
    clock = iter([0.0, 2.0, 3.0, 6.0, 6.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    meter = StepMeter(model, peak_flops=100.0)
    for nats in (50.0, 30.0):
        meter.start_step()
        meter.add(torch.tensor(nats), 10, 20, 75.0)
    with meter.paused():
        pass
    record = meter.read(torch.tensor(1.0))
    assert record["loss"] == 3.0 and record["step_tokens"] == 40
    assert record["seconds"] == 5.0 and record["tokens_per_second"] == 8.0
    assert record["mfu"] == pytest.approx(150.0 / 5.0 / 100.0)


def test_routing_is_that_of_the_step(model):
    input_ids = batch(3)
    with torch.no_grad():
        for number, router in enumerate(routers(model)):
            router.e_score_correction_bias[0] = 10.0  # every token chooses expert 0 and one other
            router.e_score_correction_bias[1] = -10.0 - number  # and none expert 1
    meter = StepMeter(model)
    feed(meter, model, input_ids)
    record = meter.read(torch.tensor(1.0))
    tokens, experts, top_k = input_ids.numel(), 8, 2
    assert record["max_violation"] == pytest.approx([experts / top_k - 1] * 4)
    assert all(dead >= 1 for dead in record["dead_experts"])
    assert record["bias_range"] == pytest.approx([20.0, 21.0, 22.0, 23.0])
    assert record["floor"] == sampling_floor(tokens, experts, top_k)
    assert "mfu" not in record
    update_router_bias(model)
    assert not any(router.counts.any() for router in routers(model))


def test_an_expert_is_dead_below_a_tenth_of_the_mean_load():
    counts = torch.tensor([[99, 10, 9, 282], [100, 100, 100, 100]])
    numbers = routing_numbers(counts, torch.zeros(2, 4))
    assert numbers["dead_experts"].tolist() == [1, 0]
    assert numbers["routed"].tolist() == [400, 400]


def test_flops_are_linear_in_tokens_but_for_mla():
    config = load_preset("tiny")
    counted = count(config)
    assert training_flops(counted, [64]) == 3 * 64 * counted.flops_per_token(64)
    assert training_flops(counted, [64, 128]) == training_flops(counted, [64]) + training_flops(counted, [128])
    packed, whole = training_flops(counted, [64] * 4), training_flops(counted, [256])
    mla = sum(kind == "full_attention" for kind in config.layer_types)
    heads, dims = config.num_attention_heads, 16 + 8 + 12
    # scores and values, forward and backward: half a square for each document
    assert whole - packed == 3 * mla * 2 * heads * dims * (256**2 - 4 * 64**2) // 2


def test_peak_of_this_machine_is_plausible():
    assert 1e8 < measure_peak("cpu") < 1e14


def falling(steps, seed):
    noise = random.Random(seed)
    return [2.0 + 3.0 * math.exp(-step / 40) + noise.gauss(0.0, 0.03) for step in range(steps)]


@pytest.mark.parametrize("seed", range(5))
def test_spikes_are_flagged_and_a_noisy_fall_is_not(seed):
    losses = falling(300, seed)
    detector = SpikeDetector()
    assert not any(map(detector.is_spike, losses))
    assert detector.is_spike(losses[-1] + 1.0) and detector.is_spike(math.nan) and detector.is_spike(math.inf)
    assert not detector.is_spike(losses[-1])


def test_a_resumed_detector_judges_as_one_that_never_stopped():
    losses = falling(100, 0)
    whole = SpikeDetector()
    for loss in (*losses, math.nan):
        whole.is_spike(loss)
    resumed = SpikeDetector([*losses, None])  # as the log has them
    assert [resumed.is_spike(loss) for loss in (2.2, 2.4, 3.0)] == [whole.is_spike(loss) for loss in (2.2, 2.4, 3.0)]


def test_a_loss_that_stands_still_has_room_for_rounding():
    detector = SpikeDetector([2.0] * 64)
    assert not detector.is_spike(2.0 + 1e-4) and detector.is_spike(2.1)
