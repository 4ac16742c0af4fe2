"""LoKr, LoHa, DoRA and rank-stabilised LoRA: first values, what they compute, strengths, patterns; peft's own layers beside."""

import pytest
import tiny
import torch
from adapters import family
from torch import nn

from smalti import UserError
from smalti.config.resolution import resolve
from smalti.models.weights import materialise
from smalti.plugins.discovery import load_plugins
from smalti.plugins.schema import schema_of
from smalti_diffusers.checks import problems
from smalti_diffusers.lora.adapter import Lora, adapter_scales, adapter_shapes, attach
from smalti_diffusers.lora.first_weights import AdaptedWeights
from smalti_diffusers.lora.kinds import changed, parted
from smalti_testing.family_subject import FamilySubject
from support.whole import some

KINDS = {
    "lora": (),
    "rslora": ("--use_rslora",),
    "dora": ("--lora_kind=dora",),
    "lokr": ("--lora_kind=lokr", "--lokr_factor=4"),
    "lokr full": ("--lora_kind=lokr", "--lokr_full"),
    "loha": ("--lora_kind=loha",),
}
CASES = [(name, kind) for name in ("flux", "sdxl") for kind in KINDS]
KEPT = (("flux", "rslora"), ("flux", "dora"), ("sdxl", "lokr"), ("sdxl", "lokr full"), ("sdxl", "loha"))
CHOSEN = ("--model_type=lora", "--lora_rank=2", "--lora_alpha=3")


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp("kinds")
    return {name: getattr(tiny, name)(root / name) for name in ("flux", "sdxl")}


def made(name, base, *flags):
    """A family, its model with an adapter and a noisy sample."""
    subject = FamilySubject(family(name, base, *CHOSEN, *flags))
    return subject, materialise(subject.bare(), subject.family.weights(0), "cpu").eval()


def predicted(subject, model):
    noisy = torch.randn(subject.latents.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return subject.predict(model, noisy, [100.0, 500.0, 900.0], subject.captions)


def trained(model, seed=7):
    """Give every parameter of the adapter random values, and return them by layer and part."""
    random, layers = torch.Generator().manual_seed(seed), {}
    for name, parameter in model.named_parameters():
        if place := parted(name):
            noise = torch.randn(parameter.shape, generator=random) * 0.3
            parameter.data = parameter * (1 + noise) if place[1] == "lora_magnitude_vector" else noise
            layers.setdefault(place[0], {})[place[1]] = parameter.detach()
    return layers


def with_changed_weights(name, base, layers, scales):
    """The model without an adapter, its weights changed by the formula."""
    subject = FamilySubject(family(name, base))
    model = materialise(subject.bare(), subject.family.weights(0), "cpu").eval()
    for layer, parts in layers.items():
        linear = model.get_submodule(layer)
        linear.weight.data = changed(linear.weight.data, parts, scales[layer])
    return model


@pytest.mark.parametrize(("name", "kind"), some(CASES, *KEPT))
def test_a_model_with_an_adapter_predicts_as_one_of_the_changed_weights(bases, name, kind):
    targets = ("--lora_targets=to_q,conv1,proj_in,ff.net.2",) if name == "sdxl" else ()
    subject, model = made(name, bases[name], *KINDS[kind], *targets)
    without = predicted(FamilySubject(family(name, bases[name])), with_changed_weights(name, bases[name], {}, {}))
    torch.testing.assert_close(predicted(subject, model), without, atol=1e-6, rtol=1e-6)
    layers, scales = trained(model), adapter_scales(model)
    found = predicted(subject, model)
    assert float((found - without).norm()) > 1e-2 * float(without.norm())
    expected = predicted(subject, with_changed_weights(name, bases[name], layers, scales))
    assert float((found - expected).norm()) < 1e-5 * float(expected.norm())
    with subject.family.adapter_strength(model, 0.0):
        torch.testing.assert_close(predicted(subject, model), without, atol=0, rtol=0)
    assert torch.equal(predicted(subject, model), found)


def test_a_dora_of_half_the_strength_has_the_mean_of_both_weights(bases):
    subject, model = made("flux", bases["flux"], *KINDS["dora"])
    layers = trained(model)
    whole = with_changed_weights("flux", bases["flux"], layers, adapter_scales(model))
    base = with_changed_weights("flux", bases["flux"], {}, {})
    for layer in layers:
        mean = (whole.get_submodule(layer).weight.data + base.get_submodule(layer).weight.data) / 2
        base.get_submodule(layer).weight.data = mean
    with subject.family.adapter_strength(model, 0.5):
        torch.testing.assert_close(predicted(subject, model), predicted(subject, base), atol=1e-5, rtol=1e-4)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 20), nn.Linear(20, 8, bias=False)

    def forward(self, values):
        return self.second(torch.tanh(self.first(values)))


