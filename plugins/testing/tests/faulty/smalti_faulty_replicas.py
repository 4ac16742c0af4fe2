"""The faults themselves."""

import torch

from smalti.parallel import ModelState
from smalti.training import DdpParallel


class Unaveraged(DdpParallel):
    def accumulate(self, last):
        return super().accumulate(False)


class Unscaled(DdpParallel):
    def backward(self, loss):
        super().backward(loss * self.world.size)


class OwnNorm(DdpParallel):
    def clip_gradients(self, limit):
        return super().clip_gradients(limit) / self.world.size**0.5


class OwnValues(DdpParallel):
    def clip_gradient_values(self, limit):
        return super().clip_gradients(limit)


class Hopeful(DdpParallel):
    def mean(self, value):
        return super().mean(torch.nan_to_num(value, nan=0.0, posinf=0.0))


class Backwards(DdpParallel):
    def gather(self, value):
        return super().gather(value)[::-1]


class Rounding(DdpParallel):
    def all_reduce_max(self, code):
        return int(torch.tensor(float(super().all_reduce_max(code))))


class Impatient(DdpParallel):
    def barrier(self):
        pass


class Hoarding(DdpParallel):
    def zero_grad(self):
        pass


class Clinging(DdpParallel):
    """Computes with the weights of its first forward pass without a gradient."""

    def setup(self, model, optimizer):
        kept = {}

        def cling(module, arguments):
            if not torch.is_grad_enabled():
                for name, parameter in model.named_parameters():
                    parameter.copy_(kept.setdefault(name, parameter.clone()))

        self.unwrap(model).register_forward_pre_hook(cling)
        return super().setup(model, optimizer)


class NoOptimizerState(ModelState):
    def load(self, state):
        state.optimizer_state = {}
        super().load(state)


class Amnesiac(DdpParallel):
    def training_state(self, model, optimizer):
        return NoOptimizerState(model, optimizer)


class Crowded(DdpParallel):
    def local_communicator(self):
        return self


class WrappedNames(ModelState):
    def portable(self):
        state = super().portable()
        state.model = {f"module.{name}": tensor for name, tensor in state.model.items()}
        return state


class Prefixed(DdpParallel):
    def training_state(self, model, optimizer):
        return WrappedNames(model, optimizer)
