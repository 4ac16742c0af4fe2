"""What a pipeline draws, beside what the validation of a run drew."""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

PROMPT = "a red square"


def difference(pipeline, run: Path, step: int = 2, edge: int = 16) -> float:
    """The largest difference of what the pipeline draws to the picture of the run's validation, in 255ths."""
    pipeline.set_progress_bar_config(disable=True)
    seed = json.loads((run / "launch.json").read_text())["values"]["validation_seed"]
    drawn = pipeline(
        prompt=PROMPT,
        width=edge,
        height=edge,
        num_inference_steps=2,
        guidance_scale=3.0,
        generator=torch.Generator().manual_seed(seed),
        max_sequence_length=512,
        output_type="np",
    ).images[0]
    (path,) = (run / "samples" / f"{step:08d}").glob("00-*.png")
    return float(np.abs(drawn * 255 - np.asarray(Image.open(path), dtype=np.float32)).max())
