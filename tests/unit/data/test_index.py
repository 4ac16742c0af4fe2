"""Scanning: headers only, incremental, and broken files quarantined with a reason."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from smalti.data.datasets.parse import DataDefaults, parse_datasets
from smalti.data.datasets.spec import Catalog, DatasetSpec
from smalti.data.prepared import build_datasets
from smalti.data.scan.build import build_index
from smalti.data.scan.image_sizes import read_header
from smalti.data.scan.index import DatasetIndex, load_index
from smalti.data.scan.quarantine import BadSampleError
from smalti.data.storage.local import LocalStorage
from smalti.data.storage.protocol import TransientStorageError
from smalti.errors import UserError


def image(path: Path, width: int = 12, height: int = 8, caption: str | None = "a thing", exif: bytes = b"") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), "red").save(path, exif=exif)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption)


def spec_of(folder: Path, **values: object) -> DatasetSpec:
    entry = {"id": "pets", "instance_data_dir": str(folder), **values}
    specs, problems = parse_datasets([entry], where="", defaults=DataDefaults())
    assert not problems
    return specs[0]


def size_of(folder: Path, name: str) -> tuple[int, int]:
    header = read_header(partial(LocalStorage(folder).read_range, name), (folder / name).stat().st_size)
    return header.width, header.height


class CountingStorage(LocalStorage):
    """A folder that notes what is opened."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.opened: list[str] = []

    def read(self, key: str) -> bytes:
        self.opened.append(key)
        return super().read(key)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        self.opened.append(key)
        return super().read_range(key, start, length)


def build(folder: Path, cache: Path | None = None, storage: LocalStorage | None = None, **values: object) -> DatasetIndex:
    spec = spec_of(folder, **values)
    storage = storage or LocalStorage(folder)
    return build_index(spec, storage, Catalog().open_source(spec, storage), cache)


def healthy(index: DatasetIndex) -> list[str]:
    return [index.key(row) for row in range(len(index)) if index.size(row) != (0, 0)]


def sizes(index: DatasetIndex) -> list[tuple[int, int]]:
    return [index.size(row) for row in range(len(index))]


def reasons(index: DatasetIndex) -> dict[str, str]:
    return {item.key: item.reason for item in index.quarantined}


def test_an_index_holds_size_caption_and_etag_of_every_picture(tmp_path: Path) -> None:
    image(tmp_path / "b.png", 30, 20, "a boat")
    image(tmp_path / "sub/a.jpg", 10, 40, "an ant")
    index = build(tmp_path)

    assert healthy(index) == ["b.png", "sub/a.jpg"]
    assert sizes(index) == [(30, 20), (10, 40)]
    assert [index.captions(row) for row in range(2)] == [("a boat",), ("an ant",)]
    assert index.etag(0) == LocalStorage(tmp_path).stat("b.png").etag


def test_every_kind_of_picture_file_is_found_whatever_the_case(tmp_path: Path) -> None:
    names = ["a.PNG", "b.jpg", "c.JPEG", "d.webp", "e.bmp", "f.gif", "g.tif", "h.tiff", "i.avif", "j.jfif", "k.jpe"]
    for name in names:
        image(tmp_path / name, 21, 13)
    index = build(tmp_path)

    assert healthy(index) == names
    assert set(sizes(index)) == {(21, 13)}


def test_hidden_files_are_left_out(tmp_path: Path) -> None:
    for name in ("a.png", "._a.png", ".cache/b.png", "sub/.c.png"):
        image(tmp_path / name)

    assert healthy(build(tmp_path)) == ["a.png"]


def test_sizes_are_those_after_the_exif_rotation(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image(tmp_path / "a.jpg", 30, 20, exif=exif.tobytes())
    image(tmp_path / "b.png", 30, 20, exif=exif.tobytes())
    index = build(tmp_path)

    assert sizes(index) == [(20, 30), (20, 30)]


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "tiff", "bmp", "gif"])
def test_the_size_of_a_large_file_is_found(tmp_path: Path, kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / f"a.{kind}", lossless=True, quality=95)
    size = (tmp_path / f"a.{kind}").stat().st_size

    assert size > 64 * 1024
    assert size_of(tmp_path, f"a.{kind}") == (400, 300)


def test_a_header_behind_a_long_block_is_still_found(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (33, 22)).save(buffer, "JPEG", icc_profile=b"\0" * 200_000)
    (tmp_path / "a.jpg").write_bytes(buffer.getvalue())

    assert size_of(tmp_path, "a.jpg") == (33, 22)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_an_error(tmp_path: Path) -> None:
    Image.new("1", (10_000, 10_000)).save(tmp_path / "bomb.png")

    with pytest.raises(BadSampleError, match="10000x10000 is more than 89 megapixels"):
        size_of(tmp_path, "bomb.png")


