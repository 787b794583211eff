"""What a step reads is a function of its number: whole, once per epoch, in the shares and up-sampling that were asked."""

import bisect
import collections
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from modeling_moe_lc.training.mixture import LongDocuments, PackedShards, StageData
from modeling_moe_lc.training.packing import assign_packs, split_document
from modeling_moe_lc.training.shards import TokenShards, write_manifest, write_shard


LENGTH = 97
BOS, EOS = 0, 1
TOKENIZER = {"fingerprint": "abc", "vocab_size": 1 << 20, "bos_token_id": BOS, "eos_token_id": EOS}


def log_uniform(seed, count, longest):
    return np.rint(longest ** np.random.default_rng(seed).random(count)).astype(np.int64).clip(2)


def prepare(folder, lengths, first_token=2, tokenizer=TOKENIZER, split="train"):
    """A prepared folder of documents of these lengths; every token of a text is unique, so that each can be traced."""
    folder.mkdir()
    ends = first_token + np.cumsum(lengths)
    documents = [
        np.array([BOS, *range(end - length + 1, end - 1), EOS], np.uint32)
        for length, end in zip(lengths, ends, strict=True)
    ]
    shards = [
        write_shard(folder, f"{split}-{start:05d}", documents[start : start + 50])
        for start in range(0, len(documents), 50)
    ]
    write_manifest(folder, {"tokenizer": tokenizer, "splits": {split: {"shards": shards}}})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("data") / "one", log_uniform(0, 211, 3 * LENGTH))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Longer documents, which fill a pack less well, and tokens that the first folder has not."""
    return prepare(tmp_path_factory.mktemp("data") / "two", log_uniform(1, 60, LENGTH) // 2 + LENGTH // 2, 1 << 19)


def stage_of(folders, sequences_per_step=4, seed=7, **more):
    weights = folders if isinstance(folders, dict) else {folders: 1.0}
    return StageData(
        {str(folder): weight for folder, weight in weights.items()},
        sequence_length=LENGTH,
        sequences_per_step=sequences_per_step,
        seed=seed,
        **more,
    )


def documents_of(packs):
    return [tuple(one.input_ids[start:end]) for one in packs for start, end in itertools.pairwise(one.cu_seqlens)]


def pieces_of(folder):
    shards = TokenShards(folder)
    whole = [shards.document(index).tolist() for index in range(len(shards))]
    return [tuple(piece) for document in whole for piece in split_document(document, LENGTH, [BOS])]


def best_fit_decreasing(lengths, length):
    """The definition of `assign_packs`, one piece at a time."""
    packs = np.zeros(len(lengths), np.int64)
    frees: list[tuple[int, int]] = []
    count = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect.bisect_left(frees, (lengths[index], -1))
        free, packs[index] = frees.pop(place) if place < len(frees) else (length, count)
        count = max(count, packs[index] + 1)
        bisect.insort(frees, (free - lengths[index], packs[index]))
    return packs


@pytest.mark.parametrize("longest, count", ((LENGTH, 500), (12, 3000), (LENGTH, 7), (1, 300)))
def test_vectorised_packing_is_best_fit_decreasing(longest, count):
    lengths = log_uniform(2, count, longest).clip(max=longest)
    assert assign_packs(lengths, LENGTH).tolist() == best_fit_decreasing(lengths.tolist(), LENGTH).tolist()


def test_every_document_appears_once_per_epoch_with_all_its_tokens_and_none_that_fits_is_split(folder):
    stage = stage_of(folder, sequences_per_step=1)
    packs_per_epoch = len(PackedShards(TokenShards(folder), LENGTH))
    expected = collections.Counter(pieces_of(folder))
    for epoch in range(3):
        packs = [stage[epoch * packs_per_epoch + step][0] for step in range(packs_per_epoch)]
        assert collections.Counter(documents_of(packs)) == expected
        assert all(0 < len(one.input_ids) <= LENGTH for one in packs)
        assert all(one.cu_seqlens[-1] == len(one.input_ids) for one in packs)


def test_packs_are_nearly_full(folder):
    packs = PackedShards(TokenShards(folder), LENGTH)
    assert packs.tokens == sum(map(len, pieces_of(folder))) == sum(len(one.input_ids) for one in packs)
    assert packs.tokens > 0.97 * LENGTH * (len(packs) - 1)


def test_an_epoch_ends_inside_a_step_and_the_next_has_another_order(folder):
    stage = stage_of(folder, sequences_per_step=4)
    packs_per_epoch = len(PackedShards(TokenShards(folder), LENGTH))
    assert packs_per_epoch % 4 != 0
    slots = [one for step in range(packs_per_epoch) for one in stage[step]]
    epochs = [slots[start : start + packs_per_epoch] for start in range(0, 4 * packs_per_epoch, packs_per_epoch)]
    orders = [[tuple(one.input_ids) for one in epoch] for epoch in epochs]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len(set(map(tuple, orders))) == 4
    assert stage.epochs(packs_per_epoch // 4)[str(folder)] == pytest.approx(1.0, abs=4 / packs_per_epoch)


def test_a_step_is_the_same_in_any_order_of_access_and_another_for_another_seed(folder, other):
    folders = {folder: 1.0, other: 2.0}
    steps = [0, 17, 3, 1000, 1, 10**7]
    stage = stage_of(folders)
    seen = [stage[step] for step in steps]
    assert [stage[step] for step in reversed(steps)] == seen[::-1]
    assert [stage_of(folders)[step] for step in steps] == seen
    assert stage_of(folders, seed=8)[17] != seen[1]
    assert stage_of(folders).fingerprint == stage.fingerprint != stage_of(folders, seed=8).fingerprint


def test_a_step_is_the_same_in_a_fresh_process(folder, other):
    program = """
