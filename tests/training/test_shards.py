"""Shards give back every document, and refuse files that are not those that were written."""

import json
import pickle

import numpy as np
import pytest

from modeling_moe_lc.training.shards import TokenShards, read_manifest, write_manifest, write_shard


DOCUMENTS = [[3], [5, 1, 4], list(range(1000)), [2, 2], [9] * 77, [7, 8]]


def write(folder, dtype=np.uint16, groups=(DOCUMENTS[:3], DOCUMENTS[3:5], DOCUMENTS[5:])):
    shards = [
        write_shard(folder, f"train-{number:05d}", [np.array(one, dtype) for one in group])
        for number, group in enumerate(groups)
    ]
    tokenizer = {"fingerprint": "abc", "vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 1}
    write_manifest(
        folder, {"tokenizer": tokenizer, "splits": {"train": {"shards": shards}, "validation": {"shards": []}}}
    )
    return folder


@pytest.mark.parametrize("dtype", (np.uint16, np.uint32))
def test_documents_come_back_as_they_were_written(tmp_path, dtype):
    shards = TokenShards(write(tmp_path, dtype))
    assert len(shards) == len(DOCUMENTS)
    assert shards.lengths.dtype == np.int64
    assert shards.lengths.tolist() == [len(one) for one in DOCUMENTS]
    for index in (4, 0, 5, 2, 1, 3, -1):
        document = shards.document(index)
        assert document.dtype == dtype
        assert document.tolist() == DOCUMENTS[index]
    assert (tmp_path / "train-00000.tokens").stat().st_size == np.dtype(dtype).itemsize * 1004
    with pytest.raises(IndexError):
        shards.document(len(DOCUMENTS))
    with pytest.raises(IndexError):
        shards.document(-len(DOCUMENTS) - 1)


def test_a_split_may_be_empty_and_a_reader_travels_to_other_processes(tmp_path):
    assert len(TokenShards(write(tmp_path), "validation")) == 0
    shards = TokenShards(tmp_path)
    shards.document(3)
    assert pickle.loads(pickle.dumps(shards)).document(3).tolist() == DOCUMENTS[3]


@pytest.mark.parametrize("suffix", ("tokens", "offsets"))
@pytest.mark.parametrize("change", (-2, 2))
def test_a_shard_of_another_size_is_refused_by_name(tmp_path, suffix, change):
    path = write(tmp_path) / f"train-00001.{suffix}"
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + b"\0" * change)
    with pytest.raises(
        ValueError, match=rf"train-00001\.{suffix}: expected {len(content)} bytes, got {len(content) + change}"
    ):
        TokenShards(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=rf"train-00001\.{suffix}: expected {len(content)} bytes, got no such file"):
        TokenShards(tmp_path)


def test_altered_offsets_are_refused_by_name(tmp_path):
    path = write(tmp_path) / "train-00000.offsets"
    path.write_bytes(np.array([0, 9, 4, 1004], "<i8").tobytes())
    with pytest.raises(ValueError, match="train-00000.offsets: expected offsets that rise from 0 to 1004"):
        TokenShards(tmp_path)


def test_a_folder_that_is_not_finished_or_newer_is_named(tmp_path):
    with pytest.raises(ValueError, match="expected a folder that `moe-lc prepare` has finished"):
        TokenShards(tmp_path)
    manifest = write(tmp_path) / "manifest.json"
    with pytest.raises(ValueError, match="split: expected one of 'train', 'validation', got 'test'"):
        TokenShards(tmp_path, "test")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    with pytest.raises(ValueError, match="format: expected 1, got 99"):
        read_manifest(tmp_path)


def test_digests_tell_contents_apart(tmp_path):
    entries = [write_shard(tmp_path, "a", [np.array([1, token], np.uint16)]) for token in (2, 3, 2)]
    assert entries[0] == entries[2] != entries[1]
    assert not list(tmp_path.glob(".*"))
