"""Context parallelism computes what one process does: the KDA operator on four ranks, the whole model on two.

The test starts this file, which imports once and forks into four ranks (gloo, CPU). Each rank compares its part with
the whole, which it also computes.
"""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import start_processes

from modeling_moe_lc import MoeLcForCausalLM, update_router_bias
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.kernels.kda import kda
from modeling_moe_lc.router import Router
from modeling_moe_lc.training.checkpointing import checkpoint_activations
from modeling_moe_lc.training.context_parallel import context_parallel
from modeling_moe_lc.training.context_parallel_kda import context_parallel_kda
from modeling_moe_lc.training.context_shard import context_shard, shard_sequence


RANKS = 4
LIMITS = {"float64": 1e-9, "float32": 1e-4}  # relative, for every tensor; measured: at most 1e-13 and 9e-6
GAP = {"float64": 1e-9, "float32": 1e-5}  # of the scores between the last expert chosen and the next

# Tokens of each rank, and the borders of the documents.
OPERATOR = {
    "one document": ([70, 3, 1, 40], [0, 114]),
    "through two ranks": ([20, 9, 66, 5], [0, 7, 13, 98, 100]),
    "borders on borders": ([10, 8, 8, 8], [0, 10, 18, 30, 34]),
    "alone": ([5, 5, 5, 5], [0, 5, 10, 15, 20]),
}
# Shape of the batch, tokens of the two ranks (None: even), borders of the documents (None: one a row), attention.
MODEL = {
    "37 and 5": ((1, 42), [37, 5], [0, 11, 36, 40, 42], "sdpa"),
    "rows, 37 and 5 labels": ((3, 26), None, None, "eager"),
    "one document": ((1, 42), [40, 2], None, "sdpa"),
    "border on border": ((1, 42), [17, 25], [0, 17, 42], "sdpa"),
    "a token": ((1, 42), [1, 41], [0, 17, 42], "moe_lc_reference"),
}
SHORT = ((1, 42), [38, 1, 1, 2], None, "sdpa")  # four ranks, two of them shorter than the convolution reaches back


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """What every rank found; `main` below is what they run."""
    folder = tmp_path_factory.mktemp("ranks")
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, __file__, str(folder)], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-5000:]
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]


def check(found, kind, dtype="float64"):
    names = {name for rank in found for name in rank[kind]}
    assert names
    for rank in found:
        for name, case in rank[kind].items():
            for what, value in case.items():
                if what == "gap":
                    assert value > GAP[dtype], (name, value)
                elif isinstance(value, bool):
                    assert value, (name, what)
                else:
                    assert value < LIMITS[dtype], (name, what, value)
    return names


def test_operator_on_four_ranks_equals_one(found):
    assert check(found, "operator") == {f"{name}, {gate}" for name in OPERATOR for gate in ("bounded", "unbounded")}


def test_operator_by_the_kernels(found):
    check(found, "kernels", "float32")


def test_model_on_two_ranks_equals_one(found):
    assert check(found, "model") == {*MODEL, "four ranks"}


def test_model_on_two_ranks_under_activation_checkpointing(found):
    check(found, "checkpointed")


def test_model_on_two_ranks_in_single_precision(found):
    check(found, "single", "float32")


def test_fsdp_over_context_ranks_equals_one(found):
    assert check(found, "fsdp") == {"CP 2 x DP 1", "CP 2 x DP 2"}


def test_outside_the_model_is_as_before(found):
    assert all(rank["afterwards"] for rank in found)


def test_wrong_batches_are_refused_by_name(found):
    expected = {
        "padding": "attention_mask: expected no padding",
        "empty": "lengths: expected shards of at least one token",
        "sum": "lengths: expected shards of at least one token",
        "count": "lengths: expected one for each of 2 ranks",
        "short": "input_ids: expected at least one token",
        "unknown": "batch: expected only",
        "whole batch": "context_shard: expected that of shard_sequence for 2 ranks, got none",
        "other size": "context_shard: expected that of shard_sequence for 2 ranks, got one of 4 ranks",
    }
    for rank in found:
        assert rank["refused"].keys() == expected.keys()
        for name, message in rank["refused"].items():
            assert message.startswith(expected[name]), (name, message)


