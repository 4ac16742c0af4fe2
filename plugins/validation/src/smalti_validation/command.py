"""`smalti run report`: what the evaluations and the visits of a run say. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from smalti import UserError
from smalti.cli import Command, counted, print_table
from smalti.rundir import RunDirectory, to_json
from smalti_validation.history import Change
from smalti_validation.learning import Learning, TrainedImage, TrainedLevel, part_of, read_learning
from smalti_validation.overfitting import Report, read_report

_SHOWN = 10
"""Images in the table; the JSON has all."""


@click.command(cls=Command, examples=("smalti run report runs/first", "smalti run report runs/first --json"))
@click.argument("directory", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all images.")
def report(directory: Path, as_json: bool) -> None:
    """Show which noise levels overfit, which held-out images improve least, and which training images are learned least.

    A level overfits if its loss on held-out images has clearly risen since its best step: by more than the 95 % confidence
    interval of the difference, image by image.

    Each visit of a training image is compared with all others at about the same noise level: 1 is an image like the others.
    Images with captions that do not fit, or that look like no other image, are learned least.
    """
    run = RunDirectory(directory)
    found, learning = read_both(run)
    if found is None and learning is None:
        raise UserError(
            f"{directory} has neither an evaluation on held-out images nor visits of training images",
            fix="train with a dataset of the dataset_type eval, or with the plugin visits",
        )
    if as_json:
        click.echo(to_json(_as_json(found, learning), indent=2))
        return
    if found is not None:
        _show_evaluations(found)
    if learning is not None:
        _show_learning(learning, found)


def read_both(run: RunDirectory) -> tuple[Report | None, Learning | None]:
    """What the evaluations of a run say, and what its visits, with changes since the steps that evaluated best."""
    found = read_report(run)
    nearest = sorted(found.levels, key=lambda level: -abs(level.timestep - part_of(level.timestep))) if found else []
    return found, read_learning(run, {part_of(level.timestep): level.best for level in nearest})


def rising(found: Report | None) -> set[int]:
    """The timesteps of `TrainedLevel` around which the loss on held-out images has clearly risen."""
    return {part_of(level.timestep) for level in found.levels if level.overfits} if found else set()


def _as_json(found: Report | None, learning: Learning | None) -> dict[str, object]:
    content: dict[str, object] = {}
    if found is not None:
        levels = [asdict(level) | {"overfits": level.overfits} for level in found.levels]
        content |= asdict(found) | {"levels": levels, "worse": found.worse}
    return content | {"training": None if learning is None else asdict(learning)}


def _show_evaluations(found: Report) -> None:
    of = "".join(f", losses times {name}" for name in found.factors)
    click.echo(f"{counted(len(found.images), 'held-out image')}, steps {found.first} to {found.last}{of}")
    rows = [
        (
            str(level.timestep),
            str(level.best),
            f"{level.best_loss:.4g}",
            f"{level.last_loss:.4g}",
            _shown(level.change, ", overfits" if level.overfits else ""),
        )
        for level in found.levels
    ]
    print_table(("timestep", "best at step", "its loss", "last loss", ""), rows, right=range(4))
    click.echo(f"\n{counted(found.worse, 'image')} of {len(found.images)} with a higher loss than at step {found.first}")
    least = [(image.name, f"{image.first:.4g}", f"{image.last:.4g}") for image in found.images[:_SHOWN]]
    print_table(("improved least", "first loss", "last loss"), least, right=(1, 2))


def _show_learning(learning: Learning, found: Report | None) -> None:
    """`found` says at which levels the loss on held-out images has risen."""
    if found is not None:
        click.echo()
    seen = f"{counted(learning.count, 'image')} in the second half of the run"
    click.echo(f"{counted(learning.visits, 'visit')} of training images; {seen}")
    overfit = rising(found)
    rows = [
        (
            str(each.timestep),
            str(each.visits),
            f"{each.first:.4g}",
            f"{each.last:.4g}",
            _trained(each, each.timestep in overfit),
        )
        for each in learning.levels
    ]
    if rows:
        print_table(("timestep", "visits", "loss, first tenth", "last tenth", ""), rows, right=range(4))
    for title, images in (("learned least", learning.least), ("learned most", learning.most)):
        click.echo()
        shown = [_row(image) for image in images[:_SHOWN]]
        print_table((title, "visits", "first half", "second half", ""), shown, right=(1, 2, 3))
    if learning.unnamed:
        click.echo(f"\nimages without a name: {learning.unnamed}")


def _row(image: TrainedImage) -> tuple[str, ...]:
    interval = "" if image.interval is None else f"+-{image.interval:.2g}"
    name = f"{image.dataset}: {image.key}" if image.dataset else image.key
    return name, str(image.visits), "" if image.first is None else f"{image.first:.3g}", f"{image.last:.3g}", interval


def _trained(level: TrainedLevel, overfits: bool) -> str:
    falls = level.change is not None and level.change.improves
    since = "" if level.change is None else f" since step {level.change.since}"
    return _shown(level.change, ", while that on held-out images rises" if falls and overfits else "", since=since)


def _shown(change: Change | None, judgement: str, *, since: str = "") -> str:
    if change is None:
        return ""
    interval = "" if change.interval is None else f" (95 %: +-{change.interval:.2g})"
    return f"{change.loss:+.2g}{since}{interval}{judgement}"
