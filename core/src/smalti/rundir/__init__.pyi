from .directory import (
    CONTACT_SHEET as CONTACT_SHEET,
    ENDINGS as ENDINGS,
    POLL_SECONDS as POLL_SECONDS,
    Condition as Condition,
    Request as Request,
    RequestKind as RequestKind,
    RunDirectory as RunDirectory,
    Status as Status,
    Summary as Summary,
    find_runs as find_runs,
    overview as overview,
    phase_of as phase_of,
    shown_loss as shown_loss,
    watch_doubtful as watch_doubtful,
)
from .events import (
    Event as Event,
    EventKind as EventKind,
    EventWriter as EventWriter,
    SmoothedMetrics as SmoothedMetrics,
    read_events as read_events,
    read_events_backwards as read_events_backwards,
    seconds_for as seconds_for,
    to_json as to_json,
)
from .heartbeat import (
    PREFLIGHT_REPORT as PREFLIGHT_REPORT,
    STALE_SECONDS as STALE_SECONDS,
    visible_seconds as visible_seconds,
    wait_for_directory as wait_for_directory,
)
from .ownership import Ownership as Ownership
from .phases import Phase as Phase, PhaseName as PhaseName, Phases as Phases
from .writer import (
    ATTEMPT_VARIABLE as ATTEMPT_VARIABLE,
    GROUP_VARIABLE as GROUP_VARIABLE,
    STOPPED_EARLY as STOPPED_EARLY,
    RunWriter as RunWriter,
    acquire as acquire,
    join as join,
)
