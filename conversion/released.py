"""The two released models: where they are, at which commit these facts were read, and under which licence."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Released:
    """A checkpoint of its publisher. `revision`: a commit of the repository `name`; `weight_bytes`: of all its safetensors."""

    name: str
    revision: str
    weight_bytes: int
    multimodal: bool
    license: str
    license_name: str | None = None
    license_link: str | None = None


RELEASED = {  # by the preset that describes it
    "kimi-k3": Released(
        name="moonshotai/Kimi-K3",
        revision="f831ab66814297da540d832a5235f8e904f29d06",
        weight_bytes=1_560_936_091_448,
        multimodal=True,
        license="other",
        license_name="kimi-k3-license",
        license_link="https://huggingface.co/moonshotai/Kimi-K3/blob/f831ab66814297da540d832a5235f8e904f29d06/LICENSE",
    ),
    "kimi-linear-48b-a3b": Released(
        name="moonshotai/Kimi-Linear-48B-A3B-Instruct",
        revision="e1df551a447157d4658b573f9a695d57658590e9",
        weight_bytes=98_248_224_120,
        multimodal=False,
        license="mit",
    ),
}


def find_released(name: str | None) -> Released | None:
    """The released model called `name` on the Hub, or None."""
    return next((one for one in RELEASED.values() if one.name == name), None)
