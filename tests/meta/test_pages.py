"""README and docs: generated parts are up to date, examples are accepted, links lead somewhere."""

import json
import pkgutil
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from smalti.config.resolution import resolve
from smalti.data import DataDefaults, catalog_of, parse_datasets
from smalti.data.datasets.spec import ENTRY_KEYS
from smalti.errors import ConfigError
from smalti.hookspecs import HookSpecs
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.schema import schema_of
from smalti.types import CommandCollector
from smalti_data.dataset_keys import SECTIONS, dataset_reference
from smalti_migrate.simpletuner.page import reference_keys_page
from smalti_migrate.tables import tables_page

_LINK = re.compile(r"\]\((?!https?:)([^)\s]*)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_SWITCHES = ("...", "--dry-run", "--json", "--help", "--help-all")
_OF_SLURM = ("cpus_per_task", "dependency", "exclude", "kill", "no", "nodes", "ntasks", "sbatch", "setup", "signal")
_OF_JOBS = (
    "claim",
    "image",
    "max_failures",
    "max_requeues",
    "mount",
    "resource",
    "secret",
    "shm",
    "spares",
    "submit",
    "unusable",
)
_OF_RAY = ("restarts", "wait_seconds", "workers")
_OF_THE_WEB_PAGE = ("host", "open", "port")
_OF_OTHER_COMMANDS = (
    *_OF_SLURM,
    *_OF_JOBS,
    *_OF_RAY,
    *_OF_THE_WEB_PAGE,
    "gpu",
    "gpus",
    "quick",
    "rehearse",
    "card",
    "goal",
    "overwrite",
    "abort_abandoned",
    "apply",
    "bundle",
    "caption_column",
    "captions",
    "dry",
    "dtype",
    "ema",
    "encoder",
    "force",
    "full",
    "older_than",
    "ssh_command",
    "unused",
    "position",
    "format",
    "help",
    "image_column",
    "json",
    "max_shard_size",
    "measure",
    "public",
    "merge",
    "raw",
    "refresh",
    "share",
    "single_file",
    "step",
    "tensors",
    "timeout",
    "to",
    "write",
    "yes",
)
_OF_THEIR_OWN = ("writing-a-plugin.md", "your-own-architecture.md", "hooks.md", "protocols.md")
"""Pages with options of plugins that they write themselves; a test follows them."""
_PACKAGES = ("smalti", "smalti_fsdp2", "smalti_deepspeed", "smalti_diffusers", "smalti_testing")
WORDS = 45_000
"""Of README and all pages that are written by hand, at most: a page that grows pays for it on another."""
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def pages(root: Path) -> dict[Path, str]:
    """The text of README and of every page of the documentation."""
    paths = [root / "README.md", *(root / "docs").rglob("*.md")]
    return {path: path.read_text(encoding="utf-8") for path in paths}


def anchors(text: str) -> set[str]:
    """What the headings of a page can be linked by, as GitHub makes it."""
    headings = (re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in _HEADING.findall(_FENCE.sub("", text)))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_generated_pages_are_up_to_date(root):
    pages = {
        "dataset-keys.md": ("smalti dataset reference", dataset_reference()),
        "other-trainers.md": ("smalti config import --tables", tables_page()),
        "simpletuner.md": ("smalti config reference --simpletuner", reference_keys_page(schema_of(load_plugins()))),
    }
    for name, (command, text) in pages.items():
        page = root / "docs" / "reference" / name
        assert page.read_text(encoding="utf-8") == text, f"{command} > docs/reference/{name}"


def test_the_reference_of_dataset_keys_has_every_key_once():
    assert sorted(key for keys in SECTIONS.values() for key in keys) == sorted(ENTRY_KEYS)


def test_the_examples_of_datasets_are_accepted(root):
    examples = dict(_FENCE.findall((root / "docs" / "datasets.md").read_text(encoding="utf-8").partition("## A table")[0]))
    catalog = catalog_of(load_plugins())
    for entries in (json.loads(examples["json"]), tomllib.loads(examples["toml"])["datasets"]):
        specs, problems = parse_datasets(entries, where="docs/datasets.md", defaults=DataDefaults(), catalog=catalog)
        assert (len(specs), problems) == (len(entries), ())


def trainings(text: str) -> list[list[str]]:
    """The words after `smalti train` in the blocks of a page, without what is not meant to be typed."""
    lines = "\n".join(body for _, body in _FENCE.findall(text)).replace("\\\n", " ").splitlines()
    found = [line.removeprefix("$ ") for line in lines if re.match(r"(\$ )?smalti train ", line)]
    return [[word for word in shlex.split(line, comments=True)[2:] if word not in _SWITCHES] for line in found]


def test_the_commands_have_options_that_exist_and_values_that_they_take(pages, root, tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(root / "examples")
    (tmp_path / "accelerate.yaml").symlink_to(root / "tests" / "data" / "accelerate-fsdp.yaml")
    (tmp_path / "zero2.json").write_text('{"zero_optimization": {"stage": 2}}')
    monkeypatch.chdir(tmp_path)
    schema = schema_of(load_plugins())
    wrong = []
    for path, text in pages.items():
        for words in trainings(text) if path.name not in _OF_THEIR_OWN else ():
            file = Path(words.pop(0)) if words and not words[0].startswith("-") else None
            try:
                resolve(schema, words, file=file if file and file.exists() else None, environment={})
            except ConfigError as error:
                wrong.append(f"{path.name}: {words}: {error}")
    assert wrong == []


def test_the_flags_that_are_named_exist(pages):
    schema = schema_of(load_plugins())
    known = {*schema.options, *schema.aliases, *_OF_OTHER_COMMANDS}
    unknown = [
        f"{path.name}: --{flag}"
        for path, text in pages.items()
        for flag in re.findall(r"`[^`\n]*?--([a-z][a-z0-9_]+)", _FENCE.sub("", text))
        if path.name not in _OF_THEIR_OWN and path.parent.name != "reference" and flag.removeprefix("no_") not in known
    ]
    assert unknown == []


def test_the_python_names_are_there(pages):
    named = {
        (path.name, name)
        for path, text in pages.items()
        for name in re.findall(r"`((?:smalti|smalti_\w+)(?:\.\w+)+)[`(]", _FENCE.sub("", text))
        if not name.endswith((".toml", ".plugins")) and name.partition(".")[0] in _PACKAGES
    }
    missing = []
    for page, name in sorted(named):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            missing.append(f"{page}: {name}")
    assert missing == []


def test_the_usual_install_has_the_health_of_gpus_and_the_web_page(pages, root):
    for page in ("README.md", "install.md"):
        text = next(text for path, text in pages.items() if path.name == page)
        assert re.search(r"^pip install -r requirements\.txt$", text, re.M)
    folders = re.findall(r"plugins/\w+", (root / "requirements.txt").read_text())
    projects = [root / folder / "pyproject.toml" for folder in folders]
    entries = [tomllib.loads(path.read_text())["project"]["entry-points"]["smalti.plugins"] for path in projects]
    plugins = load_plugins(Selection(only=tuple(name for each in entries for name in each)))
    assert schema_of(plugins).options.keys() >= {"fsdp_enable", "gpu_health", "webhook_config"}
    commands = CommandCollector()
    plugins.gather(HookSpecs.register_commands, commands=commands)
    assert commands.commands.keys() >= {"health", "ui", "webhook"}


def test_links_lead_to_files_and_headings_that_are_there(pages):
    broken = []
    for path, text in pages.items():
        for link in _LINK.findall(_FENCE.sub("", text)):
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            if not target.exists() or (anchor and target in pages and anchor not in anchors(pages[target])):
                broken.append(f"{path.name}: {link}")
    assert broken == []


def test_the_index_has_every_page(pages, root):
    index = root / "docs" / "README.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in _LINK.findall(pages[index])}
    assert sorted(path.name for path in pages.keys() - linked - {index, root / "README.md"}) == []


def test_the_pages_are_not_more_than_a_reader_can_read(pages):
    texts = {path: text.split() for path, text in pages.items()}
    words = {path: len(text) for path, text in texts.items() if "This page is generated" not in " ".join(text[:150])}
    assert sum(words.values()) <= WORDS, sorted(((number, path.name) for path, number in words.items()), reverse=True)
