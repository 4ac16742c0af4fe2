"""What Ray shows of a run: its step, its loss, its rate and its newest checkpoint, among Ray's metrics."""

from __future__ import annotations

from ray.util.metrics import Gauge

from smalti.checkpoint import CheckpointStore
from smalti.rundir import RunDirectory, shown_loss


class Report:
    """For the driver. The gauges have the tag `run`; that of the checkpoint has its path as `checkpoint`."""

    def __init__(self, name: str, directory: RunDirectory, begun: float) -> None:
        self._directory, self._begun, self._tags = directory, begun, {"run": name}
        self._step = Gauge("smalti_step", description="The last step of a run of smalti.", tag_keys=("run",))
        self._loss = Gauge("smalti_loss", description="The mean loss of about 20 steps.", tag_keys=("run",))
        self._saved = Gauge(
            "smalti_checkpoint_step", description="The step of the newest checkpoint.", tag_keys=("run", "checkpoint")
        )

    def update(self) -> None:
        last = self._directory.latest("step")
        if last is not None and last.time > self._begun and last.step is not None:
            self._step.set(last.step, tags=self._tags)
            if (loss := shown_loss(last)) is not None:
                self._loss.set(loss, tags=self._tags)
        if entries := CheckpointStore(self._directory.checkpoints).all():
            self._saved.set(entries[-1].step, tags={**self._tags, "checkpoint": str(entries[-1].path)})
