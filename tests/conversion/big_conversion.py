"""`make test-big`: a K3-layout checkpoint of more than 8 GB with MXFP4 experts becomes BF16, in shards of at most 1 GB.

Killed three times at random it ends with the same bytes. Its peak memory stays under 2 GB, and once it writes, it writes at least
60 % of the bytes a second that copying the output does, in the median of three rounds of both. Needs 45 GB of disk; no part of CI.
"""

import argparse
import os
import random
import re
import resource
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from modeling_moe_lc.configuration.presets import load_multimodal_preset


ROUNDS, KILLS = 3, 3
LEAST_SOURCE, LARGEST_SHARD, MOST_MEMORY, LEAST_SHARE = 8 * 10**9, 10**9, 2 * 10**9, 0.6
CHUNK = 1 << 23
write_released = runpy.run_path(str(Path(__file__).with_name("sparse_checkpoints.py")))["write_released"]


def make_source(folder: Path) -> int:
    """Three layers of K3 in full width, with fewer experts and tokens and a narrower MLP; returns its bytes."""
    linear = {"num_heads": 96, "head_dim": 128, "use_full_rank_gate": True, "gate_lower_bound": -5.0}
    config = load_multimodal_preset(
        "kimi-k3",
        num_hidden_layers=3,
        attn_res_block_size=3,
        num_experts=96,
        intermediate_size=3072,
        vocab_size=32_768,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        media_placeholder_token_id=3,
        linear_attn_config={**linear, "kda_layers": [1, 2], "full_attn_layers": [3]},
    )
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, 1 << 26, dtype=np.uint8).tobytes()
    scales = rng.integers(115, 123, 1 << 22, dtype=np.uint8).tobytes()

    def data(output):
        if output.name.endswith("A_log"):
            return None  # zeros, whose last 32 are padding
        pool = scales if output.name.endswith("weight_scale") else noise
        first = rng.integers(len(pool) // 2)
        part = pool[first : first + min(len(pool) // 2, output.nbytes)]
        return (part * (output.nbytes // len(part) + 1))[: output.nbytes]

    write_released(folder, config.text_config, config.vision_config.to_dict(), 16, data)
    return total_bytes(folder)


def start(source: Path, out: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "modeling_moe_lc.training.cli", "convert", str(source), str(out)]
    command += ["--dtype", "bfloat16", "--shard-size", "1GB", *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class Converted(NamedTuple):
    """Seconds of the command, of it from the first byte written to the last, of a core; bytes of its peak resident memory."""

    seconds: float
    writing: float
    core_seconds: float
    peak: int


def convert(source: Path, out: Path, *options: str) -> Converted:
    os.sync()
    begun, before = time.perf_counter(), core_seconds()
    process, peak, first = start(source, out, *options), 0, None
    while process.poll() is None:
        if first is None and out.exists():
            first = time.perf_counter()
        # Not what the system says of a child that has ended: that counts this process too, from before the child's own code.
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
        peak = peak if found is None else max(peak, int(found[1]) * 1024)
        time.sleep(0.05)
    assert process.returncode == 0, process.returncode
    ended = time.perf_counter()
    return Converted(ended - begun, ended - first, core_seconds() - before, peak)


def core_seconds() -> float:
    """Of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def killed(source: Path, out: Path, seconds: float, *options: str) -> str:
    """Runs the command for so long, kills it, and says what it had written by then."""
    process = start(source, out, *options)
    time.sleep(seconds)
    assert process.poll() is None, "over before it was killed"
    process.send_signal(signal.SIGKILL)
    process.wait()
    return f"{len(list(out.glob('model-*')))} shards finished"


def copy(source: Path, out: Path) -> float:
    """Seconds for copying all files of a folder, each until it is on the disk."""
    os.sync()
    begun = time.perf_counter()
    out.mkdir()
    for path in sorted(source.iterdir()):
        with path.open("rb", buffering=0) as read, (out / path.name).open("wb", buffering=0) as written:
            shutil.copyfileobj(read, written, CHUNK)
            os.fsync(written.fileno())
    return time.perf_counter() - begun


def forget(*folders: Path) -> None:
    """What was just written or read shall not be read from memory."""
    for path in (path for folder in folders for path in folder.iterdir()):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def checksums(folder: Path) -> dict[str, int]:
    found = {}
    for path in tqdm(sorted(folder.iterdir()), desc="reading", unit="file"):
        found[path.name] = 0
        with path.open("rb", buffering=0) as file:
            while part := file.read(CHUNK):
                found[path.name] = zlib.crc32(part, found[path.name])
    return found


def total_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def load() -> str:
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="to work in: made, and deleted at the end")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills (default: %(default)s)")
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    try:
        return measure(args.folder, random.Random(args.seed))
    finally:
        shutil.rmtree(args.folder)


def measure(folder: Path, rng: random.Random) -> int:
    source, out, copied = folder / "source", folder / "out", folder / "copy"
    print(f"source: {make_source(source):,} bytes, {load()}", flush=True)
    assert total_bytes(source) >= LEAST_SOURCE
    peaks, shares, first = [], [], None
    for number in range(1, ROUNDS + 1):
        forget(source)
        converted = convert(source, out)
        size, after = total_bytes(out), load()
        assert max(path.stat().st_size for path in out.iterdir()) <= LARGEST_SHARD
        forget(out)
        copying = copy(out, copied)
        peaks.append(converted.peak)
        shares.append(copying / converted.writing)
        print(
            f"round {number}: {size:,} bytes, converted in {converted.seconds:.1f} s, in {converted.writing:.1f} s of them after "
            f"the start of Python ({size / converted.writing / 1e6:.0f} MB/s, {converted.core_seconds:.1f} s of a core, {after}), "
            f"copied in {copying:.1f} s ({size / copying / 1e6:.0f} MB/s, {load()}): {shares[-1]:.0%}; "
            f"peak memory {converted.peak / 1e9:.2f} GB",
            flush=True,
        )
        shutil.rmtree(copied)
        first = first or checksums(out)
        shutil.rmtree(out)
    for number in range(1, KILLS + 1):
        after = rng.uniform(0.15, 0.3) * converted.seconds
        found = killed(source, out, after, "--resume")
        print(f"killed {number} after {after:.1f} s: {found}", flush=True)
    converted = convert(source, out, "--resume")
    peaks.append(converted.peak)
    same = checksums(out) == first
    print(f"resumed in {converted.seconds:.1f} s: {'the same bytes' if same else 'other bytes'}")
    share, most = statistics.median(shares), max(peaks)
    print(f"median of bytes a second over copying: {share:.0%}; peak memory: {most / 1e9:.2f} GB")
    return int(not same or share < LEAST_SHARE or most >= MOST_MEMORY)


if __name__ == "__main__":
    sys.exit(main())
