"""Checkpoints: one format for every backend, whole or not there, checked by digest before use, without pickle.

```
checkpoints/step-00000500/
  model/*.safetensors  optimizer/*.safetensors  ema/*.safetensors
  state.json
  manifest.json
```

- `manifest`      what a checkpoint says about itself: the commit record, written last
- `tensorfile`    the header of one safetensors file
- `verification`  is this checkpoint whole?
- `store`         the directory of a run's checkpoints: list, choose, publish, rotate
- `snapshot`      what goes in and comes out
- `portable`      model and optimizer to and from the form that every backend reads
- `planning`      which rank writes which piece of which tensor
- `writer`, `reader`  save and load, on every rank together
- `staging`, `background`  a copy in host memory, and saves beside training

The first four import no torch. Tensor files have the layout of torch's own sharded safetensors checkpoints, so that
`torch.distributed.checkpoint.HuggingFaceStorageReader` reads them, on any number of ranks.
"""
