"""A run on an accelerator that is no CUDA device: everything that the model is given is there too."""

from accelerators.private import KIND


def test_a_run_builds_trains_saves_samples_and_resumes_there(rehearsed):
    device = f"{KIND}:0"
    seen = rehearsed("use_ema", rank=0, ranks=1, mixed_precision="no", module="accelerators.private")
    assert seen.parameters == seen.averages == {device}
    assert {place for _, place in seen.state} <= {device, "cpu"}  # the count, where no kernel reads it
    assert seen.resumed_state == seen.state
    assert seen.staged > 0
