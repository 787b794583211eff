"""An exported multimodal folder is the same model where the package is missing."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from modeling_moe_lc import MoeLcForConditionalGeneration
from modeling_moe_lc.conversion.export_remote_code import export_remote_code


FIXTURE = Path(__file__).parents[1] / "fixtures" / "k3-vision-tiny"
WITHOUT_THE_PACKAGE = """
    import sys

    sys.modules |= {"modeling_moe_lc": None, "triton": None}
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText

    torch.set_num_threads(1)
    folder, fixture, again = sys.argv[1:]
    inputs, expected = (load_file(f"{fixture}/{name}.safetensors") for name in ("inputs", "expected"))
    for source in (folder, again):
        model = AutoModelForImageTextToText.from_pretrained(source, trust_remote_code=True, dtype=torch.float32).eval()
        assert type(model).__module__.startswith("transformers_modules.")
        media = {key: inputs[key] for key in ("pixel_values", "grid_thws")}
        with torch.no_grad():
            logits = model(inputs["input_ids.all"], **media).logits
        assert (logits - expected["logits.all"]).norm() < 1e-4 * expected["logits.all"].norm()
        if source == folder:
            model.save_pretrained(again)
    """


def test_export_loads_without_the_package_and_what_it_saves_does_too(tmp_path):
    MoeLcForConditionalGeneration.from_pretrained(FIXTURE).save_pretrained(tmp_path / "model")
    export_remote_code(tmp_path / "model", tmp_path / "export")
    script = textwrap.dedent(WITHOUT_THE_PACKAGE)
    folders = [str(tmp_path / "export"), str(FIXTURE), str(tmp_path / "again")]
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(
        [sys.executable, "-c", script, *folders],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
