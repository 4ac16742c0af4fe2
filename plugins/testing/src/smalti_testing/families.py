"""The contract of a model family: what the loop, the backends and validation rely on. Runs on the CPU, in fp32.

Give it a small version of the family, made from a configuration with random weights; a few seconds are enough.

Shapes: B batch, C latent channels, H, W pixels, h, w latent size.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from smalti.diffusion import STEPS, Conditioning, Objective, Prediction, RectifiedFlow
from smalti.models import (
    Encoding,
    ModelFamily,
    family_problems,
)
from smalti_testing.contract import BrokenContract, Contract, expect
from smalti_testing.family_subject import CAPTIONS, SIZE, FamilySubject, native_objective

_ALLOWED_BUFFERS = 64 * 2**20
_TOLERANCE = 1e-3
"""Of the largest value: kernels may sum in another order for another batch."""


def check_family(family: ModelFamily, captions: tuple[str, str] = CAPTIONS[:2]) -> None:
    """Every check of the family contract. `family` should be a small one; its methods are called many times.

    `captions` are two that it encodes differently, for a family with a closed vocabulary.
    """
    FAMILY.run_all(FamilySubject(family, (*captions, "")))


FAMILY: Contract[FamilySubject] = Contract("family")


@FAMILY.check
def it_says_what_it_is(subject: FamilySubject) -> None:
    """It inherits from `smalti.models.ModelFamily` and has what is required; its name, prediction and alignment make sense.

    Set attributes on the class, or in `__init__` when they depend on the configuration. Public names that look like misspelt
    ones of the base class are refused.
    """
    family = subject.family
    problems = family_problems(family)
    expect(not problems, f"{type(family).__name__} {'; '.join(problems)}")
    expect(isinstance(family.name, str) and bool(family.name), f"name is {family.name!r}")
    expect(family.prediction in get_args(Prediction), f"prediction is {family.prediction!r}")
    expect(isinstance(family.alignment, int) and family.alignment >= 1, f"alignment is {family.alignment!r}")


@FAMILY.check
def it_builds_a_model_without_weights(subject: FamilySubject) -> None:
    """`build_model` is called with parameters on the meta device, so that a model larger than memory can be built.

    Load nothing there and compute with no parameter. Buffers stay real: keep them small, made from the configuration alone.
    Only one that `weights` has may be on the meta device as well.
    """
    model = subject.bare()
    real = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    expect(not real, f"these parameters have memory already: {', '.join(real[:5])}")
    expect(any(True for _ in model.parameters()), "the model has no parameters")
    known = set(subject.family.weights(0).names())
    meta = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in known]
    expect(not meta, f"these buffers have no memory: {', '.join(meta[:5])}")
    size = sum(buffer.nbytes for buffer in model.buffers() if not buffer.is_meta)
    expect(size <= _ALLOWED_BUFFERS, f"the buffers take {size / 2**20:.0f} MiB")


@FAMILY.check
def its_weights_fit_its_model(subject: FamilySubject) -> None:
    """Every parameter and persistent buffer has a tensor of its name and shape; backends ask for them one by one.

    A missing name is usually a prefix too many or too few; KeyError is the answer to a name that does not exist.
    """
    weights, model = subject.family.weights(0), subject.bare()
    names, wanted = set(weights.names()), dict(model.state_dict())
    expect(names >= wanted.keys(), f"weights() lacks {', '.join(sorted(wanted.keys() - names)[:5])}")
    for name, tensor in wanted.items():
        found = weights.get(name)
        expect(found.shape == tensor.shape, f"{name} is {tuple(found.shape)}, in the model {tuple(tensor.shape)}")
        expect(found.device.type == "cpu", f"{name} is on {found.device}, not on the CPU")
    try:
        weights.get("no such name")
    except KeyError:
        return
    raise BrokenContract("weights().get() raised no KeyError for a name that does not exist")


@FAMILY.check
def its_first_weights_are_a_function_of_the_seed(subject: FamilySubject) -> None:
    """Every rank makes its own first weights, and they must be the same ones; another seed gives others.

    Make them under `torch.random.fork_rng` with the seed set, on the CPU, and from nothing else.
    """
    one, again, other = (subject.family.weights(seed) for seed in (1, 1, 2))
    torch.manual_seed(99)
    names = sorted(one.names())
    different = [name for name in names if not torch.equal(one.get(name), again.get(name))]
    expect(not different, f"the same seed returned two values of {', '.join(different[:5])}")
    expect(any(not torch.equal(one.get(name), other.get(name)) for name in names), "two seeds returned the same weights")


@FAMILY.check
def captions_have_rows_of_one_shape(subject: FamilySubject) -> None:
    """Conditioning is split, joined and cached row by row, so a caption's row must not depend on the others beside it.

    Pad to a fixed length rather than to the longest caption, and mask what is padding.
    """
    together = subject.family.encode_captions(subject.captions)
    expect(bool(together), "encode_captions returned nothing")
    for name, tensor in together.items():
        expect(
            tensor.shape[:1] == (len(subject.captions),),
            f"{name} is {tuple(tensor.shape)} for {len(subject.captions)} captions",
        )
        expect(not tensor.requires_grad, f"{name} carries a gradient; encoders are frozen")
    for row, caption in enumerate(subject.captions):
        _same_conditioning(_row(together, row), subject.family.encode_captions([caption]), f"caption {caption!r} alone")


@FAMILY.check
def captions_mean_the_same_each_time(subject: FamilySubject) -> None:
    """A caption is encoded again in every epoch, on another rank, after a resume. The empty prompt is a prompt of its own.

    Python's `hash` differs from process to process; dropout in an encoder that is not in eval mode differs each time.
    """
    first, second = (subject.family.encode_captions(subject.captions) for _ in range(2))
    _same_conditioning(first, second, "the same captions again", tolerance=0.0)
    same = all(torch.equal(tensor[0], tensor[2]) for tensor in first.values())
    expect(not same, f"{subject.captions[0]!r} and the empty prompt are encoded alike; see `captions`")


@FAMILY.check
def size_conditioning_has_rows_and_names_of_its_own(subject: FamilySubject) -> None:
    """`encode_size_conditioning`, for families that have it: one row for each size, under names that captions do not use.

    Both kinds of conditioning are handed to `forward` in one dictionary, so that a shared name would lose one of them.
    """
    family, (width, height) = subject.family, subject.size
    found = family.encode_size_conditioning([SIZE, replace(SIZE, left=9)], width, height)
    for name, tensor in found.items():
        expect(tensor.shape[:1] == (2,), f"{name} is {tuple(tensor.shape)} for 2 sizes")
    shared = found.keys() & family.encode_captions(subject.captions[:1]).keys()
    expect(not shared, f"captions and sizes both have {', '.join(sorted(shared))}")


@FAMILY.check
def images_become_latents_and_back(subject: FamilySubject) -> None:
    """Widths and heights are multiples of `alignment`, and nothing else is promised: not square, not a power of two.

    If only odd multiples fail, `alignment` is too small.
    """
    alignment = subject.family.alignment
    for width, height in ((2 * alignment, 2 * alignment), (3 * alignment, 2 * alignment), (2 * alignment, 5 * alignment)):
        with torch.no_grad():
            latents = subject.family.encode_images(torch.zeros(2, 3, height, width))
            expect(latents.ndim == 4 and len(latents) == 2, f"latents are {tuple(latents.shape)}, not (2, C, h, w)")
            said = subject.family.latent_shape(width, height)
            expect(tuple(latents.shape[1:]) == said, f"latents are {tuple(latents.shape[1:])}, latent_shape says {said}")
            pixels = subject.family.decode_latents(latents)
        expect(pixels.shape == (2, 3, height, width), f"{width}x{height} came back as {tuple(pixels.shape)}")


@FAMILY.check
def the_prediction_has_the_shape_of_its_input(subject: FamilySubject) -> None:
    """The loss compares the prediction with noise or image, element by element. The input itself must stay as it is.

    `timesteps` is (B,), floating point, in [0, 1000]; scale it inside if your model wants another range.
    """
    noisy = torch.randn_like(subject.latents)
    kept = noisy.clone()
    prediction = subject.predict(subject.model(), noisy, [0.5, 500.0, 1000.0], subject.captions)
    expect(prediction.shape == noisy.shape, f"{tuple(noisy.shape)} gave {tuple(prediction.shape)}")
    expect(bool(torch.isfinite(prediction).all()), "the prediction is not finite")
    expect(torch.equal(noisy, kept), "forward has changed its input")


@FAMILY.check
def the_caption_and_the_time_matter(subject: FamilySubject) -> None:
    """A model that ignores one of them trains without an error and samples the mean of everything.

    Look for conditioning that is dropped on its way, or a timestep that is rounded away.
    """
    model, noisy = subject.model(), torch.randn_like(subject.latents[:1])
    plain, worded, later = (
        subject.predict(model, noisy, [time], [caption])
        for time, caption in ((300.0, subject.captions[0]), (300.0, subject.captions[1]), (800.0, subject.captions[0]))
    )
    first, second, _ = subject.captions
    expect(_distance(plain, worded) > 1e-6, f"the captions {first!r} and {second!r} gave the same prediction; see `captions`")
    expect(_distance(plain, later) > 1e-6, "another time gave the same prediction")


@FAMILY.check
def a_prediction_does_not_depend_on_its_neighbours(subject: FamilySubject) -> None:
    """The same batch is split over any number of ranks and micro-batches, and must train the same model.

    Batch normalisation, or a mean over the batch somewhere, breaks this; so does padding to the longest of the batch.
    """
    model, noisy, times = subject.model(), torch.randn_like(subject.latents), [100.0, 500.0, 900.0]
    together = subject.predict(model, noisy, times, subject.captions)
    alone = torch.cat(
        [subject.predict(model, noisy[i : i + 1], times[i : i + 1], subject.captions[i : i + 1]) for i in range(3)]
    )
    expect(_distance(together, alone) < _TOLERANCE, f"alone and in a batch they differ by {_distance(together, alone):.1e}")


@FAMILY.check
def every_parameter_that_trains_gets_a_gradient(subject: FamilySubject) -> None:
    """Replicas wait for the gradient of every parameter, so one that is never used hangs or stops a run on several ranks.

    Remove it, or set `requires_grad` to False in `build_model`.
    """
    model = subject.model().train()
    _descend(subject, model, torch.randn_like(subject.latents))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    expect(bool(trained), "nothing in the model trains")
    without = [name for name, parameter in trained.items() if parameter.grad is None]
    expect(not without, f"no gradient reaches {', '.join(without[:5])}")


@FAMILY.check
def it_works_in_bf16(subject: FamilySubject) -> None:
    """On most accelerators bf16 is the default: the forward pass runs under autocast, weights stay in fp32.

    Casts written into the model by hand are what usually fails; take the dtype from a tensor at hand instead.
    """
    model = subject.model().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _descend(subject, model, torch.randn_like(subject.latents))
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    expect(all(bool(torch.isfinite(gradient).all()) for gradient in gradients), "gradients under bf16 are not finite")


@FAMILY.check
def recomputing_activations_changes_no_gradient(subject: FamilySubject) -> None:
    """`--gradient_checkpointing` calls `model.enable_gradient_checkpointing()` if there is one; a family may have none.

    Use `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, and let nothing in a block depend on when it runs.
    """
    if not hasattr(subject.bare(), "enable_gradient_checkpointing"):
        return
    noisy = torch.randn_like(subject.latents)
    plain, again = (subject.model(recompute=recompute).train() for recompute in (False, True))
    for model in (plain, again):
        torch.manual_seed(0)
        _descend(subject, model, noisy)
    for (name, one), other in zip(plain.named_parameters(), again.parameters(), strict=True):
        if one.grad is None or other.grad is None:
            expect(one.grad is other.grad, f"recomputing gives or takes away the gradient of {name}")
        else:
            expect(_distance(one.grad, other.grad) < _TOLERANCE, f"recomputing gives {name} another gradient")


@FAMILY.check
def images_are_sampled_in_the_size_that_was_asked_for(subject: FamilySubject) -> None:
    """Validation saves what `sample` returns as 8-bit images, one per prompt.

    (B, 3, H, W), about [-1, 1], every number finite, from any seed.
    """
    images = subject.sample(subject.model(), subject.captions, range(len(subject.captions)))
    width, height = subject.size
    expect(images.shape == (len(subject.captions), 3, height, width), f"{width}x{height} was sampled as {tuple(images.shape)}")
    expect(bool(torch.isfinite(images).all()), "an image has values that are not finite")


@FAMILY.check
def an_image_depends_on_its_prompt_and_seed_alone(subject: FamilySubject) -> None:
    """So that images of two steps can be compared, whichever rank has sampled them and beside which others.

    Make the first noise of each image from a generator of its own (`smalti.diffusion.seeded_noise`).
    """
    model = subject.model()
    together = subject.sample(model, subject.captions, (5, 6, 7))
    torch.manual_seed(1)
    again = subject.sample(model, subject.captions, (5, 6, 7))
    expect(torch.equal(together, again), "the same prompts and seeds returned other images the second time")
    alone = subject.sample(model, subject.captions[1:2], (6,))
    expect(_distance(together[1:2], alone) < _TOLERANCE, "an image depends on those that are sampled beside it")
    other = subject.sample(model, subject.captions[1:2], (8,))
    expect(_distance(alone, other) > 1e-6, "another seed returned the same image")


@FAMILY.check
def it_samples_with_the_objective_that_is_trained(subject: FamilySubject) -> None:
    """`request.objective`: the prediction and the noise schedule of the loss. With others, weights are right and images wrong.

    Say `prediction` and `beta_schedule` once, on the family, and hand `request.objective` to the sampler. Here `forward` is
    replaced by a model that knows the image, which any sampler then finds. A family whose `sample` does not call `forward`, as
    one that samples with a pipeline, is not judged.
    """
    family, objective, image, asked = subject.family, native_objective(subject.family), subject.latents[:1], []

    def knowing(model: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        asked.append(len(noisy))
        return _perfect(objective, image, noisy, timesteps)

    model = subject.model()
    vars(family)["forward"] = knowing
    try:
        sampled = subject.sample(model, subject.captions[:1], (5,))
    finally:
        del vars(family)["forward"]
    if asked:
        with torch.no_grad():
            apart = _distance(family.decode_latents(image), sampled)
        expect(apart < _TOLERANCE, f"sample does not undo the noise of the loss: a perfect model's image is off by {apart:.1e}")


@FAMILY.check
def an_image_is_sampled_from_what_was_encoded_before(subject: FamilySubject) -> None:
    """For families that are `cacheable`: text encoders are gone while the model trains, and `sample` does without them.

    Sample from `conditioning` and `unconditional` of the request where they are given. What decodes latents may be moved back
    to the device for as long as that takes.
    """
    family = subject.family
    if not family.cacheable:
        return
    for kind in get_args(Encoding):
        first, second = (json.dumps(family.encoder_identity(kind), sort_keys=True) for _ in range(2))
        expect(first == second, f"encoder_identity({kind!r}) is another the second time")
    model, conditioning = subject.model(), family.encode_captions(subject.captions)
    before = subject.sample(model, subject.captions, (5, 6, 7))
    for kind in get_args(Encoding):
        family.release_encoder(kind)
    expect(
        torch.equal(subject.sample(model, subject.captions, (5, 6, 7), conditioning), before),
        "without encoders, other images are sampled",
    )
    turned = subject.sample(model, subject.captions, (5, 6, 7), {name: rows.flip(0) for name, rows in conditioning.items()})
    expect(_distance(turned, before) > 1e-6, "sample does not use the conditioning of the request")


@FAMILY.check
def stored_latents_become_those_of_every_step(subject: FamilySubject) -> None:
    """A run trains the same whether images were encoded before it or in each step.

    Let `encode_images` call `raw_latents` and then `normalise_latents`; shift and scale belong in the latter, in fp32.
    """
    family = subject.family
    with torch.no_grad():
        latents = family.normalise_latents(family.raw_latents(subject.pixels))
    expect(torch.equal(latents, subject.latents), "normalise_latents(raw_latents(pixels)) is not encode_images(pixels)")


@FAMILY.check
def its_blocks_and_adapter_targets_are_in_the_model(subject: FamilySubject) -> None:
    """Blocks are what is sharded, recomputed and compiled; a name that is nowhere in the model does nothing, silently.

    `block_classes` may be empty, which lets detection find them. Where the family trains adapters, each of its `lora_targets`
    is the end of some module's name.
    """
    modules = dict(subject.bare().named_modules())
    classes = {type(module).__name__ for module in modules.values()}
    missing = [name for name in subject.family.block_classes() if name not in classes]
    expect(not missing, f"no module is of the class {', '.join(missing)}")
    lost = [target for target in subject.family.lora_targets() if not any(name.endswith(target) for name in modules)]
    expect(not lost, f"no module's name ends in {', '.join(lost)}")


@FAMILY.check
def its_adapter_can_be_weaker(subject: FamilySubject) -> None:
    """For families that have `adapter_strength` and train an adapter: validation images with another strength, or without it.

    Multiply what the adapter adds, for as long as the context lasts, and leave its weights alone.
    """
    family = subject.family
    if not family.scales_adapter or family.adapter(0) is None:
        return
    model = subject.model()

    def predicted() -> Tensor:
        with torch.no_grad():
            return subject.predict(model, subject.latents[:1], [500.0], subject.captions[:1])

    before = predicted()
    with family.adapter_strength(model, 1.0):
        expect(torch.equal(predicted(), before), "a strength of 1 gives another prediction")
    with family.adapter_strength(model, 0.0):
        expect(not torch.equal(predicted(), before), "a strength of 0 gives the same prediction")
    expect(torch.equal(predicted(), before), "after adapter_strength, predictions are others than before")


@FAMILY.check
def its_flops_are_those_that_torch_counts(subject: FamilySubject) -> None:
    """Throughput is reported in FLOPs, so that runs and machines can be compared; a factor of two is accepted here.

    Count two for each multiplication and addition, one forward pass, one image, attention included, encoders not.
    """
    width, height = subject.size
    flops = subject.family.flops_per_sample(width, height)
    expect(isinstance(flops, int) and flops > 0, f"flops_per_sample returned {flops!r}")
    larger = subject.family.flops_per_sample(4 * width, 2 * height)
    expect(larger > flops, "an image of eight times the size costs no more")
    model, noisy, conditioning = subject.model(), subject.latents[:1], subject.encode(subject.captions[:1])
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        subject.family.forward(model, noisy, torch.tensor([500.0]), conditioning)
    counted = counter.get_total_flops()
    expect(counted / 2 <= flops <= counted * 2, f"flops_per_sample says {flops}, torch counts {counted}")


def _perfect(objective: Objective, image: Tensor, noisy: Tensor, timesteps: Tensor) -> Tensor:
    """What a model predicts that knows the image (1, C, h, w) behind every row of `noisy`."""
    t = timesteps / STEPS if isinstance(objective, RectifiedFlow) else timesteps.round().long()
    alpha, sigma = (each.view(-1, 1, 1, 1) for each in objective.alpha_sigma(t))
    noise = (noisy.float() - alpha * image) / sigma
    match objective.prediction:
        case "epsilon":
            return noise
        case "sample":
            return image.expand_as(noise)
        case "flow_matching":
            return noise - image
    return alpha * noise - sigma * image


def _descend(subject: FamilySubject, model: nn.Module, noisy: Tensor) -> None:
    """The gradient of some loss."""
    prediction = subject.predict(model, noisy, [100.0, 500.0, 900.0], subject.captions)
    prediction.float().square().mean().backward()  # type: ignore[no-untyped-call]


def _row(conditioning: Conditioning, row: int) -> Conditioning:
    return {name: tensor[row : row + 1] for name, tensor in conditioning.items()}


def _same_conditioning(one: Conditioning, other: Conditioning, what: str, *, tolerance: float = _TOLERANCE) -> None:
    expect(one.keys() == other.keys(), f"{what}: {sorted(other)} instead of {sorted(one)}")
    for name, tensor in one.items():
        expect(tensor.shape == other[name].shape, f"{what}: {name} is {tuple(other[name].shape)}, not {tuple(tensor.shape)}")
        expect(_distance(tensor, other[name]) <= tolerance, f"{what}: {name} is another")


def _distance(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-12)) if one.numel() else 0.0
