"""Ray as the place of a run: its cluster holds the ranks."""
