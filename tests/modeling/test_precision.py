"""FP32 tensors stay FP32, bit for bit, whatever happens to the rest; FP64 goes all the way through."""

import pytest
import torch

from modeling_moe_lc import MoeLcForCausalLM


KEPT = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")


def kept(model):
    return {name: tensor for name, tensor in model.state_dict().items() if name.endswith(KEPT)}


@pytest.fixture(params=["k3", "kimi-linear"])
def model(request, tiny, kimi_linear):
    return tiny() if request.param == "k3" else kimi_linear


def typical_error(x, reference):
    """Median over tokens: a token that changes its expert by rounding says nothing about precision."""
    return ((x - reference).norm(dim=-1) / reference.norm(dim=-1)).median().item()


CASTS = {
    "to": lambda model, folder: model.to(torch.bfloat16),
    "half": lambda model, folder: model.half(),
    "to device and dtype": lambda model, folder: model.to("cpu", torch.float16),
    "from_pretrained bfloat16": lambda model, folder: MoeLcForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
    "from_pretrained float16": lambda model, folder: MoeLcForCausalLM.from_pretrained(folder, dtype="float16"),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
def test_casts_keep_fp32_tensors_bit_equal(model, cast, tmp_path, ids):
    before = {name: tensor.clone() for name, tensor in kept(model).items()}
    model.save_pretrained(tmp_path / "first")
    narrow = cast(model, tmp_path / "first").eval()
    assert narrow.lm_head.weight.dtype.itemsize == 2
    narrow.save_pretrained(tmp_path / "second")
    again = MoeLcForCausalLM.from_pretrained(tmp_path / "second", dtype="auto")
    assert again.lm_head.weight.dtype == narrow.lm_head.weight.dtype
    for name, tensor in before.items():
        for other in (kept(narrow)[name], kept(again)[name]):
            assert other.dtype == torch.float32 and torch.equal(other, tensor), name
    assert narrow(ids(2, 20)).logits.isfinite().all()


def test_half_precision_is_close_and_generates(model, ids):
    wide = model(ids(2, 40)).logits
    model.half()
    narrow = model(ids(2, 40)).logits.float()
    assert typical_error(narrow, wide) < 0.05  # measured: 0.004 and 0.006
    model.to(torch.bfloat16)
    out = model.generate(ids(2, 5), max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=2)
    assert out.shape == (2, 9)


def test_double_goes_all_the_way_and_back(model, ids):
    single = model(ids(2, 40)).logits
    model.double()
    assert all(t.dtype == torch.float64 for t in kept(model).values())
    double = model(ids(2, 40)).logits
    assert double.dtype == torch.float64
    assert (double - single).norm() / double.norm() < 1e-5
    assert all(t.dtype == torch.float32 for t in kept(model.to(torch.bfloat16)).values())


def test_autocast_leaves_full_precision_operators_alone(model, ids):
    wide = model(ids(2, 40)).logits
    with torch.autocast("cpu", dtype=torch.float16):
        narrow = model(ids(2, 40)).logits.float()
    assert typical_error(narrow, wide) < 0.05


def test_rounding_the_rates_would_show(model, ids):
    """The rule matters: this fails to differ only if the test could not see a BF16 rate."""
    long = ids(1, 300)
    before = model(long).logits
    with torch.no_grad():
        for name, tensor in kept(model).items():
            if name.endswith("A_log"):
                tensor.add_(0.003)
                tensor.copy_(tensor.to(torch.bfloat16))
    assert (model(long).logits - before).norm() / before.norm() > 1e-4
