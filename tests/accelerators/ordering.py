"""Whether what streams and the host do to the same memory is ordered: by waiting, not by luck.

Vector clocks (Fidge 1988, Mattern 1989), as ThreadSanitizer and torch's own CUDA sanitizer use them. Streams and the host run
beside each other; the host's threads count as one, because how they wait for each other leaves no trace here.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from accelerators.watching import Operation
from smalti_plan.rehearsal.devices.fake_cuda import Entry, Kind

Runner = tuple[int, int]
"""A stream: its device and number."""
Clock = dict[Runner, int]
HOST: Runner = (-1, -1)


@dataclass(frozen=True, kw_only=True)
class Access:
    runner: Runner
    tick: int
    operation: Operation

    def __str__(self) -> str:
        place = "the host" if self.runner == HOST else f"stream {self.runner[1]}"
        return f"{self.operation.name} on {place} for {self.operation.where or 'torch'}"


@dataclass
class Memory:
    write: Access | None = None
    reads: list[Access] = field(default_factory=list)


def races(trace: Iterable[Entry], operations: Sequence[Operation]) -> list[str]:
    """Pairs of accesses to one storage, one of them writing, of which nothing says that the second comes after the first."""
    found: dict[str, None] = {}
    clocks: defaultdict[Runner, Clock] = defaultdict(dict)
    events: dict[int, Clock] = {}
    memory: defaultdict[int, Memory] = defaultdict(Memory)
    for entry in trace:
        stream = (entry.device, entry.stream)
        match entry.kind:
            case Kind.RECORD:
                events[entry.value] = dict(clocks[stream])
            case Kind.BLOCK:
                _wait(clocks[stream], events.get(entry.value, {}))
            case Kind.SYNC_EVENT:
                _wait(clocks[HOST], events.get(entry.value, {}))
            case Kind.SYNC_STREAM:
                _wait(clocks[HOST], clocks[stream])
            case Kind.SYNC_DEVICE:
                for runner in [each for each in clocks if each[0] == entry.device]:
                    _wait(clocks[HOST], clocks[runner])
            case Kind.NOTE if 0 <= entry.value < len(operations):
                operation = operations[entry.value]
                runner = HOST if operation.device is None else stream
                _wait(clocks[runner], clocks[HOST])  # what is launched comes after what the host did before
                found |= dict.fromkeys(_conflicts(operation, runner, clocks[runner], memory))
                if operation.waits:
                    _wait(clocks[HOST], clocks[runner])
    return list(found)


def _wait(clock: Clock, other: Clock) -> None:
    for runner, tick in other.items():
        clock[runner] = max(clock.get(runner, 0), tick)


def _conflicts(operation: Operation, runner: Runner, clock: Clock, memory: defaultdict[int, Memory]) -> Iterator[str]:
    clock[runner] = clock.get(runner, 0) + 1
    access = Access(runner=runner, tick=clock[runner], operation=operation)

    def unordered(before: Access | None) -> bool:
        return before is not None and before.tick > clock.get(before.runner, 0)

    for number in operation.reads:
        held = memory[number]
        if unordered(held.write):
            yield f"{access} reads what {held.write} writes"
        held.reads = [each for each in held.reads if each.runner != runner] + [access]
    for number in operation.writes:
        held = memory[number]
        for before in filter(unordered, (held.write, *held.reads)):
            yield f"{access} writes what {before} uses"
        memory[number] = Memory(write=access)
