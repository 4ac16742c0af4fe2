"""The built-in plugins: the first users of the hooks, registered like any other."""
