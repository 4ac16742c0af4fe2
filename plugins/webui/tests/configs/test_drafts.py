"""Drafts: nothing that was typed is lost, whatever happens to the page, the server or the file."""

import json
import re
import shutil
from itertools import product

import pytest

from smalti import UserError
from smalti_webui.configs.drafts import DraftStore, StaleDraft, UnknownDraft
from smalti_webui.configs.saving import ChangedMeanwhile, save
from smalti_webui.configs.starting import RECIPES, recipes


@pytest.fixture
def store(tmp_path):
    return DraftStore(tmp_path / "drafts")


@pytest.fixture
def begin(client):
    """begin(recipe="empty") -> the address of a new draft."""

    def make(**source: str) -> str:
        answer = client.post("/configs/new", data=source or {"recipe": "empty"}, follow_redirects=False)
        assert answer.status_code == 303, answer.text
        return answer.headers["location"]

    return make


def state_of(client, address: str) -> dict:
    return client.get(f"{address}/state").json()


def change(client, address: str, version: int, **changes: str | None):
    return client.post(f"{address}/change", data={"version": version, "changes": json.dumps(changes)})


def text_of(client, address: str) -> str:
    return client.get(f"{address}/export").text


def test_a_draft_is_on_the_disk_with_each_change(store):
    draft = store.new("seed = 1\n", name="a")
    store.write(draft.id, 1, "seed = 2\n", "seed")
    again = DraftStore(store.folder).get(draft.id)
    assert (again.text, again.version, [each.text for each in again.revisions]) == ("seed = 2\n", 2, ["seed = 1\n"])
    assert again.file.read_text() == "seed = 2\n"


def test_a_change_of_an_older_version_changes_nothing(store):
    draft = store.new("", name="a")
    store.write(draft.id, 1, "seed = 2\n", "seed")
    with pytest.raises(StaleDraft) as caught:
        store.write(draft.id, 1, "seed = 3\n", "seed")
    assert (caught.value.current.version, store.get(draft.id).text) == (2, "seed = 2\n")


def test_an_earlier_text_comes_back_as_a_new_version(store):
    draft = store.new("seed = 1\n", name="a")
    store.write(draft.id, 1, "seed = 2\n", "seed")
    assert store.restore(draft.id, 2, 1).text == "seed = 1\n"
    assert [each.text for each in store.get(draft.id).revisions] == ["seed = 1\n", "seed = 2\n"]


def test_a_discarded_draft_is_kept_aside(store):
    draft = store.new("seed = 1\n", name="a")
    assert (store.discard(draft.id) / "config.toml").read_text() == "seed = 1\n"
    assert store.list() == []


@pytest.mark.parametrize("id", ["", "..", "../../etc", "0123456789ab", "0123456789AB", "a" * 300, "a\0b"])
def test_an_unknown_id_names_no_file(store, id):
    with pytest.raises(UnknownDraft):
        store.get(id)


def test_a_damaged_draft_is_left_out_of_the_list_and_left_alone(store):
    kept = store.new("", name="a")
    (store.folder / "0123456789ab").mkdir()
    (store.folder / "0123456789ab" / "draft.json").write_text("{")
    assert [each.id for each in store.list()] == [kept.id]


def test_a_field_is_stored_with_the_words_of_the_command_line_at_it(client, begin):
    address = begin()
    answer = change(client, address, 1, learning_rate="abc", ema_decay="0.9").json()
    problem = answer["problems"][0]
    assert (problem["option"], problem["fix"]) == ("learning_rate", "give a number >= 0")
    assert problem["message"].startswith("learning_rate cannot be 'abc': input should be a valid number")
    assert 'learning_rate = "abc"' in text_of(client, address)
    assert answer["idle"]["ema_decay"] == "use_ema"
    answer = change(client, address, 2, learning_rate="1e-3").json()
    assert (answer["problems"], answer["version"]) == ([], 3)
    assert {"option": "ema_decay", "text": "ema_decay has no effect unless use_ema"} in answer["notices"]
    assert {"option": "learning_rate", "text": "0.001", "default": "0.0001"} in answer["differences"]


