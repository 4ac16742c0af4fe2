"""What a run of one process on a folder of images loads of the core."""

import subprocess
import sys

from PIL import Image

MOST = 184
"""Modules of the core: lower the number with them. Two came with the terms and columns of the loss."""
TRAIN = """
import sys
from smalti.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert end.code == 0, end.code
print(sum(name.startswith("smalti.") for name in sys.modules))
"""


def test_a_run_of_one_process_loads_what_it_needs(tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(4):
        Image.new("RGB", (64, 64), (number * 60, 0, 0)).save(photos / f"{number}.png")
        (photos / f"{number}.txt").write_text("a square")
    words = ("--plugins=toy", "--model_family=toy", f"--instance_data_dir={photos}", f"--output_dir={tmp_path / 'run'}")
    words += ("--resolution=64", "--max_train_steps=2", "--train_batch_size=2", "--use_cpu")
    command = [sys.executable, "-c", TRAIN, "train", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert MOST - 10 <= int(done.stdout.split()[-1]) <= MOST
