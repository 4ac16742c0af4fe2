"""What the installed plugins of this project add, which the core keeps in `config/known_packages.json`.

`python tests/support/package_table.py` writes that file anew. All packages below plugins/ must be installed.
"""

import json
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from smalti.config import Schema, draft
from smalti.hookspecs import HookSpecs
from smalti.plugins import named, schema_of
from smalti.plugins.lookup import choose_distributed
from smalti_testing.commands import CommandSubject
from smalti_testing.plugins import PluginSubject

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "core" / "src" / "smalti" / "config" / "known_packages.json"
TYPES = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "TP")
"""Those that Accelerate writes as `distributed_type` for a strategy."""
NODES = {
    "cluster": (
        ("SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
        ("NODE_RANK", "NNODES"),
        ("PET_NODE_RANK", "PET_NNODES"),
        ("JOB_COMPLETION_INDEX", "NNODES"),
        ("JOB_COMPLETION_INDEX", "PET_NNODES"),
    )
}
"""What no plugin declares: (index, count) of the variables by which a launcher says which of several nodes this is."""


def projects() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Each plugin with its folder below plugins/ and its project, in the order of the table; new ones at the end."""
    known = [entry["plugin"] for entry in json.loads(TABLE.read_text(encoding="utf-8"))]
    found = {}
    for file in sorted(ROOT.glob("plugins/*/pyproject.toml")):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        found |= {name: (name, file.parent.name, project) for name in project["entry-points"]["smalti.plugins"]}
    yield from (found[name] for name in sorted(found, key=lambda name: known.index(name) if name in known else len(known)))


def strategy(subject: PluginSubject) -> tuple[str, list[str]]:
    """The title of the plugin's plan and the `distributed_type`s that ask for it."""
    title, types = "", []
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        for kind in TYPES if "configure_distributed" in subject.info.hooks else ():
            Path(file.name).write_text(f"distributed_type: {kind}\n", encoding="utf-8")
            config = draft(schema_of(subject.plugins), (f"--accelerate_config={file.name}",), environment={})
            plan = None if config.problems else choose_distributed(config, subject.plugins)
            if plan is not None and plan.name == subject.name:
                title, types = plan.title, [*types, kind]
    return title, types


def entry(plugin: str, folder: str, needs: list[str]) -> dict[str, object]:
    """The row of one plugin, without what is empty."""
    subject = PluginSubject(plugin)
    options = Schema(tuple(subject.answer(HookSpecs.declare_options) or ())).options.values()
    commands = CommandSubject(plugin).commands if "register_commands" in subject.info.hooks else {}
    storages = subject.answer(HookSpecs.register_storage) or ()
    columns = subject.answer(HookSpecs.register_columns) or ()
    sections = {option.accelerate.partition(".")[0] for option in options if option.accelerate and "=" not in option.accelerate}
    title, types = strategy(subject)
    row = {
        "plugin": plugin,
        "folder": folder if folder != plugin else "",
        "needs": needs,
        "options": [name for option in options for name in (option.name, *option.aliases)],
        "commands": sorted(map(" ".join, commands)),
        "caches": sorted(each.name for each in subject.answer(HookSpecs.register_caches) or ()),
        "families": sorted(each.name for each in subject.answer(HookSpecs.register_model_families) or ()),
        "optimizers": sorted(each.name for each in subject.answer(HookSpecs.register_optimizers) or ()),
        "storages": sorted({each.name for each in (*storages, *(subject.answer(HookSpecs.register_metadata_backends) or ()))}),
        "dataset_keys": [key for each in columns for key in named(each, each.keys).model_fields],
        "accelerate": [*types, *sorted(sections)],
        "checkpoints": [
            (mark, each.name) for each in subject.answer(HookSpecs.register_checkpoint_formats) or () for mark in each.marks
        ],
        "strategy": title,
        "schemes": sorted({scheme for each in storages for scheme in each.schemes}),
        "nodes": NODES.get(plugin, ()),
    }
    return {key: value for key, value in row.items() if value}


def table() -> str:
    """The text of the file."""
    found = list(projects())
    plugins = {project["name"]: plugin for plugin, folder, project in found if folder == plugin}
    rows = []
    for plugin, folder, project in found:
        required = [Requirement(each).name for each in project["dependencies"]]
        rows.append(entry(plugin, folder, [plugins[name] for name in required if name in plugins]))
    return json.dumps(rows, indent=1) + "\n"


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
