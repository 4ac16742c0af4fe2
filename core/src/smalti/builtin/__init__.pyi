from .console import (
    LINE_SECONDS as LINE_SECONDS,
    Display as Display,
    PhaseProgress as PhaseProgress,
    Progress as Progress,
    duration as duration,
    open_display as open_display,
    speed as speed,
)
