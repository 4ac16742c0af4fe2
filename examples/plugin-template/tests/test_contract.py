"""smalti's own tests of what a plugin and a model family must do. Install this package, then run pytest."""

from smalti_pebble.family import PebbleFamily

from smalti.testing.pytest import FamilyContract, PluginContract


class TestPlugin(PluginContract):
    plugin = "pebble"


class TestFamily(FamilyContract):
    def family(self) -> PebbleFamily:
        return PebbleFamily(width=8, depth=2)
