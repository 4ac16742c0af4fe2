"""Commands of `smalti` in the process of the test."""

from collections.abc import Callable

import pytest

from smalti.cli import main

Call = Callable[..., tuple[int, str, str]]


def commands(capsys: pytest.CaptureFixture[str], *first: str) -> Call:
    """Returns `call(*words) -> (exit code, output, errors)` for `smalti FIRST WORDS`."""

    def call(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([*first, *map(str, words)])
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return call
