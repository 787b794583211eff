"""One process at a time writes into the folder of a run."""

import errno
import fcntl
from pathlib import Path
from typing import IO


LOCK = ".lock"


def claim(folder: Path) -> IO:
    """A file in `folder`, locked until it is closed or this process ends, however it ends.

    Raises:
        ValueError: another process has it.
    """
    file = (folder / LOCK).open("a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # a file system may have no locks
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.close()
            raise ValueError(f"output_dir: expected a folder to which no other run writes, got {folder}") from error
    return file
