"""A video as a list of frames: which of them a model sees, and at which times."""

from collections.abc import Mapping, Sequence
from typing import Any


def frame_times(count: int, metadata: Any, default_fps: float) -> list[float]:
    """Seconds from the start of the video to each of `count` frames.

    Args:
        metadata: None, or a mapping or object with `timestamps` (one number per frame) or `fps` (frames per second of
            the list; with `frames_indices`: of the video that the frames with these numbers were taken from).
        default_fps: what None means.

    Raises:
        ValueError: as many numbers as frames are needed, and they must not decrease; a rate is positive.
    """
    times = _field(metadata, "timestamps") if isinstance(metadata, Mapping) else None
    rate, numbers = _field(metadata, "fps"), _field(metadata, "frames_indices")
    if times is None:
        if rate is not None and not rate > 0:
            raise ValueError(f"fps: expected a positive number, got {rate!r}")
        numbers = range(count) if numbers is None else numbers
        times = [number / (rate or default_fps) for number in numbers]
    times = [float(seconds) for seconds in times]
    if len(times) != count:
        raise ValueError(f"timestamps: expected {count}, one for each frame, got {len(times)}")
    if times != sorted(times) or times[0] < 0:
        raise ValueError(f"timestamps: expected numbers from 0 on that do not decrease, got {times}")
    return times


def sampled_frames(times: Sequence[float], fps: float | None, num_frames: int | None) -> list[int]:
    """Which frames are used: evenly spaced by number, the first and the last among them, `fps` per second on average
    (never more than there are), and at most `num_frames`. None leaves a limit out."""
    count, wanted = len(times), len(times)
    seconds = times[-1] - times[0]
    if fps is not None and seconds > 0:
        wanted = min(count, max(1, round(count * fps * seconds / (count - 1))))
    if num_frames is not None:
        wanted = min(wanted, num_frames)
    if wanted == 1:
        return [0]
    return [round(place * (count - 1) / (wanted - 1)) for place in range(wanted)]


def clock(seconds: float) -> str:
    """`hh:mm:ss.fff`, rounded to the nearest millisecond."""
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{rest // 1000:02d}.{rest % 1000:03d}"


def _field(metadata: Any, name: str) -> Any:
    return metadata.get(name) if isinstance(metadata, Mapping) else getattr(metadata, name, None)
