"""Following and ending commands that a page has started."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from smalti_webui.places.jobs import Job
from smalti_webui.places.state import places
from smalti_webui.server.messages import toast
from smalti_webui.server.templating import partial

router = APIRouter(prefix="/jobs")


def shown(request: Request, job: Job, status: int = 200) -> Response:
    """The job as a part of a page, which asks for itself until the job has ended."""
    return partial(request, "places/job.html", status=status, job=job)


@router.get("/{job_id}")
async def follow(request: Request, job_id: str) -> Response:
    job = places(request).jobs.find(job_id)
    if job is None:
        raise HTTPException(404, "this command is not known any more: the server was started again")
    answer = shown(request, job)
    if not job.running and not job.announced:
        job.announced = True
        ended = "cancelled" if job.cancelled else "done" if job.code == 0 else f"exit code {job.code}"
        toast(answer, f"{job.title}: {ended}", "success" if job.code == 0 else "warning")
    return answer


@router.post("/{job_id}/cancel")
async def cancel(request: Request, job_id: str) -> Response:
    job = places(request).jobs.find(job_id)
    if job is None:
        raise HTTPException(404, "this command is not known any more: the server was started again")
    places(request).jobs.cancel(job)
    return shown(request, job)
