"""Which collective call the ranks wait in, and which rank has not joined it, from the dumps of torch's flight recorder.

torch records the latest collective calls of each rank, of NCCL and of gloo. The format is that of
`torch.distributed.flight_recorder` (version 2.10): entries with the name and the members of a process group, the number of the
call within the group, and its state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from smalti.system import load_json


@dataclass(frozen=True, kw_only=True)
class Call:
    """A collective call of one rank: number `number` of the process group `group`. `ended` as far as the rank knows."""

    group: str
    number: int
    name: str
    sizes: str
    ended: bool


def own_dump() -> str:
    """The record of this rank as JSON; "" if there is none. Imports torch."""
    import torch

    module = getattr(torch._C, "_distributed_c10d", None)
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(module, name, None)
        if dump is None:
            continue
        with suppress(RuntimeError, ValueError, TypeError):
            text = dump(True, False)
            found = text.decode() if isinstance(text, bytes) else str(text)
            if load_json(found).get("entries"):
                return found
    return ""


def last_calls(dump: str) -> dict[str, Call]:
    """The last call of each process group in a dump, by the name of the group. Empty for what is no dump."""
    found: dict[str, Call] = {}
    with suppress(ValueError, AttributeError, TypeError, KeyError):
        for entry in load_json(dump)["entries"]:
            if entry.get("is_p2p"):
                continue
            group = "/".join(dict.fromkeys(map(str, entry["process_group"])))
            call = Call(
                group=group,
                number=int(entry["collective_seq_id"]),
                name=str(entry["profiling_name"]),
                sizes=_sizes(entry),
                ended=bool(entry.get("retired")) or entry.get("state") == "completed",
            )
            if group not in found or found[group].number <= call.number:
                found[group] = call
    return found


def _sizes(entry: Mapping[str, object]) -> str:
    sizes = cast(Sequence[Sequence[int]], entry.get("input_sizes") or ())
    return ", ".join("x".join(map(str, size)) or "scalar" for size in sizes[:2])


def sentence(calls: Mapping[int, Mapping[str, Call]], ranks: int) -> str:
    """What the last calls of the ranks say about a hang, in one sentence; "" if they say nothing.

    `calls` has those of the ranks that could be asked, by rank and group.
    """
    waiting = {(group, call.number): call for mine in calls.values() for group, call in mine.items() if not call.ended}
    for (group, number), call in sorted(waiting.items(), key=lambda each: each[0]):
        joined = {rank: mine[group] for rank, mine in calls.items() if group in mine and mine[group].number >= number}
        inside = sorted(rank for rank, mine in joined.items() if mine.number == number and not mine.ended)
        members = [rank for rank, mine in calls.items() if group in mine]
        missing = sorted(set(members) - set(joined))
        silent = sorted(set(range(ranks)) - set(calls))
        names = {mine.name for rank, mine in joined.items() if mine.number == number}
        what = f"{call.name} (call {number} of group {group}{f', size {call.sizes}' if call.sizes else ''})"
        if len(names) > 1:
            parts = [f"rank {rank}: {joined[rank].name}" for rank in sorted(joined) if joined[rank].number == number]
            return f"the ranks are in different calls {number} of group {group}: {', '.join(parts)}"
        if missing:
            at = max(calls[missing[0]][group].number, 0)
            return f"{_names(inside)} in {what}, which {_names(missing, verb=('has', 'have'))} not joined (last call: {at})"
        if silent:
            return f"{_names(inside)} in {what}; {_names(silent, verb=('does', 'do'))} not tell its last call"
        sizes = {mine.sizes for mine in joined.values() if mine.number == number}
        if len(sizes) > 1:
            different = "; ".join(sorted(sizes))
            return f"the ranks are in {call.name} (call {number} of group {group}) with different sizes: {different}"
        if len(inside) == len(members):
            return f"all ranks are in {what}, which does not end: the network, or a device"
    return ""


def _names(ranks: Sequence[int], verb: tuple[str, str] = ("waits", "wait")) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} {verb[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"ranks {shown} {verb[1]}"
