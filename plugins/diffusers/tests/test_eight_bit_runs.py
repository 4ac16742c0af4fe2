"""Real runs of a LoRA of a tiny Flux beside a base in 8 bits: in one process, sharded over two, streamed, resumed."""

import json
import shutil

import pytest
import tiny

from smalti.checkpoint.conversion.formats import OwnCheckpoint
from smalti_export.folder import TrainedWeights
from support.whole import only_whole, some

STEPS = 2
PRECISIONS = ("int8-rowwise", "fp8-rowwise")
LORA = {
    "model_family": "flux",
    "model_type": "lora",
    "lora_rank": 4,
    "mixed_precision": "bf16",
    "learning_rate": 5e-2,
    "max_train_steps": STEPS,
    "checkpoint_step_interval": 1,
    "validation_step_interval": 0,
    "gradient_checkpointing": True,
    "train_batch_size": 2,
    "resolution": 32,  # 16 tokens
    "allow_dataset_oversubscription": True,
}
ONE = {"gradient_accumulation_steps": 2}
TWO = {"num_processes": 2}
SHARDED = {"fsdp_enable": True, "gradient_checkpointing": False, "fsdp_activation_checkpointing": True}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.flux(tmp_path_factory.mktemp("eight") / "base")


@pytest.fixture(scope="module")
def start(base, train):
    """start(name, precision, option=value, ...) -> exit code, output, and the directory of a run; each is made once."""
    made = {}

    def run(name, precision, **options):
        if name not in made:
            words = LORA | {"pretrained_model_name_or_path": base, "base_model_precision": precision} | options
            made[name] = train(base.parent / name, **words)
        return *made[name], base.parent / name

    return run


def result(run):
    """The losses of a run, and its adapter."""
    code, output, directory = run
    assert code == 0, output
    events = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    losses = [event["loss"] for event in events if event["type"] == "step"]
    trained = TrainedWeights(OwnCheckpoint(directory / "checkpoints" / f"step-{STEPS:08}"), use_ema=False, precision="fp32")
    return losses, {name: bytes(trained.read(name)) for name in trained.tensors}


PARTS = {
    "replicated": (PRECISIONS[0], TWO),
    "sharded": (PRECISIONS[0], TWO | SHARDED),
    "streamed": (PRECISIONS[0], ONE | {"stream_base": True}),
    "sharded-fp8": (PRECISIONS[1], TWO | SHARDED),
}


@pytest.mark.parametrize("parts", some(PARTS, "sharded", "streamed"))
def test_ranks_that_have_parts_of_the_base_train_what_one_with_all_of_it_does(parts, start, request):
    """Bit for bit: two ranks have the micro-batches of one, and a sum of two has one order."""
    precision, options = PARTS[parts]
    whole = result(start(precision, precision, **ONE))
    assert result(start(request.node.name, precision, **options)) == whole


@only_whole(
    "plugins/diffusers/tests/test_eight_bit_runs.py::test_ranks_that_have_parts_of_the_base_train_what_one_with_all_of_it_does"
)
def test_deepspeed_shards_a_base_in_8_bits_as_it_is(start):
    """ZeRO 3 casts floating-point weights to the type of the run, here fp32."""
    whole = result(start("fp32", PRECISIONS[0], **ONE, mixed_precision="no"))[0]
    stage3 = json.dumps({"zero_optimization": {"stage": 3}})
    sharded = result(start("zero3", PRECISIONS[0], **TWO, mixed_precision="no", deepspeed_config=stage3))[0]
    assert sharded == pytest.approx(whole, rel=1e-5)


def test_products_in_8_bits_give_other_numbers(start):
    found = [result(start(precision, precision, **ONE))[0] for precision in ("no_change", *PRECISIONS)]
    assert found[0][0] not in (found[1][0], found[2][0])
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], rel=0.01)


def test_a_sharded_run_is_resumed_in_one_process_bit_for_bit(start):
    _, _, directory = start("sharded", PRECISIONS[0], **TWO, **SHARDED, max_train_steps=1)
    shutil.copytree(directory / "checkpoints", directory.parent / "resumed" / "checkpoints")
    code, output, resumed = start("resumed", PRECISIONS[0], **ONE)
    whole = result(start(PRECISIONS[0], PRECISIONS[0], **ONE))
    losses, adapter = result((code, output, resumed))
    assert "at step 1" in output
    assert (losses, adapter) == (whole[0][1:], whole[1])


def test_a_run_does_not_resume_with_another_precision(start):
    _, _, directory = start(PRECISIONS[0], PRECISIONS[0], **ONE)
    for precision in ("no_change", "fp8-rowwise"):
        other = directory.parent / f"other-{precision}"
        shutil.copytree(directory / "checkpoints", other / "checkpoints")
        before = sorted(other.rglob("*"))
        code, output, _ = start(other.name, precision, **ONE, max_train_steps=3)
        assert (code, "holds another adapter" in output) == (8, True), output
        assert set(before) <= set(other.rglob("*"))
