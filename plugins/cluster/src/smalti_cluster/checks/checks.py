"""The checks of nodes against each other, in order, as node 0 runs them through the service."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import cast

from smalti_cluster.checks.comparison import Comparison, compare_facts
from smalti_cluster.checks.peers import CONNECT_SECONDS, best_rates, rounds
from smalti_cluster.checks.report import Measured, NodesReport, Row
from smalti_cluster.checks.service import Reply, Service
from smalti_cluster.checks.speed import START_SECONDS, compare_speed

ROUND_TRIPS = 5
CLOCK_SECONDS = 5.0
"""Clocks that differ by more are a warning."""
VISIBLE_SECONDS = 90.0
"""How long files of other nodes may take to be seen."""
_LATE_SECONDS = 5.0
_ANSWER_SECONDS = 30.0
_TRANSFER_SECONDS = 0.4
_MEASURE_SECONDS = 10.0
_SLOW = 0.7
"""A rate below this part of the median, or of the last one, is reported."""
_WRITABLE = "shared, writable"
_ALL_PAIRS = 16
"""Up to this many nodes each connects to all others, beyond that to those at distances of powers of two."""
_OPEN_PORTS = "allow TCP between the nodes on all ports, or select another network by --main_process_ip"


def check_nodes(
    service: Service,
    *,
    bandwidth: bool = False,
    devices: bool = False,
    last: NodesReport | None = None,
    progress: Callable[[str], None] = lambda sentence: None,
) -> NodesReport:
    """Check all nodes that have connected. `last` is an earlier report, to compare figures with.

    It takes a second or two, but for `bandwidth` some seconds more, and for the speed of `devices` about ten.
    """
    members = service.members()
    comparison = Comparison(names={rank: member.identity.name for rank, member in members.items()})
    comparison.findings += service.problems()
    facts = service.request("facts", seconds=2 * _ANSWER_SECONDS)
    usable = {rank: reply.answer for rank, reply in facts.items() if not _failed(comparison, "facts", rank, reply)}
    compare_facts(comparison, usable)
    clocks = _clocks(service, comparison)
    visible = _storage(service, comparison)
    peers = _reachable(service, comparison)
    links: dict[str, float] = {}
    if bandwidth:
        progress("measuring the bandwidth between the nodes")
        links = _bandwidth(service, comparison, peers, last)
    measured: dict[str, list[Mapping[str, object]]] = {}
    if devices:
        progress("measuring the devices")
        replies = service.request("measure", {"seconds": _MEASURE_SECONDS}, seconds=4 * _MEASURE_SECONDS + START_SECONDS)
        answers = {rank: reply.answer for rank, reply in replies.items() if not _failed(comparison, "devices", rank, reply)}
        measured = compare_speed(comparison, answers, last)
    return NodesReport(
        nodes={rank: member.identity.host for rank, member in members.items()},
        rows=tuple(comparison.rows),
        findings=tuple(dict.fromkeys(comparison.findings)),
        measured=Measured(visible_seconds=visible, clocks=clocks, links=links, devices=measured),
    )


def _failed(comparison: Comparison, check: str, rank: int, reply: Reply) -> bool:
    """Whether a node has not answered; then there is a finding."""
    if reply.error:
        fix = "see the output of that node"
        comparison.add(check, "error", f"{check}: {comparison.names[rank]}: {reply.error}", fix, node=rank)
    return bool(reply.error)


# --- clocks ---------------------------------------------------------------------------------------------------------


def _clocks(service: Service, comparison: Comparison) -> dict[str, float]:
    """The offset of each clock from that of node 0, from the fastest of several round trips."""
    best: dict[int, tuple[float, float]] = {}
    for rank in comparison.names:
        for _ in range(ROUND_TRIPS):
            sent, before = time.time(), time.monotonic()
            reply = service.request("clock", seconds=_ANSWER_SECONDS, of=[rank])[rank]
            trip = reply.arrived - before
            if reply.error:
                break
            offset = cast(float, reply.answer["time"]) - (sent + trip / 2)
            if rank not in best or trip < best[rank][0]:
                best[rank] = (trip, offset)
    texts = dict.fromkeys(best, f"within {CLOCK_SECONDS:.0f} s")
    for rank, (trip, offset) in best.items():
        if abs(offset) > CLOCK_SECONDS + trip / 2:
            side = "ahead of" if offset > 0 else "behind"
            texts[rank] = f"{offset:+,.1f} s"
            message = f"the clock of {comparison.names[rank]} is {abs(offset):,.1f} s {side} that of {comparison.names[0]}"
            comparison.add("clock", "warning", message, "synchronise the clocks of all nodes (chrony or ntpd)", node=rank)
    if texts:
        comparison.row("clock", texts)
    return {str(rank): round(offset, 6) for rank, (_, offset) in best.items() if rank}


# --- the shared directory -------------------------------------------------------------------------------------------


def _storage(service: Service, comparison: Comparison) -> float | None:
    """How long the renamed files of all nodes have taken, at most, to be seen by all; None if they are not."""
    if service.folder is None:
        return None
    folder, ranks = service.folder.name, list(comparison.names)
    names = {rank: f"node-{rank}" for rank in ranks}
    texts = dict.fromkeys(ranks, _WRITABLE)
    for kind in ("draft", "publish"):
        each = {rank: {"name": name} for rank, name in names.items() if texts[rank] == _WRITABLE}
        begun = time.monotonic()
        shared = {"folder": folder, "names": list(names.values())}
        for rank, reply in service.request(kind, shared, each=each, seconds=_ANSWER_SECONDS).items():
            if reply.error:
                texts[rank] = reply.error
                message = f"{comparison.names[rank]} cannot write to output_dir: {reply.error}"
                fix = "give the user of that node write access, or mount it there for writing"
                comparison.add("output_dir", "error", message, fix, node=rank)
    written = [name for rank, name in names.items() if texts[rank] == _WRITABLE]
    watch = {"folder": folder, "names": written, "seconds": VISIBLE_SECONDS}
    seen = service.request("watch", watch, seconds=VISIBLE_SECONDS + _ANSWER_SECONDS)
    latest, complete = 0.0, len(written) == len(ranks)
    for rank, reply in seen.items():
        missing = cast(list[str], reply.answer.get("missing") or [])
        if reply.error or missing:
            complete = False
            texts[rank] = reply.error or f"does not see {', '.join(missing)}"
            what = reply.error or f"what {', '.join(missing)} wrote is not seen there within {VISIBLE_SECONDS:.0f} s"
            fix = "put --output_dir on storage that all nodes share, with shorter caches of attributes (NFS: actimeo)"
            comparison.add("output_dir", "error", f"output_dir on {comparison.names[rank]}: {what}", fix, node=rank)
        latest = max(latest, reply.arrived - begun)
    failed = service.request("clear", {"folder": folder}, seconds=_ANSWER_SECONDS, of=[0])[0]
    for reason in cast(list[str], failed.answer.get("failed") or []):
        message = f"{comparison.names[0]} cannot remove what another node has written in output_dir: {reason}"
        fix = "start all nodes as the same user, or let them write to the files of each other"
        comparison.add("output_dir", "error", message, fix)
    comparison.row("output_dir", texts)
    if complete:
        comparison.rows.append(Row(check="renames seen after", usual=f"{latest:.2f} s"))
        if latest > _LATE_SECONDS:
            message = f"renamed files are seen on other nodes after {latest:.1f} s"
            comparison.add("output_dir", "warning", message, "shorten the caches of attributes (NFS: actimeo)")
    return round(latest, 4) if complete else None


# --- connections ----------------------------------------------------------------------------------------------------


def _reachable(service: Service, comparison: Comparison) -> dict[int, tuple[str, int]]:
    """Lets nodes connect to each other. Returns the address and port of each node that others can reach."""
    members = service.members()
    ports = {
        rank: (members[rank].address, cast(int, reply.answer["port"]))
        for rank, reply in service.request("listen", {"token": service.token}, seconds=_ANSWER_SECONDS).items()
        if not _failed(comparison, "ports", rank, reply)
    }
    each = {rank: {"peers": {str(peer): ports[peer] for peer in _partners(rank, list(ports))}} for rank in ports}
    replies = service.request("connect", {"token": service.token}, each=each, seconds=CONNECT_SECONDS + _ANSWER_SECONDS)
    reached = dict.fromkeys(ports, "reach each other")
    for rank, reply in replies.items():
        if _failed(comparison, "ports", rank, reply):
            continue
        for peer, reason in cast(Mapping[str, str], reply.answer["failed"]).items():
            host, port = ports[int(peer)]
            reached[rank] = f"not node {peer}"
            message = (
                f"{comparison.names[rank]} cannot connect to {comparison.names[int(peer)]} at {host}, port {port}: {reason}"
            )
            comparison.add("ports", "error", message, _OPEN_PORTS, node=rank)
    if reached:
        comparison.row("ports", reached)
    return ports


def _partners(rank: int, ranks: list[int]) -> list[int]:
    if len(ranks) <= _ALL_PAIRS:
        return [each for each in ranks if each != rank]
    place = ranks.index(rank)
    return sorted({ranks[(place + 2**power) % len(ranks)] for power in range(len(ranks).bit_length())} - {rank})


def _bandwidth(
    service: Service, comparison: Comparison, peers: Mapping[int, tuple[str, int]], last: NodesReport | None
) -> dict[str, float]:
    """The rate of each pair, the slower direction, in bytes per second. Slow nodes become findings."""
    ranks, measured = sorted(peers), dict[str, float]()
    both: dict[str, dict[tuple[int, int], float]] = {"pairs": {}, "halves": {}}
    for kind, some in rounds(len(ranks)).items():
        for pairs in some:
            each = {ranks[a]: {"peer": peers[ranks[b]]} for a, b in pairs}
            shared = {"token": service.token, "seconds": _TRANSFER_SECONDS}
            replies = service.request("transfer", shared, each=each, seconds=2 * _TRANSFER_SECONDS + 2 * _ANSWER_SECONDS)
            for a, b in pairs:
                reply = replies[ranks[a]]
                if reply.error:
                    names = f"{comparison.names[ranks[a]]} and {comparison.names[ranks[b]]}"
                    comparison.add("bandwidth", "error", f"between {names}: {reply.error}", _OPEN_PORTS)
                    continue
                rate = min(cast(float, reply.answer["sent"]), cast(float, reply.answer["received"]))
                both[kind][ranks[a], ranks[b]] = rate
                measured[f"{ranks[a]}-{ranks[b]}"] = max(rate, measured.get(f"{ranks[a]}-{ranks[b]}", 0.0))
    best = best_rates(both["pairs"])
    _slow_nodes(comparison, best, len(ranks))
    _compare_links(comparison, both["pairs"], last)
    if both["halves"] and both["pairs"]:
        alone, together = statistics.median(both["pairs"].values()), statistics.median(both["halves"].values())
        comparison.rows.append(Row(check="bandwidth of halves", usual=_rate(together)))
        if together < _SLOW * alone:
            message = (
                f"a node sends {_rate(together)} when half of them send to the other half, and {_rate(alone)} to a neighbour"
            )
            comparison.add("bandwidth", "note", message)
    return {pair: round(rate) for pair, rate in measured.items()}


def _slow_nodes(comparison: Comparison, best: Mapping[int, float], count: int) -> None:
    if not best:
        return
    median = statistics.median(best.values())
    texts = dict.fromkeys(best, f"about {_rate(median)}")
    for rank, rate in best.items() if count > 2 else ():
        if rate < _SLOW * median:
            texts[rank] = _rate(rate)
            message = f"{comparison.names[rank]} has a slow link: {_rate(rate)}, the median of all nodes is {_rate(median)}"
            fix = "check its cable, its port and the negotiated speed (ethtool), or exclude the node"
            comparison.add("bandwidth", "warning", message, fix, node=rank)
    comparison.row("bandwidth", texts)


def _compare_links(comparison: Comparison, rates: Mapping[tuple[int, int], float], last: NodesReport | None) -> None:
    """Compare with the last report where the same hosts were measured."""
    if last is None:
        return
    hosts = {rank: name.partition("(")[2].rstrip(")") for rank, name in comparison.names.items()}
    for (a, b), rate in rates.items():
        before = last.measured.links.get(f"{a}-{b}")
        same = (last.nodes.get(a), last.nodes.get(b)) == (hosts[a], hosts[b])
        if before and same and rate < _SLOW * before:
            message = (
                f"between {comparison.names[a]} and {comparison.names[b]}: {_rate(rate)}, and {_rate(before)} the last time"
            )
            comparison.add("bandwidth", "warning", message, "check the network, and what else uses it now")


def _rate(rate: float) -> str:
    return f"{rate / 1e9:,.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:,.1f} MB/s"
