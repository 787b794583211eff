"""A file is read as it is or refused with a `ValueError`, at once and without allocating what it claims."""

import json
import os
import random
import time
import tracemalloc

import pytest
import torch
from safetensors.torch import load_file, save_file

from modeling_moe_lc.conversion.checkpoint_reader import Checkpoint, read_header, side_files


def pack(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


ONE = {"a": entry()}
BAD = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "header longer than the file": pack(ONE, bytes(8), length=1 << 40),
    "header length of all ones": pack(ONE, bytes(8), length=(1 << 64) - 1),
    "header empty": pack(b""),
    "no object": pack(b"[1]"),
    "leading space": pack(b" {}"),
    "not UTF-8": pack(b'{"\xff\xfe":1}'),
    "not JSON": pack(b'{"a":'),
    "a name twice": pack(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
    "a field twice": pack(b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    "unknown dtype": pack({"a": entry("Q4")}, bytes(8)),
    "dtype no text": pack({"a": entry(["F32"])}, bytes(8)),
    "negative shape": pack({"a": entry(shape=(-2,))}, bytes(8)),
    "shape of floats": pack({"a": entry(shape=(2.0,))}, bytes(8)),
    "shape of booleans": pack({"a": entry(shape=(True, 2))}, bytes(8)),
    "huge shape": pack({"a": entry(shape=(1 << 62, 1 << 62))}, bytes(8)),
    "huge number": pack(b'{"a":{"dtype":"F32","shape":[%b],"data_offsets":[0,8]}}' % (b"9" * 5000), bytes(8)),
    "many sizes": pack({"a": entry(shape=[1] * 9 + [2])}, bytes(8)),
    "negative offset": pack({"a": entry(offsets=(-8, 0))}, bytes(8)),
    "offsets exchanged": pack({"a": entry(offsets=(8, 0))}, bytes(8)),
    "offsets beyond the file": pack({"a": entry(shape=(4,), offsets=(0, 16))}, bytes(8)),
    "offsets and shape disagree": pack({"a": entry(shape=(1,))}, bytes(8)),
    "overlap": pack({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "gap": pack({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)),
    "bytes after the data": pack(ONE, bytes(9)),
    "unknown field": pack({"a": {**entry(), "strides": [1]}}, bytes(8)),
    "entry no object": pack({"a": [1]}),
    "metadata no texts": pack({"__metadata__": {"format": 1}, **ONE}, bytes(8)),
    "name with an escape code": pack({"\x1b[2J": entry()}, bytes(8)),
    "name with half a surrogate": pack(b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    "deep": pack(b'{"a":' + b"[" * 100_000),
    "wide": pack(b'{"a":[' + b"{}," * 2_000_000),
    "wide numbers": pack(b'{"a":[' + b"1," * 4_000_000),
    "too large": pack(b"{" + b" " * (1 << 23)),
}  # fmt: skip


@pytest.fixture
def cheap():
    """Runs `read`, and fails if it takes a second or a good deal more memory than the file has bytes."""

    def run(read, path):
        size = path.stat().st_size
        tracemalloc.start()
        started = time.perf_counter()
        try:
            return read(path)
        finally:
            took, (_, peak) = time.perf_counter() - started, tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert took < 1 and peak < 4 * size + (1 << 20), (took, peak)

    return run


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_a_bad_header_is_refused_at_once(content, tmp_path, cheap):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^bad\.safetensors: .*expected"):
        cheap(read_header, path)


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {f"layer.{i}.weight": torch.randn(3, i).to(dtype) for i, dtype in enumerate(
        (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float32))}  # fmt: skip
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def test_what_the_library_wrote_is_read_bit_for_bit(small):
    with Checkpoint(small.parent) as checkpoint:
        expected = load_file(small)
        assert checkpoint.tensors.keys() == expected.keys()
        for name, stored in checkpoint.tensors.items():
            assert torch.equal(checkpoint.load(stored), expected[name])


def test_random_mutations_are_read_or_refused(small, cheap):
    whole = small.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    rng = random.Random(0)
    refused = 0
    for _ in range(600):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            what, where = rng.randrange(4), rng.randrange(header)
            if what == 0:
                content[where : where + 1] = bytes([rng.randrange(256)])
            elif what == 1:
                del content[where : where + rng.randint(1, 20)]
            elif what == 2:
                content[where:where] = rng.choice([b"9", b'"', b"{", b"[", b"-1,", b"1e9", bytes(8), b"\xff"])
            else:
                del content[rng.randrange(len(whole)) :]
        small.write_bytes(content)
        try:
            for stored in cheap(read_header, small).values():
                assert stored.start + stored.nbytes <= len(content)
        except ValueError as error:
            refused += 1
            assert str(error).startswith("model.safetensors: ")
    assert refused > 500


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.PT", "model.pkl", "model.pth", "last.ckpt"])
def test_a_pickle_in_the_folder_is_refused_by_name(small, name):
    small.with_name(name).write_bytes(b"")
    with pytest.raises(ValueError, match=name):
        Checkpoint(small.parent)


def with_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    "file",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "..",
        "model.bin",
        "a\\b.safetensors",
        3,
    ],
)
def test_an_index_cannot_name_paths_outside_the_folder(small, file):
    with pytest.raises(ValueError, match="in the same folder"):
        Checkpoint(with_index(small.parent, {"layer.0.weight": file}))


def test_an_index_must_agree_with_the_files(small):
    names = dict.fromkeys(load_file(small), "model.safetensors")
    assert len(Checkpoint(with_index(small.parent, names)).tensors) == 5
    with pytest.raises(ValueError, match="no gone in model"):
        Checkpoint(with_index(small.parent, {**names, "gone": "model.safetensors"}))
    with pytest.raises(ValueError, match="no other.safetensors"):
        Checkpoint(with_index(small.parent, {**names, "layer.0.weight": "other.safetensors"}))
    with pytest.raises(ValueError, match="layer.4.weight in model.safetensors, by the index in no file"):
        Checkpoint(with_index(small.parent, {name: file for name, file in names.items() if "4" not in name}))


def test_a_file_cut_short_after_its_header_was_read_is_noticed(small):
    with Checkpoint(small.parent) as checkpoint:
        last = max(checkpoint.tensors.values(), key=lambda stored: stored.start)
        small.write_bytes(small.read_bytes()[:-1])
        with pytest.raises(ValueError, match="end of the file"):
            checkpoint.load(last)


def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="regular file"):
        Checkpoint(tmp_path)


def test_side_files_do_not_lead_out_of_the_folder(tmp_path):
    cache, secret = tmp_path / "models--x", tmp_path / "secret"
    folder = cache / "snapshots" / "0"
    folder.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (cache / "blobs" / "1").write_text("{}")
    secret.write_text("s")
    (folder / "tokenizer.json").symlink_to("../../blobs/1")
    for name in ("config.json", "README.md", "LICENSE", "model.safetensors"):
        (folder / name).write_text("")
    assert [path.name for path in side_files(folder)] == ["LICENSE", "tokenizer.json"]
    (folder / "vocab.json").symlink_to(secret)
    with pytest.raises(ValueError, match="vocab.json: expected a file in"):
        list(side_files(folder))


def test_what_trainer_leaves_is_no_weight(small):
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_3.pth"):
        small.with_name(name).write_bytes(b"a pickle")
    with Checkpoint(small.parent) as checkpoint:
        assert checkpoint.tensors
