"""Two ranks under FSDP2 read the record, and observe the numbers, of one process with the batches of both.

The test starts this file, which imports once and forks into two ranks (gloo, CPU).
"""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import start_processes

from modeling_moe_lc import MoeLcForCausalLM
from modeling_moe_lc.attn_res import AttnRes
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.training.context_parallel import context_parallel
from modeling_moe_lc.training.context_shard import shard_sequence
from modeling_moe_lc.training.metrics import StepMeter, on_host
from modeling_moe_lc.training.observation import modules_of, observe


RANKS = 2
REDUCTIONS = {"all_reduce": dist.all_reduce, "all_reduce_max": partial(dist.all_reduce, op=dist.ReduceOp.MAX)}


def tiny():
    torch.manual_seed(0)
    model = MoeLcForCausalLM(load_preset("tiny", initializer_range=0.1))
    for site in modules_of(model, AttnRes):
        torch.nn.init.normal_(site.query, std=0.1)
    return model.train()


def batches():
    return torch.randint(3, 512, (RANKS, 2, 24), generator=torch.Generator().manual_seed(0))


def record(model, parts, **reductions):
    meter = StepMeter(model, peak_flops=1e9, **reductions)
    for input_ids in parts:
        predictions = input_ids.shape[0] * (input_ids.shape[1] - 1)
        loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
        meter.add(loss * predictions, predictions, input_ids.numel(), 1e6)
    # what is looked at is one batch a rank; its rows are one after the other in the batch of one process
    return meter.read(torch.tensor(1.0), observe(model, {"input_ids": torch.cat(parts)}))


def one_sequence():
    input_ids = batches().flatten()[None]
    return {"input_ids": input_ids, "labels": input_ids}


def rank_main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    model = tiny()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    got = record(model, [batches()[rank]], **REDUCTIONS)
    whole = tiny()
    with context_parallel(whole, dist.group.WORLD):
        shard = shard_sequence(one_sequence(), dist.group.WORLD)
        seen = on_host(observe(whole, shard).numbers(**REDUCTIONS))
    (folder / f"{rank}.json").write_text(json.dumps({"data": got, "context": seen}))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    subprocess.run([sys.executable, __file__, folder], check=True, timeout=120)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def assert_same(got, expected, names):
    for name in names:
        torch.testing.assert_close(
            torch.tensor(got[name]),
            torch.tensor(expected[name]),
            rtol=1e-5,
            atol=1e-6,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def test_data_parallel_ranks_read_what_one_process_reads(ranks):
    expected = record(tiny(), list(batches()))
    # Of samples that are not the same in one process.
    sampled = {"mla_max_logit", "situ_saturation_routed", "seconds", "tokens_per_second", "mfu"}
    for rank in ranks:
        got = rank["data"]
        assert got.keys() == expected.keys()
        assert_same(got, expected, expected.keys() - sampled)
        # One row in one process, one of each rank here.
        assert got["mla_max_logit"] == ranks[0]["data"]["mla_max_logit"]
        assert all(two > one - 1e-5 for two, one in zip(got["mla_max_logit"], expected["mla_max_logit"]))


def test_a_sequence_over_several_ranks_shows_what_it_shows_in_one_process(ranks):
    expected = on_host(observe(tiny(), one_sequence()).numbers())
    for rank in ranks:
        assert rank["context"].keys() == expected.keys()
        assert_same(rank["context"], expected, ("attn_res_entropy", "kda_decay", "situ_saturation"))


if __name__ == "__main__":
    start_processes(rank_main, args=(Path(sys.argv[1]),), nprocs=RANKS, start_method="fork")
