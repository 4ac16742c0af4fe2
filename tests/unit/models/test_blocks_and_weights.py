"""Blocks found in a model's structure, and weights put into a model that has none."""

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file
from torch import nn
from torch._dynamo.utils import counters

from smalti import types
from smalti.builtin.core import Core
from smalti.errors import UserError
from smalti.models.blocks import find_blocks
from smalti.models.setup import compile_blocks, ensure_compiled
from smalti.models.weights import FolderWeights, materialise, without_weights
from support.nets import Net


class Real:
    """Weights from a model that exists."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors = model.state_dict()

    def names(self):
        return iter(self.tensors)

    def get(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def empty() -> Net:
    with without_weights():
        return Net()


def test_the_outermost_repeated_class_is_the_block_and_counts_all_that_is_in_it():
    blocks = find_blocks(empty())
    assert [(block.path, block.class_name) for block in blocks] == [(f"blocks.{number}", "Block") for number in range(3)]
    assert {block.parameters for block in blocks} == {2 * (4 * 4 + 4)}


def test_named_classes_are_taken_as_they_are_named():
    assert len(find_blocks(empty(), ["Attention"])) == 6


def test_only_the_last_block_need_not_reshard():
    assert [block.reshard for block in find_blocks(empty())] == [True, True, False]


def test_a_model_without_repetition_has_no_blocks():
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []


def test_a_model_gets_its_weights_its_buffers_and_its_ties():
    real = Net()
    real.scale.fill_(7)
    model = materialise(empty(), Real(real), "cpu")
    assert all(torch.equal(tensor, real.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert model.last.weight is model.first.weight
    assert model.hidden.tolist() == [0, 1, 2]


# --- weights from files ---------------------------------------------------------------------------------------------


def saved(folder, model: nn.Module, *names: str):
    """The model's tensors in these files, in turn."""
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for place, file in enumerate(names):
        save_file({name: tensors[name] for name in list(tensors)[place :: len(names)]}, folder / file)
    return tensors


@pytest.mark.parametrize("names", [["model.safetensors"], ["a-1.safetensors", "a-2.safetensors"]])
def test_weights_come_from_all_files_of_a_folder(tmp_path, names):
    tensors = saved(tmp_path, Net(), *names)
    model = materialise(empty(), FolderWeights(tmp_path), "cpu")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())


def test_a_folder_without_safetensors_is_told(tmp_path):
    (tmp_path / "model.bin").touch()
    with pytest.raises(UserError, match="there are no safetensors weights"):
        FolderWeights(tmp_path)
    with pytest.raises(UserError, match="there are no safetensors weights"):
        FolderWeights(tmp_path / "absent")


