"""One figure: pictures, what a model read, and where its MLA layers looked."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


WIDTH, HEIGHT = 2.6, 1.55  # inches of a picture


def draw(path: Path, examples: Sequence[dict[str, Any]]) -> None:
    """Draws a row for each example: the picture with the answer, then the maps of each layer and digit over the picture.

    Of an example: `pixels` [H, W] in [-1, 1], `answer`, `expected`, `maps[layer][digit]` [rows, columns].
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    titles = [
        f"MLA layer {layer + 1}, {side} digit"
        for layer in range(len(examples[0]["maps"]))
        for side in ("left", "right")
    ]
    size = WIDTH * (1 + len(titles)), HEIGHT * len(examples)
    figure, axes = plt.subplots(len(examples), 1 + len(titles), figsize=size, layout="constrained", squeeze=False)
    for row, example in zip(axes, examples, strict=True):
        right = example["answer"] == example["expected"]
        row[0].imshow(example["pixels"], cmap="gray", vmin=-1, vmax=1)
        said = f"reads {example['answer']}" + ("" if right else f", is {example['expected']}")
        row[0].set_title(said, color="tab:green" if right else "tab:red", fontsize=10)
        height, width = example["pixels"].shape
        maps = [one for layer in example["maps"] for one in layer]
        for axis, weights in zip(row[1:], maps, strict=True):
            axis.imshow(example["pixels"], cmap="gray", vmin=-1, vmax=1)
            axis.imshow(weights, cmap="inferno", alpha=0.6, extent=(-0.5, width - 0.5, height - 0.5, -0.5))
        for axis in row:
            axis.set_axis_off()
    for axis, title in zip(axes[0, 1:], titles, strict=True):
        axis.set_title(f"attention of {title}", fontsize=8)
    new = path.with_name(f"{path.name}.new")
    figure.savefig(new, dpi=120, format="png")
    new.replace(path)
    plt.close(figure)
