"""`moe-lc push`: a checkpoint, the model's code and a model card to the Hub, in one call, privately, resumably; or an adapter.

Large files go first, by their content: what is there already is not sent again, so that the same command goes on after
a crash. Then one commit names all of them, so that nobody ever loads half a model; a second one adds the card, whose
examples are pinned to the first. This part of the Hub's interface is the same in huggingface_hub 1.x and 2.x, which differ
in how they upload whole folders.
"""

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, hf_hub_download
from huggingface_hub.errors import HFValidationError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id
from tqdm import tqdm

from .adapter_card import CONFIG, WEIGHTS, adapter_card, is_adapter
from .card import CARD, MARK, UNKNOWN, About, about_from, add_card_arguments, checkpoint_card
from .compat import HUB_ERRORS
from .export_remote_code import export_remote_code
from .merge import TOKENIZER


AT_ONCE = 4  # large files that are uploaded in parallel, and lost if the process dies
MESSAGE = "Weights and code, by moe-lc push"
PINNED = re.compile(r'revision="([0-9a-f]{40})"')


@dataclass(frozen=True)
class Pushed:
    """`revision`: the commit that holds the weights and the code; it never changes. `private`: as the Hub says. `card`:
    which one the repository has now."""

    repo: str
    url: str
    revision: str
    private: bool
    card: str


def push(
    checkpoint: str | Path, repo: str, *, private: bool = True, about: About = UNKNOWN, message: str = MESSAGE
) -> Pushed:
    """Makes the repository if it is missing, and uploads what it lacks.

    A README.md in the checkpoint is the card. Without one the card is made from data, unless the repository has one that
    was not. Weights that the repository has and the checkpoint has not are removed from its main branch.

    Args:
        checkpoint: folder written by `save_pretrained`; nothing in it is changed. Beside it, a folder of links is made. One
            with an adapter goes without code: the base has it.
        repo: "name" or "owner/name".
        private: of a repository that is made now. One that everyone can read is refused unless this is False.
        about: for the card.
        message: of the commit.

    Raises:
        ValueError: a folder that is no checkpoint of ours, a card that the Hub could not read (nothing was sent then); a
            public repository with `private`.
        HfHubHTTPError and others of `compat.HUB_ERRORS`: the Hub failed or refused, after the library's own attempts.
    """
    checkpoint = Path(checkpoint).resolve()
    _check_name(repo)
    adapter = is_adapter(checkpoint)
    make_card, staged = (adapter_card, _adapter_files) if adapter else (checkpoint_card, _with_code)
    if own_card := (checkpoint / CARD).is_file():
        _check_own_card(checkpoint / CARD)
    else:
        make_card(checkpoint, about)
    with staged(checkpoint) as folder:
        api = HfApi()
        url = api.create_repo(repo, private=private, exist_ok=True)
        is_private = bool(api.model_info(url.repo_id).private)
        if private and not is_private:
            raise ValueError(f"repo: expected a private one, or --public, got {url.repo_id}, which everyone can read")
        revision, card = _push_files(api, url.repo_id, folder, message), "the README.md of the checkpoint"
        if not own_card:
            revision, card = _push_card(
                api, url.repo_id, lambda **where: make_card(checkpoint, about, **where), revision
            )
    return Pushed(repo=url.repo_id, url=str(url), revision=revision, private=is_private, card=card)


def _check_name(repo: str) -> None:
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"repo: expected NAME or OWNER/NAME, got {repo!r}: {error}") from error


