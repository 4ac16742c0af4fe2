"""Through which network interface a node reaches the others, and whether `--main_process_ip` can be right.

gloo and NCCL otherwise choose an interface themselves: gloo that of the node's own host name, which is often 127.0.1.1 or
unknown. Importing this module imports no torch.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from smalti import Config, PreflightError
from smalti.config import LaunchOptions
from smalti_cluster.options import ClusterOptions, is_elastic

GLOO_VARIABLE, NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_POLL_SECONDS = 0.5
_ANY_PORT = 9
"""Connecting a UDP socket sends nothing: the system only looks up the route."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface of this node, with the address that the node has in the network concerned."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


def route_to(address: str) -> Interface:
    """The interface through which this node reaches an address or host name; for its own address the one that has it.

    Raises OSError if the name does not resolve, or if there is no route.
    """
    failure = OSError(f"no interface of this node has the route to {address}")
    for family, place in _resolved(address):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(place)
            except OSError as error:
                failure = error
                continue
            own = str(probe.getsockname()[0])
        for name, addresses in psutil.net_if_addrs().items():
            if any(_is_same(own, each.address) for each in addresses):
                return Interface(name=name, address=own)
    raise failure


def own_addresses() -> list[str]:
    """The addresses of this node by which others may reach it: not those of the loopback, nor link-local ones."""
    found = [each.address for addresses in psutil.net_if_addrs().values() for each in addresses]
    return sorted({text for text in found if (known := _parsed(text)) and not (known.is_loopback or known.is_link_local)})


def interface_settings(config: Config, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that name the interface to gloo and NCCL on a node of several; those that the user has set are left out.

    Empty if the route is not known, as where a launch is planned on a machine outside of that network.
    """
    options, wanted = config[LaunchOptions], {GLOO_VARIABLE, NCCL_VARIABLE} - environment.keys()
    try:
        interface = route_to(options.main_process_ip or "") if wanted else None
    except OSError:
        interface = None
    if interface is None or (_is_node_0(config) and not _is_own(options.main_process_ip or "")):
        return {}
    # NCCL takes a name for the beginning of names, unless it follows a "=".
    values = {GLOO_VARIABLE: interface.name, NCCL_VARIABLE: f"={interface.name}"}
    return {name: value for name, value in values.items() if name in wanted}


def check_main_address(config: Config, environment: Mapping[str, str]) -> str:
    """Through which interface this node connects to the others, as text; "" for a single node.

    Raises PreflightError if the address of node 0 cannot be right on this node: it does not resolve, has no route, is that of
    the loopback for a host name, or on node 0 is not its own.
    """
    options = config[LaunchOptions]
    address = options.main_process_ip
    if options.num_machines == 1 or address is None:
        return ""
    has = f"this node has {', '.join(own_addresses()) or 'none'}"
    try:
        places = _places(address, 0 if options.machine_rank == 0 else config[ClusterOptions].rendezvous_timeout)
    except OSError as error:
        message = f"main_process_ip={address} does not resolve on this node: {error.strerror or error}"
        raise PreflightError(message, fix="give the address of node 0 as a number, or enter the name in /etc/hosts") from error
    try:
        interface = route_to(address)
    except OSError as error:
        message = f"main_process_ip={address} cannot be reached from this node: {error.strerror or error} ({has})"
        raise PreflightError(message, fix="give an address of node 0 in a network that all nodes have") from error
    chosen = environment.get(GLOO_VARIABLE)
    how = str(interface) if chosen is None else f"{chosen} ({GLOO_VARIABLE})"
    if options.machine_rank == 0 and chosen is not None:  # the user knows that the address is forwarded to this node
        return how
    if _parsed(address) is None and all(_is_loopback(place) for place in places):
        raise PreflightError(
            f"main_process_ip={address} is {', '.join(places)} on this node: the loopback, which no other node reaches",
            fix=f"give the address of node 0 as a number ({has}), or remove the name from the line {places[0]} of /etc/hosts",
        )
    if _is_node_0(config) and not _is_own(address):
        raise PreflightError(
            f"main_process_ip={address} is not an address of this node, which is node 0; {has}",
            fix=f"give this node its own --machine_rank if {address} is another one; else give one of these on all nodes; "
            f"{GLOO_VARIABLE} and {NCCL_VARIABLE} name the interface where the address is forwarded to this node",
        )
    only = ", the loopback: all nodes have to be on this machine" if _is_loopback(interface.address) else ""
    return f"{how}{only}"


def check_known_address(config: Config, environment: Mapping[str, str]) -> None:
    """`check_main_address` for a node that is going to wait for node 0, unless the name of node 0 does not resolve yet."""
    with suppress(OSError):
        _resolved(config[LaunchOptions].main_process_ip or "")
        check_main_address(config, environment)


def _is_node_0(config: Config) -> bool:
    """Whether this node has to have the address; in an elastic launch another one can take the place of node 0."""
    return config[LaunchOptions].machine_rank == 0 and not is_elastic(config)


def _places(address: str, seconds: float) -> list[str]:
    """The addresses of a host name, which may be entered only once node 0 has started: it is looked up for some seconds.

    Raises OSError if it does not resolve.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return sorted({str(place[0]) for _, place in _resolved(address)})
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)


def _resolved(address: str) -> list[tuple[int, tuple[Any, ...]]]:
    """The families and socket addresses of an address or host name. Raises OSError if there are none."""
    return [(family, place) for family, _, _, _, place in socket.getaddrinfo(address, _ANY_PORT, type=socket.SOCK_DGRAM)]


def _is_own(address: str) -> bool:
    """Whether an address or host name leads to this node: the system then takes the same address as that of the sender."""
    for family, place in _resolved(address):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((place[0], 0, *place[2:]))
            except OSError:
                continue
            return True
    return False


def _is_loopback(address: str) -> bool:
    known = _parsed(address)
    return known is not None and known.is_loopback


def _is_same(one: str, other: str) -> bool:
    return (known := _parsed(one)) is not None and known == _parsed(other)


def _parsed(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An address without its scope ("fe80::1%eth0"); None for other text, such as a host name or a MAC address."""
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
