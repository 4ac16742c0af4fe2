import pytest


@pytest.fixture(autouse=True)
def _own_folders(own_folders: None) -> None:
    """For all tests of this folder."""
