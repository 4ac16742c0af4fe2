"""`type: huggingface`: datasets of the Hugging Face Hub, or of a folder that the datasets library wrote.

The parquet files are downloaded into the cache of huggingface_hub, and read there. The datasets library is not needed.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from pydantic import ValidationError

from smalti import ConfigError, Problem, UserError
from smalti.data import DatasetSpec, LocalStorage, MissingFileError, Storage, StoredFile, wrong_values
from smalti_data.archives.row_images import RowImages
from smalti_data.keys import HubKeys, ImageKeys

_log = logging.getLogger(__name__)

_UNREAD = ("streaming", "num_proc", "auto_load", "file_extension", "width_column", "height_column")
"""Keys of SimpleTuner that change nothing here: files are read in parts, and sizes come from the images."""
_CONVERTED = "refs/convert/parquet"
"""The branch with the parquet files that the Hub makes of most datasets."""
_LAYOUT = re.compile(r"([^/]+)/(?:partial-)?[^/]+/\d+\.parquet")
"""How files are named there: a folder per configuration, one per split."""
_SPLITS = ("train", "training", "test", "validation", "valid", "val", "dev")


class HubDataset(HubKeys):
    """Which dataset, and which part of it."""

    @classmethod
    def of(cls, spec: DatasetSpec) -> tuple[HubDataset, dict[str, object]]:
        """Returns the dataset, and the keys of its columns. Raises ConfigError with every wrong key."""
        given = {**spec.metadata_options, **spec.storage_options}
        given = {key: value for key, value in given.items() if key not in _UNREAD and value is not None}
        columns = {key: given.pop(key) for key in ImageKeys.model_fields if key in given}
        where = f"dataset {spec.id!r}"
        try:
            found = cls.model_validate(given)
        except ValidationError as error:
            raise ConfigError(list(wrong_values(error, given, where))) from error
        if "[" in found.split or "+" in found.split:
            message, fix = f"split {found.split!r}: parts of splits are not read", "use max_num_samples, or an entry per split"
            raise ConfigError([Problem(message=message, where=where, fix=fix)])
        return found, columns

    def files(self, keys: Sequence[str]) -> list[str]:
        """Returns those of its files that hold the images of this split. Raises UserError if there are none."""
        found = [
            key for key in keys if key.endswith((".parquet", ".arrow")) and not key.rpartition("/")[2].startswith("cache-")
        ]
        if self.dataset_config is not None:
            found = [key for key in found if self.dataset_config in key.split("/")[:-1]]
        if not found:
            of = f" of the configuration {self.dataset_config!r}" if self.dataset_config else ""
            message = f"{self.dataset_name}: no parquet files{of}"
            raise UserError(message, fix="check the name; convert the dataset with load_dataset(...).to_parquet(...)")
        words = {key: set(re.split(r"[/_.\-]", key.lower())) for key in found}
        chosen = [key for key in found if self.split.lower() in words[key]]
        others = sorted({split for split in _SPLITS for each in words.values() if split in each})
        if not chosen and (others or self.split != "train"):
            fix = f"there are: {', '.join(others)}" if others else "its files name no split: remove split"
            raise UserError(f"{self.dataset_name} has no files of the split {self.split!r}", fix=fix)
        chosen = chosen or found
        layouts = [_LAYOUT.fullmatch(key) for key in chosen]
        configs = sorted({layout[1] for layout in layouts if layout is not None})
        if len(configs) < 2 or None in layouts or self.dataset_config is not None:
            return chosen
        if "default" not in configs:
            raise UserError(f"{self.dataset_name} has several configurations", fix=f"set dataset_config: {', '.join(configs)}")
        return [key for key in chosen if key.startswith("default/")]


class HubImages(RowImages):
    """The images of one split of a dataset."""

    kind = "parquet files"

    def __init__(self, spec: DatasetSpec, storage: Storage) -> None:
        self._dataset, columns = HubDataset.of(spec)
        super().__init__(spec, storage, columns)

    def containers(self) -> Sequence[StoredFile]:
        files = {file.key: file for file in super().containers()}
        return [files[key] for key in self._dataset.files(list(files))]


def open_hub(spec: DatasetSpec) -> Storage:
    """The folder of a dataset; it is downloaded if it is on the Hub and not complete here."""
    dataset, _ = HubDataset.of(spec)
    name = dataset.dataset_name
    folder = Path(name).expanduser()
    if folder.is_dir():
        return LocalStorage(folder)
    if name.count("/") > 1 or name.startswith((".", "~", "/")):
        raise MissingFileError(f"dataset_name: {folder} is not a folder", fix="check the path, or name a dataset of the Hub")
    return LocalStorage(_downloaded(dataset))


def _downloaded(dataset: HubDataset) -> Path:
    """Returns the folder of the files, after downloading those that are missing.

    A rank of a run, and any process without a connection, takes complete files that are there without asking the Hub.
    """
    if "RANK" in os.environ or os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        folder = _complete(dataset)
        if folder is not None:
            return folder
    with _reported(dataset.dataset_name):
        from huggingface_hub import HfApi
        from huggingface_hub.errors import OfflineModeIsEnabled

        try:
            revisions = (dataset.revision,) if dataset.revision is not None else (None, _CONVERTED)
            for revision in revisions:
                files = HfApi().list_repo_files(dataset.dataset_name, repo_type="dataset", revision=revision)
                if any(file.endswith(".parquet") for file in files) or revision == revisions[-1]:
                    break
        except (ConnectionError, TimeoutError, OfflineModeIsEnabled) as error:
            if (folder := _complete(dataset)) is None:
                raise
            _log.warning(
                "the Hugging Face Hub cannot be reached (%s): %s is taken from %s", error, dataset.dataset_name, folder
            )
            return folder
        wanted = [escape(file) for file in dataset.files(files)]
        found = HfApi().snapshot_download(dataset.dataset_name, repo_type="dataset", revision=revision, allow_patterns=wanted)
    return Path(found)


def _complete(dataset: HubDataset) -> Path | None:
    """The folder in the cache that has all files of the dataset; None without one."""
    with _reported(dataset.dataset_name):
        from huggingface_hub import HfApi, get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

        name = dataset.dataset_name
        for revision in (dataset.revision,) if dataset.revision is not None else (None, _CONVERTED):
            try:
                known = [file.path for file in get_cached_repo_tree(name, repo_type="dataset", revision=revision)]
                if any(file.endswith(".parquet") for file in known):
                    wanted = [escape(file) for file in dataset.files(known)]
                    api = HfApi()
                    return Path(
                        api.snapshot_download(
                            name, repo_type="dataset", revision=revision, allow_patterns=wanted, local_files_only=True
                        )
                    )
            except (LocalEntryNotFoundError, CachedRepoTreeNotFoundError):
                continue
    return None


@contextmanager
def _reported(name: str) -> Iterator[None]:
    """Converts errors of the Hub to UserError."""
    try:
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise UserError(
            f"{name} is not a folder, and huggingface_hub is not installed", fix="pip install huggingface_hub"
        ) from error
    try:
        yield
    except HFValidationError as error:
        fix = "give USER/NAME, or the path of a folder"
        raise UserError(f"dataset_name: {name} is neither a folder nor a name of the Hub", fix=fix) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).partition("\n")[0]
        fix = "check the name and the connection; `hf auth login` for private datasets; the same command continues a download"
        raise UserError(f"the dataset {name} cannot be downloaded from the Hugging Face Hub: {reason}", fix=fix) from error
