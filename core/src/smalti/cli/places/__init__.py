"""Arguments of commands that are places: folders, or URLs."""
