"""A run with `--fit`: what it chooses before its ranks start, what a resume keeps, and what is refused."""

import json


def choice(run):
    """The options of the last launch: those that --fit has chosen, and its whole record."""
    values = json.loads((run / "launch.json").read_text())["values"]
    record = json.loads(values["fit_choice"])
    assert {name: values[name] for name in record["options"]} == record["options"]
    return record


def test_the_choice_is_printed_and_kept_until_another_limit_is_given(launch, tmp_path):
    run = tmp_path / "run"
    given = {"train_batch_size": None, "fit": "4GB", "fit_batch": 4}
    first = launch(run, **given, max_train_steps=2)
    assert first.code == 0, first.output
    assert "smalti: note: --fit=4GB has chosen --train_batch_size=" in first.output
    assert "GiB of host memory, " in first.output
    assert "4 samples per step" in first.output
    chosen = choice(run)
    assert chosen["options"]["train_batch_size"] * chosen["options"]["gradient_accumulation_steps"] == 4

    resumed = launch(run, config=run / "config.toml", max_train_steps=3)
    assert resumed.code == 0, resumed.output
    assert choice(run) == chosen
    assert "steps 2 to 3" in resumed.output

    batches = {"train_batch_size": 2, "gradient_accumulation_steps": 2}
    own = launch(run, config=run / "config.toml", max_train_steps=4, dry=True, **batches)
    assert own.code == 0, own.output
    assert "but for " in own.output

    anew = launch(run, config=run / "config.toml", max_train_steps=4, fit="3GB", dry=True)
    assert anew.code == 0, anew.output
    assert "--fit=3GB has chosen " in anew.output
    assert "steps         4, each of 4 samples" in anew.output


def test_several_nodes_do_not_choose_by_what_is_free_on_each(train, tmp_path):
    refused = train(tmp_path / "run", fit="auto", num_machines=2, num_processes=2, main_process_ip="127.0.0.1", dry=True)
    assert refused.code == 2
    assert "fix: --fit=24GB --fit_host=200GB" in refused.output
