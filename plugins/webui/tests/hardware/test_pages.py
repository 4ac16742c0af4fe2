import json
import re
import sys

import pytest

from smalti_deepspeed import checks as deepspeed_checks
from smalti_fsdp2 import checks as fsdp2_checks
from smalti_webui.configs.drafts import Draft


@pytest.fixture
def draft(settings, draft_in):
    return draft_in(settings)


def values(settings, draft):
    return dict(Draft.load(settings, draft.id).values)


def send(client, draft, **form):
    """The form of the page as a browser posts it, with some fields changed."""
    page = client.get(f"/hardware/{draft.id}").text
    shown = page.partition('name="shown" value="')[2].partition('"')[0]
    answer = client.post(f"/hardware/{draft.id}/options", data={"shown": shown, **form}, headers={"hx-request": "true"})
    assert answer.status_code == 200
    return answer.text


FSDP = {
    "mode": "fsdp2",
    "num_processes": "1",
    "num_machines": "1",
    "mixed_precision": "auto",
    "fsdp_version": "2",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_min_num_params": "100000000",
    "fsdp_reshard_after_forward": "true",
    "fsdp_limit_all_gathers": "true",
    "fsdp_sync_each_batch": "true",
    "fsdp_activation_checkpointing_mode": "full",
    "fsdp_activation_checkpointing_every": "1",
    "fsdp_param_dtype": "auto",
    "fsdp_reduce_dtype": "auto",
    "fsdp_output_dtype": "auto",
    "fsdp_forward_prefetch": "1",
    "fsdp_backward_prefetch": "1",
    "context_parallel_size": "1",
    "context_parallel_comm_strategy": "allgather",
}


def test_a_form_that_changes_nothing_changes_nothing(client, settings, draft):
    before = Draft.load(settings, draft.id)
    send(client, draft, mode="none", num_processes="1", num_machines="1", mixed_precision="auto")
    assert Draft.load(settings, draft.id).version == before.version


def test_the_card_sets_what_it_shows_and_a_default_is_not_written(client, settings, draft):
    send(client, draft, mode="fsdp2", num_processes="1", num_machines="1", mixed_precision="auto")
    before = values(settings, draft)
    assert before["fsdp_enable"] is True
    send(client, draft, **{**FSDP, "fsdp_cpu_offload": "true", "num_processes": "4"})
    after = values(settings, draft)
    assert {name: after[name] for name in after.keys() - before.keys()} == {"fsdp_cpu_offload": True, "num_processes": 4}
    send(client, draft, **FSDP)
    assert values(settings, draft) == before
    assert Draft.load(settings, draft.id).text.startswith("# kept\n")


def test_a_value_that_is_not_valid_stays_in_its_field_with_the_words_of_the_command_line(client, settings, draft):
    text = send(client, draft, mode="none", num_processes="many", num_machines="1", mixed_precision="auto")
    assert 'value="many"' in text
    assert "num_processes cannot be &#39;many&#39;" in text
    assert 'aria-invalid="true"' in text


def test_context_parallelism_with_version_1_is_refused_in_the_words_of_the_command_line(client, settings, draft, monkeypatch):
    monkeypatch.setenv("SMALTI_CONTEXT_PARALLEL_ON_CPU", "1")
    send(client, draft, mode="fsdp2", num_processes="1", num_machines="1", mixed_precision="auto")
    text = send(client, draft, **{**FSDP, "fsdp_version": "1", "context_parallel_size": "2", "num_processes": "2"})
    assert "Context parallelism requires FSDP2." in text


def test_a_file_with_both_has_the_error_and_one_choice_removes_it(client, settings, draft_in):
    both = draft_in(
        settings, "model_family = 'toy'\nfsdp_enable = true\ndeepspeed_config = '{\"zero_optimization\": {\"stage\": 2}}'\n"
    )
    assert "FSDP and DeepSpeed cannot be enabled simultaneously." in client.get(f"/hardware/{both.id}").text
    text = send(client, both, mode="deepspeed", num_processes="1", num_machines="1", mixed_precision="auto")
    assert "simultaneously" not in text
    assert "fsdp_enable" not in values(settings, both)


def test_the_deepspeed_configuration_returns_with_its_choice(client, settings, draft):
    document = {"zero_optimization": {"stage": 3}}
    answer = client.post(f"/hardware/{draft.id}/deepspeed/apply", data={"text": json.dumps(document)}, follow_redirects=False)
    assert answer.status_code == 303
    assert json.loads(values(settings, draft)["deepspeed_config"]) == document
    common = {"num_processes": "1", "num_machines": "1", "mixed_precision": "auto"}
    send(client, draft, mode="fsdp2", **common)
    assert "deepspeed_config" not in values(settings, draft)
    send(client, draft, **{**FSDP, "mode": "deepspeed"})
    assert json.loads(values(settings, draft)["deepspeed_config"]) == document
    assert "fsdp_enable" not in values(settings, draft)


