"""Documents from anywhere become the same shards, whatever the workers and however often the work was killed."""

import contextlib
import functools
import gzip
import hashlib
import http.server
import itertools
import json
import multiprocessing
import os
import re
import signal
import threading
from pathlib import Path

import fsspec
import pytest
from transformers import AutoTokenizer

from modeling_moe_lc.training import prepare, shards
from modeling_moe_lc.training.cli import main
from modeling_moe_lc.training.corpus import Document, is_held_out
from modeling_moe_lc.training.sources import LeftOut, Reading, iterate_records, list_items
from modeling_moe_lc.training.tokenizer import train_tokenizer


VOCAB, SHARD_TOKENS, SHARE = 300, 2_000, 0.2
TEXTS = {
    f"part_{number:02d}.py": f"def function_{number}():\n    return {number}\n" * (1 + number**2 // 8)
    for number in range(30)
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    (folder / "latin.py").write_bytes(b"# \xe9\n")
    (folder / "empty.py").write_bytes(b"")
    (folder / "notes.rst").write_text("not asked for")
    return folder


def arguments(corpus, out):
    return [
        *("prepare", str(corpus), "--out", str(out), "--suffixes", ".py", "--train-tokenizer", str(VOCAB)),
        *("--shard-tokens", str(SHARD_TOKENS), "--validation-share", str(SHARE), "--workers", "1"),
    ]


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "data"
    assert main(arguments(corpus, out)) == 0
    return out


def files_of(folder):
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def texts_of(folder, split):
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    data = shards.TokenShards(folder, split)
    documents = [data.document(index).tolist() for index in range(len(data))]
    assert all(one[0] == tokenizer.bos_token_id and one[-1] == tokenizer.eos_token_id for one in documents)
    return [tokenizer.decode(one[1:-1]) for one in documents]


def records_of(source, **reading):
    return [record for *_, record in iterate_records(list_items([str(source)], Reading(**reading)))]


def test_every_document_is_in_the_split_of_its_name_with_its_text(whole):
    for split, held_out in (("train", False), ("validation", True)):
        assert texts_of(whole, split) == [text for name, text in TEXTS.items() if is_held_out(name, SHARE) == held_out]


def test_the_manifest_counts_what_there_is(whole, corpus):
    manifest = shards.read_manifest(whole)
    counts = manifest["sources"][str(corpus)]
    assert (counts["documents"], counts["empty"], counts["not UTF-8"]) == (len(TEXTS), 1, 1)
    assert counts["tokens"] == sum(manifest["splits"][split]["tokens"] for split in ("train", "validation"))
    for split, part in manifest["splits"].items():
        lengths = shards.TokenShards(whole, split).lengths
        assert (part["documents"], part["tokens"]) == (len(lengths), lengths.sum())
        rows = part["lengths"]
        assert sum(row["documents"] for row in rows) == len(lengths)
        for row in rows:
            chosen = lengths[(lengths <= row["up_to"]) & (lengths > row["up_to"] // 2)]
            assert (row["documents"], row["tokens"]) == (len(chosen), chosen.sum())
    assert len(manifest["splits"]["train"]["shards"]) > 3
    assert manifest["tokenizer"]["vocab_size"] <= VOCAB
    assert {shard["dtype"] for shard in manifest["splits"]["train"]["shards"]} == {"uint16"}


def test_three_workers_write_the_same_bytes_as_one(whole, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "BATCH", 1 << 10)  # several batches for each worker
    assert main([*arguments(corpus, tmp_path / "data")[:-1], "3"]) == 0
    assert files_of(tmp_path / "data") == files_of(whole)


def die_at(replacement, command):
    """Runs the command in a fork that is killed when it is about to rename its n-th file, or just after."""
    count, after = replacement
    calls = itertools.count(1)
    rename = os.replace

    def replace(*args):
        call = next(calls)
        if call == count and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(*args)
        if call == count:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace
    main(command)


@pytest.mark.parametrize(
    "replacements", ([(1, True)], [(2, False), (3, True)], [(6, False)], [(7, True), (4, True), (3, False)])
)
def test_killed_and_resumed_is_uninterrupted(whole, corpus, tmp_path, replacements):
    out = tmp_path / "data"
    for replacement in replacements:
        process = multiprocessing.get_context("fork").Process(
            target=die_at, args=(replacement, arguments(corpus, out))
        )
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not (out / "manifest.json").exists()
    assert main(arguments(corpus, out)) == 0
    assert files_of(out).items() >= files_of(whole).items()
    assert all(name.rpartition("/")[2].startswith(".") for name in files_of(out).keys() - files_of(whole).keys())


def test_interrupted_in_the_middle_of_a_journal_line(whole, corpus, tmp_path, monkeypatch):
    out, append = tmp_path / "data", prepare.Journal.append

    def interrupted(journal, entry):
        if len(journal.entries) == 2:
            with journal.path.open("ab") as file:
                file.write(json.dumps(entry).encode()[:20])
            raise KeyboardInterrupt
        append(journal, entry)

    with monkeypatch.context() as patch:
        patch.setattr(prepare.Journal, "append", interrupted)
        assert main(arguments(corpus, out)) == 130
    assert main(arguments(corpus, out)) == 0
    assert files_of(out) == files_of(whole)


def test_a_finished_folder_is_left_alone_and_other_settings_are_refused(whole, corpus, capsys):
    before = files_of(whole)
    assert main(arguments(corpus, whole)) == 0
    assert "is complete" in capsys.readouterr().out
    assert main([*arguments(corpus, whole), "--text-field", "content"]) == 2
    message = "text_field: expected 'text', with which"
    error = capsys.readouterr().err
    assert message in error and f"another --out, or delete {whole}" in error
    assert files_of(whole) == before


def test_a_share_that_holds_nothing_out_is_named(tmp_path, capsys):
    for number in range(4):
        (tmp_path / f"part_{number}.py").write_text("pass\n")
    for share, said in (("1e-9", True), ("0", False)):
        assert main([*arguments(tmp_path, tmp_path / share), "--validation-share", share]) == 0
        warning = "none of the 4 documents is held out"
        error = capsys.readouterr().err
        assert (warning in error) == said == ("--validation-share" in error)


def test_a_resumed_run_refuses_other_files_and_a_truncated_shard(corpus, tmp_path, monkeypatch, capsys):
    source, out = tmp_path / "source", tmp_path / "data"
    source.mkdir()
    for name, text in TEXTS.items():
        (source / name).write_text(text)
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_finish", lambda *_: None)
        assert main(arguments(source, out)) == 0
    (source / "new.py").write_text("pass\n")
    assert main(arguments(source, out)) == 2
    error = capsys.readouterr().err
    assert f"files: expected what {out} was begun with, got something else" in error
    assert not re.search("[0-9a-f]{64}", error)
    (source / "new.py").unlink()
    shard = out / "train" / "00001.tokens"
    shard.write_bytes(shard.read_bytes()[:-2])
    assert main(arguments(source, out)) == 2
    assert "train/00001.tokens: expected" in capsys.readouterr().err


def test_an_existing_tokenizer_is_used_and_saved_beside_the_data(corpus, tmp_path):
    tokenizer = train_tokenizer(TEXTS.values(), 280, model_max_length=64)
    tokenizer.backend_tokenizer.enable_truncation(5)  # would silently cut documents
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    command = arguments(corpus, tmp_path / "data")
    place = command.index("--train-tokenizer")
    command[place : place + 2] = ["--tokenizer", str(tmp_path / "tokenizer")]
    assert main(command) == 0
    assert sorted(texts_of(tmp_path / "data", "train") + texts_of(tmp_path / "data", "validation")) == sorted(
        TEXTS.values()
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "data" / "tokenizer").get_vocab() == tokenizer.get_vocab()


ROWS = [{"text": f"row {number} – 漢字"} for number in range(7)]
EXPECTED = [row["text"] for row in ROWS]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def write_table(path, rows=ROWS, **more):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(rows), path, **more)


@contextlib.contextmanager
def served(folder):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_lines_and_tables_give_rows_from_any_start(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    write_table(tmp_path / "c.parquet", row_group_size=3)
    items = list_items([str(tmp_path)], Reading())
    assert [item.name for item in items] == ["a.jsonl", "b.jsonl.gz", "c.parquet"]
    for item in items:
        for start in range(9):
            records = list(item.read(start))
            assert [record.text for record in records] == EXPECTED[start:]
            assert [record.name for record in records] == [f"{item.name}:{row}" for row in range(start + 1, 8)]


def test_object_storage_is_read_like_a_folder(tmp_path):
    storage = fsspec.filesystem("memory")
    storage.pipe(
        {"/bucket/b/two.txt": b"two", "/bucket/one.md": b"one", "/bucket/.git/x.txt": b"x", "/bucket/l.jsonl": LINES}
    )
    try:
        assert [record.name for record in records_of("memory://bucket")][-2:] == ["l.jsonl:7", "one.md"]
        assert [record.text for record in records_of("memory://bucket")] == ["two", *EXPECTED, "one"]
        assert records_of("memory://bucket/one.md") == [Document("one.md", "one")]
    finally:
        storage.rm("/bucket", recursive=True)


def test_files_over_http(tmp_path):
    (tmp_path / "a.txt").write_text("naïve\r\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    write_table(tmp_path / "c.parquet")
    with served(tmp_path) as url:
        assert records_of(f"{url}/a.txt?download=true") == [Document("a.txt", "naïve\r\n")]
        for name in ("b.jsonl.gz", "c.parquet"):
            assert [record.text for record in records_of(f"{url}/{name}")] == EXPECTED


def test_a_dataset_is_streamed_from_any_row(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "train.jsonl").write_bytes(LINES)
    for source in (f"hf:{tmp_path}", f"hf:{tmp_path}:default:train", f"hf:{tmp_path}::train"):
        [item] = list_items([source], Reading())
        for start in (0, 5):
            assert [record.text for record in item.read(start)] == EXPECTED[start:]
        assert next(item.read(5)).name == f"{source}:6"


def test_a_folder_joined_is_one_document(tmp_path):
    for name in ("a/one.py", "a/b/two.py", "a/b/three.py", "four.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}")
    (tmp_path / "a/empty.py").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path)
    three, two, one, four = (f"{name}\n# {name}\n" for name in ("a/b/three.py", "a/b/two.py", "a/one.py", "four.py"))
    empty = LeftOut("a/empty.py", "empty")
    joined = functools.partial(records_of, tmp_path, suffixes=(".py",))
    assert joined(join_depth=9) == [Document("a/b", three + two), empty, Document("a", one), Document(".", four)]
    assert joined(join_depth=1) == [empty, Document("a", three + two + one), Document(".", four)]
    assert joined(join_depth=0) == [empty, Document(".", three + two + one + four)]


def test_what_gives_no_document_is_left_out_with_its_reason(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n\n{"text": null}\n{"text": "\\ud800"}\n{"text": "\xe9"}\n')
    write_table(tmp_path / "b.parquet", [{"text": "x"}, {"text": None}, {"text": ""}])
    (tmp_path / "c.txt").write_bytes(b"\xff")
    reasons = {record.name: getattr(record, "reason", None) for record in records_of(tmp_path)}
    assert reasons == {
        "a.jsonl:1": None,
        "a.jsonl:2": "empty",
        "a.jsonl:3": "empty",
        "a.jsonl:4": "not UTF-8",
        "a.jsonl:5": "not UTF-8",
        "b.parquet:1": None,
        "b.parquet:2": "empty",
        "b.parquet:3": "empty",
        "c.txt": "not UTF-8",
    }


def test_bad_sources_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "x"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": 3}\n')
    (tmp_path / "c.jsonl").write_text("text\n")
    write_table(tmp_path / "d.parquet", [{"content": "x"}])
    for name, message in (
        ("nowhere", "source: expected a file, a folder, a URL or hf:NAME, got .*nowhere"),
        ("a.jsonl", r"a.jsonl:1: expected an object with the field 'text', got the fields \['content'\]"),
        ("b.jsonl", "b.jsonl:1: expected text in the field 'text', got int"),
        ("c.jsonl", "c.jsonl:1: expected a JSON object"),
        ("d.parquet", r"d.parquet: expected a column 'text' of strings, got \['content'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            records_of(tmp_path / name)
    with pytest.raises(ValueError, match="expected files that end in .py, got none"):
        records_of(tmp_path, suffixes=(".py",))
    with pytest.raises(ValueError, match="suffixes: expected a dot and letters, as in '.py', got 'py'"):
        Reading(suffixes=("py",))


@pytest.mark.parametrize(
    "more, message",
    (
        (("--validation-share", "1"), "validation_share: expected a number from 0 to below 1, got 1.0"),
        (("--workers", "0"), "workers: expected at least 1, got 0"),
        (("--shard-tokens", "0"), "shard_tokens: expected at least 1, got 0"),
        (("--train-tokenizer", "9"), "vocab_size: expected at least 267"),
        (("--join-depth", "-1"), "join_depth: expected at least 0, got -1"),
    ),
)
def test_bad_settings_are_named(corpus, tmp_path, capsys, more, message):
    assert main([*arguments(corpus, tmp_path / "data"), *more]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_sources_without_a_document_to_train_on_are_named(tmp_path, capsys):
    (tmp_path / "empty.py").write_text("")
    assert main(arguments(tmp_path, tmp_path / "data")) == 2
    assert "sources: expected documents to train on, got" in capsys.readouterr().err
    assert not Path(tmp_path / "data").exists()


def test_bad_input_leaves_only_what_was_there(tmp_path, capsys):
    tokenizer, source, out = tmp_path / "tokenizer", tmp_path / "rows.jsonl", tmp_path / "data"
    train_tokenizer(TEXTS.values(), 280, model_max_length=64).save_pretrained(tokenizer)
    source.write_text('{"text": "x"}\n{"content": "x"}\n')
    reader = ("--tokenizer", str(tokenizer)), ("--train-tokenizer", "280")
    for there in ([], ["mine.txt"]):
        if there:
            out.mkdir()
            (out / "mine.txt").write_text("mine")
        for how in reader:
            assert main(["prepare", str(source), "--out", str(out), "--workers", "1", *how]) == 2
            assert "rows.jsonl:2: expected" in capsys.readouterr().err
            assert out.exists() == bool(there) and sorted(files_of(out)) == there


def test_bad_input_behind_a_shard_leaves_the_shard(corpus, tmp_path, monkeypatch):
    out, append = tmp_path / "data", prepare.Journal.append

    def then_bad(journal, entry):
        append(journal, entry)
        raise ValueError("a bad line")

    with monkeypatch.context() as patch:
        patch.setattr(prepare.Journal, "append", then_bad)
        with pytest.raises(ValueError, match="a bad line"):
            main(arguments(corpus, out))
    assert len((out / "journal.jsonl").read_text().splitlines()) == 2
    assert (out / "train" / "00000.tokens").exists()
    assert main(arguments(corpus, out)) == 0


def test_a_tokenizer_outlives_a_source_that_could_not_be_reached(corpus, tmp_path, monkeypatch):
    out = tmp_path / "data"

    def unreachable(*_):
        raise OSError(5, "Input/output error", str(corpus))

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_write_shards", unreachable)
        assert main(arguments(corpus, out)) == 2
    trained = files_of(out / "tokenizer")
    assert main(arguments(corpus, out)) == 0
    assert trained and files_of(out / "tokenizer") == trained
