"""Count the facts of a model with fake tensors: no weights are read, and nothing is computed."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from smalti import Block
from smalti.diffusion import Conditioning
from smalti.models import ModelFamily
from smalti_plan.facts import BlockFacts, ModelFacts, SampleFacts
from smalti_plan.rehearsal.block import BackwardMemory, backward_memory
from smalti_plan.repeated import repeated_blocks


def count_facts(
    family: ModelFamily,
    model: nn.Module,
    blocks: Sequence[Block],
    *,
    width: int,
    height: int,
    bf16: bool,
    kind: str,
    source: str = "",
) -> ModelFacts:
    """Facts of a model with parameters on the meta device, as `build_model` returns it, for images of one size.

    `source` says where the size is from, and conditioning is of the full length that the family's encoders give.
    `kind` is that of the devices that it will train on: autocast computes other operations in fp32 there than on a CPU.
    """
    own = {block.path: model.get_submodule(block.path) for block in blocks}
    inside = {id(parameter) for module in own.values() for parameter in module.parameters()}
    parameters = list(model.parameters())
    outside = [each for each in parameters if id(each) not in inside]
    frozen, *smaller = family.frozen_storage(model)
    return ModelFacts(
        family=family.name,
        parameters=_count(parameters),
        trained=_count(each for each in parameters if each.requires_grad),
        frozen=frozen,
        smaller=tuple(smaller),
        indivisible=bool(family.indivisible),
        buffers=sum(each.numel() * each.element_size() for each in model.buffers()),
        tensors=sum(each.requires_grad for each in parameters),
        factors=sum(_factors(each.shape) for each in parameters if each.requires_grad),
        flattened_factors=sum(_flattened_factors(each.shape) for each in parameters if each.requires_grad),
        largest=max(each.numel() for each in parameters),
        outside=_count(outside),
        outside_trained=_count(each for each in outside if each.requires_grad),
        sample=replace(_sample(family, model, own, width, height, bf16=bf16, kind=kind), source=source),
    )


def _count(parameters: Any) -> int:
    return sum(each.numel() for each in parameters)


def _factors(shape: torch.Size) -> int:
    """Numbers in a row and a column over the last two dimensions; all of a vector."""
    if len(shape) < 2:
        return shape.numel()
    return shape[:-1].numel() + shape[:-2].numel() * shape[-1]


def _flattened_factors(shape: torch.Size) -> int:
    """The same over the first dimension and all others, if that is less."""
    return min(_factors(shape), shape[0] + shape[1:].numel()) if len(shape) > 2 else _factors(shape)


def _sample(
    family: ModelFamily, model: nn.Module, blocks: Mapping[str, nn.Module], width: int, height: int, *, bf16: bool, kind: str
) -> SampleFacts:
    conditioning = family.example_conditioning(width, height)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _without_data(model, mode), mode:
        given: Conditioning = {name: mode.from_tensor(rows) for name, rows in conditioning.items()}
        noisy = torch.empty(1, *family.latent_shape(width, height))
        saved = Saved(model, blocks)

        @contextmanager
        def computing() -> Iterator[None]:
            autocast = torch.autocast("cpu", dtype=torch.bfloat16) if bf16 else nullcontext()
            as_there = _InFp32() if bf16 and kind != "cpu" else nullcontext()
            with autocast, as_there:
                yield

        flops = FlopCounterMode(display=False, custom_mapping=_MORE_FLOPS)
        with flops, computing(), saved.counting(), repeated_blocks(saved, flops, blocks) as repeated:
            output = family.forward(model, noisy, torch.full((1,), 500.0), given)
        del output
        memory: dict[object, BackwardMemory] = {}
        for path, module in blocks.items():
            if saved.bytes[path] and (kind_of := saved.kinds.get(path)) not in memory:
                memory[kind_of] = backward_memory(module, saved.given[kind_of], computing)
    return SampleFacts(
        width=width,
        height=height,
        flops=int(flops.get_total_flops()) + repeated.flops,
        saved=saved.bytes[""],
        copied=saved.copied[""],
        operations=saved.operations,
        text_tokens=max((rows.shape[1] for rows in conditioning.values() if rows.ndim > 2), default=0),
        blocks=tuple(
            BlockFacts(
                path=path,
                parameters=_count(module.parameters()),
                trained=_count(each for each in module.parameters() if each.requires_grad),
                saved=saved.bytes[path],
                inputs=saved.inputs[path],
                copied=saved.copied[path],
                products=saved.products[path],
                extra=memory[saved.kinds[path]].extra if saved.kinds.get(path) in memory else 0,
                again=max(0, memory[saved.kinds[path]].again - saved.copied[path]) if saved.kinds.get(path) in memory else 0,
            )
            for path, module in blocks.items()
        ),
    )


@contextmanager
def _without_data(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Give a model fake parameters and buffers on the CPU for as long as this lasts."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                before.append((cast(dict[str, Any], tensors), name, tensor))
                fake: Tensor = FakeTensor(mode, torch.empty_like(tensor, device="meta"), torch.device("cpu"))
                if isinstance(tensor, nn.Parameter):
                    fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                cast(dict[str, Any], tensors)[name] = fake
    try:
        yield
    finally:
        for tensors, name, tensor in before:
            tensors[name] = tensor


class Saved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes that autograd keeps for the backward pass, by block; "" is outside of blocks. Each storage counts once.

    Weights do not count; the copies of them that autocast makes have a count of their own.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[str] = Counter()
        self.inputs: Counter[str] = Counter()
        self.copied: Counter[str] = Counter()
        self.products: Counter[str] = Counter()
        self.operations = 0
        self.kinds: dict[str, object] = {}
        self.given: dict[object, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        """Inputs of one block of each kind: those of a kind are equal in class, sizes and inputs."""
        self._blocks = blocks
        self._within = ""
        self._weights: weakref.WeakSet[Any] = weakref.WeakSet(
            each.untyped_storage() for each in (*model.parameters(), *model.buffers())
        )
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._given: weakref.WeakSet[Any] = weakref.WeakSet(self._weights)

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_weight = func is torch.ops.aten._to_copy.default and args[0].untyped_storage() in self._weights
        if is_weight and args[0].itemsize > 1:  # a weight of 8 bits is restored for one product
            storage = result.untyped_storage()
            self.seen.add(storage)
            self.copied[self._within] += storage.nbytes()
        self.operations += 1
        if func._overloadpacket in _PRODUCTS:
            first = result[0] if isinstance(result, tuple) else result
            self.products[self._within] += first.untyped_storage().nbytes()
        return result

    @contextmanager
    def counting(self) -> Iterator[None]:
        handles = []
        for path, module in self._blocks.items():
            handles.append(module.register_forward_pre_hook(self._enter(path), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave))
        try:
            with self, torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, path: str) -> Any:
        def enter(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            self._within = path
            shapes = tuple(
                (each.shape, each.dtype, each.requires_grad) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)
            )
            sizes = tuple((each.shape, each.requires_grad) for each in module.parameters())
            self.kinds[path] = (type(module), sizes, shapes)
            self.given.setdefault(self.kinds[path], (args, kwargs))
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, Tensor) and each.requires_grad and (storage := each.untyped_storage()) not in self._given:
                    self._given.add(storage)
                    self.inputs[path] += storage.nbytes()

        return enter

    def _leave(self, *_: object) -> None:
        self._within = ""

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage not in self.seen and storage not in self._weights:
            self.seen.add(storage)
            self.bytes[self._within] += storage.nbytes()
        return tensor


_PRODUCTS = {
    *(torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.convolution),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
}
"""What selective recomputation keeps the results of."""


class _InFp32(TorchFunctionMode):
    """Under autocast on the CPU, cast the inputs of those operations that autocast computes in fp32 on accelerators only."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FP32_ON_ACCELERATORS:
            args, kwargs = tree_map_only(
                Tensor, lambda each: each.float() if each.is_floating_point() else each, (args, kwargs)
            )
        return func(*args, **(kwargs or {}))


_FP32_ON_ACCELERATORS = {
    *(F.layer_norm, F.group_norm, F.rms_norm, F.softmax, F.cosine_similarity, F.softplus, F.mse_loss),
    *(torch.layer_norm, torch.group_norm, torch.rms_norm, torch.softmax, torch.exp, torch.log, torch.pow, torch.rsqrt),
    *(Tensor.softmax, Tensor.exp, Tensor.log, Tensor.pow, Tensor.rsqrt, Tensor.sum, torch.sum, torch.cumsum, Tensor.cumsum),
}
"""The part of torch's list for CUDA (docs, "Automatic Mixed Precision", CUDA ops that autocast to float32) that models use."""


def _attention_flops(query: Any, key: Any, value: Any, *_: object, out_shape: object = None, **__: object) -> int:
    """Of attention on the CPU, which torch's counter leaves out (torch 2.13)."""
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _int8_flops(one: Any, other: Any, *_: object, **__: object) -> int:
    """Of a product of int8, which torch's counter leaves out, too; of shapes (m, k) and (k, n)."""
    return int(2 * one[0] * one[1] * other[1])


_MORE_FLOPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._int_mm: _int8_flops,
}
