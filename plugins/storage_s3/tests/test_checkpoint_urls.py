"""`smalti checkpoint` and resuming with s3://BUCKET/RUN in place of a path: what is read, and what stays on the disk."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from smalti.checkpoint import Chunk, encode_header, read_manifest, verify
from smalti.cli.entry import smalti
from smalti.data.storage.protocol import StoredFile
from smalti.errors import CheckpointError, MissingPlugin, UserError
from smalti.plugins import Selection, load_plugins, open_run
from smalti.rundir import RunDirectory, acquire
from smalti_data.remote.checkpoints import RemoteRun
from smalti_data.remote.downloads import download_missing
from smalti_data.remote.place import RemotePlace
from smalti_data.remote.resuming import download_to_resume, downloaded, find_to_resume
from smalti_storage_s3.client.storage import S3Storage
from smalti_storage_s3.mirror.ownership import Lease
from smalti_storage_s3.mirror.place import Access, open_place
from smalti_storage_s3.mirror.upload import Uploader
from smalti_testing.memory import MemoryStorage
from support.checkpoints import TENSORS, make

S3 = load_plugins(Selection(only=("storage_s3",)))
OTHER = TENSORS[:-1] + b"\x01"


@pytest.fixture
def url(store, request, monkeypatch) -> str:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", store.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", store.secret_key)
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
    monkeypatch.setenv("AWS_REGION", store.region)
    return f"s3://{store.bucket}/{request.node.name.partition('[')[0][-40:]}"


@pytest.fixture
def run(tmp_path, url) -> RunDirectory:
    """A run with two checkpoints that are in the bucket too."""
    directory = RunDirectory(tmp_path / "run")
    acquire(directory).close()
    (directory.data / "trained" / "abc").mkdir(parents=True)
    (directory.data / "trained" / "abc" / "photos.arrow").write_bytes(b"index")
    for step in (5, 6):
        make(directory.checkpoints, step)
        push(directory, url)
    return directory


def push(run: RunDirectory, url: str) -> None:
    record = run.record()
    assert record is not None
    Uploader(run=run, lease=Lease.take(open_place(url, Access()), record.id)).push_newest()


def replace(url: str, key: str, content: bytes) -> None:
    open_place(url, Access()).write(key, content)


def call(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(smalti, ["checkpoint", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def run_of(url: str) -> RemoteRun:
    place = open_run(url, S3)
    assert isinstance(place, RemotePlace)
    return place.run


def quiet(_sentence: str) -> None:
    pass


class Hostile(MemoryStorage):
    """A bucket whose listing has keys that lead out of a folder."""

    bad = (
        "data/trained/../../../ESC1/x.arrow",
        "data/trained/../x.arrow",
        "data/trained/a\\b/x.arrow",
        "data/trained//x.arrow",
    )

    def list(self, prefix="", *, after=""):
        yield from (StoredFile(key=key, size=1, etag="1") for key in self.bad if key.startswith(prefix))
        yield from super().list(prefix, after=after)


def test_keys_that_lead_out_of_the_folder_are_skipped_and_nothing_is_made_for_them(tmp_path):
    told, home = [], tmp_path / "runs" / "run"
    download_missing(Hostile({"data/trained/abc/photos.arrow": b"index"}), "data/trained/*/*.arrow", home, told.append)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir()] == [
        "runs/run/data/trained/abc/photos.arrow"
    ]
    assert [path.name for path in tmp_path.rglob("*") if path.is_dir()] == ["runs", "run", "data", "trained", "abc"]
    assert len(told) == 3
    assert all("skipped a file of memory: not a valid" in message for message in told)


def test_a_url_is_listed_and_inspected_as_the_folder_is(run, url):
    for command in (("ls",), ("ls", "--json"), ("inspect", "--json", "--tensors")):
        status, there = call(*command, url)
        assert (status, there.replace(url, str(run.path))) == call(*command, run.path)
    one = "checkpoints/step-00000005"
    _, there = call("inspect", f"{url}/{one}")
    assert there.replace(url, str(run.path)) == call("inspect", run.path / one)[1]


def test_an_inspection_reads_headers_and_not_tensors(url, store, tmp_path):
    large = Chunk(dtype="U8", shape=(4 << 20,), offsets=(0,))
    make(tmp_path / "run" / "checkpoints", 1, tensors=encode_header([("w", large)]) + bytes(large.size))
    run = RunDirectory(tmp_path / "run")
    acquire(run).close()
    push(run, url)
    found = run_of(url)
    [one] = found.all()
    assert found.tensors(one, found.manifest(one), "model")["w"].size == large.size
    assert isinstance(found.storage, S3Storage)
    assert found.storage.traffic()["read"].received < 2**18


def test_verify_reads_every_byte_and_stores_none(run, url, tmp_path):
    before = set(tmp_path.rglob("*"))
    assert call("verify", url) == call("verify", run.path)
    replace(url, "checkpoints/step-00000006/model/a.safetensors", OTHER)
    status, output = call("verify", url)
    assert status == 1
    assert "step-00000005  ok" in output
    assert "step-00000006  DAMAGED\n    model/a.safetensors does not match its digest" in output
    assert set(tmp_path.rglob("*")) == before


def test_convert_downloads_only_the_weights_and_leaves_only_the_target(run, url, tmp_path):
    target = tmp_path / "out" / "weights"
    assert call("convert", run.path, "--to", tmp_path / "local", "--format=safetensors")[0] == 0
    status, output = call("convert", url, "--to", target, "--format=safetensors", "--json")
    assert status == 0, output
    assert {p.name: p.read_bytes() for p in target.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "local").iterdir()
    }
    assert [path.name for path in target.parent.iterdir()] == ["weights"]
    status, output = call("convert", f"{url}/checkpoints/step-00000005", "--to", tmp_path / "whole")
    assert (status, verify(tmp_path / "whole").problems) == (0, ()), output


def test_a_damaged_file_is_never_converted(run, url, tmp_path):
    replace(url, "checkpoints/step-00000006/model/a.safetensors", OTHER)
    done = CliRunner().invoke(smalti, ["checkpoint", "convert", url, f"--to={tmp_path / 'weights'}", "--format=safetensors"])
    assert isinstance(done.exception, CheckpointError)
    assert "model/a.safetensors does not match its digest" in done.exception.message
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_checkpoint_to_resume_from_is_downloaded_once_beside_the_runs_own(run, url, tmp_path):
    new = RunDirectory(tmp_path / "new")
    new.path.mkdir()
    assert downloaded(new, url) is None
    path = download_to_resume(run_of(url), url, new, quiet)
    assert downloaded(new, url) == downloaded(new, f"{url}/") == path
    assert verify(path).step == 6
    assert path.is_relative_to(new.path / "downloads")
    assert (RunDirectory(path.parent.parent).data / "trained" / "abc" / "photos.arrow").read_bytes() == b"index"
    again = run_of(url)
    assert download_to_resume(again, url, new, quiet) == path
    assert isinstance(again.storage, S3Storage)
    assert again.storage.traffic()["read"].received < 4000
    one = f"{url}/checkpoints/step-00000005"
    older = download_to_resume(run_of(one), one, new, quiet)
    assert read_manifest(older).step == 5
    assert downloaded(new, url) == path


def test_a_damaged_checkpoint_is_skipped_unless_it_was_named(run, url, tmp_path):
    replace(url, "checkpoints/step-00000006/model/a.safetensors", OTHER)
    new, said = RunDirectory(tmp_path / "new"), []
    assert download_to_resume(run_of(url), url, new, said.append).name == "step-00000005"
    assert any("skipped step-00000006" in each and "digest" in each for each in said)
    one = f"{url}/checkpoints/step-00000006"
    with pytest.raises(CheckpointError, match="does not match its digest"):
        download_to_resume(run_of(one), one, new, said.append)
    assert downloaded(new, one) is None


def test_where_there_is_no_checkpoint_the_url_is_named(url):
    with pytest.raises(CheckpointError, match="no checkpoint in s3://"):
        find_to_resume(run_of(url))
    refused = CliRunner().invoke(smalti, ["checkpoint", "ls", url]).exception
    assert isinstance(refused, UserError)
    assert (refused.exit_code, f"no checkpoint found in {url}" in refused.message) == (2, True)


def test_a_url_that_no_plugin_opens_names_the_package_or_the_schemes():
    without = load_plugins(Selection(without=("all",)))
    with pytest.raises((MissingPlugin, UserError)) as refused:
        open_run("s3://bucket/run", without)
    assert "storage_s3" in refused.value.fix
    with pytest.raises(UserError, match="no plugin opens gs://bucket/run") as refused:
        open_run("gs://bucket/run", S3)
    assert "s3://" in refused.value.fix
