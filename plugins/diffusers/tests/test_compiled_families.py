"""Blocks of every family compile to whole graphs, and to few: adapted, sharded, recomputed, on a part of the tokens, in bf16.

What is traced is what a GPU gets: torch.compile sees no attention that is the CPU's own.
"""

import pytest

from support.forked_ranks import forked_processes

FAMILIES = ("auraflow", "flux", "flux2", "lumina2", "pixart", "qwen_image", "sana", "sd3", "sdxl", "z_image")
WHOLE = ("lumina2", "sana", "sdxl", "z_image")
"""Their tokens cannot be split."""
MOST = {"sdxl": 9}
"""Graphs for one size of images; of others 4. Blocks of a U-Net differ in their widths."""
FLAGS = (
    *("--use_cpu", "--num_processes=1", "--fsdp_enable", "--fsdp_activation_checkpointing", "--mixed_precision=bf16"),
    *("--model_type=lora", "--lora_rank=4", "--dynamo_backend=eager", "--accelerate_config=none"),
    *("--vae_dtype=fp32", "--text_encoder_dtype=fp32", "--tokenizer_max_length=23"),
)
_kept = {}
"""In the other process: what joins its group, which happens once."""


def traced(folder, name, split):
    """Graphs and breaks of one forward and backward pass, and how many blocks there are."""
    import torch
    import torch.distributed as dist
    from torch._dynamo.utils import counters

    from smalti.config.resolution import resolve
    from smalti.models import context_plan
    from smalti.plugins.discovery import load_plugins
    from smalti.plugins.lookup import choose_distributed, find_family
    from smalti.plugins.schema import schema_of
    from smalti.training.build_run import build_model, open_parallel, wrap_model
    from smalti_fsdp2.context import split_context
    from smalti_testing.family_subject import SIZE, FamilySubject, encode

    plugins = load_plugins()
    given = (*FLAGS, f"--model_family={name}", f"--pretrained_model_name_or_path={folder}")
    config = resolve(schema_of(plugins), given, environment={})
    plan = choose_distributed(config, plugins)
    if "parallel" not in _kept:
        _kept["parallel"] = open_parallel(plan, config)
    family = find_family(config, plugins)
    torch._dynamo.reset()
    counters.clear()
    model, blocks = build_model(config, plugins, family)
    if split:
        split_context(model, context_plan(family, model), dist.group.WORLD, "allgather")
    model = wrap_model(config, plugins, plan, _kept["parallel"], family, model, blocks, seed=0).train()
    subject = FamilySubject(family)
    noisy = torch.randn(subject.latents.shape)
    conditioning = encode(family, subject.captions, [SIZE] * len(subject.captions), *subject.size)
    with torch.autocast("cpu", torch.bfloat16):
        family.forward(model, noisy, torch.tensor([100.0, 500.0, 900.0]), conditioning).square().mean().backward()
    assert any(parameter.grad is not None for parameter in model.parameters())
    return counters["stats"]["unique_graphs"], dict(counters["graph_break"]), len(blocks)


@pytest.fixture(scope="module")
def rank():
    with forked_processes(ranks=1, group=False, imports=["diffusers"]) as process:
        yield process


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_are_whole_graphs_and_few(rank, tmp_path, name):
    import tiny  # here, because the other process imports this file and does not find it

    [(graphs, breaks, blocks)] = rank.run(traced, getattr(tiny, name)(tmp_path), name, name not in WHOLE)
    assert breaks == {}
    assert 0 < graphs <= min(blocks, MOST.get(name, 4))
