from .records import (
    Candidate as Candidate,
    DeviceModel as DeviceModel,
    MemoryParts as MemoryParts,
    Operations as Operations,
    PhasePeak as PhasePeak,
    Rehearsal as Rehearsal,
    RehearsalError as RehearsalError,
    Traffic as Traffic,
)
