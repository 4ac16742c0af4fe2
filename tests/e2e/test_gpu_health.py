"""A GPU of rank 1 fails, as its driver says: the monitor of the node sees it, and every rank stops.

The ranks train on the CPU. The driver is a library of smalti_testing; the bindings, the monitor and what follows are real.
"""

import json

import pytest

from smalti.checkpoint import SUSPECT, CheckpointStore, verify
from smalti_health import read_circuits
from smalti_testing.http_receiver import Receiver
from smalti_testing.nvml import FakeNvml
from support.whole import some

READINGS = [("ecc_uncorrected_volatile.1 1", "ecc", (SUSPECT,)), ("recovery.1 3", "recovery_action", ())]


@pytest.mark.parametrize(("reads", "kind", "flags"), some(READINGS, READINGS[0]))
def test_every_rank_stops_at_the_same_step_and_the_state_is_saved(tmp_path, train, reads, kind, flags):
    driver = FakeNvml(tmp_path)
    driver.set("count 2")
    with Receiver() as receiver:
        entry = {"webhook_type": "raw", "webhook_url": receiver.url, "allow_private": True, "log_level": "error"}
        run = train(
            tmp_path / "run",
            max_train_steps=100_000,
            train_batch_size=2,
            num_processes=2,
            gpu_health_interval=0.5,
            spoil="gpu:1:3",
            variables={
                **driver.environment,
                "PROBE_GPUS": f"count 2\n{reads}\n",
                "SMALTI_WEBHOOK_CONFIG": json.dumps(entry),
            },
        )
        faults = [each.json for each in receiver.requests if each.json["type"] == "gpu.fault"]
    assert run.code == 5, run.output
    [fault] = run.calls("on_gpu_fault")
    assert (fault["rank"], fault["kind"]) == (1, kind)
    ended = {call["step"] for call in run.calls("on_train_end")}
    assert (ended, len(run.calls("on_train_end"))) == ({fault["step"]}, 2)
    newest = CheckpointStore(run.directory / "checkpoints").all()[-1]
    assert ({newest.step}, newest.manifest.flags, verify(newest.path).problems) == (ended, flags, ())
    assert [(each.state, [one.kind for one in each.faults]) for each in read_circuits(run.directory).values()] == [
        ("open", [kind])
    ]
    [sent] = faults
    assert (sent["source"]["rank"], sent["fault"]["type"], sent["fault"]["gpu"]["index"]) == (1, kind, 1)
    assert f'"fault": "{kind}"' in next(line for line in run.output.splitlines() if line.startswith("smalti: fault "))
