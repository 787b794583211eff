"""What a conversion will write, to the byte, decided before anything is written: from headers, and the values of `A_log`.

Where the Kimi-Linear layout has BF16 for what the source holds in FP32, the small tensors in question are read too: they
become BF16 only if no bit is lost.
"""

import collections
import dataclasses
import functools
import gc
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from .checkpoint_reader import DTYPES, INDEX, SINGLE, Checkpoint, Stored, side_files
from .checkpoint_writer import Output, header_bytes
from .layouts import (
    Description,
    Expected,
    expected_tensors,
    expected_vision,
    mismatch,
    packed_shapes,
    rewritten,
)


NAMES = {dtype: name for name, dtype in DTYPES.items()}
HEADER_BYTES = 96  # of a tensor's entry in a header beside its name, at most
FLOATS = {"bfloat16": "BF16", "float32": "F32", "mxfp4": "BF16"}  # --dtype -> that of weights that are not MXFP4


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """Tensors that become tensors: `action` is copy, cast, dequantize, quantize or rewrite (by `kind`)."""

    action: str
    sources: tuple[Stored, ...]
    outputs: tuple[Output, ...]
    kind: str = ""

    @property
    def nbytes(self) -> int:
        return sum(output.nbytes for output in self.outputs)


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file to be written; its steps lie in it in this order."""

    name: str
    steps: tuple[Step, ...]

    @property
    def outputs(self) -> Iterator[Output]:
        return (output for step in self.steps for output in step.outputs)

    def header(self) -> bytes:
        return header_bytes(self.outputs)

    @functools.cached_property
    def data_bytes(self) -> int:
        return sum(step.nbytes for step in self.steps)

    @functools.cached_property
    def size(self) -> int:
        return len(self.header()) + self.data_bytes


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that a conversion writes: the shards, and the content of the small files beside them."""

    source: Description
    target: Description
    shards: tuple[Shard, ...]
    small_files: dict[str, bytes]

    def sizes(self) -> dict[str, int]:
        """File name -> bytes, in the order in which they are written."""
        return {shard.name: shard.size for shard in self.shards} | {n: len(c) for n, c in self.small_files.items()}

    def digest(self) -> str:
        """SHA-256 of all that is written and of where it comes from; other bytes have another digest."""
        digest = hashlib.sha256()
        for shard in self.shards:
            for step in shard.steps:
                places = [(stored.file.name, stored.start, stored.dtype, stored.shape) for stored in step.sources]
                digest.update(repr((step.action, step.kind, places)).encode())
            digest.update(shard.header())
        for name, content in self.small_files.items():
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()


def make_plan(
    checkpoint: Checkpoint, source: Description, target: Description, dtype: str | None, shard_size: int
) -> Plan:
    """Plans the conversion of `checkpoint`, which `source` describes, into what `target` describes.

    `dtype` is "bfloat16", "float32", "mxfp4" or None: as it is. `shard_size`: bytes of a file, at most, unless a single
    tensor is larger. Raises `ValueError` with the complete list of missing, unexpected, misshapen and wrong tensors.
    """
    config = source.config
    pairs = config.num_hidden_layers * config.num_experts
    if pairs > 4 * len(checkpoint.tensors) + 10_000:  # a config alone shall not make the plan large
        raise ValueError(
            f"config.json: expected layers and experts for {len(checkpoint.tensors)} tensors, got "
            f"{config.num_hidden_layers} layers of {config.num_experts} experts"
        )
    with _without_garbage_collection():
        steps = _Steps(checkpoint, source, target, dtype).make()
        shards = _shards(steps, shard_size)
        return Plan(source, target, shards, _small_files(checkpoint, target, shards))


