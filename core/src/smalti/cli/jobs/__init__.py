"""The command that writes jobs for schedulers."""
