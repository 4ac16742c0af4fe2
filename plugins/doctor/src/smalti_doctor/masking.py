"""Secrets are replaced in everything that leaves this node: values known as secrets, and texts that look like one."""

from __future__ import annotations

import configparser
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import cast
from urllib.parse import quote, quote_plus

from smalti import InvalidOptionError
from smalti.config import PREFIX, Config

MASKED = "***"
_ADDRESS = re.compile(r"https?://[^\s\"'<>\\]+")
"""In options that may hold secrets, and in files that they name, an address of a receiver is one."""
_SMALL = 1 << 20
_LONGEST_NAME = 100
_SHORTEST = 6
"""Shorter values are no usable secrets, and replacing them would damage other texts."""
_SECRET_NAME = re.compile(
    r"(?i)(^|[_\-.])(\w*(token|secret|passw(or)?d|passphrase|credentials?|private|signature|cookie|bearer|authorization|webhook)s?"
    r"|(api|access|auth|account|encryption|sas|ssh|license)[_\-]?keys?|pat|auth|dsn)([_\-.]|$)"
)
_NO_SECRET = re.compile(r"(?i)(trigger_token|tokenizers?|max_tokens?|num_tokens?|tokens|keys?_?file|token_type|dataset_key)")
"""Names of settings that only sound like secrets."""
_PATTERNS = (
    (re.compile(r"\b(hf|api_org)_[A-Za-z0-9]{16,}"), MASKED),
    (re.compile(r"\b(A3T[A-Z0-9]|AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}\b"), MASKED),
    (re.compile(r"\b(ghp|gho|ghs|ghu|github_pat|glpat|xox[abps]|sk|pk|rk|dop_v1)[_-][A-Za-z0-9_\-]{16,}"), MASKED),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/\-]{8,}=*"), rf"\1 {MASKED}"),
    (re.compile(r"\beyJ[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]{5,}\.[A-Za-z0-9_\-]*"), MASKED),
    (re.compile(r"(?i)(/api/webhooks/\d+/)[\w\-]+"), rf"\1{MASKED}"),
    (re.compile(r"(?i)(hooks\.slack\.com/\w+/)[\w/\-]+"), rf"\1{MASKED}"),
    (re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]{0,30}://)[^/\s:@\"']*:[^/\s@\"']+@"), rf"\1{MASKED}@"),
    (
        re.compile(r"(?i)([?&](x-amz-[a-z\-]*|sig|signature|token|key|access_token|api_key|password|code)=)[^&\s\"'\\]+"),
        rf"\1{MASKED}",
    ),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.{0,10000}?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL), MASKED),
)
_ASSIGNMENT = re.compile(
    r"""(?P<name>["']?(?<![\w.\-])[\w.\-]++["']?)(?P<equals>\s*[=:]\s*)(?P<value>"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^\s,;"'\[\]{}#]+)"""
)


def is_secret_name(name: str) -> bool:
    """Whether a value under this name may be a secret: HF_TOKEN, aws_secret_access_key, password."""
    name = name[-_LONGEST_NAME:]  # searching takes the square of the length
    return _SECRET_NAME.search(name) is not None and _NO_SECRET.fullmatch(name) is None


class Mask:
    """Replaces secrets in texts. `known` are values that are secrets, wherever they occur."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        forms = {form for value in known if len(value) >= _SHORTEST for form in _forms(value)}
        ordered = sorted(forms, key=len, reverse=True)  # one may contain another
        self._known = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    @classmethod
    def of_node(cls, known: Iterable[str] = (), environment: Mapping[str, str] = os.environ) -> Mask:
        """With the secrets of the environment, and those that the tools of Hugging Face and AWS keep in files."""
        found = [value for name, value in environment.items() if is_secret_name(name)]
        return cls([*known, *found, *_in_files(environment)])

    @classmethod
    def of_run(cls, config: Config | None, environment: Mapping[str, str] = os.environ) -> Mask:
        """The same with the secrets of a configuration, which may be a draft with problems, and what {env:NAME} stands for."""
        if config is None:
            return cls.of_node((), environment)
        known = list(config.references.variables.values())
        for name, option in config.schema.options.items():
            if option.secret is False:
                continue
            values = [environment.get(f"{PREFIX}{name.upper()}")]
            with suppress(InvalidOptionError):
                values.append(cast(str | None, config.value(name)))
            for value in filter(None, map(str, filter(None, values))):
                known += [value] if option.is_secret(value) else []
                known += _ADDRESS.findall(f"{value} {_small_file(value)}")
        return cls.of_node(known, environment)

    def text(self, text: str) -> str:
        """The text without secrets: known ones, tokens of known forms, and values of names such as "password"."""
        if self._known is not None:
            text = self._known.sub(MASKED, text)
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement, text)
        return _ASSIGNMENT.sub(_assignment, text)

    def variable(self, name: str, value: str) -> str:
        """The value of an environment variable, to be shown."""
        return MASKED if value and is_secret_name(name) else self.text(value)

    def value(self, value: object, name: str = "") -> object:
        """A value in JSON's types, at any depth. Texts under names of secrets are replaced as a whole."""
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.value(each, str(key)) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(each, name) for each in value]
        if isinstance(value, str):
            return self.variable(name, value)
        return value


def _forms(value: str) -> set[str]:
    """How a value is written in JSON, TOML, URLs and reprs."""
    lines = {line for line in value.splitlines() if len(line) >= _SHORTEST}
    return {
        form
        for each in {value, value.strip(), *lines}
        if len(each) >= _SHORTEST
        for form in (
            each,
            json.dumps(each)[1:-1],
            json.dumps(each, ensure_ascii=False)[1:-1],
            quote(each, safe=""),
            quote(each),
            quote_plus(each),
            repr(each)[1:-1],
        )
    }


def _assignment(match: re.Match[str]) -> str:
    name, value = match["name"].strip("\"'"), match["value"]
    mark = value[0] if value[0] in "\"'" else ""
    if not is_secret_name(name):  # a text in quotes may have an assignment in it
        inner = _ASSIGNMENT.sub(_assignment, value[1:-1]) if mark else ""
        return f"{match['name']}{match['equals']}{mark}{inner}{mark}" if mark else match[0]
    if value in ("null", "None", "true", "false", '""', "''") or MASKED in value:
        return match[0]
    if re.fullmatch(r"-?[\d.]+", value) and name.lower() not in ("password", "pin"):
        return match[0]
    return f"{match['name']}{match['equals']}{mark}{MASKED}{mark}"


def _small_file(name: str) -> str:
    """The content of the file of this name; "" if there is none, or it is large."""
    with suppress(OSError, ValueError, RuntimeError):
        path = Path(name).expanduser()
        if path.is_file() and path.stat().st_size < _SMALL:
            return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _in_files(environment: Mapping[str, str]) -> list[str]:
    home = Path(environment.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    found = []
    for path in (Path(environment.get("HF_TOKEN_PATH") or home / "token"), Path("~/.huggingface/token").expanduser()):
        with suppress(OSError, UnicodeDecodeError):
            found.append(path.read_text(encoding="utf-8").strip())
    parser = configparser.RawConfigParser()
    with suppress(configparser.Error, OSError, UnicodeDecodeError):
        parser.read(
            [
                environment.get("AWS_SHARED_CREDENTIALS_FILE") or Path("~/.aws/credentials").expanduser(),
                environment.get("AWS_CONFIG_FILE") or Path("~/.aws/config").expanduser(),
                home / "stored_tokens",
            ],
            encoding="utf-8",
        )
        for section in parser.sections():
            found += [value for name, value in parser.items(section) if is_secret_name(name)]
    return found