class _Steps:
    def __init__(self, checkpoint: Checkpoint, source: Description, target: Description, dtype: str | None):
        self.checkpoint, self.source, self.target = checkpoint, source, target
        self.float = None if dtype is None else FLOATS[dtype]
        self.left = dict(checkpoint.tensors)
        self.problems: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)  # heading -> (name, what)

    def make(self) -> list[Step]:
        steps: list[Step] = []
        wanted = expected_tensors(self.source.config)
        for name, expected in tqdm(wanted.items(), desc="planning", unit="tensor", delay=2, leave=False):
            steps += self._text(name, expected)
        steps += self._vision()
        for name, stored in self.left.items():
            self.problems["unexpected"].append((name, f"{stored.dtype} {list(stored.shape)}"))
        if self.problems:
            raise ValueError(f"{self.checkpoint.folder}: {_listing(self.problems)}")
        rank = {file: number for number, file in enumerate(self.checkpoint.files)}
        return sorted(steps, key=lambda step: (rank[step.sources[0].file], step.sources[0].start))

    def _text(self, name: str, expected: Expected) -> list[Step]:
        ours = self.target.prefix + name
        if expected.kind == "expert":
            return self._expert(self.source.prefix + name, ours, expected)
        stored = self._take(self.source.prefix + name, lambda it: mismatch(it, expected, self.source.config))
        if stored is None:
            return []
        if expected.kind == "full":
            return [_copy(stored, ours)]
        if expected.kind == "plain":
            return [_cast(stored, ours, self.float)]
        return self._rewrite(stored, ours, expected)

    def _expert(self, theirs: str, ours: str, expected: Expected) -> list[Step]:
        base, packed = ours.removesuffix("weight"), packed_shapes(expected.shape)
        if not self.source.quantized:
            stored = self._take(theirs, lambda it: mismatch(it, expected, self.source.config))
            if stored is None:
                return []
            if not self.target.quantized:
                return [_cast(stored, ours, self.float)]
            outputs = tuple(Output(base + suffix, "U8", shape) for suffix, shape in packed.items())
            return [Step("quantize", (stored,), outputs)]
        parts: list[Stored] = []
        for suffix, shape in packed.items():
            part = self._take(theirs.removesuffix("weight") + suffix, lambda it, shape=shape: _not_bytes(it, shape))
            if part is None:
                return []
            parts.append(part)
        if self.target.quantized:
            return [_copy(part, base + suffix) for part, suffix in zip(parts, packed, strict=True)]
        return [Step("dequantize", tuple(parts), (Output(ours, self.float, expected.shape),))]

    def _rewrite(self, stored: Stored, ours: str, expected: Expected) -> list[Step]:
        narrow = self.target.config.checkpoint_layout == "kimi_linear"
        if expected.kind != "a_log" and (stored.dtype == "BF16" or not narrow):
            output = Output(ours, "BF16" if narrow else "F32", expected.shape)
            return [Step("rewrite", (stored,), (output,), expected.kind)]
        try:
            tensor = rewritten(
                self.checkpoint.load(stored), expected.kind, ours, self.source.config, self.target.config
            )
        except ValueError as error:
            self.problems["wrong values"].append((ours, str(error).partition(": ")[2]))
            return []
        output = Output(ours, NAMES[tensor.dtype], tuple(tensor.shape))
        return [Step("rewrite", (stored,), (output,), expected.kind)]

    def _vision(self) -> list[Step]:
        if self.source.vision is None:
            return []
        steps = []
        for name, expected in expected_vision(self.source.vision).items():
            stored = self._take(name, lambda it, expected=expected: mismatch(it, expected, self.source.config))
            if stored is not None and self.target.vision is not None:
                steps.append(_copy(stored, name))
        return steps

    def _take(self, name: str, wrong: Callable[[Stored], str | None]) -> Stored | None:
        stored = self.left.pop(name, None)
        if stored is None:
            self.problems["missing"].append((name, ""))
            return None
        problem = wrong(stored)
        if problem is not None:
            self.problems["of another shape or dtype"].append((name, problem))
        return stored if problem is None else None


def _copy(stored: Stored, name: str) -> Step:
    return Step("copy", (stored,), (Output(name, stored.dtype, stored.shape),))


