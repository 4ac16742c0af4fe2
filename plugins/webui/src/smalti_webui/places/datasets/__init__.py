"""Datasets: what a configuration trains on, its images and captions."""
