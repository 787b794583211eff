"""The corpus is the same in every run, its split belongs to each file, and text survives the tokenizer to the byte."""

import pytest

from modeling_moe_lc.training.corpus import is_held_out, iterate_documents, split_corpus, standard_library
from modeling_moe_lc.training.tokenizer import encode_documents, train_tokenizer


ODD_TEXT = "def f(x):\r\n\tif x == 'naïve – 漢字 🙂':\n        return  1_000.5e-3\x0c\n\n# <|eos|> trailing   \n\n"


@pytest.fixture
def folder(tmp_path):
    for name in ("b.py", "a/c.py", "a/b/d.py", "test/skipped.py", "notes.txt", "latin.py", "empty.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(f"# {name}\r\n".encode())
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "empty.py").write_bytes(b"")
    return tmp_path


def test_documents_are_the_exact_text_of_utf8_sources_in_a_fixed_order(folder):
    documents = list(iterate_documents(folder))
    assert [document.name for document in documents] == ["a/b/d.py", "a/c.py", "b.py"]
    assert all(document.text.encode() == (folder / document.name).read_bytes() for document in documents)


def test_a_folder_above_the_corpus_may_have_any_name(folder):
    assert [document.name for document in iterate_documents(folder / "test")] == ["skipped.py"]


def test_split_depends_on_the_name_alone_and_takes_about_its_share():
    names = [f"package/module_{number}.py" for number in range(4000)]
    held_out = {name for name in names if is_held_out(name, 0.05)}
    assert 0.04 < len(held_out) / len(names) < 0.06
    assert held_out < {name for name in names if is_held_out(name, 0.2)}
    # Fixed for ever: with another hash, files would change sides between two versions of the package.
    assert [number for number, name in enumerate(names[:60]) if name in held_out] == [2, 23, 43]


def test_split_of_the_standard_library_has_both_sides():
    training, held_out = split_corpus(iterate_documents(standard_library()), 0.05)
    assert 10 < len(held_out) < len(training) / 8
    assert not {document.name for document in training} & {document.name for document in held_out}


def test_bad_corpora_are_named(folder):
    with pytest.raises(ValueError, match="corpus: expected a folder"):
        list(iterate_documents(folder / "nowhere"))
    with pytest.raises(ValueError, match="held-out share: expected a number between 0 and 1, got 1.5"):
        split_corpus(iterate_documents(folder), 1.5)
    with pytest.raises(ValueError, match="got 3 and 0"):
        split_corpus(iterate_documents(folder), 1e-9)


def test_tokenizer_gives_back_any_text_and_a_special_token_in_a_text_stays_text(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = train_tokenizer(["def f(x):\n    return x + 1\n"] * 3, 300, model_max_length=64)
    tokenizer.save_pretrained(tmp_path)
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert (one.bos_token_id, one.eos_token_id, one.pad_token_id) == (0, 1, 2)
        [ids] = encode_documents(one, [ODD_TEXT])
        assert (ids[0], ids[-1]) == (0, 1)
        assert max(ids) < len(one) <= 300
        assert one.decode(ids[1:-1]) == ODD_TEXT
        assert not {0, 1, 2} & set(ids[1:-1])
        assert one(ODD_TEXT)["input_ids"] == one(ODD_TEXT, add_special_tokens=False)["input_ids"]
    assert encode_documents(one, [ODD_TEXT]) == encode_documents(tokenizer, [ODD_TEXT])


def test_a_vocabulary_too_small_for_the_bytes_is_named():
    with pytest.raises(ValueError, match="vocab_size: expected at least 267 .*, got 258"):
        train_tokenizer(["x"], 258, model_max_length=64)
