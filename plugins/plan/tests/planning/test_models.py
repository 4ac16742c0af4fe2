"""Small Flux and SDXL models: rehearsals against real ranks, and formulas against rehearsals. bench/plan.py has more rows."""

import pytest

from planning.measured import by_formula, by_rehearsal, measured
from planning.pipelines import PIPELINES, pipeline
from planning.rows import Row
from support.forked_ranks import forked_processes
from support.whole import some

REAL = (
    Row(model="flux", strategy="ddp", ranks=2, lora=True),
    Row(model="sdxl", strategy="fsdp2", ranks=2),
    Row(
        model="flux",
        lora=True,
        micro=2,
        terms=("--slider=prompts", "--slider_positive=old", "--preserve=blank", "--preserve_every=3"),
    ),
)
OTHERS = (
    *(
        "anima",
        "auraflow",
        "bria",
        "chroma",
        "cosmos",
        "ernie",
        "flux2",
        "hidream",
        "ideogram",
        "krea2",
        "longcat_image",
        "lumina2",
        "pixart",
        "qwen_image",
        "qwen_image21",
        "sana",
    ),
    *("ovis_image", "sd1x", "sd2x", "z_image"),
)
DDP_OWN = 1024
"""Bytes that DDP keeps for itself, such as which parameters were used."""


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """words(row) -> the words of `smalti train`, on a pipeline that is made once."""
    folder = tmp_path_factory.mktemp("models")

    def of(row):
        path = folder / row.model
        if not path.exists():
            with forked_processes(ranks=1, group=False, imports=PIPELINES) as process:
                process.run(pipeline, row.model, path)
        return row.words(path, folder)

    return of


@pytest.fixture(scope="module")
def rehearsal_of(words):
    """rehearsal_of(row) -> its rehearsal."""
    known = {}

    def of(row):
        if row not in known:
            with forked_processes(ranks=1, group=False, imports=PIPELINES) as process:
                [known[row]] = process.run(
                    by_rehearsal, words(row), ranks=row.ranks, micro=row.micro, accumulation=row.accumulation
                )
        return known[row]

    return of


@pytest.mark.parametrize("row", some(REAL, REAL[0]), ids=str)
def test_a_rehearsal_counts_the_bytes_of_real_ranks(row, words, rehearsal_of):
    with forked_processes(ranks=row.ranks, imports=PIPELINES) as processes:
        found = processes.run(measured, words(row))[0]
    assert 0 <= found.resident - rehearsal_of(row).resident <= (DDP_OWN if row.strategy == "ddp" else 0)
    assert rehearsal_of(row).peak == pytest.approx(found.peak, rel=0.02)


@pytest.mark.parametrize("row", some(REAL, REAL[0]), ids=str)
def test_a_formula_is_near_the_rehearsal(row, words, rehearsal_of):
    settings = {"strategy": row.proposed, "recompute": row.recompute, "micro": row.micro}
    with forked_processes(ranks=1, group=False, imports=PIPELINES) as process:
        [formula] = process.run(by_formula, words(row), **settings, ranks=row.ranks, local=row.local)
    assert formula.resident + rehearsal_of(row).beside == pytest.approx(rehearsal_of(row).resident, rel=0.05)
    assert formula.peak + rehearsal_of(row).beside == pytest.approx(rehearsal_of(row).peak, rel=0.15)


@pytest.mark.parametrize("family", some(OTHERS, "qwen_image"))
def test_all_families_can_be_rehearsed(family, rehearsal_of):
    found = rehearsal_of(Row(model=family, bf16=True))
    assert found.peak > found.resident > 0
