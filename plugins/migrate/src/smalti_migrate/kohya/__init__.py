"""Importing from kohya's sd-scripts."""
