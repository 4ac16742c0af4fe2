"""Validation images, also of the model before training, and the loss on held-out images."""
