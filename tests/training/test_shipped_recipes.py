"""The recipes of the package load, and say what their comments promise."""

import argparse
import tomllib
from pathlib import Path

import pytest

from modeling_moe_lc.training import demo
from modeling_moe_lc.training.recipe import FOLDER, load_recipe, recipe_names


ROOT = Path(__file__).resolve().parents[2]
GOLDEN = {
    "1b-8k-to-1m": ((9536, 953, 476, 476), {8: [16, 8, 4, 4]}),
    "200m-8k-to-128k": ((7629, 953, 953), {1: [16, 16, 8], 8: [2, 2, 1]}),
    "200m-nine-minutes": ((400, 160, 60, 40), {1: [2, 2, 2, 1]}),
    "kimi-linear-48b-continue": ((953, 476, 476), {8: [4, 4, 2]}),
    "lora-chat": ((200,), {1: [8], 8: [1]}),
    "nano-cpu": ((72, 18, 10), {1: [1, 1, 1]}),
}


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipe(name):
    steps, micro_steps = GOLDEN[name]
    recipe = load_recipe(name)
    assert recipe.steps == steps
    for processes, expected in micro_steps.items():
        assert [recipe.micro_steps(stage, processes) for stage in range(len(steps))] == expected
    assert recipe.learning_rate(recipe.warmup_steps - 1) == pytest.approx(recipe.optimizer.learning_rate)
    rates = [recipe.learning_rate(step) for step in range(recipe.warmup_steps - 1, recipe.ends[-1])]
    assert rates == sorted(rates, reverse=True)  # whatever the factors of its stages


@pytest.mark.parametrize("name", ("1b-8k-to-1m", "kimi-linear-48b-continue"))
def test_recipes_of_8_gpus_run_on_one_without_context_parallelism(name):
    recipe = load_recipe(name)
    alone = [f"--stages.{stage}.context_parallel=1" for stage in range(len(recipe.stages))]
    with pytest.raises(ValueError, match="context_parallel: expected a divisor of the 1 processes"):
        recipe.micro_steps(len(alone) - 1, 1)
    assert all(load_recipe(name, alone).micro_steps(stage, 1) for stage in range(len(alone)))


def test_nano_is_what_the_demo_trains():
    recipe, parser = load_recipe("nano-cpu"), argparse.ArgumentParser()
    demo.add_arguments(parser)
    args = parser.parse_args([])
    assert list(recipe.steps) == demo.STEPS and [stage.sequence_length for stage in recipe.stages] == args.lengths
    assert (recipe.tokens_per_step, recipe.model.base) == (args.tokens_per_step, args.preset)
    assert (recipe.optimizer.learning_rate, recipe.warmup_steps) == (args.learning_rate, args.warmup)
    assert (recipe.optimizer.clip_norm, recipe.router_balance.method) == (1.0, args.balance)


def test_recipes_are_in_the_package():
    package_data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert package_data["modeling_moe_lc.training"] == ["recipes/*.yaml"]
    assert set(GOLDEN) == set(recipe_names()) == {path.stem for path in FOLDER.iterdir()}
