"""Options of Ray's launches among those of the core."""

from support.fixtures import no_settings_from_outside as no_settings_from_outside
