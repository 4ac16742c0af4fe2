"""The interface through which nodes connect, on the interfaces that this machine has."""

import ipaddress
import socket

import psutil
import pytest

from smalti import Config, PreflightError
from smalti_cluster.nodes.network import Interface, check_main_address, interface_settings, own_addresses, route_to

LOOPBACK = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
UNUSED = "203.0.113.7"
"""An address that is reserved for documentation."""


def options(configure, address: str, *, node: int = 0) -> Config:
    flags = ("--num_processes=4", "--num_machines=2", f"--machine_rank={node}", f"--main_process_ip={address}")
    flags = (*flags, "--rendezvous_timeout=1")
    return configure(*flags)


def addresses() -> list[tuple[str, str]]:
    """The interfaces that are up, each with its addresses that need no scope."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return [
        (name, each.address)
        for name, found in psutil.net_if_addrs().items()
        for each in found
        if name in up and each.family in (socket.AF_INET, socket.AF_INET6) and "%" not in each.address
    ]


@pytest.mark.parametrize(("interface", "address"), addresses())
def test_the_route_to_an_own_address_is_the_interface_that_has_it(interface, address):
    assert route_to(address) == Interface(name=interface, address=address)


def test_the_interface_of_the_route_is_given_to_gloo_and_nccl_unless_the_user_names_one(configure):
    found = options(configure, "127.0.0.1")
    assert interface_settings(found, {}) == {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": f"={LOOPBACK}"}
    assert interface_settings(found, {"GLOO_SOCKET_IFNAME": "ib0"}) == {"NCCL_SOCKET_IFNAME": f"={LOOPBACK}"}
    assert interface_settings(found, {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib"}) == {}


def test_no_interface_is_chosen_for_a_node_0_elsewhere(configure):
    assert interface_settings(options(configure, UNUSED), {}) == {}
    assert interface_settings(options(configure, "no-such-name.invalid", node=1), {}) == {}


def test_an_address_of_this_node_is_accepted_and_its_interface_named(configure):
    assert check_main_address(configure(), {}) == ""
    for interface, address in addresses():
        assert f"{interface} ({address})" in check_main_address(options(configure, address), {})
    assert "all nodes have to be on this machine" in check_main_address(options(configure, "127.0.0.1"), {})


def test_an_address_that_node_0_does_not_have_is_refused_with_those_it_has(configure):
    with pytest.raises(PreflightError) as refused:
        check_main_address(options(configure, UNUSED), {})
    assert UNUSED in refused.value.message
    assert all(address in str(refused.value) for address in own_addresses())


def test_a_forwarded_address_is_accepted_where_the_user_names_the_interface(configure):
    if not own_addresses():
        pytest.skip("this machine has no network")
    assert "GLOO_SOCKET_IFNAME" in check_main_address(options(configure, UNUSED), {"GLOO_SOCKET_IFNAME": LOOPBACK})


@pytest.mark.parametrize("node", [0, 1])
def test_a_host_name_on_the_loopback_is_refused(configure, node):
    with pytest.raises(PreflightError, match="the loopback, which no other node reaches") as refused:
        check_main_address(options(configure, "localhost", node=node), {})
    assert "/etc/hosts" in refused.value.fix


def test_a_host_name_that_does_not_resolve_is_refused(configure):
    with pytest.raises(PreflightError, match="does not resolve on this node"):
        check_main_address(options(configure, "no-such-name.invalid", node=1), {})


def test_own_addresses_are_those_that_others_can_reach():
    found = [ipaddress.ip_address(address) for address in own_addresses()]
    assert not any(each.is_loopback or each.is_link_local for each in found)
