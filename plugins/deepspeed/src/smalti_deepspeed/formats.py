"""How checkpoints of DeepSpeed are recognized by their files. Imports no torch."""

from __future__ import annotations

from smalti import CheckpointFormat

_FILES = ("mp_rank_*_model_states.pt", "zero_pp_rank_*_model_states.pt")

FORMATS = (
    CheckpointFormat(
        name="deepspeed",
        title="DeepSpeed's save_checkpoint, or Accelerate's save_state with DeepSpeed",
        marks=(*_FILES, *(f"*/{file}" for file in _FILES)),
        factory="smalti_deepspeed.conversion:open_deepspeed",
    ),
)
