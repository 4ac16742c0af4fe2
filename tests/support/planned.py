"""A made-up model of sixteen blocks, a run and strategies, for tests of the planner."""

from dataclasses import replace

from smalti import Communication, FrozenStorage, Strategy
from smalti.parallel import device_models
from smalti_plan.facts import BlockFacts, ModelFacts, SampleFacts
from smalti_plan.formulas.run_facts import RunFacts

H100 = device_models()["h100-80g"]
BLOCK = BlockFacts(path="", parameters=2**28, trained=2**28, saved=2**29, inputs=2**24, copied=2**29, products=2**27)
MODEL = ModelFacts(
    family="made up",
    parameters=2**32 + 2**20,
    trained=2**32 + 2**20,
    frozen=FrozenStorage(bytes=0),
    buffers=0,
    largest=2**24,
    outside=2**20,
    outside_trained=2**20,
    sample=SampleFacts(
        width=1024,
        height=1024,
        flops=10**13,
        saved=2**22,
        copied=2**21,
        operations=1000,
        blocks=tuple(replace(BLOCK, path=f"blocks.{number}") for number in range(16)),
    ),
)
RUN = RunFacts(state_bytes=8, ema=False, ema_on_device=False, products="bf16", effective_batch=16, ranks=8)
MODES = {mode: {} for mode in ("none", "selective", "full")}
WHOLE = Strategy(name="whole", title="whole", options={}, recompute=MODES)


def sharded(ranks):
    sent = Communication(collective="all-gather", bytes_per_parameter=4.0, ranks=ranks)
    divided = {"weights": ranks, "gradients": ranks, "state": ranks}
    return Strategy(
        name="sharded", title="sharded", options={}, recompute=MODES, divided=divided, own_copies=True, communication=(sent,)
    )
