"""Compares the facts of nodes: what differs becomes findings that name the nodes with both values, and rows of the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from smalti import Finding
from smalti_cluster.checks.channel import Message
from smalti_cluster.checks.report import Row

Facts = Mapping[int, Message]
_SAME_PACKAGES = "install the same versions on all nodes"


@dataclass(kw_only=True)
class Comparison:
    """Collects rows and findings. `names` are those of the nodes, "node 1 (gpu-17)"."""

    names: Mapping[int, str]
    rows: list[Row] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def add(self, check: str, level: str, message: str, fix: str = "", *, node: int | None = None) -> None:
        name = self.names[node] if node is not None else ""
        self.findings.append(Finding(check=check, level=level, message=message, fix=fix, node=name))  # type: ignore[arg-type]

    def compare(
        self, check: str, values: Mapping[int, str], level: str, fix: str, show: Callable[[str], str] = lambda text: text
    ) -> None:
        """A finding for each value that is not that of most nodes; nodes with the same value are named together."""
        if not any(values.values()):
            return
        usual = self.row(check, values, show)
        for value in dict.fromkeys(values.values()):
            if value != usual:
                some = [self.names[rank] for rank, each in values.items() if each == value]
                rest = [self.names[rank] for rank, each in values.items() if each == usual]
                message = (
                    f"{check} is {show(value) or 'missing'} on {_some(some)} and {show(usual) or 'missing'} on {_some(rest)}"
                )
                self.add(check, level, message, fix, node=next(rank for rank, each in values.items() if each == value))

    def row(self, check: str, values: Mapping[int, str], show: Callable[[str], str] = lambda text: text) -> str:
        """Add a row. Returns the value of most nodes; of equally many, that of the node with the lowest number."""
        usual = Counter(values.values()).most_common(1)[0][0]
        differing = {rank: show(value) or "-" for rank, value in values.items() if value != usual}
        self.rows.append(Row(check=check, usual=show(usual) or "-", differing=differing))
        return usual


def compare_facts(comparison: Comparison, facts: Facts) -> None:
    """Compare everything that `smalti_cluster.checks.facts` has gathered."""
    packages = sorted({name for each in facts.values() for name in cast(Mapping[str, str], each["packages"])})
    for name in packages:
        versions = {rank: cast(Mapping[str, str], each["packages"]).get(name, "") for rank, each in facts.items()}
        comparison.compare(name, versions, "error" if name == "torch" else "warning", _SAME_PACKAGES)
    _texts(comparison, facts, "nccl", "NCCL", "error", _SAME_PACKAGES)
    _texts(comparison, facts, "python", "Python", "warning", "use the same Python on all nodes")
    _texts(comparison, facts, "driver", "GPU driver", "warning", "install the same driver on all nodes")
    _texts(comparison, facts, "kernel", "kernel", "note", "")
    _plugins(comparison, facts)
    _options(comparison, facts)
    fix = "start all nodes as the same user, or give their users write access to the files of each other"
    _texts(comparison, facts, "user", "user:group", "warning", fix)
    _devices(comparison, facts)
    _network(comparison, facts)
    _data(comparison, facts)


def _texts(comparison: Comparison, facts: Facts, key: str, check: str, level: str, fix: str) -> None:
    comparison.compare(check, {rank: str(each[key]) for rank, each in facts.items()}, level, fix)


def _plugins(comparison: Comparison, facts: Facts) -> None:
    lists = {rank: cast(list[str], each["plugins"]) for rank, each in facts.items()}
    usual = comparison.row("plugins", {rank: "\n".join(each) for rank, each in lists.items()}, _count_of).split("\n")
    for rank, own in lists.items():
        more, fewer = sorted(set(own) - set(usual)), sorted(set(usual) - set(own))
        texts = [f"it has {', '.join(more)}"] * bool(more) + [f"it lacks {', '.join(fewer)}"] * bool(fewer)
        if texts:
            message = f"plugins differ on {comparison.names[rank]}: {'; '.join(texts)}"
            fix = "install the same plugins on all nodes, and give the same --plugins and --without"
            comparison.add("plugins", "error", message, fix, node=rank)


def _options(comparison: Comparison, facts: Facts) -> None:
    values = {rank: cast(Message, each["values"]) for rank, each in facts.items()}
    for name in sorted({name for own in values.values() for name in own}):
        if len({repr(own.get(name)) for own in values.values()}) > 1:
            texts = {rank: repr(own.get(name)) for rank, own in values.items()}
            comparison.compare(name, texts, "error", f"give the same --{name} on all nodes")


def _devices(comparison: Comparison, facts: Facts) -> None:
    found = {rank: cast(Message, each["devices"]) for rank, each in facts.items()}
    texts = {rank: str(each.get("text", "")) for rank, each in found.items()}
    if any(texts.values()):
        comparison.row("devices", texts)
    counts = {rank: int(str(each.get("count", 0))) for rank, each in found.items()}
    kinds = {rank: str(each.get("kind", "")) for rank, each in found.items()}
    named = {rank: str(each.get("name", "")) for rank, each in found.items()}
    for rank, each in found.items():
        if problem := str(each.get("problem") or ""):
            fix = f"`smalti doctor` on {comparison.names[rank]} says more"
            comparison.add("devices", "error", f"devices of {comparison.names[rank]}: {problem}", fix, node=rank)
    for values, level, what in (
        (kinds, "error", "kind of device"),
        ({rank: str(count) for rank, count in counts.items()}, "error", "number of devices"),
        (named, "warning", "device"),
    ):
        if len(set(values.values())) > 1:
            fix = "every node needs the same; check the driver (nvidia-smi), the job's GPUs per node and CUDA_VISIBLE_DEVICES"
            before = len(comparison.rows)
            comparison.compare(what, values, level, fix)
            del comparison.rows[before:]  # the row of the devices shows it


def _network(comparison: Comparison, facts: Facts) -> None:
    for rank, each in facts.items():
        own = cast(list[str], each["name"])
        if own and all(address.startswith("127.") or address == "::1" for address in own):
            message = f"{comparison.names[rank]} resolves its own name to {own[0]}; smalti selects the interface by the route"
            comparison.add("own name", "note", message, node=rank)
    used = {rank: cast(Message, each["interface"]) for rank, each in facts.items()}
    comparison.row("interface", {rank: str(each["name"]) for rank, each in used.items()})
    remote = {rank: each for rank, each in used.items() if not str(each["address"]).startswith("127.")}
    if remote:
        speeds = {rank: str(each["speed"] or "") for rank, each in remote.items()}
        fix = "check the cable and the port of the switch (ethtool), or select another interface by --main_process_ip"
        comparison.compare("link speed", speeds, "warning", fix, lambda text: f"{text} Mbit/s" if text else "")
        mtus = {rank: str(each["mtu"]) for rank, each in remote.items()}
        comparison.compare("MTU", mtus, "warning", "set the same MTU on all nodes and switches")
    ports = {
        rank: "\n".join(sorted(_without_number(text) for text in cast(list[str], each["infiniband"])))
        for rank, each in facts.items()
    }
    fix = "check the cables and the subnet manager (ibstat)"
    comparison.compare("InfiniBand", ports, "warning", fix, _ports)


def _data(comparison: Comparison, facts: Facts) -> None:
    data = {rank: cast(Mapping[str, Message], each["data"]) for rank, each in facts.items()}
    for name in sorted({name for own in data.values() for name in own}):
        check, found = f"data {name}", {rank: own.get(name, {}) for rank, own in data.items()}
        comparison.row(check, {rank: _size_of(each) for rank, each in found.items()})
        for rank, each in found.items():
            if problem := each.get("problem"):
                message = f"{each['path']} of the dataset {name!r} cannot be read on {comparison.names[rank]}: {problem}"
                fix = "mount the data at the same path on all nodes, or copy them there"
                comparison.add(check, "error", message, fix, node=rank)
        sizes = {rank: _size_of(each) for rank, each in found.items() if each and "problem" not in each}
        if len(set(sizes.values())) > 1:
            texts = "; ".join(f"{size} on {comparison.names[rank]}" for rank, size in sizes.items())
            fix = "bring the copies of the data to the same state"
            comparison.add(check, "error", f"the dataset {name!r} differs between nodes: {texts}", fix)


def _size_of(entry: Message) -> str:
    if not entry:
        return "-"
    if problem := entry.get("problem"):
        return str(problem)
    return f"{entry['entries']} entries" if "entries" in entry else f"{entry['bytes']} bytes"


def _without_number(port: str) -> str:
    """A port without the number of its device, which differs between nodes: "mlx5_12/1: ACTIVE" -> "1: ACTIVE"."""
    return port.partition("/")[2]


def _ports(text: str) -> str:
    lines = text.split("\n") if text else []
    return "; ".join(f"{count} x {line.partition(': ')[2]}" for line, count in Counter(lines).items())


def _count_of(text: str) -> str:
    return f"{len(text.split(chr(10))) if text else 0} plugins"


def _some(names: Sequence[str]) -> str:
    """At most a few names, and how many more."""
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
