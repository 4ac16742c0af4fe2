"""The caches that the page Maintenance lists and clears."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from smalti import UserError
from smalti_webui.places.gallery.thumbnails import Thumbnails

THUMBNAILS = "thumbnails"
"""The kind of the thumbnails of this page, which no command knows."""
_NOTES = {
    "fsdp-blocks": "Block detection looks at each model again.",
    "deepspeed-offload": "Parameters and optimizer state that runs swapped to a drive. Runs that have ended need none of it.",
}
_EMPTY = "it is empty"
_ENCODED = "The next run encodes it again."


@dataclass(frozen=True, kw_only=True)
class CacheRow:
    """A cache. `note` says what clearing it leads to. `reason` says why it cannot be cleared now, "" if it can."""

    name: str
    title: str
    place: str
    entries: int
    bytes: int
    kind: str
    note: str
    reason: str = ""
    detail: str = ""


def caches_of(listed: Any, used_by: Sequence[str]) -> list[CacheRow]:
    """The rows of what `smalti cache ls --json` has printed. Encoded latents and texts are not cleared while a run runs."""
    if not isinstance(listed, dict):
        return []
    rows = []
    for each in listed.get("encodings", ()):
        reason = f"a run may be using it: {', '.join(used_by)}" if used_by else ""
        detail = f"{each['packs']:,} packs, {each['damaged'] + len(each['unreadable'])} damaged"
        title = f"encoded {each['kind']}" if each.get("kind") else "encoded"
        row = CacheRow(
            name=each["name"],
            title=title,
            place=each["place"],
            entries=each["entries"],
            bytes=each["bytes"],
            kind="encodings",
            note=_ENCODED,
            reason=reason,
            detail=detail,
        )
        rows.append(row)
    for each in listed.get("caches", ()):
        note = _NOTES.get(each["name"], "It is made again when it is needed.")
        fields = {name: each[name] for name in ("name", "title", "place", "entries", "bytes")}
        rows.append(CacheRow(**fields, kind="plugin", note=note, reason="" if each["bytes"] else _EMPTY))
    return rows


def own_caches(thumbnails: Thumbnails) -> list[CacheRow]:
    """What this page keeps and can make again."""
    found = thumbnails.files()
    size = thumbnails.size()
    row = CacheRow(
        name="thumbnails",
        title="thumbnails of this page",
        place=str(thumbnails.folder),
        entries=len(found),
        bytes=size,
        kind=THUMBNAILS,
        note="They are made again when they are shown.",
        reason="" if size else _EMPTY,
    )
    return [row]


def confirmed(rows: Sequence[CacheRow], name: str, place: str) -> CacheRow:
    """The cache that the user has confirmed. Raises UserError if it is elsewhere now, or cannot be cleared."""
    row = next((each for each in rows if each.name == name and each.place == place), None)
    if row is None:
        raise UserError(f"nothing was cleared: there is no cache {name!r} in {place} any more", fix="load the page again")
    if row.reason:
        raise UserError(f"nothing was cleared: {row.reason}", fix="load the page again")
    return row


def emptied(row: CacheRow) -> CacheRow:
    """The row of a cache after it was cleared."""
    return replace(row, entries=0, bytes=0, detail="", reason=_EMPTY)
