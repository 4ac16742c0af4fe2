"""The layout of a checkpoint on disk. Imports no torch."""
