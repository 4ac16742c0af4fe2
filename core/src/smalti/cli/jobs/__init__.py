"""The commands that write jobs for schedulers."""
