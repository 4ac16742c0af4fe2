"""Options that no longer exist: what holds in their place, for files, variables and flags that still have them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from smalti.errors import Problem


@dataclass(frozen=True)
class Retired:
    """`value` is what is always used now, and `instead` says what to do about another one.

    With `trains_the_same`, another one changed speed or reports only: it is a notice, so that an old run still resumes.
    """

    value: object
    instead: str
    trains_the_same: bool = False


_LOGIT_NORMAL = "remove it, or use timestep_distribution=logit_normal with flow_sigmoid_mean and flow_sigmoid_scale"
RETIRED: Mapping[str, Retired] = {
    "aspect_bucket_rounding": Retired(2, "remove it; aspect_bucket_alignment sets how far buckets are apart"),
    "data_index_dir": Retired(None, "remove it; indexes are read from the run directory", trains_the_same=True),
    "dataloader_prefetch": Retired(4, "remove it", trains_the_same=True),
    "dataloader_prefetch_qlen": Retired(4, "remove it", trains_the_same=True),
    "dataset_cache_mb": Retired(512, "remove it; smaller images on disk are decoded faster", trains_the_same=True),
    "device_tflops": Retired(None, "remove it; mfu is computed for GPUs that are known", trains_the_same=True),
    "dynamo_recompile_limit": Retired(16, "remove it; a larger aspect_bucket_alignment gives fewer shapes"),
    "eval_timesteps": Retired(5, "remove it; num_eval_images sets how many images are measured"),
    "flow_beta_alpha": Retired(2, _LOGIT_NORMAL),
    "flow_beta_beta": Retired(2, _LOGIT_NORMAL),
    "flow_mode_scale": Retired(1.29, _LOGIT_NORMAL),
    "max_skipped_steps": Retired(10, "remove it; nonfinite_loss=stop stops at the first such step"),
}


def is_retired(spelling: str) -> bool:
    return _name(spelling) in RETIRED


def report_retired(spelling: str, value: object, where: str, problems: list[Problem], notices: list[str]) -> None:
    """Report a value of a retired option that is not used; nothing for the value that is always used."""
    row = RETIRED[_name(spelling)]
    if value is None or value == "" or _plain(value) == _plain(row.value):
        return
    always = "" if row.value is None else f", and {row.value} is always used"
    message = f"{spelling}={value}: there is no such option any more{always}"
    if not row.trains_the_same:
        problems.append(Problem(message=message, where=where, fix=row.instead))
    else:
        notices.append(f"{where}: {message}; {row.instead}")


def _name(spelling: str) -> str:
    return spelling.strip().lstrip("-").replace("-", "_").lower()


def _plain(value: object) -> object:
    """Numbers and words, however they are written."""
    text = str(value).strip().lower()
    with suppress(ValueError):
        return float(text)
    return text