class Seeded:
    """The weights of `Small`."""

    def __init__(self):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.tensors = Small().state_dict()

    def names(self):
        yield from self.tensors

    def get(self, name):
        return self.tensors[name]


def small(**options):
    lora = Lora(**{"rank": 2, "alpha": 3.0, "targets": ("first", "second"), **options})
    with torch.device("meta"):
        model = attach(Small(), lora, torch.float32)
    return materialise(model, AdaptedWeights(Seeded(), model, lora, 5), "cpu")


def peft_model(kind):
    from peft import LoHaConfig, LoKrConfig, LoraConfig, inject_adapter_in_model

    common = {"r": 2, "target_modules": ["first", "second"]}
    config = {
        "lora": lambda: LoraConfig(**common, lora_alpha=3),
        "rslora": lambda: LoraConfig(**common, lora_alpha=3, use_rslora=True),
        "dora": lambda: LoraConfig(**common, lora_alpha=3, use_dora=True),
        "lokr": lambda: LoKrConfig(**common, alpha=3, decompose_factor=2),
        "loha": lambda: LoHaConfig(**common, alpha=3),
    }[kind]()
    model = Small()
    model.load_state_dict(Seeded().tensors)
    return inject_adapter_in_model(config, model)


SMALL = {
    "lora": {},
    "rslora": {"stabilised": True},
    "dora": {"kind": "dora"},
    "lokr": {"kind": "lokr", "factor": 2},
    "loha": {"kind": "loha"},
}


@pytest.mark.parametrize("kind", SMALL)
def test_fifty_steps_are_those_of_the_layers_of_peft(kind):
    """From the same first values, those of smalti."""
    mine, theirs = small(**SMALL[kind]), peft_model(kind)
    theirs.load_state_dict(mine.state_dict())
    start = {name: tensor.clone() for name, tensor in mine.state_dict().items()}
    random = torch.Generator().manual_seed(1)
    batches = [(torch.randn(6, 12, generator=random), torch.randn(6, 8, generator=random)) for _ in range(50)]
    losses = []
    for model in (mine, theirs):
        adapter = [each for name, each in model.named_parameters() if parted(name)]
        optimizer, found = torch.optim.AdamW(adapter, lr=1e-2), []
        for inputs, target in batches:
            loss = (model(inputs) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
        losses.append(found)
    torch.testing.assert_close(losses[0], losses[1], atol=1e-5, rtol=1e-5)
    assert losses[0][-1] != losses[0][0]
    ended = mine.state_dict()
    assert all(not torch.equal(ended[name], start[name]) for name in adapter_shapes(mine))
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(ended[name], tensor, atol=1e-4, rtol=1e-3)


def test_first_values_are_those_of_lycoris():
    lokr = {name: each.detach() for name, each in small(kind="lokr", factor=2, rank=1).named_parameters() if parted(name)}
    shapes = {name: tuple(each.shape) for name, each in lokr.items()}
    assert shapes == {
        "first.lokr_w1.default": (2, 2),
        "first.lokr_w2_a.default": (10, 1),
        "first.lokr_w2_b.default": (1, 6),
        "second.lokr_w1.default": (2, 2),
        "second.lokr_w2_a.default": (4, 1),
        "second.lokr_w2_b.default": (1, 10),
    }
    assert {name for name, each in lokr.items() if not each.any()} == {name for name in lokr if name.endswith("w2_b.default")}
    loha = {name: each for name, each in small(kind="loha", rank=64).named_parameters() if "hada_" in name}
    stds = {name: round(float(each.detach().std()), 1) for name, each in loha.items() if name.startswith("first")}
    expected = {"hada_w1_a": 0.1, "hada_w1_b": 1.0, "hada_w2_a": 0.0, "hada_w2_b": 1.0}
    assert stds == {f"first.{part}.default": std for part, std in expected.items()}


def test_a_dora_starts_with_the_lengths_of_the_rows_of_the_base():
    model = small(kind="dora")
    lengths = Seeded().get("first.weight").norm(dim=1)
    torch.testing.assert_close(model.first.lora_magnitude_vector["default"].weight.detach(), lengths)


def test_the_first_prediction_of_a_dora_in_bf16_is_that_of_the_base():
    model = small(kind="dora").to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if parted(name):
            parameter.data = parameter.data.float()
    lora = Lora(rank=2, alpha=3.0, kind="dora", targets=("first", "second"))
    model = materialise(attach(Small().to("meta"), lora, torch.bfloat16), AdaptedWeights(Seeded(), model, lora, 5), "cpu")
    base = Small()
    base.load_state_dict(Seeded().tensors)
    base, inputs = base.bfloat16(), torch.randn(4, 12)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(inputs), base(inputs), atol=0, rtol=0)


