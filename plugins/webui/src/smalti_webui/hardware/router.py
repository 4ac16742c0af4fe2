"""The pages of the hardware: how a draft is distributed, the blocks of its model, the DeepSpeed builder, the planner."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from difflib import unified_diff
from typing import Annotated, Any

from fastapi import APIRouter, Form
from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from smalti import Problem, UserError
from smalti_webui.configs.drafts import Draft
from smalti_webui.hardware import builder, planner, strategy
from smalti_webui.hardware.availability import refusals
from smalti_webui.hardware.detection import Detected, in_bf16
from smalti_webui.hardware.edited import Edited, as_text
from smalti_webui.server.messages import toast
from smalti_webui.server.processes import Result, failure, run_cli
from smalti_webui.server.templating import page, partial

router = APIRouter(prefix="/hardware")

_DETECTING = 300.0
_PLANNING = 1800.0
_REMEMBERED = 50
Text = Annotated[str, Form(max_length=200_000)]
Word = Annotated[str, Form(max_length=200)]


async def edited(request: Request, draft: str) -> Edited:
    """The draft of an address, with its configuration. HTTPException 404 or UserError if there is none."""
    settings = request.app.state.settings
    return await asyncio.to_thread(lambda: Edited(Draft.load(settings, draft), settings))


# --- the card ---------------------------------------------------------------------------------------------------------


def _fields(subject: Edited, mode: str) -> dict[str, list[str]]:
    """The options of the page by its parts, those that an installed plugin declares."""
    known = subject.schema.options
    card = [*strategy.FSDP_OPTIONS] if mode in ("fsdp2", "both") else []
    more = [name for name, option in known.items() if option.group.name == "fsdp" and name != "fsdp_enable"]
    found = {
        "ranks": list(strategy.RANK_OPTIONS),
        "fsdp": card,
        "more": [name for name in more if name not in card] if card else [],
        "context": list(strategy.CONTEXT_OPTIONS) if card else [],
        "deepspeed": ["offload_param_path"] if mode in ("deepspeed", "both") else [],
    }
    return {part: [name for name in names if name in known] for part, names in found.items()}


def _context(subject: Edited) -> dict[str, Any]:
    mode = strategy.mode_of(subject.values)
    parts = _fields(subject, mode)
    refused = refusals(subject.plugins, subject.schema, on_cpu=subject.on_cpu)
    # What is given stays open, so that it can be taken back.
    closed = [name for name in parts["context"] if refused["context"] and name not in subject.values]
    names = [name for part in parts.values() for name in part if name not in closed]
    available = {
        "none": "",
        "fsdp2": "" if "fsdp_enable" in subject.schema.options else "Not installed: pip install smalti-fsdp2",
        "deepspeed": f"Not on this host: {refused['deepspeed']}." if refused["deepspeed"] else "",
    }
    if builder.NAME not in subject.schema.options:
        available["deepspeed"] = "Not installed: pip install smalti-deepspeed"
    return {
        "subject": subject,
        "draft": subject.draft,
        "mode": mode,
        "titles": strategy.TITLES,
        "available": available,
        "refused": refused,
        "closed": closed,
        "parts": {part: [subject.field(name) for name in part_names] for part, part_names in parts.items()},
        "shown": ",".join(names),
        "problems": subject.other_problems(names),
        "both": strategy.BOTH,
        "document": _pretty(subject.values.get(builder.NAME)),
        "devices": planner.device_names(),
        "world": subject.effective("num_processes"),
    }


@router.get("")
async def start() -> RedirectResponse:
    """The hardware belongs to a configuration."""
    return RedirectResponse("/configs", 303)


@router.get("/{draft}")
async def show(request: Request, draft: str) -> HTMLResponse:
    """The page of a draft."""
    subject = await edited(request, draft)
    return page(request, "hardware/page.html", title="Hardware", here="configs", **_context(subject))


@router.post("/{draft}/options")
async def options(request: Request, draft: str) -> HTMLResponse:
    """Take the fields of the page into the draft."""
    form = _texts(await request.form())
    subject = await edited(request, draft)
    names = [name for name in (form.get("shown") or "").split(",") if name in subject.schema.options]
    changes = subject.changes_from(form, names)
    if (mode := form.get("mode", "")) in strategy.TITLES and mode != strategy.mode_of(subject.values):
        changes |= strategy.changes_for(mode, subject.values, _kept(request, draft))
        _keep(request, draft, subject)
    elif strategy.mode_of({**subject.values, **changes}) == "fsdp2" and mode == "fsdp2":
        changes |= strategy.changes_for("fsdp2", {**subject.values, **changes})
    await asyncio.to_thread(subject.set, changes)
    return partial(request, "hardware/card.html", **_context(await edited(request, draft)))


def _keep(request: Request, draft: str, subject: Edited) -> None:
    """Remember the DeepSpeed configuration that another choice takes away, for the way back."""
    if document := subject.values.get(builder.NAME):
        _remember(request, "documents", draft, as_text(document))


def _kept(request: Request, draft: str) -> str | None:
    document = _remembered(request, "documents", draft)
    return None if document is None else str(document)


# --- the blocks of the model ------------------------------------------------------------------------------------------


@router.post("/{draft}/blocks")
async def blocks(request: Request, draft: str, refresh: Word = "") -> HTMLResponse:
    """Detect the blocks of the model, or read them from the cache."""
    subject = await edited(request, draft)
    detected, problems = await _detect(request, subject, refresh=refresh == "true")
    if detected is None:
        return partial(request, "hardware/blocks-failed.html", draft=subject.draft, problems=problems)
    names = detected.initial(subject.values.get(strategy.BLOCK_CLASSES))
    chosen = detected.selection(names)
    return partial(request, "hardware/blocks.html", draft=subject.draft, detected=detected, selection=chosen, in_bf16=in_bf16)


@router.post("/{draft}/blocks/selection")
async def selection(request: Request, draft: str) -> HTMLResponse:
    """What a selection means: its flag, the largest block, what stays gathered."""
    detected = _remembered(request, "blocks", draft)
    if detected is None:
        detected, problems = await _detect(request, await edited(request, draft), refresh=False)
        if detected is None:
            return partial(request, "server/problems.html", title="The model cannot be described", problems=problems)
    chosen = detected.selection([str(each) for each in (await request.form()).getlist("class")])
    return partial(request, "hardware/selection.html", selection=chosen, in_bf16=in_bf16)


@router.post("/{draft}/blocks/apply")
async def apply_blocks(request: Request, draft: str) -> Response:
    """Take the selected classes into the draft."""
    names = [str(each) for each in (await request.form()).getlist("class")]
    subject = await edited(request, draft)
    await asyncio.to_thread(subject.set, {strategy.BLOCK_CLASSES: names or None})
    response = RedirectResponse(f"/hardware/{draft}#field-{strategy.BLOCK_CLASSES}", 303)
    toast(response, f"{strategy.BLOCK_CLASSES} is {', '.join(names)}" if names else "the block classes are detected at launch")
    return response


async def _detect(request: Request, subject: Edited, *, refresh: bool) -> tuple[Detected | None, list[Problem]]:
    words = ["detect-blocks", subject.file, "--json", *(["--refresh"] if refresh else [])]
    done = await run_cli(words, _DETECTING, cwd=subject.draft.folder)
    try:
        detected = Detected.from_json(done.json)
    except ValueError:
        return None, [_failure(done, "smalti detect-blocks", subject)]
    _remember(request, "blocks", subject.draft.id, detected)
    return detected, []


# --- the DeepSpeed builder --------------------------------------------------------------------------------------------


def _builder(request: Request, subject: Edited, built: builder.Built) -> dict[str, Any]:
    current = _pretty(subject.values.get(builder.NAME))
    lines = unified_diff(current.splitlines(), built.text.splitlines(), "now", "new", lineterm="", n=2)
    known = subject.schema.options
    inherited = {name: subject.effective(option) for name, option in builder.INHERITED.items() if option in known}
    return {
        "draft": subject.draft,
        "built": built,
        "fields": builder.form_fields(),
        "answers": built.answers or {},
        "inherited": inherited,
        "inherited_from": builder.INHERITED,
        "difference": [line for line in lines if not line.startswith(("---", "+++", "@@"))],
        "current": current,
        "problems": [builder.as_problem(each) for each in built.problems],
    }


def _pretty(value: object) -> str:
    text = as_text(value)
    document = builder.parsed(text)
    return builder.as_text(document) if document is not None else text


@router.post("/{draft}/deepspeed")
async def open_builder(request: Request, draft: str) -> HTMLResponse:
    """The builder with the configuration of the draft, or with the defaults."""
    subject = await edited(request, draft)
    current = _pretty(subject.values.get(builder.NAME))
    built = await (builder.from_text(current) if current else builder.from_form({}))
    context = _builder(request, subject, built)
    return partial(request, "hardware/builder.html", templates=await _templates(), **context)


@router.post("/{draft}/deepspeed/form")
async def build(request: Request, draft: str) -> HTMLResponse:
    """The JSON of the form."""
    form = _texts(await request.form())
    subject = await edited(request, draft)
    context = _builder(request, subject, await builder.from_form(form, form.get("text", "")))
    return partial(request, "hardware/builder-answer.html", swap_text=True, swap_form=True, **context)


@router.post("/{draft}/deepspeed/text")
async def check_text(request: Request, draft: str, text: Text = "") -> HTMLResponse:
    """What an edited JSON says: problems by line, and the form."""
    subject = await edited(request, draft)
    context = _builder(request, subject, await builder.from_text(text))
    return partial(
        request, "hardware/builder-answer.html", swap_text=False, swap_form=context["built"].answers is not None, **context
    )


@router.post("/{draft}/deepspeed/apply")
async def apply_document(request: Request, draft: str, text: Text = "") -> Response:
    """Take the JSON into the draft. Raises UserError with the problems of one that is not valid."""
    built = await builder.from_text(text)
    if built.problems:
        problem = builder.as_problem(built.problems[0])
        raise UserError(f"{problem.where}: {problem.message}" if problem.where else problem.message, fix=problem.fix)
    document = builder.parsed(text)
    assert document is not None
    subject = await edited(request, draft)
    changes = strategy.changes_for("deepspeed", subject.values) | {builder.NAME: builder.one_line(document)}
    await asyncio.to_thread(subject.set, changes)
    response = RedirectResponse(f"/hardware/{draft}#distribution", 303)
    toast(response, "deepspeed_config was applied to the draft")
    return response


async def _templates() -> list[Mapping[str, Any]]:
    done = await run_cli(["deepspeed", "templates", "ls", "--json"], builder.SECONDS)
    return list(done.json["templates"]) if isinstance(done.json, dict) else []


@router.post("/{draft}/deepspeed/templates")
async def templates(request: Request, draft: str, what: Word, name: Word = "", saved: Word = "", text: Text = "") -> Response:
    """Save, load or remove a template; these are the files of `smalti deepspeed templates`."""
    subject = await edited(request, draft)
    words = {"load": ["show", "--", saved], "save": ["save", "--force", "--", name, "-"], "remove": ["rm", "--", saved]}
    if what not in words:
        raise UserError(f"templates know no action {what!r}", fix="load, save or remove")
    sent = text if what == "save" else None
    done = await run_cli(["deepspeed", "templates", *words[what]], builder.SECONDS, input=sent, changes=what != "load")
    if what == "load":
        if done.code:
            problem = _failure(done, "smalti deepspeed templates", subject)
            raise UserError(problem.message, fix=problem.fix)
        loaded = _builder(request, subject, await builder.from_text(done.stdout))
        swap_form = loaded["built"].answers is not None
        response = partial(request, "hardware/builder-answer.html", swap_text=True, swap_form=swap_form, **loaded)
        toast(response, f"template {saved} was loaded", "info")
        return response
    failed = _failure(done, "smalti deepspeed templates", subject) if done.code else None
    kept = await _templates()
    response = partial(request, "hardware/templates.html", draft=subject.draft, templates=kept, problem=failed)
    if failed is None:
        toast(response, f"template {name} was saved" if what == "save" else f"template {saved} was removed")
    return response


# --- the planner ------------------------------------------------------------------------------------------------------


@router.post("/{draft}/plan")
async def plan(
    request: Request, draft: str, gpu: Word = "detected", gpus: Word = "", nodes_of: Word = "8", how: Word = "quick"
) -> HTMLResponse:
    """Compare all ways to train the draft on some devices."""
    subject = await edited(request, draft)
    words = [f"--gpu={gpu}", f"--gpus={gpus.strip()}", f"--nodes-of={nodes_of.strip() or 8}"]
    words += ["--quick"] if how == "quick" else []
    done = await run_cli(["plan", subject.file, "--json", *words], _PLANNING, cwd=subject.draft.folder)
    try:
        view = planner.view_of(done.json or {})
    except (KeyError, TypeError, ValueError):
        problems = [_failure(done, "smalti plan", subject)]
        return partial(request, "server/problems.html", title="This cannot be planned", problems=problems)
    _remember(request, "plans", draft, view)
    return partial(request, "hardware/plan.html", draft=subject.draft, view=view, parts=planner.PARTS)


@router.post("/{draft}/plan/apply")
async def apply_plan(request: Request, draft: str, ranks: Annotated[int, Form()], index: Annotated[int, Form()]) -> Response:
    """Take the options of a planned way to train into the draft."""
    view = _remembered(request, "plans", draft)
    rows = [row for size in (view.sizes if view else ()) if size.ranks == ranks for row in size.rows if row.index == index]
    if not rows:
        raise UserError("this plan is not known any more", fix="plan again")
    row, subject = rows[0], await edited(request, draft)
    defaults = {name: option.default for name, option in subject.schema.options.items()}
    await asyncio.to_thread(subject.set, strategy.changes_for_plan(row.options, subject.values, defaults))
    response = RedirectResponse(f"/hardware/{draft}#distribution", 303)
    toast(response, f"{row.title} on {ranks} devices was applied to the draft")
    return response


# --- what all parts use -----------------------------------------------------------------------------------------------


def _failure(done: Result, command: str, subject: Edited) -> Problem:
    """What a command ended with, in its own words, with the name of the draft in place of its file."""
    return failure(replace(done, stderr=subject.named(done.stderr)), command)


def _texts(form: FormData) -> dict[str, str]:
    return {name: value for name, value in form.items() if isinstance(value, str)}


def _remember(request: Request, what: str, draft: str, value: object) -> None:
    """Keep an answer for the next request of the same page, as long as the server runs."""
    kept = _memory(request, what)
    kept[draft] = value
    kept.move_to_end(draft)
    while len(kept) > _REMEMBERED:
        kept.popitem(last=False)


def _remembered(request: Request, what: str, draft: str) -> Any:
    return _memory(request, what).get(draft)


def _memory(request: Request, what: str) -> OrderedDict[str, object]:
    state = request.app.state
    if not hasattr(state, "hardware"):
        state.hardware = {}
    found: OrderedDict[str, object] = state.hardware.setdefault(what, OrderedDict())
    return found
