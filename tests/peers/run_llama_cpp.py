"""What llama.cpp computes with a folder; runs in an environment of its own, which does not have this package.

    python run_llama_cpp.py SOURCE FOLDER IDS STEPS OUT

SOURCE is llama-cpp-python's source, which has the converter; IDS is a JSON list. OUT is what comparison.py describes.
"""

import json
import runpy
import sys
from pathlib import Path

import llama_cpp
import numpy as np
from safetensors.numpy import save_file


def convert(source: Path, folder: str, out: Path) -> None:
    """The converter as it is called from a shell, but for one answer.

    It knows a tokenizer by a hash of the ids that it makes of a text, and refuses any other (`get_vocab_base_pre` in
    conversion/base.py), so any that was trained here. The runtime has none that cuts as ours do (the patterns in
    src/llama-vocab.cpp). The weights do not depend on the answer, and token ids are what is compared.
    """
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    from conversion import TextModel  # noqa: TID251 - llama.cpp's, not ours

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv = ["convert_hf_to_gguf.py", folder, "--outtype", "f32", "--outfile", str(out)]
    runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")


def main(source: str, folder: str, ids: str, steps: str, out: str) -> None:
    file, prompt = Path(out).with_suffix(".gguf"), json.loads(ids)
    convert(Path(source, "vendor", "llama.cpp"), folder, file)
    fp32 = llama_cpp.GGML_TYPE_F32  # the cache is FP16 otherwise
    model = llama_cpp.Llama(
        str(file), n_ctx=512, logits_all=True, n_threads=1, n_threads_batch=1, type_k=fp32, type_v=fp32, verbose=False
    )
    model.eval(prompt)
    logits, tokens, rows = model.scores[: len(prompt)].copy(), [], []
    for _ in range(int(steps)):
        rows.append(model.scores[model.n_tokens - 1].copy())
        tokens.append(int(rows[-1].argmax()))
        model.eval(tokens[-1:])
    results = {"input_ids": np.array(prompt, np.int32), "tokens": np.array(tokens, np.int32)}
    save_file(results | {"logits": logits, "step_logits": np.stack(rows)}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
