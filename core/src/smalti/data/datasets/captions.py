"""Captions of images. A sample without a caption is quarantined with the reason; it is never trained as ""."""

from __future__ import annotations

from pathlib import PurePosixPath

from smalti.data.datasets.sources import Listed, caption_key
from smalti.data.datasets.spec import DatasetSpec
from smalti.data.scan.quarantine import BadSampleError
from smalti.data.storage.protocol import MissingFileError, Storage

NO_CAPTION = "no caption"
"""How the reason begins for every sample without a caption."""
NO_TEXT_FILE = f"{NO_CAPTION}: missing file "
"""How the reason begins for a sample whose text file is missing."""


def read_captions(spec: DatasetSpec, storage: Storage, listed: Listed) -> tuple[str, ...]:
    """Returns the captions of a sample, at least one; the loader picks one per visit. Raises BadSampleError."""
    prompt = spec.instance_prompt or ""
    if spec.only_instance_prompt or spec.caption_strategy == "instanceprompt":
        return (prompt,)
    match spec.caption_strategy:
        case "textfile":
            if spec.instance_prompt_fallback and not listed.caption_etag:
                return (prompt,)
            captions = _from_file(spec, storage, caption_key(listed.key, spec.caption_extension))
        case "filename":
            captions = (_from_name(listed.key),)
        case _:
            captions = listed.captions or ()
    # A caption with a weight has its own place, which is empty where the image does not have it.
    if not captions or not (any(captions) if spec.caption_weights else all(captions)):
        raise BadSampleError(missing_caption(spec, listed.key))
    if not spec.prepend_instance_prompt:
        return captions
    return tuple(f"{prompt} {caption}" if caption else "" for caption in captions)


def depends_on_text_file(spec: DatasetSpec) -> bool:
    """Whether the captions of an image come from the text file beside it."""
    return spec.caption_strategy == "textfile" and not spec.only_instance_prompt


def captions_are_listed(spec: DatasetSpec) -> bool:
    """Whether the captions are what the source lists, such as a column of a table."""
    return not spec.only_instance_prompt and spec.caption_strategy not in ("textfile", "filename", "instanceprompt")


def _from_file(spec: DatasetSpec, storage: Storage, key: str) -> tuple[str, ...]:
    try:
        text = storage.read(key).decode("utf-8-sig").strip()
    except MissingFileError as error:
        raise BadSampleError(f"{NO_TEXT_FILE}{key}") from error
    except UnicodeDecodeError as error:
        raise BadSampleError(f"no caption: {key} is not UTF-8 text") from error
    if spec.disable_multiline_split:
        return (text,)
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def _from_name(key: str) -> str:
    return " ".join(PurePosixPath(key).stem.replace("_", " ").split())


def missing_caption(spec: DatasetSpec, key: str) -> str:
    """Returns the reason for a sample without a caption. It does not depend on the key where `captions_are_listed`."""
    match spec.caption_strategy:
        case "textfile":
            return f"no caption: {caption_key(key, spec.caption_extension)} is empty"
        case "filename":
            return "no caption: the file name has no words"
    if spec.caption_strategy == "json":
        columns = (*spec.json_table.caption_columns, spec.json_table.fallback_caption_column)
        return f"no caption under {' or '.join(repr(column) for column in columns if column is not None)} in the table"
    return f"no caption in the {spec.caption_strategy} table"
