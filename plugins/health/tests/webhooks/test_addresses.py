"""Which addresses a request may go to."""

import threading

import pytest

from smalti_health.webhooks.delivery.addresses import AddressRefusedError, ResolutionError, refusal, resolve

PRIVATE = [
    *("127.0.0.1", "127.8.9.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "169.254.1.1", "0.0.0.0"),
    *("169.254.169.254", "168.63.129.16", "100.100.100.200", "224.0.0.1", "255.255.255.255", "198.18.0.1", "192.0.2.1"),
    *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1"),
    *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:a00:1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe"),
    *("2002:7f00:1::", "2002:a00:1::", "2001:0:4136:e378:8000:63bf:80ff:fffe"),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_a_private_address_is_refused_in_every_notation(address):
    assert refusal(address)
    with pytest.raises(AddressRefusedError, match="needs allow_private"):
        resolve("host", 80, allow_private=False, seconds=1, resolver=lambda host, port: [address])


@pytest.mark.parametrize("address", ["1.1.1.1", "162.159.135.232", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"])
def test_a_public_address_is_accepted(address):
    assert refusal(address) == ""


def test_one_private_address_among_public_ones_is_refused():
    with pytest.raises(AddressRefusedError, match=r"10\.0\.0\.1 is a private"):
        resolve("host", 80, allow_private=False, seconds=1, resolver=lambda host, port: ["1.1.1.1", "10.0.0.1"])


def test_private_addresses_are_used_where_the_endpoint_allows_them():
    assert resolve("host", 80, allow_private=True, seconds=1, resolver=lambda host, port: ["10.0.0.1"]) == ["10.0.0.1"]
    with pytest.raises(AddressRefusedError):
        resolve("host", 80, allow_private=True, seconds=1, resolver=lambda host, port: ["0.0.0.0"])


@pytest.mark.parametrize("notation", ["127.1", "2130706433", "0x7f000001", "017700000001", "localhost"])
def test_other_notations_of_loopback_are_refused_once_the_system_has_resolved_them(notation):
    with pytest.raises(AddressRefusedError, match="loopback"):
        resolve(notation, 80, allow_private=False, seconds=5)


def test_a_resolver_that_hangs_keeps_one_thread():
    release, calls = threading.Event(), []

    def slow(host: str, port: int) -> list[str]:
        calls.append(host)
        release.wait(10)
        return ["1.1.1.1"]

    for message in ("took longer", "still hangs"):
        with pytest.raises(ResolutionError, match=message):
            resolve("slow.example.com", 80, allow_private=False, seconds=0.01, resolver=slow)
    release.set()
    assert calls == ["slow.example.com"]


def test_two_endpoints_of_one_host_are_resolved_at_the_same_time():
    both = threading.Barrier(2)

    def together(host: str, port: int) -> list[str]:
        both.wait(10)
        return ["1.1.1.1"]

    found: list[list[str]] = []
    work = [
        threading.Thread(
            target=lambda: found.append(resolve("one.example.com", 80, allow_private=False, seconds=10, resolver=together))
        )
        for _ in range(2)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert found == [["1.1.1.1"]] * 2


def test_a_name_that_does_not_exist_is_an_error_and_no_crash():
    def unknown(host: str, port: int) -> list[str]:
        raise OSError(-2, "Name or service not known")

    with pytest.raises(ResolutionError, match="Name or service not known"):
        resolve("none.example.com", 80, allow_private=False, seconds=1, resolver=unknown)
    with pytest.raises(ResolutionError, match="no address"):
        resolve("empty.example.com", 80, allow_private=False, seconds=1, resolver=lambda host, port: [])
