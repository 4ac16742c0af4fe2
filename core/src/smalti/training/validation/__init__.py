"""Validation images, the loss on held-out images, the model in eval mode."""
