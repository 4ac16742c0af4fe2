"""The page of `smalti config new`: a draft for a model, a card, a goal and a folder of images."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Form
from starlette.requests import Request
from starlette.responses import HTMLResponse

from smalti_webui.configs.drafts import drafts_of
from smalti_webui.configs.paths import path_below
from smalti_webui.configs.schemas import models
from smalti_webui.hardware.planner import device_names
from smalti_webui.server.messages import toast
from smalti_webui.server.processes import failure, run_cli
from smalti_webui.server.templating import page, partial

router = APIRouter()

_SECONDS = 600.0
_MEMORY = (8, 12, 16, 24, 32, 48, 80)
"""Sizes of cards to choose from for which no name is known, in GB."""
Word = Annotated[str, Form(max_length=4096)]


@router.get("/card")
def form(request: Request) -> HTMLResponse:
    """What is asked for."""
    devices = {name: title for name, title in device_names().items() if name != "cpu"}
    cards = [*devices.items(), *((f"{size}GB", f"any card of {size} GB") for size in _MEMORY)]
    return page(request, "configs/card.html", title="For a model and a card", models=list(models().items()), cards=cards)


@router.post("/card")
async def make(
    request: Request,
    model: Word,
    card: Word = "detected",
    gpus: Word = "1",
    goal: Word = "lora",
    data: Word = "",
    prompt: Word = "",
) -> HTMLResponse:
    """A draft with what the planner has chosen, or why there is none."""
    settings = request.app.state.settings
    words = [f"--model={model}", f"--card={card}", f"--gpus={gpus.strip() or 1}", f"--goal={goal}"]
    if data.strip():
        path_below(settings, data)  # images are counted below the folders of the page only
        words.append(f"--data={data.strip()}")
    if prompt.strip():
        words.append(f"--prompt={prompt.strip()}")
    done = await run_cli(["config", "new", *words, "--json"], _SECONDS, cwd=settings.roots[0])
    if done.code or not isinstance(done.json, dict):
        problems = [failure(done, "smalti config new")]
        return partial(request, "server/problems.html", title="No configuration was made", problems=problems)
    name = f"{done.json['model']['family']}-{goal}"
    draft = drafts_of(settings).new(str(done.json["toml"]), name=name, origin=f"{model} on {card}")
    response = HTMLResponse()
    response.headers["HX-Redirect"] = f"/configs/{draft.id}?view=toml"
    toast(response, "A draft was made; each line says why it is there")
    return response