def test_broken_samples_are_set_aside_with_the_reason(tmp_path: Path) -> None:
    image(tmp_path / "good.png")
    image(tmp_path / "nocaption.png", caption=None)
    image(tmp_path / "empty.png", caption=" \n ")
    image(tmp_path / "latin.png")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "text.png").write_bytes(b"not an image")
    (tmp_path / "text.txt").write_text("caption")
    (tmp_path / "void.png").touch()
    (tmp_path / "void.txt").write_text("caption")
    index = build(tmp_path)

    assert healthy(index) == ["good.png"]
    assert reasons(index) == {
        "empty.png": "no caption: empty.txt is empty",
        "latin.png": "no caption: latin.txt is not UTF-8 text",
        "nocaption.png": "no caption: missing file nocaption.txt",
        "text.png": "not a readable image: unknown format",
        "void.png": "not a readable image: empty file",
    }


def test_what_is_no_regular_file_is_set_aside_and_never_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "pets"
    for name in ("caption", "good", "loop"):
        image(folder / f"{name}.png", caption="a thing" if name == "good" else None)
    os.mkfifo(folder / "caption.txt")
    os.mkfifo(folder / "image.png")
    (folder / "image.txt").write_text("never seen")
    (folder / "loop.txt").symlink_to("loop.txt")
    (folder / "round.png").symlink_to("round.png")
    (folder / "nowhere.png").symlink_to("gone.png")
    for name in ("nowhere", "round"):
        (folder / f"{name}.txt").write_text("a link")
    index = build(folder)

    assert healthy(index) == ["good.png"]
    assert reasons(index) == {
        "caption.png": f"{folder}/caption.txt: not a regular file",
        "image.png": f"{folder}/image.png: not a regular file",
        "loop.png": f"{folder}/loop.txt: Too many levels of symbolic links",
        "nowhere.png": f"{folder}/nowhere.png: no such file",
        "round.png": f"{folder}/round.png: Too many levels of symbolic links",
    }


def test_a_name_that_is_not_utf_8_sets_aside_that_sample_alone(tmp_path: Path) -> None:
    image(tmp_path / "good.png")
    image(tmp_path / "x/deep.png")
    (tmp_path / "x").rename(tmp_path / os.fsdecode(b"f\xe9"))
    (tmp_path / os.fsdecode(b"caf\xe9.png")).hardlink_to(tmp_path / "good.png")
    index = build(tmp_path)

    assert healthy(index) == ["good.png"]
    assert list(reasons(index)) == ["caf\\xe9.png", "f\\xe9/deep.png"]
    assert all("a byte that is not UTF-8" in reason for reason in reasons(index).values())


def test_each_line_of_a_text_file_is_a_caption_unless_told_otherwise(tmp_path: Path) -> None:
    image(tmp_path / "a.png", caption="one \n\n two\n")

    assert build(tmp_path).captions(0) == ("one", "two")
    assert build(tmp_path, disable_multiline_split=True).captions(0) == ("one \n\n two",)


def test_names_and_prompts_are_captions_too(tmp_path: Path) -> None:
    image(tmp_path / "a_red__cat.v2.png", caption="ignored")

    assert build(tmp_path, caption_strategy="filename").captions(0) == ("a red cat.v2",)
    assert build(tmp_path, caption_strategy="instanceprompt", instance_prompt="sks").captions(0) == ("sks",)
    assert build(tmp_path, instance_prompt="sks", prepend_instance_prompt=True).captions(0) == ("sks ignored",)
    assert build(tmp_path, instance_prompt="sks", only_instance_prompt=True).captions(0) == ("sks",)


def test_only_what_is_new_or_changed_is_opened_again(tmp_path: Path) -> None:
    folder, cache = tmp_path / "pets", tmp_path / "run/pets.arrow"
    for name in "abcd":
        image(folder / f"{name}.png")
    build(folder, cache)
    image(folder / "b.png", 50, 60)  # writes the text anew as well
    (folder / "c.txt").write_text("another caption")
    image(folder / "e.png")
    (folder / "d.png").unlink()
    storage = CountingStorage(folder)
    index = build(folder, cache, storage)

    assert sorted(storage.opened) == ["b.png", "b.txt", "c.txt", "e.png", "e.txt"]
    assert healthy(index) == ["a.png", "b.png", "c.png", "e.png"]
    assert (index.size(1), index.captions(2)) == ((50, 60), ("another caption",))


def test_an_unchanged_dataset_is_listed_but_not_opened(tmp_path: Path) -> None:
    folder, cache = tmp_path / "pets", tmp_path / "pets.arrow"
    for number in range(20):
        image(folder / f"{number}.png")
    first = build(folder, cache)
    storage = CountingStorage(folder)
    second = build(folder, cache, storage)

    assert storage.opened == []
    assert list(second.keys()) == list(first.keys())


