"""What the pages of runs show: the same as the command line, escaped, also for runs that are not whole."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from smalti.rundir import EventWriter, RunDirectory
from smalti.system import Process
from smalti_webui.launch.launches import Launch, Store
from smalti_webui.runs.actions import resume_problem
from smalti_webui.runs.index import FoundRun
from smalti_webui.runs.log import Filter, last_lines

TABS = ("", "/metrics", "/log", "/config", "/head", "/overview", "/log/lines", "/series", "/metrics.csv")


def id_of(run: RunDirectory) -> str:
    record = run.record()
    assert record is not None
    return record.id


def test_the_table_has_a_row_for_each_run_and_finds_by_name(make_run: Any, client: TestClient) -> None:
    assert "There are no runs here yet" in client.get("/runs").text
    make_run("alpha", steps=20)
    make_run("beta", steps=7, max_steps=100, condition="failed", message="it broke")
    client.app.state.runs._looked = -10.0  # type: ignore[attr-defined]
    rows = client.get("/runs").text
    for text in ("alpha", "20/20", "finished", "beta", "7/100", "failed", "it broke"):
        assert text in rows
    assert "alpha" not in client.get("/runs/rows", params={"search": "BET"}).text
    assert "alpha" not in client.get("/runs/rows", params={"shown": "alive"}).text


def test_pages_of_runs_that_are_not_whole(make_run: Any, client: TestClient) -> None:
    """A launch that has written nothing yet, one whose files are damaged, one with markup in everything that it says."""
    young, damaged = make_run("young", steps=0, condition="running"), make_run("damaged")
    damaged.launch_file.write_text('{"values": ')
    damaged.events_file.write_bytes(b'\xff\xfe{"type":"step"}\n' + damaged.events_file.read_bytes()[:-20])
    odd = make_run("odd <script>alert(1)</script>", message="<img src=x onerror=alert(1)>", condition="failed")
    for run in (young, damaged, odd):
        for tab in TABS:
            answer = client.get(f"/runs/{id_of(run)}{tab}")
            assert answer.status_code == 200, (run.path, tab)
            assert "<script>alert" not in answer.text
            assert "<img src=x" not in answer.text or answer.headers["content-type"].startswith("application/json")
    make_run.writers["young"].close()


def test_a_page_of_an_unknown_run_says_so(client: TestClient) -> None:
    for tab in TABS:
        assert client.get(f"/runs/nothing{tab}").status_code == 404


def test_the_csv_has_every_step(make_run: Any, client: TestClient) -> None:
    run = make_run("run", steps=20)
    rows = list(csv.DictReader(client.get(f"/runs/{id_of(run)}/metrics.csv").text.splitlines()))
    losses = {int(row["step"]): float(row["mean"]) for row in rows if row["metric"] == "loss"}
    assert losses == {step: float(f"{1 / step:.7g}") for step in range(1, 21)}


def test_the_log_filters_by_level_node_rank_and_text(make_run: Any) -> None:
    run = make_run("run", steps=5, condition="running")
    writer = make_run.writers["run"]
    writer.events.append("warning", step=3, message="slow disk", rank=2)
    writer.events.append("error", step=4, error="ValueError", message="it broke", traceback="Traceback: line 7")
    writer.close()
    other = EventWriter(run.node_events_file(1))
    other.append("health", step=3, message="hot", rank=8)
    other.close()

    def shown(**wanted: str) -> list[str]:
        return [
            line.text for line in last_lines(run, Filter(**wanted))[0] if line.kind in ("warning", "error", "health", "step")
        ]

    assert shown() == ["slow disk", "ValueError: it broke", "hot"]
    assert shown(level="error") == ["ValueError: it broke"]
    assert shown(node="1") == ["hot"]
    assert shown(rank="2") == ["slow disk"]
    assert shown(text="LINE 7") == ["ValueError: it broke"]
    assert len(shown(level="steps")) == 8
    lines, more = last_lines(run, Filter(level="steps"), count=2)
    assert ([line.text for line in lines], more) == (["ValueError: it broke", "hot"], True)


def test_the_configuration_names_sources_and_differences(make_run: Any, client: TestClient) -> None:
    runs = []
    for name, width in (("one", 32), ("two", 64)):
        run = make_run(name)
        run.config_file.write_text(
            f"toy_width = {width} # flag (--toy_width)\nseed = 1 # file <b>\n[defaults]\nseed = 2 # no\n"
        )
        run.launch_file.write_text(json.dumps({"values": {"toy_width": width, "seed": 1, "depth": None}}))
        runs.append(run)
    page = client.get(f"/runs/{id_of(runs[0])}/config").text
    assert "flag (--toy_width)" in page
    assert "file &lt;b&gt;" in page
    compared = client.get(f"/runs/{id_of(runs[0])}/config", params={"other": id_of(runs[1])}).text
    assert "1 of 3 options differ" in compared


def test_runs_that_the_page_cannot_resume_say_why(make_run: Any, root: Any) -> None:
    run = make_run("one")
    found = FoundRun(id="x", name="one", begun=0.0, directory=run)

    def problem(**values: object) -> str:
        run.launch_file.write_text(json.dumps({"values": values}))
        return resume_problem(found)

    assert problem(output_dir=str(run.path)) == ""
    assert problem(output_dir="one") == ""
    assert problem(output_dir="elsewhere/one") == "" if root.name == "elsewhere" else problem(output_dir="elsewhere/one")
    assert "2 nodes" in problem(output_dir="one", num_machines=2)
    assert "another folder" in problem(output_dir="../one")
    assert "another folder" in problem()
    run.config_file.unlink()
    assert "no config.toml" in problem(output_dir="one")


def test_the_output_of_a_launch_by_the_page_is_shown(make_run: Any, client: TestClient, settings: Any, root: Any) -> None:
    run = make_run("run")
    address = f"/runs/{id_of(run)}/log"
    assert client.get(f"{address}/console").status_code == 404
    assert "Console output" not in client.get(address).text
    store = Store(settings)
    for output_dir, text in ((run.path, "step 7 <b>"), (root / "other", "of another run")):
        request = store.new(name="run", text="", folder=root, output_dir=output_dir, gpus=0)
        store.write(Launch(request=request, process=Process.current(), started=0.0))
        store.log(request.id).write_text(text)
    assert client.get(f"{address}/console").text == "step 7 <b>"
    assert "Console output" in client.get(address).text


ODD_EVENTS = (
    *({"type": kind} for kind in ("control_ack", "memory", "health", "error", "warning", "sample", "checkpoint", "eval")),
    *({"type": kind, "message": "\ud800", "error": "\udcff"} for kind in ("error", "warning", "health", "control_ack")),
    *({"type": kind, "message": ["a"], "fault": {}, "device": 7, "uuid": []} for kind in ("health", "memory", "error")),
    {"type": "control_ack", "kind": None, "accepted": "yes", "message": 3},
    {"type": "memory", "measured": "x", "least": None, "most": [], "device": "\ud800"},
    {"type": "phase", "phase": "\ud800", "done": "x", "total": "y"},
    {"type": "state", "state": "running", "family": "\ud800", "parameters": [], "effective_batch": {}},
    {"type": "sample", "images": [{"path": "samples/1/\udcff.png", "prompt": "\ud800"}, {"path": "/etc/x.png"}, 3]},
    {"type": "warning", "message": "late", "t": 1e300},
)


def test_events_with_missing_or_odd_fields_break_no_page(make_run: Any, client: TestClient) -> None:
    for number, event in enumerate(ODD_EVENTS):
        run = make_run(f"odd-{number}", condition="running")
        with run.events_file.open("a") as file:
            file.write(json.dumps({"t": 1e9, "step": 3, **event}) + "\n")
    broken = [address for address in ("/runs", "/datasets") if client.get(address).status_code != 200]
    for number, event in enumerate(ODD_EVENTS):
        run = RunDirectory(client.app.state.settings.roots[0] / f"odd-{number}")  # type: ignore[attr-defined]
        for tab in (*TABS, "/newest", "/samples", "/checkpoints", "/errors"):
            status = client.get(f"/runs/{id_of(run)}{tab}").status_code
            broken += [] if status == 200 else [(tab, event, status)]
    assert broken == []


def test_the_overview_begins_with_the_curve_of_the_loss_and_the_newest_images(make_run: Any, client: TestClient) -> None:
    run = id_of(make_run("alpha"))
    text = client.get(f"/runs/{run}").text
    order = ('data-only="loss"', "Newest samples", "step 20", "00000020/0.png", "Now</h2>", "Phases</h2>", "Time, all attempts")
    places = [text.index(each) for each in order]
    assert places == sorted(places)
    assert "00000010/0.png" not in text
    assert "a cat &lt;b&gt;bold" in text
    bare = client.get(f"/runs/{id_of(make_run('beta', steps=0, samples=()))}").text
    assert "The curve of the loss begins with the first step." in bare
    assert "Newest samples" not in bare


def test_runs_that_cannot_be_read_hide_no_other_run(make_run: Any, client: TestClient, root: Path) -> None:
    for name in ("deep", "early", "good", "pipe", "pipe_beat", "pipe_events"):
        make_run(name, steps=1, samples=(), checkpoints=())
    identity = id_of(RunDirectory(root / "pipe_events"))
    (root / "deep/run.json").write_text("[" * 100_000)
    early = root / "early/run.json"
    early.write_text(json.dumps({**json.loads(early.read_text()), "started": -1e308}))
    for name in ("pipe/run.json", "pipe_beat/heartbeat", "pipe_events/events.jsonl"):
        (root / name).unlink(missing_ok=True)
        os.mkfifo(root / name)

    for address in ("/runs", "/datasets", "/maintenance", "/configs"):
        assert client.get(address).status_code == 200, address
    for tab in TABS:
        assert client.get(f"/runs/{identity}{tab}").status_code in (200, 404), tab
    page = client.get("/runs").text
    assert "good" in page
    assert "deep" not in page
    assert "early" not in page
