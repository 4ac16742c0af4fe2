"""Everything that a plugin can add or change. Start here.

Where the hooks fire, in the order of a run:

    smalti train
      declare_options            every plugin's flags, file keys, help
      register_model_families    register_storage  register_metadata_backends  register_optimizers  register_commands
      register_checkpoint_formats
      register_caches            what `smalti cache` lists and clears
      check_config               all complaints at once, before anything is launched
      configure_distributed      which backend; how the workers are launched
    on every rank
      configure_distributed      the same answer; its Parallel is made
      (the family builds the model, parameters on the meta device)
      detect_blocks              the repeated units
      wrap_model                 shard or replicate, and fill with weights
      build_optimizer
      load_checkpoint            when there is one to resume from
      on_train_start
      for batch in batches:
          (forward, backward, clip, step: methods of the Parallel, no hooks)
          on_step_end
          log_metrics
          save_checkpoint        in a thread, while training goes on
          on_checkpoint          once it is whole and visible, at a later step boundary (or on_checkpoint_failed)
          on_validation          after pictures were drawn
          on_evaluation          after the loss on held-out pictures was measured
          on_gpu_fault           when an accelerator failed
          on_warning             when something failed that the run goes on without
      on_error                   only when an exception leaves the loop
      on_train_end               always

There are three kinds of hooks, and the first line of each says which it is:

  decide   the first answer that is not None counts; the core's own answer comes last. Where it says "backend role", only the
           plugin whose plan was chosen by `configure_distributed` is asked, then the core.
  gather   all answers count; two with the same `name` are an error that names both distributions.
  notify   nothing is returned.

An exception raised in a hook ends the run, keeps its type and is told which plugin, version and hook it came from. Observers
are isolated instead. One that fails in `log_metrics` is switched off with one message. What fails in `on_validation`,
`on_evaluation`, `on_checkpoint`, `on_checkpoint_failed`, `on_warning`, `on_gpu_fault`, `on_error` or `on_train_end` is reported
with plugin and traceback; the other plugins are told all the same, and the run goes on, or ends as it would have.

A plugin implements any of these in a class or a module, marks each with `@hookimpl`, and names the object in the entry-point
group `smalti.plugins`. It may leave out arguments that it does not need. Its entry module must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

from smalti.errors import Problem, UserError
from smalti.types import (
    Block,
    CacheEntry,
    Checkpoint,
    CheckpointFormat,
    DistributedPlan,
    EvaluationResult,
    FamilyEntry,
    FaultAction,
    GpuFault,
    MetadataEntry,
    OptimizerEntry,
    Outcome,
    RunInfo,
    RunState,
    StepResult,
    StorageEntry,
    ValidationResult,
)

if TYPE_CHECKING:
    import click
    import torch
    from torch import nn

    from smalti.checkpoint import Loaded, Snapshot
    from smalti.config import Config, OptionGroup
    from smalti.models import ModelFamily, Weights
    from smalti.parallel import Communicator, Parallel

PROJECT = "smalti"
hookimpl = pluggy.HookimplMarker(PROJECT)
_spec = pluggy.HookspecMarker(PROJECT)
_decide = pluggy.HookspecMarker(PROJECT)(firstresult=True)


class HookSpecs:
    """The hooks. A plugin class may inherit from this, so that a type checker compares its signatures with these."""

    # --- set-up: in the launcher and on every rank, without torch ---------------------------------------------------

    @_spec
    def declare_options(self) -> list[OptionGroup]:
        """gather: the options of this plugin, one group per section of the help.

        Called before any configuration exists. Option names are flat and unique over all plugins.
        """
        raise NotImplementedError

    @_spec
    def check_config(self, config: Config) -> list[Problem]:
        """gather: what is wrong with this configuration, each with a fix; an empty list if nothing is.

        Called in the launcher after every single value was validated. Look at combinations of options, files and folders; do
        not write anything.
        """
        raise NotImplementedError

    @_spec
    def register_commands(self, commands: click.Group) -> None:
        """notify: add subcommands to `smalti` with `commands.add_command`.

        Called each time the command line is parsed, so import what a command needs inside the command.
        """
        raise NotImplementedError

    @_spec
    def register_model_families(self) -> list[FamilyEntry]:
        """gather: the model families on offer under `--model_family`. Factories are imported only when chosen."""
        raise NotImplementedError

    @_spec
    def register_storage(self) -> list[StorageEntry]:
        """gather: the places where datasets can live, by the `type` of a dataset."""
        raise NotImplementedError

    @_spec
    def register_metadata_backends(self) -> list[MetadataEntry]:
        """gather: the ways to learn names, sizes and captions, by the `metadata_backend` of a dataset."""
        raise NotImplementedError

    @_spec
    def register_optimizers(self) -> list[OptimizerEntry]:
        """gather: the optimizers on offer under `--optimizer`. Factories are imported only when chosen."""
        raise NotImplementedError

    @_spec
    def register_checkpoint_formats(self) -> list[CheckpointFormat]:
        """gather: the formats of checkpoints that `smalti checkpoint convert` reads, by the files that mark a folder of each.

        What a factory returns is used in a process of its own, which may import torch; nothing it reads may run code.
        """
        raise NotImplementedError

    @_spec
    def register_caches(self) -> list[CacheEntry]:
        """gather: what this plugin keeps between runs and can make again, for `smalti cache`. It alone imports factories."""
        raise NotImplementedError

    @_spec
    def configure_distributed(self, config: Config) -> DistributedPlan | None:
        """gather: this backend's claim to the run, or None if the options do not ask for it.

        Called in the launcher and again on every rank, so the answer may depend on `config` alone. More than one claim is the
        error "A and B cannot be enabled simultaneously.", with the plans' titles. A plan marked `fallback` steps back when
        there is any other.
        """
        raise NotImplementedError

    # --- building: on every rank, in this order ---------------------------------------------------------------------

    @_decide
    def detect_blocks(self, model: nn.Module, family: ModelFamily, config: Config) -> list[Block] | None:
        """decide: the repeated units of the model, outermost first and in forward order.

        `model` has its parameters on the meta device: look at names, classes and shapes only. The core's answer takes the
        classes that the family names, or else the repeated classes inside `ModuleList` and `Sequential`.
        """
        raise NotImplementedError

    @_decide
    def wrap_model(
        self, model: nn.Module, family: ModelFamily, blocks: list[Block], parallel: Parallel, weights: Weights
    ) -> nn.Module | None:
        """decide, backend role, collective: spread the model over the ranks and fill it with its first weights.

        `model` has its parameters on the meta device; what is returned must be on `parallel.world.device`. `weights` gives
        whole tensors by name, the same on every rank. `family` is the one that built the model.
        """
        raise NotImplementedError

    @_decide
    def build_optimizer(
        self, model: nn.Module, groups: list[dict[str, object]], config: Config, registry: list[OptimizerEntry]
    ) -> torch.optim.Optimizer | None:
        """decide: the optimizer for the wrapped model.

        `groups` are torch parameter groups whose `params` are (name, parameter) pairs of the parameters that train.
        `registry` is what all plugins registered; the core's answer looks `--optimizer` up in it.
        """
        raise NotImplementedError

    # --- running ----------------------------------------------------------------------------------------------------

    @_spec
    def on_train_start(self, state: RunState, info: RunInfo) -> None:
        """notify: the loop is about to begin, at `state.step`. Every rank.

        `on_train_end` follows in any case, unless this raises: then nothing is trained.
        """
        raise NotImplementedError

    @_spec
    def on_step_end(self, state: RunState, result: StepResult) -> None:
        """notify: one optimizer step is done, or was skipped. Every rank; may call the `request_` methods of `state`.

        Fires every step: keep it below a millisecond.
        """
        raise NotImplementedError

    @_spec
    def on_validation(self, state: RunState, result: ValidationResult) -> None:
        """notify: validation pictures are on disk. Every rank."""
        raise NotImplementedError

    @_spec
    def on_evaluation(self, state: RunState, result: EvaluationResult) -> None:
        """notify: the loss on held-out pictures was measured. Every rank, with the same numbers; trackers have them already."""
        raise NotImplementedError

    @_spec
    def on_checkpoint(self, state: RunState, checkpoint: Checkpoint) -> None:
        """notify: a checkpoint is complete and visible. Every rank, at the same step boundary.

        Saves run beside training: `checkpoint.step` may lie some steps before `state.step`.
        """
        raise NotImplementedError

    @_spec
    def on_checkpoint_failed(self, state: RunState, error: UserError) -> None:
        """notify: a checkpoint could not be written, for want of room or of rights; older ones are intact. Every rank.

        The run goes on or stops by `--on_save_error`.
        """
        raise NotImplementedError

    @_spec
    def on_warning(self, state: RunState, message: str, error: Exception) -> None:
        """notify: something failed that the run goes on without: a validation, an evaluation, a plugin that was told something.

        Every rank that knows of it; the log has it already. `message` is one sentence. What is raised here is only logged.
        """
        raise NotImplementedError

    @_spec
    def on_error(self, state: RunState, error: BaseException) -> None:
        """notify: an exception is leaving the loop on this rank; it goes on after this. Other ranks may know nothing of it."""
        raise NotImplementedError

    @_spec
    def on_train_end(self, state: RunState, outcome: Outcome | None) -> None:
        """notify: the run is over on this rank; `outcome` is None after an error. Close what `on_train_start` opened.

        Every plugin is told, whatever others do; not those whose `on_train_start` has failed or was not called.
        """
        raise NotImplementedError

    @_spec
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """notify, main rank only, isolated: numbers for a tracker. A failure switches this plugin's tracking off."""
        raise NotImplementedError

    @_decide
    def save_checkpoint(self, state: Snapshot, target: Path, parallel: Communicator, config: Config) -> Checkpoint | None:
        """decide, backend role, collective: write `state` so that it is whole and visible at once, or not at all.

        `target` is the run's `checkpoints` folder, shared by all ranks. The same answer on every rank. Called in a thread of
        its own while the loop trains on, one save at a time: `state` is a copy in host memory that nothing changes, where
        tensors that `smalti.checkpoint.planning.divide` leaves to another rank have a shape but no contents (the meta device).
        With `--no_checkpoint_async`, and for the last checkpoint of a run, it is the live state and the loop waits. Speak to
        other ranks through `parallel` alone: the loop uses the other groups at the same time.
        """
        raise NotImplementedError

    @_decide
    def load_checkpoint(self, source: Path, state: Snapshot, parallel: Parallel) -> Loaded | None:
        """decide, backend role, collective: fill the tensors of `state` in place from the checkpoint at `source`.

        `source` has just been checked by digest. Returns what came out besides the tensors: the trainer's own words, and which
        groups were filled. Raises CheckpointError when it cannot be used.
        """
        raise NotImplementedError

    # --- health -----------------------------------------------------------------------------------------------------

    @_spec
    def on_gpu_fault(self, state: RunState, fault: GpuFault) -> FaultAction:
        """gather: what to do about a fault. The worst answer over plugins wins; the core's own counts where no other has one.

        Called on the rank that saw the fault, inside the loop. What comes of an answer on one rank and on several: see
        `FaultAction`. None is no answer. Do not touch the accelerator.
        """
        raise NotImplementedError
