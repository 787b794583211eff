"""Checkpoints in the K3 layout that are all headers: holes instead of data, or data made on the way."""

import json
import math

from modeling_moe_lc.configuration.expert_quantization import mxfp4_quantization
from modeling_moe_lc.conversion.checkpoint_reader import DTYPES
from modeling_moe_lc.conversion.checkpoint_writer import Output, header_bytes
from modeling_moe_lc.conversion.layouts import TEXT_PREFIX, expected_tensors, expected_vision, packed_shapes


def released_outputs(config, vision):
    """Every tensor of a K3 release with MXFP4 experts, as on disk."""
    for name, expected in expected_tensors(config).items():
        if expected.kind == "expert":
            for suffix, shape in packed_shapes(expected.shape).items():
                yield Output(TEXT_PREFIX + name.removesuffix("weight") + suffix, "U8", shape)
        else:
            yield Output(TEXT_PREFIX + name, "BF16" if expected.kind == "plain" else "F32", expected.shape)
    for name, expected in expected_vision(vision).items():
        yield Output(name, "BF16", expected.shape)


def released_config(config, vision):
    text = {key: value for key, value in config.to_dict().items() if key not in ("layer_types", "router_balance")}
    text |= {"model_type": "kimi_linear", "quantization_config": mxfp4_quantization()}
    return {
        "model_type": "kimi_k3",
        "media_placeholder_token_id": 0,
        "dtype": "bfloat16",
        "text_config": text,
        "vision_config": vision,
    }


def write_released(folder, config, vision, shards, data=None):
    """`shards` files that have the sizes and headers of a release; `data(output)`: the bytes of a tensor, None: a hole."""
    folder.mkdir()
    outputs = list(released_outputs(config, vision))
    weight_map = {}
    each = math.ceil(len(outputs) / shards)
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = sorted(outputs[number * each : (number + 1) * each], key=lambda one: -DTYPES[one.dtype].itemsize)
        with (folder / name).open("wb") as file:
            file.write(header_bytes(part))
            for output in part:
                content = None if data is None else data(output)
                if content is None:
                    file.seek(output.nbytes, 1)
                else:
                    file.write(content)
            file.truncate()
        weight_map |= dict.fromkeys((output.name for output in part), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(released_config(config, vision)))
    return outputs
