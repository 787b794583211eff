"""Narrow copies of wide parameters: as FSDP2 does it, to the bit; a batch filled up to one shape: nothing changes."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from modeling_moe_lc import MoeLcForCausalLM, update_router_bias
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.norm import FullPrecision
from modeling_moe_lc.router import Router
from modeling_moe_lc.training.batches import OneShape
from modeling_moe_lc.training.low_precision import LowPrecision
from modeling_moe_lc.training.packing import Pack, collate
from modeling_moe_lc.training.processes import processes, shard


def tiny(**changes):
    torch.manual_seed(0)
    return MoeLcForCausalLM(load_preset("tiny", loss_chunk_size=16, **changes)).train()


def batches(vocabulary):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocabulary, (2, 24), generator=generator) for _ in range(2)]


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_fsdp(checkpointing):
    ours, theirs = tiny(), tiny()
    precision = LowPrecision(ours, torch.bfloat16)
    precision.refresh()
    with processes():
        shard(theirs, init_device_mesh("cpu", (1,)), torch.bfloat16)
        for model in (ours, theirs):
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        for ids in batches(ours.config.vocab_size):
            with precision.computing():
                loss = ours(input_ids=ids, labels=ids).loss
                loss.backward()
            precision.collect()
            expected = theirs(input_ids=ids, labels=ids).loss
            expected.backward()
            assert torch.equal(loss, expected)
        for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert one.dtype == torch.float32
            assert (one.grad is None) == (other.grad is None), name
            if one.grad is not None:
                assert one.grad.dtype == torch.float32 and torch.equal(one.grad, whole(other.grad)), name


def test_gradients_are_replaced_or_added():
    model = tiny()
    precision = LowPrecision(model, torch.bfloat16)
    precision.refresh()
    found = []
    ids = batches(model.config.vocab_size)[0]
    for replace in (False, False, True):
        with precision.computing():
            model(input_ids=ids, labels=ids).loss.backward()
        precision.collect(replace=replace)
        found.append([wide.grad.clone() for wide in precision.wide if wide.grad is not None])
    assert all(torch.equal(2 * one, two) and torch.equal(one, three) for one, two, three in zip(*found, strict=True))
    precision.collect(replace=True)
    assert not any(wide.grad.any() for wide in precision.wide if wide.grad is not None)


def test_parameters_stay_wide_outside_and_are_narrow_inside():
    model = tiny(tie_word_embeddings=True)
    before = dict(model.named_parameters(remove_duplicate=False))
    precision = LowPrecision(model, torch.bfloat16)
    with pytest.raises(KeyError), precision.computing():
        for module in model.modules():
            wide = isinstance(module, FullPrecision)
            assert all(
                p.dtype == (torch.float32 if wide else torch.bfloat16) for p in module.parameters(recurse=False)
            )
        assert model.lm_head.weight is model.model.embed_tokens.weight
        raise KeyError
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(before) == list(after) and all(after[name] is before[name] for name in before)


def test_nothing_happens_where_all_is_narrow_enough():
    precision = LowPrecision(tiny(), torch.float32)
    precision.refresh()
    precision.collect()
    assert not precision.places


def packs(lengths_of_packs, vocabulary):
    generator = torch.Generator().manual_seed(2)
    for lengths in lengths_of_packs:
        borders = torch.tensor([0, *lengths]).cumsum(0).tolist()
        yield Pack(torch.randint(vocabulary, (borders[-1],), generator=generator).tolist(), borders)


def gradients(model, inputs, items):
    model.zero_grad()
    loss = model(**inputs, num_items_in_batch=torch.tensor(items), use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("others", [0, 128])  # for how many documents another process needs room
@pytest.mark.parametrize("lengths", [[[5, 9], [3, 4, 2]], [[16], [7]], [[1], [2]], [[16], [16]]])
def test_a_batch_of_one_shape_is_the_same_batch(lengths, others):
    model = tiny().double()
    given = list(packs(lengths, model.config.vocab_size))
    items = max(1, sum(pack.predictions for pack in given))
    expected = gradients(model, collate(given), items)
    statistics = [router.statistics().clone() for router in model.modules() if isinstance(router, Router)]
    documents = model.model.documents_seen.clone()
    update_router_bias(model)
    for router in (module for module in model.modules() if isinstance(module, Router)):
        router.e_score_correction_bias.zero_()

    filled = OneShape(2, 16, lambda room: max(room, others))(given)
    assert not others or len(filled["segments"].cu_seqlens) == others + 1
    assert filled["input_ids"].numel() == filled["labels"].numel() == 32
    loss, found = gradients(model, filled, items)
    assert torch.allclose(loss, expected[0], rtol=1e-12)
    assert found.keys() == expected[1].keys()
    for name, gradient in found.items():
        assert torch.allclose(gradient, expected[1][name], rtol=1e-9, atol=1e-12), name
    routers = [router for router in model.modules() if isinstance(router, Router)]
    assert all(torch.equal(r.statistics(), was) for r, was in zip(routers, statistics, strict=True))
    assert torch.equal(model.model.documents_seen, documents)


def test_shapes_do_not_depend_on_the_documents():
    shapes = set()
    for lengths in ([[5, 9], [3, 4, 2]], [[1], [2]], [[1] * 16, [1] * 16], [[15], [15]]):
        inputs = OneShape(2, 16)(list(packs(lengths, 100)))
        segments = inputs["segments"]
        assert segments.cu_seqlens[-1] == 32 and (segments.cu_seqlens.diff() >= 0).all()
        assert segments.cu_seqlens.diff().max() <= segments.longest == 16
        assert segments.counted.sum() == sum(map(sum, lengths))
        shapes.add((inputs["input_ids"].shape, segments.cu_seqlens.shape, segments.counted.shape))
    assert len(shapes) == 1
