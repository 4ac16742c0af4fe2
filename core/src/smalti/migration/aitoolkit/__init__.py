"""Importing from ai-toolkit."""
