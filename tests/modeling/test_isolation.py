"""No token reads the future, another document, another row or padding."""

import pytest
import torch


LIMIT = 1e-6  # relative; torch's own GEMMs choose their path by the number of rows, so not to the bit


@pytest.fixture(params=["k3", "kimi-linear"])
def model(request, tiny, kimi_linear):
    return (tiny() if request.param == "k3" else kimi_linear).double()


def logits_and_gradients(model, loss_of, **inputs):
    model.zero_grad()
    logits = model(**inputs).logits
    loss_of(logits).backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative(x, reference):
    return ((x - reference).norm() / reference.norm()).item()


@torch.no_grad()
def test_future_does_not_reach_the_past(model, ids):
    tokens = ids(2, 80)
    for t in (1, 15, 16, 63, 64, 79):
        changed = tokens.clone()
        changed[:, t:] = ids(2, 80 - t, seed=5)
        assert relative(model(changed).logits[:, :t], model(tokens).logits[:, :t]) < LIMIT


@torch.no_grad()
def test_neighbour_row_and_padding_id_do_not_matter(model, ids):
    tokens, mask = ids(2, 17), torch.ones(2, 17, dtype=torch.long)
    mask[0, :5] = 0
    model.get_input_embeddings().weight[500] *= 100
    outputs = []
    for pad, other in ((2, 0), (500, 7)):
        batch = tokens.masked_fill(mask == 0, pad)
        batch[1] = ids(1, 17, seed=other)
        outputs.append(model(batch, attention_mask=mask).logits[0, 5:])
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("lengths", [(5, 64, 1, 30), (1, 1, 2), (70, 3)])
def test_packed_equals_separate_in_logits_and_gradients(model, ids, lengths):
    documents = [ids(1, n, seed=i) for i, n in enumerate(lengths)]
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    probe = torch.randn(1, sum(lengths), 512, dtype=torch.float64)
    packed, packed_grads = logits_and_gradients(
        model, lambda x: (x * probe).sum(), input_ids=torch.cat(documents, 1), cu_seq_lens_q=borders
    )
    model.zero_grad()
    separate = [model(document).logits for document in documents]
    sum((x * p).sum() for x, p in zip(separate, probe.split(lengths, dim=1), strict=True)).backward()
    assert relative(packed, torch.cat(separate, 1)) < 1e-10
    for name, p in model.named_parameters():
        if p.grad is not None and p.grad.norm() > 0:
            assert relative(packed_grads[name], p.grad) < 1e-8, name


@torch.no_grad()
def test_first_document_does_not_reach_the_second(model, ids):
    tokens, borders = ids(1, 40), torch.tensor([0, 13, 40], dtype=torch.int32)
    changed = tokens.clone()
    changed[:, :13] = ids(1, 13, seed=9)
    after = [model(x, cu_seq_lens_q=borders).logits[:, 13:] for x in (tokens, changed)]
    assert relative(after[1], after[0]) < LIMIT


@torch.no_grad()
def test_several_packed_rows_and_every_way_to_say_so(model, ids):
    tokens = ids(2, 20)
    positions = torch.cat([torch.arange(7), torch.arange(13)]).expand(2, -1)
    expected = torch.cat([model(tokens[:, :7]).logits, model(tokens[:, 7:]).logits], dim=1)
    told = (
        {"position_ids": positions},
        {"position_ids": positions[:1], "attention_mask": torch.ones_like(tokens)},
        {"seq_idx": (positions.diff(dim=-1, prepend=positions[:, :1]) < 0).cumsum(-1)},
        {"cu_seq_lens_q": torch.tensor([0, 7, 20, 27, 40], dtype=torch.int32)},
    )
    for how in told:
        assert relative(model(tokens, **how).logits, expected) < LIMIT, how


def test_borders_that_do_not_fit_and_padding_in_a_packed_batch_are_refused(model, ids):
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        model(ids(1, 8), cu_seq_lens_q=torch.tensor([0, 3, 9], dtype=torch.int32))
    mask = torch.ones(1, 8, dtype=torch.long).index_fill_(1, torch.tensor([0]), 0)
    with pytest.raises(ValueError, match="attention_mask"):
        model(ids(1, 8), cu_seq_lens_q=torch.tensor([0, 3, 8], dtype=torch.int32), attention_mask=mask)


def test_right_padding_changes_neither_loss_nor_gradients(model, ids):
    tokens = ids(1, 11)
    plain = model(tokens, labels=tokens).loss
    padded = torch.nn.functional.pad(tokens, (0, 6), value=2)
    mask = (torch.arange(17) < 11).long()[None]
    labels = padded.masked_fill(mask == 0, -100)
    assert abs(model(padded, attention_mask=mask, labels=labels).loss - plain) < 1e-10


def test_idle_experts_get_exactly_zero_gradients(model, ids):
    out = model(ids(1, 2), output_router_logits=True)
    (out.logits * torch.randn_like(out.logits)).sum().backward()
    layer = model.model.layers[-1].block_sparse_moe
    scores = out.router_logits[-1].sigmoid() + layer.gate.e_score_correction_bias
    chosen = scores.topk(model.config.num_experts_per_token).indices.unique()
    for weight in (layer.experts.gate_up_proj, layer.experts.down_proj):
        hit = weight.grad.flatten(1).abs().sum(1) > 0
        assert torch.equal(hit.nonzero()[:, 0], chosen)


@torch.no_grad()
def test_constant_added_to_every_bias_changes_nothing(model, ids):
    before = model(ids(2, 9)).logits
    for layer in model.model.layers[1:]:
        layer.block_sparse_moe.gate.e_score_correction_bias += 5
    assert relative(model(ids(2, 9)).logits, before) < LIMIT
