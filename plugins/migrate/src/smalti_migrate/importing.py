"""`smalti config import`: files of one trainer become one configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from smalti import UserError
from smalti.config import NAMES, Recognized, Schema, Trainer, package_of, recognize
from smalti.data import Catalog
from smalti_migrate.aitoolkit import options as aitoolkit
from smalti_migrate.files import Opened, open_file
from smalti_migrate.kohya import options as kohya
from smalti_migrate.onetrainer import options as onetrainer
from smalti_migrate.rules import Imported, list_rest
from smalti_migrate.simpletuner import options as simpletuner
from smalti_migrate.simpletuner.spelling import reference_keys

IMPORTERS: Mapping[Trainer, Callable[[Sequence[Opened], str | None], Imported]] = {
    "kohya": kohya.imported,
    "aitoolkit": aitoolkit.imported,
    "onetrainer": onetrainer.imported,
}


def import_files(
    paths: Sequence[Path], schema: Schema, *, family: str | None = None, catalog: Catalog | None = None
) -> Imported:
    """The configuration that the files of one trainer describe, with values that the options of `schema` accept.

    `family` is the model family where the files do not say it, and `catalog` has the storages of datasets. Raises UserError if
    a file cannot be read, if it is not one of a known trainer, or if the files are of different ones.
    """
    files = [open_file(path) for path in paths]
    known = [_recognized(file, schema) for file in files]
    trainers = dict.fromkeys(each.trainer for each in known)
    if len(trainers) > 1:
        shown = "; ".join(f"{file.path} is {each}" for file, each in zip(files, known, strict=True))
        raise UserError(f"these files are of different trainers: {shown}", fix="import the files of one trainer at a time")
    opened = [replace(file, kind=each.kind) for file, each in zip(files, known, strict=True)]
    if known[0].trainer == "simpletuner":
        result = simpletuner.imported(opened, schema, family, catalog)
    else:
        result = IMPORTERS[known[0].trainer](opened, family)
    _check(result, schema)
    list_rest(result)
    return result


def _recognized(file: Opened, schema: Schema) -> Recognized:
    found = recognize(file.text, file.content)
    if found is not None and found.trainer == "smalti" and isinstance(file.content, Mapping):
        keys = reference_keys({str(key): value for key, value in file.content.items()}, schema)
        found = Recognized(trainer="simpletuner", kind="options") if keys else found
    if found is None and file.content is None:
        return Recognized(trainer="kohya", kind="prompts")
    if found is None:
        names = ", ".join(name for trainer, name in NAMES.items() if trainer != "smalti")
        raise UserError(
            f"{file.path} is not a configuration of a known trainer", fix=f"files of these can be imported: {names}"
        )
    if found.trainer == "smalti":
        fix = f"smalti train {file.path}"
        raise UserError(f"{file.path} is {found}", fix=fix)
    return found


def _check(result: Imported, schema: Schema) -> None:
    """List values that an option refuses. Options of packages that are not installed are kept."""
    for name, line in list(result.lines.items()):
        option = schema.find(name)
        if option is None:
            package = package_of("options", name)
            assert package is not None, f"the tables name an option {name} that no package has"
            continue
        reason = option.reject_reason(line.value)
        try:
            option.check(line.value)
        except ValidationError as error:
            reason = reason or str(error.errors()[0]["msg"])
        if reason:
            del result.lines[name]
            result.leave(line.source, f"{name} refuses this value: {reason[:1].lower()}{reason[1:]}", value=line.value)
