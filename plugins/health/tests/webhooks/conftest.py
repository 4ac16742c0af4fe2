"""A receiver, endpoints that lead to it, and events."""

import shutil
import subprocess
from collections.abc import Callable

import pytest

from smalti_health.webhooks.delivery.outbox import Event
from smalti_health.webhooks.endpoints import Endpoint
from smalti_testing.http_receiver import Receiver

KEY = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.fixture
def receiver():
    with Receiver() as found:
        yield found


@pytest.fixture
def endpoint_of() -> Callable[..., Endpoint]:
    def make(receiver: Receiver, **values: object) -> Endpoint:
        return Endpoint(**{"kind": "raw", "url": receiver.url, "allow_private": True, "secrets": (KEY,), **values})

    return make


@pytest.fixture
def event_of() -> Callable[..., Event]:
    def make(name: str = "msg_1", *, critical: bool = False, type: str = "error", level: str = "error", time: float = 100.0):
        payload = {"type": type, "message": f"text of {name}"}
        return Event(id=name, type=type, level=level, time=time, payload=payload, text=f"text of {name}", critical=critical)

    return make


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """A self-signed certificate for 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    folder = tmp_path_factory.mktemp("certificate")
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", "key.pem", "-out", "certificate.pem"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    subprocess.run([*command, *names, *files], cwd=folder, check=True, capture_output=True)
    return folder / "certificate.pem", folder / "key.pem"
