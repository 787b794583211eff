"""`moe-lc card`: the model card of a checkpoint or of a preset, from a template and from data, never by hand.

What is known comes from config.json, from the count of the real model without weights and from the folder of the run;
what nobody measured is said to be unknown.
"""

import argparse
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import ModelCard, ModelCardData

from .. import __version__
from ..configuration.configuration_moe_lc import MoeLcConfig, MoeLcTextConfig
from ..configuration.presets import preset_names
from .card_facts import architecture_rows, memory_rows, parameter_rows
from .card_run import find_run, read_run
from .checkpoint_writer import write_atomically
from .count import config_from_path, config_from_preset, count
from .released import RELEASED, Released, find_released


TEMPLATE = Path(__file__).parents[1] / "model_cards" / "TEMPLATE.md"
TAGS = ["moe_lc", "kimi-delta-attention", "mixture-of-experts", "long-context"]
CARD = "README.md"
MARK = "<!-- Made by `moe-lc card`. The next `moe-lc push` makes it anew as long as this line stands here. -->"
# What `make test-peers` measured of presets that it trained for 100 steps: relative differences of FP32 logits.
EXPORTED = {
    "nano": {"target": "kimi-k3", "mlx_lm": "2e-7", "llama_cpp": "8e-7"},
    "nano-kimi-linear": {"target": "kimi-linear", "mlx_lm": "1e-6", "llama_cpp": "5e-6"},
}

REPORTS = {"200m-a90m": "nine-minutes"}  # beside the cards: what a run of a preset's shape gave


@dataclass(frozen=True)
class About:
    """What no file of a checkpoint says.

    `license`: an identifier of the Hub, or "other" with `license_name` and `license_link`; `base_model`: what the weights
    were made from, whose licence holds if it is a released one and none is given; `run`: folder of the training run.
    """

    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    base_model: str | None = None
    run: Path | None = None

    def __post_init__(self):
        if (self.license == "other") != (self.license_name is not None and self.license_link is not None):
            raise ValueError(
                "license: expected license_name and license_link with 'other' and with nothing else, "
                f"got license={self.license!r}, license_name={self.license_name!r}, license_link={self.license_link!r}"
            )


UNKNOWN = About()


def checkpoint_card(
    checkpoint: Path, about: About = UNKNOWN, *, repo: str | None = None, revision: str | None = None
) -> str:
    """The card of a folder that `save_pretrained` wrote, as Markdown with the Hub's metadata.

    Args:
        about: licence, origin, run; by default a run is looked for where `moe-lc train` saves its models.
        repo, revision: where and at which commit the weights are, for the examples.

    Raises:
        ValueError: a folder without a config.json of ours, a run that is none.
    """
    if not (checkpoint / "config.json").is_file():
        raise ValueError(f"checkpoint: expected a folder with config.json, got {checkpoint}")
    config = config_from_path(checkpoint)
    run_folder = about.run or find_run(checkpoint)
    source = find_released(about.base_model)
    licence = about if about.license or source is None else source
    metadata = {
        "license": licence.license,
        "license_name": licence.license_name,
        "license_link": licence.license_link,
        "base_model": about.base_model,
        "library_name": "transformers",
    }
    return _render(
        config,
        metadata,
        ["custom_code", *TAGS],
        kind="checkpoint",
        title=repo.split("/")[-1] if repo else checkpoint.resolve().name,
        name=repo or checkpoint.resolve().name,
        revision=revision,
        pushed=repo is not None,
        run=read_run(run_folder, checkpoint) if run_folder else None,
        tokenizer=(checkpoint / "tokenizer_config.json").is_file(),
        weight_bytes=sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")),
        license_inherited=about.license is None and source is not None,
        versions={"modeling_moe_lc": __version__, **{name: version(name) for name in ("transformers", "torch")}},
    )


def preset_card(name: str) -> str:
    """The card of a preset: of one that describes a released model, how to use that model here; of another, its numbers.

    Raises ValueError for an unknown name.
    """
    config, released = config_from_preset(name), RELEASED.get(name)
    return _render(
        config,
        _preset_metadata(released),
        TAGS,
        kind="preset" if released is None else "released",
        title=name if released is None else f"{released.name}, used with modeling_moe_lc",
        preset=name,
        released=released,
        exported=EXPORTED.get(name),
        report=REPORTS.get(name),
    )


def _preset_metadata(released: Released | None) -> dict[str, Any]:
    if released is None:
        return {"license": "apache-2.0", "library_name": "transformers"}
    return {
        "license": released.license,
        "license_name": released.license_name,
        "license_link": released.license_link,
        "base_model": released.name,
        "library_name": "transformers",
    }


def _render(config: MoeLcTextConfig | MoeLcConfig, metadata: dict[str, Any], tags: list[str], **facts) -> str:
    multimodal, counted = isinstance(config, MoeLcConfig), count(config)
    data = ModelCardData(
        **metadata, pipeline_tag="image-text-to-text" if multimodal else "text-generation", tags=list(tags)
    )
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["cell"] = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    missing = dict.fromkeys(("name", "revision", "run", "preset", "released", "report"))
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        card_data=data.to_yaml(),
        mark=MARK,
        license=data.license,
        license_name=data.license_name,
        license_link=data.license_link,
        base_model=data.base_model,
        multimodal=multimodal,
        total=f"{counted.total:,}",
        active=f"{counted.active:,}",
        architecture=architecture_rows(config),
        parameters=parameter_rows(counted),
        memory=memory_rows(config, counted),
        layout=config.get_text_config().checkpoint_layout,
        context=config.get_text_config().max_position_embeddings,
        **{**missing, **facts},
    )
    ModelCard(text)  # refuses metadata that the Hub could not read
    return text


def add_card_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `About`, for every command that makes a card."""
    add = parser.add_argument
    add(
        "--license",
        help="of the weights: an identifier of the Hub, or other (default: that of a released --base-model)",
    )
    add("--license-name", help="with --license other")
    add("--license-link", help="with --license other")
    add("--base-model", help="name on the Hub of the model that the weights were made from")
    add("--run", type=Path, help="folder of the training run (default: found from RUN/models/STAGE)")


def about_from(args: argparse.Namespace) -> About:
    """The parsed options. Raises ValueError for a licence that is not whole."""
    return About(args.license, args.license_name, args.license_link, args.base_model, args.run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(preset_names())
    parser.add_argument("source", help=f"folder written by save_pretrained, or a preset ({names})")
    parser.add_argument("--out", type=Path, help=f"file to write (default: SOURCE/{CARD}; of a preset: print it)")
    parser.add_argument("--overwrite", action="store_true", help="replace a card that is there")
    add_card_arguments(parser)


def run(args: argparse.Namespace) -> None:
    about, checkpoint = about_from(args), Path(args.source)
    if args.source in preset_names() and not checkpoint.is_dir():
        if about != UNKNOWN:
            raise ValueError(
                f"source: expected a checkpoint with these options, got the preset {args.source}: {about}"
            )
        text, out = preset_card(args.source), args.out
    else:
        text, out = checkpoint_card(checkpoint, about), args.out or checkpoint / CARD
    if out is None:
        print(text, end="")
        return
    if out.exists() and not args.overwrite:
        raise ValueError(f"out: expected a new file (or --overwrite), got {out}")
    write_atomically(out, text.encode())
    print(f"wrote {out}")
