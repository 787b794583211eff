"""Documents with pictures in shards are what a processor makes of them, to the bit, and an interrupted folder is finished."""

import json
import pickle
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoProcessor

from modeling_moe_lc.training import prepare_images
from modeling_moe_lc.training.media_shards import MediaShards, open_shards
from modeling_moe_lc.training.mixture import StageData
from modeling_moe_lc.training.prepare_images import DOCUMENT
from modeling_moe_lc.training.shards import read_manifest


made = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("image_documents.py"))))
COUNT = 12


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return made.write_source(tmp_path_factory.mktemp("source"), COUNT)


@pytest.fixture(scope="module")
def folder(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("prepared") / "data"
    assert made.prepare(source, out) == 0
    return out


def documents(folder):
    """Those of both splits, by their numbers in the source."""
    found = {}
    for split in ("train", "validation"):
        shards = MediaShards(folder, split)
        for index in range(len(shards)):
            document = shards.media_document(index)
            text = shards_text(folder, document)
            found[int(text.split("This is ")[1].split(".")[0])] = document
    return found


def shards_text(folder, document):
    return AutoProcessor.from_pretrained(folder / "tokenizer").tokenizer.decode(document.input_ids)


def expected(processor, row, number):
    messages = row.get("messages") or [{"role": "user", "content": row["content"]}]
    messages = json.loads(json.dumps(messages))
    for item in messages[0]["content"]:
        if item["type"] == "image":
            item["image"] = made.picture(number)
    options = {"thinking": False} if "messages" in row else {"chat_template": DOCUMENT}
    return processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", return_assistant_tokens_mask=True, **options
    )


def test_documents_are_those_of_the_processor(folder):
    processor, found = AutoProcessor.from_pretrained(folder / "tokenizer"), documents(folder)
    assert sorted(found) == list(range(COUNT))
    for number, row in enumerate(made.rows(COUNT)):
        features, document = expected(processor, row, number), found[number]
        assert np.array_equal(document.input_ids, features["input_ids"][0])
        pad = document.input_ids == processor.image_token_id
        mask = features["assistant_masks"][0].bool().numpy() if "messages" in row else ~pad
        assert np.array_equal(document.learned, mask) and not (document.learned & pad).any() and mask.any()
        if number % 3 == 2:
            assert document.pixel_values is None and document.grid_thws is None
            continue
        assert torch.equal(document.pixel_values, features["pixel_values"])
        assert torch.equal(document.grid_thws, features["grid_thws"])
        assert pad.sum() == document.grid_thws.prod(1).sum() // 4


