"""Detects the structure of a model from its configuration alone, and caches it. Cached results need no torch.

The key of a result is family, path, flavour and all options that may change the model. A result is valid while its fingerprint
is the same: the versions of the packages that build the model, and the configuration files of the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import cast

from pydantic import TypeAdapter

from smalti import Config, FamilyEntry
from smalti.config import ModelOptions
from smalti.models import Structure
from smalti.plugins import GROUP, CacheFile, Plugins, family_entry
from smalti_fsdp2.blocks import describe_blocks

_log = logging.getLogger(__name__)

Report = Callable[[str], object]

FLAG = "fsdp_transformer_layer_cls_to_wrap"
CACHE = "fsdp-blocks"
_LIBRARIES = ("smalti", "torch", "diffusers", "transformers")
_SHAPELESS = frozenset(
    ("run", "data", "training", "optimizer", "validation", "checkpoints", "launch", "tracking", "trackers", "fsdp", "context")
)
"""Groups of options that do not change the model. All others count, also of plugins: a family may use any of them."""
_SHAPING = frozenset(("resolution", "resolution_type"))
"""Exceptions, which count: a table of positions may have the size of the images."""


@dataclass(frozen=True, kw_only=True)
class Detection:
    """The structure of a model. `pretrained_model` is the path or hub id that was read, if known.

    `cached` says that this result comes from the cache.
    """

    model_family: str
    model_flavour: str | None
    pretrained_model: str | None
    detected_at: str
    structure: Structure
    cached: bool = False

    @property
    def flag(self) -> str:
        """The flag that selects the suggested classes; empty if no block repeats."""
        classes = ",".join(self.structure.suggested)
        return f"--{FLAG}={classes}" if classes else ""

    def as_json(self) -> dict[str, object]:
        return {**_adapter().dump_python(self, mode="json"), "flag": self.flag}

    @classmethod
    def from_json(cls, value: object) -> Detection:
        """The inverse of `as_json`. Raises ValueError for anything else."""
        return _adapter().validate_python(value)


@cache
def _adapter() -> TypeAdapter[Detection]:
    return TypeAdapter(Detection)


def detect(config: Config, plugins: Plugins, *, refresh: bool = False, report: Report = _log.warning) -> Detection:
    """The structure of the model of this configuration: from the cache, or by building it without weights.

    `refresh` ignores the cache. `report` is called if the cache cannot be written. Raises UserError for an unknown family, and
    what the family itself raises.
    """
    entry = family_entry(config, plugins)
    if not refresh and (known := detected(config, report=report)) is not None:
        return known
    sources = _sources(config, entry)
    read = [*sources, *_other_sources(config)]
    before = _fingerprint(read)
    detection = _examine(config, plugins, sources[0] if len(sources) == 1 else None)
    if _fingerprint(read) == before:  # else the checkpoint has changed in the meantime
        kept = {"fingerprint": before, "sources": read, "detection": detection.as_json()}
        block_cache(report).put(_key(config), kept)
    return detection


def detected(config: Config, *, report: Report = _log.warning) -> Detection | None:
    """The cached result, if it is valid, or None. Needs neither torch nor the family."""
    kept = block_cache(report).get(_key(config))
    if not isinstance(kept, dict):
        return None
    try:
        if kept["fingerprint"] != _fingerprint(kept["sources"]):
            return None
        return replace(Detection.from_json(kept["detection"]), cached=True)
    except (KeyError, TypeError, ValueError):
        report(f"the entry of this model in {block_cache(report).place} cannot be read; detecting again")
        return None


def _examine(config: Config, plugins: Plugins, source: str | None) -> Detection:
    """Build the model without weights and describe it."""
    from smalti.models import dry_run, without_weights
    from smalti.plugins import find_family

    with dry_run():
        family = find_family(config, plugins)
    with without_weights():
        model = family.build_model()
    return Detection(
        model_family=family.name,
        model_flavour=config[ModelOptions].model_flavour,
        pretrained_model=source,
        detected_at=datetime.now(UTC).isoformat(timespec="seconds"),
        structure=describe_blocks(model, family.block_classes()),
    )


def block_cache(report: Report = _log.warning) -> CacheFile:
    """The cache file of results."""
    return CacheFile(CACHE, report=report)


# --- what a result depends on -----------------------------------------------------------------------------------------


def _key(config: Config) -> str:
    """The key in the cache, readable for people; options are shortened to a digest."""
    model, options = config[ModelOptions], _shaping_options(config)
    family = (model.model_family or "").lower().replace("-", "_")
    path = model.pretrained_model_name_or_path
    place = str(Path(path).expanduser().resolve()) if path and Path(path).expanduser().exists() else path
    digest = _digest(json.dumps({**options, "model_family": family, "pretrained_model_name_or_path": place}, sort_keys=True))
    return "|".join((family, place or "", model.model_flavour or "", digest))


def _shaping_options(config: Config) -> dict[str, object]:
    """The options that may change the model and are not at their defaults."""
    owners = {name: option.group.name for name, option in config.schema.options.items()}
    shaping = {name for name, group in owners.items() if group not in _SHAPELESS} | _SHAPING
    return {name: value for name, value in config.changes().items() if name in shaping}


def _other_sources(config: Config) -> list[str]:
    """Paths and hub ids in other options that may change the model, such as the pipeline that a single file belongs to."""
    path = config[ModelOptions].pretrained_model_name_or_path
    texts = sorted({value for value in _shaping_options(config).values() if isinstance(value, str)} - {path})
    found = [str(Path(text).expanduser().resolve()) if Path(text).expanduser().exists() else text for text in texts]
    return [text for text in found if any(_contents(text))]


def _sources(config: Config, entry: FamilyEntry) -> list[str]:
    """Paths and hub ids from which the model's configuration may come; several if the family chooses a flavour itself."""
    model = config[ModelOptions]
    if path := model.pretrained_model_name_or_path:
        local = Path(path).expanduser()
        return [str(local.resolve()) if local.exists() else path]
    if model.model_flavour in entry.flavours:
        return [entry.flavours[cast(str, model.model_flavour)]]
    return list(entry.flavours.values())


