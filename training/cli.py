"""The command `moe-lc`: one sub-command per module, imported only when it is chosen."""

import argparse
import errno
import importlib
import sys
import traceback


PACKAGE = __package__.rpartition(".")[0]

# name: (module with add_arguments(parser) and run(args), what it does)
COMMANDS = {
    "demo": (
        f"{PACKAGE}.training.demo",
        "train a small model from scratch on this Python's standard library, on a CPU",
    ),
    "demo-vision": (
        f"{PACKAGE}.training.demo_vision",
        "train a small multimodal model to read pictures of two digits, on a CPU",
    ),
    "demo-lora": (
        f"{PACKAGE}.training.demo_lora",
        "adapt the demo's model to a new task by a LoRA adapter, on a CPU",
    ),
    "count": (f"{PACKAGE}.conversion.count", "count parameters, cache bytes and FLOPs of a preset"),
    "convert": (
        f"{PACKAGE}.conversion.convert",
        "convert a checkpoint of any size to another layout or dtype, resumably",
    ),
    "export": (
        f"{PACKAGE}.conversion.export",
        "write a checkpoint as serving engines read it: as Kimi-K3 or as Kimi-Linear",
    ),
    "merge": (f"{PACKAGE}.conversion.merge", "add a LoRA adapter to its base, or rename it for serving engines"),
    "export-remote-code": (
        f"{PACKAGE}.conversion.export_remote_code",
        "write model files that load with trust_remote_code, without this package",
    ),
    "card": (f"{PACKAGE}.conversion.card", "write the model card of a checkpoint or of a preset, from data"),
    "push": (
        f"{PACKAGE}.conversion.push",
        "upload a checkpoint, its code and its card to the Hub, privately and resumably",
    ),
    "prepare": (f"{PACKAGE}.training.prepare", "tokenise documents from files, URLs or datasets into shards"),
    "prepare-images": (
        f"{PACKAGE}.training.prepare_images",
        "cut the pictures of image-text documents into patches, in shards",
    ),
    "train": (f"{PACKAGE}.training.pretrain", "pretrain a model through stages of growing context, from a recipe"),
    "finetune": (
        f"{PACKAGE}.training.finetune",
        "fine-tune a model on conversations, whole or by a LoRA adapter, from a recipe",
    ),
    "plot": (f"{PACKAGE}.training.plot", "draw the log of a run, finished or not, as one PNG"),
    "bench": (f"{PACKAGE}.training.bench", "measure an operator, a layer, training, generation or LoRA on this GPU"),
}


# What not everyone has installed: a module, and the extra of this package that brings it.
EXTRAS = {
    **dict.fromkeys(("accelerate", "datasets", "matplotlib", "pyarrow", "tokenizers", "tqdm", "yaml"), "train"),
    "peft": "peft",
    "triton": "triton",
    "trl": "rl",
    "sklearn": "dev",
}


def build_parser() -> argparse.ArgumentParser:
    """The top-level parser: a command, and whatever that command's own parser will read."""
    listing = "\n".join(f"  {name:20} {help_text}" for name, (_, help_text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="moe-lc",
        description="Long-context sparse models: train, count, export, measure.",
        epilog=f"commands:\n{listing}\n\n`moe-lc COMMAND --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the command")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code. What is the user's to mend is printed without a traceback, with exit
    code 2: a ValueError that this package raised, a file that the system refuses, a package that an extra installs."""
    chosen = build_parser().parse_args(argv)
    module_name, help_text = COMMANDS[chosen.command]
    try:
        module = importlib.import_module(module_name)
        parser = argparse.ArgumentParser(prog=f"moe-lc {chosen.command}", description=help_text)
        module.add_arguments(parser)
        return module.run(parser.parse_args(chosen.arguments)) or 0
    except (ValueError, OSError, ModuleNotFoundError) as error:
        message = _to_mend(error)
        if message is None:
            raise
        print(f"moe-lc: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("moe-lc: interrupted", file=sys.stderr)
        return 130


def _to_mend(error: Exception) -> str | None:
    """What to tell the user; None where the error is not theirs."""
    match error:
        case ModuleNotFoundError():
            missing = (error.name or "").partition(".")[0]
            extra = EXTRAS.get(missing)
            return extra and f"this needs {missing}: pip install '{PACKAGE}[{extra}]'"
        case OSError():
            full = error.strerror if error.errno == errno.ENOSPC else None
            return full if error.filename is None else f"{error.filename}: {error.strerror or error}"
    first = error.__cause__ or error.__context__  # a writer whose disk is full goes on to complain of its file
    if isinstance(first, OSError) and first.errno == errno.ENOSPC:
        return first.strerror
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(error) if frames[-1].partition(".")[0] == PACKAGE else None


if __name__ == "__main__":
    sys.exit(main())
