"""smalti's own training, saving, sampling and resuming on accelerators that are not there.

`fake_cuda` makes a torch without CUDA believe in any number of devices, on which fake tensors live; `watching` writes down what
happens to them; `ordering` reads from that whether streams wait for each other; `cluster` stands in for the other ranks;
`rehearsal` builds and trains a run. Kernels, NCCL, fragmentation and hangs are for machines that have a device.
"""
