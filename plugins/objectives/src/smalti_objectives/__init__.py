"""Losses beyond denoising: masked and weighted images."""
