"""The part of a run's metrics that shows which training images and noise levels it learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from urllib.parse import quote

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from smalti_validation.command import read_both, rising
from smalti_validation.learning import TrainedImage
from smalti_webui.places.datasets.catalog import Found
from smalti_webui.places.datasets.images import is_addressable
from smalti_webui.places.datasets.router import folder_of
from smalti_webui.places.state import Places, places
from smalti_webui.server.templating import partial

router = APIRouter(prefix="/runs")
_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Shown:
    """An image with the address of its thumbnail; "" where this page does not show its dataset."""

    image: TrainedImage
    thumbnail: str


@router.get("/{run_id}/learning")
def learning(request: Request, run_id: str) -> Response:
    """What the visits of the run say; empty without any."""
    own = places(request)
    run = own.run(run_id)
    evaluated, found = read_both(run.directory)
    return partial(
        request,
        "places/learning.html",
        learning=found,
        rising=rising(evaluated),
        least=_with_thumbnails(own, run_id, found.least[:_SHOWN]) if found else [],
        most=_with_thumbnails(own, run_id, found.most[:_SHOWN]) if found else [],
    )


def _with_thumbnails(own: Places, run_id: str, images: Sequence[TrainedImage]) -> list[Shown]:
    """The images, as the datasets of the run's configuration are shown."""
    datasets: dict[str, Found] = {
        each.spec.id: each for each in own.catalog.all()[0] if any(source.run == run_id for source in each.sources)
    }

    @cache
    def address(dataset: str) -> str:
        found = datasets.get(dataset)
        return f"/datasets/{found.id}/thumbnail/320" if found is not None and folder_of(own, found)[0] is not None else ""

    return [
        Shown(image=image, thumbnail=f"{start}/{quote(image.key)}" if start and is_addressable(image.key) else "")
        for image in images
        for start in (address(image.dataset),)
    ]
