"""Where the files of a model are: a local path as it is, a hub id by way of the hub's cache."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from smalti import UserError
from smalti.models import WeightFiles, weight_files, weight_map

INDEX = "model_index.json"
_SMALL = (INDEX, "config.json", "*/*.json", "*/*.txt", "*/*.model", "*/*.jinja")
"""What is fetched first: everything but weights. No pickles, no images, no second copy in one large file at the top."""
_LOGIN = "`hf auth login` and accept the model's terms on its page; check the network; or name a local folder"


def find_folder(name: str, revision: str | None) -> Path:
    """The folder of a pipeline: a local one as it is, a hub id by way of the hub's cache, at first without weights.

    Raises UserError if it is neither, or no pipeline.
    """
    path = Path(name).expanduser()
    if not path.is_dir():
        path = _fetch(name, revision, _SMALL)
    if not (path / INDEX).is_file():
        raise UserError(
            f"{path} is not a pipeline in diffusers' layout: it has no {INDEX}",
            fix="name the folder that holds model_index.json and the folders of the parts",
        )
    return path


def fetch_weights(name: str, folder: Path, variant: str | None, without: Iterable[str] = ()) -> None:
    """Fetch the weights of a hub id whose small files are in `folder`: one variant, and none of the parts `without`.

    Raises UserError if a part has several variants to choose from.
    """
    if Path(name).expanduser().is_dir():
        return
    wanted = _weights(folder, _listing(name, folder), variant, frozenset(without))
    if wanted:
        _fetch(name, folder.name, wanted)


def _fetch(name: str, revision: str | None, patterns: Iterable[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except HFValidationError as error:
        raise UserError(
            f"{name} is neither a local file or folder nor a hub id", fix="name a folder, a file or a hub id"
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{name} is not a local file or folder, and the download from the Hugging Face Hub failed: {reason}", fix=_LOGIN
        ) from error


def _listing(name: str, folder: Path) -> list[str]:
    """The files of the repository at this commit; those in the cache if the hub was never asked for more."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return [file.path for file in get_cached_repo_tree(name, revision=folder.name)]
    except CachedRepoTreeNotFoundError:
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _weights(folder: Path, names: Iterable[str], variant: str | None, without: frozenset[str]) -> list[str]:
    """The weight files to fetch of the parts in model_index.json."""
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    parts: dict[str, list[str]] = {}
    for name in names:
        part, _, file = name.rpartition("/")
        if part in index and part not in without:
            parts.setdefault(part, []).append(file)
    wanted = []
    for part, files in parts.items():
        if chosen := weight_files(files, variant):
            wanted += [f"{part}/{file}" for file in _of(folder / part, chosen)]
    return wanted


def _of(folder: Path, chosen: WeightFiles) -> Iterable[str]:
    """The files that the index lists, where there is one: it was fetched with the small files."""
    if chosen.index is not None and (folder / chosen.index).is_file():
        return sorted(set(weight_map(folder / chosen.index).values()))
    return chosen.files
