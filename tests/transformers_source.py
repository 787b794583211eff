"""The common tests of transformers' own models, from the source distribution of the installed version.

The wheel has no tests, so pip fetches them, once, into a cache outside the repository; nothing of them is committed.
MOE_LC_TRANSFORMERS_TESTS names another cache folder, for example one filled beforehand for a machine without a network.
"""

import importlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from types import ModuleType

import pytest
import transformers
from filelock import FileLock


PACKAGE = "transformers_tests"  # the cached folder is imported under this name: `tests` could be anybody's
CONFIG_KWARGS = {
    "return_dict": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 5,
    "is_encoder_decoder": True,
    "architectures": ["AnyModel"],
    "id2label": {0: "label"},
    "label2id": {"label": 0},
    "problem_type": "regression",
}
NOT_SHIPPED = {  # modules that the distribution imports but leaves out
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "utils.test_configuration_utils": {"config_common_kwargs": CONFIG_KWARGS},
}


class AnyMark:
    """Stands for `pytest.mark` while the tests are imported: their markers are registered nowhere here."""

    def __getattr__(self, name: str):
        return self

    def __call__(self, *test):  # `mark.name(test)` or `mark.name()(test)`
        return test[0] if test else self


class PipError(RuntimeError):
    pass


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "--retries=1", "--timeout=20"]
    done = subprocess.run([*command, *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        raise PipError(f"pip {' '.join(arguments)}: {done.stderr}")


def fetch(folder: Path) -> None:
    """Makes `folder` with the tests; it appears complete or not at all."""
    requirement = f"transformers=={transformers.__version__}"
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        new = Path(scratch, "new")
        new.mkdir()
        pip("download", "--no-deps", "--no-binary=:all:", "--no-build-isolation", f"--dest={scratch}", requirement)
        (archive,) = Path(scratch).glob("transformers-*.tar.gz")
        with tarfile.open(archive) as source:
            source.extractall(scratch, filter="data")
        Path(scratch, archive.name.removesuffix(".tar.gz"), "tests").rename(new / PACKAGE)
        (new / PACKAGE / "__init__.py").touch()
        new.rename(folder)


def common_tests(*modules: str) -> list[ModuleType]:
    """`common_tests("test_modeling_common")`: modules of the tests of the installed transformers.

    Where they cannot be had, the calling test module is skipped; under continuous integration (`CI=true`) it fails.
    """
    root = os.environ.get("MOE_LC_TRANSFORMERS_TESTS", "~/.cache/modeling_moe_lc")
    folder = Path(root).expanduser() / f"transformers-{transformers.__version__}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # test processes start together
        try:
            if not folder.exists():
                fetch(folder)
        except PipError as error:
            if os.environ.get("CI") == "true":
                raise
            pytest.skip(f"no tests of transformers {transformers.__version__}: {error}", allow_module_level=True)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    for name, contents in NOT_SHIPPED.items():
        module = sys.modules.setdefault(f"{PACKAGE}.{name}", ModuleType(name))
        vars(module).update(contents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pytest, "mark", AnyMark())
        return [importlib.import_module(f"{PACKAGE}.{name}") for name in modules]
