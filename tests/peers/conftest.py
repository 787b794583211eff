import sysconfig
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def texts():
    library = Path(sysconfig.get_paths()["stdlib"])
    return [(library / name).read_text(encoding="utf-8") for name in ("argparse.py", "zipfile/__init__.py", "tarfile.py")
            if (library / name).exists()]  # fmt: skip
