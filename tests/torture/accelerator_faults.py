"""D4 to D8: faults of accelerators on one of several ranks, ranks that hang or are slow, the same fault again and again."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from random import Random

import torch

from smalti.checkpoint.format.manifest import SUSPECT
from smalti.checkpoint.format.store import CheckpointStore
from smalti.checkpoint.format.verification import verify
from smalti.rundir import read_events
from smalti.system import kill_tree
from smalti.training.failures.faults import is_fault
from smalti.training.failures.out_of_memory import is_out_of_memory
from smalti_health.circuit_file import CircuitFault, read_circuit
from smalti_health.circuits import open_circuit, repeated_fault, reset_circuit
from smalti_health.hangs.stragglers import Stragglers
from support.images import images_in
from support.processes import workers
from support.warm_processes import warm_processes

from .runs import OPTIONS, start, tail
from .subject import Report

LIMIT_SECONDS = 5.0
PLUGIN = '''
import json, os, threading, time
import smalti

class Faulty:
    """Reports a fault on one rank, a moment after one step; notes when, and when each rank has stopped at which step."""

    def note(self, **facts):
        with open(os.environ["FAULT_NOTES"], "a") as file:
            file.write(json.dumps({"time": time.time(), "rank": int(os.environ.get("RANK", "0")), **facts}) + "\\n")

    @smalti.hookimpl
    def on_rank_start(self, state, info):
        self.case, self.world = json.loads(os.environ["FAULT_CASE"]), info.world

    @smalti.hookimpl
    def on_step_end(self, state, result):
        if self.case["rank"] == self.world.rank and state.step == self.case["step"]:
            threading.Timer(self.case["delay"], self.report, (state,)).start()

    def report(self, state):
        self.note(what="reported", step=state.step)
        state.report_fault(smalti.GpuFault(kind=self.case["kind"], message="torture", device="cuda:0", rank=self.world.rank))

    @smalti.hookimpl
    def on_gpu_fault(self, state, fault):
        return smalti.FaultAction[self.case["action"]]

    @smalti.hookimpl
    def on_train_end(self, state, outcome):
        self.note(what="ended", step=state.step, reason=outcome.reason.name if outcome else None)

plugin = Faulty()
'''
ENTRY = "[smalti.plugins]\nfaulty = smalti_faulty:plugin\n"
TIMES: list[float] = []
"""Seconds from each fault to the stop of the last rank, over all rounds of this process."""
HANG_TIMES: list[float] = []
"""Seconds from each SIGSTOP to the report of the hang."""


def install(place: Path) -> Path:
    """The plugin, in a folder for PYTHONPATH."""
    folder = place / "plugin"
    info = folder / "smalti_faulty-1.dist-info"
    info.mkdir(parents=True)
    (folder / "smalti_faulty.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: smalti-faulty\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY)
    return folder


def agreed(chance: Random, place: Path) -> Report:
    """D4: faults on a random rank of two or four, at a random moment: all ranks stop at one step within 5 seconds."""
    return _agreed(chance, place, faults=10)


def agreed_once(chance: Random, place: Path) -> Report:
    """D4 in short: one fault on one of two ranks."""
    return _agreed(chance, place, faults=1, most=2)


def _agreed(chance: Random, place: Path, *, faults: int, most: int = 4) -> Report:
    report, folder, images = Report(), install(place), images_in(place / "images", 12, (24, 24))
    for number in range(faults):
        ranks, directory = chance.choice((2, most)), place / f"run-{number}"
        action = chance.choice(("STOP_SAVED", "STOP_SUSPECT", "STOP_UNSAVED"))
        case = {"rank": chance.randrange(ranks), "step": chance.randint(1, 20), "delay": chance.uniform(0, 0.2)}
        notes = place / f"notes-{number}"
        words = [*OPTIONS, f"--instance_data_dir={images}", f"--output_dir={directory}", "--max_train_steps=100000"]
        words += [f"--num_processes={ranks}", f"--train_batch_size={4 // ranks}", "--without=plots"]
        words += ["--checkpoint_step_interval=0"]
        variables = {
            "PYTHONPATH": str(folder),
            "FAULT_CASE": json.dumps({**case, "kind": "ecc", "action": action}),
            "FAULT_NOTES": str(notes),
            "HF_HOME": str(place / "hf"),
        }
        code, output = warm_processes().train(words, variables)
        report.faults += 1
        told = f"{action} on rank {case['rank']} of {ranks} after step {case['step']}"
        _judge(report, told, code, output, notes, directory, ranks, action)
    print(f"      D4: seconds from fault to stop: {distribution(TIMES)}", flush=True)
    return report


def _judge(report: Report, told: str, code: int, output: str, notes: Path, directory: Path, ranks: int, action: str) -> None:
    lines = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    ended = {line["rank"]: line for line in lines if line["what"] == "ended"}
    began = [line["time"] for line in lines if line["what"] == "reported"]
    report.expect(code == 5, f"{told}: exit code {code}: {output[-300:]}")
    report.expect(len(began) == 1 and len(ended) == ranks, f"{told}: {len(ended)} ranks have ended")
    if not began or not ended:
        return
    seconds = max(line["time"] for line in ended.values()) - began[0]
    TIMES.append(seconds)
    report.expect(len({line["step"] for line in ended.values()}) == 1, f"{told}: ranks stop at different steps: {ended}")
    report.expect(seconds < LIMIT_SECONDS, f"{told}: {seconds:.1f} s to the stop")
    entries = CheckpointStore(directory / "checkpoints").all()
    report.expect(bool(entries) and verify(entries[-1].path).ok, f"{told}: no whole checkpoint")
    if entries and entries[-1].manifest is not None:
        suspect = SUSPECT in entries[-1].manifest.flags
        report.expect(suspect == (action != "STOP_SAVED"), f"{told}: suspect is {suspect}")
        report.expect(entries[-1].step == ended[0]["step"], f"{told}: saved step {entries[-1].step}, not {ended[0]['step']}")
    report.expect(read_circuit(directory, 0).state == "open", f"{told}: the circuit is not open")
    report.expect(f'"action": "{action.lower()}"' in output, f"{told}: no line of the fault")


def distribution(seconds: list[float]) -> str:
    """Count, median, 95th percentile and maximum."""
    known = sorted(seconds)
    if not known:
        return "none"
    at = [known[min(len(known) - 1, int(share * len(known)))] for share in (0.5, 0.95)]
    return f"n={len(known)} median={at[0]:.2f} p95={at[1]:.2f} max={known[-1]:.2f}"


def paused(chance: Random, place: Path) -> Report:
    """D5: SIGSTOP of a rank: reported as a hang of that rank, as stopped, with the stacks of the others; then it goes on."""
    report, ranks = Report(), 2
    victim = chance.randrange(ranks)
    options = ("--phase_deadlines=training=3", "--phase_deadlines=first_step=60", "--checkpoint_step_interval=0")
    process = start(place, "run", ranks, 100_000, more=options)
    try:
        _pause(report, place, process, victim, chance.uniform(0, 0.3))
    finally:
        kill_tree(process.pid)
        process.wait()
    print(f"      D5: seconds from SIGSTOP to the report, with a deadline of 3: {distribution(HANG_TIMES)}", flush=True)
    return report


def _pause(report: Report, place: Path, process: subprocess.Popen[bytes], victim: int, delay: float) -> None:
    events = place / "run" / "events.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and sum(each.kind == "step" for each in read_events(events)) < 10:
        time.sleep(0.1)
    time.sleep(delay)
    ranks = workers(process.pid)
    ranks[victim].send_signal(signal.SIGSTOP)
    report.faults += 1
    told = f"SIGSTOP of rank {victim} of {len(ranks)}"
    begin = time.monotonic()
    while not (hangs := [each for each in read_events(events) if each.fields.get("hang")]) and time.monotonic() < begin + 60:
        time.sleep(0.1)
    HANG_TIMES.append(time.monotonic() - begin)
    ranks[victim].send_signal(signal.SIGCONT)
    report.expect(bool(hangs), f"{told}: no hang is reported within a minute: {tail(place, 'run')}")
    if not hangs:
        return
    message, stacks = hangs[0].text("message"), place / "run" / hangs[0].text("stacks")
    report.expect(f"for rank {victim} (" in message, f"{told}: the hang is that of another rank: {message}")
    report.expect("its process is stopped" in message, f"{told}: not reported as stopped: {message}")
    report.expect("trainer.py" in stacks.read_text(), f"{told}: no stacks of the other rank in {stacks}")
    made = sum(each.kind == "step" for each in read_events(events))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and sum(each.kind == "step" for each in read_events(events)) <= made + 3:
        time.sleep(0.1)
    now = sum(each.kind == "step" for each in read_events(events))
    report.expect(now > made + 3, f"{told}: the run does not go on after SIGCONT: {tail(place, 'run')}")


def slow_ranks(chance: Random, place: Path) -> Report:
    """D6: forward passes of twice the time are found, noise of 15 % is not, on 2 to 64 ranks."""
    report = Report()
    for _ in range(40):
        ranks, scores = chance.choice((2, 3, 4, 8, 16, 64)), Stragglers()
        slow, usual = chance.randrange(ranks), chance.uniform(0.001, 10)
        noise = [[usual * chance.uniform(0.85, 1.15) for _ in range(ranks)] for _ in range(63)]
        false = [found for window in noise[:60] if (found := scores.update(dict(enumerate(window))))]
        report.expect(not false, f"noise on {ranks} ranks is reported: {false}")
        last = [scores.update({rank: each * (1 + (rank == slow)) for rank, each in enumerate(window)}) for window in noise[60:]]
        told = [rank for window in last for rank in window]  # before the third, where a window of noise counts too
        report.expect(told == [slow], f"rank {slow} of {ranks} is slow: {last}")
        report.faults += 1
    return report


SOFTWARE = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.AcceleratorError("CUDA error: out of memory"),
    torch.AcceleratorError("CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"),
    torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"),
    torch.AcceleratorError("CUDA error: invalid configuration argument"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm`"),
    RuntimeError("Expected all tensors to be on the same device"),
    MemoryError(),
    ValueError("an illegal memory access was encountered"),
)
HARDWARE = (
    torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
)


def software(chance: Random, place: Path) -> Report:
    """D7: out of memory, assertions and wrong arguments are no faults of a device; real ones are."""
    report = Report(faults=len(SOFTWARE))
    for error in SOFTWARE:
        report.expect(not is_fault(error) or is_out_of_memory(error), f"counts as a fault of the device: {error!r}")
    for error in HARDWARE:
        report.expect(is_fault(error), f"does not count as a fault of the device: {error!r}")
    return report


def loops(chance: Random, place: Path) -> Report:
    """D8: the fourth start after three faults of one kind without progress is refused; any progress, or a reset, allows it."""
    report = Report()
    for number in range(30):
        directory = place / str(number)
        directory.mkdir()
        faults = [
            (chance.choice(("ecc", "lost")), chance.choice((None, 5, 6)), chance.choice(("here", "there"))) for _ in range(9)
        ]
        for kind, resumed, host in faults:
            open_circuit(directory, 0, CircuitFault(kind=kind, time=0, step=9, host=host, rank=0, resumed=resumed))
            report.faults += 1
            mine = [each for each in faults[: len(read_circuit(directory, 0).faults)] if each[2] == "here"][-3:]
            expected = len(mine) == 3 and len(set(mine)) == 1
            found = repeated_fault(read_circuit(directory, 0), "here") is not None
            report.expect(found == expected, f"after {mine} a start is {'refused' if found else 'allowed'}")
        reset_circuit(directory, 0)
        report.expect(repeated_fault(read_circuit(directory, 0), "here") is None, "refused after the reset")
    return report
