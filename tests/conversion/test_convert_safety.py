"""Nothing is written for a checkpoint that is not whole; what was begun goes on after any death with the same bytes."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modeling_moe_lc.conversion import convert as command
from modeling_moe_lc.conversion.convert import parse_size
from modeling_moe_lc.conversion.convert_plan import grouped
from modeling_moe_lc.training.cli import main


FIXTURES = Path(__file__).parents[1] / "fixtures"
EXPERTS = "language_model.model.layers.1.block_sparse_moe.experts"


def changed(folder, fixture, tensors=lambda found: None, config=lambda raw: None):
    """A copy of a fixture after `tensors` and `config` have changed its content."""
    folder.mkdir()
    found = load_file(FIXTURES / fixture / "model.safetensors")
    raw = json.loads((FIXTURES / fixture / "config.json").read_text())
    tensors(found), config(raw)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.fixture
def refused(tmp_path, capsys):
    """Runs a conversion that must be refused before anything is written; returns the message."""

    def run(source, *options):
        assert main(["convert", str(source), str(tmp_path / "out"), *options]) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    return run


def test_the_complete_list_of_what_is_wrong_comes_before_anything_is_written(tmp_path, refused):
    def change(found):
        del found[f"{EXPERTS}.3.w2.weight"], found[f"{EXPERTS}.5.w2.weight"]
        del found["mm_projector.post_norm.weight"]
        found["language_model.model.layers.2.self_attn.q_proj.weight"] = torch.zeros(3, 4)
        found["language_model.model.layers.0.self_attn.dt_bias"] = torch.zeros(160).bfloat16()
        found["language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias"] = torch.zeros(
            8
        ).bfloat16()
        found["language_model.model.layers.0.self_attn.q_conv1d.weight"] = torch.zeros(4, 160)
        found["language_model.model.layers.1.self_attn.A_log"] = torch.ones(128)
        found["language_model.model.norm.weight"] = torch.zeros(144, dtype=torch.int8)
        for layer in range(3):
            found[f"language_model.model.layers.{layer}.mtp.weight"] = torch.zeros(2)

    message = refused(changed(tmp_path / "source", "k3-text-tiny", change))
    for line in (
        "3 missing:",
        f"{EXPERTS}.{{3,5}}.w2.weight  (2)",
        "mm_projector.post_norm.weight",
        "5 of another shape or dtype:",
        "layers.2.self_attn.q_proj.weight  expected BF16/F16/F32 [160, 144], got F32 [3, 4]",
        "layers.0.self_attn.dt_bias  expected F32 [160], got BF16 [160]",
        "e_score_correction_bias  expected F32 [8], got BF16 [8]",
        "q_conv1d.weight  expected F32 [160, 1, 4] or [160, 4], got F32 [4, 160]",
        "norm.weight  expected BF16/F16/F32 [144], got I8 [144]",
        "1 wrong values:",
        "layers.1.self_attn.A_log  expected 5 values and zeros after them",
        "3 unexpected:",
        "layers.{0-2}.mtp.weight  F32 [2]  (3)",
    ):
        assert line in message


def test_fused_experts_are_not_taken_for_missing_ones(tmp_path, refused):
    def change(found):
        for name in [name for name in found if ".1.block_sparse_moe.experts." in name and ".w2." in name]:
            del found[name]
        found[f"{EXPERTS}.down_proj"] = torch.zeros(8, 96, 64).bfloat16()

    message = refused(changed(tmp_path / "source", "k3-text-tiny", change))
    assert f"{EXPERTS}.{{0-7}}.w2.weight  (8)" in message and f"{EXPERTS}.down_proj" in message


def test_packed_experts_need_their_scales_and_bytes(tmp_path, refused):
    def change(found):
        del found[f"{EXPERTS}.0.w1.weight_scale"]
        found[f"{EXPERTS}.1.w1.weight_packed"] = torch.zeros(64, 48, dtype=torch.int8)

    message = refused(changed(tmp_path / "source", "k3-text-tiny-mxfp4", change))
    assert f"{EXPERTS}.0.w1.weight_scale" in message
    assert f"{EXPERTS}.1.w1.weight_packed  expected U8 [64, 48], got I8 [64, 48]" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(model_type="llama"), "model_type: expected one of"),
        (lambda raw: raw.update(text_config=3), "text_config: expected an object"),
        (lambda raw: raw["text_config"].update(quantization_config={"quant_method": "gptq"}), "quantization_config"),
        (lambda raw: raw["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"].update(
            num_bits=8), "num_bits"),
        (lambda raw: raw["text_config"]["quantization_config"].update(format="pack-quantized"), "pack-quantized"),
        (lambda raw: raw["text_config"].update(num_experts=10**9), "num_experts|layers and experts"),
        (lambda raw: raw["text_config"].update(num_hidden_layers=10**9), "layers"),
        (lambda raw: raw["text_config"]["linear_attn_config"]["kda_layers"].pop(), "every layer from 1 to 9"),
    ],
)  # fmt: skip
def test_a_config_that_is_none_of_ours_is_refused_by_field(change, message, tmp_path, refused):
    assert re.search(message, refused(changed(tmp_path / "source", "k3-text-tiny-mxfp4", config=change)))


def test_names_that_begin_like_another_are_other_names(tmp_path, refused):
    def change(found):
        found[f"{EXPERTS}.0.w1.weight_scale_inv"] = torch.zeros(3)

    assert "weight_scale_inv" in refused(changed(tmp_path / "source", "k3-text-tiny-mxfp4", change))


def test_the_disk_is_looked_at_first(monkeypatch, refused):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**6))
    assert "free bytes on its disk, got 1,000,000" in refused(FIXTURES / "k3-text-tiny")


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--workers", "0"], "workers: expected at least 1"), (["--shard-size", "many"], "shard_size: expected a size")],
)
def test_bad_options_are_named(options, message, refused):
    assert message in refused(FIXTURES / "k3-text-tiny", *options)


def test_sizes():
    assert [parse_size(text) for text in ("5GB", "1.5 kb", "2MiB", "7", "1g")] == [5 * 10**9, 1500, 2**21, 7, 10**9]


def test_the_source_is_never_the_destination(tmp_path, capsys):
    shutil.copytree(FIXTURES / "kimi-linear-tiny", tmp_path / "same")
    assert main(["convert", str(tmp_path / "same"), str(tmp_path / "same")]) == 2
    assert "another folder" in capsys.readouterr().err


def test_a_dry_run_says_what_the_real_one_writes(tmp_path, capsys):
    options = [
        str(FIXTURES / "k3-text-tiny-mxfp4"),
        str(tmp_path / "out"),
        "--dtype",
        "bfloat16",
        "--shard-size",
        "1MB",
    ]
    assert main(["convert", *options, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert main(["convert", *options]) == 0
    written = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert all(size <= 10**6 for size in written.values())
    files = re.findall(r"^  (\S+) +([\d,]+) bytes", said, re.MULTILINE)
    assert {name: int(size.replace(",", "")) for name, size in files} == written
    assert f"{len(written)} files, {sum(written.values()):,} bytes" in said
    assert "layers.{1-8}.block_sparse_moe.experts.{0-7}.w1.weight  BF16 [64, 96]  (64)" in said


def test_groups_of_names_say_all_of_them():
    names = [f"l.{i}.e.{j}.w" for i in (1, 2, 5) for j in range(3)]
    assert list(grouped((name, "") for name in names)) == ["l.{1-2,5}.e.{0-2}.w  (9)"]
    assert list(grouped((name, "") for name in names[:-1])) == names[:-1]
    assert list(grouped([("a", "x"), ("b.10", "")])) == ["a  x", "b.10"]


class TestResume:
    OPTIONS = ("--layout", "own", "--shard-size", "300KB", "--workers", "2")

    def run(self, out, *options, source=FIXTURES / "kimi-linear-tiny"):
        return main(["convert", str(source), str(out), *self.OPTIONS, *options])

    def content(self, folder):
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    def interrupted(self, monkeypatch, out, shards, source=FIXTURES / "kimi-linear-tiny"):
        """A conversion that fails once `shards` shards are in the journal."""
        original = command.Journal.append

        def append(journal, name, size):
            original(journal, name, size)
            if len(journal.done) == shards:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(command.Journal, "append", append)
            assert self.run(out, source=source) == 130

    def test_goes_on_where_it_was_and_does_not_write_finished_shards_again(self, tmp_path, monkeypatch, capsys):
        self.run(tmp_path / "whole")
        self.interrupted(monkeypatch, tmp_path / "out", 3)
        kept = {path: path.stat().st_ino for path in (tmp_path / "out").glob("model-0000[123]*")}
        assert len(kept) == 3
        assert self.run(tmp_path / "out") == 2
        assert "--resume" in capsys.readouterr().err
        assert self.run(tmp_path / "out", "--resume", "--verify") == 0
        assert kept == {path: path.stat().st_ino for path in kept}
        assert self.content(tmp_path / "out") == self.content(tmp_path / "whole")
        assert self.run(tmp_path / "out", "--resume") == 0
        assert "is complete" in capsys.readouterr().out

    def test_another_conversion_or_a_changed_source_is_not_mixed_in(self, tmp_path, monkeypatch, capsys):
        source = shutil.copytree(FIXTURES / "kimi-linear-tiny", tmp_path / "source")
        self.interrupted(monkeypatch, tmp_path / "out", 2, source=source)
        assert self.run(tmp_path / "out", "--resume", "--dtype", "float32", source=source) == 2
        assert "plan: expected" in capsys.readouterr().err
        os.utime(source / "model.safetensors", (1, 1))
        assert self.run(tmp_path / "out", "--resume", source=source) == 2
        assert "files of the source: expected" in capsys.readouterr().err

    def test_a_finished_shard_that_was_cut_is_noticed(self, tmp_path, monkeypatch, capsys):
        self.interrupted(monkeypatch, tmp_path / "out", 2)
        os.truncate(next((tmp_path / "out").glob("model-00001*")), 100)
        assert self.run(tmp_path / "out", "--resume") == 2
        assert "as when it was finished, got 100" in capsys.readouterr().err

    def test_a_folder_with_other_things_in_it_is_left_alone(self, tmp_path, capsys):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine.txt").write_text("mine")
        for options in ([], ["--resume"]):
            assert self.run(tmp_path / "out", *options) == 2
            assert "expected a new or an empty folder" in capsys.readouterr().err
        assert self.content(tmp_path / "out") == {"mine.txt": b"mine"}

    def test_a_read_that_fails_stops_all_threads_and_can_be_tried_again(self, tmp_path, monkeypatch, capsys):
        calls = itertools.count()

        def read(checkpoint, *args):
            if next(calls) == 100:
                raise ValueError("this disk is broken")
            return original(checkpoint, *args)

        original = command.Checkpoint.read
        with monkeypatch.context() as patch:
            patch.setattr(command.Checkpoint, "read", read)
            with pytest.raises(ValueError, match="broken"):
                self.run(tmp_path / "out")
        assert self.run(tmp_path / "out", "--resume", "--verify") == 0

    def test_verify_finds_a_flipped_bit(self, tmp_path, capsys):
        self.run(tmp_path / "out")
        shard = next((tmp_path / "out").glob("model-00002*"))
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
        assert self.run(tmp_path / "out", "--resume", "--verify") == 2
        assert "got other bytes in model." in capsys.readouterr().err


KILLER = """
    import os
    import random
    import signal
    import sys
    from pathlib import Path

    import torch

    from modeling_moe_lc.conversion import convert
    from modeling_moe_lc.training.cli import main

    torch.set_num_threads(1)
    convert.PIECE = 1 << 14
    source, out = sys.argv[1:]
    rng = random.Random(0)


    def dying(function, calls):
        # kill -9 either before or after the n-th call of anything that changes the disk
        def wrapped(*args, **kwargs):
            calls[0] -= 1
            if calls[0] == 0 and rng.random() < 0.5:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if calls[0] <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped


    deaths, kept = 0, {}
    for trial in range(200):
        limit, state = rng.choice([4, 60, 250]), rng.random()
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            rng.seed(state)
            calls = [rng.randint(1, limit)]
            for name in ("pwrite", "replace", "fsync", "unlink", "truncate"):
                setattr(os, name, dying(getattr(os, name), calls))
            os._exit(main(["convert", source, out, "--layout", "own", "--shard-size", "300KB", "--workers", "2", "--resume"]))
        status = os.waitpid(child, 0)[1]
        journal = Path(out, ".convert.jsonl")
        done = [line.split('"')[1] for line in journal.read_text().splitlines()[1:]] if journal.exists() else []
        for name, inode in kept.items():
            assert os.stat(Path(out, name)).st_ino == inode, f"{name} was written again"
        kept |= {name: os.stat(Path(out, name)).st_ino for name in done}
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            print("deaths", deaths)
            break
        deaths += 1
    """


def test_killed_at_random_moments_it_ends_with_the_same_bytes(tmp_path):
    source = FIXTURES / "kimi-linear-tiny"
    main(["convert", str(source), str(tmp_path / "whole"), "--layout", "own", "--shard-size", "300KB"])
    command_line = [sys.executable, "-c", textwrap.dedent(KILLER), str(source), str(tmp_path / "out")]
    done = subprocess.run(command_line, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= 5
    whole, out = ({path.name: path.read_bytes() for path in (tmp_path / n).iterdir()} for n in ("whole", "out"))
    assert out == whole
