"""On how many nodes a run can train with its effective batch, and the configuration for each number of them.

The effective batch is that of the configuration as it was given, for `num_machines` nodes. On fewer or more nodes another
`gradient_accumulation_steps` gives the same one, so neither the order of samples nor the learning rate changes.
Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from smalti import ConfigError, Problem, UserError
from smalti.config import Config, DataOptions, LaunchOptions, TrainingOptions
from smalti.plugins import Plugins, check_strategy, choose_distributed, plugin_problems
from smalti_cluster.options import ClusterOptions, node_range


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """`configs` are the configurations by the usable numbers of nodes, `refused` the reasons against the others."""

    configs: Mapping[int, Config]
    refused: Mapping[int, str]

    def usable(self, present: int) -> int | None:
        """The largest number of nodes, of those that are present, with which the run can train. None if there is none."""
        return max((nodes for nodes in self.configs if nodes <= present), default=None)

    def notices(self) -> list[str]:
        """What to say about numbers of nodes that cannot be used."""
        return [f"{_nodes(nodes)} cannot be used: {reason}" for nodes, reason in sorted(self.refused.items())]


def possible_sizes(config: Config, plugins: Plugins) -> Sizes:
    """Which numbers of nodes of `--nodes=MIN:MAX` can be used. Raises ConfigError if there is none."""
    configs, refused = {}, {}
    least, most = node_range(config)
    for nodes in range(least, most + 1):
        try:
            changed = for_nodes(config, plugins, nodes)
            if problems := plugin_problems(changed, plugins):
                raise ConfigError(problems)
            check_strategy(choose_distributed(changed, plugins), changed, plugins)
            configs[nodes] = changed
        except UserError as error:
            refused[nodes] = error.message.partition("\n")[0] if not isinstance(error, ConfigError) else str(error.problems[0])
    if not configs:
        reasons = "; ".join(f"{_nodes(nodes)}: {reason}" for nodes, reason in refused.items())
        fix = "choose --nodes, --train_batch_size and --gradient_accumulation_steps so that it divides"
        raise ConfigError([Problem(message=f"no number of nodes can be used: {reasons}", where="nodes", fix=fix)])
    return Sizes(configs=configs, refused=refused)


def for_nodes(config: Config, plugins: Plugins, nodes: int) -> Config:
    """The same run on another number of nodes. Raises UserError with the reason if that is not possible."""
    launch, batch = config[LaunchOptions], config[DataOptions].train_batch_size
    if nodes == launch.num_machines:
        return config
    local = launch.num_processes // launch.num_machines
    accumulation = config[TrainingOptions].gradient_accumulation_steps
    effective = batch * accumulation * (launch.num_processes // choose_distributed(config, plugins).context)
    why = f"{_nodes(nodes)} of {config[ClusterOptions].nodes or launch.num_machines}"
    changed = config.chosen("num_processes", nodes * local, why).chosen("num_machines", nodes, why)
    context = choose_distributed(changed, plugins).context
    if nodes * local % context:
        raise UserError(f"{nodes * local} ranks do not divide by --context_parallel_size={context}")
    together = batch * (nodes * local // context)
    if effective % together:
        ranks = f"{nodes} x {local // context} ranks" if local % context == 0 else f"{nodes * local // context} ranks"
        raise UserError(
            f"the effective batch of {effective} does not divide by {ranks} x train_batch_size={batch} = {together}"
        )
    return changed.chosen("gradient_accumulation_steps", effective // together, why)


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
