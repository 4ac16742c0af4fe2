"""Blocks of every family compile to whole graphs, and to few: adapters or all weights, sharded, recomputed, on a part of the
tokens, in bf16, for one size of images and for several.

What is traced is what a GPU gets: torch.compile sees no attention that is the CPU's own.
"""

import pytest

from support.forked_ranks import forked_processes
from support.whole import some

FAMILIES = (
    *(
        "anima",
        "auraflow",
        "bria",
        "chroma",
        "ernie",
        "flux",
        "flux2",
        "ideogram",
        "krea2",
        "longcat_image",
        "lumina2",
        "ovis_image",
        "pixart",
        "qwen_image",
        "qwen_image21",
    ),
    *("sana", "sd3", "sdxl", "z_image"),
)
WHOLE = ("anima", "chroma", "ernie", "ideogram", "krea2", "lumina2", "qwen_image21", "sana", "sdxl", "z_image")
"""Their tokens cannot be split."""
MOST = {"sdxl": 9}
"""Graphs for one size of images; of others 4. Residual blocks of this U-Net have seven pairs of widths: a graph each."""
ADAPTER = ("--model_type=lora", "--lora_rank=4")
ALL_WEIGHTS = ("--model_type=full",)
SIZES = ((3, 2), (4, 3), (5, 4))
"""Of images, in units of the family."""
FLAGS = (
    *("--use_cpu", "--fsdp_enable", "--fsdp_activation_checkpointing", "--mixed_precision=bf16"),
    *("--dynamo_backend=eager", "--accelerate_config=none"),
    *("--vae_dtype=fp32", "--text_encoder_dtype=fp32", "--tokenizer_max_length=29"),
)
_kept = {}
"""In the other process: what joins its group, which happens once."""


def traced(folder, name, split, flags=ADAPTER, edges=SIZES[:1]):
    """Graphs after a forward and a backward pass for each of these sizes, breaks, and how many blocks there are; on a rank."""
    import os

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
    ranks = int(os.environ["WORLD_SIZE"])
    given = (*FLAGS, *flags, f"--num_processes={ranks}", f"--model_family={name}", f"--pretrained_model_name_or_path={folder}")
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
    batch, channels, height, width = subject.latents.shape  # of 3 x 2 units
    graphs = []
    for columns, rows in edges:
        noisy = torch.randn(batch, channels, height // 2 * rows, width // 3 * columns)
        size = columns * family.alignment, rows * family.alignment
        conditioning = encode(family, subject.captions, [SIZE] * batch, *size)
        with torch.autocast("cpu", torch.bfloat16):
            family.forward(model, noisy, torch.tensor([100.0, 500.0, 900.0]), conditioning).square().mean().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert any(parameter.grad is not None for parameter in model.parameters())
    return graphs, dict(counters["graph_break"]), len(blocks)


@pytest.fixture(scope="module")
def rank():
    with forked_processes(ranks=1, group=False, imports=["diffusers"]) as process:
        yield process


def pipeline(name, folder):
    import tiny  # here, because the other process imports this file and does not find it

    return getattr(tiny, name)(folder)


@pytest.mark.parametrize("name", some(FAMILIES, "flux"))
def test_blocks_are_whole_graphs_and_few(rank, tmp_path, name):
    split = name not in WHOLE
    [(graphs, breaks, blocks)] = rank.run(traced, pipeline(name, tmp_path), name, split, edges=SIZES[: 1 if split else 3])
    assert breaks == {}
    assert 0 < graphs[0] <= min(blocks, MOST.get(name, 4))
    if not split:
        assert_sizes_share(graphs)


@pytest.mark.parametrize(("name", "flags"), some([("flux", ALL_WEIGHTS), ("qwen_image", ADAPTER)], ("qwen_image", ADAPTER)))
def test_sizes_share_graphs_where_tokens_are_not_split(rank, tmp_path, name, flags):
    [(graphs, breaks, _)] = rank.run(traced, pipeline(name, tmp_path), name, False, flags, SIZES)
    assert breaks == {}
    assert_sizes_share(graphs)


def assert_sizes_share(graphs):
    """From the second size on a graph is for all sizes."""
    first, second, third = graphs
    assert first <= second <= 2 * first
    assert third == second


def test_ranks_that_split_tokens_compile_whole_graphs(tmp_path):
    with forked_processes(ranks=2, group=False, imports=["diffusers"]) as ranks:
        found = ranks.run(traced, pipeline("auraflow", tmp_path), "auraflow", True, edges=((4, 2),))
    assert [(graphs, breaks) for graphs, breaks, _ in found] == [([2], {})] * 2
