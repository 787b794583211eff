"""Pictures of two handwritten digits side by side, and what they say: from the digits that scikit-learn brings along.

Held out are both digits and pairs: no picture of a held-out document, and no pair, is met in training.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
from PIL import Image

from .prepare import SPLITS
from .prepare_images import Row


SIDE = 84  # pixels of a digit: 3 x 3 tokens of 28
HELD_OUT_DIGITS = 5  # every so many-th picture of a digit


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Pictures uint8 [N, 8, 8] and what they show, int64 [N]. Raises ImportError without scikit-learn."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return np.rint(found.images * (255 / 16)).astype(np.uint8), found.target


def is_held_out(left: int, right: int) -> bool:
    """Whether a pair is only asked, never learned: 10 of 100; in each place every digit is in one of them."""
    return (left + 3 * right) % 10 == 0


def picture(left: np.ndarray, right: np.ndarray) -> Image.Image:
    """Two digits [8, 8] side by side, each enlarged to SIDE x SIDE."""
    enlarged = [Image.fromarray(one).resize((SIDE, SIDE), Image.Resampling.BICUBIC) for one in (left, right)]
    return Image.fromarray(np.concatenate([np.asarray(one) for one in enlarged], 1))


def pairs(split: str, count: int, seed: int) -> Iterator[tuple[str, Image.Image]]:
    """`count` texts of two digits with their pictures: all pairs of the split in turn, each time of other pictures."""
    images, labels = digits()
    asked = split != SPLITS[0]
    of_digit = [np.flatnonzero(labels == digit) for digit in range(10)]
    mine = [
        np.array([index for place, index in enumerate(found) if (place % HELD_OUT_DIGITS == 0) == asked])
        for found in of_digit
    ]
    known = [(left, right) for left in range(10) for right in range(10) if is_held_out(left, right) == asked]
    random = np.random.default_rng((seed, asked))
    for number in range(count):
        if number % len(known) == 0:
            order = random.permutation(len(known))
        left, right = known[order[number % len(known)]]
        first, second = (images[random.choice(mine[digit])] for digit in (left, right))
        yield f"{left}{right}", picture(first, second)


def rows(training: int, held_out: int, seed: int, with_pictures: bool = True) -> Iterator[Row]:
    """Documents of `prepare_images`: a picture and its two digits; or the digits alone."""
    for split, count in zip(SPLITS, (training, held_out), strict=True):
        for number, (text, image) in enumerate(pairs(split, count, seed)):
            shown = [{"type": "image", "image": image}] if with_pictures else []
            yield Row(f"{split} {number}", split, {"content": [*shown, {"type": "text", "text": text}]})


def fingerprint() -> str:
    """Differs when the digits that come with scikit-learn do."""
    return hashlib.sha256(b"".join(part.tobytes() for part in digits())).hexdigest()
