"""A run goes on only under a recipe whose past is the same; whatever else differs is allowed."""

import dataclasses

import pytest

from modeling_moe_lc.training.recipe import Recipe, load_recipe
from modeling_moe_lc.training.recipe_resume import fingerprint, forbidden_changes


STEP = 7639  # 10 steps into the second stage


def ladder(*overrides: str) -> Recipe:
    return load_recipe("200m-8k-to-128k", overrides)


def test_what_may_change_on_resume():
    changed = ladder(
        *(
            "--output_dir",
            "elsewhere",
            "--data.folders.text",
            "moved",
            "--logging.every_steps",
            "1",
            "--model.compile",
        ),
        *("--stages.0.micro_batch", "1", "--stages.2.context_parallel", "2", "--optimizer.learning_rate", "1e-3"),
        *("--stages.1.tokens", "2e9", "--stages.2.name", "last", "--stages.2.sequence_length", "65536"),
        *("--stages.0.mixture", "{code: 3, text: 7}", "--checkpoints.keep", "9", "--optimizer.momentum", "0.95"),
        *("--model.activation_checkpointing", "false", "--model.loss_chunk_size", "null"),
    )
    assert forbidden_changes(ladder(), changed, STEP) == []
    assert fingerprint(ladder(), STEP) == fingerprint(changed, STEP)
    assert forbidden_changes(ladder(), ladder("--stages.0.tokens", "1e9"), 0) == []  # nothing has begun


def test_tokens_of_a_step_may_be_said_elsewhere():
    own = [f"--stages.{stage}.tokens_per_step=1048576" for stage in range(2)]
    assert forbidden_changes(ladder(), ladder(*own, "--tokens_per_step", "2097152"), STEP) == []


@pytest.mark.parametrize(
    ("override", "found"),
    (
        ("--seed=1", "seed: expected 0, as the run began with, got 1"),
        ("--model.base=tiny", "model.base: expected '200m-a90m', as the run began with, got 'tiny'"),
        ("--model.config.vocab_size=96", "model.config: expected {}, as the run began with, got {'vocab_size': 96}"),
        ("--model.dtype=float32", "model.dtype: "),
        ("--router_balance.method=sign", "router_balance.method: "),
        ("--optimizer.kind=adamw", "optimizer.kind: "),
        ("--optimizer.router_on_muon", "optimizer.router_on_muon: "),
        ("--optimizer.momentum=0.9", "optimizer.momentum: expected 0.95, as the run began with, got 0.9"),
        ("--optimizer.embedding_rate=1", "optimizer.embedding_rate: expected 20.0, as the run began with, got 1.0"),
        ("--stages.0.tokens=9e9", "stages.0.tokens: expected 8000000000, as the run began with, got 9000000000"),
        ("--stages.0.mixture.text=2", "stages.0.mixture: "),
        (
            "--stages.1.sequence_length=16384",
            "stages.1.sequence_length: expected 32768, as the run began with, got 16384",
        ),
        ("--stages.1.long_documents.above=64", "stages.1.long_documents: "),
        ("--stages.1.tokens_per_step=2097152", "stages.1.tokens_per_step: expected 1048576, as the run began with"),
        ("--stages.1.tokens=10485760", "stages.1.tokens: expected more than the 10 steps that are done, got 10485760"),
        ("--stages.1.mixture=null", "stages.1.mixture: "),
    ),
)
def test_what_may_not_change_on_resume_is_named(override, found):
    before, now = ladder(), ladder(override)
    changes = forbidden_changes(before, now, STEP)
    assert len(changes) == 1 and changes[0].startswith(found)
    if "steps that are done" not in found:
        assert fingerprint(before, STEP) != fingerprint(now, STEP)


def test_stages_that_were_done_may_not_vanish():
    before = ladder()
    now = dataclasses.replace(before, stages=before.stages[:1])
    assert forbidden_changes(before, now, before.ends[0]) == []
    begun = forbidden_changes(before, now, before.ends[0] + 1)
    assert begun[0] == "stages.1.name: expected '32k', as the run began with, got None"


def test_a_finished_run_fixes_all_its_stages():
    before = ladder()
    changes = forbidden_changes(before, ladder("--stages.2.tokens", "2e9"), before.ends[-1])
    assert changes == ["stages.2.tokens: expected 1000000000, as the run began with, got 2000000000"]
