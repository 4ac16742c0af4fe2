"""C4: a dataset on S3 behind a network that fails: the samples and their order are those of the same files in a folder."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from smalti.data import BUILT_IN_METADATA, BUILT_IN_STORAGES
from smalti.data.datasets.spec import Catalog
from smalti_storage_s3.plugin import plugin
from smalti_testing import FaultProxy, ObjectStore, Rule, seaweed
from smalti_testing.fault_proxy import Fault

from .data import EFFECTIVE, data_of, entries_of, fill, sequence
from .subject import Report

KINDS: tuple[Fault, ...] = ("500", "503", "reset_before", "lost_reply", "cut", "cut_reset", "flip_get", "short_length", "429")


def remote_catalog() -> Catalog:
    return Catalog.of([*BUILT_IN_STORAGES, *plugin.register_storage()], BUILT_IN_METADATA)


def uploaded(folder: Path, store: ObjectStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = sorted(folder.iterdir())
        list(pool.map(lambda path: store.request("PUT", f"{folder.name}/{path.name}", path.read_bytes()), paths))


def remote_entry(folder: Path, store: ObjectStore, endpoint: str) -> dict[str, object]:
    return {
        "id": folder.name,
        "type": "aws",
        "aws_bucket_name": store.bucket,
        "aws_data_prefix": folder.name,
        "aws_endpoint_url": endpoint,
        "aws_access_key_id": store.access_key,
        "aws_secret_access_key": store.secret_key,
        "aws_region_name": store.region,
        "minimum_image_size": 0,
    }


def faulty_network(chance: Random, place: Path, *, images: int = 100, batches: int = 170) -> Report:
    """C4: about 2,000 reads of which 5 % fail: the sequence of the undisturbed folder, no sample set aside, pixels too."""
    report = Report()
    folder, seed = fill(chance, place / "images", images), chance.randrange(1000)
    expected = sequence(data_of(entries_of(folder), seed=seed), 0, batches)
    # A change of bytes within a range is not detectable; headers of images are read by ranges.
    whole = [Rule(fault=fault, operations={"get"}, chance=0.05 / len(KINDS), retry_after=0) for fault in KINDS]
    rest = [Rule(fault=rule.fault, operations={"range", "list"}, chance=rule.chance, retry_after=0) for rule in whole]
    rules = [*whole, *(rule for rule in rest if rule.fault not in ("flip_get",))]
    with seaweed(place / "store") as store:
        uploaded(folder, store)
        with FaultProxy(store.endpoint, rules, seed=chance.randrange(10**6)) as proxy:
            data = data_of([remote_entry(folder, store, proxy.endpoint)], seed=seed, catalog=remote_catalog())
            ranks = chance.choice((1, 2, 3, 4))
            found = sequence(data, 0, batches, ranks=ranks, workers=4, cache_bytes=0)
            report.faults += len(proxy.injected)
            reads = sum(each.operation in ("get", "range") for each in proxy.exchanges)
    report.expect(not data.quarantined, f"set aside: {data.quarantined[:3]}")
    report.expect(reads > batches * EFFECTIVE, f"{reads} reads for {batches * EFFECTIVE} samples")
    report.expect(found == expected, f"{ranks} ranks see other samples with 5 % faults")
    return report


def faulty_network_once(chance: Random, place: Path) -> Report:
    """C4 in short."""
    return faulty_network(chance, place, images=30, batches=20)
