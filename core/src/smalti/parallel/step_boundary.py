"""The step boundary at which the state of a run stands, as those see it who may have to save it while nothing else goes on."""

from __future__ import annotations

import torch

from smalti.parallel.failure_detection import Claim


class Boundary:
    """Weights, optimizer state and EMA do not change between two steps. Whatever changes them calls this before and after.

    `state_consistent`: they are those of the last step boundary. `final`: that was the last one of the run and it is saved, so
    a failure after it loses nothing.
    """

    def __init__(self, claim: Claim, device: str) -> None:
        self.state_consistent = True
        self.final = False
        self._claim = claim
        self._event = torch.Event(device) if torch.device(device).type != "cpu" else None

    def leave(self) -> None:
        """They are about to change. Raises BrokenGroupError once another rank is known to be lost.

        Then what ranks have just computed together can be anything, without an error where it was computed.
        """
        with self._claim.changing():
            self.state_consistent = False

    def reach(self) -> None:
        """They are what they are to be, as soon as an accelerator has done all that it was asked for up to now."""
        if self._event is not None:
            self._event.record()
        self.state_consistent = True

    def stream(self, device: torch.device) -> torch.Stream:
        """For copies of them, to use in a `with` statement: it comes after the boundary, and waits for nothing else."""
        stream = torch.Stream(device)
        if self._event is not None:
            stream.wait_event(self._event)
        return stream
