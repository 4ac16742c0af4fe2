"""The step boundary at which the state of a run stands, as those see it who may have to save it while nothing else goes on."""

from __future__ import annotations

import torch

from smalti.parallel.failure_detection import Claim


class Boundary:
    """Between two steps weights, moments and averages do not change; who has to, asks here first.

    `whole`: they are those of the last boundary. `final`: that was the last one of the run and it is saved, so that what fails
    from here on undoes nothing.
    """

    def __init__(self, claim: Claim, device: str) -> None:
        self.whole = True
        self.final = False
        self._claim = claim
        self._event = torch.Event(device) if torch.device(device).type != "cpu" else None

    def leave(self) -> None:
        """They are about to change. Raises BrokenGroupError once another rank is known to be lost.

        Then what ranks have just computed together can be anything, without an error where it was computed.
        """
        with self._claim.changing():
            self.whole = False

    def reach(self) -> None:
        """They are what they are to be, as soon as an accelerator has done all that it was asked for up to now."""
        if self._event is not None:
            self._event.record()
        self.whole = True

    def stream(self, device: torch.device) -> torch.Stream:
        """For copies of them, to use in a `with` statement: it comes after the boundary, and waits for nothing else."""
        stream = torch.Stream(device)
        if self._event is not None:
            stream.wait_event(self._event)
        return stream
