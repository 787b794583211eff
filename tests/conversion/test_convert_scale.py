"""Memory and planning of conversions do not grow with the bytes of the checkpoint."""

import json
import runpy
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from modeling_moe_lc.configuration.presets import load_multimodal_preset
from modeling_moe_lc.training.cli import main


write_released = runpy.run_path(str(Path(__file__).with_name("sparse_checkpoints.py")))["write_released"]


def sparse(folder, shards, **overrides):
    config = load_multimodal_preset("kimi-k3", attn_res_block_size=2, **overrides)
    return write_released(folder, config.text_config, config.vision_config.to_dict(), shards)


def layers(count):
    """Overrides for `count` layers of K3: the last one MLA, the others KDA."""
    linear = {"num_heads": 96, "head_dim": 128, "use_full_rank_gate": True, "gate_lower_bound": -5.0}
    lists = {"kda_layers": list(range(1, count)), "full_attn_layers": [count]}
    return {"num_hidden_layers": count, "linear_attn_config": {**linear, **lists}}


def test_three_layers_of_k3_in_full_width_are_planned_from_headers(tmp_path, capsys):
    outputs = sparse(tmp_path / "k3", 4, **layers(3))
    packed = 2 * 896 * 3 * 2
    assert sum(output.dtype == "U8" for output in outputs) == packed and len(outputs) > packed
    on_disk = sum(path.stat().st_blocks * 512 for path in (tmp_path / "k3").iterdir())
    assert on_disk < 2**24 < sum(output.nbytes for output in outputs) // 1000
    for dtype, tensors in (("mxfp4", len(outputs)), ("bfloat16", len(outputs) - packed // 2)):
        started = time.perf_counter()
        assert main(["convert", str(tmp_path / "k3"), str(tmp_path / "out"), "--dry-run", "--dtype", dtype]) == 0
        assert time.perf_counter() - started < 20
        said = capsys.readouterr().out
        assert f"{tensors:,} tensors:" in said and "nothing was written" in said
        experts = {"mxfp4": "w1.weight_packed  U8 [3072, 1792]", "bfloat16": "w1.weight  BF16 [3072, 3584]"}[dtype]
        assert f"layers.{{1-2}}.block_sparse_moe.experts.{{0-895}}.{experts}  (1,792)" in said
    assert not (tmp_path / "out").exists()


MEMORY = """
    import re
    import sys
    from pathlib import Path

    from modeling_moe_lc.conversion.checkpoint_reader import Checkpoint
    from modeling_moe_lc.conversion.convert import convert, plan_conversion


    def memory(field):
        return int(re.search(rf"{field}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


    source, out = map(Path, sys.argv[1:])
    with Checkpoint(source) as checkpoint:
        plan = plan_conversion(checkpoint, dtype="bfloat16", shard_size=100_000_000)
        before = memory("VmRSS")
        convert(checkpoint, plan, out, workers=2)
    print("grown", memory("VmHWM") - before)
    """


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_stays_far_below_the_largest_tensor(tmp_path):
    small = {"hidden_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 1024,
             "num_experts": 16, "moe_intermediate_size": 512, "routed_expert_hidden_size": 512, "vocab_size": 40_000,
             "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}  # fmt: skip
    vision = {"vision_config": {"text_hidden_size": 1024, "vt_num_hidden_layers": 1}, "media_placeholder_token_id": 3}
    outputs = sparse(tmp_path / "source", 2, **{**layers(3), **small, **vision})
    largest = max(output.nbytes for output in outputs)
    assert largest > 80_000_000
    command = [sys.executable, "-c", textwrap.dedent(MEMORY), str(tmp_path / "source"), str(tmp_path / "out")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    assert int(done.stdout.split()[-1]) < 50_000_000
    written = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert written > 250_000_000
