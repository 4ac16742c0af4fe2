"""The contract of a metadata backend. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from smalti.data import LISTED, MetadataSource
from smalti_testing.contract import Contract, expect


@dataclass(frozen=True, kw_only=True)
class MetadataSubject:
    """What the checks are given: `make` opens the source over the same samples, a new one each time."""

    make: Callable[[], MetadataSource]


METADATA: Contract[MetadataSubject] = Contract("metadata backend")


def check_metadata_backend(make: Callable[[], MetadataSource]) -> None:
    """Every check of the contract. `make` opens a source of at least two samples, a new one over the same samples each time."""
    METADATA.run_all(MetadataSubject(make=make))


@METADATA.check
def it_lists_each_key_once_and_sorted(subject: MetadataSubject) -> None:
    """The order of samples is the order of the keys as text, as `sorted` gives it. Join the rows of one key."""
    source = subject.make()
    expect(isinstance(source, MetadataSource), "it does not inherit from smalti.data.MetadataSource")
    keys = [sample.key for sample in source.list()]
    expect(len(keys) > 1, f"give the check two samples at least, not {keys}")
    expect(keys == sorted(set(keys)), f"list() gave {keys}")


@METADATA.check
def rows_and_columns_are_the_same_samples(subject: MetadataSubject) -> None:
    """`list` and `list_columns` are two views of the same samples; the columns have the schema `smalti.data.LISTED`."""
    rows = [asdict(sample) for sample in subject.make().list()]
    batches = [*subject.make().list_columns()]
    expect(all(batch.schema.equals(LISTED) for batch in batches), f"the columns are {[str(batch.schema) for batch in batches]}")
    columns = [row for batch in batches for row in batch.to_pylist()]
    for row in columns:
        row["captions"] = None if row["captions"] is None else tuple(row["captions"])
    expect(columns == rows, f"the rows are {rows}, the columns {columns}")


@METADATA.check
def a_sample_has_what_tells_that_it_changed(subject: MetadataSubject) -> None:
    """Without an etag, a change of the file is not noticed; a negative size is none."""
    for sample in subject.make().list():
        expect(bool(sample.etag), f"{sample.key} has no etag")
        expect(sample.size >= 0, f"{sample.key} has the size {sample.size}")
        expect((sample.width is None) == (sample.height is None), f"{sample.key} has one side of its size only")


@METADATA.check
def what_did_not_change_is_the_same_again(subject: MetadataSubject) -> None:
    """A second list gives the same samples, and `is_unchanged` must not say otherwise of a state that was just listed."""
    source = subject.make()
    first = [*source.list()]
    expect([*subject.make().list()] == first, "a second list of the same files gave other samples")
    if source.listed_state is not None:
        expect(subject.make().is_unchanged(source.listed_state), "nothing changed, but is_unchanged says so")
