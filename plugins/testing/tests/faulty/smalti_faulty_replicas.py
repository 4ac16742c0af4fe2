"""The faults themselves."""

import torch

from smalti.parallel import capture
from smalti.training import Replicas


class Unaveraged(Replicas):
    def accumulate(self, last):
        return super().accumulate(False)


class Unscaled(Replicas):
    def backward(self, loss):
        super().backward(loss * self.world.size)


class OwnNorm(Replicas):
    def clip_gradients(self, limit):
        return super().clip_gradients(limit) / self.world.size**0.5


class Hopeful(Replicas):
    def mean(self, value):
        return super().mean(torch.nan_to_num(value, nan=0.0, posinf=0.0))


class Backwards(Replicas):
    def gather(self, value):
        return super().gather(value)[::-1]


class Rounding(Replicas):
    def agree(self, code):
        return int(torch.tensor(float(super().agree(code))))


class Impatient(Replicas):
    def barrier(self):
        pass


class Hoarding(Replicas):
    def discard(self):
        pass


class Clinging(Replicas):
    """Computes with the weights of its first forward pass without a gradient."""

    def bind(self, model, optimizer):
        kept = {}

        def cling(module, arguments):
            if not torch.is_grad_enabled():
                for name, parameter in model.named_parameters():
                    parameter.copy_(kept.setdefault(name, parameter.clone()))

        self.unwrap(model).register_forward_pre_hook(cling)
        return super().bind(model, optimizer)


class Amnesiac(Replicas):
    def load_portable_state(self, model, optimizer, state):
        state.moments = {}
        super().load_portable_state(model, optimizer, state)


class Crowded(Replicas):
    def alone(self):
        return self


class Prefixed(Replicas):
    def portable_state(self, model, optimizer):
        state = capture(self.unwrap(model), optimizer)
        state.model = {f"module.{name}": tensor for name, tensor in state.model.items()}
        return state
