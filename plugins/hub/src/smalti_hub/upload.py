"""Uploads a folder to a repository of models on the Hub. Every failure is a UserError that says what to do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from smalti import UserError
from smalti.system import load_json, read_regular

CARD = "README.md"
MODULAR_INDEX = "modular_model_index.json"
MARK = "<!-- This card was written by smalti."
"""In the cards that smalti writes. A card on the Hub without it belongs to its author and is kept."""


class HubUnreachableError(UserError):
    """The Hub did not answer."""


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """What an upload did. `url` is the page of the commit, `card_kept` whether the Hub has a card of its own."""

    repository: str
    url: str
    files: tuple[str, ...]
    card_kept: bool


def check_token() -> str:
    """The name of the user whose token is used; asks the Hub. Raises UserError if it cannot write there."""
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise UserError("there is no token for the Hugging Face Hub", fix="hf auth login; or set HF_TOKEN")
    with explained("the token"):
        user = HfApi().whoami()
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UserError("the token for the Hugging Face Hub may only read", fix="hf auth login, with a token that may write")
    return str(user["name"])


def known_as(repository: str) -> str:
    """The full name of a repository: with the user of the token, if it names none."""
    return repository if "/" in repository else f"{check_token()}/{repository}"


def push(folder: Path, repository: str, *, private: bool, message: str) -> Pushed:
    """Upload the files of a folder to the main branch, in one commit; creates the repository where there is none.

    Files that the Hub has already are not sent again, so a repeated upload continues. Nothing is removed there.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    files = tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()))
    with explained(repository):
        full_name = api.create_repo(repository, private=private, exist_ok=True).repo_id
        card_kept = CARD in files and _has_own_card(full_name)
        _place_parts(folder / MODULAR_INDEX, full_name)
        done = api.upload_folder(
            repo_id=full_name, folder_path=folder, commit_message=message, ignore_patterns=[CARD] if card_kept else None
        )
    return Pushed(repository=full_name, url=str(done.commit_url), files=files, card_kept=card_kept)


def _place_parts(index: Path, repository: str) -> None:
    """Write to the index of a modular pipeline that its parts are in this repository, where it has them beside it.

    diffusers looks for them there; in a local folder it takes those beside the index, whatever it says.
    """
    if not index.is_file():
        return
    content = load_json(read_regular(index))
    for name, entry in content.items():
        if isinstance(entry, list) and len(entry) > 2 and (index.parent / name).is_dir():
            entry[2]["pretrained_model_name_or_path"] = repository
    index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _has_own_card(repository: str) -> bool:
    """Whether the Hub has a card that smalti has not written."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    with TemporaryDirectory() as folder:
        try:
            path = hf_hub_download(repository, CARD, local_dir=folder)
        except EntryNotFoundError:
            return False
        return MARK not in Path(path).read_text(encoding="utf-8")


@contextmanager
def explained(subject: str) -> Iterator[None]:
    """Turn the errors of huggingface_hub about `subject` into UserErrors."""
    from huggingface_hub import errors
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    # Of the HTTP library, which differs between versions of huggingface_hub.
    http_error: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]

    try:
        yield
    except HFValidationError as error:
        raise UserError(f"{subject} is not a name of a repository: {error}", fix="USER/NAME, or NAME") from error
    except OfflineModeIsEnabled as error:
        raise UserError("the Hub is not asked, because HF_HUB_OFFLINE is set", fix="unset HF_HUB_OFFLINE") from error
    except HfHubHTTPError as error:
        raise UserError(f"the Hub refused {subject}: {_reason(error)}", fix=_fix(error.response.status_code)) from error
    except (http_error, OSError) as error:
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        raise HubUnreachableError(
            f"{endpoint} cannot be reached: {type(error).__name__}: {error}", fix="check the network, then push again"
        ) from error


def _reason(error: object) -> str:
    """Status and message, without the URL, which may be signed."""
    response = error.response  # type: ignore[attr-defined]
    text = getattr(error, "server_message", None) or response.reason_phrase
    return f"{response.status_code} {text}".strip()


def _fix(status: int) -> str:
    if status == 401:
        return "hf auth login, with a token that may write"
    if status in (403, 404):
        return "use a token that may write there, or another --hub_model_id"
    if status == 429:
        return "wait for some minutes, then push again"
    return "push again later; files that were sent are not sent again" if status >= 500 else "see the message of the Hub"
