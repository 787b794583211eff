"""A recipe is one equal thing as YAML, as a tree and on a command line; what it may not say is refused by its name."""

import dataclasses
import math

import numpy as np
import pytest

from modeling_moe_lc.training.recipe import (
    Factors,
    LongDocuments,
    Recipe,
    load_recipe,
    recipe_names,
    recipe_text,
)
from modeling_moe_lc.training.shards import write_manifest, write_shard


# 100 steps of 1,024 tokens in three stages: 60, 30 and 10.
SMALL = """
output_dir: runs/small
model: {base: tiny}
data: {folders: {web: data/web, code: data/code}}
tokens_per_step: 1_024
stages:
  - {name: short, sequence_length: 128, tokens: 6.1441e4, mixture: {web: 3, code: 1}, micro_batch: 2}
  - {name: middle, sequence_length: 256, tokens: 30_720}
  - {name: long, sequence_length: 1_024, tokens: 1.024e4, long_documents: {above: 256}, context_parallel: 2}
optimizer: {learning_rate: 2e-3}
"""


@pytest.fixture
def small(tmp_path):
    """Loads the small recipe with overrides."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)

    def load(*overrides: str) -> Recipe:
        return load_recipe(path, overrides)

    return load


def refusals(call, *arguments) -> list[str]:
    with pytest.raises(ValueError) as raised:
        call(*arguments)
    return str(raised.value).splitlines()


def settled(recipe: Recipe) -> Recipe:
    """Nothing left open: what a card says of a run stands in its file."""
    return dataclasses.replace(recipe, router_balance=recipe.balance)


# Reading and writing


@pytest.mark.parametrize("name", recipe_names())
def test_text_loads_as_an_equal_recipe(name, tmp_path):
    recipe = load_recipe(name)
    (tmp_path / "recipe.yaml").write_text(recipe_text(recipe))
    assert load_recipe(tmp_path / "recipe.yaml") == settled(recipe)
    assert all(f"{field.name}:" in recipe_text(recipe) for field in dataclasses.fields(Recipe))


def test_text_keeps_words_that_look_like_something_else(small, tmp_path):
    odd = small("--output_dir", "'1e9'", "--stages.0.name", "'no'", "--model.config", "{eos_token_id: [1, 2]}")
    assert (odd.output_dir, odd.stages[0].name, odd.model.config) == ("1e9", "no", {"eos_token_id": [1, 2]})
    (tmp_path / "odd.yaml").write_text(recipe_text(odd))
    assert load_recipe(tmp_path / "odd.yaml") == settled(odd)


def test_overrides_change_what_they_name(small):
    recipe = small(
        *("--optimizer.learning_rate", "3e-4", "--stages.0.tokens=1e9", "--stages.1.mixture", "{code: 2}"),
        *("--stages.2.long_documents.at_most", "2", "--stages.1.long_documents.above=64", "--model.compile"),
        *("--model.loss_chunk_size", "null", "--logging.trackers", "trackio", "tensorboard"),
        *("--router_balance.ema", "0", "--optimizer.betas", "[0.8, 0.9]", "--checkpoints.folder=s3://b/run?x=1"),
    )
    assert recipe.optimizer.learning_rate == 3e-4 and recipe.optimizer.betas == (0.8, 0.9)
    assert recipe.stages[0].tokens == 10**9 and type(recipe.stages[0].tokens) is int
    assert recipe.stages[1].mixture == {"code": 2.0} and recipe.stages[1].long_documents == LongDocuments(64)
    assert recipe.stages[2].long_documents == LongDocuments(256, at_most=2)
    assert recipe.model.compile is True and recipe.model.loss_chunk_size is None
    assert recipe.logging.trackers == ("trackio", "tensorboard") and recipe.router_balance.ema == 0.0
    assert recipe.checkpoint_folder == "s3://b/run?x=1" and small().checkpoint_folder == "runs/small/checkpoints"
    assert small("--logging.trackers", "trackio").logging.trackers == ("trackio",)


@pytest.mark.parametrize(
    ("words", "found"),
    (
        (["--optimizer.lr", "1"], "optimizer.lr: expected one of the fields kind, learning_rate"),
        (["--stages.0.mix", "1"], "stages.0.mix: expected one of the fields"),
        (["--speed", "1"], "speed: expected one of the fields output_dir, seed"),
        (["--stages.3.tokens", "1"], "stages.3.tokens: expected a number below 3 after 'stages', got '3'"),
        (["--stages.first.tokens", "1"], "stages.first.tokens: expected a number below 3"),
        (["--output_dir.name", "1"], "output_dir.name: expected a field, but output_dir is 'runs/small'"),
        (["3e-4"], "overrides: expected --NAME before a value, got '3e-4'"),
        (["--seed", "[1"], "--seed: expected YAML, got"),
        (["--seed", "1.5"], "seed: expected a whole number, got 1.5"),
        (["--seed", "true"], "seed: expected a whole number, got True"),
        (["--seed", "one"], "seed: expected a whole number, got 'one'"),
        (["--output_dir", "1"], "output_dir: expected text, got 1"),
        (["--model.compile", "1"], "model.compile: expected true or false, got 1"),
        (["--model.dtype", "bf16"], "model.dtype: expected one of 'bfloat16', 'float32', 'float64', got 'bf16'"),
        (["--optimizer.learning_rate", ".nan"], "optimizer.learning_rate: expected a number, got nan"),
        (
            ["--optimizer.clip_norm", "high"],
            "optimizer.clip_norm: expected a number or null, got 'high'",
        ),
        (["--optimizer.betas", "[0.9]"], "optimizer.betas: expected a list of 2, got [0.9]"),
        (["--router_balance.ema", "never"], "router_balance.ema: expected a number or one of 'auto', got 'never'"),
        (["--stages", "{}"], "stages: expected a list, got {}"),
        (["--stages.1", "8k"], "stages.1: expected a mapping, got '8k'"),
        (["--stages.1", "{name: x}"], "stages.1.sequence_length: expected a whole number, got nothing"),
        (["--stages.0.mixture", "{1: 2}"], "stages.0.mixture: expected names that are text, got 1"),
        (["--stages.0.mixture.web", "much"], "stages.0.mixture.web: expected a number, got 'much'"),
        (["--data", "null"], "data.folders: expected a mapping, got nothing"),
    ),
)
def test_what_does_not_fit_is_refused_by_name(small, words, found):
    assert any(line.startswith(found) for line in refusals(small, *words)), refusals(small, *words)


def test_files_that_are_no_recipe_are_refused(tmp_path):
    path = tmp_path / "broken.yaml"
    assert refusals(load_recipe, path)[0].startswith("recipe: expected a file or one of 1b-8k-to-1m, ")
    for text, found in (
        ("output_dir: [", "expected YAML"),
        ("output_dir: a\nseed: 1\noutput_dir: b", "output_dir: expected once"),
    ):
        path.write_text(text)
        lines = "\n".join(refusals(load_recipe, path))
        assert str(path) in lines and found in lines
    path.write_text("- a\n")
    assert refusals(load_recipe, path) == ["recipe: expected a mapping, got ['a']"]
    assert refusals(load_recipe, path, ["--output_dir", "x"]) == [
        "output_dir: expected a number below 1 first, got 'output_dir'"
    ]
    path.write_text("")
    fields = [line.partition(":")[0] for line in refusals(load_recipe, path)]
    assert fields == ["output_dir", "model", "data", "tokens_per_step", "stages", "optimizer"]


def test_all_problems_of_a_kind_come_at_once(small):
    wrong_types = refusals(
        small, "--seed", "x", "--speed", "1", "--stages.1.tokens", "few", "--optimizer.warmup_share", "0.3"
    )
    assert [line.partition(":")[0] for line in wrong_types] == ["speed", "seed", "stages.1.tokens"]
    contradictions = refusals(small, "--seed", "-1", "--stages.1.tokens", "0", "--optimizer.decay_share", "0.3")
    assert [line.partition(":")[0] for line in contradictions] == ["seed", "optimizer.decay_share", "stages.1.tokens"]


# Contradictions


@pytest.mark.parametrize(
    ("words", "found"),
    (
        ("--output_dir ''", "output_dir: expected a local folder"),
        ("--output_dir s3://bucket/run", "output_dir: expected a local folder"),
        ("--seed -1", "seed: expected 0 to 2^63 - 1, got -1"),
        (
            "--tokens_per_step 1000",
            "tokens_per_step: expected a multiple of stages.0.sequence_length x micro_batch (128 x 2), got 1000",
        ),
        (
            "--stages.2.tokens_per_step 1536",
            "stages.2.tokens_per_step: expected a multiple of stages.2.sequence_length x micro_batch (1024 x 1), got 1536",
        ),
        (
            "--stages.0.micro_batch 3",
            "tokens_per_step: expected a multiple of stages.0.sequence_length x micro_batch (128 x 3), got 1024",
        ),
        ("--stages.0.micro_batch 0", "stages.0.micro_batch: expected more than 0, got 0"),
        ("--stages.1.sequence_length 0", "stages.1.sequence_length: expected more than 0, got 0"),
        (
            "--stages.1.sequence_length 300",
            "tokens_per_step: expected a multiple of stages.1.sequence_length x micro_batch (300 x 1), got 1024",
        ),
        (
            "--stages.2.context_parallel 3",
            "stages.2.context_parallel: expected a divisor of the sequence_length 1024, got 3",
        ),
        ("--stages.1.tokens 1023", "stages.1.tokens: expected at least one step of 1024, got 1023"),
        ("--stages []", "stages: expected at least one, got ()"),
        ("--stages.1.name short", "stages.1.name: expected a name of its own, got 'short'"),
        ("--stages.1.name a.b", "stages.1.name: expected letters, digits, _ and -, got 'a.b'"),
        (
            "--stages.0.mixture.books 1",
            "stages.0.mixture.books: expected a name in data.folders (web, code), got 'books'",
        ),
        ("--stages.0.mixture.web 0", "stages.0.mixture.web: expected more than 0, got 0.0"),
        ("--stages.0.mixture {}", "stages.0.mixture: expected at least one folder, or null for all, got {}"),
        ("--stages.2.long_documents.above 0", "stages.2.long_documents.above: expected at least 1, got 0"),
        (
            "--stages.1.learning_rate_factor {start: 0.1, end: 0.2}",
            "stages.1.learning_rate_factor.end: expected 0 to start (0.1), got 0.2",
        ),
        (
            "--stages.1.learning_rate_factor {start: 2, end: 1}",
            "stages.1.learning_rate_factor.start: expected more than 0, at most 1, got 2.0",
        ),
        ("--data.folders {}", "data.folders: expected at least one, got {}"),
        ("--data.folders {a: x, b: x}", "data.folders.b: expected another folder than a, got 'x'"),
        ("--data.folders {a/b: x}", "data.folders.a/b: expected letters, digits, _ and - as name, got 'a/b'"),
        ("--data.validation_tokens 0", "data.validation_tokens: expected more than 0, got 0"),
        ("--optimizer.learning_rate 0", "optimizer.learning_rate: expected more than 0, got 0.0"),
        ("--optimizer.end_factor 1.5", "optimizer.end_factor: expected 0 to 1: the rate falls, got 1.5"),
        ("--optimizer.betas [0.9, 1.0]", "optimizer.betas.1: expected at least 0 and below 1, got 1.0"),
        ("--optimizer.momentum 1", "optimizer.momentum: expected at least 0 and below 1, got 1.0"),
        ("--optimizer.weight_decay -0.1", "optimizer.weight_decay: expected at least 0, got -0.1"),
        ("--optimizer.clip_norm 0", "optimizer.clip_norm: expected more than 0, got 0.0"),
        (
            "--optimizer.kind adamw --optimizer.momentum 0.9",
            "optimizer.momentum: expected null unless kind is 'muon', got 0.9",
        ),
        (
            "--optimizer.kind adamw --optimizer.router_on_muon",
            "optimizer.router_on_muon: expected false unless kind is 'muon', got True",
        ),
        ("--optimizer.decay_share 0.2", "optimizer.decay_share: expected null unless schedule is 'wsd', got 0.2"),
        (
            "--optimizer.schedule wsd --optimizer.decay_share 0",
            "optimizer.decay_share: expected more than 0, at most 1, got 0.0",
        ),
        ("--optimizer.warmup_share 1", "optimizer.warmup_share: expected at least 0 and below 1, got 1.0"),
        (
            "--stages.0.learning_rate_factor {start: 1, end: 1} --optimizer.warmup_share 0.7",
            "optimizer.warmup_share: expected at most the 60 steps of the first schedule for the warm-up, which is 70 steps, got 0.7",
        ),
        ("--router_balance.eta 0", "router_balance.eta: expected a positive number, got 0.0"),
        ("--router_balance.ema 1", "router_balance.ema: expected a number in [0, 1) or 'auto', got 1.0"),
        ("--router_balance.low 0.95", "router_balance.low, high: expected 0 <= low < high <= 1, got (0.95, 0.9)"),
        (
            "--model.start continue",
            "model.start: expected 'scratch' for the preset 'tiny', which has no weights, got 'continue'",
        ),
        (
            "--model.config {hiden_size: 3}",
            "model.config.hiden_size: expected a field of the configuration, got an unknown one",
        ),
        (
            "--model.config {loss_chunk_size: 3}",
            "model.config.loss_chunk_size: expected in model.loss_chunk_size, got 3",
        ),
        ("--model.config {router_balance: null}", "model.config.router_balance: expected in router_balance, got None"),
        ("--model.config {num_experts: 0}", "model.config: num_experts: expected a positive number, got 0"),
        ("--model.config {num_experts: many}", "model.config: MoeLcTextConfig: "),
        ("--model.loss_chunk_size 0", "model.loss_chunk_size: expected more than 0, got 0"),
        ("--checkpoints.keep 0", "checkpoints.keep: expected more than 0, got 0"),
        ("--checkpoints.every_minutes 0", "checkpoints.every_minutes: expected more than 0, got 0.0"),
        ("--logging.every_steps 0", "logging.every_steps: expected more than 0, got 0"),
        ("--logging.trackers paper", "logging.trackers.0: expected one of "),
        ("--limits.max_minutes 0", "limits.max_minutes: expected more than 0, got 0.0"),
    ),
)
def test_contradictions_are_refused_by_name(small, words, found):
    options = [word for part in f" {words}".split(" --")[1:] for word in (f"--{part}".split(" ", 1))]
    lines = refusals(small, *options)
    assert any(line.startswith(found) for line in lines), lines


def test_a_recipe_made_in_python_is_checked_as_well(small):
    recipe = small()
    found = refusals(lambda: dataclasses.replace(recipe, stages=recipe.stages[:1] * 2))
    assert found == ["stages.1.name: expected a name of its own, got 'short'"]


# Steps


def test_steps_of_stages(small):
    recipe = small()
    assert recipe.steps == (60, 30, 10) and recipe.ends == (
        60,
        90,
        100,
    )  # the last token of the first stage is left out
    assert [recipe.sequences_per_step(stage) for stage in range(3)] == [8, 4, 1]
    assert [recipe.stage_of(step) for step in (0, 59, 60, 89, 90, 99)] == [
        (0, 0),
        (0, 59),
        (1, 0),
        (1, 29),
        (2, 0),
        (2, 9),
    ]
    assert small("--stages.0.tokens_per_step", "2048").steps == (30, 30, 10)
    for step in (-1, 100):
        assert refusals(recipe.stage_of, step) == [f"step: expected 0 to 99, got {step}"]


def test_micro_steps_share_a_step_among_processes(small):
    recipe = small()
    assert [recipe.micro_steps(0, processes) for processes in (1, 2, 4)] == [4, 2, 1]
    assert recipe.micro_steps(2, 2) == 1
    assert refusals(recipe.micro_steps, 0, 8)[0].startswith("stages.0.micro_batch: expected the 8 sequences of a step")
    assert refusals(recipe.micro_steps, 0, 3)[0].startswith("stages.0.micro_batch: ")
    assert refusals(recipe.micro_steps, 2, 4)[0].startswith("stages.2.micro_batch: ")
    assert refusals(recipe.micro_steps, 2, 1)[0].startswith("stages.2.context_parallel: expected a divisor of the 1 ")


def test_one_schedule_runs_over_all_stages(small):
    recipe = small("--optimizer.warmup_share", "0.05")
    rates = [recipe.learning_rate(step) for step in range(100)]
    assert rates[:5] == pytest.approx([4e-4, 8e-4, 1.2e-3, 1.6e-3, 2e-3])
    expected = [2e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 4) / 95))) for step in range(5, 100)]
    assert rates[5:] == pytest.approx(expected)  # also from step 59 to 60 and from 89 to 90
    assert rates[99] == pytest.approx(2e-4)


def test_a_stage_with_factors_leaves_the_schedule_of_the_others(small):
    recipe = small("--stages.1.learning_rate_factor", "{start: 0.5, end: 0.25}")
    assert recipe.stages[1].learning_rate_factor == Factors(start=0.5, end=0.25)
    rates = [recipe.learning_rate(step) / 2e-3 for step in range(100)]
    without = dataclasses.replace(recipe, stages=(recipe.stages[0], recipe.stages[2]))
    assert without.ends[-1] == 70
    others = [without.learning_rate(step) / 2e-3 for step in range(70)]
    assert rates[:60] + rates[90:] == pytest.approx(others)
    assert rates[99] == pytest.approx(0.1)
    assert rates[60] == pytest.approx(0.25 + 0.25 * 0.5 * (1 + math.cos(math.pi / 30))) and rates[89] == pytest.approx(
        0.25
    )
    assert rates[60:90] == sorted(rates[60:90], reverse=True)


def test_the_run_begins_with_its_warmup_whichever_schedule_is_first(small):
    recipe = small("--stages.0.learning_rate_factor", "{start: 0.8, end: 0.4}", "--optimizer.warmup_share", "0.04")
    rates = [recipe.learning_rate(step) / 2e-3 for step in range(100)]
    assert rates[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8]) and rates[59] == pytest.approx(0.4)
    assert rates[60] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 40)))  # no second warm-up


def test_wsd_is_stable_then_falls(small):
    recipe = small("--optimizer.schedule", "wsd", "--optimizer.end_factor", "0", "--optimizer.decay_share", "0.1")
    assert {recipe.learning_rate(step) for step in range(1, 90)} == {2e-3}
    assert recipe.learning_rate(90) == pytest.approx(2e-3 * (1 - math.sqrt(0.1))) and recipe.learning_rate(99) == 0.0
    assert small("--optimizer.schedule", "wsd").learning_rate(79) == 2e-3  # the last 0.2 fall


# Defaults that follow other fields


def test_embedding_rate_follows_the_start(small):
    assert small().embedding_rate == 20.0 and small("--optimizer.embedding_rate", "3").embedding_rate == 3.0
    assert load_recipe("kimi-linear-48b-continue").embedding_rate == 1.0


def test_configuration_gets_what_the_recipe_says_elsewhere(small):
    overrides = small("--router_balance.method", "sign", "--model.config.vocab_size", "96").config_overrides
    balance = {"method": "sign", "ema": "auto", "bins": 1000, "eta": 1e-3, "high": 0.9, "low": 0.1}
    assert overrides == {"vocab_size": 96, "router_balance": balance, "loss_chunk_size": 4096}


def test_mixture_does_not_depend_on_the_order_in_the_file(small):
    assert list(small().mixture(0).items()) == [("data/code", 1.0), ("data/web", 3.0)]
    assert list(small().mixture(1).items()) == [("data/code", 1.0), ("data/web", 1.0)]  # null: all alike
    assert list(small("--stages.0.mixture", "{code: 1, web: 3}").mixture(0)) == list(small().mixture(0))


def test_stage_data_reads_what_the_stage_says(small, tmp_path):
    folders = {name: tmp_path / name for name in ("web", "code")}
    for folder in folders.values():
        (folder / "train").mkdir(parents=True)
        shard = write_shard(folder, "train/00000", [np.arange(3, 103, dtype=np.uint16)] * 30)
        tokenizer = {"fingerprint": "t", "vocab_size": 128, "bos_token_id": 0, "eos_token_id": 1}
        write_manifest(folder, {"tokenizer": tokenizer, "splits": {"train": {"shards": [shard]}}})
    recipe = small(*(word for name, folder in folders.items() for word in (f"--data.folders.{name}", str(folder))))
    first, second, third = (recipe.stage_data(stage) for stage in range(3))
    assert (first.sequence_length, first.sequences_per_step, len(first[0])) == (128, 8, 8)
    assert first.folders == {str(folders["code"]): 1.0, str(folders["web"]): 3.0}
    assert third.long_documents == LongDocuments(256) and second.seed != first.seed
