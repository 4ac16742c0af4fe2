"""The commands that plan runs and write jobs for schedulers."""
