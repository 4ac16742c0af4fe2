"""Latents and conditioning that were encoded before training."""
