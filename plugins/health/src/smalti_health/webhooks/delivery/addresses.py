"""Addresses that an endpoint may have: public ones, unless it says `allow_private`.

A name is resolved once per request. All its addresses are checked, and the connection is made to one of these, so that a name
that resolves differently the second time (DNS rebinding) leads nowhere else.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

Resolver = Callable[[str, int], list[str]]
_NAT64 = IPv6Network("64:ff9b::/96")
_METADATA = {"169.254.169.254", "169.254.170.2", "168.63.129.16", "100.100.100.200", "fd00:ec2::254", "192.0.0.192"}
_hanging: dict[tuple[str, int], threading.Thread] = {}


class AddressRefusedError(Exception):
    """A host has an address that its endpoint does not allow."""


class ResolutionError(Exception):
    """A name could not be resolved."""


def refusal(address: str) -> str:
    """What a numeric address is, such as "a loopback address"; empty if it is public. Raises ValueError for names."""
    found = _embedded(ip_address(address))
    if str(found) in _METADATA:
        return "an address of cloud metadata"
    if found.is_unspecified or found.is_multicast:
        return "an address of no single host"
    if found.is_loopback:
        return "a loopback address"
    if found.is_link_local:
        return "a link-local address"
    return "" if found.is_global else "a private or reserved address"


def _embedded(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address that an IPv6 address contains (mapped, 6to4, Teredo, NAT64, compatible); else the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address.teredo is not None:
        return address.teredo[1]
    if address in _NAT64 or (int(address) >> 32 == 0 and int(address) > 1):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def is_usable(address: str, *, allow_private: bool) -> str:
    """Why a connection to this address is refused; empty if it is not."""
    reason = refusal(address)
    return reason if not allow_private or "no single host" in reason else ""


def system_resolver(host: str, port: int) -> list[str]:
    """The addresses of a host, in the order of preference of the system. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def resolve(host: str, port: int, *, allow_private: bool, seconds: float, resolver: Resolver = system_resolver) -> list[str]:
    """The addresses of a host. Raises ResolutionError if there is none in time, AddressRefusedError if one is not allowed."""
    found = _in_time(host, port, seconds, resolver)
    for address in found:
        if reason := is_usable(address, allow_private=allow_private):
            raise AddressRefusedError(f"{address} is {reason}; the endpoint needs allow_private for it")
    return found


def _in_time(host: str, port: int, seconds: float, resolver: Resolver) -> list[str]:
    """The system's resolver takes no time limit. While one hangs for a host, there is no other for this host."""
    if (hanging := _hanging.get((host, port))) is not None and hanging.is_alive():
        raise ResolutionError(f"resolving {host} still hangs")
    result: list[list[str] | OSError | UnicodeError] = []

    def work() -> None:
        try:
            result.append(resolver(host, port))
        except (OSError, UnicodeError) as error:
            result.append(error)

    thread = threading.Thread(target=work, name="smalti-webhook-dns", daemon=True)
    thread.start()
    thread.join(seconds)
    if not result:
        _hanging[host, port] = thread
        raise ResolutionError(f"resolving {host} took longer than {seconds:.0f} s")
    if isinstance(found := result[0], Exception):
        raise ResolutionError(f"{host} cannot be resolved: {getattr(found, 'strerror', None) or found}")
    if not found:
        raise ResolutionError(f"{host} has no address")
    return found
