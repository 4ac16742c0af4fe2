"""Who is gone: the processes of all ranks, as those who are left see them."""

import json
import subprocess
import sys
from dataclasses import asdict

from smalti.crew import Crew
from smalti.process import Process


def ended() -> Process:
    """A process that has ended."""
    own = "json.dumps(asdict(Process.current()))"
    code = f"import json; from dataclasses import asdict; from smalti.process import Process; print({own})"
    return Process(**json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout))


def test_the_rank_whose_process_ended_is_named_with_what_was_noticed():
    gone = ended()
    error = Crew(processes=(Process.current(), gone)).explain(RuntimeError("Connection closed by peer\nmore"))
    assert f"rank 1 ({gone}) is gone" in error.message
    assert "RuntimeError: Connection closed by peer" in error.message
    assert "more" not in error.message


def test_an_error_while_everybody_lives_is_nobodys_end():
    assert Crew(processes=(Process.current(),)).explain(RuntimeError("mine")) is None


def test_everybody_learns_of_every_process():
    class Two:
        def share(self, value):
            return [value, value]

    assert asdict(Crew.meet(Two()).processes[1]) == asdict(Process.current())
