"""The vision demo asks about what it never showed, leaves what it promises, and goes on where it was interrupted."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from modeling_moe_lc.training import demo_vision, digit_pairs, pretrain
from modeling_moe_lc.training.cli import main
from modeling_moe_lc.training.digit_pairs import SIDE, is_held_out, pairs


OPTIONS = ["--steps", "4", "--documents", "4", "--training", "12", "--asked", "4", "--threads", "1"]


@pytest.fixture(scope="module")
def call():
    return lambda out, *options: main(["demo-vision", "--out", str(out), *OPTIONS, *options])


@pytest.fixture(scope="module")
def whole(call, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    assert call(out) == 0
    return out


def test_held_out_are_digits_and_pairs(monkeypatch):
    shown = {"train": [], "validation": []}
    real = digit_pairs.picture
    kind = None

    def noted(left, right):
        shown[kind] += [left.tobytes(), right.tobytes()]
        return real(left, right)

    monkeypatch.setattr(digit_pairs, "picture", noted)
    texts = {}
    for kind in shown:
        texts[kind] = [text for text, _ in pairs(kind, 400, 0)]
    assert set(texts["train"]).isdisjoint(texts["validation"]) and len({*texts["train"], *texts["validation"]}) == 100
    assert set(shown["train"]).isdisjoint(shown["validation"]) and len(set(shown["validation"])) > 200
    assert all(is_held_out(int(text[0]), int(text[1])) for text in texts["validation"])
    for place in (0, 1):
        assert {text[place] for text in texts["validation"]} == set("0123456789")
    assert max(texts["validation"].count(text) for text in texts["validation"]) == 40


def test_a_picture_is_its_digits_from_left_to_right():
    images, labels = digit_pairs.digits()
    assert images.shape == (1797, 8, 8) and images.dtype == np.uint8 and images.max() == 255
    text, picture = next(pairs("train", 1, 0))
    again = next(pairs("train", 1, 0))
    assert text == again[0] and np.array_equal(picture, again[1])
    assert picture.size == (2 * SIDE, SIDE) and 2 * SIDE * SIDE // 28**2 >= 16
    halves = [picture.crop((place * SIDE, 0, (place + 1) * SIDE, SIDE)).resize((8, 8), Image.Resampling.BOX)
              for place in (0, 1)]  # fmt: skip
    for half, digit in zip(halves, text, strict=True):
        distances = np.abs(images.astype(int) - np.asarray(half)).sum((1, 2))
        assert labels[distances.argmin()] == int(digit)


def test_it_leaves_what_it_promises(whole, capsys):
    results = json.loads((whole / "results.json").read_text())
    assert set(results["accuracy"]) == {"with pictures", "without pictures"}
    for found in results["accuracy"].values():
        assert all(0.0 <= share <= 1.0 for share in found.values()) and found["both"] <= found["left"]
    assert Image.open(whole / "digits.png").size[0] > 500
    for kind in ("pictures", "text"):
        model, processor = demo_vision.loaded(whole, kind)
        assert processor.image_token_id == model.config.media_placeholder_token_id
    table = demo_vision.table_of(results).plain()
    assert "without pictures" in table and "By chance: 1%" in table


def test_the_two_models_differ_in_the_pictures_alone(whole):
    seen, blind = (demo_vision.documents_of(whole, kind) for kind in ("pictures", "text"))
    assert len(seen) == len(blind) == 4
    for one, other in zip(seen, blind, strict=True):
        assert one.grid_thws.tolist() == [[1, 6, 12]] and other.pixel_values is None
        assert np.array_equal(np.concatenate((one.input_ids[:1], one.input_ids[-3:])), other.input_ids)


def test_maps_are_shares_of_attention(whole):
    model, processor = demo_vision.loaded(whole, "pictures")
    [document, *_] = demo_vision.documents_of(whole, "pictures")
    found = demo_vision.example(model, processor, document, demo_vision.asked(model, [document])[0])
    assert found["pixels"].shape == (SIDE, 2 * SIDE) and len(found["maps"]) == 2  # MLA layers
    assert all(one.shape == (3, 6) and 0 < one.sum() < 1 for layer in found["maps"] for one in layer)
    assert len(found["expected"]) == 2 and found["expected"].isdecimal()
    assert model.config._attn_implementation != "eager"


def test_answers_are_those_of_the_prompt(whole):
    model, _ = demo_vision.loaded(whole, "pictures")
    documents = demo_vision.documents_of(whole, "pictures")
    together = demo_vision.asked(model, documents)
    assert together == [demo_vision.asked(model, [document])[0] for document in documents]
    wrong = [demo_vision.MediaDocument(one.input_ids[:-3], one.pixel_values, one.grid_thws) for one in documents]
    padded = [demo_vision.dataclasses.replace(w, input_ids=np.append(w.input_ids, [9, 9, 1])) for w in wrong]
    assert demo_vision.asked(model, padded) == together  # it does not see the answers


def test_accuracy_wants_the_right_order():
    found = demo_vision.accuracy([[1, 2], [2, 1], [1, 1], [3, 3]], [[1, 2], [1, 2], [1, 2], [1, 2]])
    assert found == {"both": 0.25, "left": 0.5, "right": 0.25}


def test_an_interrupted_demo_goes_on_to_the_bit(call, whole, tmp_path, monkeypatch):
    calls, real = iter(range(9)), pretrain.Run._step

    def step(*args):
        if next(calls) == 4:  # the first of the second model
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(pretrain.Run, "_step", step)
    assert call(tmp_path) == 130
    first = (tmp_path / "pictures" / "log.jsonl").read_bytes()
    monkeypatch.setattr(pretrain.Run, "_step", real)
    assert call(tmp_path) == 0
    assert (tmp_path / "pictures" / "log.jsonl").read_bytes() == first
    for kind in ("pictures", "text"):
        one, two = (demo_vision.loaded(out, kind)[0].state_dict() for out in (tmp_path, whole))
        assert all(torch.equal(one[name], two[name]) for name in two)


def test_other_settings_are_refused_and_restart_begins_anew(call, whole, capsys):
    assert call(whole, "--seed", "1") == 2
    assert "seed: expected 0, as" in capsys.readouterr().err
    assert call(whole.parent / "none", "--steps", "0") == 2
    assert "steps: expected at least 1, got 0" in capsys.readouterr().err
    assert call(whole, "--restart", "--steps", "1") == 0
    assert json.loads((whole / "settings.json").read_text())["steps"] == 1
