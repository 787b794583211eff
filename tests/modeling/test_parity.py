"""Equal to independent implementations: logits, sublayer outputs and greedy continuations of the tiny released checkpoints."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modeling_moe_lc import MoeLcForCausalLM


FIXTURES = Path(__file__).parents[1] / "fixtures"
LIMIT = 1e-4  # norm of the difference over norm; measured: at most 8e-6. The smallest listed mistake moves 4e-4
PAD = 511


def relative(x, reference):
    return ((x - reference).norm() / reference.norm()).item()


def assert_same_logits(logits, expected):
    assert relative(logits, expected) < LIMIT
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


class Case:
    def __init__(self, name):
        self.folder = FIXTURES / name
        self.model = MoeLcForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        self.inputs = load_file(self.folder / "inputs.safetensors")
        self.expected = load_file(self.folder / "expected.safetensors")


@pytest.fixture(scope="module", params=["k3-text-tiny", "kimi-linear-tiny"])
def case(request):
    with torch.no_grad():
        yield Case(request.param)


@pytest.fixture(params=["t5", "t70"])
def tag(request):
    return request.param


@pytest.fixture(params=["sdpa", "eager", "moe_lc_reference"])
def attention(request, case):
    before = case.model.config._attn_implementation
    case.model.set_attn_implementation(request.param)
    yield request.param
    case.model.set_attn_implementation(before)


def test_whole_prompt(case, tag, attention):
    logits = case.model(case.inputs[f"input_ids.{tag}"]).logits
    assert_same_logits(logits, case.expected[f"logits.{tag}"])


def test_outputs_of_every_sublayer(case, tag):
    attn, mlp, stream = [], [], []
    hooks = []
    for layer in case.model.model.layers:
        block = layer.block_sparse_moe if layer.is_sparse else layer.mlp
        hooks.append(layer.self_attn.register_forward_hook(lambda m, i, out: attn.append(out[0])))
        hooks.append(block.register_forward_hook(lambda m, i, out: mlp.append(out)))
        hooks.append(layer.register_forward_hook(lambda m, i, out: stream.append(out[0])))
    case.model(case.inputs[f"input_ids.{tag}"])
    for hook in hooks:
        hook.remove()
    for name, outputs in (("attn_out", attn), ("mlp_out", mlp), ("hidden", stream)):
        if f"{name}.{tag}" in case.expected:
            for ours, expected in zip(outputs, case.expected[f"{name}.{tag}"], strict=True):
                assert relative(ours[0], expected) < LIMIT, name


@pytest.mark.parametrize("chunk", [1, 3, 63, 64, 65])
def test_prompt_in_chunks(case, chunk, attention):
    ids, cache, logits = case.inputs["input_ids.t70"], None, []
    for piece in ids.split(chunk, dim=1):
        out = case.model(piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits)
    assert cache.get_seq_length() == ids.shape[1]
    assert_same_logits(torch.cat(logits, dim=1), case.expected["logits.t70"])


def test_greedy_with_cache(case, tag, attention):
    ids = case.inputs[f"input_ids.{tag}"]
    out = case.model.generate(
        ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=PAD,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    assert torch.equal(out.sequences[:, ids.shape[1] :], case.expected[f"greedy_tokens.{tag}"])
    assert_same_logits(torch.stack(out.logits, dim=1), case.expected[f"greedy_logits.{tag}"])


@pytest.mark.parametrize("padding", [1, 3, 17, 64, 70])
def test_left_padded_beside_another_row(case, tag, padding, attention):
    ids = case.inputs[f"input_ids.{tag}"]
    length = ids.shape[1] + padding
    other = torch.randint(0, 500, (1, length), generator=torch.Generator().manual_seed(padding))
    batch = torch.cat([torch.nn.functional.pad(ids, (padding, 0), value=PAD), other])
    mask = torch.ones_like(batch)
    mask[0, :padding] = 0
    logits = case.model(batch, attention_mask=mask).logits
    assert_same_logits(logits[:1, padding:], case.expected[f"logits.{tag}"])
    assert_same_logits(logits[1:], case.model(other).logits)
    out = case.model.generate(
        batch, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=PAD
    )
    assert torch.equal(out[:1, length:], case.expected[f"greedy_tokens.{tag}"])


def test_right_padded(case, tag, attention):
    ids = case.inputs[f"input_ids.{tag}"]
    batch = torch.nn.functional.pad(ids, (0, 9), value=PAD)
    mask = (torch.arange(batch.shape[1]) < ids.shape[1]).long()[None]
    logits = case.model(batch, attention_mask=mask).logits
    assert_same_logits(logits[:, : ids.shape[1]], case.expected[f"logits.{tag}"])


@pytest.mark.parametrize("how", ["cu_seq_lens_q", "seq_idx", "position_ids"])
def test_packed_with_another_document(case, tag, how, attention):
    ids = case.inputs[f"input_ids.{tag}"]
    other = torch.randint(0, 500, (1, 33), generator=torch.Generator().manual_seed(1))
    length = ids.shape[1]
    packed = torch.cat([other, ids, other[:, :1]], dim=1)
    borders = torch.tensor([0, 33, 33 + length, 34 + length], dtype=torch.int32)
    lengths = borders.diff()
    told = {
        "cu_seq_lens_q": borders,
        "seq_idx": torch.repeat_interleave(torch.arange(3), lengths)[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
    }
    logits = case.model(packed, **{how: told[how]}).logits
    assert_same_logits(logits[:, 33:-1], case.expected[f"logits.{tag}"])