def _check_own_card(file: Path) -> None:
    try:
        ModelCard(file.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{file}: expected a model card, or no file for a new one, got {error}") from error


@contextmanager
def _with_code(checkpoint: Path) -> Iterator[Path]:
    """The checkpoint with the model's code, as links on the same disk; a run that was killed leaves it to the next."""
    folder = checkpoint.parent / f".{checkpoint.name}.push"
    try:
        yield export_remote_code(checkpoint, folder, overwrite=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _adapter_files(checkpoint: Path) -> Iterator[Path]:
    """Links to the files that belong to an adapter."""
    with tempfile.TemporaryDirectory(prefix="moe-lc-push-") as folder:
        for pattern in (CONFIG, WEIGHTS, CARD, *TOKENIZER, "*processor_config.json", "LICENSE*"):
            for file in checkpoint.glob(pattern):
                (Path(folder) / file.name).symlink_to(file)
        yield Path(folder)


def _push_files(api: HfApi, repo: str, folder: Path, message: str) -> str:
    """Uploads and commits the files of `folder`; returns the commit that holds them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    large = [path for path in files if path.suffix == ".safetensors"]
    additions = [_addition(path, folder) for path in files if path not in large]
    with tqdm(desc="weights", total=sum(path.stat().st_size for path in large), unit="B", unit_scale=True) as bar:
        for first in range(0, len(large), AT_ONCE):
            some = [_addition(path, folder) for path in large[first : first + AT_ONCE]]
            api.preupload_lfs_files(repo, some, num_threads=AT_ONCE, free_memory=False)
            bar.update(sum(one.upload_info.size for one in some))
            additions += some
    now = api.model_info(repo)
    pushed = {one.path_in_repo for one in additions}
    stale = [CommitOperationDelete(name) for name in _weights(now) if name not in pushed]
    commit = api.create_commit(repo, [*stale, *additions], commit_message=message, parent_commit=now.sha)
    return commit.oid


def _addition(path: Path, folder: Path) -> CommitOperationAdd:
    return CommitOperationAdd(path.relative_to(folder).as_posix(), path)


def _weights(info) -> list[str]:
    """Files of a repository by which `from_pretrained` could find other weights than those that were pushed."""
    names = [file.rfilename for file in info.siblings]
    return [name for name in names if name.endswith((".safetensors", ".safetensors.index.json")) and "/" not in name]


def _push_card(api: HfApi, repo: str, make_card: Callable[..., str], revision: str) -> tuple[str, str]:
    """Adds the card, unless there is one that still holds or that somebody wrote; returns the commit that its examples
    name, and which card it is."""
    files = _blobs(api, repo, revision)
    if CARD in files:
        there = Path(hf_hub_download(repo, CARD, revision=revision)).read_text(encoding="utf-8")
        if MARK not in there:
            return revision, "the one on the Hub, which moe-lc did not make"
        pinned = PINNED.search(there)
        same_card = pinned and there == make_card(repo=repo, revision=pinned[1])
        if same_card and {**_blobs(api, repo, pinned[1]), CARD: files[CARD]} == files:
            return pinned[1], "made from data, as it was"
    card = make_card(repo=repo, revision=revision)
    addition = CommitOperationAdd(CARD, card.encode())
    api.create_commit(repo, [addition], commit_message=f"Model card of {revision[:7]}")
    return revision, "made from data"


def _blobs(api: HfApi, repo: str, revision: str) -> dict[str, str]:
    """The files of a commit and what git calls their contents; nothing if there is no such commit."""
    try:
        info = api.model_info(repo, revision=revision, files_metadata=True)
    except RevisionNotFoundError:
        return {}
    return {file.rfilename: file.blob_id for file in info.siblings}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="folder written by save_pretrained: a model or an adapter")
    parser.add_argument("repo", help="name on the Hub: NAME or OWNER/NAME")
    parser.add_argument("--public", action="store_true", help="let everyone read it (default: private)")
    parser.add_argument("--message", default=MESSAGE, help="of the commit (default: %(default)s)")
    add_card_arguments(parser)


def run(args: argparse.Namespace) -> int:
    try:
        pushed = push(
            args.checkpoint, args.repo, private=not args.public, about=about_from(args), message=args.message
        )
    except HUB_ERRORS as error:
        cause = f" ({error.__cause__})" if error.__cause__ and str(error.__cause__) != str(error) else ""
        print(f"moe-lc: error: the push to {args.repo} stopped: {error}{cause}", file=sys.stderr)
        print("The same command goes on: it sends what is not there yet.", file=sys.stderr)
        return 1
    print(f"{pushed.url} ({'private' if pushed.private else 'public'}), card: {pushed.card}")
    if is_adapter(args.checkpoint):
        print(f'load_lora(model, "{pushed.repo}", revision="{pushed.revision}")')
    else:
        print(f'from_pretrained("{pushed.repo}", revision="{pushed.revision}", trust_remote_code=True)')
    return 0
