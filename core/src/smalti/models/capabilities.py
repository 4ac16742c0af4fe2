"""Optional abilities of a family. A subclass of `ModelFamily` has one if it has the methods of its protocol.

Shapes: B batch, C latent channels, H, W pixels, h, w latent size.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from smalti.models.family import ModelFamily

if TYPE_CHECKING:
    from smalti.checkpoint import ExportFolder, ExportRequest

Encoding = Literal["latents", "texts"]
"""What the two kinds of encoders make: latents of images, conditioning of texts."""


@runtime_checkable
class Exporter(Protocol):
    """For a family whose trained models `smalti checkpoint export` can write in a format for inference."""

    def export(self, folder: ExportFolder) -> None:
        """Write what inference loads into `folder`: the trained tensors, as it yields them, and everything around them.

        Runs on machines without accelerators; the complete model need never be in memory.
        """
        ...


@runtime_checkable
class FormatExporter(Protocol):
    """For an `Exporter` that writes several formats: its `export` does what `folder.request` says."""

    def check_export(self, request: ExportRequest) -> None:
        """Raises UserError for a request that this run cannot be exported with. Called before anything is written."""
        ...


@runtime_checkable
class Cacheable(Protocol):
    """For a family whose latents and conditioning can be encoded before training and stored.

    Then its encoders need not be in memory while it trains, and `encode_images` and `encode_captions` are not called.
    """

    def encoder_identity(self, kind: Encoding) -> dict[str, object]:
        """All that decides what this kind of encoder makes of an image or a text, JSON-able.

        Digests of weights and vocabularies, settings, types; no paths. Where it differs, nothing that was stored is used. Must
        not load the encoder.
        """
        ...

    def release_encoder(self, kind: Encoding) -> None:
        """Free the memory of this kind of encoder. `sample` works as before: the request has the conditioning.

        What decodes latents may stay in host memory, and is on the accelerator only while images are sampled.
        """
        ...


@runtime_checkable
class KeepsRawLatents(Protocol):
    """For a `Cacheable` whose autoencoder's own output takes less space than the latents that the model wants.

    An autoencoder in bf16 returns 16 bits; shifted and scaled they are fp32. So `raw_latents` are stored, and
    `normalise_latents` makes of them what `encode_images` returns, to the bit: it is the second half of that.
    """

    def raw_latents(self, pixels: Tensor) -> Tensor:
        """(B, 3, H, W) in [-1, 1] -> what the autoencoder makes of them (B, ...), in the type in which it computes."""
        ...

    def normalise_latents(self, raw: Tensor) -> Tensor:
        """Raw latents -> latents (B, C, h, w), scaled as the model wants them, on the device of `raw`."""
        ...


@runtime_checkable
class Adaptable(Protocol):
    """For a family that can train an adapter: then it builds a model in which everything else is frozen.

    What is frozen comes from `weights` each time, and checkpoints hold what trains.
    """

    def lora_targets(self) -> tuple[str, ...]:
        """Name endings of the modules that an adapter attaches to by default."""
        ...

    def adapter(self, seed: int) -> dict[str, object] | None:
        """A description of the adapter, JSON-able; None when the run trains all weights.

        It goes into checkpoints, and a run resumes only from those with the same one: include whatever changes the meaning of
        the trained tensors and does not show in their names and shapes, such as a scale and a digest of what is frozen. A
        value is None where it is not known, in a dry run without weights.
        """
        ...


@runtime_checkable
class ScalesAdapter(Protocol):
    """For an `Adaptable` whose adapter can be made weaker or stronger while images are sampled."""

    def adapter_strength(self, model: nn.Module, strength: float) -> AbstractContextManager[None]:
        """Within it, what the trained adapter adds is multiplied by `strength`; 0 gives the model without the adapter.

        `model` is that of `build_model`, spread over ranks or not. Afterwards it is as before. Must not be collective.
        """
        ...


_OPTIONAL = (Exporter, FormatExporter, Cacheable, KeepsRawLatents, Adaptable, ScalesAdapter)
_NEAR = 0.85
"""From this likeness on (difflib) a name counts as misspelt: in ten letters, one that is wrong, missing or too many."""


def latents_to_keep(family: ModelFamily, pixels: Tensor) -> Tensor:
    """(B, 3, H, W) in [-1, 1] -> what is stored of them."""
    return family.raw_latents(pixels) if isinstance(family, KeepsRawLatents) else family.encode_images(pixels)


def latents_of(family: ModelFamily, pixels: Tensor | None, kept: Tensor | None) -> Tensor:
    """The latents of a batch, from its pixels or from what was stored of them."""
    if kept is not None:
        return family.normalise_latents(kept) if isinstance(family, KeepsRawLatents) else kept
    assert pixels is not None, "a batch has pixels or latents"
    return family.encode_images(pixels)


def family_problems(family: object) -> list[str]:
    """What keeps an object from being a `ModelFamily`, in sentences about it: "has no method forward". Empty if it is one.

    Names that are required, one half of an optional protocol, and public names that look like misspelt ones.
    """
    if not isinstance(family, ModelFamily):
        return ["does not inherit from smalti.models.ModelFamily"]
    required = [name for name, value in vars(ModelFamily).items() if getattr(value, "__isabstractmethod__", False)]
    missing = [name for name in required if getattr(getattr(type(family), name), "__isabstractmethod__", False)]
    problems = [f"has no method {name}" for name in missing]
    if not hasattr(family, "name"):
        problems.insert(0, "has no attribute name")
    own = _own_names(family)
    for protocol in _OPTIONAL:
        methods = _public(protocol)
        if (found := methods & own) and found != methods:
            lost, rest = ", ".join(sorted(found)), ", ".join(sorted(methods - found))
            problems.append(f"has {lost} without {rest}, which belongs to it ({protocol.__name__})")
    return problems + _misspelt(own)


def _misspelt(own: set[str]) -> list[str]:
    known = _public(ModelFamily).union(*map(_public, _OPTIONAL))
    problems = []
    for name in sorted(own - known):
        if near := get_close_matches(name, known - own, n=1, cutoff=_NEAR):
            problems.append(f"has {name}, which smalti does not know; did you mean {near[0]}? If not, call it _{name}")
    return problems


def _own_names(family: ModelFamily) -> set[str]:
    """The public names that the family's own classes and the object itself define."""
    classes = [each for each in type(family).__mro__ if issubclass(each, ModelFamily) and each is not ModelFamily]
    return {name for name in vars(family) if name[0] != "_"}.union(*map(_public, classes))


def _public(kind: type) -> set[str]:
    """The public names that a class defines or declares itself."""
    return {name for name in (*vars(kind), *vars(kind).get("__annotations__", {})) if name[0] != "_"}
