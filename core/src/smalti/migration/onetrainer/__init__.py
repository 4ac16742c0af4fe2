"""Importing from OneTrainer."""
