"""Listings: pages of XML, and the order of the keys."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from smalti.data import StorageError
from smalti_storage_s3.client.transport import Page

_NAMESPACE = re.compile(rb' xmlns="[^"]*"')
_BY_FOLDER = ("SeaweedFS",)
"""Stores that sort a folder by its name without the slash, so that "a/x" comes before "a-b"."""
_TRIES = 3
"""How often a page is asked for that comes in a wrong order."""

ListPage = Callable[[str, str, str, str], Page]
"""(prefix, after, delimiter, token of the page before) -> up to 1,000 keys."""


def parse_page(body: bytes, server: str = "") -> Page | None:
    """Returns the objects of a ListObjectsV2 answer; None for anything else. Common prefixes have size -1."""
    try:
        root = ElementTree.fromstring(_NAMESPACE.sub(b"", body, count=1))
    except ElementTree.ParseError:
        return None
    if root.tag != "ListBucketResult":
        return None
    decode = unquote_plus if root.findtext("EncodingType") == "url" else str
    rows = [
        (decode(each.findtext("Key", "")), int(each.findtext("Size", "0")), each.findtext("ETag", "").strip('"'))
        for each in root.iterfind("Contents")
    ]
    rows += [(decode(each.findtext("Prefix", "")), -1, "") for each in root.iterfind("CommonPrefixes")]
    keys, sizes, etags = ([row[column] for row in rows] for column in range(3))
    return Page(
        keys=keys,  # type: ignore[arg-type]  # the columns of rows
        sizes=sizes,  # type: ignore[arg-type]
        etags=etags,  # type: ignore[arg-type]
        more=root.findtext("IsTruncated") == "true",
        by_folder=server.startswith(_BY_FOLDER),
        token=root.findtext("NextContinuationToken", ""),
        received=len(body),
    )


def pages(list_page: ListPage, prefix: str, after: str, place: str) -> Iterator[Page]:
    """All objects below a prefix, after a key, sorted by key, without those that only mark a folder ("a/")."""
    page = _sorted_page(list_page, prefix, after, place)
    if page.by_folder:
        # In its order, "after" is another place than in ours.
        yield from _in_key_order(list_page, prefix, after)
        return
    while True:
        yield _without_markers(page)
        if not page.more or not page.keys:
            return
        page = _sorted_page(list_page, prefix, page.keys[-1], place)


def _sorted_page(list_page: ListPage, prefix: str, after: str, place: str) -> Page:
    """One page. Listings have no digest: one whose order shows that it was damaged on the way is asked for again."""
    for _ in range(_TRIES):
        page = list_page(prefix, after, "", "")
        wrong = [(key, last) for last, key in pairwise((after, *page.keys)) if key <= last]
        if page.by_folder or not wrong:
            return page
    key, last = wrong[0]
    raise StorageError(f"{place}: the store lists {key!r} after {last!r}", fix="use a store that sorts by key")


def _without_markers(page: Page) -> Page:
    if not any(key.endswith("/") for key in page.keys):
        return page
    keep = [number for number, key in enumerate(page.keys) if not key.endswith("/")]
    return replace(
        page,
        keys=[page.keys[number] for number in keep],
        sizes=[page.sizes[number] for number in keep],
        etags=[page.etags[number] for number in keep],
    )


def _in_key_order(list_page: ListPage, prefix: str, after: str) -> Iterator[Page]:
    """The pages of a store that lists folder by folder: each folder is listed by itself, and put where its slash sorts."""
    folder = prefix.rpartition("/")[0]
    rows: tuple[list[str], list[int], list[str]] = ([], [], [])
    for key, size, etag in _walk(list_page, f"{folder}/" if folder else "", prefix, after):
        for column, value in zip(rows, (key, size, etag), strict=True):
            column.append(value)  # type: ignore[attr-defined]
        if len(rows[0]) == 1000:
            yield Page(keys=rows[0], sizes=rows[1], etags=rows[2], more=True)
            rows = ([], [], [])
    yield Page(keys=rows[0], sizes=rows[1], etags=rows[2], more=False)


def _walk(list_page: ListPage, folder: str, prefix: str, after: str) -> Iterator[tuple[str, int, str]]:
    waiting: list[tuple[str, int, str]] = []  # folders whose place is behind some of the names that follow
    start = ""
    if after.startswith(folder) and after != folder:
        name = after[len(folder) :].partition("/")[0]
        start = folder + name
        # Names up to this one sort before `after`, but for the folders that continue as it does: "a/x" comes after "a-b".
        for end in range(1, len(name) + 1):
            below = f"{folder}{name[:end]}/"
            if name[end : end + 1] < "/" and list_page(below, "", "/", "").keys:
                heapq.heappush(waiting, (below, -1, ""))
    last, token, more = start, "", True
    while more:
        page = list_page(folder, start, "/", token)
        entries = sorted(zip(page.keys, page.sizes, page.etags, strict=True), key=lambda row: row[0].removesuffix("/"))
        token, more = page.token, page.more and bool(page.token)
        for row in entries:
            last = row[0].removesuffix("/") if row[1] < 0 else row[0]
            if row[0] != folder:
                heapq.heappush(waiting, row)
            while waiting and waiting[0][0] < last:
                yield from _below(list_page, heapq.heappop(waiting), prefix, after)
    while waiting:
        yield from _below(list_page, heapq.heappop(waiting), prefix, after)


def _below(list_page: ListPage, row: tuple[str, int, str], prefix: str, after: str) -> Iterator[tuple[str, int, str]]:
    key = row[0]
    if row[1] >= 0:
        if key.startswith(prefix) and key > after and not key.endswith("/"):
            yield row
    elif key.startswith(prefix[: len(key)]) and key >= after[: len(key)]:
        yield from _walk(list_page, key, prefix, after)
