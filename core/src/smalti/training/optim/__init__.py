"""What moves the weights: optimizers, the learning rate, EMA."""
