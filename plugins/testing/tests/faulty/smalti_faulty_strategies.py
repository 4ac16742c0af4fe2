"""Replicas, each with one fault: what the contract of strategies has to find."""

from smalti import DistributedPlan, OptionGroup, Options, hookimpl, option


class FaultOptions(Options):
    strategy_fault: str = option("none", help="The class of this module's faults to use.")


class FaultyStrategies:
    @hookimpl
    def declare_options(self):
        return [OptionGroup(name="faulty_strategies", title="Faulty strategies", options=FaultOptions)]

    @hookimpl
    def configure_distributed(self, config):
        fault = config[FaultOptions].strategy_fault
        if fault == "none":
            return None
        return DistributedPlan(name="faulty_strategies", title=fault, parallel=f"smalti_faulty_replicas:{fault}")

    @hookimpl
    def wrap_model(self, model, blocks, parallel, weights):
        return parallel.wrap(model, blocks, weights)


plugin = FaultyStrategies()
