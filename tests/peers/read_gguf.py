"""The weights of a file of llama.cpp, as float32 safetensors; runs in an environment that does not have this package.

    python read_gguf.py SOURCE FILE OUT

SOURCE is llama-cpp-python's source, which has the reader.
"""

import sys
from pathlib import Path

from safetensors.numpy import save_file


def main(source: str, file: str, out: str) -> None:
    sys.path.insert(0, str(Path(source, "vendor", "llama.cpp", "gguf-py")))
    from gguf import GGUFReader, dequantize

    save_file({one.name: dequantize(one.data, one.tensor_type) for one in GGUFReader(file).tensors}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
