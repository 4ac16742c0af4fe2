"""Where a range of keys is split for several ranks, when nothing is known but which key comes after another."""

from __future__ import annotations

from collections.abc import Callable

NextKey = Callable[[str], "str | None"]
"""The first key after a text, None at the end: one request for a page of a listing."""
_LAST = "\U0010ffff"
_MOST = 64  # pieces of one place in the keys; alphabets of file names are smaller


def split_keys(next_key: NextKey, after: str, until: str | None, pieces: int) -> list[str]:
    """Returns texts, ascending, that split the keys with `after` < key <= `until` into about `pieces` ranges.

    Keys are split where they begin to differ: "00000001.png" to "09999999.png" by their second character. Ranges that are still
    too few are split again. Each range has at least one key; how many is not known. It takes about six requests, and one for
    each range.
    """

    def found(text: str) -> str | None:
        key = next_key(text)
        return None if key is None or (until is not None and key > until) else key

    first = found(after)
    if pieces < 2 or first is None:
        return []
    low, high = 0, len(first)
    while low < high:  # the shortest beginning of the first key that some key of the range does not have
        middle = (low + high) // 2
        low, high = (low, middle) if found(first[: middle + 1] + _LAST) is not None else (middle + 1, high)
    if low == len(first):
        return split_keys(next_key, first, until, pieces)  # every key begins with the first one
    bounds: list[str] = []
    key: str | None = first
    while key is not None and len(bounds) < _MOST:
        bound = key[: low + 1] + _LAST
        if bound <= (bounds[-1] if bounds else after):  # of keys that contain _LAST themselves
            break
        bounds.append(bound)
        key = found(bound)
    if key is None:
        bounds.pop()
    if not bounds or len(bounds) + 1 >= pieces:
        return bounds
    ends = [after, *bounds]
    shares = -(-pieces // len(ends))
    inner = [split_keys(next_key, start, end, shares) for start, end in zip(ends, [*bounds, until], strict=True)]
    return sorted({*bounds, *(bound for some in inner for bound in some)})
