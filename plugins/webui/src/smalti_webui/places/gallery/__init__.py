"""The validation images of a run: prompt by step, thumbnails, settings."""