def _fingerprint(sources: Sequence[str]) -> str:
    """Changes whenever the same key might have another result."""
    parts = [*_versions(), *(part for source in sources for part in _contents(source))]
    return _digest(json.dumps(parts))


def _versions() -> Iterator[str]:
    """Versions of libraries and of the packages of all plugins: a family may come from any of them."""
    packages = {entry.dist.name for entry in entry_points(group=GROUP) if entry.dist is not None}
    for name in sorted({*packages, *_LIBRARIES}):
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"{name} is not installed"


def _contents(source: str) -> Iterator[str]:
    """Identifies the contents of a checkpoint: by its configuration files, or by its commit in the hub's cache."""
    path = Path(source).expanduser()
    if path.is_dir():
        for file in sorted([*path.glob("*model_index.json"), *path.glob("config.json"), *path.glob("*/config.json")]):
            yield f"{file.relative_to(path)} {_digest(file.read_bytes())}"
    elif path.is_file():
        status = path.stat()
        yield f"{status.st_size} bytes of {status.st_mtime_ns}"
    else:
        refs = _hub_cache(os.environ) / f"models--{source.replace('/', '--')}" / "refs"
        for file in sorted(refs.rglob("*")) if refs.is_dir() else ():
            if file.is_file():
                yield f"{file.relative_to(refs)} {file.read_text().strip()}"


def _hub_cache(environment: Mapping[str, str]) -> Path:
    """The cache folder of huggingface_hub."""
    if place := environment.get("HF_HUB_CACHE"):
        return Path(place).expanduser()
    home = environment.get("HF_HOME") or f"{environment.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(home).expanduser() / "hub"


def _digest(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:16]
