"""Reading TOML, JSON and YAML files of users into one dict of values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path

from smalti.errors import Problem, UserError
from smalti.system import load_toml, parse_json, read_regular

PREFIX = "SMALTI_"
"""Of the environment variables that set options."""
_PLACEHOLDER = re.compile(r"\{env:([A-Za-z_][A-Za-z0-9_]*)\}")


def read_mapping(path: Path) -> dict[str, object]:
    """The top-level table of a TOML, JSON or YAML file, by its ending.

    Raises UserError with the place of a syntax error. A key that occurs twice is one.
    """
    return parse_mapping(path, read_text(path))


def read_text(path: Path) -> str:
    """The text of a file, with its line ends as they are. Raises UserError when there is no such text file."""
    try:
        return read_regular(path).decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"there is no file {path}", fix="check the path; relative paths start at the current folder") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, not a configuration file", fix="give the path of a file in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}", fix="check that it is a readable text file in UTF-8") from None


def parse_mapping(path: Path, text: str) -> dict[str, object]:
    """`read_mapping` for a text that has been read. The ending of `path` says its kind."""
    value = parse_value(path, text)
    if not isinstance(value, dict):
        raise UserError(f"{path} contains a {type(value).__name__}, not a table of options", fix='write {"option": value, ...}')
    return {str(key): each for key, each in value.items()}


def parse_value(path: Path, text: str) -> object:
    """What a TOML, JSON or YAML text says, whatever it is. Raises UserError with the place of a syntax error."""
    kind = path.suffix[1:].upper().replace("YML", "YAML")
    if kind not in _PARSERS:
        raise UserError(f"{path}: unknown kind of configuration file {path.suffix!r}", fix="use .toml, .json, .yaml or .yml")
    try:
        return _PARSERS[kind](text)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at line {error.lineno}, column {error.colno}"
    except ValueError as error:
        reason = str(error)
    fix = "fix the syntax error"
    if kind == "TOML" and (place := re.search(r"at line (\d+)", reason)):
        line = text.split("\n")[int(place[1]) - 1].strip()
        reason += f": {line}"
        if unquoted := re.fullmatch(r"([\w.-]+)\s*=\s*([A-Za-z/~][^\"'#]*)(#.*)?", line):
            fix = f'text needs quotes: {unquoted[1]} = "{unquoted[2].strip()}"'
    raise UserError(f"{path} is not valid {kind}: {reason}", fix=fix)


def _parse_yaml(text: str) -> object:
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that occurs twice, which YAML forbids and PyYAML accepts, and a value that contains itself."""

        def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
            return super().construct_object(node, deep=True)  # which refuses what refers to itself

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            if twice := [key for key in keys if keys.count(key) > 1]:
                raise yaml.constructor.ConstructorError(None, None, f"the key {twice[0]!r} occurs twice", node.start_mark)
            return super().construct_mapping(node, deep)

    try:
        value: object = yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError("nested too deeply" if isinstance(error, RecursionError) else str(error)) from None
    return {} if value is None else value


_PARSERS: Mapping[str, Callable[[str], object]] = {"TOML": load_toml, "JSON": parse_json, "YAML": _parse_yaml}


def variables_in(value: object) -> frozenset[str]:
    """The NAMEs of all {env:NAME} in a value, at any depth."""
    if isinstance(value, dict):
        return frozenset().union(*map(variables_in, value.values()))
    if isinstance(value, list | tuple):
        return frozenset().union(*map(variables_in, value))
    return frozenset(_PLACEHOLDER.findall(value)) if isinstance(value, str) else frozenset()


def expand(value: object, environment: Mapping[str, str], where: str, problems: list[Problem]) -> object:
    """The value with every {env:NAME} in it replaced, at any depth; names that are not set become problems."""
    if isinstance(value, dict):
        return {key: expand(each, environment, where, problems) for key, each in value.items()}
    if isinstance(value, list):
        return [expand(each, environment, where, problems) for each in value]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in environment:
            problems.append(
                Problem(message=f"{{env:{name}}}: this environment variable is not set", where=where, fix=f"export {name}=...")
            )
        return environment.get(name, "")

    return _PLACEHOLDER.sub(replace, value)
