"""The contents of a checkpoint, in memory, and how files of nodes that share no file system reach the main rank's directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from smalti.parallel import PortableState, named_state


class Relay(Protocol):
    """Carries files between nodes, through a place that all of them reach. Names are relative paths; one save runs at a time.

    A plugin sets it as `Snapshot.relay` before a save. A file that cannot be carried is an OSError or a UserError.
    """

    def send(self, path: Path, name: str) -> None:
        """Send a file. Called on a rank that does not see the directory of the main rank."""
        ...

    def fetch(self, name: str, path: Path) -> None:
        """Write a file that another rank has sent to `path`, synced. Called on the main rank."""
        ...

    def clear(self) -> None:
        """Remove all that was sent. Called on the main rank after each save, also after one that failed."""
        ...


@dataclass(kw_only=True)
class Snapshot:
    """The state of a run at a step boundary.

    `state` and `ema` refer to the live tensors, fp32 masters by fully qualified name; saving reads them, loading fills them in
    place. `ema` is None without EMA. `trainer` is JSON-able: step, data position, learning-rate settings.
    `model_config` is the config of the model as JSON text, as diffusers and transformers load it; "" if it has none.
    `flags` mark the checkpoint, such as `smalti.checkpoint.SUSPECT`. `relay` brings the files of ranks on other nodes to the
    main rank; None if all ranks see the same directory. `confirm` is called on the main rank right before the checkpoint
    becomes visible, and raises an exception if it must not.
    """

    step: int
    state: PortableState
    ema: dict[str, Tensor] | None = None
    trainer: Mapping[str, object] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    config_digest: str = ""
    model_config: str = ""
    flags: tuple[str, ...] = ()
    relay: Relay | None = None
    confirm: Callable[[], None] = lambda: None

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors by "GROUP/NAME"."""
        groups: Mapping[str, Mapping[str, Tensor]] = {
            "model": self.state.model,
            "optimizer": named_state(self.state.optimizer_state),
            "ema": self.ema or {},
        }
        return {f"{group}/{name}": tensor for group, tensors in groups.items() for name, tensor in tensors.items()}

    def replaced(self, tensors: Mapping[str, Tensor]) -> Snapshot:
        """Returns a copy with other tensors, given by the names of `tensors()`."""
        optimizer_state = {
            name: {key: tensors[f"optimizer/{name}.{key}"] for key in kept} for name, kept in self.state.optimizer_state.items()
        }
        model = {name: tensors[f"model/{name}"] for name in self.state.model}
        ema = None if self.ema is None else {name: tensors[f"ema/{name}"] for name in self.ema}
        return replace(self, state=replace(self.state, model=model, optimizer_state=optimizer_state), ema=ema)
