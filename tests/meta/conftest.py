from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the repository."""
    return Path(__file__).parents[2]
