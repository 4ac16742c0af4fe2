"""Servers, and storages on them. Each server is there for the tests of a file: an idle one takes a fifth of a core."""

from __future__ import annotations

import itertools

import pytest

from smalti_storage_s3.client.attempts import Timeouts
from smalti_storage_s3.client.settings import settings_of
from smalti_storage_s3.client.storage import S3Storage
from smalti_testing import juicefs, seaweed

QUICK = Timeouts(deadline=20, first_deadline=20, pause=0.005, longest_pause=0.05, read_timeout=20)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    with juicefs(tmp_path_factory.mktemp("juicefs")) as server:
        yield server


_numbers = itertools.count()


@pytest.fixture(scope="session")
def options():
    """(server, keys) -> the keys of a dataset on it, in a prefix of its own."""

    def of(server, **changes):
        found = {
            "aws_bucket_name": server.bucket,
            "aws_data_prefix": f"part-{next(_numbers)}/",
            "aws_endpoint_url": server.endpoint,
            "aws_access_key_id": server.access_key,
            "aws_secret_access_key": server.secret_key,
        }
        return found | changes

    return of


@pytest.fixture(scope="session")
def opened(options):
    """(server, fast, timeouts, keys) -> a storage in a prefix of its own."""

    def open_one(server, *, fast=True, timeouts=QUICK, part=5 << 20, **changes):
        return S3Storage(settings_of(options(server, **changes), "test"), timeouts=timeouts, fast=fast, part=part)

    return open_one
