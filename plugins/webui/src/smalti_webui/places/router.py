"""The addresses of this room."""

from __future__ import annotations

from fastapi import APIRouter

from smalti_webui.places.compare.router import router as compare
from smalti_webui.places.datasets.router import router as datasets
from smalti_webui.places.gallery.router import router as gallery
from smalti_webui.places.installation.router import router as installation
from smalti_webui.places.job_router import router as jobs
from smalti_webui.places.learning.router import router as learning
from smalti_webui.places.outcome.router import router as outcome

router = APIRouter()
for each in (jobs, gallery, outcome, learning, compare, datasets, installation):
    router.include_router(each)