def _cast(stored: Stored, name: str, dtype: str | None) -> Step:
    if dtype in (None, stored.dtype):
        return _copy(stored, name)
    return Step("cast", (stored,), (Output(name, dtype, stored.shape),))


def _not_bytes(stored: Stored, shape: tuple[int, ...]) -> str | None:
    if (stored.dtype, stored.shape) == ("U8", shape):
        return None
    return f"expected U8 {list(shape)}, got {stored.dtype} {list(stored.shape)}"


def _shards(steps: Iterable[Step], shard_size: int) -> tuple[Shard, ...]:
    groups: list[list[Step]] = []
    filled = math.inf
    for step in steps:
        size = step.nbytes + sum(len(output.name.encode()) + HEADER_BYTES for output in step.outputs)
        if filled + size > shard_size:
            groups.append([])
            filled = 64
        groups[-1].append(step)
        filled += size
    total = len(groups)
    names = [SINGLE] if total == 1 else [f"model-{n:05d}-of-{total:05d}.safetensors" for n in range(1, total + 1)]
    return tuple(
        Shard(name, tuple(sorted(group, key=lambda step: -DTYPES[step.outputs[0].dtype].itemsize)))
        for name, group in zip(names, groups, strict=True)
    )


def _small_files(checkpoint: Checkpoint, target: Description, shards: tuple[Shard, ...]) -> dict[str, bytes]:
    """Content of every file but the shards; `config.json` comes last, so that a folder with one is complete."""
    files = {path.name: path.read_bytes() for path in side_files(checkpoint.folder)}
    if len(shards) > 1:
        weight_map = {output.name: shard.name for shard in shards for output in shard.outputs}
        index = {"metadata": {"total_size": sum(shard.data_bytes for shard in shards)}, "weight_map": weight_map}
        files[INDEX] = _json_bytes(index)
    return files | {"config.json": _json_bytes(target.raw)}


def _json_bytes(content: dict) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def grouped(items: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Lines that name all of `items`, (name, remark), those that differ in numbers alone together where that says all.

    Example: `layers.{1-92}.experts.{0-895}.w1.weight  (82,432)` stands for every pair of the two ranges.
    """
    groups: dict[tuple, list[tuple[int, ...]]] = collections.defaultdict(list)
    for name, remark in items:
        pieces = re.split(r"(?<=\.)([0-9]{1,9})(?=\.)", name)
        groups[(remark, *pieces[::2])].append(tuple(map(int, pieces[1::2])))
    for (remark, first, *texts), numbers in groups.items():
        axes = [sorted(set(axis)) for axis in zip(*numbers, strict=True)]
        tail = f"  {remark}" if remark else ""
        if len(numbers) > 1 and len(numbers) == math.prod(map(len, axes)):
            ranges = (_ranges(axis) for axis in axes)
            yield first + "".join(map(str.__add__, ranges, texts)) + f"{tail}  ({len(numbers):,})"
        else:
            for one in sorted(numbers):
                yield first + "".join(map(str.__add__, map(str, one), texts)) + tail


def _ranges(numbers: list[int]) -> str:
    runs = itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends)
    return text if len(numbers) == 1 else f"{{{text}}}"


def _listing(problems: dict[str, list[tuple[str, str]]]) -> str:
    lines = ["expected the tensors of its config.json, got others; nothing was written"]
    for heading, items in problems.items():
        lines.append(f"{len(items):,} {heading}:")
        lines += [f"  {line}" for line in grouped(items)]
    return "\n".join(lines)


def tensor_lines(plan: Plan) -> Iterator[str]:
    """Every tensor that is written, with dtype and shape."""
    outputs = (output for shard in plan.shards for output in shard.outputs)
    return grouped((output.name, f"{output.dtype} {list(output.shape)}") for output in outputs)


def source_files(checkpoint: Checkpoint) -> list[list]:
    """Name, bytes and time of every file that tensors come from: what tells a changed source."""
    return [[path.name, (status := path.stat()).st_size, status.st_mtime_ns] for path in checkpoint.files]


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Half a million small objects that all stay would be looked through again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