@pytest.mark.parametrize("kept", [4, 60, -8])
def test_a_file_that_was_cut_off_is_named(tmp_path, kept):
    save_file({"first.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(
        UserError, match=r"model\.safetensors is not a valid safetensors file.*\n  fix: copy or download it again"
    ):
        FolderWeights(tmp_path)


def test_weights_of_another_size_are_refused_by_name(tmp_path):
    saved(tmp_path, Net(width=5), "model.safetensors")
    with pytest.raises(UserError, match=r"first.weight is \[5, 5\] in the weights and \[4, 4\] in the model"):
        materialise(empty(), FolderWeights(tmp_path), "cpu")


@given(start=st.integers(0, 5), length=st.integers(0, 5))
def test_rows_are_those_of_the_tensor(start, length, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "rows.safetensors"
    tensor = torch.arange(40.0).view(10, 2, 2)
    save_file({"before": torch.ones(3), "a": tensor}, path)
    assert torch.equal(FolderWeights(path).rows("a", start, start + length), tensor[start : start + length])


def test_the_digest_of_weights_is_that_of_their_contents_however_they_are_cut_into_files(tmp_path):
    tensors = {"a": torch.arange(40.0), "b": torch.ones(3, 2), "c": torch.zeros(0)}
    for name, parts in {"one": [tensors], "two": [{"a": tensors["a"]}, {"b": tensors["b"], "c": tensors["c"]}]}.items():
        (tmp_path / name).mkdir()
        for number, part in enumerate(parts):
            save_file(part, tmp_path / name / f"{number}.safetensors")
    assert FolderWeights(tmp_path / "one").digest() == FolderWeights(tmp_path / "two").digest()


def test_a_file_that_became_shorter_is_named(tmp_path):
    save_file({"a": torch.arange(40.0)}, path := tmp_path / "w.safetensors")
    weights = FolderWeights(path)
    path.write_bytes(path.read_bytes()[:-1])
    for read in (lambda: weights.get("a"), weights.digest):
        with pytest.raises(UserError, match=r"w\.safetensors ends within a.*\n  fix: copy or download it again"):
            read()


def test_the_digest_of_the_same_weights_is_that_of_earlier_versions(tmp_path):
    """What was encoded with them is found by it."""
    tensors = {"a": torch.arange(40.0), "b": torch.arange(7, dtype=torch.int8), "c": torch.zeros(0), "d": torch.tensor(1.5)}
    save_file(tensors, tmp_path / "w.safetensors")
    assert FolderWeights(tmp_path).digest().startswith("5f471b6ebe40b61d")


@pytest.mark.parametrize("place", [0, 39, 20])
def test_the_digest_of_weights_tells_other_values(tmp_path, place):
    tensor = torch.arange(40.0)
    save_file({"a": tensor}, tmp_path / "one.safetensors")
    tensor[place] += 1
    save_file({"a": tensor}, tmp_path / "other.safetensors")
    assert FolderWeights(tmp_path / "one.safetensors").digest() != FolderWeights(tmp_path / "other.safetensors").digest()


def test_weights_take_the_types_that_the_model_has(tmp_path):
    save_file({"weight": torch.ones(2, 2, dtype=torch.bfloat16), "bias": torch.ones(2)}, tmp_path / "a.safetensors")
    with without_weights():
        model = nn.Linear(2, 2)
        model.bias.data = model.bias.data.bfloat16()
    model = materialise(model, FolderWeights(tmp_path), "cpu")
    assert (model.weight.dtype, model.bias.dtype) == (torch.float32, torch.bfloat16)


# --- compilation ----------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled(configure):
    return configure("--dynamo_backend=eager")


BLOCKS = [types.Block(path=f"blocks.{number}", class_name="Part", parameters=1) for number in range(2)]


def test_blocks_that_a_strategy_left_alone_are_compiled_after_it(compiled):
    model = Net()
    ensure_compiled(nn.parallel.DataParallel(model), lambda wrapped: wrapped.module, BLOCKS, compiled, "Mine")
    assert all("forward" in vars(block) for block in model.blocks[:2])


def test_what_a_strategy_has_compiled_is_not_compiled_again(compiled):
    model = Net()
    compile_blocks(model, BLOCKS[:1], compiled)
    ensure_compiled(model, lambda wrapped: wrapped, BLOCKS, compiled, "Mine")
    assert ["forward" in vars(block) for block in model.blocks[:2]] == [True, False]


class Wide(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, tokens):
        return tokens + self.layer(tokens)


def test_blocks_of_many_widths_stay_compiled_for_sizes_and_batches_of_training_validation_and_evaluation(compiled):
    """Blocks of a class share their code, and torch counts the graphs of code."""
    counters.clear()
    model = nn.Module()
    model.blocks = nn.ModuleList(Wide(width) for width in range(2, 10))
    compile_blocks(model, [types.Block(path=f"blocks.{n}", class_name="Wide", parameters=1) for n in range(8)], compiled)
    for batch, length, learns in ((3, 4, True), (3, 5, True), (2, 6, True), (1, 5, True), (3, 4, False), (1, 6, False)):
        with torch.set_grad_enabled(learns):
            for width, block in enumerate(model.blocks, start=2):
                block(torch.randn(batch, length, width))
    assert counters["stats"]["unique_graphs"] > 16
    assert counters["unimplemented"] == {}


@pytest.mark.parametrize(("flags", "refused"), [(("--gradient_checkpointing",), 1), ((), 0)])
def test_cuda_graphs_are_refused_beside_recomputation_only(configure, flags, refused):
    config = configure("--dynamo_backend=inductor", "--dynamo_mode=reduce-overhead", *flags)
    told = [problem for problem in Core().check_config(config) if "CUDA graphs" in problem.message]
    assert [problem.fix for problem in told] == ["--dynamo_mode=default"] * refused


def test_a_strategy_that_hides_the_blocks_and_compiles_nothing_is_refused(compiled):
    with pytest.raises(UserError, match="Mine does not compile the model"):
        ensure_compiled(nn.Sequential(Net()), lambda wrapped: wrapped, BLOCKS, compiled, "Mine")
