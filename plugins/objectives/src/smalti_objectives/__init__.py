"""Preservation of what a model could before its adapter, and ranges of noise levels. Importing this imports no torch."""
