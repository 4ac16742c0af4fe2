"""The endpoints that `--webhook_config` describes: a table, a list of tables, JSON text, or the path of a file.

The keys are SimpleTuner's, and a few more. Messages name an endpoint by scheme and host: the rest of a URL may be a secret.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import cast
from urllib.parse import SplitResult, urlsplit

from smalti import Problem, UserError
from smalti_health.webhooks.delivery.addresses import refusal
from smalti_health.webhooks.signing import decode_key

LEVELS = ("debug", "info", "warning", "error", "critical")
KINDS = ("discord", "raw")
KEYS = (
    *("webhook_type", "webhook_url", "callback_url", "message_prefix", "log_level", "auth_token", "ssl_no_verify"),
    *("headers", "secret", "allow_private"),
)
_OWN_HEADERS = ("host", "content-length", "content-type", "transfer-encoding", "connection", "x-api-key")
_CREDENTIAL = re.compile(r"auth|token|key|secret|cookie|signature|password", re.IGNORECASE)
_REFERENCE = re.compile(r"\{env:[A-Za-z_][A-Za-z0-9_]*\}")
_LONG = 16
"""A part of a URL's path that has this many characters may be a key."""
_EXAMPLE = '{"webhook_type": "raw", "callback_url": "https://HOST/PATH"}'


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A receiver of events. `level` is the lowest level that it gets; `secrets` are signing keys, the newest first."""

    kind: str
    url: str = field(repr=False)
    level: str = "info"
    message_prefix: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    auth_token: str = field(default="", repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)
    verify_tls: bool = True
    allow_private: bool = False

    @property
    def id(self) -> str:
        """The same in every run with this URL. The URL cannot be computed from it."""
        return hashlib.sha256(f"{self.kind} {self.url}".encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """For messages: no more of the URL than scheme, host and port."""
        return f"{self.kind} {shown_url(self.url)}"

    def wants(self, level: str) -> bool:
        return LEVELS.index(level) >= LEVELS.index(self.level)

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> Endpoint:
        return cls(**{**values, "secrets": tuple(cast(Sequence[str], values["secrets"]))})  # type: ignore[arg-type]


def shown_url(url: str) -> str:
    """Scheme, host and port of a URL."""
    parts = _split(url)
    if parts is None:
        return "(no valid URL)"
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}/..."


def redacted(text: str, endpoints: Sequence[Endpoint]) -> str:
    """The text without URLs, tokens, keys and header values of these endpoints."""
    found = []
    for each in endpoints:
        parts = urlsplit(each.url)
        found += [each.url, f"{parts.path}?{parts.query}", parts.path, parts.query, each.auth_token, *each.secrets]
        found += [secret.removeprefix("whsec_") for secret in each.secrets]
        found += [parts.password or "", *each.headers.values()]
    for secret in sorted({each for each in found if len(each) >= 4}, key=len, reverse=True):  # one may contain another
        text = text.replace(secret, "...")
    return text


# --- reading --------------------------------------------------------------------------------------------------------


def is_inline(value: object) -> bool:
    """Whether this is a description of endpoints, and not the path of a file with one."""
    return isinstance(value, Mapping | list | tuple) or (isinstance(value, str) and value.lstrip().startswith(("{", "[")))


def holds_secret(value: object) -> bool:
    """Whether an inline description has a credential that is not written as {env:NAME}.

    Credentials are tokens, signing keys, headers whose name says so, URLs of Discord, and other URLs with a user name, a query
    or a long random part.
    """
    try:
        entries = _tables(value) if is_inline(value) else []
    except UserError:
        return True  # it cannot be read, and may have one
    return any(_literal(key, each) for entry in entries for key, each in entry.items())


def _literal(key: str, value: object) -> bool:
    if key == "headers" and isinstance(value, Mapping):
        return any(_CREDENTIAL.search(str(name)) and _is_literal(each) for name, each in value.items())
    if key in ("auth_token", "secret"):
        return any(_is_literal(each) for each in (value if isinstance(value, list) else [value]))
    return key in ("webhook_url", "callback_url") and _is_credential(str(value))


def _is_literal(value: object) -> bool:
    return bool(_REFERENCE.sub("", str(value)).strip()) if value else False


def _is_credential(url: str) -> bool:
    """Whether a URL as it is written has what only those who may send should know."""
    parts = _split(_REFERENCE.sub("x", url))
    if parts is None:
        return not _REFERENCE.fullmatch(url)
    if parts.username or parts.password or parts.query:
        return True
    of_discord = (parts.hostname or "").endswith(("discord.com", "discordapp.com")) and "{env:" not in url
    return of_discord or any(len(part) >= _LONG for part in parts.path.split("/"))


def read(value: str, environment: Mapping[str, str], problems: list[Problem]) -> tuple[Endpoint, ...]:
    """The endpoints that a value of `--webhook_config` describes. Entries with problems are left out."""
    from smalti.config import expand

    where = "webhook_config"
    try:
        if is_inline(value):
            entries = _tables(value)
        else:
            where = value
            entries = _tables(_from_file(Path(value).expanduser()))
    except UserError as error:
        problems.append(Problem(message=error.message, where=where, fix=error.fix))
        return ()
    found = []
    for number, entry in enumerate(entries, start=1):
        place = where if len(entries) == 1 else f"entry {number} of {where}"
        wrong: list[Problem] = []
        expanded = cast(dict[str, object], expand(entry, environment, place, wrong))
        wrong += [] if wrong else _problems(expanded, place)
        problems += wrong
        if not wrong:
            found.append(_endpoint(expanded))
    return tuple(found)


def _from_file(path: Path) -> object:
    from smalti.config import parse_value, read_text

    text = read_text(path)
    return parse_value(path if path.suffix else path.with_suffix(".json"), text)


def _tables(value: object) -> list[dict[str, object]]:
    """The entries, without comments and without keys that are null. Raises UserError if they are none."""
    if isinstance(value, str):
        from smalti.system import parse_json

        try:
            value = parse_json(value.encode())
        except json.JSONDecodeError as error:
            message = f"this is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
            raise UserError(message, fix=_EXAMPLE) from None
        except ValueError as error:
            raise UserError(str(error), fix="fix that entry") from None
    entries = [value] if isinstance(value, Mapping) else value
    if not isinstance(entries, list | tuple) or not entries or not all(isinstance(each, Mapping) for each in entries):
        raise UserError("webhooks are a table or a list of tables", fix=_EXAMPLE)
    return [
        {str(key): each for key, each in entry.items() if each is not None and not str(key).startswith(("_", "//", "#"))}
        for entry in entries
    ]


def _endpoint(entry: Mapping[str, object]) -> Endpoint:
    secret = entry.get("secret", ())
    return Endpoint(
        kind=str(entry["webhook_type"]).lower(),
        url=str(entry.get("webhook_url") or entry.get("callback_url")),
        level=str(entry.get("log_level", "info")).lower(),
        message_prefix=str(entry.get("message_prefix", "")),
        headers={str(key): str(each) for key, each in cast(Mapping[str, object], entry.get("headers", {})).items()},
        auth_token=str(entry.get("auth_token", "")),
        secrets=(secret,) if isinstance(secret, str) else tuple(cast(Sequence[str], secret)),
        verify_tls=not entry.get("ssl_no_verify", False),
        allow_private=bool(entry.get("allow_private", False)),
    )


# --- checks: no message shows a value that may be a secret ---------------------------------------------------------


def _problems(entry: Mapping[str, object], where: str) -> list[Problem]:
    found = [
        *_unknown_keys(entry, where),
        *_choices(entry, where),
        *_url_problems(entry, where),
        *_secret_problems(entry, where),
        *_header_problems(entry, where),
    ]
    for key in ("ssl_no_verify", "allow_private"):
        if not isinstance(entry.get(key, False), bool):
            found.append(Problem(message=f"{key} is neither true nor false", where=where, fix=f'"{key}": true'))
    for key in ("message_prefix", "auth_token"):
        if not isinstance(entry.get(key, ""), str):
            found.append(Problem(message=f"{key} is not a text", where=where, fix=f'"{key}": "..."'))
    return found


def _unknown_keys(entry: Mapping[str, object], where: str) -> Iterator[Problem]:
    for key in entry.keys() - set(KEYS):
        near = get_close_matches(key, KEYS, n=1)
        fix = f"did you mean {near[0]}?" if near else f"remove it; the keys are {', '.join(KEYS)}"
        yield Problem(message=f"unknown key {key}", where=where, fix=fix)


def _choices(entry: Mapping[str, object], where: str) -> Iterator[Problem]:
    if "webhook_type" not in entry:
        yield Problem(message="webhook_type is missing", where=where, fix='"webhook_type": "discord" or "raw"')
    elif str(entry["webhook_type"]).lower() not in KINDS:
        yield Problem(message="webhook_type is neither discord nor raw", where=where, fix='"webhook_type": "discord" or "raw"')
    if str(entry.get("log_level", "info")).lower() not in LEVELS:
        yield Problem(message="log_level is not a level", where=where, fix=f"one of {', '.join(LEVELS)}")


def _url_problems(entry: Mapping[str, object], where: str) -> Iterator[Problem]:
    urls = [str(entry[key]) for key in ("webhook_url", "callback_url") if entry.get(key)]
    fix = '"webhook_url": "https://HOST/PATH"'
    if not urls:
        yield Problem(message="webhook_url is missing (callback_url is the same)", where=where, fix=fix)
        return
    if len(set(urls)) > 1:
        yield Problem(message="webhook_url and callback_url differ", where=where, fix="keep one, or write two entries")
        return
    parts = _split(urls[0])
    if parts is None:
        yield Problem(message="its URL is not valid", where=where, fix=fix)
    elif parts.username or parts.password:
        problem = "its URL has a user name or password"
        yield Problem(message=problem, where=where, fix='"headers": {"Authorization": "{env:NAME}"}')
    elif not entry.get("allow_private") and (why := _private(str(parts.hostname))):
        message = f"{shown_url(urls[0])} is {why}; the endpoint needs allow_private for it"
        yield Problem(message=message, where=where, fix='"allow_private": true, if this endpoint is meant')


def _private(host: str) -> str:
    if host.lower().rstrip(".") == "localhost" or host.lower().endswith(".localhost"):
        return "a loopback address"
    try:
        return refusal(host)
    except ValueError:
        return ""  # a name; its addresses are checked when it is resolved


def _split(url: str) -> SplitResult | None:
    """The parts of an http or https URL; None if it is no such URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    valid = parts.scheme in ("http", "https") and parts.hostname and port != 0
    return parts if valid and url.isascii() and not re.search(r"[\s\x00-\x20\x7f]", url) else None


