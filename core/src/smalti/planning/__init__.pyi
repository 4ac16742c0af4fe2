from .calibration import (
    STEPS as STEPS,
    Calibration as Calibration,
    calibrate as calibrate,
    calibration_of as calibration_of,
    fitted as fitted,
)
from .choices import Choice as Choice, choices as choices, configured as configured, strategies_for as strategies_for
from .counted import facts_of as facts_of
from .facts import ModelFacts as ModelFacts
from .fit import Fit as Fit, fit_of as fit_of
from .forecast import Forecast as Forecast, forecast_of as forecast_of
from .formulas.run_facts import RunFacts as RunFacts
from .formulas.time import FAST as FAST, SLOW as SLOW
from .here import named_device as named_device
from .rates import Rates as Rates, measure_rates as measure_rates
from .records import (
    Candidate as Candidate,
    MemoryParts as MemoryParts,
    Operations as Operations,
    PhasePeak as PhasePeak,
    Rehearsal as Rehearsal,
    RehearsalError as RehearsalError,
    Traffic as Traffic,
)
from .refine import (
    NOT_REHEARSED as NOT_REHEARSED,
    refined as refined,
    rehearsed as rehearsed,
    replaced as replaced,
    worth_rehearsing as worth_rehearsing,
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
