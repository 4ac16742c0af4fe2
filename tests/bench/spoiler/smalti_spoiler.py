"""A third-party plugin for tests of the day: it plants a fault in what a check tests, and none in what it is compared with.

SPOIL is "CHECK=KIND", or several of them with commas. Of a model that is built: "loss" changes its weights, "output" what it
predicts, "slow" lets its forward passes wait, "memory" and "huge" hold memory, "break" breaks graphs of attention, "hang" never
comes back, "exit" ends the process. "forget" changes the weights of a run that has resumed. "corrupt" damages checkpoints,
"unsaved" fails to write them. "sum" adds to sums over ranks.
"""

import os
import time

from smalti import hookimpl

MIB = 2**20
SECONDS = 2.5


class Spoiler:
    def __init__(self):
        kinds = dict(each.split("=") for each in os.environ.get("SPOIL", "").split(",") if each)
        tested = os.environ.get("GPUDAY_ROLE") == "tested"
        self.kind = kinds.get(os.environ.get("GPUDAY_CHECK", "")) if tested else None
        self.held, self.passes, self.model = None, 0, None
        if self.kind == "sum" and os.environ.get("RANK", "0") != "0":
            self.spoil_sums()

    def spoil_sums(self):
        import torch.distributed as dist

        sums = dist.all_reduce

        def wrong(tensor, *arguments, **named):
            return sums(tensor.add_(1), *arguments, **named)

        dist.all_reduce = wrong

    @hookimpl
    def build_optimizer(self, model):
        import torch

        self.model = model
        if self.kind == "loss":
            self.change_weights()
        elif self.kind == "output":
            model.register_forward_hook(lambda module, given, output: output + 0.1)
        elif self.kind == "slow":
            model.register_forward_hook(self.wait)
        elif self.kind in ("memory", "huge"):
            self.held = torch.empty((64 if self.kind == "memory" else 14 * 1024) * MIB, dtype=torch.uint8)
        elif self.kind == "break":
            for name, module in model.named_modules():
                if "to_q" in name and isinstance(module, torch.nn.Linear):
                    module.register_forward_hook(lambda *_: torch._dynamo.graph_break())
        elif self.kind == "hang":
            time.sleep(1e6)
        elif self.kind == "exit":
            os._exit(3)

    def change_weights(self):
        import torch

        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05)

    def wait(self, *_):
        self.passes += 1
        time.sleep(SECONDS * (self.passes > 1))  # the first step is not measured

    @hookimpl
    def on_train_start(self, state):
        if self.kind == "forget" and state.step > 0:
            self.change_weights()

    @hookimpl
    def save_checkpoint(self):
        if self.kind == "unsaved":
            raise OSError("spoiled")

    @hookimpl
    def on_checkpoint(self, checkpoint):
        if self.kind == "corrupt":
            file = next(checkpoint.path.rglob("*.safetensors"))
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)


plugin = Spoiler()
