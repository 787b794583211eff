"""Ctrl-C and SIGTERM are answers to a question of the loop, the same on every process."""

import json
import os
import signal
import subprocess
import sys

import pytest

from modeling_moe_lc.training import interrupt as interrupt_module
from modeling_moe_lc.training.interrupt import Interruptible


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
def test_a_signal_sets_the_flag_and_nothing_else(number):
    with Interruptible() as interrupt:
        assert not interrupt.requested() and interrupt.received is None
        send(number)
        assert interrupt.requested() and interrupt.received == number
        assert interrupt.requested()


def test_the_second_ctrl_c_raises_at_once():
    with pytest.raises(KeyboardInterrupt), Interruptible():
        send(signal.SIGINT)
        send(signal.SIGINT)


def test_sigterm_never_raises():
    with Interruptible() as interrupt:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            send(number)
        assert interrupt.requested()


def test_the_handlers_of_before_are_back_afterwards():
    got = []
    before = signal.signal(signal.SIGTERM, lambda *_: got.append("ours"))
    of_ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(ZeroDivisionError), Interruptible():
            raise ZeroDivisionError
        send(signal.SIGTERM)
        assert got == ["ours"]
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, of_ctrl_c)


# Runs the module by its path: the package around it takes seconds to import, and the module needs nothing of it.
RANK = """
import json, os, runpy, signal, sys
from torch import distributed as dist

module, folder, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
answers = []
with runpy.run_path(module)["Interruptible"]() as interrupt:
    for step in range(3):
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        answers.append(interrupt.requested())
print(json.dumps(answers))
dist.destroy_process_group()
"""


def test_all_processes_stop_in_the_same_step(tmp_path):
    command = [sys.executable, "-c", RANK, interrupt_module.__file__, str(tmp_path)]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, (_, errors) in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    assert [json.loads(answers) for answers, _ in outputs] == [[False, False, True]] * 2
