"""Processes that see a local Hub: the tests' own is offline for good, since `huggingface_hub` reads that when it is imported.

Importing torch and transformers is most of the time, so that one process does it and every piece of code runs in a fork.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


FORKS = """
import json, os, sys, time, traceback
{preload}

def attempts_follow_at_once(seconds):
    pass

for line in sys.stdin:
    task = json.loads(line)
    child = os.fork()
    if child:
        print(child, flush=True)
        print(os.waitpid(child, 0)[1], flush=True)
        continue
    code = 1
    os.setsid()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(task[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    time.sleep = attempts_follow_at_once
    try:
        exec(task["code"], globals() | task["names"])
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
"""


class Client:
    """`start` runs code with `names` as its variables, which JSON must be able to say, beside those of `preload`, and `wait` waits for its end."""

    def __init__(self, process: subprocess.Popen, folder: Path):
        self.process, self.folder = process, folder
        self.pid = 0

    def start(self, code: str, **names) -> None:
        task = {"code": code, "names": names, "out": str(self.folder / "out"), "err": str(self.folder / "err")}
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        self.pid = int(self.process.stdout.readline())

    def kill(self) -> None:
        """As the kernel would: at once, and nothing is tidied up."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> tuple[int, str, str]:
        """Its exit code, or minus the signal that ended it, and what it wrote to its output and to its errors."""
        status = int(self.process.stdout.readline())
        out, err = ((self.folder / name).read_text() for name in ("out", "err"))
        return os.waitstatus_to_exitcode(status), out, err

    def run(self, code: str, **names) -> str:
        """What the code wrote; it has to end well."""
        self.start(code, **names)
        status, out, err = self.wait()
        assert status == 0, err
        return out


@contextmanager
def client(endpoint: str, token: str, folder: Path, preload: str) -> Iterator[Client]:
    """Processes that have run `preload`, with a home of their own in `folder`."""
    folder.mkdir()
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(folder / "home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": token,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", FORKS.format(preload=preload)]
    with subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            yield Client(process, folder)
        finally:
            process.stdin.close()
            process.wait()
