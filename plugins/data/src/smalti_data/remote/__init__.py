"""Runs in object stores: their checkpoints are listed, read and downloaded through the storages of plugins."""