@pytest.mark.parametrize(
    ("borders", "lengths", "rank", "pieces", "before", "goes_on"),
    [
        ([0, 42], [37, 5], 0, (0, 37), 0, True),
        ([0, 42], [37, 5], 1, (0, 5), 37, False),
        ([0, 10, 37, 42], [37, 5], 0, (0, 10, 37), 0, False),
        ([0, 10, 37, 42], [37, 5], 1, (0, 5), 0, False),
        ([0, 3, 3, 9, 30], [5, 5, 20], 1, (0, 4, 5), 2, True),
        ([0, 3, 3, 9, 30], [5, 5, 20], 2, (0, 20), 1, False),
    ],
)
def test_pieces_of_documents(borders, lengths, rank, pieces, before, goes_on):
    shard = context_shard(borders, lengths, rank)
    assert (shard.borders, shard.before, shard.goes_on) == (pieces, before, goes_on)
    assert shard.cu_seqlens.tolist() == list(pieces)
    assert shard.passes_through == (before > 0 and len(pieces) == 2)


def test_a_batch_has_37_targets_and_5():
    batch = make_batch(*MODEL["rows, 37 and 5 labels"][::2])
    valid = torch.nn.functional.pad(batch["labels"][:, 1:] != -100, (0, 1)).view(2, -1)
    assert valid.sum(-1).tolist() == [37, 5]


def relative(x: torch.Tensor, reference: torch.Tensor) -> float:
    """NaN counts as infinite; the first site of the attention residuals has gradients that are exactly zero."""
    return ((x - reference).norm() / reference.norm().clamp_min(1e-30)).nan_to_num(math.inf).item()


def summed(x: torch.Tensor, group=None) -> torch.Tensor:
    x = x.detach().clone()
    dist.all_reduce(x, group=group)
    return x


def operator_case(lengths: list[int], borders: list[int], lower_bound: float | None) -> dict:
    """With initial states and cotangents of final states; then without either."""
    found = {}
    for name, states in (("with states", True), ("alone", False)):
        one = compare_operator(lengths, borders, lower_bound, states, (2, 8, 6))
        found |= {f"{what}, {name}": value for what, value in one.items()}
    return found


def compare_operator(lengths, borders, lower_bound, states, sizes, impl="reference", dtype=torch.float64) -> dict:
    """Forward and every gradient of the part of this rank, and of the whole by the reference in FP64."""
    rank, generator = dist.get_rank(), torch.Generator().manual_seed(len(borders))
    T, N, (H, K, V) = sum(lengths), len(borders) - 1, sizes

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    tokens = {name: random(1, T, H, K) for name in "qkg"} | {"v": random(1, T, H, V), "beta": random(1, T, H)}
    gate = {"A_log": random(H), "dt_bias": random(H, K)}
    with torch.no_grad():
        tokens["g"].sub_(4)  # slow gates: the state at a border matters for long
    initial = random(N, H, K, V)
    do, d_final = random(1, T, H, V).detach(), random(N, H, K, V).detach()
    shard = context_shard(borders, lengths, rank)
    first = sum(lengths[:rank])
    here = slice(first, first + lengths[rank])
    documents = [sum(border <= first + begin for border in borders) - 1 for begin in shard.borders[:-1]]
    begins = [i for i in range(len(documents)) if i or not shard.before]
    ends = [i for i in range(len(documents)) if i < len(documents) - 1 or not shard.goes_on]

    # Not read where a document comes from the left.
    mine = torch.full((len(documents), H, K, V), 7.0, dtype=torch.float64)
    d_mine = torch.zeros_like(mine)
    for i in begins:
        mine[i] = initial[documents[i]].detach()
    for i in ends:
        d_mine[i] = d_final[documents[i]]

    def run(function, leaves, cotangents, **where):
        named = dict(zip((*tokens, *gate), leaves))
        outputs = function(**named, lower_bound=lower_bound, initial_state=leaves[-1] if states else None, **where)
        wanted = (outputs, cotangents) if states else (outputs[:1], cotangents[:1])
        return *outputs, torch.autograd.grad(wanted[0], leaves, wanted[1], allow_unused=True, materialize_grads=True)

    leaves = [*tokens.values(), *gate.values(), initial]
    o, final, whole = run(kda, leaves, (do, d_final), cu_seqlens=torch.tensor(borders), impl="reference")
    leaves = [*(x[:, here] for x in tokens.values()), *gate.values(), mine]
    leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in leaves]
    cotangents = (do[:, here].to(dtype), d_mine.to(dtype))
    where = {"shard": shard, "group": dist.group.WORLD, "impl": impl}
    o_part, final_part, part = run(context_parallel_kda, leaves, cotangents, **where)

    found: dict = {"o": relative(o_part, o[:, here])}
    found["final"] = max([relative(final_part[i], final[documents[i]]) for i in ends], default=0.0)
    found |= {f"d{name}": relative(grad, reference[:, here]) for name, grad, reference in zip(tokens, part, whole)}
    for name, grad, reference in zip(gate, part[len(tokens) :], whole[len(tokens) :]):
        found[f"d{name}"] = relative(summed(grad), reference)
    if states:
        found["dinitial"] = max([relative(part[-1][i], whole[-1][documents[i]]) for i in begins], default=0.0)
        found["no gradient where not read"] = not part[-1][0].any() or not shard.before
    return found


