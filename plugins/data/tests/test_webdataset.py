"""Tar shards: samples, captions and sizes from one pass over each shard; damaged shards keep what can be used."""

import io
import json
import os
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from smalti.data import DatasetSpec, Storage, StoredFile
from smalti.data.scan.build import build_index
from smalti.data.scan.index import DatasetIndex
from smalti.data.storage.local import LocalStorage
from smalti.errors import ConfigError, UserError
from smalti_data.archives.tar_members import DamagedTarError, Member, members
from smalti_data.archives.webdataset import WebDataset


def image(width: int, height: int, kind: str = "JPEG") -> bytes:
    data = io.BytesIO()
    Image.effect_noise((width, height), 90).convert("RGB").save(data, kind)
    return data.getvalue()


def shard(path: Path, files: dict[str, bytes], form: int = tarfile.GNU_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


class Remote(Storage):
    """A folder that is read through the storage's methods alone, as a bucket is."""

    def __init__(self, root: Path) -> None:
        self._local = LocalStorage(root)
        self.requests = 0

    @property
    def location(self) -> str:
        return "remote"

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[StoredFile]:
        return self._local.list(prefix)

    def stat(self, key: str) -> StoredFile:
        raise AssertionError("asked for one file")

    def read(self, key: str) -> bytes:
        raise AssertionError("read whole")

    def write(self, key: str, data: bytes) -> None:
        raise AssertionError("written")

    def read_range(self, key: str, start: int, length: int) -> bytes:
        self.requests += 1
        return self._local.read_range(key, start, length)


def source(root: Path, storage: object = None, folder: Path | None = None, **values) -> WebDataset:
    values = {"metadata_backend": "webdataset", "caption_strategy": "webdataset"} | values
    made = WebDataset(DatasetSpec(id="tars", instance_data_dir=root, **values), storage or LocalStorage(root))
    if folder is not None:
        made.use_folder(folder)
    return made


@pytest.mark.parametrize("remote", [False, True])
def test_samples_have_captions_sizes_and_places(tmp_path: Path, remote: bool) -> None:
    cat, dog, owl = image(40, 30), image(30, 50, "PNG"), image(20, 20, "WEBP")
    shard(
        tmp_path / "b" / "0001.tar", {"./x/cat.v1.jpg": cat, "x/cat.txt": b"a cat\nmy cat", "x/cat.json": b'{"caption": "no"}'}
    )
    text = json.dumps({"about": {"long": ["a dog"]}, "caption": "", "text": " dog "}).encode()
    shard(tmp_path / "a.tar", {"dog.json": text, "dog.PNG": dog, "owl.webp": owl, "lost.txt": b"x", "._owl.jpg": b"x"})
    made = source(tmp_path, Remote(tmp_path) if remote else None)

    found = list(made.list())
    assert [(one.key, one.captions, one.width, one.height, one.problem) for one in found] == [
        ("a.tar/dog.PNG", ("dog",), 30, 50, ""),
        ("a.tar/owl.webp", (), 20, 20, ""),
        ("b/0001.tar/x/cat.v1.jpg", ("a cat", "my cat"), 40, 30, ""),
    ]
    assert [made.read(one.place) for one in found] == [dog, owl, cat]
    assert made.read_range(found[2].place, 3, 5) == cat[3:8]
    assert made.read_range(found[2].place, len(cat) - 2, 50) == cat[-2:]
    assert made.notices == ("dataset tars: a.tar: 1 samples have no image",)


def test_small_members_are_streamed_in_few_requests(tmp_path: Path) -> None:
    shard(
        tmp_path / "a.tar", {f"{n:04}.{kind}": data for n in range(200) for kind, data in (("jpg", image(9, 9)), ("txt", b"x"))}
    )
    storage = Remote(tmp_path)
    assert len(list(source(tmp_path, storage).list())) == 200
    assert storage.requests == 1


def test_members_are_chosen_by_the_block(tmp_path: Path) -> None:
    files = {"a.seg.png": image(8, 8), "a.jpg": image(9, 9), "a.txt": b"text", "a.json": b'{"deep": {"tags": ["t", "u"]}}'}
    shard(tmp_path / "a.tar", files)
    block = {"image_extension": "jpg", "caption_extension": "json", "caption_key": "deep.tags"}
    assert [(one.key, one.captions) for one in source(tmp_path, metadata_options=block).list()] == [("a.tar/a.jpg", ("t", "u"))]
    assert [one.captions for one in source(tmp_path, caption_strategy="filename").list()] == [None]
    with pytest.raises(ConfigError, match="unknown key 'ending'"):
        source(tmp_path, metadata_options={"ending": "jpg"})


def test_unchanged_shards_are_not_read_again(tmp_path: Path) -> None:
    data, folder = tmp_path / "data", tmp_path / "run"
    for name in ("a", "b"):
        shard(data / f"{name}.tar", {f"{name}.jpg": image(8, 8), f"{name}.txt": name.encode()})
    first = list(source(data, Remote(data), folder).list())
    shard(data / "b.tar", {"c.jpg": image(16, 8), "c.txt": b"c", "d.jpg": image(8, 8)})
    storage = Remote(data)
    second = list(source(data, storage, folder).list())
    assert second[0] == first[0]
    assert [one.key for one in second] == ["a.tar/a.jpg", "b.tar/c.jpg", "b.tar/d.jpg"]
    assert storage.requests == 1
    (data / "a.tar").unlink()
    kept = next((folder / "containers").iterdir())
    kept.write_bytes(kept.read_bytes()[:50])
    assert [one.key for one in source(data, folder=folder).list()] == ["b.tar/c.jpg", "b.tar/d.jpg"]
    assert len(list((folder / "containers").iterdir())) == 1


def test_an_index_of_unchanged_shards_stays_and_a_replaced_image_of_the_same_size_is_noticed(tmp_path: Path) -> None:
    data, path = tmp_path / "data", tmp_path / "run/tars.arrow"

    def scanned(**values: object) -> tuple[DatasetIndex, int]:
        made = source(data, folder=tmp_path / "run/tars", **values)
        index = build_index(made._spec, LocalStorage(data), made, path)
        return index, path.stat().st_ino

    pictures = [image(8, 8, "BMP") for _ in range(3)]
    shard(data / "a.tar", {"a.bmp": pictures[0], "a.txt": b"a", "b.bmp": pictures[1], "b.txt": b"b", "c.txt": b"c"})
    first, file = scanned()
    before = [first.digests, first.content(0), first.content(1)]
    assert scanned()[1] == file
    shard(data / "a.tar", {"a.bmp": pictures[0], "a.txt": b"a", "b.bmp": pictures[2], "b.txt": b"b", "c.txt": b"c"})
    second, file = scanned()
    assert second.content(0) == before[1]
    assert second.content(1) != before[2]
    assert (second.digests.keys, second.digests.captions) == (before[0].keys, before[0].captions)
    assert second.digests.content != before[0].content
    again, other = scanned(metadata_options={"caption_extension": "json"})
    assert other != file
    assert again.unusable == 2


def test_a_truncated_shard_keeps_the_images_before(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", {f"{name}.{kind}": image(64, 64, "PNG") for name in "abc" for kind in ("png",)})
    whole = path.read_bytes()
    path.write_bytes(whole[: len(image(1, 1)) + 512 * 60])
    found = list(source(tmp_path).list())
    cut = [one.key for one in found if one.problem]
    assert found[0].key == "a.tar/a.png"
    assert not found[0].problem
    assert 1 <= len(cut) <= 2
    assert any("ends at byte" in one.problem for one in found)
    (tmp_path / "a.tar").write_bytes(b"\x1f\x8b" + random.Random(0).randbytes(3000))
    assert ["not a tar file" in one.problem for one in source(tmp_path).list()] == [True]


@pytest.mark.parametrize("size", [b"\x80" + b"\x7f" * 11, b"\xff" * 11 + b"\x00"], ids=["huge", "negative"])
def test_an_impossible_size_in_a_header_costs_the_rest_of_its_shard_only(tmp_path: Path, size: bytes) -> None:
    path = shard(tmp_path / "a.tar", {f"{name}.png": image(8, 8) for name in "abc"})
    shard(tmp_path / "b.tar", {"d.png": image(8, 8)})
    data = bytearray(path.read_bytes())
    [at] = [
        one.offset - 512
        for one in members(lambda start, length: bytes(data[start : start + length]), len(data))
        if one.name == "b.png"
    ]
    data[at + 124 : at + 136] = size
    data[at + 148 : at + 156] = b" " * 8
    data[at + 148 : at + 156] = f"{sum(data[at : at + 512]):06o}\0 ".encode()
    path.write_bytes(data)
    found = list(source(tmp_path).list())
    assert [one.key for one in found if not one.problem] == ["a.tar/a.png", "b.tar/d.png"]
    assert ["has an impossible size" in one.problem for one in found if one.problem] == [True]


@pytest.mark.parametrize("size", ["-512", "1e3", "9" * 30])
def test_an_impossible_size_in_a_pax_record_is_a_damaged_header(tmp_path: Path, size: str) -> None:
    info = tarfile.TarInfo("a.png")
    info.pax_headers = {"size": size}
    data = info.tobuf(tarfile.PAX_FORMAT) + bytes(1024)
    with pytest.raises(DamagedTarError, match="impossible size"):
        list(members(lambda start, length: data[start : start + length], len(data)))


def test_a_folder_without_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tar shards in"):
        list(source(tmp_path).list())


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_members_are_those_of_tarfile(tmp_path: Path, form: int) -> None:
    names = ["a.jpg", "d/" * 30 + "b.jpg", "n" * 90 + ".txt", "d/c.jpg"]
    if form != tarfile.USTAR_FORMAT:
        names += ["é" * 70 + ".jpg", "x" * 300 + ".png", "long/" * 60 + "y.jpg"]
    sizes = random.Random(form)
    path = shard(tmp_path / "a.tar", {name: sizes.randbytes(sizes.randrange(3000)) for name in names}, form)
    with tarfile.open(path, "a", format=form) as tar:
        link, folder = tarfile.TarInfo("link"), tarfile.TarInfo("folder")
        link.type, link.linkname, folder.type = tarfile.SYMTYPE, "a.jpg", tarfile.DIRTYPE
        tar.addfile(link)
        tar.addfile(folder)
    data = path.read_bytes()
    with tarfile.open(path) as tar:
        expected = [Member(one.name, one.offset_data, one.size) for one in tar if one.isreg()]
    assert list(members(lambda at, length: data[at : at + length], len(data))) == expected
    damaged = bytearray(data)
    damaged[expected[1].offset - 512] ^= 0xFF
    with pytest.raises(DamagedTarError):
        list(members(lambda at, length: bytes(damaged[at : at + length]), len(data)))


def test_a_shard_that_is_a_pipe_is_told_and_not_waited_for(tmp_path: Path) -> None:
    shard(tmp_path / "a.tar", {"cat.jpg": image(9, 9), "cat.txt": b"a cat"})
    os.mkfifo(tmp_path / "b.tar")
    with pytest.raises(UserError, match=r"b\.tar.* not a regular file"):
        list(source(tmp_path).list())


def test_a_caption_that_is_nested_too_deeply_sets_its_sample_aside(tmp_path: Path) -> None:
    files = {"bad.jpg": image(9, 9), "bad.json": b"[" * 100_000, "good.jpg": image(9, 9), "good.json": b'{"caption": "a cat"}'}
    shard(tmp_path / "a.tar", files)
    made = source(tmp_path)
    index = build_index(made._spec, LocalStorage(tmp_path), made)
    assert [(item.key, item.reason) for item in index.quarantined] == [("a.tar/bad.jpg", "no caption in the webdataset table")]
