"""What a training needs is encoded before it, in shares that run at the same time; the training then encodes nothing."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.forked_popen import run_forked

GATED = Path(__file__).parent / "gated"


def test_a_training_encodes_nothing_that_shares_have_encoded(pictures, tmp_path, launch):
    path = os.pathsep.join(filter(None, (str(GATED), os.environ.get("PYTHONPATH"))))
    cache = tmp_path / "cache"
    entry = {"id": "pets", "instance_data_dir": str(pictures), "resolution": 16, "resolution_type": "pixel"}
    (tmp_path / "data.json").write_text(json.dumps([entry]))
    options = {"data_backend_config": tmp_path / "data.json", "model_family": "gated", "cache_dir": cache, "max_train_steps": 2}
    options |= {"validation_prompt": "a cat", "validation_negative_prompt": "blurred", "train_batch_size": 2}

    def encode(share: str):
        words = [f"--{name}={value}" for name, value in options.items()]
        call = [sys.executable, "-m", "smalti", "cache", "encode", "--use_cpu", *words, f"--share={share}", "--json"]
        return run_forked(call, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path)

    def packs() -> set[str]:
        return {str(file.relative_to(cache)) for file in cache.glob("*/*.safetensors")}

    with ThreadPoolExecutor() as pool:
        done = list(pool.map(encode, ("1/2", "2/2")))
    assert [one.returncode for one in done] == [0, 0], done
    shares = [json.loads(one.stdout) for one in done]
    assert all(one["images_encoded"] == one["images"] > 0 for one in shares)
    assert all(one["texts_encoded"] == one["texts"] for one in shares)
    assert "images" in done[0].stderr or "latents" in done[0].stderr

    written = packs()
    again = json.loads(encode("2/2").stdout)
    assert (again["images"], again["images_encoded"], again["texts_encoded"]) == (shares[1]["images"], 0, 0)
    refused = encode("3/2")
    assert (refused.returncode, "K/N with K from 1 to N" in refused.stderr) == (2, True)

    finished = launch(tmp_path / "run", probe=False, variables={"PYTHONPATH": path}, instance_data_dir=None, **options)
    assert finished.code == 0, finished.output
    assert packs() == written
