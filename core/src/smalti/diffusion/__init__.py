"""The mathematics of diffusion training: what is added, what is predicted, what a mistake costs, and how to sample."""