import json, sys
from modeling_moe_lc.training.mixture import LongDocuments, StageData
one, two = sys.argv[1:]
stage = StageData({one: 1.0, two: 2.0}, sequence_length=97, sequences_per_step=4, seed=7, long_documents=LongDocuments(20))
print(json.dumps([[pack.input_ids, pack.cu_seqlens] for step in (123, 5) for pack in stage[step]]))
"""
    output = subprocess.run([sys.executable, "-c", program, str(folder), str(other)], capture_output=True, check=True)
    stage = stage_of({folder: 1.0, other: 2.0}, long_documents=LongDocuments(20))
    expected = [[pack.input_ids, pack.cu_seqlens] for step in (123, 5) for pack in stage[step]]
    assert json.loads(output.stdout) == expected


@pytest.mark.parametrize("world", (1, 2, 3, 6))
def test_slices_of_ranks_partition_the_step(folder, other, world):
    stage = stage_of({folder: 3.0, other: 1.0}, sequences_per_step=6)
    for step in (0, 41):
        parts = [stage.slice(step, rank, world) for rank in range(world)]
        assert {len(part) for part in parts} == {6 // world}
        assert [one for part in parts for one in part] == stage[step]


def test_shares_of_tokens_converge_to_the_weights(folder, other, tmp_path):
    third = prepare(tmp_path / "three", [30] * 40, 1 << 18)
    stage = stage_of({folder: 2.0, other: 1.0, third: 0.2}, sequences_per_step=50)
    shares = np.zeros(3)
    for step in range(60):
        for one in stage[step]:
            token = one.input_ids[1]
            shares[1 if token > 1 << 19 else 2 if token > 1 << 18 else 0] += len(one.input_ids)
    # 3,000 sequences: the error falls as 1 / sequences, plus the spread of the fill of packs; measured 0.4 %
    np.testing.assert_allclose(shares / shares.sum(), np.array([2.0, 1.0, 0.2]) / 3.2, rtol=0.01)
    assert stage.tokens_per_step == pytest.approx(shares.sum() / 60, rel=0.01)


def test_each_stretch_of_steps_holds_the_mixture(folder, other):
    stage = stage_of({folder: 1.0, other: 1.0}, sequences_per_step=8)
    counts = [sum(one.input_ids[1] > 1 << 19 for one in stage[step]) for step in range(40)]
    assert max(counts) - min(counts) <= 1


def test_long_documents_appear_as_often_as_the_rule_says(tmp_path):
    lengths = np.repeat([5, 10, 15, 20, 40, 80, 300], 30)
    shards = TokenShards(prepare(tmp_path / "data", lengths))
    packs = PackedShards(shards, 1000, long_documents=LongDocuments(above=10, exponent=0.5, at_most=4.0), seed=(3,))
    seen = collections.Counter(document for one in packs for document in documents_of([one]))
    times = np.array([seen[tuple(shards.document(index).tolist())] for index in range(len(shards))])
    for length, expected in ((5, 1), (10, 1), (15, 1.5**0.5), (20, 2**0.5), (40, 2), (80, 8**0.5), (300, 4)):
        chosen = times[lengths == length]
        assert set(chosen) <= {int(np.floor(expected)), int(np.ceil(expected))}
        assert chosen.mean() == pytest.approx(expected, abs=1 / 30 + 1e-3)
    assert packs.tokens == (times * lengths).sum()


def test_every_rounding_up_comes_about_with_some_seed():
    lengths = np.full(8, 15)
    rule = LongDocuments(above=10, exponent=1.0, at_most=4.0)  # 1.5 times
    times = np.array([rule.times(lengths, phase) for phase in range(0, 1 << 16, 1 << 10)])
    assert (times.mean(0) == 1.5).all() and (times.sum(1) == 12).all()


def test_without_a_bos_token_nothing_is_put_before_a_piece(tmp_path):
    folder = prepare(tmp_path / "data", [250], tokenizer={**TOKENIZER, "bos_token_id": None})
    stage = stage_of(folder, sequences_per_step=3)
    pieces = sorted(documents_of(stage[0]), key=len, reverse=True)
    assert [len(piece) for piece in pieces] == [LENGTH, LENGTH, 250 - 2 * LENGTH]


def test_the_validation_split_is_read_like_any_sequence(tmp_path):
    folder = prepare(tmp_path / "data", [50, 60, 20], split="validation")
    packs = PackedShards(TokenShards(folder, "validation"), LENGTH)
    assert [len(one.input_ids) for one in packs] == [80, 50]
    assert packs[-1] == packs[1]


def test_the_plan_of_a_million_documents_takes_seconds():
    lengths = log_uniform(4, 1_000_000, 60_000)
    packs = assign_packs(lengths, 65_536)
    fill = np.bincount(packs, lengths)
    assert fill.max() <= 65_536 and fill.mean() > 0.99 * 65_536


def test_bad_inputs_are_named(folder, other, tmp_path):
    for weights, message in (
        ({}, "folders: expected at least one, got none"),
        ({folder: 0.0}, "weight of .*: expected a number above 0, got 0.0"),
        ({folder: 1.0, other: float("nan")}, "weight of .*: expected a number above 0, got nan"),
        ({tmp_path / "nowhere": 1.0}, "expected a folder that `moe-lc prepare` has finished"),
    ):
        with pytest.raises(ValueError, match=message):
            stage_of(weights)
    with pytest.raises(ValueError, match="sequence_length: expected more than the 1 tokens of the prefix, got 1"):
        StageData({str(folder): 1.0}, sequence_length=1, sequences_per_step=4)
    with pytest.raises(ValueError, match="sequences_per_step: expected at least 1, got 0"):
        stage_of(folder, sequences_per_step=0)
    with pytest.raises(ValueError, match="seed: expected at least 0, got -1"):
        stage_of(folder, seed=-1)
    with pytest.raises(ValueError, match="above: expected at least 1, got 0"):
        LongDocuments(above=0)
    with pytest.raises(ValueError, match="at_most: expected at least 1, got 0.5"):
        LongDocuments(above=10, at_most=0.5)
    with pytest.raises(ValueError, match="exponent: expected at least 0, got -1"):
        LongDocuments(above=10, exponent=-1)
    empty = prepare(tmp_path / "empty", [9], split="validation")
    write_manifest(empty, {"tokenizer": TOKENIZER, "splits": {"train": {"shards": []}}})
    with pytest.raises(ValueError, match="empty: expected documents in the split 'train', got none"):
        stage_of(empty)
    foreign = prepare(tmp_path / "foreign", [9], tokenizer={**TOKENIZER, "fingerprint": "xyz"})
    with pytest.raises(ValueError, match="foreign: expected the tokenizer of .*one, got another"):
        stage_of({folder: 1.0, foreign: 1.0})
    stage = stage_of(folder)
    with pytest.raises(ValueError, match="step: expected at least 0, got -1"):
        stage[-1]
    with pytest.raises(ValueError, match="world: expected a divisor of the 4 sequences of a step, got 3"):
        stage.slice(0, 0, 3)
    with pytest.raises(ValueError, match="rank: expected 0 to 1, got 2"):
        stage.slice(0, 2, 2)
