"""The page Datasets: overview, images with captions, scans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial as bound
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Form
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response

from smalti import UserError
from smalti_webui.places.datasets.captions import Caption, ChangedMeanwhileError, read_caption
from smalti_webui.places.datasets.catalog import Found
from smalti_webui.places.datasets.images import (
    Listing,
    caption_file,
    has_caption_files,
    image_in,
    is_addressable,
    is_browsable,
)
from smalti_webui.places.job_router import shown
from smalti_webui.places.jobs import Job
from smalti_webui.places.state import Places, places
from smalti_webui.server.files import below_roots
from smalti_webui.server.messages import toast
from smalti_webui.server.processes import run_cli
from smalti_webui.server.templating import page, partial

router = APIRouter(prefix="/datasets")
_PER_PAGE = 48
_CACHE_SECONDS = 60.0
COMMANDS = {
    "scan": ("Scan", "list images, captions that are missing, and files that cannot be read"),
    "buckets": ("Buckets", "count images by shape, and what a run does about rare shapes"),
    "check": ("Check", "check that every bucket fills a batch, and count the steps of an epoch"),
}
_NOT_UTF_8 = "the name is not UTF-8; rename the file"
Filter = Literal["all", "missing", "corrupt"]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """An image of the grid with its caption. `problem` is why a scan found it unusable, or why it is not `addressable`."""

    key: str
    caption: Caption
    problem: str
    addressable: bool = True


@router.get("")
def overview(request: Request) -> Response:
    own = places(request)
    found, unread = own.catalog.all()
    known = {each.id: own.catalog.known(each) for each in found}
    return page(
        request, "places/datasets.html", title="Datasets", datasets=found, known=known, unread=unread, added=own.catalog.added()
    )


@router.post("/folders")
async def add_folder(request: Request, folder: Annotated[str, Form()]) -> Response:
    """Show the images of a folder that no run uses yet."""
    own = places(request)
    dataset = own.catalog.add(below_roots(own.settings, Path(folder.strip()).expanduser()))
    return RedirectResponse(f"/datasets/{dataset}", 303)


@router.post("/folders/remove")
async def remove_folder(request: Request, folder: Annotated[str, Form()]) -> Response:
    places(request).catalog.remove(Path(folder))
    answer = RedirectResponse("/datasets", 303)
    toast(answer, f"{folder} is no longer listed; its files are untouched", "info")
    return answer


@router.get("/{dataset_id}")
def dataset(request: Request, dataset_id: str, show: Filter = "all", search: str = "", at: int = 1) -> Response:
    """A dataset with a page of its images."""
    own = places(request)
    found = _found(own, dataset_id)
    known = own.catalog.known(found)
    folder, reason = folder_of(own, found)
    listing = own.listings.of(folder, found.spec.caption_extension) if folder is not None else Listing(images=(), complete=True)
    problems = {each["key"]: each["reason"] for each in (known.scan or {}).get("quarantined", ())}
    edits = has_caption_files(found.spec)
    keys = [image.key for image in listing.images if _matches(image.key, image.captioned or not edits, show, search, problems)]
    pages = max(1, -(-len(keys) // _PER_PAGE))
    at = min(max(1, at), pages)
    images = [_image(found, folder, key, problems) for key in keys[(at - 1) * _PER_PAGE : at * _PER_PAGE] if folder]
    return page(
        request,
        "places/dataset.html",
        title=found.spec.id,
        dataset=found,
        known=known,
        commands=COMMANDS,
        listing=listing,
        reason=reason,
        editable=edits and folder is not None,
        images=images,
        matching=len(keys),
        show=show,
        search=search,
        at=at,
        pages=pages,
        jobs=own.jobs.latest(dataset=found.id)[:3],
        bars=_bars(known.results.get("buckets")),
    )


@router.post("/{dataset_id}/run/{name}")
async def run_command(request: Request, dataset_id: str, name: Literal["scan", "buckets", "check"]) -> Response:
    """Start `smalti dataset scan`, `buckets` or `check` for the configuration of the dataset."""
    own = places(request)
    found = _found(own, dataset_id)
    args = ["dataset", name, *own.catalog.arguments(found.source), "--json", "--progress"]
    title = f"{COMMANDS[name][0]} {found.spec.id}"
    keep = bound(_keep, own, found, name)
    job = own.jobs.start(title, args, template="places/dataset_result.html", then=keep, dataset=found.id, command=name)
    return shown(request, job)


@router.get("/{dataset_id}/cache")
async def cache(request: Request, dataset_id: str) -> Response:
    """What is encoded for the configuration of the dataset, from `smalti cache ls`."""
    own = places(request)
    source = _found(own, dataset_id).source
    result = await run_cli(["cache", "ls", *source.arguments, "--json"], timeout=_CACHE_SECONDS)
    caches = result.json["encodings"] if isinstance(result.json, dict) else None
    return partial(request, "places/dataset_cache.html", caches=caches, error=result.stderr.strip(), source=source)


# --- images and captions --------------------------------------------------------------------------------------------


@router.get("/{dataset_id}/image/{key:path}")
def image(request: Request, dataset_id: str, key: str) -> Response:
    return FileResponse(_image_file(places(request), dataset_id, key)[1])


@router.get("/{dataset_id}/thumbnail/{width}/{key:path}")
def thumbnail(request: Request, dataset_id: str, width: int, key: str) -> Response:
    own = places(request)
    made = own.thumbnails.of(_image_file(own, dataset_id, key)[1], width)
    return FileResponse(made, media_type="image/webp", headers={"cache-control": "private, max-age=60"})


@router.get("/{dataset_id}/caption")
def caption(request: Request, dataset_id: str, key: str) -> Response:
    """The editor of a caption."""
    own = places(request)
    found, file = _image_file(own, dataset_id, key)
    return _editor(request, own, found, key, read_caption(_caption_file(own, found, file)))


@router.post("/{dataset_id}/caption")
def save_caption(
    request: Request,
    dataset_id: str,
    key: Annotated[str, Form()],
    version: Annotated[str, Form()] = "",
    text: Annotated[str, Form()] = "",
) -> Response:
    """Save a caption, unless its file is no longer what the page has shown."""
    own = places(request)
    found, file = _image_file(own, dataset_id, key)
    target = _caption_file(own, found, file)
    try:
        saved = own.captions.save(target, text, version)
    except ChangedMeanwhileError as error:
        there = read_caption(target)
        shown_text = Caption(text=text, version=there.version, problem=there.problem)
        return _editor(request, own, found, key, shown_text, error=error, there=there.text)
    own.listings.forget()
    answer = _editor(request, own, found, key, saved, changed=True)
    toast(answer, f"{target.name} saved", "success")
    return answer


@router.post("/{dataset_id}/caption/undo")
def undo_caption(request: Request, dataset_id: str, key: Annotated[str, Form()]) -> Response:
    """Take back the last change that the page made to a caption."""
    own = places(request)
    found, file = _image_file(own, dataset_id, key)
    target = _caption_file(own, found, file)
    try:
        restored = own.captions.undo(target)
    except ChangedMeanwhileError as error:
        return _editor(request, own, found, key, read_caption(target), error=error)
    own.listings.forget()
    answer = _editor(request, own, found, key, restored, changed=True)
    toast(answer, f"{target.name}: the last change was undone", "success")
    return answer


def _editor(
    request: Request,
    own: Places,
    found: Found,
    key: str,
    caption: Caption,
    *,
    error: UserError | None = None,
    there: str | None = None,
    changed: bool = False,
) -> Response:
    """The editor; `there` is the text in the file if it differs from that of the editor. `changed` also updates the grid."""
    _, file = _image_file(own, found.id, key)
    target = _caption_file(own, found, file)
    return partial(
        request,
        "places/caption.html",
        dataset=found,
        key=key,
        caption=caption,
        file=target,
        undoes=len(own.captions.changes(target)),
        error=error,
        there=there,
        changed=changed,
        image=Shown(key=key, caption=read_caption(target), problem="") if changed else None,
        editable=True,
    )


def _found(own: Places, dataset_id: str) -> Found:
    found = own.catalog.find(dataset_id)
    if found is None:
        raise HTTPException(404, "there is no such dataset: its configuration was changed or removed")
    return found


def folder_of(own: Places, found: Found) -> tuple[Path | None, str]:
    """The folder of the images, or None and why they are not shown."""
    if not is_browsable(found.spec) or found.spec.instance_data_dir is None:
        what = "a table" if found.spec.type == "local" else f"the storage {found.spec.type!r}"
        return (
            None,
            f"The images come from {what}, which this page does not show. `smalti dataset order` lists them with captions.",
        )
    try:
        folder = below_roots(own.settings, found.spec.instance_data_dir)
    except HTTPException:
        roots = ", ".join(map(str, own.settings.roots))
        return None, f"The folder is not below {roots}. To see its images: smalti ui {roots} {found.spec.instance_data_dir}"
    return (folder, "") if folder.is_dir() else (None, "The folder is not there.")


def _image_file(own: Places, dataset_id: str, key: str) -> tuple[Found, Path]:
    """The dataset and the image with this key. HTTPException 403 or 404 for what the page may not show."""
    found = _found(own, dataset_id)
    folder, reason = folder_of(own, found)
    if folder is None:
        raise HTTPException(404, reason)
    path = below_roots(own.settings, image_in(folder, key))
    if not path.is_file():
        raise HTTPException(404, f"there is no image {key}")
    return found, image_in(folder, key)


def _caption_file(own: Places, found: Found, image: Path) -> Path:
    """The text file of an image. HTTPException 403 if a link leads out of the roots, 404 if captions are not in files."""
    if not has_caption_files(found.spec):
        raise HTTPException(404, f"the captions of this dataset are not text files: {found.spec.caption_strategy}")
    target = caption_file(found.spec, image)
    below_roots(own.settings, target)
    return target


def _image(found: Found, folder: Path, key: str, problems: Mapping[str, str]) -> Shown:
    if not is_addressable(key):
        return Shown(key=key, caption=Caption(text="", version=""), problem=_NOT_UTF_8, addressable=False)
    if not has_caption_files(found.spec):
        return Shown(key=key, caption=Caption(text="", version=""), problem=problems.get(key, ""))
    file = caption_file(found.spec, image_in(folder, key))
    try:
        text = read_caption(file) if file.resolve().is_relative_to(folder.resolve()) else Caption(text="", version="")
    except UserError as error:
        text = Caption(text="", version="", problem=error.message)
    return Shown(key=key, caption=text, problem=problems.get(key, ""))


def _matches(key: str, captioned: bool, show: Filter, search: str, problems: Mapping[str, str]) -> bool:
    if search and search.lower() not in key.lower():
        return False
    if show == "missing":
        return not captioned
    return show == "all" or (key in problems and not problems[key].startswith("no caption"))


def _keep(own: Places, found: Found, name: str, job: Job) -> None:
    if isinstance(job.result, dict):
        own.catalog.keep(found, name, job.result)


def _bars(buckets: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The rows of the histogram, by width over height; `share` is that of the largest bucket."""
    rows = list(buckets["buckets"]) if buckets else []
    most = max((row["images"] for row in rows), default=0)
    ordered = sorted(rows, key=lambda row: row["width"] / max(1, row["height"]))
    return [{**row, "share": row["images"] / most if most else 0} for row in ordered]
