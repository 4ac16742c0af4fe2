from .choices import Choice as Choice, choices as choices, configured as configured
from .counted import facts_of as facts_of
from .facts import ModelFacts as ModelFacts
from .formulas.run_facts import RunFacts as RunFacts
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
from .report import (
    RIGHT as RIGHT,
    TITLES as TITLES,
    described as described,
    document as document,
    flags as flags,
    parts as parts,
    row as row,
)
from .verdict import Verdict as Verdict, verdict_of as verdict_of
