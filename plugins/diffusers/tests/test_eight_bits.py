"""Layers that multiply in 8 bits: their numbers against the same sums in fp64, and where there is no such product."""

import copy

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import nn

from smalti import UserError
from smalti.config.resolution import resolve
from smalti.models import find_blocks
from smalti.models.weights import without_weights
from smalti.plugins.discovery import load_plugins
from smalti.plugins.lookup import find_family
from smalti.plugins.schema import schema_of
from smalti_diffusers.lora.eight_bits import EightBitLinear, eight_bit_weights, quantised
from smalti_diffusers.lora.quantisation import check_device
from smalti_plan.counting import count_facts
from support.whole import some

TYPES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}
ERRORS = {"int8": 0.02, "e4m3": 0.05}
"""What a product of normal numbers may be off, as a share of it."""
SIZES = [(17, 16, 16), (64, 128, 256), (100, 1024, 48)]
"""Rows, in, out."""

both = pytest.mark.parametrize("kind", TYPES)


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """counted(precision) -> what a plan knows of a LoRA of a tiny Flux in bf16, and its model without weights."""
    plugins, folder = load_plugins(), tiny.flux(tmp_path_factory.mktemp("eight") / "base")

    def count(precision):
        words = ["--model_family=flux", f"--pretrained_model_name_or_path={folder}", "--model_type=lora", "--use_cpu"]
        words += ["--mixed_precision=bf16", f"--base_model_precision={precision}"]
        family = find_family(resolve(schema_of(plugins), words, environment={}), plugins)
        with without_weights():
            model = family.build_model()
        blocks = find_blocks(model, family.block_classes())
        return count_facts(family, model, blocks, width=64, height=64, bf16=True, kind="cpu"), model

    return count


class Plain:
    """`Weights` of one layer called `layer`."""

    def __init__(self, linear: nn.Linear) -> None:
        self._tensors = {f"layer.{name}": each.detach() for name, each in linear.named_parameters()}

    def names(self):
        return iter(self._tensors)

    def get(self, name):
        return self._tensors[name]


def layer(plain: nn.Linear, kind: str) -> EightBitLinear:
    """The layer in 8 bits, with the weights of a plain one."""
    model = nn.ModuleDict({"layer": EightBitLinear(copy.deepcopy(plain), TYPES[kind])})
    weights = eight_bit_weights(Plain(plain), model)
    assert set(weights.names()) == set(model.state_dict())
    for name, parameter in model.named_parameters():
        parameter.data.copy_(weights.get(name))
    return model["layer"]


def pair(kind: str, width: int, out: int, dtype=torch.float32) -> tuple[nn.Linear, EightBitLinear]:
    torch.manual_seed(width + out)
    plain = nn.Linear(width, out, dtype=dtype).requires_grad_(False)
    return plain, layer(plain, kind)


def restored(made: EightBitLinear) -> torch.Tensor:
    return made.weight.view(made.kept_as).double() * made.weight_scale.view(torch.float32).double()


def off(one, other) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@both
@pytest.mark.parametrize(("rows", "width", "out"), SIZES)
def test_a_product_is_the_exact_one_of_the_rounded_numbers(kind, rows, width, out):
    plain, made = pair(kind, width, out)
    inputs = torch.randn(rows, width)
    numbers, scales = quantised(inputs, TYPES[kind])
    exact = F.linear(numbers.double() * scales.double(), restored(made), plain.bias.double())
    said = made(inputs)
    assert off(said, exact) < (1e-6 if kind == "int8" else 2**-8)  # sums of e4m3 come in bf16
    assert 0 < off(said, plain(inputs)) < ERRORS[kind]
    assert off(restored(made), plain.weight) < ERRORS[kind]


def test_sums_of_the_largest_products_are_exact():
    """Processors without VNNI add two products in 16 bits."""
    plain = nn.Linear(64, 32).requires_grad_(False)
    plain.weight.fill_(1)
    inputs = torch.ones(32, 64)
    assert off(layer(plain, "int8")(inputs), plain(inputs)) < 1e-6


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_the_restored_weight(kind, dtype):
    _, made = pair(kind, 64, 32, dtype)
    inputs = torch.randn(3, 20, 64, dtype=dtype, requires_grad=True)
    given = torch.randn(3, 20, 32, dtype=dtype)
    [found] = torch.autograd.grad(made(inputs), inputs, given)
    assert torch.equal(found, given @ restored(made).to(dtype))
    assert not any(each.requires_grad for each in made.parameters())


@both
@pytest.mark.parametrize(("rows", "width", "out"), [(1, 64, 32), (16, 64, 32), (64, 24, 32), (64, 32, 24)])
def test_few_rows_and_sizes_without_a_product_in_8_bits_use_the_restored_weight(kind, rows, width, out):
    plain, made = pair(kind, width, out)
    inputs = torch.randn(rows, width)
    assert torch.equal(made(inputs), F.linear(inputs, restored(made).float(), plain.bias))


