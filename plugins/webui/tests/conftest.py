"""A server with real run directories below its root, in this process or on a socket, and a browser for it alone."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from PIL import Image
from starlette.testclient import TestClient

from smalti.errors import ExitCode
from smalti.rundir import RunDirectory, RunWriter, acquire
from smalti_validation.png import save_image
from smalti_webui.configs.drafts import Draft, drafts_of
from smalti_webui.server.app import create_app
from smalti_webui.server.serve import configuration, listen
from smalti_webui.server.settings import Settings
from support.images import images_in

CHROMIUM = shutil.which("chromium")
TINY = """# kept
model_family = "toy"
toy_depth = 2
instance_data_dir = "photos"
output_dir = "runs/tiny"
resolution = 32
max_train_steps = 3
train_batch_size = 2
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder that the server was started with."""
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def settings(root: Path, tmp_path: Path) -> Settings:
    return Settings(roots=(root.resolve(),), port=80, data=tmp_path / "data")


@pytest.fixture
def stranger(settings: Settings) -> Iterator[TestClient]:
    """A client without a session, whose requests are sent as a page of the server would send them."""
    client = TestClient(create_app(settings), base_url="http://127.0.0.1", raise_server_exceptions=False)
    client.headers.update({"origin": "http://127.0.0.1", "sec-fetch-site": "same-origin"})
    with client:
        yield client


@pytest.fixture
def client(stranger: TestClient, settings: Settings) -> TestClient:
    """A client with a session. An exception of the server is an answer with status 500."""
    assert stranger.get(f"/?token={settings.token}", follow_redirects=False).status_code == 303
    return stranger


class Server:
    """The application on a socket, in a thread. `link` gives a session to the browser that follows it."""

    def __init__(self, roots: tuple[Path, ...], data: Path, port: int = 0) -> None:
        socket = listen("127.0.0.1", port)
        self.settings = Settings(roots=tuple(root.resolve() for root in roots), port=socket.getsockname()[1], data=data)
        self.app = create_app(self.settings)
        self.url = self.settings.address.rstrip("/")
        self._server = uvicorn.Server(configuration(self.app))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [socket]}, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    @property
    def link(self) -> str:
        return f"{self.url}/runs?token={self.app.state.sessions.token}"

    def stop(self) -> None:
        self.app.state.closing = True
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture
def served(root: Path, tmp_path: Path) -> Iterator[Server]:
    server = Server((root,), tmp_path / "data")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One Chromium for the tests of a file. Its event loop belongs to this thread, where no other can run beside it."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


@pytest.fixture
def page(browser: Any, served: Server) -> Iterator[Any]:
    """A page of the browser with a session at `served`. Requests to anywhere else fail, and none may be made."""
    context = browser.new_context(base_url=served.url, viewport={"width": 1280, "height": 800})
    elsewhere: list[str] = []

    def refuse(route: Any) -> None:
        elsewhere.append(route.request.url)
        route.abort()

    context.route(lambda url: not url.startswith((served.url, "data:", "blob:")), refuse)
    opened = context.new_page()
    faults: list[str] = []
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("console", lambda line: faults.append(line.text) if "Content Security Policy" in line.text else None)
    opened.goto(served.link)
    yield opened
    context.close()
    assert (elsewhere, faults) == ([], [])


@pytest.fixture
def make_run(root: Path) -> Callable[..., RunDirectory]:
    """make_run("name", steps=20) -> a run directory below the root, written as a run writes it. `condition` is its end.

    With `condition="running"` the writer stays open until the end of the test; `make_run.writers[name]` is the writer.
    """
    return Runs(root)


_STEP = {"grad_norm": 0.5, "learning_rate": 1e-4, "samples": 4, "seconds": 0.5, "data_seconds": 0.01, "skipped": False}


class Runs:
    def __init__(self, root: Path) -> None:
        self._root = root
        self.writers: dict[str, RunWriter] = {}

    def __call__(
        self,
        name: str = "first",
        *,
        steps: int = 20,
        max_steps: int | None = None,
        samples: tuple[int, ...] = (10, 20),
        checkpoints: tuple[int, ...] = (10, 20),
        prompts: tuple[str, ...] = ("a face", "a cat <b>bold</b>"),
        condition: str = "finished",
        message: str = "",
    ) -> RunDirectory:
        directory = RunDirectory(self._root / name)
        writer = acquire(directory, name=name, config_digest="0" * 8)
        self.writers[name] = writer
        directory.config_file.write_text('output_dir = "."\nmodel_family = "toy"\n')
        directory.launch_file.write_text("{}")
        total = max_steps or steps
        write = writer.events.append
        write("state", step=0, state="running", max_steps=total, family="toy", strategy="one device", effective_batch=4)
        writer.begin_training()
        for step in range(1, steps + 1):
            write("step", step=step, loss=1 / step, max_steps=total, epoch=0, **_STEP)
            if step in samples:
                self.sample(directory, writer, step, prompts)
            if step in checkpoints:
                folder = directory.checkpoints / f"step-{step:08d}"
                folder.mkdir(parents=True)
                (folder / "weights.safetensors").write_bytes(bytes(1000))
                write("checkpoint", step=step, path=directory.relative(folder), size=1000, seconds=0.1, blocked=0.01)
        if condition != "running":
            code = ExitCode.DONE if condition == "finished" else ExitCode.FAILED
            if condition == "failed":
                write("error", step=steps, error="ValueError", message=message, traceback=f"Traceback\nValueError: {message}\n")
            writer.end(steps, condition, message or "the last step", code)  # type: ignore[arg-type]
            writer.close()
        return directory

    @staticmethod
    def sample(directory: RunDirectory, writer: RunWriter, step: int, prompts: tuple[str, ...]) -> None:
        images = []
        for number, prompt in enumerate(prompts):
            path = directory.samples_at(step) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image = Image.new("RGB", (64, 64), (40 + 8 * step % 200, 90 + 60 * number % 160, 200 - 6 * step % 190))
            run = writer.record.id
            save_image(path, image, prompt=prompt, seed=number, step=step, config_digest="0" * 8, run_id=run)
            images.append({"prompt": prompt, "seed": number, "path": directory.relative(path)})
        writer.events.append("sample", step=step, overview=directory.relative(path), images=images)


@pytest.fixture
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches and templates of the user who runs the tests are neither read nor changed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def photos(root: Path) -> Path:
    return images_in(root / "photos", 4, caption="a colour")


@pytest.fixture
def draft_in(root: Path) -> Callable[[Any], Draft]:
    """draft_in(settings) -> a new draft of the tiny model."""

    def new(settings: Settings, text: str = TINY) -> Draft:
        return Draft.load(settings, drafts_of(settings).new(text, name="tiny").id)

    return new
