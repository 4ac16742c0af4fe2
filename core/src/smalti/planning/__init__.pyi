from .records import (
    Candidate as Candidate,
    MemoryParts as MemoryParts,
    Operations as Operations,
    PhasePeak as PhasePeak,
    Rehearsal as Rehearsal,
    RehearsalError as RehearsalError,
    Traffic as Traffic,
)
from .rehearsal.rehearse import rehearse as rehearse