def test_broken_samples_are_looked_at_again(tmp_path: Path) -> None:
    folder, cache = tmp_path / "pets", tmp_path / "pets.arrow"
    image(folder / "a.png")
    image(folder / "b.png", caption=None)
    build(folder, cache)
    (folder / "b.txt").write_text("now it has one")

    assert healthy(build(folder, cache)) == ["a.png", "b.png"]


def test_other_captions_wanted_means_another_index(tmp_path: Path) -> None:
    folder, cache = tmp_path / "pets", tmp_path / "pets.arrow"
    image(folder / "name.png", caption="text")
    build(folder, cache)

    assert build(folder, cache, caption_strategy="filename").captions(0) == ("name",)


def test_a_damaged_index_is_built_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, cache = tmp_path / "pets", tmp_path / "pets.arrow"
    image(folder / "a.png")
    build(folder, cache)
    cache.write_bytes(cache.read_bytes()[:100])

    assert healthy(build(folder, cache)) == ["a.png"]
    assert "it is rebuilt" in caplog.text


def test_an_index_can_be_loaded_by_another_process(tmp_path: Path) -> None:
    folder, cache = tmp_path / "pets", tmp_path / "pets.arrow"
    image(folder / "a.png")
    image(folder / "b.png", caption=None)
    built = build(folder, cache)
    loaded = load_index(spec_of(folder), cache)

    assert (list(loaded.keys()), sizes(loaded), loaded.quarantined) == (list(built.keys()), sizes(built), built.quarantined)
    assert (loaded.unusable, loaded.digests) == (1, built.digests)


def test_an_index_of_another_configuration_is_not_loaded(tmp_path: Path) -> None:
    folder, cache = tmp_path / "pets", tmp_path / "pets.arrow"
    image(folder / "a.png")
    build(folder, cache)

    with pytest.raises(UserError, match="another configuration"):
        load_index(spec_of(folder, caption_strategy="filename"), cache)


def test_a_folder_without_pictures_is_an_error(tmp_path: Path) -> None:
    for name in ("a.heic", "b.HEIC", "b.txt"):
        (tmp_path / name).write_bytes(b"?")

    with pytest.raises(UserError, match=r"no image found in .*, but other files: 2 \.heic"):
        build(tmp_path)


def test_files_that_are_no_samples_are_counted_by_extension(tmp_path: Path) -> None:
    image(tmp_path / "a.png")
    for name in ("b.heic", "sub/c.HEIC", "d.mp4", "README", "metadata.jsonl", ".hidden.heic", "stray.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"?")
    (dataset,) = build_datasets([spec_of(tmp_path)], Catalog())

    assert dataset.notices == (
        "dataset pets: 4 files are skipped, because smalti does not read them: 2 .heic, 1 without an extension, 1 .mp4",
    )


def test_a_choice_of_samples_hardly_changes_when_files_are_added(tmp_path: Path) -> None:
    for number in range(40):
        image(tmp_path / f"{number:02}.bmp", caption="x")
    before = healthy(build(tmp_path, max_num_samples=10))
    for number in range(40, 44):
        image(tmp_path / f"{number:02}.bmp", caption="x")
    after = healthy(build(tmp_path, max_num_samples=10))

    assert len(before) == len(after) == 10
    assert len(set(before) - set(after)) <= 4
    assert after == healthy(build(tmp_path, max_num_samples=10))


def test_a_scan_keeps_index_and_quarantine_list_in_the_run_directory(tmp_path: Path) -> None:
    image(tmp_path / "pets/a.png")
    image(tmp_path / "pets/b.png", caption=None)
    seen: list[tuple[str, int, int]] = []
    progress = lambda name: lambda done, total: seen.append((name, done, total))
    build_datasets([spec_of(tmp_path / "pets")], Catalog(), tmp_path / "run", progress)
    lines = (tmp_path / "run/pets.quarantine.jsonl").read_text().splitlines()

    assert json.loads(lines[0]) == {"dataset": "pets", "key": "b.png", "reason": "no caption: missing file b.txt"}
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["pets.arrow", "pets.quarantine.jsonl"]
    assert seen == [("pets", 2, 2)]


def test_a_storage_that_does_not_answer_stops_the_scan_and_gives_no_sample_up(tmp_path: Path) -> None:
    class Away(LocalStorage):
        def read_range(self, key: str, start: int, length: int) -> bytes:
            raise TransientStorageError("the server is away")

    image(tmp_path / "a.png")

    with pytest.raises(TransientStorageError):
        build(tmp_path, storage=Away(tmp_path))


def test_checking_data_imports_no_torch() -> None:
    code = "import sys, smalti.data.prepared, smalti.data.storage.local; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
