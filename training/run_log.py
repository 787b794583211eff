"""The log of a run: a file of JSON lines, a progress bar, and any tracker that Accelerate knows by name."""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm


LOG = "log.jsonl"
STEP, VALIDATION, STAGE = "step", "validation", "stage"


def read_log(folder: Path) -> list[dict]:
    """The records of the run in `folder`, oldest first; a last line that a crash cut off is left out.

    Raises ValueError if there is no log, or if a line in its middle is no JSON object.
    """
    path = Path(folder) / LOG
    if not path.is_file():
        raise ValueError(f"run: expected a folder with {LOG}, got {folder}")
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: expected a JSON object, got {line[:80]!r}") from error
    return records


def records_of(records: Sequence[dict], kind: str) -> list[dict]:
    """Those of one kind, in their order."""
    return [record for record in records if record["kind"] == kind]


class RunLog:
    """Writes what a run measures; on ranks other than the main one it does nothing.

    A line of `folder`/log.jsonl is one record: `kind` ("step", "validation" or "stage"), `step`, `tokens` (seen by then), and
    its numbers. Numbers that are not finite become null. It is written at once, so that a killed run loses no line but
    perhaps the one it was writing.

    Args:
        folder: of the run; made if it is missing.
        total_tokens: of the whole run, for the progress bar.
        step, tokens: where the run goes on; 0 at its start. Lines of later steps are dropped: they will come again.
        trackers: names, say "tensorboard", "trackio" or "wandb"; `project` and `settings` are what they file the run under.
        is_main: whether this rank writes.

    Raises:
        ValueError: a tracker that Accelerate does not know, or whose package is not installed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        total_tokens: int,
        step: int = 0,
        tokens: int = 0,
        trackers: Sequence[str] = (),
        project: str = "moe-lc",
        settings: dict[str, Any] | None = None,
        is_main: bool = True,
    ):
        self.is_main = is_main
        if not is_main:
            return
        self.trackers = start_trackers(trackers, folder, project, settings or {}) if trackers else []
        folder.mkdir(parents=True, exist_ok=True)
        drop_after(folder, step)
        self.file = (folder / LOG).open("a", encoding="utf-8")
        self.bar = tqdm(total=total_tokens, initial=tokens, unit="tok", unit_scale=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def write(self, kind: str, step: int, tokens: int, numbers: dict[str, Any]) -> None:
        """One record. The progress bar shows `loss`, `tokens_per_second` and `mfu` of steps, and names spikes."""
        if not self.is_main:
            return
        record = finite({"kind": kind, "step": step, "tokens": tokens, **numbers})
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        for tracker in self.trackers:
            tracker.log({f"{kind}/{name}": number for name, number in flattened(numbers)}, step=step)
        if kind == STEP:
            self._show(step, tokens, numbers)

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """The progress bar, which stands still inside, says `what` goes on."""
        if self.is_main:
            self.bar.set_description(what)
        yield
        if self.is_main:
            self.bar.set_description()

    def _show(self, step: int, tokens: int, numbers: dict[str, Any]) -> None:
        shown = {"loss": f"{numbers['loss']:.3f}", "tok/s": f"{numbers['tokens_per_second']:,.0f}"}
        if "mfu" in numbers:
            shown["MFU"] = f"{numbers['mfu']:.1%}"
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update(tokens - self.bar.n)
        if numbers.get("spike"):
            self.bar.write(f"step {step}: the loss jumped to {numbers['loss']:.3f}")

    def close(self) -> None:
        """Ends the progress bar and the trackers."""
        if not self.is_main:
            return
        self.bar.close()
        self.file.close()
        for tracker in self.trackers:
            tracker.finish()


def drop_after(folder: Path, step: int) -> None:
    """Keeps the lines up to `step` of the log in `folder`, all or nothing; there may be no log yet, or nothing to drop."""
    if not (folder / LOG).exists():
        return
    kept = "".join(json.dumps(record) + "\n" for record in read_log(folder) if record["step"] <= step)
    if kept.encode() == (folder / LOG).read_bytes():
        return
    new = folder / f"{LOG}.new"
    with new.open("w", encoding="utf-8") as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / LOG)


def start_trackers(names: Sequence[str], folder: Path, project: str, settings: dict[str, Any]) -> list:
    """Accelerate's trackers of these names, started; those that write files write them into `folder`."""
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, filter_trackers

    PartialState()  # which rank this is: Accelerate's trackers ask, and its messages refuse to be written before
    known = [name for name in names if name in LOGGER_TYPE_TO_CLASS]
    installed = [str(name) for name in filter_trackers(known, folder)]
    missing = [name for name in names if name not in installed]
    if missing:
        known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
        raise ValueError(f"trackers: expected names of installed packages ({known}), got {', '.join(missing)}")
    trackers = []
    for name in installed:
        kind = LOGGER_TYPE_TO_CLASS[name]
        trackers.append(kind(project, folder) if kind.requires_logging_directory else kind(project))
    for tracker in trackers:
        tracker.start()
        tracker.store_init_configuration(dict(flattened(settings)))
    return trackers


def flattened(values: Any, prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Names and scalars of nested dictionaries and lists: `a/b`, `loads/00`, ...; what is None or not finite is left out."""
    if isinstance(values, dict):
        for name, value in values.items():
            yield from flattened(value, f"{prefix}/{name}" if prefix else str(name))
    elif isinstance(values, (list, tuple)):
        for place, value in enumerate(values):
            yield from flattened(value, f"{prefix}/{place:02}")
    elif isinstance(values, (bool, int, str)) or (isinstance(values, float) and math.isfinite(values)):
        yield prefix, values


def finite(value: Any) -> Any:
    """`value` with None in place of numbers that are not finite: JSON has no NaN."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