def test_layers_are_chosen_by_class_left_out_and_have_ranks_of_their_own(bases):
    flags = (
        "--lora_targets=FluxAttention,proj_mlp",
        "--lora_exclude=to_out.0,single_transformer_blocks.*",
        "--lora_rank_pattern=to_k=5,FluxAttention=3",
        "--lora_alpha_pattern=to_q=6",
    )
    subject, model = made("flux", bases["flux"], *flags)
    shapes = adapter_shapes(model)
    ends = {
        name.partition(".attn.")[2].partition(".lora_A")[0]: shape[0] for name, shape in shapes.items() if ".lora_A" in name
    }
    assert ends == {"to_q": 3, "to_k": 5, "to_v": 3, "add_q_proj": 3, "add_k_proj": 3, "add_v_proj": 3, "to_add_out": 3}
    assert {name.partition(".")[0] for name in shapes} == {"transformer_blocks"}
    scales = subject.family.adapter(0)["scales"]
    assert {scales[f"transformer_blocks.0.attn.{name}"] for name in ("to_q", "to_k", "to_v")} == {2.0, 3 / 5, 1.0}


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--lora_rank_pattern=to_nowhere=3", "no layer's name ends in to_nowhere"),
        ("--lora_rank_pattern=norm_out.linear=3", "selects no layer that is adapted"),
        ("--lora_exclude=.*", "leaves no layer to adapt"),
        ("--lora_targets=NoClass", "no layer's name ends in NoClass"),
    ],
)
def test_patterns_that_select_nothing_are_refused(bases, flag, reason):
    with pytest.raises(UserError, match=reason):
        family("flux", bases["flux"], *CHOSEN, flag).build_model()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--lora_rank_pattern=to_q",), "'to_q' in --lora_rank_pattern is not NAME=NUMBER"),
        (("--lora_kind=lokr", "--lora_dropout=0.1"), "LoKr has no dropout"),
        (("--lora_kind=loha", "--use_rslora"), "the scale of a LoHa is alpha / rank"),
        (("--lora_kind=lokr", "--assistant_lora=x"), "an assistant is not supported beside a LoKr"),
        (("--lora_kind=dora", "--base_model_precision=int8-rowwise"), "DoRA reads the weights in every step"),
    ],
)
def test_what_a_kind_does_not_have_is_refused_before_launch(flags, reason):
    plugins = load_plugins()
    words = ["--model_family=flux", "--model_type=lora", *flags]
    config = resolve(schema_of(plugins), words, environment={})
    assert [problem for problem in problems(config) if reason in problem.message]


@pytest.mark.parametrize("kind", ["lokr", "loha"])
def test_a_quantised_base_is_beneath_other_kinds_too(bases, kind):
    flags = (*KINDS[kind], "--base_model_precision=int8-rowwise")
    subject, model = made("flux", bases["flux"], *flags)
    base = predicted(subject, model)
    layers, scales = trained(model), adapter_scales(model)
    found = predicted(subject, model)
    expected = predicted(subject, with_changed_weights("flux", bases["flux"], layers, scales))
    assert float((found - expected).norm()) < 0.05 * float((found - base).norm())
