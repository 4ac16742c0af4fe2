"""`smalti detect-blocks` as a user meets it: its table, its JSON, and what it writes into a configuration file."""

import json

import pytest

KEYS = {"model_family", "model_flavour", "pretrained_model", "detected_at", "structure", "cached", "flag"}
CLASS_KEYS = {"class_name", "occurrences", "parameters", "share", "smallest", "largest", "first", "last", "named", "nested"}
STRUCTURE_KEYS = {
    "parameters",
    "buffers",
    "classes",
    "suggested",
    "blocks",
    "largest_block",
    "outside",
    "no_split_modules",
    "modules",
}


@pytest.fixture
def detect(run):
    return lambda *words: run("detect-blocks", *words)


def test_the_table_has_a_line_for_each_class_and_marks_the_suggestion(detect):
    code, out, _ = detect("--model_family=fluxsized")
    lines = {words[0] if words[0] != "*" else words[1]: line for line in out.splitlines() if (words := line.split())}
    assert code == 0
    assert lines["DoubleBlock"].split()[:6] == ["*", "DoubleBlock", "19", "6,456,794,624", "54.3%", "339,831,296"]
    assert lines["Stream"].endswith("inside other blocks")
    assert lines["SingleBlock"].startswith("*")
    assert "--fsdp_transformer_layer_cls_to_wrap=DoubleBlock,SingleBlock" in lines["suggestion"]
    assert "64,124,992 (0.5%), 122.3 MiB in bf16" in lines["throughout"]


def test_the_json_has_its_documented_keys(detect):
    found = json.loads(detect("--model_family=toy", "--json")[1])
    assert (set(found), set(found["structure"]), set(found["structure"]["classes"][0])) == (KEYS, STRUCTURE_KEYS, CLASS_KEYS)
    assert (found["flag"], found["cached"]) == ("--fsdp_transformer_layer_cls_to_wrap=ToyBlock", False)


def test_options_and_files_of_a_run_shape_the_model(detect, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('model_family = "toy"\ntoy_depth = 3\n')
    found = json.loads(detect(str(file), "--toy_width=96", "--json")[1])
    assert (found["structure"]["blocks"], found["structure"]["parameters"]) == (3, 957_168)


def test_the_second_time_says_that_it_was_known_and_refresh_looks_anew(detect):
    words = ["--model_family=toy", "--json"]
    assert [json.loads(detect(*words, *more)[1])["cached"] for more in ([], [], ["--refresh"])] == [False, True, False]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "no model family given\n  fix: --model_family=NAME; known: "),
        (["--model_family=toi"], "Unknown model_family 'toi'.\n  fix: did you mean toy? known: "),
        (["--model_family=toy", "--toy_dept=3"], "unknown option --toy_dept\n    fix: did you mean --toy_depth"),
        (["--model_family=toy", "--toy_width=31"], "toy_width=31 does not fit toy_heads=6"),
    ],
)
def test_what_is_wrong_is_told_with_the_way_out(detect, words, told):
    code, out, errors = detect(*words)
    assert (code, out, told in errors) == (2, "", True), errors


def test_a_model_in_which_nothing_repeats_has_no_suggestion(detect, checkpoint):
    folder = checkpoint(num_layers=0, num_single_layers=1, width=64)
    words = ["--model_family=fluxsized", f"--pretrained_model_name_or_path={folder}"]
    assert "nothing repeats" in detect(*words)[1]
    code, _, errors = detect(*words, "--apply=run.toml")
    assert (code, "nothing to apply" in errors) == (2, True)


def test_a_place_that_cannot_be_written_is_told_and_the_answer_given(detect, cache_home):
    cache_home.write_text("a file where the folder should be")
    code, out, errors = detect("--model_family=toy")
    assert (code, "ToyBlock" in out, "smalti: note: not cached" in errors) == (0, True, True)


def test_clearing_says_how_many_answers_and_bytes_went(run, cache_home):
    run("detect-blocks", "--model_family=toy")
    size = (cache_home / "smalti" / "fsdp-blocks.json").stat().st_size
    cleared = json.loads(run("cache", "clear", "fsdp-blocks", "--json")[1])
    assert (cleared["count"], cleared["bytes"]) == (1, size)
    assert json.loads(run("cache", "ls", "--json")[1])["caches"][0]["entries"] == 0


# --- applying -------------------------------------------------------------------------------------------------------


def test_apply_writes_the_suggestion_and_leaves_the_rest_as_it_is(detect, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('# mine\nmodel_family = "toy"  # small\n\n[launch]\nnum_processes = 2\n')
    code, out, _ = detect(str(file), "--apply", str(file))
    assert code == 0
    assert f'{file}: fsdp_transformer_layer_cls_to_wrap = ["ToyBlock"]' in out
    assert file.read_text() == (
        '# mine\nmodel_family = "toy"  # small\nfsdp_transformer_layer_cls_to_wrap = ["ToyBlock"]\n\n'
        "[launch]\nnum_processes = 2\n"
    )


def test_apply_says_what_was_there_and_does_not_write_what_is_there_already(detect, tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"--model_family": "toy", "--fsdp_transformer_layer_cls_to_wrap": "Old"}')
    words = [str(file), f"--apply={file}", "--json"]
    first = json.loads(detect(*words)[1])["applied"]
    written = file.stat().st_mtime_ns
    second = json.loads(detect(*words)[1])["applied"]
    key = "--fsdp_transformer_layer_cls_to_wrap"
    assert first == {"file": str(file), "key": key, "old": "Old", "new": "ToyBlock", "written": True}
    assert second == {"file": str(file), "key": key, "old": "ToyBlock", "new": "ToyBlock", "written": False}
    assert file.stat().st_mtime_ns == written


def test_apply_takes_the_classes_that_the_command_line_names(detect, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("")
    detect("--model_family=fluxsized", "--fsdp_transformer_layer_cls_to_wrap=Stream,SingleBlock", f"--apply={file}")
    assert file.read_text() == 'fsdp_transformer_layer_cls_to_wrap = ["Stream", "SingleBlock"]\n'


def test_apply_refuses_a_class_that_the_model_does_not_have(detect, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("seed = 1\n")
    code, _, errors = detect("--model_family=toy", "--fsdp_transformer_layer_cls_to_wrap=ToyBlok", f"--apply={file}")
    assert (code, "did you mean ToyBlock?" in errors, file.read_text()) == (2, True, "seed = 1\n")
