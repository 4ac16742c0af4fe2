"""What `smalti doctor` says about GPUs."""

from smalti_health.plugin import plugin


def test_each_gpu_is_a_finding_by_the_rules_that_stop_a_run(loaded):
    loaded.set("count 3", "remap_pending.1 1", "recovery.2 2")
    found = [(each.level, each.message.partition(" (")[0]) for each in plugin.diagnose()]
    assert found == [("ok", "GPU 0"), ("warning", "GPU 1"), ("error", "GPU 2")]
    assert all(each.fix for each in plugin.diagnose() if each.level != "ok")


def test_a_machine_without_a_driver_is_a_note(loaded):
    loaded.set("error.Init 9")
    [finding] = plugin.diagnose()
    assert (finding.level, "Driver Not Loaded" in finding.message) == ("note", True)
