"""Drafts of configurations, in the user's own folder. Each change is on the disk before it is answered.

A draft has a version. A change names the version that it was made on, so that a second page that shows an older one is told,
instead of overwriting the newer text. Earlier texts are kept.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from starlette.exceptions import HTTPException

from smalti.system import atomic_write, load_json, read_regular
from smalti_webui.configs.schemas import schema_for
from smalti_webui.configs.toml_text import NAME, given, unwrapped, with_values
from smalti_webui.server.settings import Settings

KEPT = 50
"""Earlier texts of a draft that are kept."""
TYPING = 30.0
"""Seconds within which changes of the same kind are one, of which only the text before the first is kept."""
_ID = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True, kw_only=True)
class Revision:
    """An earlier text of a draft. `what` says what the next change did."""

    version: int
    t: float
    what: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A configuration that is being edited. `text` is TOML, also while it has errors.

    `target` is the file that it is saved to, "" before the first save; `base` the digest of that file's content when it was
    opened or saved. `pending` has texts that no TOML can hold yet: of a field with tables, by option, or "flags".
    `checked` is the result of the last check, of version `checked["version"]`.
    """

    id: str
    name: str
    text: str
    version: int = 1
    target: str = ""
    base: str = ""
    origin: str = ""
    changed: float = 0.0
    pending: Mapping[str, str] = field(default_factory=dict)
    checked: Mapping[str, object] = field(default_factory=dict)
    revisions: tuple[Revision, ...] = ()
    store: DraftStore | None = field(default=None, repr=False, compare=False)
    folder: Path = field(default_factory=Path.cwd, compare=False)
    """Where relative paths of the configuration start."""

    @classmethod
    def load(cls, settings: Settings, id: str) -> Draft:
        """A draft of this server. HTTPException 404 if there is none with this id."""
        try:
            return replace(drafts_of(settings).get(id), folder=settings.roots[0])
        except UnknownDraft:
            raise HTTPException(404, "there is no such draft") from None

    @property
    def file(self) -> Path:
        """The text as a file, for commands."""
        assert self.store is not None, "the draft comes from a store"
        return self.store.file(self.id)

    @property
    def values(self) -> Mapping[str, object]:
        """The values that the text gives, by option, as they are written. Raises UserError if it is not TOML."""
        return {name: unwrapped(value) for name, value in given(self.text, schema_for(self.file)[0]).items()}

    def set(self, changes: Mapping[str, object], what: str = "") -> Draft:
        """Change options of the draft as it is now; None removes one. Returns the changed draft. Raises UserError."""
        assert self.store is not None, "the draft comes from a store"
        now = self.store.get(self.id)
        text = with_values(now.text, schema_for(self.file)[0], changes)
        written = self.store.write(self.id, now.version, text, what or ", ".join(changes))
        return replace(written, folder=self.folder)

    def toml(self) -> str:
        """The text."""
        return self.text

    @property
    def is_saved(self) -> bool:
        """Whether the file had this text when it was opened or saved."""
        return bool(self.target) and self.base == digest(self.text.encode()) and not self.pending


class StaleDraft(Exception):  # noqa: N818 - not an error of the server
    """A change was made on an older version than `current`."""

    def __init__(self, current: Draft) -> None:
        super().__init__(f"the draft is at version {current.version}")
        self.current = current


class UnknownDraft(Exception):  # noqa: N818
    """There is no draft with this id."""


def digest(content: bytes) -> str:
    """By which a file is known to be unchanged."""
    return hashlib.sha256(content).hexdigest()


def drafts_of(settings: Settings) -> DraftStore:
    """The drafts of this server's user."""
    return DraftStore(settings.data / "drafts")


