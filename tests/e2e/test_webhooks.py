"""A fault that another rank than the main one reports: it sends that itself, and every rank stops."""

import json

from smalti_testing.http_receiver import Receiver


def test_a_fault_of_rank_1_reaches_a_receiver_from_there(tmp_path, train):
    with Receiver() as receiver:
        entry = {"webhook_type": "raw", "callback_url": receiver.url, "allow_private": True}
        run = train(
            tmp_path / "run",
            max_train_steps=6,
            train_batch_size=2,
            num_processes=2,
            spoil="report:1:3",
            variables={"PROBE_FAULT": "STOP_SAVED", "SMALTI_WEBHOOK_CONFIG": json.dumps(entry)},
        )
        events = [each.json for each in receiver.requests]
    assert run.code == 5, run.output
    [fault] = [each for each in events if each["type"] == "gpu.fault"]
    assert (fault["source"]["rank"], fault["fault"]["type"], fault["fault"]["gpu"]["ecc_errors_double"]) == (1, "ecc", 1)
    others = [each for each in events if each["type"] != "gpu.fault"]
    assert {each["source"]["rank"] for each in others} == {0}
    assert (others[-1]["type"], others[-1]["stage"]["status"]) == ("lifecycle.stage", "failed")
    assert len({each.id for each in receiver.requests}) == len(events)
