"""Packing keeps every document whole and apart, and a batch depends on the step number alone."""

import itertools
import random

import pytest
import torch

from modeling_moe_lc.training.packing import IGNORED, collate, count_tokens, pack, split_document


LENGTH = 97
BOS = 0


def documents(seed, count=211, longest=230):
    """Documents of log-uniform length; every token is unique, so that each can be traced."""
    chosen = random.Random(seed)
    ids = itertools.count(1)
    return [list(itertools.islice(ids, round(longest ** chosen.random()))) for _ in range(count)]


def documents_of(packs):
    return [
        one.input_ids[start:end] for one in packs for start, end in itertools.pairwise(one.cu_seqlens) if end > start
    ]


@pytest.mark.parametrize("seed", range(3))
def test_pack_keeps_every_document_that_fits_and_every_token_once(seed):
    originals = documents(seed)
    packs = pack(originals, LENGTH, prefix=[BOS])
    packed = documents_of(packs)
    assert all(document in packed for document in originals if len(document) <= LENGTH)
    tokens = sorted(token for document in packed for token in document if token != BOS)
    assert tokens == sorted(itertools.chain.from_iterable(originals))
    for one in packs:
        assert 0 < len(one.input_ids) <= LENGTH
        assert one.cu_seqlens[0] == 0 and one.cu_seqlens[-1] == len(one.input_ids)


@pytest.mark.parametrize("seed", range(3))
def test_no_later_document_would_have_fitted_into_an_earlier_pack(seed):
    packs = pack(documents(seed), LENGTH, prefix=[BOS])
    for earlier, later in itertools.combinations(packs, 2):
        assert len(earlier.input_ids) + later.cu_seqlens[1] > LENGTH
    assert count_tokens(packs) > 0.97 * LENGTH * (len(packs) - 1)


def test_pack_is_deterministic_and_fills_the_fullest_pack_that_fits():
    originals = documents(3)
    assert pack(originals, LENGTH) == pack(originals, LENGTH)
    sizes = [60, 50, 35, 40]  # 35 goes behind 60 (5 left), not behind 50 or 40
    packs = pack([[size] * size for size in sizes], 100)
    assert [sorted(set(one.input_ids)) for one in packs] == [[40, 60], [35, 50]]


@pytest.mark.parametrize("size", (1, LENGTH, LENGTH + 1, 5 * LENGTH + 3))
def test_pieces_of_a_long_document_join_to_the_document(size):
    document = list(range(1, size + 1))
    first, *others = split_document(document, LENGTH, prefix=[BOS])
    assert first + [token for piece in others for token in piece[1:]] == document
    assert all(piece[0] == BOS and len(piece) > 1 for piece in others)
    assert all(len(piece) == LENGTH for piece in (first, *others)[:-1])


def test_labels_predict_nothing_across_a_border():
    packs = pack(documents(4), LENGTH, prefix=[BOS])[:7]
    inputs = collate(packs)
    whole = documents_of(packs)
    assert inputs["input_ids"].tolist() == [[token for document in whole for token in document]]
    assert inputs["labels"].tolist() == [[token for document in whole for token in (IGNORED, *document[1:])]]
    assert inputs["position_ids"].tolist() == [[place for document in whole for place in range(len(document))]]
    borders = inputs["cu_seq_lens_q"]
    assert borders.dtype == torch.int32
    assert borders.tolist() == [0, *itertools.accumulate(map(len, whole))]


def test_bad_inputs_are_named():
    with pytest.raises(ValueError, match="length: expected more than the 1 tokens of the prefix, got 1"):
        split_document([1, 2], 1, prefix=[BOS])
    with pytest.raises(ValueError, match="document: expected at least one token"):
        pack([[1], []], LENGTH)
