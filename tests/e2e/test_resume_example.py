"""The example of a killed and resumed run: both launches make the same steps, and the figure shows what the events say."""

import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from support.forked_popen import run_forked

EXAMPLE = Path(__file__).parents[2] / "examples" / "resume"


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(EXAMPLE))
    try:
        import kill_and_resume
    finally:
        sys.path.remove(str(EXAMPLE))
    return kill_and_resume


def test_one_process_makes_the_steps_of_four(example, pictures, tmp_path):
    for flags, ranks in (((), 4), (example.ONE_PROCESS, 1)):
        few = (f"--instance_data_dir={pictures}", "--allow_dataset_oversubscription")
        command = example.train(tmp_path / "run", *flags, *few, "--dry-run", "--json")
        plan = json.loads(run_forked(command, timeout=120).stdout)
        assert (plan["effective_batch"], len(plan["launch"]["ranks"])) == (16, ranks)


def test_the_figure_has_the_losses_of_whole_lines_only(example, tmp_path):
    lines = [json.dumps({"type": "step", "step": step, "loss": 1 / step}) for step in range(1, 6)]
    (tmp_path / "events.jsonl").write_text('{"type":"state","step":null}\n' + "\n".join(lines) + '\n{"type":"st')
    losses = example.losses(tmp_path, skip=1)
    assert losses == [(2, 1 / 2), (3, 1 / 3), (4, 1 / 4), (5, 1 / 5)]
    whole = dict(losses)
    result = example.Comparison(whole=whole, before={2: 0.5, 3: 0.4}, after={3: 0.35, 4: 0.25, 5: 0.2})
    assert result.difference == pytest.approx(0.05)
    example.draw(result, tmp_path / "resume.png")
    with Image.open(tmp_path / "resume.png") as figure:
        assert figure.size == (900, 360)
