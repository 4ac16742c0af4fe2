"""A third party's Diffusion-DPO, on public names alone: a key of datasets, a column of worse images, a term."""

from pathlib import Path

from smalti import ColumnEntry, OptionGroup, Options, hookimpl, option
from smalti.data import BadSampleError, Column, ColumnKeys, crop, decode


class Keys(ColumnKeys):
    """Pairs of images."""

    worse_path: Path


class PairOptions(Options):
    pair_beta: float | None = option(None, help="Strength of the preference for the better image of a pair.", gt=0)


class Worse(Column):
    """(3, H, W) bytes of the image of the same name in another folder, framed like the image itself."""

    def __init__(self, spec, keys, catalog, specs):
        self._folder = keys.worse_path

    def read(self, sample, framing):
        import torch

        file = (self._folder / sample.key).with_suffix(".png")
        if not file.is_file():
            raise BadSampleError(f"{file} is missing")
        pixels = decode(file.read_bytes(), lambda width, height: framing.scaled)
        pixels = pixels[:, :, ::-1] if framing.flipped else pixels
        return torch.stack([torch.from_numpy(crop(each[None], framing.bucket, framing.offset)[0].copy()) for each in pixels])

    def neutral(self, framing):
        import torch

        return torch.full((3, framing.bucket.height, framing.bucket.width), 255, dtype=torch.uint8)


class Pairs:
    @hookimpl
    def declare_options(self):
        return [OptionGroup(name="pairs", title="Pairs", options=PairOptions)]

    @hookimpl
    def register_columns(self):
        return [ColumnEntry(name="worse", title="Worse images", keys=f"{__name__}:Keys", factory=f"{__name__}:Worse")]

    @hookimpl
    def build_terms(self, config, family):
        import torch
        from torch.nn.functional import logsigmoid

        from smalti.training import Term

        beta = config[PairOptions].pair_beta
        if beta is None:
            return []

        class Pair(Term):
            name = "pair"

            def passes(self, position, datasets):
                paired = any("worse" in spec.columns for spec in datasets)
                return ["base", "policy|latents=worse", "base|latents=worse"] if paired else []

            def factor(self, step):
                """Pairs have the preference in place of the denoising loss."""
                return (1 - self._paired(step)).view(-1, 1, 1, 1)

            def loss(self, step):
                if "base" not in step.predictions:
                    return None
                better, worse = (
                    (step.errors(f"policy{of}") - step.errors(f"base{of}")).flatten(1).mean(1) for of in ("", "|latents=worse")
                )
                return (-logsigmoid(-beta / 2 * step.weights * (better - worse)) * self._paired(step)).mean()

            @staticmethod
            def _paired(step):
                return torch.tensor([float("worse" in spec.columns) for spec in step.batch.datasets], device=step.t.device)

        return [Pair()]


plugin = Pairs()
