"""What schedulers say: the nodes of a job (`environment`), and the state of a SLURM job and its nodes (`slurm`)."""