def _secret_problems(entry: Mapping[str, object], where: str) -> Iterator[Problem]:
    value = entry.get("secret", [])
    fix = '"secret": "whsec_..." with 24 to 64 bytes in base64, such as the output of: echo whsec_$(openssl rand -base64 32)'
    if value and str(entry.get("webhook_type")).lower() == "discord":
        yield Problem(message="Discord does not verify signatures", where=where, fix="remove secret")
    for secret in value if isinstance(value, list) else [value]:
        try:
            decode_key(str(secret))
        except ValueError as error:
            yield Problem(message=f"secret is not a signing key: {error}", where=where, fix=fix)


def _header_problems(entry: Mapping[str, object], where: str) -> Iterator[Problem]:
    headers = entry.get("headers", {})
    if not isinstance(headers, Mapping):
        yield Problem(message="headers are not a table", where=where, fix='"headers": {"NAME": "VALUE"}')
        return
    for name, value in [*headers.items(), ("X-API-Key", entry.get("auth_token", ""))]:
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", str(name)):
            yield Problem(message="a header has a name that HTTP does not allow", where=where, fix="letters, digits and dashes")
        elif not isinstance(value, str | int | float) or _unprintable(value):
            yield Problem(
                message=f"the header {name} has a value that HTTP does not allow", where=where, fix="one line of ASCII"
            )
    for name in headers:
        if str(name).lower() in _OWN_HEADERS or str(name).lower().startswith("webhook-"):
            yield Problem(message=f"the header {name} is set by smalti", where=where, fix="remove it; auth_token is X-API-Key")


def _unprintable(value: str | float) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return True
    return not str(value).isascii() or any(ord(letter) < 32 or ord(letter) == 127 for letter in str(value))