def test_text_that_spells_a_placeholder_is_text(folder):
    document = documents(folder)[1]
    assert "Before <|media_pad|> and " in shards_text(folder, document)
    width, height = made.SIZES[1]
    assert len(document.grid_thws) == 2 and document.grid_thws[0].tolist() == [
        1,
        -(-height // 8) * 2,
        -(-width // 8) * 2,
    ]
    assert document.input_ids[0] == 0 and document.input_ids[-1] == 1  # bos, eos


@pytest.mark.parametrize("stop", [1, 5, COUNT - 1])
def test_an_interrupted_folder_ends_with_the_same_bytes(source, folder, stop, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_images, "SHARD_PATCHES", 60)
    assert made.prepare(source, tmp_path / "whole") == 0
    real, calls = prepare_images.stored_document, iter(range(COUNT + 1))

    def interrupted(*args):
        if next(calls) == stop:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(prepare_images, "stored_document", interrupted)
    assert made.prepare(source, tmp_path / "parts") == 130
    monkeypatch.setattr(prepare_images, "stored_document", real)
    assert made.prepare(source, tmp_path / "parts") == 0

    def content(out):
        return {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}

    whole = content(tmp_path / "whole")
    assert content(tmp_path / "parts") == whole and sum(path.suffix == ".patches" for path in whole) > 3
    cut, one = documents(tmp_path / "whole"), documents(folder)
    assert all(np.array_equal(cut[number].input_ids, one[number].input_ids) for number in one)
    assert all(torch.equal(cut[n].pixel_values, one[n].pixel_values) for n in one if one[n].pixel_values is not None)


def test_a_finished_folder_stays_and_other_settings_are_refused(source, folder, capsys):
    before = (folder / "manifest.json").read_bytes()
    assert made.prepare(source, folder) == 0
    assert "is complete" in capsys.readouterr().out and (folder / "manifest.json").read_bytes() == before
    assert made.prepare(source, folder, "--max-patches", "7") == 2
    assert "max_patches: expected None, with which" in capsys.readouterr().err


def test_the_fingerprint_knows_the_pixels(source, folder, tmp_path):
    other = made.write_source(tmp_path / "source", COUNT)
    first, second = (made.picture(number).transpose(0) for number in (0, 1))
    first.save(other.parent / "pictures" / "0.png")
    second.save(other.parent / "pictures" / "1.png")
    assert made.prepare(other, tmp_path / "data") == 0
    assert read_manifest(tmp_path / "data")["fingerprint"] != read_manifest(folder)["fingerprint"]


def test_larger_pictures_are_scaled_down(source, tmp_path):
    assert made.prepare(source, tmp_path / "data", "--max-patches", "4") == 0
    shards = MediaShards(tmp_path / "data")
    found = [shards.media_document(index) for index in range(len(shards))]
    assert max(one.grid_thws.prod(1).max() for one in found if one.grid_thws is not None) <= 12  # padded, from 20


def test_shards_can_be_pickled_and_damage_is_named(folder, tmp_path, source):
    shards = pickle.loads(pickle.dumps(open_shards(folder)))
    assert isinstance(shards, MediaShards) and len(shards.media_document(0)) == shards.lengths[0]
    with pytest.raises(IndexError):
        shards.media_document(len(shards))
    assert made.prepare(source, tmp_path / "data") == 0
    [path] = (tmp_path / "data" / "train").glob("*.patches")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"00000.patches: expected \d+ bytes, got \d+"):
        MediaShards(tmp_path / "data")


def test_packs_hold_whole_documents_in_an_order_of_the_step_alone(folder):
    longest = int(MediaShards(folder).lengths.max())
    data = StageData({str(folder): 1.0}, sequence_length=2 * longest, sequences_per_step=2, seed=3)
    again = StageData({str(folder): 1.0}, sequence_length=2 * longest, sequences_per_step=2, seed=3)
    assert data.pictures.keys() == {str(folder)}
    for step in (5, 0, 2):
        for one, two in zip(data[step], again[step], strict=True):
            assert one.input_ids == two.input_ids and one.cu_seqlens == two.cu_seqlens
            assert all(
                torch.equal(a.pixel_values, b.pixel_values)
                for a, b in zip(one.documents, two.documents, strict=True)
                if a.pixel_values is not None
            )
            assert 0 < one.predictions < len(one.input_ids)
    with pytest.raises(ValueError, match=rf"sequence_length: expected at least the {longest} tokens of the longest"):
        StageData({str(folder): 1.0}, sequence_length=longest - 1, sequences_per_step=2)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "lines.jsonl:2: expected a JSON object, got '{"),
        ("[1]", "lines.jsonl:2: expected a JSON object, got '[1]"),
        ('{"text": "x"}', "lines.jsonl:2: expected an object with messages or content, got the fields ['text']"),
        ('{"messages": [{"role": "user", "content": "Hi"}]}', "lines.jsonl:2: messages: expected something that the"),
        ('{"content": [{"type": "image", "image": "no.png"}]}', "lines.jsonl:2: image (no.png): expected"),
        ('{"content": [{"type": "image"}]}', "lines.jsonl:2: content: expected one of"),
    ],
)
def test_bad_documents_are_named(line, named, tmp_path, capsys):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"content": [{"type": "text", "text": "fine"}]}\n' + line + "\n")
    assert made.prepare(path, tmp_path / "data") == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "data").exists()  # the document mended, the same command runs


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--validation-share", "1"], "validation_share: expected a number from 0 to below 1, got 1.0"),
        (["--patch-size", "0"], "patch_size: expected at least 1, got 0"),
        (["--max-patches", "0"], "max_patches: expected at least 1, got 0"),
    ],
)
def test_bad_options_are_named(options, named, source, tmp_path, capsys):
    assert made.prepare(source, tmp_path / "data", *options) == 2
    assert named in capsys.readouterr().err
    assert made.prepare(tmp_path, tmp_path / "data") == 2
    assert "sources: expected files of JSON lines" in capsys.readouterr().err
