"""Text encoders that stop learning before the run ends, unlike the model.

Their gradients are zeros from then on, so that they have no part in the norm of all gradients, and their learning rate is 0,
since an optimizer also moves weights by earlier gradients and by weight decay. Every strategy needs gradients of all that it
trains: DDP waits for those that are missing. From then on a text is encoded once, where its rows depend on nothing else.
"""

from __future__ import annotations

from typing import Any, cast

from smalti import Config
from smalti.training import PeriodicWork, Run, Turn
from smalti_diffusers.lora.encoders import encoder_of, stops_encoders
from smalti_diffusers.lora.kept_texts import KeptTexts, can_keep_texts
from smalti_diffusers.options import LoraOptions


class EncoderStop(PeriodicWork):
    """Stops them between two steps; in a resumed run that is past that step, before its first one."""

    name = "stop of the text encoders"

    def __init__(self, options: LoraOptions) -> None:
        self._steps, self._share = options.train_text_encoder_steps, options.train_text_encoder_frac or 1.0
        self._keeps = options.tlora_min_rank is None and not options.lora_dropout
        self._done = False

    def start(self, run: Run) -> None:
        if self.is_due(run):
            self.run(run)

    def is_due(self, run: Run) -> bool:
        last = self._steps if self._steps is not None else max(1, round(self._share * run.state.max_steps))
        return not self._done and run.state.step >= last

    def run(self, run: Run) -> None:
        model = cast(Any, run.parallel.unwrap(run.model))
        trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
        ratios = {run.family.rate_ratio(name) for name in trained if encoder_of(name) is not None}
        for index, group in enumerate(run.optimizer.param_groups):
            if group.get("rate_ratio") in ratios:
                run.scheduler.base_lrs[index] = group["lr"] = 0.0
        model.encoders_learn = False
        if self._keeps and tuple(run.loss.turns) == (Turn(),):
            encoders = [getattr(model, part) for part in model.held]
            parameters = [each for encoder in encoders for each in encoder.parameters() if each.requires_grad]
            model.kept = KeptTexts(parameters) if can_keep_texts(encoders) else None
        self._done = True


def encoder_stop_of(config: Config) -> EncoderStop | None:
    return EncoderStop(config[LoraOptions]) if stops_encoders(config) else None
