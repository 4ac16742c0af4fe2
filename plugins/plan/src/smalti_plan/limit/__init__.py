"""`--fit`: the fastest way to train within a limit of memory, chosen before a launch and kept by the run."""
