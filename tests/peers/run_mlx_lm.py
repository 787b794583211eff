"""What mlx-lm computes with a folder; runs in an environment of its own, which has neither torch nor this package.

    python run_mlx_lm.py FOLDER TEXT STEPS OUT [MLA_EPS]

OUT becomes a safetensors file: `input_ids` int32 [T], `logits` float32 [T, V] without a cache, `tokens` int32 [STEPS]
chosen greedily with the cache, `step_logits` float32 [STEPS, V] from which each was chosen.
"""

import sys

import mlx.core as mx
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache


def main(folder: str, text: str, steps: str, out: str, eps: str | None = None) -> None:
    mx.set_default_device(mx.cpu)
    model, tokenizer = load(folder)
    model.set_dtype(mx.float32)  # the arithmetic; packed experts stay packed
    if eps is not None:
        for layer in model.layers:
            if hasattr(layer.self_attn, "kv_a_layernorm"):
                layer.self_attn.kv_a_layernorm.eps = float(eps)
    ids = mx.array(tokenizer.encode(text, add_special_tokens=False))
    results = {"input_ids": ids, "logits": model(ids[None])[0]}
    cache, fed, tokens, rows = make_prompt_cache(model), ids, [], []
    for _ in range(int(steps)):
        rows.append(model(fed[None], cache=cache)[0, -1])
        fed = mx.argmax(rows[-1], keepdims=True)
        mx.eval(fed, rows[-1])
        tokens.append(fed.item())
    results |= {"tokens": mx.array(tokens), "step_logits": mx.stack(rows)}
    dtypes = {"input_ids": mx.int32, "tokens": mx.int32}
    mx.save_safetensors(out, {name: one.astype(dtypes.get(name, mx.float32)) for name, one in results.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
