"""The contract of storages, with both clients, on two servers."""

from __future__ import annotations

from typing import ClassVar

import pytest

from smalti_testing.pytest import PluginContract, StorageContract


class OnServer(StorageContract):
    server: ClassVar[str]
    fast: ClassVar[bool]

    @pytest.fixture(autouse=True)
    def _server(self, request, opened):
        self._open = lambda: opened(request.getfixturevalue(self.server), fast=self.fast)

    def make(self, files, folder):
        storage = self._open()
        for key, data in files.items():
            storage.write(key, data)
        return storage


class TestBoto3(OnServer):
    server, fast = "store", False


class TestObstore(OnServer):
    server, fast = "store", True


class TestGateway(OnServer):
    server, fast = "gateway", True


class TestPlugin(PluginContract):
    plugin = "storage_s3"


del OnServer, StorageContract, PluginContract