def test_a_row_does_not_depend_on_the_others():
    _, made = pair("int8", 64, 32)
    inputs = torch.randn(2, 40, 64)
    assert torch.equal(made(inputs)[0], made(inputs[0]))


@both
def test_a_row_of_zeros_gives_the_bias_and_one_that_is_not_finite_spoils_only_itself(kind):
    plain, made = pair(kind, 64, 32, torch.bfloat16)
    inputs = torch.randn(20, 64, dtype=torch.bfloat16)
    before = made(inputs)
    inputs[3], inputs[5, 7], inputs[6, 0] = 0, torch.nan, torch.inf
    said = made(inputs)
    assert torch.equal(said[3], plain.bias)
    assert not said[5:7].isfinite().any()
    others = [row for row in range(20) if row not in (3, 5, 6)]
    assert torch.equal(said[others], before[others])


def test_one_large_column_of_inputs_takes_the_precision_of_the_others_in_int8():
    """A scale for each row: e4m3 has a point of its own for each number."""
    found = {}
    for kind in TYPES:
        plain, made = pair(kind, 128, 64)
        inputs = torch.randn(64, 128)
        inputs[:, 5] *= 200
        made.weight.data[:, 5] = 0
        plain.weight.data[:, 5] = 0
        found[kind] = off(made(inputs), plain(inputs))
    assert found["e4m3"] < ERRORS["e4m3"] < 0.2 < found["int8"]


@both
def test_under_autocast_it_computes_in_the_type_of_the_run(kind):
    _, made = pair(kind, 64, 32)
    inputs = torch.randn(2, 20, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        said = [made(inputs), made(inputs[0, :4])]
    assert {each.dtype for each in said} == {torch.bfloat16}
    sum(each.float().square().sum() for each in said).backward()
    assert inputs.grad.dtype == torch.float32


@both
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch itself
def test_it_is_compiled_in_one_piece(kind):
    _, made = pair(kind, 64, 32)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (20, 33, 2):
        inputs = torch.randn(rows, 64, requires_grad=True)
        said = [each(inputs) for each in (compiled, made)]
        gradients = [torch.autograd.grad(each.square().sum(), inputs)[0] for each in said]
        assert torch.equal(*said)
        assert torch.equal(*gradients)


@both
def test_scales_are_there_in_any_order(kind):
    plain = nn.Linear(32, 16)
    made = nn.ModuleDict({"layer": EightBitLinear(plain, TYPES[kind])})
    weights = eight_bit_weights(Plain(plain), made)
    scale = weights.get("layer.weight_scale")
    assert weights.get("layer.weight").dtype == torch.int8
    assert torch.equal(weights.get("layer.weight_scale"), scale)
    assert torch.equal(weights.get("layer.bias"), plain.bias)


@both
def test_some_rows_are_those_of_the_whole_and_other_tensors_are_left_to_the_weights(kind):
    plain = nn.Linear(32, 15)
    made = nn.ModuleDict({"layer": EightBitLinear(plain, TYPES[kind])})
    whole, parts = (eight_bit_weights(Plain(plain), made) for _ in range(2))
    for name in ("layer.weight", "layer.weight_scale"):
        rows = [parts.quantised_rows(name, start, stop) for start, stop in ((0, 8), (8, 15))]
        assert torch.equal(torch.cat(rows), whole.get(name))
    assert parts.quantised_rows("layer.bias", 0, 8) is None
    with pytest.raises(UserError, match=r"layer.weight is \[15, 32\] in the weights and \[16, 32\] in the model"):
        eight_bit_weights(Plain(plain), nn.ModuleDict({"layer": EightBitLinear(nn.Linear(32, 16), TYPES[kind])})).get(
            "layer.weight"
        )


@pytest.mark.parametrize("precision", some(["int8-rowwise", "fp8-rowwise"], "int8-rowwise"))
def test_a_plan_counts_the_bytes_and_the_products_of_such_a_base(precision, counted):
    (plain, _), (facts, model) = counted("no_change"), counted(precision)
    frozen = [each for each in model.parameters() if not each.requires_grad]
    in_8_bits = [module for module in model.modules() if isinstance(module, EightBitLinear)]
    assert facts.frozen.bytes == sum(each.nbytes for each in frozen) < 0.7 * plain.frozen.bytes
    assert facts.frozen.restoring == 2 * max(module.weight.numel() for module in in_8_bits)
    assert not facts.indivisible
    assert facts.sample.flops == plain.sample.flops
    assert [block.copied for block in facts.sample.blocks] == [block.copied for block in plain.sample.blocks]


@pytest.mark.parametrize("precision", ["int8-rowwise", "fp8-rowwise"])
def test_devices_without_products_in_8_bits_are_refused(precision, monkeypatch):
    check_device(precision, "cpu")
    with pytest.raises(UserError, match="torch has no products in 8 bits on MPS"):
        check_device(precision, "mps")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    if precision == "int8-rowwise":
        check_device(precision, "cuda")
    else:
        with pytest.raises(UserError, match=r"this GPU has 8\.6") as refused:
            check_device(precision, "cuda")
        assert refused.value.fix == "--base_model_precision=int8-rowwise"
