"""What a scheduler says of the nodes, as a source of options. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from smalti.config import Given
from smalti_cluster.schedulers.environment import scheduled_nodes

_OF_A_NODE = ("machine_rank", "main_process_ip", "main_process_port")
Layer = Mapping[str, Given]


def scheduler_layer(environment: Mapping[str, str], layers: dict[str, Layer], notices: list[str]) -> Layer:
    """The nodes of a launch, if a scheduler or a launcher has started this process on one of several.

    Nothing is taken from it if a flag, the environment or the Accelerate YAML gives another number of nodes. A number of
    processes for each node counts if nothing else says it: all GPUs of the node, else one. What an Accelerate YAML for another
    number of nodes says of this node is removed from `layers`.
    """
    found = scheduled_nodes(environment)
    if found is None or found.warning:
        notices += [found.warning] if found is not None else []
        return {}
    given = {label: layer["num_machines"] for label, layer in layers.items() if "num_machines" in layer}
    stronger = next((each for label, each in given.items() if label != "file"), None)
    if found.nodes is not None and stronger is not None and str(stronger.value) != str(found.nodes):
        if found.nodes > 1:
            notices.append(
                f"num_machines: {stronger.value!r} from {stronger.place} wins over {found.nodes} of {found.scheduler}"
            )
        return {}
    named = next((str(each.value) for each in given.values()), "1")
    nodes = found.nodes or (int(named) if named.isdigit() else 1)
    if nodes == 1:
        return {}
    user = layers.get("Accelerate YAML", {})
    if "num_machines" in user and str(user["num_machines"].value) != str(nodes):
        layers["Accelerate YAML"] = {name: each for name, each in user.items() if name not in _OF_A_NODE}
    values = {
        name: Given(value=value, spelling=name, place=f"{place} of {found.scheduler}")
        for name, (place, value) in found.values.items()
    }
    if not any("num_processes" in layer for layer in layers.values()):
        place, each = found.per_node or ("num_machines", "1")
        place = f"{each} on each node, {place} of {found.scheduler}"
        values["num_processes"] = Given(value=nodes * int(each), spelling="num_processes", place=place)
    shown = {name: next((layer[name].value for layer in (*layers.values(), values) if name in layer), "?") for name in values}
    main = shown.get("main_process_ip", "?")
    notices.append(f"this is node {shown['machine_rank']} of {nodes}, and node 0 is {main} ({found.scheduler})")
    return values