def test_a_second_tab_is_told_and_overwrites_nothing(client, begin):
    address = begin()
    change(client, address, 1, seed="1")
    for place, fields in (
        ("change", {"changes": '{"seed": "2"}'}),
        ("toml", {"text": "seed = 2"}),
        ("flags", {"text": "--seed=2"}),
    ):
        answer = client.post(f"{address}/{place}", data={"version": 1, **fields})
        assert (answer.status_code, answer.json()) == (409, {"version": 2, "stale": True})
    assert "seed = 1" in text_of(client, address)


def test_a_table_that_is_not_toml_yet_is_kept_as_it_is(client, begin):
    address = begin()
    answer = change(client, address, 1, datasets="[[datasets]\nid =").json()
    assert "datasets is not valid TOML" in answer["problems"][0]["message"]
    assert "[[datasets]\nid =" in client.get(address).text
    answer = change(client, address, 2, datasets="[[datasets]]\nid = 'a' # mine\n").json()
    assert "[[datasets]]\nid = 'a' # mine" in text_of(client, address)


def test_a_text_that_is_not_toml_is_kept_and_the_place_is_named(client, begin):
    address = begin()
    answer = client.post(f"{address}/toml", data={"version": 1, "text": "seed = \n"}).json()
    assert "is not valid TOML" in answer["broken"]
    assert "line 1" in answer["broken"]
    assert text_of(client, address) == "seed = \n"
    assert [client.get(f"{address}?view={view}").status_code for view in ("form", "toml", "flags")] == [200] * 3
    assert change(client, address, 2, seed="1").status_code == 422
    assert text_of(client, address) == "seed = \n"


def test_flags_change_only_what_they_say_and_comments_stay(client, begin):
    address = begin()
    client.post(
        f"{address}/toml", data={"version": 1, "text": "# mine\nseed = 1 # why\nuse_ema = true\nlearning_rate = 1e-3\n"}
    )
    shown = client.get(f"{address}?view=flags").text
    assert "smalti train \\\n    --seed=1 \\\n    --use_ema=true \\\n    --learning_rate=0.001" in shown
    answer = client.post(f"{address}/flags", data={"version": 2, "text": "smalti train --sede=1 --seed=2"}).json()
    assert answer["problems"][0]["message"] == "unknown option --sede"
    assert "smalti train --sede=1 --seed=2" in client.get(f"{address}?view=flags").text
    assert "seed = 1 # why" in text_of(client, address)
    client.post(f"{address}/flags", data={"version": 3, "text": "smalti train --seed 2 --learning-rate=1e-3"})
    assert text_of(client, address) == "# mine\nseed = 2 # why\nlearning_rate = 1e-3\n"


def test_saving_shows_the_difference_and_keeps_the_comments(client, begin, root):
    (root / "mine.toml").write_text("# mine\nseed = 1  # why\nmodel_family = 'toy'\n")
    (root / "mine.toml").chmod(0o640)
    assert "mine.toml" in client.get("/configs").text
    address = begin(file=str(root / "mine.toml"))
    change(client, address, 1, seed="2")
    page = client.get(f"{address}/save").text
    assert "seed = 1  # why" in page
    assert "seed = 2  # why" in page
    seen = re.search(r'name="seen" value="(\w*)"', page).group(1)
    fields = {"version": 2, "path": str(root / "mine.toml"), "seen": seen}
    assert client.post(f"{address}/save", data=fields, follow_redirects=False).status_code == 303
    assert (root / "mine.toml").read_text() == "# mine\nseed = 2  # why\nmodel_family = 'toy'\n"
    assert (root / "mine.toml").stat().st_mode & 0o777 == 0o640
    assert state_of(client, address)["saved"] is True


def test_a_file_that_changed_meanwhile_is_not_overwritten(client, begin, root):
    (root / "mine.toml").write_text("seed = 1\n")
    address = begin(file="mine.toml")
    change(client, address, 1, seed="2")
    seen = re.search(r'name="seen" value="(\w*)"', client.get(f"{address}/save").text).group(1)
    (root / "mine.toml").write_text("seed = 7\n")
    answer = client.post(f"{address}/save", data={"version": 2, "path": str(root / "mine.toml"), "seen": seen})
    assert "changed by something else" in answer.text
    assert "seed = 7" in answer.text
    assert (root / "mine.toml").read_text() == "seed = 7\n"
    client.post(f"{address}/reread", data={"version": 2})
    assert text_of(client, address) == "seed = 7\n"


