"""ZeRO keeps the contract of a distribution strategy. What it keeps of it when offloaded, and in bf16: `test_engine.py`."""

from support.forked_ranks import ForkedContract


class TestStage2(ForkedContract):
    imports = ("deepspeed",)
    plugin = "deepspeed"
    flags = ('--deepspeed_config={"zero_optimization": {"stage": 2}}',)


class TestStage3(ForkedContract):
    imports = ("deepspeed",)
    plugin = "deepspeed"
    flags = ('--deepspeed_config={"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}',)
