import pytest

from smalti_webui.hardware.detection import Detected, class_names, in_bf16

BLOCK = {"smallest": 10, "named": False, "nested": False, "first": "blocks.0", "last": "blocks.3"}
ANSWER = {
    "model_family": "flux",
    "model_flavour": None,
    "pretrained_model": None,
    "detected_at": "2026-11-23T17:28:11+00:00",
    "cached": False,
    "flag": "--fsdp_transformer_layer_cls_to_wrap=Double,Single",
    "structure": {
        "parameters": 1000,
        "buffers": 0,
        "classes": [
            {**BLOCK, "class_name": "Double", "occurrences": 4, "parameters": 600, "share": 0.6, "largest": 150},
            {**BLOCK, "class_name": "Stream", "occurrences": 8, "parameters": 500, "share": 0.5, "largest": 62, "nested": True},
            {**BLOCK, "class_name": "Single", "occurrences": 3, "parameters": 300, "share": 0.3, "largest": 100},
        ],
        "suggested": ["Double", "Single"],
        "blocks": 7,
        "largest_block": 150,
        "outside": 100,
        "no_split_modules": ["Double"],
        "modules": ["Double", "Linear", "Single", "Stream"],
    },
}


@pytest.fixture
def detected():
    return Detected.from_json(ANSWER)


def test_the_suggestion_is_what_the_command_line_suggests(detected):
    chosen = detected.selection(detected.initial(None))
    structure = ANSWER["structure"]
    assert (chosen.flag, chosen.largest, chosen.outside) == (ANSWER["flag"], structure["largest_block"], structure["outside"])


def test_what_is_given_is_selected_first(detected):
    assert detected.initial(["Single"]) == ("Single",)
    assert detected.initial("Single, Double") == ("Single", "Double")


def test_a_class_inside_of_a_selected_one_does_not_count_twice(detected):
    assert detected.selection({"Double", "Single", "Stream"}).outside == 100
    assert detected.selection({"Stream"}).outside == 500


def test_nothing_selected_is_no_flag(detected):
    chosen = detected.selection(())
    assert (chosen.flag, chosen.largest) == ("", 1000)


def test_badges_say_where_a_class_comes_from(detected):
    double, stream, single = detected.structure.classes
    assert detected.badges(double) == ["_no_split_modules", "suggested"]
    assert detected.badges(stream) == ["inside other blocks"]
    assert detected.badges(single) == ["suggested"]


def test_another_answer_is_refused():
    with pytest.raises(ValueError, match="validation error"):
        Detected.from_json({"problems": []})


@pytest.mark.parametrize(
    ("value", "names"), [(None, ()), ("none", ()), ("A,B", ("A", "B")), (["A"], ("A",)), (("A", "B"), ("A", "B"))]
)
def test_class_names_in_all_spellings(value, names):
    assert class_names(value) == names


def test_sizes_in_bf16():
    assert [in_bf16(each) for each in (100, 2**20, 339_831_296, 6_000_000_000)] == [
        "200 B",
        "2.0 MiB",
        "648.2 MiB",
        "11.18 GiB",
    ]
