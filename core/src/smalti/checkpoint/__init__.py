"""Checkpoints: one format for every backend, whole or not there, checked by digest before use, without pickle.

```
checkpoints/step-00000500/
  model/*.safetensors  optimizer/*.safetensors  ema/*.safetensors  [weights/*.safetensors]
  state.json
  manifest.json
```

- `manifest`      what a checkpoint says about itself: the commit record, written last
- `statefile`     state.json: what is no tensor
- `tensorfile`    the header of one safetensors file
- `assembly`      whole tensors out of the pieces in such files
- `recording`     one file written, its digest taken on the way
- `verification`  is this checkpoint whole?
- `store`         the directory of a run's checkpoints: list, choose, publish, rotate
- `consolidated`  whole weights in the files that diffusers and transformers load
- `formats`, `foreign`, `conversion`  checkpoints of other makers: told apart, read in a process of their own, converted
- `snapshot`      what goes in and comes out
- `portable`      model and optimizer to and from the form that every backend reads
- `planning`      which rank writes which piece of which tensor
- `writer`, `reader`  save and load, on every rank together
- `staging`, `background`  a copy in host memory, and saves beside training

All above `snapshot` import no torch. Tensor files have the layout of torch's own sharded safetensors checkpoints, so that
`torch.distributed.checkpoint.HuggingFaceStorageReader` reads them, on any number of ranks.
"""
