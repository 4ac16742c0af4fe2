"""Preservation of what a model could before its adapter, masks, and ranges of noise levels. Importing this imports no torch."""
