"""`smalti s3 check`, `smalti dataset scan` on S3, and secrets, which are in no output and no file."""

from __future__ import annotations

import io
import json

import pytest
from click.testing import CliRunner
from PIL import Image

from smalti.cli import main
from smalti.data import AccessDeniedError, StorageError
from smalti.errors import ExitCode
from smalti_storage_s3.client.attempts import Timeouts
from smalti_storage_s3.client.boto import BotoTransport
from smalti_storage_s3.client.settings import settings_of
from smalti_storage_s3.commands import s3
from smalti_testing import FaultProxy

MARK = "wJalrXUtnFEMI"
"""What is in every secret of these tests."""


def checked(*arguments: str, **environment: str) -> tuple[int, str]:
    done = CliRunner(env=environment).invoke(s3, ["check", *arguments])
    return done.exit_code, done.output


@pytest.fixture
def image() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (96, 64), "teal").save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def data_file(tmp_path, options, store):
    """(keys) -> a file with one dataset on the server."""

    def write(**changes):
        entry = {"id": "photos", "type": "aws", "caption_strategy": "filename", **options(store), **changes}
        path = tmp_path / "data.json"
        path.write_text(json.dumps([entry]))
        return path, entry

    return write


def test_a_bucket_that_can_be_used_passes_every_check(store, opened, data_file):
    path, entry = data_file()
    storage = opened(store, aws_data_prefix=entry["aws_data_prefix"])
    storage.write("a", b"x")
    code, output = checked(str(path), "--write")
    assert code == 0
    assert [line.split()[1] for line in output.splitlines()[1:]] == [
        "list:",
        "read:",
        "write:",
        "delete:",
        "create",
        "abandoned",
    ]
    assert "create once: yes" in output
    assert [file.key for file in storage.list()] == ["a"]


def test_a_store_that_replaces_files_is_reported(gateway):
    place = f"s3://{gateway.bucket}/checked"
    keys = {"AWS_ACCESS_KEY_ID": gateway.access_key, "AWS_SECRET_ACCESS_KEY": gateway.secret_key}
    code, output = checked(place, f"--endpoint_url={gateway.endpoint}", "--write", "--json", **keys)
    [found] = json.loads(output)
    assert (code, {one["name"]: one["detail"][:3] for one in found["checks"]}["create once"]) == (0, "no:")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"aws_secret_access_key": f"{MARK}-other"}, ("signature does not match", "aws_secret_access_key")),
        ({"aws_access_key_id": f"{MARK}-key"}, ("does not know the access key", "aws_access_key_id")),
        ({"aws_bucket_name": "no-such-bucket"}, ("no such bucket", "aws_bucket_name")),
        (
            {"aws_profile_name": "nobody", "aws_access_key_id": None, "aws_secret_access_key": None},
            ("profile", "aws_profile_name"),
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_fix_and_without_the_secret(data_file, changes, words):
    path, entry = data_file(**changes)
    path.write_text(json.dumps([{key: value for key, value in entry.items() if value is not None}]))
    code, output = checked(str(path))
    assert code == 3
    assert [word for word in words if word not in output] == []
    assert MARK not in output


def test_an_address_where_nothing_answers_is_reported(opened, store):
    storage = opened(store, aws_endpoint_url="http://127.0.0.1:1", timeouts=Timeouts(first_deadline=0.2, pause=0.01))
    with pytest.raises(StorageError, match="cannot be reached") as caught:
        next(storage.list())
    assert caught.value.exit_code is ExitCode.UNAVAILABLE


@pytest.mark.parametrize("fast", [False, True])
def test_a_wrong_key_is_tried_once(store, opened, fast):
    with FaultProxy(store.endpoint) as proxy:
        storage = opened(store, fast=fast, aws_endpoint_url=proxy.endpoint, aws_secret_access_key=f"{MARK}-other")
        with pytest.raises(AccessDeniedError) as caught:
            storage.read("a")
        assert len(proxy.exchanges) == 1
    assert MARK not in f"{caught.value!r} {caught.value} {caught.value.__cause__} {storage.__dict__}"


@pytest.fixture
def smalti(capsys):
    """(arguments) -> the output of `smalti`."""

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit):
            main(list(arguments))
        found = capsys.readouterr()
        return found.out + found.err

    return run


def test_secrets_are_in_no_output_and_no_file_of_a_run(store, opened, data_file, image, smalti, tmp_path):
    path, entry = data_file()
    opened(store, aws_data_prefix=entry["aws_data_prefix"]).write("cat.png", image)
    assert MARK in entry["aws_secret_access_key"]
    arguments = [f"--data_backend_config={path}", f"--output_dir={tmp_path / 'run'}", "--resolution=64", "--train_batch_size=1"]
    commands = (("dataset", "scan"), ("dataset", "scan", "--json"), ("dataset", "check"), ("config", "show"))
    outputs = [smalti(*command, *arguments) for command in commands]
    assert '"usable": 1' in outputs[1]
    written = {str(file): file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    assert written
    assert [output for output in outputs if MARK in output] == []
    assert [name for name, data in written.items() if MARK.encode() in data] == []


def test_a_scan_counts_requests_and_bytes(store, opened, data_file, image, smalti):
    path, entry = data_file()
    storage = opened(store, aws_data_prefix=entry["aws_data_prefix"])
    for number in range(3):
        storage.write(f"{number}.png", image + bytes(300_000))
    found = json.loads(smalti("dataset", "scan", f"--data_backend_config={path}", "--json"))
    assert found["datasets"][0]["usable"] == 3
    assert found["traffic"]["requests"] >= 4  # a listing and three beginnings of files
    assert found["traffic"]["received"] <= 3 * 16_384 + 5_000
    assert " requests to the storage, " in smalti("dataset", "scan", f"--data_backend_config={path}")


def test_credentials_and_region_are_those_of_boto3_and_the_store_is_told_so(store, options, tmp_path, monkeypatch):
    keys = f"aws_access_key_id={store.access_key}\naws_secret_access_key={store.secret_key}\nregion=eu-west-3\n"
    (tmp_path / "credentials").write_text(f"[own]\n{keys}")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "own")
    given = {key: value for key, value in options(store).items() if key not in ("aws_access_key_id", "aws_secret_access_key")}
    transport = BotoTransport(settings_of(given, "test"), Timeouts())
    agents = []
    transport.client.meta.events.register("before-send.s3", lambda request, **_: agents.append(request.headers["User-Agent"]))
    transport.put("profile/a", b"1", {})
    assert (transport.region, transport.session.profile_name) == ("eu-west-3", "own")
    assert agents
    assert all(agent.startswith(b"Boto3/") for agent in agents)


def test_the_descriptions_of_services_are_read_once_for_all_clients(store, options):
    transports = [BotoTransport(settings_of(options(store), "test"), Timeouts()) for _ in range(3)]
    loaders = [transport.session._session.get_component("data_loader") for transport in transports]
    assert len({id(loader) for loader in loaders}) == 1
    assert len(loaders[0].search_paths) == len(set(loaders[0].search_paths))