def test_a_json_that_is_not_valid_is_not_applied(client, settings, draft):
    answer = client.post(f"/hardware/{draft.id}/deepspeed/apply", data={"text": '{"zero_optimization": {"stage": 9}}'})
    assert answer.status_code == 422
    assert "cannot be 9" in answer.text
    assert "deepspeed_config" not in values(settings, draft)


def test_an_unknown_draft_and_a_forgotten_plan_are_errors(client, draft):
    assert client.get("/hardware/000000000000").status_code == 404
    answer = client.post(f"/hardware/{draft.id}/plan/apply", data={"ranks": "8", "index": "0"})
    assert (answer.status_code, "plan again" in answer.text) == (422, True)


# --- what this host refuses -------------------------------------------------------------------------------------------


def tag(text, pattern):
    """The first tag of the page that has this in it."""
    return re.search(rf"<[^>]*{pattern}[^>]*>", text)[0]


@pytest.mark.parametrize("platform", ["darwin", "rocm"])
def test_deepspeed_is_closed_with_the_reason_of_its_launch_where_it_does_not_run(
    client, settings, draft_in, monkeypatch, tmp_path, platform
):
    asks = draft_in(settings, "model_family = 'toy'\ndeepspeed_config = '{\"zero_optimization\": {\"stage\": 2}}'\n")
    before = client.get(f"/hardware/{asks.id}").text
    assert "disabled" not in tag(before, 'id="mode-deepspeed"')
    assert "disabled" not in tag(before, 'data-opens="builder"')
    assert "Not on this host: DeepSpeed" not in before
    if platform == "darwin":
        monkeypatch.setattr(sys, "platform", "darwin")
    else:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").touch()
        (tmp_path / "torch" / "version.py").write_text("cuda: Optional[str] = None\nhip: Optional[str] = '6.4.1'\n")
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(deepspeed_checks, "is_rocm", deepspeed_checks.is_rocm.__wrapped__)
    reason = deepspeed_checks.platform_problem().message
    text = client.get(f"/hardware/{asks.id}").text
    assert "disabled" in tag(text, 'id="mode-deepspeed"')
    assert "disabled" in tag(text, 'data-opens="builder"')
    assert text.count(f"Not on this host: {reason}.") == 2
    send(client, asks, mode="none", num_processes="1", num_machines="1", mixed_precision="auto")
    assert "deepspeed_config" not in values(settings, asks)


def test_context_parallelism_is_closed_with_the_reason_where_there_is_no_cuda(client, settings, draft, monkeypatch):
    monkeypatch.delenv("SMALTI_CONTEXT_PARALLEL_ON_CPU", raising=False)
    monkeypatch.setattr(fsdp2_checks, "_DEVICES", ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    text = send(client, draft, mode="fsdp2", num_processes="1", num_machines="1", mixed_precision="auto")
    assert "Not on this host: context parallelism needs CUDA devices, and" in text
    assert "disabled" in tag(text, 'id="field-context_parallel_size"')
    assert "disabled" in tag(text, 'id="field-context_parallel_comm_strategy"')
    without = {name: value for name, value in FSDP.items() if not name.startswith("context_")}
    before = values(settings, draft)
    send(client, draft, **without)  # as a browser sends it: without what is disabled
    assert values(settings, draft) == before


def test_context_parallelism_of_a_draft_can_be_taken_back_where_it_is_refused(client, settings, draft_in, monkeypatch):
    monkeypatch.delenv("SMALTI_CONTEXT_PARALLEL_ON_CPU", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    asks = draft_in(settings, "model_family = 'toy'\nfsdp_enable = true\nnum_processes = 2\ncontext_parallel_size = 2\n")
    text = client.get(f"/hardware/{asks.id}").text
    assert "Not on this host: context parallelism" in text
    assert "disabled" not in tag(text, 'id="field-context_parallel_size"')
    send(client, asks, **{**FSDP, "num_processes": "2"})
    assert "context_parallel_size" not in values(settings, asks)


def test_context_parallelism_is_open_where_it_works(client, draft, monkeypatch):
    monkeypatch.setenv("SMALTI_CONTEXT_PARALLEL_ON_CPU", "1")
    text = send(client, draft, mode="fsdp2", num_processes="1", num_machines="1", mixed_precision="auto")
    assert "disabled" not in tag(text, 'id="field-context_parallel_size"')
    assert "Not on this host" not in text
