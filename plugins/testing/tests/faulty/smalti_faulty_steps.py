"""The faults themselves."""

import torch
from torch.distributed.tensor import DTensor


class sound(torch.optim.Optimizer):  # noqa: N801 - called as it is registered
    """Momentum without a fault."""

    def __init__(self, groups, *, lr, weight_decay=0.0):
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.groups():
            for parameter in group["params"]:
                if parameter.grad is not None or self.must(parameter):
                    parameter.mul_(1 - self.rate(group) * self.decay(group))
                    parameter.sub_(self.update(parameter, group), alpha=self.rate(group))

    def groups(self):
        return self.param_groups

    def must(self, parameter):
        return False

    def rate(self, group):
        return group["lr"]

    def decay(self, group):
        return group["weight_decay"]

    def update(self, parameter, group):
        state = self.state[parameter]
        if not state:
            state["average"] = torch.zeros_like(parameter)
        return state["average"].mul_(group["momentum"]).add_(parameter.grad)


class first_group(sound):  # noqa: N801
    def groups(self):
        return self.param_groups[:1]


class uphill(sound):  # noqa: N801
    def update(self, parameter, group):
        return -super().update(parameter, group)


class own_rate(sound):  # noqa: N801
    def rate(self, group):
        return self.defaults["lr"]


class one_decay(sound):  # noqa: N801
    def decay(self, group):
        return self.defaults["weight_decay"]


class demanding(sound):  # noqa: N801
    def must(self, parameter):
        return True


class random(sound):  # noqa: N801
    def update(self, parameter, group):
        return super().update(parameter, group) + 1e-3 * torch.randn_like(parameter)


class objects(sound):  # noqa: N801
    def update(self, parameter, group):
        found = super().update(parameter, group)
        self.state[parameter]["seen"] = {"a", "set"}
        return found


class counting(sound):  # noqa: N801
    count = 0

    def update(self, parameter, group):
        self.count += 1
        return super().update(parameter, group) / self.count


class typed(sound):  # noqa: N801
    def __init__(self, groups, **settings):
        super().__init__(groups, **settings)
        for group in self.param_groups:
            group["names"] = {1: "one"}


class normed(sound):  # noqa: N801
    def update(self, parameter, group):
        return super().update(parameter, group) / (parameter.norm() + 1)


class alone(sound):  # noqa: N801
    def update(self, parameter, group):
        part = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        return super().update(parameter, group) / (part.square().mean().sqrt().item() + 1)
