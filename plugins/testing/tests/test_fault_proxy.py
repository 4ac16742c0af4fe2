"""Every fault of the proxy happens as described, to a plain client and a real store, and the same ones for the same seed."""

import http.client
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from smalti_testing import FaultProxy, Rule, juicefs
from smalti_testing.fault_proxy import FAULTS, read_rules

DATA = os.urandom(300_000)
BROKEN = (OSError, http.client.HTTPException)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with juicefs(tmp_path_factory.mktemp("store")) as store:
        assert store.request("PUT", "data", DATA).status == 200
        yield store


def fetched(store, proxy, key="data", **more):
    return store.request("GET", key, endpoint=proxy.endpoint, **more)


def test_without_rules_nothing_changes(store):
    with FaultProxy(store.endpoint) as proxy:
        assert store.request("PUT", "ä/+ &.bin", DATA, endpoint=proxy.endpoint).status == 200
        assert fetched(store, proxy, "ä/+ &.bin").body == DATA
        part = fetched(store, proxy, headers={"Range": "bytes=10-19"})
        assert (part.status, part.body) == (206, DATA[10:20])
        assert fetched(store, proxy, "none").status == 404
        head = store.request("HEAD", "data", endpoint=proxy.endpoint)
        assert (head.status, head.headers["content-length"], head.body) == (200, "300000", b"")
        assert fetched(store, proxy, "", query={"list-type": "2"}).body.count(b"<Key>") == 2
        assert store.request("DELETE", "ä/+ &.bin", endpoint=proxy.endpoint).status == 204
    assert [each.operation for each in proxy.exchanges] == ["put", "get", "range", "get", "head", "list", "delete"]
    assert [each.status for each in proxy.exchanges] == [200, 200, 206, 404, 200, 200, 204]
    assert (proxy.exchanges[0].received, proxy.exchanges[1].sent, proxy.injected) == (300_000, 300_000, [])


@pytest.mark.parametrize(
    ("fault", "status"),
    [("500", 500), ("503", 503), ("429", 429), ("403", 403), ("404", 404), ("error_body", 200), ("redirect", 307)],
)
def test_a_refusal_is_sent_in_the_stores_place(store, fault, status):
    with FaultProxy(store.endpoint, [Rule(fault=fault, count=1, retry_after=2)]) as proxy:
        refused = store.request("PUT", f"refused-{fault}", b"x", endpoint=proxy.endpoint)
        assert refused.status == status
        assert refused.headers.get("retry-after") == ("2" if fault in ("429", "503") else None)
        assert (b"<Error>" in refused.body) == (fault != "redirect")
        assert fetched(store, proxy, f"refused-{fault}").status == 404  # not applied, and only once


@pytest.mark.parametrize("fault", ["reset_before", "reset_after", "cut", "cut_reset", "long_length"])
def test_a_broken_connection_is_an_error_to_the_client(store, fault):
    with FaultProxy(store.endpoint, [Rule(fault=fault, count=1)]) as proxy:
        with pytest.raises(BROKEN):
            fetched(store, proxy)
        assert fetched(store, proxy).body == DATA


def test_a_lost_reply_is_of_a_request_that_took_effect(store):
    with FaultProxy(store.endpoint, [Rule(fault="lost_reply", count=1)]) as proxy:
        with pytest.raises(BROKEN):
            store.request("PUT", "applied", b"it is", endpoint=proxy.endpoint)
        assert fetched(store, proxy, "applied").body == b"it is"


def test_a_stall_outlasts_the_clients_patience(store):
    with FaultProxy(store.endpoint, [Rule(fault="stall", count=1)]) as proxy:
        with pytest.raises(TimeoutError):
            fetched(store, proxy, timeout=0.1)
        assert fetched(store, proxy).body == DATA


def test_changed_bodies_look_whole(store):
    rules = [Rule(fault="flip_get", count=1), Rule(fault="short_length", count=1)]
    with FaultProxy(store.endpoint, rules, seed=3) as proxy:
        flipped, short = fetched(store, proxy).body, fetched(store, proxy).body
    assert sum((one ^ other).bit_count() for one, other in zip(flipped, DATA, strict=True)) == 1
    assert len(short) < len(DATA)
    assert DATA.startswith(short)


def test_a_flipped_request_is_found_by_its_signature(store):
    with FaultProxy(store.endpoint, [Rule(fault="flip_put")]) as proxy:
        assert store.request("PUT", "flipped", DATA, endpoint=proxy.endpoint).status in (400, 403)


def test_rules_choose_by_operation_path_and_number(store):
    rules = [Rule(fault="500", operations={"get"}, path="/data$", skip=1, count=2)]
    with FaultProxy(store.endpoint, rules) as proxy:
        assert [fetched(store, proxy).status for _ in range(4)] == [200, 500, 500, 200]
        assert fetched(store, proxy, "other").status == 404
        proxy.add(Rule(fault="503", operations={"list"}))
        assert fetched(store, proxy, "", query={"list-type": "2"}).status == 503
        proxy.clear()
        assert fetched(store, proxy, "", query={"list-type": "2"}).status == 200


def test_the_same_seed_injects_the_same_faults_in_any_order(store, tmp_path):
    """A rule file too."""
    file = tmp_path / "rules.json"
    file.write_text(json.dumps([{"fault": "500", "chance": 0.3}, {"fault": "flip_get", "operations": ["get"], "chance": 0.2}]))

    def played(seed, threads):
        with FaultProxy(store.endpoint, read_rules(file), seed=seed) as proxy, ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda number: fetched(store, proxy, f"{number % 10}"), range(60)))
        return sorted((each.path, str(each.fault)) for each in proxy.exchanges)

    first = played(5, 1)
    assert first == played(5, 4) != played(6, 1)
    assert {fault for _, fault in first} == {"None", "500", "flip_get"}


def test_a_failure_tells_the_seed(store, capsys):
    def test():
        with FaultProxy(store.endpoint, [Rule(fault="500")], seed=41) as proxy:
            fetched(store, proxy)
            raise AssertionError

    with pytest.raises(AssertionError):
        test()
    assert capsys.readouterr().out == "fault proxy: seed 41, injected {('get', '500'): 1}\n"


def test_a_store_that_is_gone_resets_the_connection(store):
    with FaultProxy("http://127.0.0.1:9") as proxy, pytest.raises(BROKEN):
        fetched(store, proxy)


def test_an_unknown_fault_is_refused():
    with pytest.raises(ValueError, match="unknown fault or operation: explode"):
        Rule(fault="explode")
    assert len(FAULTS) == 17