def build(dtype: torch.dtype = torch.float64, **overrides) -> MoeLcForCausalLM:
    torch.manual_seed(0)
    model = MoeLcForCausalLM(load_preset("tiny", loss_chunk_size=16, **overrides))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():  # nothing stays in its starting state
            noise = 0.05 if name.endswith("bias") else 0.1
            tensor.add_(noise * torch.randn(tensor.shape, generator=generator).to(tensor))
            if name.endswith("dt_bias"):
                tensor.sub_(4)  # slow gates: the state at a border matters for long
    return model.to(dtype).train()


def make_batch(shape: tuple[int, int], borders: list[int] | None, seed: int = 0) -> dict:
    """With several rows, of 78 tokens: 37 targets in the first half and 5 in the second."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 512, shape, generator=generator)
    labels = ids.clone().flatten()
    if shape[0] > 1:
        labels[[5, *range(45, len(labels))]] = -100
    batch = {"input_ids": ids, "labels": labels.view(shape)}
    if borders is not None:
        batch["cu_seq_lens_q"] = torch.tensor(borders)
        batch["labels"][:, borders[1:-1]] = -100
    return batch


def statistics(model) -> dict[str, torch.Tensor]:
    kept = {f"{name}.{key}": value for name, module in model.named_modules() if isinstance(module, Router)
            for key, value in (("counts", module.counts), ("histogram", module.histogram))}  # fmt: skip
    return kept | {"documents": model.model.documents_seen}


def smallest_gap(model, batch) -> float:
    """Between the scores of the last expert chosen and the next one, over all tokens and routers."""
    gaps = []

    def look(router, args, output):
        scores = (output[0].sigmoid() + router.e_score_correction_bias).sort(descending=True).values
        k = router.config.num_experts_per_token
        gaps.append((scores[:, k - 1] - scores[:, k]).min().item())

    handles = [module.register_forward_hook(look) for module in model.modules() if isinstance(module, Router)]
    with torch.no_grad():
        model.eval()(**batch)
    model.train()
    for handle in handles:
        handle.remove()
    return min(gaps)


def model_case(group, shape, lengths, borders, attention, dtype=torch.float64, checkpointing=False) -> dict:
    whole, model = build(dtype), build(dtype)
    for one in (whole, model):
        one.set_attn_implementation(attention)
    batch = make_batch(shape, borders)
    found: dict = {"gap": smallest_gap(whole, batch)}
    loss = whole(**batch).loss
    loss.backward()
    if checkpointing:
        checkpoint_activations(model)
    rank = dist.get_rank(group)
    with context_parallel(model, group):
        shard = shard_sequence(batch, group, lengths)
        part = model(**shard).loss
        part.backward()
        model.eval()
        with torch.no_grad():
            logits = model(**shard).logits
            expected = whole.eval()(**batch).logits.flatten(0, 1)
    lengths = shard["context_shard"].lengths
    here = expected[sum(lengths[:rank]) : sum(lengths[: rank + 1])]
    found["loss"] = relative(summed(part, group), loss.detach())
    found["logits"] = relative(logits[0], here)
    found |= gradients(whole, {name: summed(p.grad, group) for name, p in model.named_parameters()})
    reference = statistics(whole)
    found |= {name: torch.equal(summed(x, group), reference[name]) for name, x in statistics(model).items()}
    found["counted"] = bool(reference["documents"].any())
    return found


def gradients(whole, grads: dict[str, torch.Tensor]) -> dict[str, float]:
    return {f"gradient of {name}": relative(grads[name], p.grad) for name, p in whole.named_parameters()}


def fsdp_case(mesh, seeds: list[int], lengths: list[int]) -> dict:
    """Data parallelism over `seeds` batches times context parallelism over two, with FSDP2 over both; one step's end."""
    batches = [make_batch((1, 42), [0, 11, 29, 40, 42], seed) for seed in seeds]
    whole, model = build(), build()
    found: dict = {"gap": min(smallest_gap(whole, batch) for batch in batches)}
    items = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
    losses = [whole(**batch, num_items_in_batch=items).loss for batch in batches]
    sum(losses).backward()
    update_router_bias(whole)

    both = mesh["cp"] if len(seeds) == 1 else mesh["dp", "cp"]._flatten("dp_cp")
    for layer in model.model.layers:
        fully_shard(layer, mesh=both)
    fully_shard(model, mesh=both)
    mine = batches[0 if len(seeds) == 1 else mesh.get_local_rank("dp")]
    with context_parallel(model, mesh["cp"]):
        shard = shard_sequence(mine | {"num_items_in_batch": items}, mesh["cp"], lengths)
        loss = model(**shard).loss
        (loss * both.size()).backward()
    update_router_bias(model, lambda tensor: dist.all_reduce(tensor, group=both.get_group()))
    found["loss"] = relative(summed(loss, both.get_group()), sum(losses).detach())
    found |= gradients(whole, {name: p.grad.full_tensor() for name, p in model.named_parameters()})
    biases = [[m.e_score_correction_bias for m in one.modules() if isinstance(m, Router)] for one in (whole, model)]
    found["bias"] = max(relative(b, a) for a, b in zip(*biases, strict=True))
    return found


