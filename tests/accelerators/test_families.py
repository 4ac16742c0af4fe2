"""Families of diffusers on CUDA devices that are not there: a U-Net; a transformer as an adapter, and with shared tokens."""

import pytest

from accelerators.bare import beside_bare_loop
from accelerators.conftest import COMMON, PIPELINE_MODULES, as_words
from accelerators.orderly import Orderly
from support.forked_ranks import forked_processes
from support.whole import some

OTHERS = (
    *("sd3", "flux2", "pixart", "sana", "auraflow", "lumina2", "qwen_image", "z_image", "chroma", "ernie", "anima"),
    *("bria", "cosmos", "krea2", "ideogram", "longcat_image", "ovis_image", "qwen_image21"),
)
RUNS = {
    "sdxl": {"family": "sdxl", "flags": ["fsdp_enable", "use_ema"]},
    "flux adapter": {"family": "flux", "flags": ["fsdp_enable"], "model_type": "lora", "lora_rank": 4},
    "flux context": {"family": "flux", "context_parallel_size": 2, "context_parallel_comm_strategy": "alltoall"},
    **{name: {"family": name, "rank": 0, "ranks": 1, "samples": False} for name in OTHERS},
}


every_run = pytest.mark.parametrize("seen", some(RUNS, "sdxl", "flux context", "qwen_image"), indirect=True)
"""A U-Net and transformers; sharded, sequences in parallel, a mask of captions on one device; adapters: `test_streamed.py`."""


@every_run
def test_everything_is_on_the_device_of_the_rank(seen):
    [device] = seen.parameters
    assert device.startswith("cuda:")
    assert seen.averages <= {device}
    assert seen.state == seen.resumed_state == {("exp_avg", device), ("exp_avg_sq", device), ("step", device)}


@every_run
class TestOrder(Orderly):
    """SDXL lists its blocks in another order than they compute."""


def test_blocks_in_bf16_touch_less_memory(rehearsed):
    """By what autocast casts to fp32 and back."""
    both = [
        rehearsed("fsdp_enable", *more, saves=False, samples=False).phases["third step"] for more in ((), ("fsdp_bf16_blocks",))
    ]
    assert both[1].touched < 0.95 * both[0].touched
    assert both[1].kernels < both[0].kernels


@pytest.mark.parametrize("family", some(("flux", "sdxl"), "flux"))
def test_blocks_in_bf16_touch_hardly_more_memory_than_a_loop_by_hand_in_bf16(pipeline, images, tmp_path, family):
    """Nor does anything else of a step. Nor are weights gathered more often, whatever the order in which blocks are listed."""
    own = {"instance_data_dir": images, "output_dir": tmp_path / "run", "num_processes": 8}
    words = as_words(COMMON | own | pipeline(family, resolution=128), ("fsdp_enable", "fsdp_bf16_blocks"))
    with forked_processes(ranks=1, group=False, module="accelerators", imports=[PIPELINE_MODULES[family]]) as process:
        seen = process.run(beside_bare_loop, words)[0]
    assert 0.97 < seen["smalti"].touched / seen["bare"].touched < 1.03
    assert seen["smalti"].gathers == seen["bare"].gathers > 0


@every_run
def test_the_host_does_not_wait_for_the_device_in_a_step(seen):
    """Not for the length of a caption either."""
    assert seen.waits("third step") == {}
