"""Where the files of a model are: a local path as it is, a hub id by way of the hub's cache."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from smalti import UserError
from smalti.models import is_dry_run
from smalti.system import load_json, read_regular
from smalti_diffusers.flavours import GATED, shipped_folder
from smalti_diffusers.sources.weight_files import indexed_files, weight_files

INDEX = "model_index.json"
MODULAR_INDEX = "modular_model_index.json"
"""Of a modular pipeline, where there is no other."""
_SMALL = ("*.json", "*/*.json", "*/*.txt", "*/*.model", "*/*.jinja")
"""What is fetched first: everything but weights. No pickles, no images, no second copy in one large file at the top."""
_HUB_FILE = re.compile(
    r"(?:https://(?:huggingface\.co|hf\.co)/)?(?P<repo>[\w.-]+/[\w.-]+)/(?:(?:blob|resolve)/(?P<revision>[^/]+)/)?"
    r"(?P<file>[^?]+\.safetensors)(?:\?download=true)?"
)
"""`user/repository/FILE.safetensors`, or the address of its page or of the file itself."""
_LOGIN = "`hf auth login` and accept the model's terms on its page; check the network; or name a local folder"


def find_file(name: str, revision: str | None) -> Path | None:
    """A single file: a local path, or `user/repository/FILE.safetensors` or its address on the hub, which is fetched.

    None for anything else. Raises UserError if the download fails.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    match = _HUB_FILE.fullmatch(name)
    if match is None or path.exists():
        return None
    from huggingface_hub import hf_hub_download

    with _reported(name):
        return Path(hf_hub_download(match["repo"], match["file"], revision=match["revision"] or revision))


def small_files(name: str, revision: str | None) -> Path:
    """A local folder as it is; of a hub id the configurations and tokenizers, in the hub's cache.

    In a dry run a published model that is not in the cache is described by the shipped configurations; nothing is asked of the
    hub. Raises UserError if it is neither a folder nor a hub id.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if is_dry_run(missing=True) and revision is None and (shipped := shipped_folder(name)) is not None:
        return _cached(name, shipped)
    return _small(name, revision)


def _cached(name: str, shipped: Path) -> Path:
    """The hub's cache of a published model if it has all configurations that are shipped, else the shipped ones."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(name, local_files_only=True, allow_patterns=list(_SMALL)))
    except LocalEntryNotFoundError:
        return shipped
    wanted = (path.relative_to(shipped) for path in shipped.rglob("*.json"))
    return cached if all((cached / path).is_file() for path in wanted) else shipped


def index_of(folder: Path) -> Path | None:
    """The file that lists the parts of a pipeline; None if the folder is not one."""
    return next((folder / name for name in (INDEX, MODULAR_INDEX) if (folder / name).is_file()), None)


def has_weights(name: str, folder: Path, variant: str | None, without: Collection[str] = ()) -> bool:
    """Whether all weights of a pipeline but those of the parts `without` are on this machine.

    `folder` has the small files of a hub id. A local folder is not looked into: what it lacks is an error.
    """
    if Path(name).expanduser().is_dir():
        return True
    parts = [path.parent for path in folder.glob("*/config.json") if path.parent.name not in without]
    return all(_is_complete(part, variant) for part in parts)


def download_notice(name: str, folder: Path) -> str:
    """What a dry run says of a hub id whose weights are not on this machine; `folder` has the configurations that it used."""
    shipped = folder == shipped_folder(name)
    used = "; the configuration that smalti-diffusers ships was used" if shipped else ""
    login = ", which needs a login (`hf auth login`) of an account that has accepted its terms" if name in GATED else ""
    return f"the weights of {name} are not on this machine{used}. A run downloads them when it starts{login}"


def _is_complete(part: Path, variant: str | None) -> bool:
    chosen = weight_files((path.name for path in part.iterdir()), variant)
    return chosen is not None and all((part / file).is_file() for file in indexed_files(part, chosen))


def find_folder(name: str, revision: str | None) -> Path:
    """The folder of a pipeline: a local one as it is, a hub id by way of the hub's cache, at first without weights.

    Raises UserError if it is neither, or no pipeline.
    """
    path = small_files(name, revision)
    if index_of(path) is None:
        fix = "name the folder that holds model_index.json and the folders of the parts"
        if not Path(name).expanduser().is_dir():
            files = [file for file in _listing(name, path) if file.endswith(".safetensors")]
            fix = f"name a pipeline, or one file: {name}/{files[0]}" if files else "name a pipeline"
        raise UserError(f"{name} is not a pipeline in diffusers' layout: it has no {INDEX}", fix=fix)
    return path


def fetch_weights(name: str, folder: Path, variant: str | None, without: Iterable[str] = ()) -> None:
    """Fetch the weights of a hub id whose small files are in `folder`: one variant, and none of the parts `without`.

    Raises UserError if a part has several variants to choose from.
    """
    index = load_json(read_regular(index_of(folder) or folder / INDEX))
    _fetch_weights(name, folder, variant, {part for part in index if part not in set(without)})


def fetch_model(name: str, folder: Path, part: str, variant: str | None) -> None:
    """Fetch the weights of a model alone: those in the sub-folder `part` of the repository; "" is its top."""
    _fetch_weights(name, folder, variant, {part})


def _fetch_weights(name: str, folder: Path, variant: str | None, parts: Collection[str]) -> None:
    if Path(name).expanduser().is_dir():
        return
    wanted = _weights(folder, _listing(name, folder), variant, parts)
    if wanted:
        _fetch(name, folder.name, wanted)


@cache
def _small(name: str, revision: str | None) -> Path:
    return _fetch(name, revision, _SMALL)


def _fetch(name: str, revision: str | None, patterns: Iterable[str]) -> Path:
    from huggingface_hub import snapshot_download

    with _reported(name):
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))


@contextmanager
def _reported(name: str) -> Iterator[None]:
    """Errors of the hub as a UserError."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except HFValidationError as error:
        raise UserError(
            f"{name} is neither a local file or folder nor a hub id", fix="name a folder, a file or a hub id"
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).partition("\n")[0].removeprefix("Got: ")
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


def _weights(folder: Path, names: Iterable[str], variant: str | None, parts: Collection[str]) -> list[str]:
    """The weight files to fetch of these parts."""
    found: dict[str, list[str]] = {}
    for name in names:
        part, _, file = name.rpartition("/")
        if part in parts:
            found.setdefault(part, []).append(file)
    wanted = []
    for part, files in found.items():
        if chosen := weight_files(files, variant):
            wanted += [f"{part}/{file}" if part else file for file in indexed_files(folder / part, chosen)]
    return wanted
