"""Reading TOML, JSON and YAML files of users into one dict of values."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Hashable, Mapping
from pathlib import Path

from smalti.errors import Problem, UserError
from smalti.system import parse_json

_PLACEHOLDER = re.compile(r"\{env:([A-Za-z_][A-Za-z0-9_]*)\}")


def read_mapping(path: Path) -> dict[str, object]:
    """The top-level table of a TOML, JSON or YAML file, by its ending.

    Raises UserError with the place of a syntax error. A key that occurs twice is one.
    """
    return parse_mapping(path, read_text(path))


def read_text(path: Path) -> str:
    """The text of a file, with its line ends as they are. Raises UserError when there is no such text file."""
    try:
        return path.read_bytes().decode("utf-8-sig")
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
    try:
        return _parsed(path, text)
    except RecursionError:
        raise UserError(f"{path} is nested too deeply", fix="no option needs that many brackets") from None


def _parsed(path: Path, text: str) -> object:
    ending = path.suffix.lower()
    if ending == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            place = re.search(r"at line (\d+)", str(error))
            line = text.split("\n")[int(place[1]) - 1].strip() if place else ""
            unquoted = re.fullmatch(r"([\w.-]+)\s*=\s*([A-Za-z/~][^\"'#]*)(#.*)?", line)
            fix = f'text needs quotes: {unquoted[1]} = "{unquoted[2].strip()}"' if unquoted else "fix the syntax error"
            raise UserError(f"{path} is not valid TOML: {error}{line and f': {line}'}", fix=fix) from None
    if ending == ".json":
        return _parse_json(path, text)
    if ending in (".yaml", ".yml"):
        return _parse_yaml(path, text)
    raise UserError(f"{path}: unknown kind of configuration file {ending!r}", fix="use .toml, .json, .yaml or .yml")


def _parse_json(path: Path, text: str) -> object:
    try:
        return parse_json(text.encode())
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{path} is not valid JSON: {error.msg} at {place}", fix="fix the syntax error") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}", fix="fix that entry") from None


def _parse_yaml(path: Path, text: str) -> object:
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that occurs twice, which YAML forbids and PyYAML accepts."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            if twice := [key for key in keys if keys.count(key) > 1]:
                raise yaml.constructor.ConstructorError(None, None, f"the key {twice[0]!r} occurs twice", node.start_mark)
            return super().construct_mapping(node, deep)

    try:
        value: object = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}", fix="fix the syntax error") from None
    return {} if value is None else value


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