def refusals(mesh) -> dict[str, str]:
    batch, group, model = make_batch((1, 42), None), mesh["cp"], build()

    def message(action, *args) -> str:
        try:
            action(*args)
        except ValueError as error:
            return str(error)
        return "accepted"

    padded = batch | {"attention_mask": (torch.arange(42) > 3).long()[None]}
    refused = {
        "padding": message(shard_sequence, padded, group),
        "empty": message(shard_sequence, batch, group, [42, 0]),
        "sum": message(shard_sequence, batch, group, [40, 1]),
        "count": message(shard_sequence, batch, group, [40, 1, 1]),
        "short": message(shard_sequence, make_batch((1, 1), None), group),
        "unknown": message(shard_sequence, batch | {"pixel_values": batch["input_ids"]}, group),
    }
    with context_parallel(model, group):
        refused["whole batch"] = message(lambda: model(**batch))
        refused["other size"] = message(lambda: model(**shard_sequence(batch, dist.group.WORLD)))
    return refused


def unchanged_afterwards(mesh) -> bool:
    """A model that was once context-parallel is an ordinary one again, and a group of one rank changes nothing."""
    model, batch = build(), make_batch((1, 42), [0, 11, 42])
    before = [sorted(vars(module)) for module in model.modules()]
    expected = model(**batch).loss
    alone, _ = dist.new_subgroups(1)
    with context_parallel(model, alone):
        one_rank = model(**shard_sequence(batch, alone)).loss
    with context_parallel(model, mesh["cp"]):
        model(**shard_sequence(batch, mesh["cp"]))
    after = [sorted(vars(module)) for module in model.modules()]
    return before == after and torch.equal(model(**batch).loss, expected) and torch.equal(one_rank, expected)


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    group, pair = mesh["cp"].get_group(), mesh.get_local_rank("dp")
    found: dict = {"operator": {}}
    for (name, case), bound in itertools.product(OPERATOR.items(), (-5.0, None)):
        gate = "unbounded" if bound is None else "bounded"
        found["operator"][f"{name}, {gate}"] = operator_case(*case, bound)
    kernels = compare_operator([20, 3, 1, 8], [0, 32], -5.0, True, (1, 16, 16), "triton", torch.float32)
    found["kernels"] = {"one document": kernels}
    # Each pair of ranks takes every other case.
    found["model"] = {name: model_case(group, *MODEL[name]) for name in list(MODEL)[pair::2]}
    found["model"]["four ranks"] = model_case(dist.group.WORLD, *SHORT)
    name = list(MODEL)[pair]
    found["checkpointed"] = {name: model_case(group, *MODEL[name], checkpointing=True)}
    found["single"] = {name: model_case(group, *MODEL[name], dtype=torch.float32)}
    found["fsdp"] = {
        "CP 2 x DP 1": fsdp_case(mesh, [pair], [37, 5]),
        "CP 2 x DP 2": fsdp_case(mesh, [2, 3], [20, 22]),
    }
    found["refused"] = refusals(mesh)
    found["afterwards"] = unchanged_afterwards(mesh)
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    start_processes(main, (Path(sys.argv[1]),), nprocs=RANKS, start_method="fork")
