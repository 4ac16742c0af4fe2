"""What `smalti doctor` says about the buckets of a run."""

import json
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from time import time

import pytest

from smalti.config import resolve
from smalti.plugins import Selection, load_plugins, schema_of
from smalti_storage_s3.findings import clock
from smalti_storage_s3.plugin import plugin


@pytest.fixture
def diagnosed(tmp_path):
    """(entries of datasets) -> level and message of each finding."""
    schema = schema_of(load_plugins(Selection(only=("storage_s3", "toy"))))

    def run(*entries):
        path = tmp_path / "data.json"
        path.write_text(json.dumps(entries))
        config = resolve(schema, (f"--data_backend_config={path}",), environment={})
        return [(each.level, each.message, bool(each.fix)) for each in plugin.diagnose(config)]

    return run


def test_each_bucket_is_asked_with_the_credentials_of_the_run(diagnosed, options, store):
    photos = {"id": "photos", "type": "aws", "caption_strategy": "filename", **options(store)}
    wrong = {**photos, "id": "wrong", "aws_data_prefix": "elsewhere/", "aws_secret_access_key": "wJalrXUtnFEMI-other"}
    right, refused = diagnosed(photos, wrong)
    assert (right[0], "no files" in right[1]) == ("ok", True)
    assert (refused[0], refused[2], "signature does not match" in refused[1]) == ("error", True, True)
    assert "wJalrXUtnFEMI" not in refused[1]


def test_a_run_without_s3_has_no_finding(diagnosed, tmp_path):
    assert diagnosed({"id": "photos", "type": "local", "instance_data_dir": str(tmp_path)}) == []
    assert plugin.diagnose(None) == []


@pytest.mark.parametrize(("ahead", "levels"), [(0, []), (-120, ["warning"]), (3600, ["error"])])
def test_a_clock_that_differs_from_the_servers_is_named(ahead, levels):
    class Server(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response_only(403)
            self.send_header("Date", formatdate(time() + ahead, usegmt=True))
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        found = clock(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert [each.level for each in found] == levels
    assert all(("behind" if ahead > 0 else "ahead of") in each.message for each in found)
