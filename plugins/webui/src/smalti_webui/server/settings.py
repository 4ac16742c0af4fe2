"""What the server was started with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from secrets import token_urlsafe

from platformdirs import user_data_path

LOCAL = ("127.0.0.1", "localhost", "[::1]")


def user_data() -> Path:
    """The user's folder for drafts, sessions and the queue: `~/.local/share/smalti/ui`, or below $XDG_DATA_HOME."""
    return user_data_path("smalti") / "ui"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`roots` are resolved folders: runs are searched in them, files are read below them. `data` is the user's own folder.

    `token` is that of the first link. `port` is the port that the server listens on.
    """

    roots: tuple[Path, ...]
    host: str = "127.0.0.1"
    port: int = 0
    data: Path = field(default_factory=user_data)
    token: str = field(default_factory=lambda: token_urlsafe(24), repr=False)

    @classmethod
    def of(cls, roots: Iterable[Path], *, host: str, port: int) -> Settings:
        """The settings with resolved roots; the current folder if there are none."""
        return cls(roots=tuple(root.resolve() for root in roots) or (Path.cwd().resolve(),), host=host, port=port)

    @property
    def hosts(self) -> frozenset[str]:
        """The values of the header Host that are always allowed."""
        names = set(LOCAL)
        if not self.everywhere:
            names.add(f"[{self.host}]" if ":" in self.host else self.host.lower())
        return frozenset(f"{name}:{self.port}" for name in names) | (frozenset(names) if self.port == 80 else frozenset())

    @property
    def everywhere(self) -> bool:
        """Whether the server listens on every address of the machine."""
        return self.host in ("0.0.0.0", "::")

    def allows(self, host: str) -> bool:
        """Whether a request may name this host: one of `hosts`; any literal IP address if the server listens on all.

        A name of somebody else's that resolves to this machine is refused, so that a foreign page cannot read answers.
        """
        if host.lower() in self.hosts:
            return True
        if not self.everywhere:
            return False
        name, _, port = host.rpartition(":")
        try:
            ip_address(name.strip("[]"))
        except ValueError:
            return False
        return port == str(self.port)

    @property
    def address(self) -> str:
        """The address at which a browser on this machine finds the page, without a token."""
        host = "127.0.0.1" if self.everywhere else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"
