"""An adapter that is merged into its base: a pipeline that predicts as the model with the adapter does."""

import json

import pytest
import torch
from adapters import FAMILIES, make_adapter, opened
from diffusers import DiffusionPipeline
from safetensors.torch import load_file

from smalti import UserError
from support.whole import some


def part(folder, made):
    return opened(folder).components[made.subject.family.part]


@pytest.mark.parametrize("name", some(FAMILIES, "flux", "qwen_image", "sdxl"))
def test_the_merged_pipeline_predicts_as_the_model_with_the_adapter(tmp_path, name):
    made = make_adapter(tmp_path, name)
    expected = made.predict(made.model)
    merged, base = (made.predict(part(folder, made)) for folder in (made.export(tmp_path / "whole", merge=True), made.base))
    assert (expected - base).norm() > 100 * (expected - merged).norm()


def test_adapters_of_convolutions_are_merged_in_files_of_the_size_asked_for(tmp_path):
    made = make_adapter(tmp_path, "sdxl", "--lora_targets=conv1,to_q,proj_in")
    folder = made.export(tmp_path / "whole", merge=True, largest_file=200_000)
    assert len(list((folder / "unet").glob("*-of-*.safetensors"))) > 2
    torch.testing.assert_close(made.predict(part(folder, made)), made.predict(made.model), atol=1e-4, rtol=0)


def test_merged_weights_keep_the_type_of_the_base_and_are_rounded_once(tmp_path):
    made = make_adapter(tmp_path, "flux")
    (file,) = (made.base / "transformer").glob("*.safetensors")
    before = load_file(file)
    base = make_adapter(tmp_path / "half", "flux", base=half(made.base))
    (written,) = (base.export(tmp_path / "whole", merge=True) / "transformer").glob("*.safetensors")
    merged = load_file(written)
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    layer = "transformer_blocks.0.attn.to_q"
    exact = before[f"{layer}.weight"].bfloat16().float() + base.deltas[layer]
    assert torch.equal(merged[f"{layer}.weight"], exact.bfloat16())
    assert torch.equal(merged["proj_out.weight"], before["proj_out.weight"].bfloat16())


def half(folder):
    DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder.parent / "bf16")
    return folder.parent / "bf16"


def test_the_other_parts_are_those_of_the_base(tmp_path):
    made = make_adapter(tmp_path, "pixart")
    folder = made.export(tmp_path / "whole", merge=True)
    frozen = [path for path in made.base.rglob("*") if path.is_file() and path.parent.name != "transformer"]
    assert frozen
    assert [path for path in frozen if (folder / path.relative_to(made.base)).read_bytes() != path.read_bytes()] == []
    assert "lora" not in json.dumps(json.loads((folder / "transformer" / "config.json").read_text()))


def test_merging_into_a_format_of_adapters_is_refused(tmp_path):
    with pytest.raises(UserError, match="--merge exports a complete pipeline"):
        make_adapter(tmp_path, "flux").export(tmp_path / "whole", merge=True, format="kohya")