class DraftStore:
    """The drafts in a folder, one directory each. Several servers may use the same folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def list(self) -> list[Draft]:
        """All drafts, the last changed first. Files that cannot be read are left out, and left alone."""
        found = []
        for path in self.folder.glob("*/draft.json"):
            try:
                found.append(self.get(path.parent.name))
            except UnknownDraft:
                continue
        return sorted(found, key=lambda draft: -draft.changed)

    def get(self, id: str) -> Draft:
        """Raises UnknownDraft."""
        if not _ID.fullmatch(id):
            raise UnknownDraft(id)
        try:
            content = load_json(read_regular(self.folder / id / "draft.json"))
            revisions = tuple(Revision(**each) for each in content.pop("revisions"))
            return Draft(**content, revisions=revisions, store=self)
        except (OSError, ValueError, TypeError, KeyError):
            raise UnknownDraft(id) from None

    def file(self, id: str) -> Path:
        """The text of the draft as a file, for commands. Its folder has nothing else that the user edits."""
        return self.folder / id / NAME

    def new(self, text: str, *, name: str, target: str = "", base: str = "", origin: str = "") -> Draft:
        """A new draft with this text, which is on the disk when this returns."""
        draft = Draft(id=secrets.token_hex(6), name=name, text=text, target=target, base=base, origin=origin)
        with self._locked():
            return self._put(draft)

    def opened(self, target: str) -> Draft | None:
        """The draft of this file that was changed last, if there is one."""
        return next((draft for draft in self.list() if draft.target == target), None)

    def write(
        self,
        id: str,
        version: int,
        text: str,
        what: str,
        *,
        pending: Mapping[str, str | None] | None = None,
        base: str | None = None,
    ) -> Draft:
        """Replace the text. In `pending`, None ends that a text is pending. `base`: the file has been read again.

        Raises StaleDraft if the draft has another version.
        """
        with self._locked():
            draft = self._at(id, version)
            kept = {name: each for name, each in {**draft.pending, **(pending or {})}.items() if each is not None}
            typing = draft.revisions and draft.revisions[-1].what == what and time.time() - draft.changed < TYPING
            before = Revision(version=draft.version, t=draft.changed, what=what, text=draft.text)
            revisions = draft.revisions if typing or text == draft.text else (*draft.revisions, before)[-KEPT:]
            if text == draft.text and kept == draft.pending and base is None:
                return draft
            changed = replace(draft, text=text, version=draft.version + 1, pending=kept, revisions=revisions)
            return self._put(changed if base is None else replace(changed, base=base))

    def restore(self, id: str, version: int, wanted: int) -> Draft:
        """Bring back the text of an earlier version, as a new version. Raises StaleDraft, or UnknownDraft without that text."""
        draft = self._at(id, version)
        found = next((each for each in draft.revisions if each.version == wanted), None)
        if found is None:
            raise UnknownDraft(id)
        return self.write(id, version, found.text, f"back to version {wanted}", pending=dict.fromkeys(draft.pending))

    def saved(self, id: str, version: int, *, name: str, target: str, base: str) -> Draft:
        """Note that the text was written to a file. Raises StaleDraft."""
        with self._locked():
            return self._put(replace(self._at(id, version), name=name, target=target, base=base))

    def keep_check(self, id: str, checked: Mapping[str, object]) -> Draft:
        """Keep the result of a check. The version stays."""
        with self._locked():
            return self._put(replace(self.get(id), checked=checked))

    def discard(self, id: str) -> Path:
        """Move a draft to the folder of discarded ones, which this returns. Nothing is deleted."""
        self.get(id)
        with self._locked():
            to = self.folder / ".discarded" / f"{time.strftime('%Y%m%d-%H%M%S')}-{id}"
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(self.folder / id, to)
        return to

    def _at(self, id: str, version: int) -> Draft:
        draft = self.get(id)
        if draft.version != version:
            raise StaleDraft(draft)
        return draft

    def _put(self, draft: Draft) -> Draft:
        draft = replace(draft, changed=time.time(), store=self)
        folder = self.folder / draft.id
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        content = {name: value for name, value in vars(draft).items() if name not in ("store", "folder")}
        content["revisions"] = [vars(each) for each in draft.revisions]
        atomic_write(folder / "draft.json", json.dumps(content).encode(), mode=0o600)
        atomic_write(folder / NAME, draft.text.encode(), mode=0o600)
        return draft

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.folder / ".lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
