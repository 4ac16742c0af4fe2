"""ZeRO keeps the contract of a distribution strategy. What it keeps of it when offloaded, and in bf16: `test_engine.py`."""

from smalti_testing.pytest import ParallelContract


class TestStage2(ParallelContract):
    plugin = "deepspeed"
    flags = ('--deepspeed_config={"zero_optimization": {"stage": 2}}',)


class TestStage3(ParallelContract):
    plugin = "deepspeed"
    flags = ('--deepspeed_config={"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}',)
