"""The pages of datasets, samples, checkpoints, errors, comparison and caches, as a browser gets them."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from starlette.testclient import TestClient

from smalti import UserError
from smalti.config import resolve
from smalti.data import scan_data
from smalti.plugins import load_plugins, schema_of, selection_of
from smalti.rundir import RunDirectory
from smalti.types import Visits
from smalti_validation.visits import FOLDER, Share, VisitFile
from smalti_webui.places.installation.caches import caches_of, confirmed

MakeRun = Callable[..., RunDirectory]
MARKUP = "<script>alert(1)</script>"


@pytest.fixture
def photos(root: Path) -> Path:
    """A folder with two images, one of which has a caption, and a file that is no image."""
    folder = root / "photos"
    folder.mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (64, 48), "teal").save(folder / f"{name}.png")
    (folder / "a.txt").write_text(f"a face {MARKUP}\n")
    (folder / "broken.png").write_text("no image")
    (folder / "broken.txt").write_text("broken\n")
    return folder


@pytest.fixture
def dataset(client: TestClient, photos: Path) -> str:
    """The address of the page of these images."""
    answer = client.post("/datasets/folders", data={"folder": str(photos)}, follow_redirects=False)
    assert answer.status_code == 303
    return answer.headers["location"]


def _id(run: RunDirectory) -> str:
    record = run.record()
    assert record is not None
    return record.id


def _ended(client: TestClient, answer: str) -> str:
    """The job that an answer shows, once it has ended."""
    address = re.search(r'id="job-(\w+)"', answer)
    assert address, answer
    while "hx-trigger" in answer.partition("</section>")[0]:
        time.sleep(0.05)
        answer = client.get(f"/jobs/{address[1]}", headers={"hx-request": "true"}).text
    return answer


# --- datasets -------------------------------------------------------------------------------------------------------


def test_a_folder_is_scanned_and_what_is_wrong_is_kept(client: TestClient, dataset: str, tmp_path: Path) -> None:
    ended = _ended(client, client.post(f"{dataset}/run/scan").text)

    assert "1 usable images, 2 that cannot be used" in ended
    page = client.get(dataset).text
    assert "not a readable image" in page
    assert "missing file b.txt" in page
    assert MARKUP not in page
    assert "2 images cannot be used" in page
    (folders,) = tmp_path.rglob("folders.json")
    assert {stat.S_IMODE(each.stat().st_mode) for each in folders.parent.glob("*.json")} == {0o600}
    assert stat.S_IMODE(folders.parent.stat().st_mode) == 0o700


def test_images_are_filtered_by_their_captions_and_names(client: TestClient, dataset: str) -> None:
    def shown(query: str) -> list[str]:
        return re.findall(r"<figcaption><code>([^<]+)</code>", client.get(f"{dataset}?{query}").text)

    assert shown("") == ["a.png", "b.png", "broken.png"]
    assert shown("show=missing") == ["b.png"]
    assert shown("search=BRO") == ["broken.png"]
    assert shown("at=99") == ["a.png", "b.png", "broken.png"]


def test_an_image_whose_name_is_not_utf_8_is_shown_with_the_reason(client: TestClient, dataset: str, photos: Path) -> None:
    Path(os.fsdecode(os.fsencode(photos) + b"/bad\xff.png")).write_bytes((photos / "a.png").read_bytes())
    answer = client.get(dataset)
    assert answer.status_code == 200
    assert "the name is not UTF-8; rename the file" in answer.text
    assert "a.png" in answer.text
    assert "bad%" not in re.findall(r'src="([^"]*)"', answer.text)


def test_a_caption_is_saved_and_undone(client: TestClient, dataset: str, photos: Path) -> None:
    editor = client.get(f"{dataset}/caption", params={"key": "a.png"}).text
    version = re.search(r'name="version" value="(\w+)"', editor)
    assert version
    saved = client.post(f"{dataset}/caption", data={"key": "a.png", "version": version[1], "text": "a dog"})

    assert (photos / "a.txt").read_text() == "a dog\n"
    assert "hx-swap-oob" in saved.text
    client.post(f"{dataset}/caption/undo", data={"key": "a.png"})
    assert (photos / "a.txt").read_text() == f"a face {MARKUP}\n"


def test_a_caption_that_somebody_else_has_changed_is_shown_and_kept(client: TestClient, dataset: str, photos: Path) -> None:
    (photos / "b.txt").write_text("of somebody else\n")

    answer = client.post(f"{dataset}/caption", data={"key": "b.png", "version": "", "text": "mine"}).text

    assert (photos / "b.txt").read_text() == "of somebody else\n"
    assert "has changed since it was shown" in answer
    assert "of somebody else" in answer
    assert ">mine</textarea>" in answer


def test_no_file_outside_of_a_dataset_is_read_or_written(client: TestClient, dataset: str, photos: Path) -> None:
    outside = photos.parent.parent / "outside.png"
    Image.new("RGB", (8, 8)).save(outside)
    Image.new("RGB", (8, 8)).save(photos.parent / "secret.png")
    (photos / "link.png").symlink_to(outside)

    for key in ("../secret.png", "/etc/passwd", "a.txt", ".hidden.png", "link.png", "a.png/../../secret.png", ""):
        for address in (f"{dataset}/image/", f"{dataset}/thumbnail/320/"):
            assert client.get(address + key.replace("/", "%2F")).status_code in (403, 404, 405, 422), key
        answer = client.post(f"{dataset}/caption", data={"key": key, "version": "", "text": "written"})
        assert answer.status_code in (403, 404, 422), key
    assert not list(photos.parent.parent.rglob("*secret.txt"))
    assert not list(photos.parent.parent.rglob("outside.txt"))


def test_the_text_file_of_an_image_may_not_lead_out_of_the_roots(client: TestClient, dataset: str, photos: Path) -> None:
    outside = photos.parent.parent / "outside.txt"
    outside.write_text("private\n")
    (photos / "b.txt").symlink_to(outside)

    assert client.get(f"{dataset}/caption", params={"key": "b.png"}).status_code == 403
    assert "private" not in client.get(dataset).text


def test_a_folder_outside_of_the_roots_is_not_added(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()

    assert client.post("/datasets/folders", data={"folder": str(tmp_path / "elsewhere")}).status_code == 403


def test_the_datasets_of_runs_are_listed_once_with_all_runs(
    client: TestClient, make_run: MakeRun, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMALTI_UI_DATA", "/of/the/server")
    for name in ("one", "two"):
        run = make_run(name, samples=(), checkpoints=())
        run.config_file.write_text(f'model_family = "toy"\ninstance_data_dir = "{photos}"\n')
    broken = make_run("three", samples=(), checkpoints=())
    broken.config_file.write_text("instance_data_dir = [\n")

    page = client.get("/datasets").text

    assert page.count('<section class="card dataset"') == 1
    assert "run one" in page
    assert "run two" in page
    assert re.search(r'class="notice warning">.*run three', page, re.DOTALL)


def test_the_images_that_a_run_learns_least_are_shown_with_its_noise_levels(
    client: TestClient, make_run: MakeRun, root: Path
) -> None:
    run = make_run(samples=(), checkpoints=())
    assert client.get(f"/runs/{_id(run)}/learning").text.strip() == "", "there are no visits"
    for folder in (root / "photos", root.parent / "outside"):
        folder.mkdir()
        for name in ("a & b", "c"):
            Image.new("RGB", (64, 64), "teal").save(folder / f"{name}.png")
    (root / "data.json").write_text(
        json.dumps(
            [
                {"id": "photos", "instance_data_dir": str(root / "photos"), "caption_strategy": "filename"},
                {"id": "out side", "instance_data_dir": str(root.parent / "outside"), "caption_strategy": "filename"},
            ]
        )
    )
    data = f'data_backend_config = "{root / "data.json"}"\nresolution = 64\n'
    run.config_file.write_text(f'output_dir = "{run.path}"\nmodel_family = "toy"\n{data}')
    plugins = load_plugins(selection_of((), run.config_file, {}))
    scan_data(resolve(schema_of(plugins), (), file=run.config_file, environment={}), plugins, 8, run.data)
    file = VisitFile(run.path / FOLDER, Share(ranks=1, micro_batch=4, accumulation=1), 0)
    keys, losses = ("photos/a & b.png", "photos/c.png", "out side/c.png", "removed/d.png"), (4.0, 1.0, 2.0, 2.0)
    for step in range(20):
        numbers = range(4 * step, 4 * step + 4)
        file.write(Visits(numbers=numbers, keys=keys, fractions=(0.3, 0.3, 0.3, 0.3), losses=losses), 4)
    file.close()

    shown = client.get(f"/runs/{_id(run)}/learning").text

    assert [float(each) for each in re.findall(r"→ ([\d.]+)", shown)[:4]] == pytest.approx([1.78, 0.89, 0.89, 0.44])
    images = re.findall(r'<img [^>]*src="([^"]+)"', shown)
    assert len(images) == 4, "two of a folder below the root, the worst and the best"
    assert client.get(images[0]).headers["content-type"] == "image/webp"
    assert images[0].endswith("/thumbnail/320/a%20%26%20b.png")
    assert "1 of them are not in the indexes of the run any more" in shown
    assert re.search(r'<th scope="row" class="number">300</th>.*?>80<', shown)
    assert f'hx-get="/runs/{_id(run)}/learning"' in client.get(f"/runs/{_id(run)}/metrics").text


# --- runs -----------------------------------------------------------------------------------------------------------


def test_samples_show_prompts_as_text_and_only_files_of_the_run(client: TestClient, make_run: MakeRun, root: Path) -> None:
    run = make_run(prompts=(f"a face {MARKUP}",))
    (run.samples / "link.png").symlink_to(root.parent / "x.png")
    Image.new("RGB", (8, 8)).save(root.parent / "x.png")
    base = f"/runs/{_id(run)}/samples"
    page = client.get(base).text

    assert MARKUP not in page
    assert "&lt;script&gt;" in page
    assert client.get(f"{base}/file/00000010/0.png").headers["content-type"] == "image/png"
    assert client.get(f"{base}/thumbnail/320/00000010/0.png").headers["content-type"] == "image/webp"
    assert client.get(f"{base}/settings/00000010/0.png").json()["step"] == "10"
    for name in ("link.png", "..%2Frun.json", "..%2F..%2Fx.png", "%2Fetc%2Fpasswd", "missing.png", "%00.png"):
        assert client.get(f"{base}/file/{name}").status_code in (403, 404), name


def test_errors_show_the_cause_first_and_escape_it(client: TestClient, make_run: MakeRun) -> None:
    page = client.get(f"/runs/{_id(make_run(condition='failed', message=MARKUP))}/errors").text

    assert MARKUP not in page
    assert page.index("ValueError: &lt;script&gt;") < page.index("Traceback")


def test_damaged_checkpoints_are_listed_and_verified_by_the_command(client: TestClient, make_run: MakeRun) -> None:
    run = make_run()
    page = client.get(f"/runs/{_id(run)}/checkpoints").text
    assert page.count("not usable") == 2

    ended = _ended(client, client.post(f"/runs/{_id(run)}/checkpoints/verify", data={"name": "step-00000010"}).text)
    assert "damaged" in ended
    assert "exit code 1" in ended


def test_an_export_goes_to_a_new_folder_below_the_roots(client: TestClient, make_run: MakeRun, root: Path) -> None:
    address, name = f"/runs/{_id(make_run())}/checkpoints/export", "step-00000010"

    for given, target in (("../../x", str(root / "export")), (name, "/tmp/outside"), (name, "relative"), (name, str(root))):
        answer = client.post(address, data={"name": given, "target": target})
        assert answer.status_code in (404, 422), (given, target)
        assert 'id="job-' not in answer.text


def test_runs_are_compared(client: TestClient, make_run: MakeRun) -> None:
    one, two = make_run("one"), make_run("two")
    two.launch_file.write_text('{"values": {"seed": 2}}')
    one.launch_file.write_text('{"values": {"seed": 1}}')

    page = client.get("/compare", params={"run": [_id(one), _id(two)]}).text

    assert "<code>seed</code>" in page
    assert page.count("<img ") == 4
    assert client.get("/compare", params={"run": "none"}).status_code == 404
    assert "Choose two runs or more" in client.get("/compare").text


# --- caches ---------------------------------------------------------------------------------------------------------


def test_only_a_cache_that_is_where_it_was_confirmed_is_cleared() -> None:
    cache = {"name": "fsdp-blocks", "title": "blocks of models", "place": "/cache/blocks.json", "entries": 2, "bytes": 100}
    encoded = {
        "name": "latents-a",
        "kind": "latents",
        "place": "/run/cache",
        "entries": 1,
        "bytes": 9,
        "packs": 1,
        "damaged": 0,
    }
    rows = caches_of({"caches": [cache], "encodings": [{**encoded, "unreadable": []}]}, used_by=["first"])

    assert confirmed(rows, "fsdp-blocks", "/cache/blocks.json").bytes == 100
    with pytest.raises(UserError, match="there is no cache"):
        confirmed(rows, "fsdp-blocks", "/elsewhere")
    with pytest.raises(UserError, match="a run may be using it: first"):
        confirmed(rows, "latents-a", "/run/cache")


def test_a_run_of_which_the_folder_is_not_known_is_not_resumed_from_a_checkpoint(client: TestClient, make_run: MakeRun) -> None:
    run = make_run()

    answer = client.post(f"/runs/{_id(run)}/checkpoints/resume", data={"name": "step-00000010"}, follow_redirects=False)

    assert answer.status_code == 422
    assert "relative paths start at another folder" in answer.text
    assert client.post(f"/runs/{_id(run)}/checkpoints/resume", data={"name": "../x"}).status_code == 404
