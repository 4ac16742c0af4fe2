"""B2: a fifth of all requests fails while checkpoints are uploaded to S3 and read from there."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

from smalti.checkpoint.format.store import CheckpointStore
from smalti.checkpoint.format.verification import verify
from smalti.checkpoint.writer import save
from smalti.data import Storage, StorageError
from smalti.errors import CheckpointError
from smalti.rundir import RunDirectory, acquire
from smalti_data.remote.checkpoints import RemoteRun
from smalti_storage_s3.client.attempts import Timeouts
from smalti_storage_s3.mirror.ownership import Lease
from smalti_storage_s3.mirror.pulling import pull
from smalti_storage_s3.mirror.upload import Uploader
from smalti_testing import FaultProxy, ObjectStore, Rule, seaweed
from smalti_testing.fault_proxy import Fault

from .object_store import storage_of
from .subject import ALONE, Report, found, snapshot

KINDS: tuple[Fault, ...] = (
    "500", "503", "429", "redirect", "error_body", "reset_before", "reset_after", "lost_reply", "cut", "cut_reset",
    "short_length", "long_length", "stall", "flip_get", "flip_put",
)  # fmt: skip
SHARE = 0.2
PATIENT = Timeouts(deadline=60, first_deadline=60, pause=0.01, longest_pause=0.1, connect_timeout=5, read_timeout=1)
HASTY = Timeouts(deadline=0.4, first_deadline=0.4, pause=0.01, longest_pause=0.1, connect_timeout=0.3, read_timeout=0.2)
"""Gives up in the middle of some uploads and downloads."""


@dataclass
class Trial:
    """A run, its mirror, and what was acknowledged: the last step whose upload returned."""

    run: RunDirectory
    place: Path
    acknowledged: int = 0
    refused: int = 0

    def upload(self, storage: Storage, step: int, report: Report) -> None:
        """Save a step and upload it. An error must be one for the user."""
        record = self.run.record()
        assert record is not None
        try:
            uploads = Uploader(run=self.run, lease=Lease.take(storage, record.id), keep=2)
            if uploads.push_newest() is not None:
                self.acknowledged = step
            uploads.rotate()
        except StorageError as error:
            self.refused += 1
            report.expect(bool(error.message and error.fix), f"step {step}: an error without a message or a fix: {error!r}")
        except Exception as error:  # noqa: BLE001 - an error that is none for the user is what must not be
            report.broken.append(f"upload of step {step} raises {type(error).__name__}: {error}")

    def download(self, storage: Storage, *, faulty: bool, size: int, report: Report) -> None:
        """What a fresh machine finds: no older step than the acknowledged one, and the bytes that were saved."""
        fresh, name = RunDirectory(self.place / "fresh"), "through the faults" if faulty else "afterwards"
        try:
            path = pull(RemoteRun(storage), fresh, "latest", lambda _sentence: None)
        except (StorageError, CheckpointError) as error:
            self.refused += faulty
            report.expect(faulty or self.acknowledged == 0, f"{name}: step {self.acknowledged} cannot be read: {error}")
        except Exception as error:  # noqa: BLE001 - as above
            report.broken.append(f"a download {name} raises {type(error).__name__}: {error}")
        else:
            report.expect(verify(path).ok, f"{name}: {path.name} was offered and is damaged")
            now = found(fresh.checkpoints, size) or 0
            report.expect(now != -1, f"{name}: {path.name} has the contents of another step")
            # With faults, an upload that was not acknowledged may be there, or its download was given up for an older one.
            report.expect(faulty or now >= self.acknowledged, f"step {self.acknowledged} was acknowledged, {now} is found")
        finally:
            shutil.rmtree(fresh.path, ignore_errors=True)


def faulty_checkpoints(chance: Random, place: Path, *, runs: int = 4, cases: int = 15) -> Report:
    """B2: saves and loads of runs on S3; after each, a fresh machine finds at least the step acknowledged last, intact."""
    reports = [Report() for _ in range(runs)]
    chances = [Random(chance.random()) for _ in range(runs)]
    rules = [Rule(fault=fault, chance=SHARE / len(KINDS), retry_after=0, seconds=5) for fault in KINDS]
    with seaweed(place / "store") as store, FaultProxy(store.endpoint, rules, seed=chance.randrange(10**6)) as proxy:

        def play(number: int) -> None:
            folder = place / str(number)
            folder.mkdir()
            _saves_of_a_run(chances[number], folder, store, proxy, cases, reports[number])

        with ThreadPoolExecutor(runs) as pool:
            list(pool.map(play, range(runs)))
        injected = len(proxy.injected)
    report = Report(faults=runs * cases, broken=[line for each in reports for line in each.broken])
    report.expect(injected > runs * cases, f"only {injected} requests failed")
    return report


def _saves_of_a_run(chance: Random, place: Path, store: ObjectStore, proxy: FaultProxy, cases: int, report: Report) -> None:
    size, prefix = chance.choice((1000, 20_000, 300_000)), place.name
    run = RunDirectory(place / "run")
    acquire(run).close()
    trial = Trial(run=run, place=place)
    direct = storage_of(store, store.endpoint, fast=False, prefix=prefix)
    proxied = {
        (fast, hasty): storage_of(store, proxy.endpoint, fast=fast, prefix=prefix, timeouts=HASTY if hasty else PATIENT)
        for fast in (False, True)
        for hasty in (False, True)
    }
    for step in range(1, cases + 1):
        save(run.checkpoints, snapshot(step, size), ALONE)
        CheckpointStore(run.checkpoints).rotate(2)
        storage = proxied[chance.random() < 0.5, chance.random() < 0.3]
        trial.upload(storage, step, report)
        trial.download(direct, faulty=False, size=size, report=report)
        trial.download(storage, faulty=True, size=size, report=report)
    trial.upload(direct, cases, report)
    report.expect(trial.acknowledged == cases, "the last upload, without faults, fails")
    mirror = RemoteRun(direct)
    states = {each.name: mirror.problems(each) for each in mirror.all()}
    report.expect(not any(states.values()), f"damaged checkpoints remain: {states}")


def few_faulty_checkpoints(chance: Random, place: Path) -> Report:
    """B2 in short."""
    return faulty_checkpoints(chance, place, runs=2, cases=2)
