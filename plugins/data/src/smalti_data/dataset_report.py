"""What `smalti dataset check`, `buckets` and `order` show, as JSON and as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from smalti.data import BatchShape, BucketCount, Dataset, PreparedData, Traffic
from smalti_data.visits import Visit

Json = dict[str, object]
_BAR = 24  # characters of the longest bar


def checked(data: PreparedData, notices: Sequence[str]) -> Json:
    """What `check` found."""
    missing = sum(item.reason.startswith("no caption") for item in data.quarantined) if data.unusable else 0
    return {
        "effective_batch": data.order.effective_batch,
        "batches_per_epoch": data.order.epoch_start(1),
        "buckets": [
            {"width": content.bucket.width, "height": content.bucket.height, "samples": int(content.per_epoch)}
            for content in data.order.buckets
        ],
        "quarantined": data.unusable,
        "without_caption": missing,
        "traffic": traffic(data.datasets),
        "notices": list(notices),
    }


def checked_text(data: PreparedData, notices: Sequence[str]) -> str:
    """The same for people."""
    lines = [f"{'bucket':>12} {'images':>9} {'with repeats':>13}"]
    lines += [f"{content.bucket!s:>12} {len(content):>9} {int(content.per_epoch):>13}" for content in data.order.buckets]
    lines += [f"effective batch {data.order.effective_batch}, {data.order.epoch_start(1)} batches in the first epoch"]
    if data.unusable:
        missing = checked(data, ())["without_caption"]
        lines.append(f"{data.unusable} unusable images, {missing} of them without a caption; smalti dataset scan lists them")
    return "\n".join([*lines, *traffic_lines(data.datasets), *(f"note: {notice}" for notice in notices)])


def buckets(data: PreparedData, shape: BatchShape, outcome: Sequence[str]) -> Json:
    """The buckets before small ones are merged, repeated or left out; `outcome` says what a run does about them."""
    return {
        "effective_batch": shape.effective,
        "buckets": [_bucket(one, shape, float(each)) for one, each in _per_epoch(data)],
        "traffic": traffic(data.datasets),
        "notices": list(outcome),
    }


def _per_epoch(data: PreparedData) -> list[tuple[BucketCount, Fraction]]:
    """The buckets with their samples in an epoch, in which repeats and probabilities count."""
    found = {content.bucket: content.per_epoch for content in data.order.buckets}
    return [(one, found[one.bucket]) for one in data.counts]


def _bucket(one: BucketCount, shape: BatchShape, per_epoch: float) -> Json:
    return {
        "width": one.bucket.width,
        "height": one.bucket.height,
        "images": sum(share.samples for share in one.shares),
        "samples": int(per_epoch),
        "batches_per_epoch": round(per_epoch / shape.effective, 2),
        "smallest_repeats": one.needed_repeats(shape.effective, override_manual=True),
        "datasets": {share.dataset: share.samples for share in one.shares},
    }


def buckets_text(data: PreparedData, shape: BatchShape, outcome: Sequence[str]) -> str:
    """The same for people, with a histogram."""
    lines = [f"{'bucket':>12} {'images':>10} {'batches':>9} {'smallest repeats':>17}"]
    found = _per_epoch(data)
    most = max(each for _, each in found)
    for one, each in found:
        images, bar = sum(share.samples for share in one.shares), "#" * max(1, round(_BAR * each / most))
        needed = one.needed_repeats(shape.effective, override_manual=True)
        lines.append(f"{one.bucket!s:>12} {images:>10} {float(each) / shape.effective:>9.1f} {needed:>17}  {bar}")
    total, short = sum(each for _, each in found), sum(one.total < shape.effective for one in data.counts)
    lines.append(f"{len(found)} buckets, {int(total)} samples in an epoch, effective batch {shape.effective}")
    lines.append(f"{short} of them cannot fill a batch" if short else "each fills a batch")
    return "\n".join([*lines, *traffic_lines(data.datasets), *(f"note: {line}" for line in outcome)])


def batches(data: PreparedData, shape: BatchShape, positions: Iterable[int], visits: Iterable[Sequence[Visit]]) -> list[Json]:
    """The batches at these positions, with the rank and the micro-batch of each sample."""
    found: list[Json] = []
    for position, samples in zip(positions, visits, strict=True):
        batch = data.order.batch(position)
        rows = [
            {
                "micro_batch": slot // (shape.train_batch_size * shape.ranks),
                "rank": slot // shape.train_batch_size % shape.ranks,
                "number": one.number,
                "key": one.key,
                "caption": one.caption,
                "flipped": one.is_flipped,
                "caption_dropped": one.is_dropped,
            }
            for slot, one in enumerate(samples)
        ]
        size = {"width": batch.bucket.width, "height": batch.bucket.height}
        found.append({"position": position, "epoch": batch.epoch, "bucket": size, "samples": rows})
    return found


def batches_text(data: PreparedData, shape: BatchShape, positions: Iterable[int], visits: Iterable[Sequence[Visit]]) -> str:
    """The same for people."""
    lines = []
    for position, samples in zip(positions, visits, strict=True):
        batch = data.order.batch(position)
        lines.append(f"batch {position}, epoch {batch.epoch}, {batch.bucket}")
        for slot, one in enumerate(samples):
            marks = "".join(f" ({word})" for word, on in (("flipped", one.is_flipped), ("dropped", one.is_dropped)) if on)
            rank = slot // shape.train_batch_size % shape.ranks
            lines.append(f"  {f'rank {rank}  ' if shape.ranks > 1 else ''}{one.key}: {one.caption}{marks}")
    return "\n".join(lines)


def traffic(datasets: Iterable[Dataset]) -> Json:
    """Requests and bytes of the storages that count them."""
    storages = {id(dataset.storage): dataset.storage for dataset in datasets}.values()
    found = [each for storage in storages for each in storage.traffic().values()]
    total = Traffic(
        requests=sum(each.requests for each in found),
        sent=sum(each.sent for each in found),
        received=sum(each.received for each in found),
        retries=sum(each.retries for each in found),
    )
    return {"requests": total.requests, "sent": total.sent, "received": total.received, "retries": total.retries}


def traffic_lines(datasets: Iterable[Dataset]) -> list[str]:
    """The same for people; none where only folders are read."""
    found = traffic(datasets)
    if not found["requests"]:
        return []
    return [f"{found['requests']} requests to the storage, {found['received']} bytes received, {found['retries']} retries"]
