"""The files of a package with the family of a published pipeline."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template

from smalti import UserError
from smalti_diffusers.scaffold.reading import Code, Reading, read_pipeline
from smalti_diffusers.sources.components import Components
from smalti_diffusers.sources.location import find_folder

_TEMPLATES = ("src/$package/__init__.py", "tests/test_family.py")
_FAMILY = "src/$package/family.py"
_LINE = 88
_PLACES = {
    "smalti_diffusers.families.autoencoders": ("PatchAutoencoder", "VideoAutoencoder"),
    "smalti_diffusers.families.captions": ("Mask", "PooledRow", "TokenRows"),
    "smalti_diffusers.families.sd1x": ("StableDiffusion1",),
    "smalti_diffusers.families.sdxl": ("Sdxl",),
    "smalti_diffusers.families.tokens": ("FLAT", "FRAMES", "PACKED", "positions"),
    "smalti_diffusers.families.transformer": ("JOINT_ATTENTION", "TransformerFamily"),
}
"""Where the names are that a family may need."""
_POSITIONS = """
    def more_inputs(
        self, noisy: Tensor, conditioning: Conditioning
    ) -> dict[str, object]:
        length, device = conditioning["tokens"].shape[1], noisy.device
        return {
            "txt_ids": torch.zeros(length, 3, device=device),
            "img_ids": positions(noisy),
        }
"""


@dataclass(frozen=True, kw_only=True)
class Package:
    """`files` are texts by path. `unread` says, by field, what has to be filled in."""

    files: Mapping[str, str]
    unread: Mapping[str, str]


def package_of(source: str, values: Mapping[str, str]) -> Package:
    """For the pipeline in a folder or on the hub, of which no weights are read. `values` stand for variables of templates.

    Raises UserError for what is not a pipeline or cannot be read, and for one without a transformer or U-Net.
    """
    try:
        reading = read_pipeline(Components(find_folder(source, None)))
    except (OSError, json.JSONDecodeError) as error:
        fix = "name a folder with model_index.json and the configuration of each part in a folder of its name"
        raise UserError(f"the configurations of {source} cannot be read: {error}", fix=fix) from error
    path = Path(source).expanduser()
    source = str(path.resolve()) if path.is_dir() else source
    options = "flux_guidance_value=3.5" if "guided" in reading.fields else ""
    values = {**values, "options": options, "pipeline": reading.pipeline, "source": json.dumps(source, ensure_ascii=False)}
    folder = files("smalti_diffusers") / "scaffold" / "templates"
    texts = {name: folder.joinpath(f"{name}.tmpl").read_text(encoding="utf-8") for name in _TEMPLATES}
    found = {name: Template(text).substitute(values) for name, text in texts.items()}
    found[_FAMILY] = _family(reading, values)
    return Package(files={Template(name).substitute(values): text for name, text in found.items()}, unread=reading.unread)


def _family(reading: Reading, values: Mapping[str, str]) -> str:
    """The module with the class of the family."""
    body = "".join(_attributes(reading, values)) + (_POSITIONS if reading.positions else "")
    head = f'"""{reading.pipeline} of diffusers {version("diffusers")} as the family `{values["name"]}`.\n\n'
    head += "Read from the pipeline:\n\n"
    head += "".join(f"- {fact}\n" for fact in reading.facts) + '"""\n\n'
    text = f'class Family({reading.base}):\n    """Its fields are explained where {reading.base} declares them."""\n\n{body}'
    return f"{head}{_imports(text, values)}\n\n{text}"


def _attributes(reading: Reading, values: Mapping[str, str]) -> Iterator[str]:
    """The lines of the class body, and a comment for each field that could not be read."""
    yield f'    name = "{values["name"]}"\n    pipeline = "{reading.pipeline}"\n    flavours = FLAVOURS\n'
    if reading.base != "TransformerFamily":
        yield '    published = FLAVOURS["default"]\n'
    for name, value in reading.fields.items():
        yield _assignment(name, value)
    if reading.unread:
        yield "    # Not read from the pipeline; the tests pass when it is filled in:\n"
    for name, text in reading.unread.items():
        yield f"    # - {name}: {text}\n"


def _assignment(name: str, value: object) -> str:
    """As ruff formats it."""
    line = f"    {name} = {_text(value)}\n"
    if len(line) <= _LINE + 1 or not isinstance(value, dict | tuple):
        return line
    if isinstance(value, dict):
        inside, ends = [f"{_text(key)}: {_text(each)}" for key, each in value.items()], "{}"
    else:
        inside, ends = [_text(each) for each in value], "()"
    return f"    {name} = {ends[0]}\n" + "".join(f"        {each},\n" for each in inside) + f"    {ends[1]}\n"


def _text(value: object) -> str:
    if isinstance(value, Code):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(key)}: {_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_text, value)) + ("," if len(value) == 1 else "") + ")"
    return repr(value)


def _imports(text: str, values: Mapping[str, str]) -> str:
    lines = ["import torch\n"] if "torch." in text else []
    if "Conditioning" in text:
        lines.append("from smalti.diffusion import Conditioning\n")
    for module, known in _PLACES.items():
        used = [name for name in known if f"{name}" in _words(text)]
        line = f"from {module} import {', '.join(used)}\n"
        if len(line) > _LINE + 1:
            line = f"from {module} import (\n" + "".join(f"    {name},\n" for name in used) + ")\n"
        lines += [line] if used else []
    if "Tensor" in _words(text):
        lines.append("from torch import Tensor\n")
    return "".join(lines) + f"\nfrom {values['package']} import FLAVOURS\n"


def _words(text: str) -> set[str]:
    """The names in code, without comments."""
    return set(re.findall(r"\w+", re.sub(r"#.*|\"\"\".*?\"\"\"", "", text)))
