"""A third-party plugin for tests: a storage and a family that stand still in a phase of a run for as long as the test wants.

GATE names a file that holds the name of a phase. Who comes there in it makes the file GATE.reached, with the
number of its process, and waits until the first one is gone.
"""

import os
import time
from pathlib import Path

from smalti import FamilyEntry, StorageEntry, hookimpl
from smalti.data.storage.local import LocalStorage
from smalti_testing import TinyFamily


def wait_at(phase):
    gate = Path(os.environ.get("GATE", "/dev/null"))
    if gate.is_file() and gate.read_text() == phase:
        reached = gate.with_suffix(".reached")
        reached.with_suffix(f".{os.getpid()}").write_text(f"{os.getpid()}")
        reached.with_suffix(f".{os.getpid()}").rename(reached)
        while gate.exists():
            time.sleep(0.02)


class Gated:
    @hookimpl
    def register_storage(self):
        return [StorageEntry(name="gated", title="gated", factory="smalti_gated:storage")]

    @hookimpl
    def register_model_families(self):
        return [FamilyEntry(name="gated", title="gated", factory="smalti_gated:family")]

    @hookimpl
    def detect_blocks(self, model):
        wait_at("building")


class Storage(LocalStorage):
    """Notes each scan in GATE.scans."""

    def list(self, prefix="", *, after=""):
        with Path(os.environ["GATE"]).with_suffix(".scans").open("a") as file:
            file.write(f"{os.getpid()}\n")
        return super().list(prefix, after=after)

    def read_range(self, key, start, length):
        wait_at("scanning")
        return super().read_range(key, start, length)


def storage(spec):
    return Storage(spec.instance_data_dir)


class Family(TinyFamily):
    """Its encoder waits before its third batch."""

    batches = 0

    def encode_images(self, pixels):
        self.batches += 1
        if self.batches > 2:
            wait_at("encoding")
        return super().encode_images(pixels)

    def encoder_identity(self, kind):
        return {"gated": kind}

    def release_encoder(self, kind):
        pass


def family(config):
    return Family()


plugin = Gated()
