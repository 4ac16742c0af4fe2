"""A third-party plugin for tests: it writes down each hook call, and can spoil a step on one rank.

PROBE_CALLS names the file for the calls. PROBE_SPOIL is "KIND:RANK:STEP", or several of them with commas: "nan" makes the
model's output not finite in that step, "gradient" its gradient in the forward pass of that number, "fault" raises the error
of a broken accelerator, once, "faults" that of cuBLAS, always; "error" raises a plain one, "kill" is `kill -9`, "save" fails
to write the checkpoint of that step, "sample" to draw or
to evaluate after it, "stop" asks for a stop after that step, "preempt" does so with SIGUSR1; "terminate" is SIGTERM
while the run is built, at step 0. "stuck" never comes back from the backward pass, as from a device that waits for another
rank: a call that lets other threads run and minds no signal; "hang" does so in the hook `on_step_end`, where "sleep" waits
for what never comes, and "collective"
makes a collective call of its own. "request" does what `smalti run stop` does, while the first checkpoint is saved. "memory"
runs out of memory, where leaving the group would wait for the others, as with NCCL. PROBE_RAISE names hooks that fail,
PROBE_EXIT hooks that exit, PROBE_FAULT is the answer to a fault. "report" reports a fault in another thread
after that step, at step 0 while the run is built; "report-stuck" also never comes back from that hook.
With PROBE_GPUS,
smalti-health watches the GPU "cuda:RANK" for each rank, though that trains on the CPU, and "gpu" lets the driver report
what PROBE_GPUS says from that step on. With PROBE_MODULES it also notes, as "modules", what a rank has imported by the end
of its first step.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from smalti import FaultAction, GpuFault, StopReason, hookimpl
from smalti.rundir import RunDirectory


def wait_for_ever(*_):
    """Lock what is locked already."""
    lock = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(lock)


class Probe:
    def __init__(self):
        self.state = None
        spoils = [each.split(":") for each in (os.environ.get("PROBE_SPOIL") or "none:0:0").split(",")]
        mine = [each for each in spoils if each[1] == os.environ.get("RANK", "0")]
        self.kind, self.rank, self.step = (mine or spoils)[0]
        self.passes = 0
        self.health = None

    def note(self, hook, **facts):
        if path := os.environ.get("PROBE_CALLS"):
            line = json.dumps({"hook": hook, "rank": int(os.environ.get("RANK", "0")), "process": os.getpid(), **facts})
            with Path(path).open("a") as file:
                file.write(line + "\n")
        if hook in os.environ.get("PROBE_RAISE", "").split(","):
            raise RuntimeError(f"spoiled {hook}")
        if hook in os.environ.get("PROBE_EXIT", "").split(","):
            sys.exit(0)

    def due(self, step):
        return int(os.environ.get("RANK", "0")) == int(self.rank) and step == int(self.step)

    def wait_for_readings(self):
        """Until each GPU was read: what is wrong from the start is no fault."""
        from smalti_health.policy.trace import read_trace

        trace = self.directory / "health.node-0.jsonl"
        while not trace.exists() or len({reading.uuid for reading in read_trace((trace,)).readings}) < 2:
            time.sleep(0.05)

    @hookimpl
    def check_config(self, config):
        self.note("check_config")
        return []

    @hookimpl
    def notices_before_launch(self, config, plan, kind):
        self.note("notices_before_launch", strategy=plan.title, kind=kind)

    @hookimpl
    def on_launch_end(self, directory, events, code):
        self.note("on_launch_end", code=int(code))

    @hookimpl
    def explain_error(self, state, error, info, run):
        self.note("explain_error", error=type(error).__name__, built=run is not None)

    @hookimpl
    def detect_blocks(self, model, family):
        self.note("detect_blocks", devices=sorted({parameter.device.type for parameter in model.parameters()}))

    @hookimpl
    def wrap_model(self, model, blocks, parallel, weights):
        self.note("wrap_model", blocks=[block.path for block in blocks])

    @hookimpl
    def build_optimizer(self, model, groups, config, registry):
        self.note("build_optimizer", registry=[entry.name for entry in registry])
        getattr(model, "module", model).register_forward_hook(self.spoil)
        if self.kind == "terminate" and self.due(0):
            os.kill(os.getpid(), signal.SIGTERM)
        if self.kind == "report" and self.due(0):
            self.report()
            time.sleep(30)

    def report(self):
        reading = {"uuid": "GPU-probe", "index": int(self.rank), "ecc_errors_double": 1}
        facts = {"kind": "ecc", "message": "spoiled", "device": "cuda:0", "rank": int(self.rank), "reading": reading}
        fault = GpuFault(**facts, memory="PROBE_MEMORY" in os.environ)
        reporting = threading.Thread(target=self.state.report_fault, args=(fault,))
        reporting.start()
        reporting.join()

    def spoil(self, module, arguments, output):
        import torch

        if self.kind == "sample" and not module.training and self.due(self.state.step):
            raise RuntimeError("spoiled")
        self.passes += module.training
        if self.kind == "gradient" and module.training and self.due(self.passes):
            output.register_hook(lambda gradient: gradient * float("inf"))
        if self.state is None or not module.training or not self.due(self.state.step + 1):
            return None
        if self.kind == "nan":
            return output * float("nan")
        if self.kind in ("fault", "faults"):
            if self.kind == "faults":
                raise RuntimeError(
                    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m)`"
                )
            self.kind = "none"
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        if self.kind == "error":
            raise RuntimeError("spoiled")
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "stuck":
            output.register_hook(wait_for_ever)
        if self.kind == "memory":
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # not in a process that trains again
                torch.distributed.destroy_process_group = wait_for_ever
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return None

    @hookimpl
    def on_rank_start(self, state, info):
        self.state = state
        self.note("on_rank_start", max_steps=state.max_steps, id=info.id)
        if "PROBE_GPUS" in os.environ:
            from smalti_health.plugin import Health

            self.directory = info.directory
            self.health, world = Health(), replace(info.world, device=f"cuda:{info.world.rank}")
            self.health.on_rank_start(state, replace(info, world=world))

    @hookimpl
    def on_phase(self, state, phase):
        self.note("on_phase", phase=phase.name)

    @hookimpl
    def on_rank_end(self, state, error):
        self.note("on_rank_end", step=state.step, error=error and type(error).__name__)
        if self.health is not None:
            self.health.on_rank_end()

    @hookimpl
    def on_train_start(self, state, info):
        self.state = state
        self.note("on_train_start", step=state.step, effective_batch=info.effective_batch)

    @hookimpl
    def on_step_boundary(self, state, boundary):
        self.note("on_step_boundary", step=state.step, saves=boundary.saves, validates=boundary.validates)

    @hookimpl
    def on_step_end(self, state, result):
        self.note("on_step_end", step=result.step, loss=repr(result.loss), skipped=result.skipped)
        if result.step == 1 and os.environ.get("PROBE_MODULES"):
            self.note("modules", names=sorted(sys.modules))
        if self.kind == "preempt" and self.due(result.step):
            os.kill(os.getpid(), signal.SIGUSR1)
        if self.kind == "stop" and self.due(result.step):
            state.request_stop(StopReason.REQUESTED, f"asked at step {result.step}")
        if self.kind in ("report", "report-stuck") and self.due(result.step):
            self.report()
        if self.kind == "gpu" and self.due(result.step):
            self.wait_for_readings()
            driver = Path(os.environ["FAKE_NVML"])
            driver.with_suffix(".next").write_text(os.environ["PROBE_GPUS"])
            driver.with_suffix(".next").replace(driver)
        if self.kind in ("hang", "report-stuck") and self.due(result.step):
            wait_for_ever()
        if self.kind == "sleep" and self.due(result.step):
            threading.Event().wait()
        if self.kind == "collective" and self.due(result.step):
            import torch

            torch.distributed.all_reduce(torch.ones(1))

    @hookimpl
    def on_validation(self, state, result):
        self.note("on_validation", step=result.step, images=len(result.images))

    @hookimpl
    def save_checkpoint(self, state, target, parallel):
        self.note("save_checkpoint", step=state.step)
        if self.kind == "save" and self.due(state.step):
            raise ValueError("spoiled")
        if self.kind == "request" and int(self.rank) == int(os.environ.get("RANK", "0")):
            self.kind = "none"
            RunDirectory(target.parent).request("stop")

    @hookimpl
    def load_checkpoint(self, source, state, parallel):
        self.note("load_checkpoint", source=source.name)

    @hookimpl
    def on_checkpoint(self, state, checkpoint):
        self.note("on_checkpoint", step=checkpoint.step, visible=(checkpoint.path / "manifest.json").is_file())

    @hookimpl
    def on_checkpoint_failed(self, state, error):
        self.note("on_checkpoint_failed", step=state.step, error=error.message)

    @hookimpl
    def on_gpu_fault(self, state, fault):
        self.note("on_gpu_fault", kind=fault.kind, step=state.step)
        if self.health is not None:
            return self.health.on_gpu_fault(fault)
        return FaultAction[os.environ["PROBE_FAULT"]] if "PROBE_FAULT" in os.environ else None

    @hookimpl
    def on_fault(self, state, fault, action):
        self.note("on_fault", kind=fault.kind, action=action.name, step=state.step)

    @hookimpl
    def on_evaluation(self, state, result):
        self.note("on_evaluation", step=result.step)

    @hookimpl
    def on_warning(self, state, message, error):
        self.note("on_warning", step=state.step, message=message, error=type(error).__name__)

    @hookimpl
    def log_metrics(self, metrics, step):
        self.note("log_metrics", step=step, names=sorted(metrics))
        if os.environ.get("PROBE_TRACKER") == "broken":
            raise OSError("the tracker's server is down")

    @hookimpl
    def on_error(self, state, error):
        self.note("on_error", error=type(error).__name__)

    @hookimpl
    def on_train_end(self, state, outcome):
        self.note("on_train_end", step=state.step, reason=outcome.reason.name if outcome else None)


class Backend:
    """A backend that this run does not ask for: it must be left out of the backend roles."""

    @hookimpl
    def configure_distributed(self, config):
        plugin.note("configure_distributed")

    @hookimpl
    def wrap_model(self, model, blocks, parallel, weights):
        plugin.note("wrap_model of a backend that was not chosen")


plugin = Probe()
backend = Backend()
