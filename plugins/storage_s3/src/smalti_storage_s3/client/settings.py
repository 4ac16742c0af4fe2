"""How a bucket is reached: the keys of a dataset, or a URL such as s3://bucket/prefix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from smalti import ConfigError, Problem, UserError

KEYS = (
    "aws_bucket_name",
    "aws_data_prefix",
    "aws_region_name",
    "aws_endpoint_url",
    "aws_access_key_id",
    "aws_secret_access_key",
    "aws_session_token",
    "aws_profile_name",
    "aws_max_pool_connections",
)
"""The keys of a dataset of type "aws"."""
_SECRET = {"access_key_id", "secret_access_key", "session_token"}

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class S3Settings(BaseModel):
    """One bucket and the part of it that is used. None: what boto3 finds in the environment, the profile or the role.

    `prefix` is empty or ends with "/". Credentials are never printed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, coerce_numbers_to_str=True)

    bucket_name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]$")]
    data_prefix: str = ""
    region_name: Text | None = None
    endpoint_url: Annotated[str, StringConstraints(pattern=r"^https?://[^/@\s]+(/\S*)?$")] | None = None
    access_key_id: Text | None = Field(None, repr=False)
    secret_access_key: Text | None = Field(None, repr=False)
    session_token: Text | None = Field(None, repr=False)
    profile_name: Text | None = None
    max_pool_connections: int = Field(128, ge=1, le=10_000)

    @property
    def prefix(self) -> str:
        text = self.data_prefix.strip("/")
        return f"{text}/" if text else ""

    @property
    def location(self) -> str:
        """The address, for messages."""
        return self.identity + (f" at {self.endpoint_url}" if self.endpoint_url else "")

    @property
    def identity(self) -> str:
        """Bucket and folder, the same whatever the address of the store is."""
        return f"s3://{self.bucket_name}/{self.prefix}"


def settings_of(options: Mapping[str, object], where: str) -> S3Settings:
    """Returns the checked settings of a dataset, or of another place with the same keys; `where` names it in messages."""
    given = {key.removeprefix("aws_"): value for key, value in options.items() if value not in (None, "")}
    problems: list[Problem] = []
    if "bucket_name" not in given:
        problems.append(Problem(message="aws_bucket_name is missing", where=where, fix="set it to the name of the bucket"))
    alone = given.keys() & {"access_key_id", "secret_access_key"}
    if len(alone) == 1 or ("session_token" in given and not alone):
        fix = "set both, or neither: then the environment, the profile or the role of the machine is used"
        problems.append(Problem(message="aws_access_key_id and aws_secret_access_key belong together", where=where, fix=fix))
    if problems:
        raise ConfigError(problems)
    try:
        return S3Settings.model_validate(given)
    except ValidationError as error:
        raise ConfigError([_problem(each["loc"], each["msg"], given, where) for each in error.errors()]) from None


def settings_of_url(url: str, options: Mapping[str, object] | None = None) -> S3Settings:
    """Returns the settings of s3://bucket/prefix; `options` are further keys, without bucket and prefix."""
    parts = urlsplit(url)
    if parts.scheme != "s3" or not parts.netloc or parts.query or "@" in parts.netloc:
        raise UserError(f"not an address of a bucket: {url.rpartition('@')[2]!r}", fix="s3://BUCKET/PREFIX")
    return settings_of({**(options or {}), "aws_bucket_name": parts.netloc, "aws_data_prefix": parts.path}, url)


def _problem(location: tuple[int | str, ...], message: str, given: Mapping[str, object], where: str) -> Problem:
    name = str(location[0]) if location else ""
    shown = "" if name in _SECRET else f" ({given.get(name)!r})"
    fixes = {
        "bucket_name": "give the name of the bucket alone; a folder in it is aws_data_prefix",
        "endpoint_url": "give the address of the store, such as https://ACCOUNT.r2.cloudflarestorage.com",
    }
    fix = fixes.get(name, "see the keys of S3 in docs/s3.md")
    return Problem(message=f"aws_{name}{shown}: {message[:1].lower()}{message[1:]}", where=where, fix=fix)
