from .console import (
    LINE_SECONDS as LINE_SECONDS,
    Display as Display,
    PhaseProgress as PhaseProgress,
    Progress as Progress,
    open_display as open_display,
    speed as speed,
)