def test_a_new_file_replaces_none_that_appeared_meanwhile(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("seed = 7\n")
    with pytest.raises(ChangedMeanwhile):
        save(path, "seed = 1\n", "")
    assert path.read_text() == "seed = 7\n"


@pytest.mark.parametrize("path", ["/etc/a.toml", "../a.toml", "a.json", "missing/a.toml", "run/config.toml", "link/a.toml"])
def test_only_a_toml_file_below_the_roots_is_saved(client, begin, root, make_run, tmp_path, path):
    make_run("run")
    (tmp_path / "outside").mkdir()
    (root / "link").symlink_to(tmp_path / "outside")
    address = begin()
    before = sorted(str(each) for each in tmp_path.rglob("*.toml"))
    answer = client.post(f"{address}/save", data={"version": 1, "path": path, "seen": ""}, follow_redirects=False)
    assert answer.status_code in (403, 422)
    assert sorted(str(each) for each in tmp_path.rglob("*.toml")) == before


def test_the_configuration_of_a_run_gets_a_directory_of_its_own(client, begin, make_run):
    run = make_run("first")
    address = begin(run=run.record().id)
    assert f'output_dir = "{run.path}-2"' in text_of(client, address)
    assert "Duplicate the run first" in client.get(f"/configs?copy={run.record().id}").text
    assert client.post("/configs/new", data={"run": "nobody"}).status_code == 404


OTHERS = {
    "config.json": ('{"--model_type": "lora", "--model_family": "sdxl", "--learning_rate": "4e-5"}', "learning_rate = 4e-05"),
    "train.toml": (
        'pretrained_model_name_or_path = "a/b"\nnetwork_module = "networks.lora"\nnetwork_dim = 8\n',
        "lora_rank = 8",
    ),
    "own.yaml": ("seed: 3\nmodel_family: toy\n", "seed = 3"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_files_of_other_trainers_and_formats_become_drafts(client, name):
    content, line = OTHERS[name]
    answer = client.post(
        "/configs/import", files={"files": (name, content)}, data={"model_family": "sdxl"}, follow_redirects=False
    )
    assert answer.status_code == 303, answer.text
    assert line in text_of(client, answer.headers["location"].partition("?")[0])


@pytest.mark.parametrize(
    ("name", "content"), [("a.toml", "x = ["), ("a.json", "[1]"), ("..", "seed = 1"), ("a.toml", "b = 1\n")]
)
def test_a_file_that_is_no_configuration_is_refused_with_the_reason(client, name, content):
    answer = client.post("/configs/import", files={"files": (name, content)})
    assert answer.status_code == 422
    assert "fix" in answer.text


def test_a_secret_is_on_no_page_but_the_text_of_the_file(client, begin, root):
    (root / "a.toml").write_text(
        'seed = 1\nwebhook_config = \'[{"webhook_url": "https://x.invalid/", "auth_token": "s3cr3t-token"}]\'\n'
    )
    address = begin(file="a.toml")
    change(client, address, 1, seed="2")
    pages = [client.get(f"{address}{end}").text for end in ("", "?view=flags", "/save", "/state", "/command")]
    assert not [page for page in pages if "s3cr3t" in page]
    assert "A secret is given, which is not shown." in pages[0]
    assert "s3cr3t" in text_of(client, address)


def test_a_plugin_that_a_draft_disables_takes_its_options_along(client, begin):
    address = begin()
    answer = client.post(f"{address}/toml", data={"version": 1, "text": "without = ['fsdp2']\nfsdp_enable = true\n"}).json()
    assert [each["message"] for each in answer["problems"]] == ["fsdp_enable belongs to smalti-fsdp2"]
    assert 'data-name="fsdp_enable"' not in client.get(address).text


def test_families_and_optimizers_of_plugins_are_suggested(client, begin):
    address = begin()
    page = client.get(address).text
    assert '<option value="toy">a small transformer on pixels</option>' in page
    assert '<option value="adamw">' in page
    client.post(f"{address}/toml", data={"version": 1, "text": "without = ['toy']\n"})
    assert '<option value="toy">' not in client.get(address).text


def test_recipes_are_the_examples_and_are_accepted(client, begin, root):
    examples = sorted((RECIPES.parents[5] / "examples").glob("*.toml"))
    assert examples
    for path in examples:
        assert (RECIPES / path.name).read_text() == path.read_text(), f"cp {path} {RECIPES}"
    for recipe in recipes():
        assert state_of(client, begin(recipe=recipe.id))["problems"] == []


def test_markup_in_names_and_values_is_text(client, begin, root):
    (root / "<b>x.toml").write_text("model_family = 'toy'\noutput_dir = '</textarea><script>alert(1)</script>'\n")
    address = begin(file=str(root / "<b>x.toml"))
    for page in (
        client.get("/configs"),
        client.get(address),
        client.get(f"{address}?view=toml"),
        client.get(f"{address}/save"),
    ):
        assert "<script>alert" not in page.text
        assert "<b>x" not in page.text


def test_the_check_has_the_problems_of_the_command(client, begin, root):
    address = begin()
    text = f"model_family = 'toy'\nuse_cpu = true\noutput_dir = '{root}/run'\nmax_train_steps = 3\n"
    text += f"instance_data_dir = '{root}/none'\n"
    client.post(f"{address}/toml", data={"version": 1, "text": text})
    answer = client.post(f"{address}/check").json()
    assert [each["message"] for each in answer["problems"]] == [f"{root}/none is not a folder"]
    assert answer["checked"] == {"unchecked": "", "failed": ""}
    assert state_of(client, address)["problems"] == answer["problems"]
    shutil.rmtree(root / "run", ignore_errors=True)
    assert change(client, address, 2, seed="3").json()["checked"] is None


NO_PATHS = ["/etc/passwd", "../../etc/passwd", "~nobody-here/a.toml", "a\0b", "/", ".", "x" * 3000, " "]


def test_no_other_file_is_read_and_no_path_is_a_defect(client, begin):
    draft = begin().removeprefix("/configs/")
    for path, address in product(NO_PATHS, ("new", "import", f"{draft}/save")):
        fields = {"version": 1, "file": path, "path": path}
        answer = client.post(f"/configs/{address}", data=fields, files={"files": ("", b"")} if address == "import" else None)
        assert answer.status_code in (200, 403, 404, 422)
        assert "root:" not in answer.text


TEXTS = ["a = " + "[" * 20_000, f"[a{'.a' * 20_000}]", "a = '\ud800'", "\0", "a\rb = 1", '"" = 1', "'--' = 2\n"]


def test_whatever_a_text_says_it_is_kept_and_shown(client, begin):
    for text in TEXTS:
        address = begin()
        body = text.encode("utf-8", "surrogatepass")
        answer = client.post(f"{address}/toml", data={"version": 1, "text": body})
        assert answer.status_code in (200, 422), text[:20]
        for view in ("?view=form", "?view=toml", "?view=flags", "/save", "/export"):
            assert client.get(f"{address}{view}").status_code == 200, text[:20]


def test_a_file_that_is_opened_again_after_a_change_is_read_again(client, begin, root):
    (root / "mine.toml").write_text("seed = 1\n")
    address = begin(file="mine.toml")
    assert begin(file="mine.toml") == address
    (root / "mine.toml").write_text("seed = 2\n")
    assert (begin(file="mine.toml"), text_of(client, address)) == (address, "seed = 2\n")
    change(client, address, 2, seed="3")
    (root / "mine.toml").write_text("seed = 4\n")
    begin(file="mine.toml")
    assert text_of(client, address) == "seed = 3\n"


def test_what_no_option_accepts_is_an_answer_and_no_defect(client, begin):
    address = begin()
    for changes in ("[]", "{", '{"nothing": "1"}', '{"seed": 1}', "[" * 10_000):
        assert client.post(f"{address}/change", data={"version": 1, "changes": changes}).status_code == 422
    assert client.get("/configs/0123456789ab").status_code == 404
    with pytest.raises(UserError):
        save(client.app.state.settings.data / "a.json", "", "")
