"""Columns of batches: the masks of images, and the weight of each in the loss."""
