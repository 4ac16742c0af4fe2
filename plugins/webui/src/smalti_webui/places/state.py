"""What the pages of this room share while the server runs."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from starlette.exceptions import HTTPException
from starlette.requests import Request

from smalti.rundir import RunDirectory
from smalti_webui.places.datasets.captions import CaptionEditor
from smalti_webui.places.datasets.catalog import Catalog
from smalti_webui.places.datasets.images import Listings
from smalti_webui.places.gallery.thumbnails import Thumbnails
from smalti_webui.places.jobs import Jobs
from smalti_webui.runs.index import FoundRun, RunIndex
from smalti_webui.runs.lookup import index_of
from smalti_webui.server.files import below_roots
from smalti_webui.server.settings import Settings


class Places:
    """Jobs, thumbnails, the editor of captions, datasets, and the runs below the roots. Its files lie in `folder`."""

    def __init__(self, settings: Settings, index: RunIndex) -> None:
        self.settings = settings
        self.folder = settings.data / "places"
        self.index = index
        self.jobs = Jobs()
        self.thumbnails = Thumbnails(self.folder / "thumbnails")
        self.captions = CaptionEditor(self.folder / "captions")
        self.listings = Listings()
        self.catalog = Catalog(self.folder / "datasets", index, settings.roots)

    def run(self, run_id: str) -> FoundRun:
        """The run with this id. HTTPException 404 if there is none."""
        found = self.index.find(run_id)
        if found is None:
            raise HTTPException(404, "there is no such run below the folders of this page")
        return found

    def file_of_run(self, run: RunDirectory, folder: Path, name: str) -> Path:
        """The file with this name in a folder of a run. HTTPException 403 or 404 if it is elsewhere, or is not there."""
        path = below_roots(self.settings, folder / name)
        if not path.is_relative_to(folder.resolve()) or not path.is_file():
            raise HTTPException(404, f"there is no file {name} in {folder}")
        return path


def places(request: Request) -> Places:
    """That of the server of this request."""
    state = request.app.state
    if not hasattr(state, "places"):
        state.places = Places(state.settings, index_of(request))
    return cast(Places, state.places)
