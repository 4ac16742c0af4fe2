import pytest

from smalti_webui.hardware.planner import WIDTH, device_names, view_of

GIB = 2**30
PARTS = {"parameters": 10 * GIB, "gradients": 0, "optimizer": 20 * GIB, "activations": 30 * GIB, "host": 5 * GIB}


def choice(strategy, fit="fits", most=70, **more):
    return {
        "strategy": strategy,
        "title": strategy.upper(),
        "recompute": "none",
        "micro_batch": 2,
        "accumulation": 3,
        "counted_by": "formula",
        "error": None,
        "fit": fit,
        "bytes": {"least": 60 * GIB, "most": most * GIB, "device": 80 * GIB},
        "phases": {"forward": {"parameters": GIB}, "backward": PARTS},
        "peak_phase": "backward",
        "host_bytes_per_node": 8 * GIB,
        "seconds_per_step": {"least": 0.5, "most": 1.25},
        "limited_by": "computing",
        "samples_per_second": 12.345,
        "options": {"num_processes": 8},
        "flags": "--num_processes=8",
        **more,
    }


def plan(*choices, own=None):
    return {
        "device": {"name": "h100-80g", "title": "NVIDIA H100", "memory": 80 * GIB},
        "allowances": [
            {"name": "context", "least": 0.3 * GIB, "most": 0.7 * GIB, "source": "nvidia-smi", "share": False},
            {"name": "fragmentation", "least": 0.0, "most": 0.08, "source": "estimate", "share": True},
        ],
        "configured": own,
        "ranks": {"8": list(choices)},
        "notices": ["counted"],
    }


def test_a_row_has_what_the_command_line_prints():
    own = choice("fsdp2")
    view = view_of(plan(choice("ddp"), own, own=own))
    (size,) = view.sizes
    first, second = size.rows
    assert (first.title, first.batch, first.memory, first.seconds) == ("DDP", "2x3", "60.0-70.0", "0.5-1.2")
    assert (first.configured, second.configured) == (False, True)
    assert view.allowances == (
        "context 0.3 to 0.7 GiB (nvidia-smi)",
        "fragmentation 0 to 8 % (estimate)",
    )


def test_the_parts_of_a_bar_are_those_of_the_device_at_the_peak_and_follow_each_other():
    row = view_of(plan(choice("ddp"))).sizes[0].rows[0]
    assert [(part.name, part.gib) for part in row.parts] == [
        ("parameters", "10.00"),
        ("optimizer", "20.00"),
        ("activations", "30.00"),
    ]
    ends = [part.x + part.width for part in row.parts]
    assert [part.x for part in row.parts][1:] == pytest.approx(ends[:-1], abs=0.2)
    assert row.limit / WIDTH == pytest.approx(1 / 1.02, abs=0.001)
    assert ends[-1] == pytest.approx(row.limit * 60 / 80, abs=0.5)
    assert (row.gib_of("optimizer"), row.gib_of("ema")) == ("20.00", "0.00")


def test_a_bar_that_does_not_fit_is_truncated():
    row = view_of(plan(choice("ddp", "does not fit", most=900))).sizes[0].rows[0]
    assert row.most == WIDTH


def test_the_short_list_has_each_strategy_the_configured_one_and_what_would_fail():
    error = {"phase": "load", "message": "no", "where": "x"}
    choices = [choice("ddp", micro_batch=number) for number in range(1, 12)]
    slow = choice("zero", "does not fit")
    own = choice("ddp", "tight", micro_batch=99)
    size = view_of(plan(*choices, slow, own, choice("ddp", error=error), own=own)).sizes[0]
    assert len(size.best) == 8
    assert [row.level for row in size.best[-3:]] == ["does not fit", "tight", "fails"]
    assert size.best[-1].error == "would fail in the load: no"


def test_all_devices_of_the_table_can_be_chosen():
    names = device_names()
    assert {"detected", "cpu", "h100-80g"} <= names.keys()


def test_another_answer_is_refused():
    with pytest.raises(KeyError):
        view_of({"problems": []})
