"""The hooks: every function with which a plugin adds something to smalti or observes a run. Start here.

The hooks in the order of a run:

    smalti train
      declare_options            the options of the plugin: flags, keys of configuration files, help
      restore_run                what a resume needs is brought into the run directory from another place
      register_model_families    register_storage  register_metadata_backends  register_columns  register_optimizers
      register_periodic_work     register_checkpoint_formats  register_commands
      register_caches            what `smalti cache` lists and clears, and what is encoded ahead
      check_config               all problems of a configuration, before anything is launched
      configure_distributed      the strategy (DDP, FSDP, ...) and how its processes are launched
      configure_launch           where the ranks start, if that is more than one node
      configure_scan             who scans the datasets, if that is more than one process
      notices_before_launch      what the user should know before the launch
    on every rank
      configure_distributed      again, with the same result; then its `Parallel` is created
      on_rank_start              the ranks are connected
      on_phase                   each time the rank begins another phase: encoding, building, training, saving ...
      build_terms                what is added to the loss, and which forward passes that takes; in the launcher too
      (the family builds the model, with parameters on the meta device)
      detect_blocks              the repeated modules of the model
      wrap_model                 shard or replicate the model, and load its weights
      build_optimizer
      load_checkpoint            when there is a checkpoint to resume from
      on_train_start
      for batch in batches:
          (forward, backward, clip and step are methods of the `Parallel`, not hooks)
          on_step_end
          log_metrics            every `--log_interval` steps, on the main rank
          save_checkpoint        in a thread, while training continues
          on_step_boundary       before the ranks agree on what comes next: saving, validating, stopping
          on_checkpoint          at a step boundary, once the checkpoint is complete (or on_checkpoint_failed)
          on_validation          after validation images were generated
          on_evaluation          after the loss on held-out images was measured
          on_gpu_fault           when an accelerator failed
          on_fault               once it is decided what follows
          on_warning             when something failed and the run continues without it
      explain_error              when memory ran out, while the run is built or in the loop
      on_error                   when an exception leaves the loop
      on_train_end               always, after on_train_start
      on_rank_end                always, after on_rank_start
    in the launcher again
      on_launch_end              when all ranks have ended
    smalti doctor
      diagnose                   what is wrong with this node, for this configuration
    smalti plan
      propose_strategies         ways to spread this run over ranks, and what each takes
    smalti run ls
      describe_run               what is known of a run beside what the core lists

There are three kinds of hooks. The first word of each docstring says which kind it is:

  decide   The first result that is not None is used. The core is asked last. A hook marked "backend role" is called only for
           the plugin whose plan `configure_distributed` has chosen, for plugins that are no backend, and for the core.
  gather   The results of all plugins are used. Two entries with the same `name` are an error that names both distributions.
  notify   Nothing is returned.

"collective" means that all ranks call the hook at the same time, so it may use collective operations.
An exception in a hook ends the run. It keeps its type and gets a note with the plugin, its version and the hook. Most hooks
that observe are "isolated": a failure is reported with the traceback, and the run goes its way. In the launcher it is logged.

To implement hooks, mark methods of a class, or functions of a module, with `@hookimpl`, and name the object in the entry-point
group `smalti.plugins`. Arguments are passed by name, and may be left out. The module of the entry point must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from smalti.errors import ExitCode, Problem, UserError
from smalti.types import (
    Block,
    CacheEntry,
    Checkpoint,
    CheckpointFormat,
    ColumnEntry,
    CommandCollector,
    DistributedPlan,
    EvaluationResult,
    FamilyEntry,
    FaultAction,
    Finding,
    GpuFault,
    LaunchEntry,
    MetadataEntry,
    OptimizerEntry,
    Outcome,
    PeriodicEntry,
    RankInfo,
    RunInfo,
    RunState,
    RunValue,
    ScanEntry,
    StepBoundary,
    StepResult,
    StorageEntry,
    Strategy,
    ValidationResult,
    World,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from smalti.checkpoint import Loaded, Snapshot
    from smalti.config import Config, OptionGroup
    from smalti.models import ModelFamily, Weights
    from smalti.parallel import Communicator, Parallel
    from smalti.rundir import EventWriter, Phase, RunDirectory

PROJECT = "smalti"
hookimpl = pluggy.HookimplMarker(PROJECT)
_spec = pluggy.HookspecMarker(PROJECT)
_decide = pluggy.HookspecMarker(PROJECT)(firstresult=True)


class HookSpecs:
    """The hooks. A plugin class may inherit from this class, so that a type checker compares its signatures with these.

    The functions also stand for the hooks where smalti calls them: `plugins.gather(HookSpecs.register_optimizers)`.
    """

    # --- setup: in the launcher and on every rank, without torch ----------------------------------------------------

    @_spec
    def declare_options(self) -> list[OptionGroup]:
        """gather: the options of this plugin, one group for each section of the help.

        Called before there is a configuration. Names of options are unique over all plugins. A field is declared with
        `smalti.option`, and its value read as `config[MyOptions].my_option`.
        """
        raise NotImplementedError

    @_decide
    def restore_run(self, config: Config) -> str | None:
        """decide: bring what a resume needs into the run directory, such as a checkpoint from an object store.

        Called in the launcher of every node before the other checks, with valid options; not for a dry run. Do not replace what
        is in the run directory, `config[RunOptions].output_dir`. Returns what was restored, in a sentence, or None. The
        configuration is then resolved again.
        """
        raise NotImplementedError

    @_spec
    def check_config(self, config: Config) -> list[Problem]:
        """gather: the problems of this configuration, each with a fix; an empty list if there are none.

        Called in the launcher, after each value was validated by itself. Check combinations, files, folders; write nothing.
        """
        raise NotImplementedError

    @_spec
    def register_commands(self, commands: CommandCollector) -> None:
        """notify: add subcommands to `smalti` with `commands.add_command`, or `commands.add_deferred` to import them when used.

        `commands.below("config")` takes further subcommands of a group of the core. A command that exists is not replaced.

        Called for the help of `smalti`, and for a command that the core does not have. Import what it needs inside the command.
        """
        raise NotImplementedError

    @_spec
    def register_model_families(self) -> list[FamilyEntry]:
        """gather: model families for `--model_family`. A factory is imported only when its family is chosen."""
        raise NotImplementedError

    @_spec
    def register_storage(self) -> list[StorageEntry]:
        """gather: storages of datasets, for the key `type` of a dataset. Called when datasets are opened."""
        raise NotImplementedError

    @_spec
    def register_metadata_backends(self) -> list[MetadataEntry]:
        """gather: sources of file names, image sizes and captions, for the key `metadata_backend` of a dataset."""
        raise NotImplementedError

    @_spec
    def register_columns(self) -> list[ColumnEntry]:
        """gather: what datasets have for each image beside the image and its captions, such as masks for a term of the loss."""
        raise NotImplementedError

    @_spec
    def register_optimizers(self) -> list[OptimizerEntry]:
        """gather: optimizers for `--optimizer`. A factory is imported only when its optimizer is chosen.

        Called in the launcher, to check the option, and on every rank. A class of torch often suffices as the factory.
        """
        raise NotImplementedError

    @_spec
    def register_periodic_work(self) -> list[PeriodicEntry]:
        """gather: what all ranks do together between steps, such as generating validation images.

        A factory is called in the launcher, for its checks, and on every rank. All ranks do the work together when one of them
        says that it is due. A failure that every rank raises as an `AttemptFailed` is reported, and training continues.
        """
        raise NotImplementedError

    @_spec
    def register_checkpoint_formats(self) -> list[CheckpointFormat]:
        """gather: formats of checkpoints for `smalti checkpoint convert`.

        A factory is called in a process that may import torch. It must not run code of files: `torch.load(weights_only=True)`.
        """
        raise NotImplementedError

    @_spec
    def register_caches(self) -> list[CacheEntry]:
        """gather: what this plugin keeps between runs and can create again, for `smalti cache`.

        One of the entries may have an `encoder`: it keeps the latents and texts of a run that encodes them before training.
        """
        raise NotImplementedError

    @_spec
    def configure_distributed(self, config: Config) -> DistributedPlan | None:
        """gather: this plugin's strategy if the options ask for it, or None.

        Called in the launcher and again on every rank, so the result must depend on `config` alone. Two plans are the error
        "A and B cannot be enabled simultaneously.", with their titles. A plan marked `fallback` is used if there is no other.
        """
        raise NotImplementedError

    @_spec
    def configure_launch(self, config: Config) -> LaunchEntry | None:
        """gather: this plugin's way to start the ranks if this launch needs it, or None. Two entries are an error.

        Called in the launcher. Without an entry, the core starts the ranks of one node, and refuses a launch on several.
        """
        raise NotImplementedError

    @_spec
    def configure_scan(self, config: Config) -> ScanEntry | None:
        """gather: this plugin's scan of the datasets by all ranks if this launch may need it, its engine if asked for, or None.

        Called in the launcher, on every rank and in commands: the result must depend on `config` alone. The first name is used.
        """
        raise NotImplementedError

    @_spec
    def notices_before_launch(self, config: Config, plan: DistributedPlan, kind: str) -> list[str]:
        """gather, isolated: what the user should know before this launch, in sentences.

        Called in the launcher, also for a dry run. `kind` is that of the devices: "cuda" ... Problems belong to `check_config`.
        """
        raise NotImplementedError

    # --- building: on every rank, in this order ---------------------------------------------------------------------

    @_spec
    def build_terms(self, config: Config, family: ModelFamily) -> list[Any]:
        """gather: terms of the loss in addition to the denoising loss, each a `smalti.training.Term`.

        Called in the launcher for their checks, and on every rank, with the same result; on ranks more than once. Trackers get
        each part of the loss as `loss/NAME` where there are several. A term of weight 0 costs as much as any: leave it out.
        """
        raise NotImplementedError

    @_decide
    def detect_blocks(self, model: nn.Module, family: ModelFamily, config: Config) -> list[Block] | None:
        """decide: the repeated modules of the model, outermost first and in forward order.

        They are the units of sharding, activation checkpointing and compilation. The parameters of `model` are on the meta
        device: use names, classes and shapes only. The core returns the modules of the classes that the family names, or of
        those that repeat inside `ModuleList` and `Sequential`.
        """
        raise NotImplementedError

    @_decide
    def wrap_model(
        self, model: nn.Module, family: ModelFamily, blocks: list[Block], parallel: Parallel, weights: Weights
    ) -> nn.Module | None:
        """decide, backend role, collective: the model, sharded or replicated over the ranks, with its first weights loaded.

        The parameters of `model` are on the meta device; those of the returned model must be on `parallel.world.device`.
        `weights` has complete tensors by name, the same on every rank. `family` is the one that built the model.
        """
        raise NotImplementedError

    @_decide
    def build_optimizer(
        self, model: nn.Module, groups: list[dict[str, object]], config: Config, registry: list[OptimizerEntry]
    ) -> torch.optim.Optimizer | None:
        """decide: the optimizer for the wrapped `model`.

        `groups` are torch parameter groups, whose `params` are (name, parameter) pairs of the trainable parameters; a
        `rate_ratio` multiplies the rate of the run. `registry` has the optimizers of all plugins; the core uses the one that
        `--optimizer` names. Prefer `register_optimizers` unless the optimizer needs more than its parameters and the usual
        settings. A name handled here is registered too. One that steps in the backward pass is a `StepsInBackward`.
        """
        raise NotImplementedError

    # --- running ----------------------------------------------------------------------------------------------------

    @_spec
    def on_rank_start(self, state: RunState, info: RankInfo) -> None:
        """notify, isolated: the ranks are connected; data, model and encoding follow. On every rank.

        `state` is that of the whole run: `report_fault` can be called from here on, from any thread; `max_steps` is 0 until
        the data were read. What has to run during hours of encoding too starts here. `on_rank_end` always follows.
        """
        raise NotImplementedError

    @_spec
    def on_phase(self, state: RunState, phase: Phase) -> None:
        """notify, isolated: this rank has begun a phase, or continues one after another within it. On every rank.

        In the thread of the loop: keep it below a millisecond. "saving" is the part of a save for which training waits.
        """
        raise NotImplementedError

    @_spec
    def on_rank_end(self, state: RunState, error: BaseException | None) -> None:
        """notify, isolated: all else has ended on this rank, with this `error` if it is not None.

        Also when the run ends before its loop, which `on_error` does not see. Close what `on_rank_start` opened.
        """
        raise NotImplementedError

    @_spec
    def on_train_start(self, state: RunState, info: RunInfo) -> None:
        """notify: the loop is about to start, at `state.step`. On every rank.

        `on_train_end` always follows, unless this hook raises; then nothing is trained.
        """
        raise NotImplementedError

    @_spec
    def on_step_end(self, state: RunState, result: StepResult) -> None:
        """notify: one optimizer step was done, or was skipped. On every rank, with its own `result.visits`.

        May call the `request_` methods of `state`, which take effect on all ranks at the boundary that comes next. The forward
        pass of the next step may have been queued. Called for every step: keep it below a millisecond.
        """
        raise NotImplementedError

    @_spec
    def on_step_boundary(self, state: RunState, boundary: StepBoundary) -> None:
        """notify: the ranks are about to agree on what follows the last step. On every rank; may call `state.request_stop`.

        Called again after an agreement on PREEMPTED, and while the run is paused. Another request then counts. Be quick.
        """
        raise NotImplementedError

    @_spec
    def on_validation(self, state: RunState, result: ValidationResult) -> None:
        """notify, isolated: validation images were written. On every rank."""
        raise NotImplementedError

    @_spec
    def on_evaluation(self, state: RunState, result: EvaluationResult) -> None:
        """notify, isolated: the loss on held-out images was measured. On every rank, with the same numbers.

        May request a save or a stop, on which the ranks agree at the end of the next step. Trackers have `log_metrics`.
        """
        raise NotImplementedError

    @_spec
    def on_checkpoint(self, state: RunState, checkpoint: Checkpoint) -> None:
        """notify, isolated: a checkpoint is complete and visible. On every rank, at the same step boundary.

        Training continues during a save, so `state.step` may be greater than `checkpoint.step`. Rotation comes afterwards.
        """
        raise NotImplementedError

    @_spec
    def on_checkpoint_failed(self, state: RunState, error: UserError) -> None:
        """notify, isolated: a checkpoint could not be written, for example because the disk is full. On every rank.

        Older checkpoints are intact. The run continues or stops, as `--on_save_error` says.
        """
        raise NotImplementedError

    @_spec
    def on_warning(self, state: RunState, message: str, error: Exception) -> None:
        """notify, isolated: something failed and the run continues without it: a validation, an evaluation, an isolated hook.

        On every rank that knows of it. `message` is one sentence, which is in the log already. `error` has no traceback on a
        rank that only heard of it. An exception here is only logged.
        """
        raise NotImplementedError

    @_spec
    def explain_error(self, state: RunState, error: Exception, info: RankInfo, run: object | None) -> UserError | None:
        """gather, isolated: what an exception means that says that memory ran out, and what would help; None if unknown.

        On the rank that raised `error`. Message and fix of the first answer take the place of torch's; type and exit code
        stay. `run` is the `smalti.training.Run`; None while it is built. There is little memory left: allocate no tensors.
        """
        raise NotImplementedError

    @_spec
    def on_error(self, state: RunState, error: BaseException) -> None:
        """notify, isolated: `error` is leaving the loop on this rank. Other ranks may not know of it: run no collectives."""
        raise NotImplementedError

    @_spec
    def on_train_end(self, state: RunState, outcome: Outcome | None) -> None:
        """notify, isolated: the run has ended on this rank; `outcome` is None after an error.

        Close what `on_train_start` opened. Called for every plugin whose `on_train_start` has returned, even if others fail. If
        `state.stop_reason` is `StopReason.TAKEN_OVER`, the run directory is that of another launch: write nothing into it.
        """
        raise NotImplementedError

    @_spec
    def on_launch_end(self, directory: RunDirectory, events: EventWriter, code: ExitCode) -> list[str]:
        """gather, isolated: lines for the summary of a launch, each a title in 12 columns and a text.

        Called in the launcher that owns the run directory, when all ranks have ended with this code. May append events.
        """
        raise NotImplementedError

    @_spec
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """notify, isolated: numbers for a tracker, `metrics` of `step` by name. On the main rank, every `--log_interval` steps.

        docs/metrics.md has all names. A plugin that fails here gets no more metrics.
        """
        raise NotImplementedError

    @_decide
    def save_checkpoint(self, state: Snapshot, target: Path, parallel: Communicator, config: Config) -> Checkpoint | None:
        """decide, backend role, collective: write `state` as one checkpoint, which becomes visible when it is complete.

        `target` is the `checkpoints` folder of the run, shared by all ranks. Every rank returns the same `Checkpoint`.

        Called in a thread while training continues, one save at a time. `state` is then a copy in host memory that nothing
        changes. Tensors that another rank saves, as the built-in saving divides them, have a shape but no contents: they are
        on the meta device. With `--no_checkpoint_async`, and for the last checkpoint of a run, `state` is the live state and
        the loop waits. Use `parallel` alone to communicate: the loop uses the other process groups at the same time.
        """
        raise NotImplementedError

    @_decide
    def load_checkpoint(self, source: Path, state: Snapshot, parallel: Parallel, config: Config) -> Loaded | None:
        """decide, backend role, collective: fill the tensors of `state` in place from the checkpoint at `source`.

        The digests of `source` were verified just before. Returns the trainer's own state and the groups of tensors that were
        filled. Raises CheckpointError if the checkpoint cannot be used. Without `shared_output_dir`, only node 0 may see it.
        """
        raise NotImplementedError

    # --- health -----------------------------------------------------------------------------------------------------

    @_spec
    def on_gpu_fault(self, state: RunState, fault: GpuFault) -> FaultAction | None:
        """gather, isolated: what to do about a fault of an accelerator, or None for no opinion. `FaultAction` has what follows.

        Faults are what was reported with `state.report_fault`, errors of the CUDA runtime, and what cuBLAS, cuDNN, the driver,
        Triton and NCCL raise when a call on this rank's device has failed. Wrong arguments, device-side assertions, memory that
        ran out, and collectives that failed because of another rank or the network are none.

        Called on the rank with the fault: inside the loop, or in another thread before the loop and where the loop does not
        reach its next step boundary. The largest action of all plugins is used. The core's own counts only if no other plugin
        returns one: STOP_UNSAVED for an error of the CUDA runtime, CONTINUE for a warning, STOP_SUSPECT if memory may be
        corrupt, else STOP_SAVED. Do not use the accelerator here.
        """
        raise NotImplementedError

    @_spec
    def on_fault(self, state: RunState, fault: GpuFault, action: FaultAction) -> None:
        """notify, isolated: it is decided what follows a fault, the largest action of all plugins. On the rank with the fault.

        Called where `on_gpu_fault` was called, just after it. The rank may end soon: write at once what is to remain.
        """
        raise NotImplementedError

    @_spec
    def propose_strategies(self, config: Config, world: World) -> list[Strategy]:
        """gather: this plugin's strategies for a configuration on ranks like `world`, whatever strategy its options ask for.

        For `smalti plan`, and for the warning of `smalti train` about memory. Of `world` only `size` and `local_size` count.
        """
        raise NotImplementedError

    @_spec
    def diagnose(self, config: Config | None) -> list[Finding]:
        """gather, isolated: what `smalti doctor` finds on this node about what this plugin needs. See `Finding`.

        `config` is the configuration that `smalti doctor` was given; None without one. If it has a problem, reading that option
        raises InvalidOptionError, which ends the diagnosis of this plugin. Called in the process of the command, in a thread
        with a time limit of 30 seconds. Import torch in a child process only. Do not write anything that remains.
        """
        raise NotImplementedError

    @_spec
    def describe_run(self, directory: RunDirectory) -> list[RunValue]:
        """gather: further columns of `smalti run ls` for one run.

        The run in `directory` may still train, have ended, or be of another host. Return the same columns for
        every run. Called once for each run: read the end of its events only.
        """
        raise NotImplementedError
