"""One request to a real receiver, whatever it does."""

import json

import pytest

from smalti_health.webhooks.delivery.request import Limits, post, retry_after
from smalti_testing.http_receiver import Receiver, drip, hang, raw, reset, status

SHORT = Limits(connect=0.3, total=0.3)
MARKER = "MARKER-5ECRET-0123456789"


def send(endpoint, body: bytes = b"{}", **options):
    return post(endpoint, {"Content-Type": "application/json"}, body, **options)


@pytest.mark.parametrize(
    "code", [200, 201, 202, 204, 299, 300, 301, 302, 303, 307, 308, 400, 401, 403, 404, 410, 500, 502, 503]
)
def test_the_status_comes_back_and_redirects_are_not_followed(receiver, endpoint_of, code):
    with Receiver() as other:
        receiver.default = status(code, Location=other.url)
        assert send(endpoint_of(receiver)).status == code
        assert (len(receiver.requests), len(other.requests)) == (1, 0)


def test_the_request_has_its_path_query_headers_and_body(receiver, endpoint_of):
    send(endpoint_of(receiver, url=f"{receiver.url}/deep?a=b"), json.dumps({"a": "ü" * 5000}).encode())
    [request] = receiver.requests
    assert request.line == "POST /hook/deep?a=b HTTP/1.1"
    assert request.headers["host"] == f"127.0.0.1:{receiver.port}"
    assert request.headers["content-type"] == "application/json"
    assert request.json == {"a": "ü" * 5000}


@pytest.mark.parametrize("behaviour", [hang, drip(b"HTTP/1.1 200 OK\r\n"), drip(b"HTTP/1.1 103 Early\r\n\r\n"), drip(b"\r\n")])
def test_a_receiver_that_hangs_or_drips_gets_no_more_than_its_time(receiver, endpoint_of, behaviour):
    receiver.default = behaviour
    assert send(endpoint_of(receiver), limits=SHORT).status is None


@pytest.mark.parametrize(
    "data",
    [b"", b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1\r\n\r\n", b"HTTP/1.1 abc OK\r\n\r\n", b"\0" * 70000, b"HTTP/1.1 200 OK\r\nA"],
)
def test_what_is_no_http_is_an_error(receiver, endpoint_of, data):
    receiver.default = raw(data)
    reply = send(endpoint_of(receiver))
    assert reply.status is None
    assert reply.error


def test_a_reset_and_a_closed_port_are_errors(receiver, endpoint_of):
    receiver.default = reset
    assert "reset" in send(endpoint_of(receiver)).error.lower()
    with Receiver() as closed:
        endpoint = endpoint_of(closed)
    assert "refused" in send(endpoint).error.lower()


def test_an_interim_response_is_followed_by_the_final_one(receiver, endpoint_of):
    receiver.default = raw(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 Busy\r\nRetry-After: 7\r\n\r\n")
    assert (send(endpoint_of(receiver)).status, send(endpoint_of(receiver)).retry_after) == (503, 7.0)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("Thu, 01 Jan 1970 00:02:10 GMT", 30.0),
        ("Thu, 01 Jan 1970 00:00:10 GMT", 0.0),
        *((word, None) for word in ("soon", "nan", "inf", "", None)),
    ],
)
def test_retry_after_is_read_as_seconds_and_as_a_date(value, seconds):
    assert retry_after(value, now=100.0) == seconds


def test_a_private_address_gets_no_request(receiver, endpoint_of):
    reply = send(endpoint_of(receiver, allow_private=False))
    assert reply.refused
    assert receiver.requests == []


def test_the_address_that_was_checked_is_the_one_that_is_used(receiver, endpoint_of):
    answers = [["127.0.0.1"], ["169.254.169.254"]]
    endpoint = endpoint_of(receiver, url=f"http://rebinding.example.com:{receiver.port}/")
    reply = send(endpoint, resolver=lambda host, port: answers.pop(0))
    assert (reply.status, answers) == (204, [["169.254.169.254"]])
    assert receiver.requests[0].headers["host"] == f"rebinding.example.com:{receiver.port}"


def test_the_next_address_is_used_if_the_first_refuses(receiver, endpoint_of):
    endpoint = endpoint_of(receiver, url=f"http://two.example.com:{receiver.port}/")
    assert send(endpoint, resolver=lambda host, port: ["127.0.0.2", "127.0.0.1"]).status == 204


def test_a_certificate_is_verified_unless_the_endpoint_says_otherwise(certificate, endpoint_of, monkeypatch):
    with Receiver(certificate=certificate) as receiver:
        assert "certificate" in send(endpoint_of(receiver)).error
        assert send(endpoint_of(receiver, verify_tls=False)).status == 204
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        assert send(endpoint_of(receiver)).status == 204
        other = endpoint_of(receiver, url=f"https://other.example.com:{receiver.port}/")
        assert "certificate" in send(other, resolver=lambda host, port: ["127.0.0.1"]).error


def test_tls_to_a_receiver_without_it_is_an_error(receiver, endpoint_of):
    endpoint = endpoint_of(receiver, url=receiver.url.replace("http", "https"))
    assert send(endpoint, limits=SHORT).status is None


@pytest.mark.parametrize(
    "behaviour", [status(500), status(302, Location=f"http://127.0.0.1/{MARKER}"), reset, raw(f"{MARKER}\r\n\r\n".encode())]
)
def test_no_reply_shows_a_secret(receiver, endpoint_of, behaviour):
    receiver.default = behaviour
    endpoint = endpoint_of(receiver, url=f"{receiver.url}/{MARKER}?key={MARKER}", auth_token=MARKER, headers={"X-A": MARKER})
    assert MARKER not in f"{send(endpoint)} {send(endpoint)!r} {endpoint!r} {endpoint.name}"
