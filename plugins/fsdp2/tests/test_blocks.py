"""Blocks of named classes, and the description of all that a model repeats."""

from dataclasses import replace

import pytest
from torch import nn

from smalti.errors import UserError
from smalti.models import BlockClass, find_blocks, without_weights
from smalti_fsdp2.blocks import blocks_named, describe_blocks
from support.nets import Net


def empty() -> Net:
    with without_weights():
        return Net()


def test_named_blocks_are_those_of_their_classes():
    assert blocks_named(empty(), ["Block"]) == find_blocks(empty(), ["Block"])


@pytest.mark.parametrize("name", ["Blok", "Net", "ModuleList"])
def test_a_class_that_is_no_part_of_the_model_is_told_with_those_that_are(name):
    with pytest.raises(UserError) as raised:
        blocks_named(empty(), ["Block", name])
    assert raised.value.message == f"the model has no part of a class {name!r}"
    assert raised.value.fix.endswith("the model is made of Attention, Block, Linear")
    assert raised.value.fix.startswith("did you mean Block?") == (name == "Blok")


def test_a_description_counts_recursively_and_lists_what_is_inside_blocks_too():
    structure = describe_blocks(empty())
    block = BlockClass(
        class_name="Block",
        occurrences=3,
        parameters=120,
        share=120 / 144,
        smallest=40,
        largest=40,
        first="blocks.0",
        last="blocks.2",
        named=False,
        nested=False,
    )
    inner = {"class_name": "Attention", "occurrences": 6, "smallest": 20, "largest": 20, "nested": True}
    inner |= {"first": "blocks.0.parts.0", "last": "blocks.2.parts.1"}
    assert structure.classes == (replace(block, **inner), block)
    assert (structure.suggested, structure.blocks, structure.largest_block) == (("Block",), 3, 40)
    assert (structure.parameters, structure.outside, structure.buffers) == (144, 24, 4)


def test_the_familys_classes_are_the_suggestion_and_need_not_repeat():
    structure = describe_blocks(empty(), ("Attention",))
    assert (structure.suggested, structure.blocks) == (("Attention",), 6)
    assert {each.class_name: (each.named, each.nested) for each in structure.classes} == {
        "Attention": (True, False),
        "Block": (False, False),
    }


def test_parameters_that_blocks_share_count_once():
    with without_weights():
        model = Net()
        shared = model.blocks[0].parts[0].project
        for block in model.blocks:
            block.parts[0].project = shared
    structure = describe_blocks(model)
    assert (structure.classes[0].parameters, structure.parameters, structure.outside) == (80, 104, 24)


def test_a_model_without_repetition_is_outside_of_all_blocks():
    structure = describe_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert (structure.classes, structure.suggested, structure.outside) == ((), (), 6)
