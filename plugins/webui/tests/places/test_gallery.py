"""The images of a run as a table, their settings and thumbnails."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from smalti import UserError
from smalti.rundir import RunDirectory
from smalti_webui.places.gallery.samples import events_of_kind, gallery, settings_of
from smalti_webui.places.gallery.thumbnails import Thumbnails

MakeRun = Callable[..., RunDirectory]


def test_images_are_a_row_for_each_prompt_and_a_column_for_each_step(make_run: MakeRun) -> None:
    found = gallery(make_run(samples=(10, 20), prompts=("a face", "a cat")))

    assert found.steps == (10, 20)
    assert [(row.prompt, sorted(row.cells)) for row in found.rows] == [("a face", [10, 20]), ("a cat", [10, 20])]
    assert found.rows[1].cells[20].file == "00000020/1.png"
    assert found.count == 4


def test_images_outside_of_the_folder_of_the_run_are_not_shown(make_run: MakeRun) -> None:
    run = make_run(samples=(), condition="finished")
    with run.events_file.open("a") as file:
        for path in ("/etc/x.png", "samples/../../x.png", "../x.png", "checkpoints/x.png", 7):
            shown = f'"{path}"' if isinstance(path, str) else path
            file.write(f'{{"type":"sample","t":1,"step":5,"images":[{{"prompt":"p","seed":1,"path":{shown}}}]}}\n')
        file.write('{"type":"sample","t":1,"step":5,"images":"none"}\n')

    assert gallery(run).rows == ()


def test_only_complete_events_of_a_kind_are_read(make_run: MakeRun) -> None:
    run = make_run(samples=(10,))
    with run.events_file.open("a") as file:
        file.write('{"type":"sample","t":1,"step":99')

    assert [event.step for event in events_of_kind(run.events_file, "sample", "checkpoint")] == [10, 10, 20]


def test_settings_come_from_the_image_itself(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(prompts=("a cat <b>bold</b>",))

    assert settings_of(run.samples / "00000010" / "0.png")["prompt"] == "a cat <b>bold</b>"
    (tmp_path / "no.png").write_bytes(b"no")
    assert settings_of(tmp_path / "no.png") == {}


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "1", "I;16", "CMYK"])
def test_a_thumbnail_has_at_most_the_width_in_every_mode(tmp_path: Path, mode: str) -> None:
    source = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
    Image.new(mode, (900, 300)).save(source)
    thumbnails = Thumbnails(tmp_path / "made")

    with Image.open(thumbnails.of(source, 320)) as made:
        assert made.size == (320, 107)


def test_a_thumbnail_is_that_of_the_present_image_and_turned_as_the_camera_was(tmp_path: Path) -> None:
    source, thumbnails = tmp_path / "a.jpg", Thumbnails(tmp_path / "made")
    Image.new("RGB", (80, 40), "red").save(source)
    first = thumbnails.of(source, 160)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (80, 40), "blue").save(source, exif=exif)
    second = thumbnails.of(source, 160)

    assert first != second
    with Image.open(second) as made:
        assert made.size == (40, 80)
        assert made.getpixel((5, 5))[2] > 200
    assert thumbnails.of(source, 160) == second


def test_what_is_not_an_image_or_not_a_width_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    thumbnails = Thumbnails(tmp_path / "made")

    for source, width in [("a.png", 320), ("missing.png", 320), ("a.png", 5000)]:
        with pytest.raises(UserError):
            thumbnails.of(tmp_path / source, width)
    assert thumbnails.files() == []


def test_the_oldest_thumbnails_make_room(tmp_path: Path) -> None:
    thumbnails = Thumbnails(tmp_path / "made")
    for number in range(4):
        Image.new("RGB", (50 + number, 50)).save(tmp_path / f"{number}.png")
        thumbnails.of(tmp_path / f"{number}.png", 160)
    newest = max(thumbnails.files(), key=lambda entry: entry.stat().st_mtime_ns)

    thumbnails.trim(newest.stat().st_size)

    assert [entry.name for entry in thumbnails.files()] == [newest.name]


def test_thumbnails_are_readable_for_their_user_only(make_run: MakeRun, tmp_path: Path) -> None:
    image = make_run().samples / "00000010" / "0.png"
    folder = tmp_path / "thumbnails"
    folder.mkdir(mode=0o755)  # as older versions made it
    made = Thumbnails(folder).of(image, 160)

    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, made)] == [0o700, 0o600]
