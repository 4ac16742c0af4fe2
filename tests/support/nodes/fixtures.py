"""`two_nodes`, for tests in any folder. Skipped where there can be no nodes."""

from collections.abc import Iterator

import pytest

from .cluster import Cluster, forbidden


@pytest.fixture(scope="session")
def warm_nodes() -> Iterator[Cluster]:
    """Two nodes for all tests of this process."""
    if reason := forbidden():
        pytest.skip(reason)
    with Cluster(2, warm=True) as cluster:
        yield cluster


@pytest.fixture
def two_nodes(warm_nodes) -> Iterator[Cluster]:
    """Two nodes as if they were new. `smalti` starts there without its imports, which have been made."""
    yield warm_nodes
    warm_nodes.reset()
