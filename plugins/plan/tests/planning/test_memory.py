"""What a rehearsal says of memory is what real ranks hold."""

import pytest

from planning.conftest import COMMON, as_words
from planning.measured import STEP, measured, rehearsed
from support.forked_ranks import forked_processes
from support.whole import some

DDP_OWN = 1024
"""Bytes that DDP keeps for itself, such as which parameters were used."""
RUNS = {
    "released, bf16 weights": (
        1,
        {"mixed_precision": "bf16", "weights_dtype": "bf16", "optimizer": "adafactor", "max_grad_norm": 0},
        ("release_gradients", "gradient_checkpointing"),
    ),
    "recompute": (1, {"mixed_precision": "bf16"}, ("gradient_checkpointing",)),
    "ddp, accumulation, average": (2, {"gradient_accumulation_steps": 2}, ("use_ema",)),
    "zero3": (2, {"deepspeed_config": '{"zero_optimization": {"stage": 3}}'}, ()),
    "fsdp2, accumulation, average, bf16": (
        2,
        {"gradient_accumulation_steps": 2, "mixed_precision": "bf16"},
        ("fsdp_enable", "use_ema"),
    ),
}


@pytest.mark.parametrize("name", some(RUNS, "released, bf16 weights", "zero3", "fsdp2, accumulation, average, bf16"))
def test_bytes_are_those_of_real_ranks(name, tmp_path):
    ranks, options, flags = RUNS[name]
    paths = {"instance_data_dir": tmp_path, "output_dir": tmp_path / "run"}
    words = as_words({**COMMON, **paths, **options, "num_processes": ranks}, (*flags, "use_cpu"))
    with forked_processes(ranks=1, group=False) as process:
        [rehearsal] = process.run(rehearsed, words, ranks=ranks, accumulation=options.get("gradient_accumulation_steps", 1))
    assert rehearsal.error is None
    with forked_processes(ranks=ranks, group=ranks > 1) as processes:
        found = processes.run(measured, words)[0]
    own = DDP_OWN if name.startswith("ddp") else 0
    assert 0 <= found.resident - rehearsal.resident.total <= own
    peak = max(rehearsal.phases[phase].device.total for phase in STEP)
    assert peak == pytest.approx(found.peak, rel=0.01)
    assert not (tmp_path / "run").exists(), "nothing of the run is touched"
