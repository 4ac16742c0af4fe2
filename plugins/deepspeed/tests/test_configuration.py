"""A DeepSpeed configuration beside smalti's options: what it gives, what it must agree with, what DeepSpeed is told."""

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from smalti import Config, ConfigError, UserError
from smalti.config.resolution import resolve, restore
from smalti.hookspecs import HookSpecs
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.lookup import choose_distributed, find_optimizer
from smalti.plugins.schema import schema_of
from smalti_deepspeed.checks import problems
from smalti_deepspeed.config import resolved, sized
from smalti_deepspeed.optimizers import NAMES, normalised

DATA = Path(__file__).parents[3] / "tests" / "data"
PLUGINS = load_plugins(Selection(only=("deepspeed", "fsdp2")))
SCHEMA = schema_of(PLUGINS)
ZERO2 = {"zero_optimization": {"stage": 2}}


def configure(document: object, *flags: str, file: Path | None = None) -> Config:
    words = () if document is None else (f"--deepspeed_config={json.dumps(document)}",)
    none = () if file is not None and file.suffix == ".yaml" else ("--accelerate_config=none",)
    return resolve(SCHEMA, [*none, *words, *flags], file=file, environment={})


def complete(document: object, *flags: str, world_size: int = 1) -> dict:
    return resolved(configure(document, *flags), world_size=world_size)


def refusals(document: object, *flags: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        configure(document, *flags)
    return [f"{problem.where}: {problem.message}" for problem in raised.value.problems]


# --- what users bring -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stage", "values"),
    [
        ("config-zero2.json", 2, {"train_batch_size": 2, "gradient_accumulation_steps": 4}),
        ("config-zero3-nvme.json", 3, {"train_batch_size": 1}),
        ("accelerate-zero1.yaml", 1, {"gradient_accumulation_steps": 4, "num_processes": 1}),
        ("accelerate-4x8-zero1.yaml", 1, {"max_grad_norm": 0.01, "num_processes": 32}),
    ],
)
def test_a_file_of_another_trainer_works_as_it_stands(name, stage, values):
    config = configure(None, file=DATA / name)
    assert choose_distributed(config, PLUGINS).title == "DeepSpeed"
    assert {key: config.value(key) for key in values} == values
    assert resolved(config, world_size=4)["zero_optimization"]["stage"] == stage


@pytest.mark.parametrize("form", ["text", "path", "table", "named in a table"])
def test_a_configuration_is_text_or_a_path_or_a_table(tmp_path, form):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(ZERO2))
    if form == "table":
        (tmp_path / "config.json").write_text(json.dumps({"--deepspeed_config": ZERO2}))
        config = configure(None, file=tmp_path / "config.json")
    elif form == "named in a table":
        config = configure({"deepspeed_config_file": str(path), "zero3_init_flag": False})
    else:
        config = configure(None, f"--deepspeed_config={path if form == 'path' else json.dumps(ZERO2)}")
    assert json.loads(str(config.value("deepspeed_config"))) == ZERO2


def test_ranks_have_what_the_launcher_read_though_the_file_has_changed_since(tmp_path):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(ZERO2))
    launched = configure(None, f"--deepspeed_config={path}")
    path.write_text("{")
    on_rank = restore(SCHEMA, launched.shared_values(), {}, environment={})
    assert resolved(on_rank, world_size=2) == resolved(launched, world_size=2)


def test_none_switches_it_off_and_flags_go_before_an_accelerate_yaml():
    flags = ("--deepspeed_config=none", "--gradient_accumulation_steps=2")
    config = configure(None, *flags, file=DATA / "accelerate-zero1.yaml")
    assert choose_distributed(config, PLUGINS).title == "single process"
    assert config.value("gradient_accumulation_steps") == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"bf16": {}\n "zero_optimization": {}}', "deepspeed_config:2:2: this is not JSON"),
        ("{'a': 1}", "deepspeed_config:1:2: this is not JSON"),
        ("[2]", "deepspeed_config: contains a list"),
        ('{"bf16": {}, "bf16": {}}', "the key 'bf16' occurs twice"),
        ("no/such.json", "there is no file no/such.json"),
        ("~nobody-of-this-name/zero.json", "there is no file ~nobody-of-this-name/zero.json"),
        ('{"deepspeed_config_file": "zero\\u0000.json"}', "null byte"),
        ('{"deepspeed_config_file": "zero.json", "gradient_clipping": 1}', "says more beside it: gradient_clipping"),
        ('{"\\ud800": 1}', "surrogates not allowed"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(text, told):
    with pytest.raises(ConfigError) as raised:
        configure(None, f"--deepspeed_config={text}")
    assert told in str(raised.value)


# --- one value for each thing ---------------------------------------------------------------------------------------


FULL = {
    **ZERO2,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": False},
    "optimizer": {"type": "adamw", "params": {"lr": 2e-5, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 7, "total_num_steps": 50, "warmup_max_lr": 2e-5}},
}
MEANT = {
    "train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "max_grad_norm": 0.5,
    "mixed_precision": "no",
    "optimizer": "adamw",
    "learning_rate": 2e-5,
    "adam_beta1": 0.8,
    "adam_beta2": 0.9,
    "adam_epsilon": 1e-6,
    "adam_weight_decay": 0.1,
    "lr_scheduler": "linear",
    "lr_warmup_steps": 7,
    "max_train_steps": 50,
}


def test_what_the_json_says_becomes_the_value_of_the_option():
    config = configure(FULL)
    assert {name: config.value(name) for name in MEANT} == MEANT
    assert config.source("learning_rate") == "DeepSpeed (optimizer.params.lr in deepspeed_config)"


def test_what_is_given_in_both_may_say_the_same():
    flags = [f"--{name}={value}" for name, value in MEANT.items()]
    assert configure(FULL, *flags).value("learning_rate") == 2e-5


@pytest.mark.parametrize("name", MEANT)
def test_an_option_that_contradicts_the_json_is_an_error_with_both_values(name):
    other = {"mixed_precision": "bf16", "optimizer": "sgd", "lr_scheduler": "cosine"}.get(
        name, 0.25 if "0." in str(MEANT[name]) else 3
    )
    (told,) = refusals(FULL, f"--{name}={other}")
    assert f"{name} is '{other}', and " in told
    assert "in deepspeed_config says " in told


def test_the_same_thing_said_twice_within_the_json_must_agree():
    document = {**ZERO2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    document["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}}
    (told,) = refusals(document)
    assert "is 0.001, and optimizer.params.lr is 0.0001: both are learning_rate" in told


def test_auto_and_missing_values_are_those_of_the_run():
    document = {
        **ZERO2,
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "torch_adam": True}},
    }
    flags = ("--gradient_accumulation_steps=3", "--train_batch_size=2", "--learning_rate=0.5", "--lr_warmup_steps=9")
    told = complete(document, *flags, world_size=4)
    assert (told["train_batch_size"], told["train_micro_batch_size_per_gpu"], told["gradient_accumulation_steps"]) == (24, 2, 3)
    assert told["optimizer"]["params"] == {
        "lr": 0.5,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.01,
        "torch_adam": True,
    }
    assert told["scheduler"]["params"]["warmup_num_steps"] == 9


def test_without_optimizer_and_scheduler_it_is_adamw_and_warmup():
    told = complete(ZERO2, "--mixed_precision=bf16")
    assert (told["optimizer"]["type"], told["scheduler"]["type"]) == ("AdamW", "WarmupLR")
    assert (told["gradient_clipping"], told["bf16"]) == (1.0, {"enabled": True})
    assert "zero_allow_untested_optimizer" not in told


def test_an_optimizer_of_smaltis_own_is_allowed_knowingly():
    told = complete(ZERO2, "--optimizer=sgd")
    assert ("optimizer" in told, told["zero_allow_untested_optimizer"]) == (False, True)


@pytest.mark.parametrize(("name", "own"), [("WarmupLR", "constant_with_warmup"), ("WarmupCosineLR", "cosine")])
def test_schedules_go_both_ways(name, own):
    params = {"total_num_steps": 9} if name != "WarmupLR" else {}
    assert configure({**ZERO2, "scheduler": {"type": name.lower(), "params": params}}).value("lr_scheduler") == own
    assert complete(ZERO2, f"--lr_scheduler={own}", "--max_train_steps=9")["scheduler"]["type"] == name


@pytest.mark.parametrize("name", ["OneCycle", "LRRangeTest", "WarmupLr2"])
def test_a_schedule_that_smalti_has_not_is_refused(name):
    (told,) = refusals({**ZERO2, "scheduler": {"type": name}})
    assert told.startswith(f"scheduler.type in deepspeed_config: {name} is not ")


@pytest.mark.parametrize("key", ["total_num_steps", "cos_min_ratio", "warmup_min_ratio"])
def test_a_setting_of_another_schedule_is_refused_unless_it_is_left_open(key):
    def using(value):
        return {**ZERO2, "scheduler": {"type": "WarmupLR", "params": {key: value}}}

    (told,) = refusals(using(1))
    assert told.startswith(f"scheduler.params.{key} in deepspeed_config: WarmupLR has no such setting")
    configure(using("auto"))


# --- optimizers -----------------------------------------------------------------------------------------------------


@given(st.sampled_from(NAMES), st.sampled_from((str.lower, str.upper, str)), st.sampled_from(("", " ")))
def test_a_name_in_any_case_is_deepspeeds(name, case, blank):
    assert normalised(f"{blank}{case(name)}{blank}") == (name, "")


@pytest.mark.parametrize("optimizer", [{"type": "cpuadam"}, {"name": "FusedAdam"}, "prodigy"])
def test_an_optimizer_that_deepspeed_has_not_becomes_adamw_with_a_word(optimizer):
    config = configure({**ZERO2, "optimizer": optimizer})
    old = optimizer if isinstance(optimizer, str) else next(iter(optimizer.values()))
    assert [notice for notice in config.notices if repr(old) in notice and "AdamW takes its place" in notice]
    assert resolved(config, world_size=1)["optimizer"]["type"] == "AdamW"


def test_settings_of_an_optimizer_that_is_replaced_go_but_for_those_that_every_one_has():
    told = complete({**ZERO2, "optimizer": {"type": "prodigy", "params": {"lr": 1.0, "d_coef": 2}}})["optimizer"]["params"]
    assert told == {"lr": 1.0, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}


BASE_SHAPES = "needs a model with the base shapes of mup, which no model family has; without them it would step as"
FATES = {
    "AdamW": "adamw",
    "Adam": "deepspeed_adam",
    "Adagrad": "adagrad",
    "Lamb": "deepspeed_lamb",
    "Lion": "deepspeed_lion",
    "Muon": "muon",
    "OneBitAdam": ("DeepSpeed has OneBitAdam no more (0.19)", '"type": "Adam"'),
    "OneBitLamb": ("DeepSpeed has OneBitLamb no more (0.19)", '"type": "Lamb"'),
    "ZeroOneAdam": ("DeepSpeed has ZeroOneAdam no more (0.19)", '"type": "Adam"'),
    "MuAdam": (f"MuAdam {BASE_SHAPES} Adam", '"type": "Adam"'),
    "MuAdamW": (f"MuAdamW {BASE_SHAPES} AdamW", '"type": "AdamW"'),
    "MuSGD": (f"MuSGD {BASE_SHAPES} SGD", "leave optimizer out of the JSON, and --optimizer=sgd"),
}
"""What becomes of each name: an `--optimizer`, or why there is none and what to write."""


def test_every_name_has_a_fate():
    assert FATES.keys() == set(NAMES)


@pytest.mark.parametrize("name", FATES)
@pytest.mark.parametrize("case", [str, str.lower])
def test_a_name_is_an_optimizer_of_smaltis_or_refused_with_the_nearest(name, case):
    document, fate = {"zero_optimization": {"stage": 3}, "optimizer": {"type": case(name)}}, FATES[name]
    if isinstance(fate, str):
        assert configure(document).value("optimizer") == fate
        return
    with pytest.raises(ConfigError) as raised:
        configure(document)
    (problem,) = raised.value.problems
    assert (problem.message, problem.fix) == fate


@pytest.mark.parametrize("name", [name for name, fate in FATES.items() if not isinstance(fate, str)])
def test_a_refused_name_as_an_option_is_refused_with_an_option_that_is_there(name):
    config = configure(ZERO2, f"--optimizer=deepspeed_{name.lower()}")
    ((message, fix),) = [(each.message, each.fix) for each in problems(config)]
    assert message == FATES[name][0]
    assert find_optimizer(fix.removeprefix("--optimizer="), load_plugins().gather(HookSpecs.register_optimizers))


def test_muon_in_the_json_is_told_to_be_smaltis():
    config = configure({"zero_optimization": {"stage": 3}, "optimizer": {"type": "Muon"}})
    assert [notice for notice in config.notices if "is --optimizer=muon" in notice]
    for key in ("muon_lr", "adam_lr", "per_head_muon"):
        document = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "Muon", "params": {key: 1.0}}}
        assert [told.partition(":")[0] for told in refusals(document)] == [f"optimizer.params.{key} in deepspeed_config"]
    assert refusals({**ZERO2, "optimizer": {"type": "Muon"}}) == [
        "optimizer.type in deepspeed_config: DeepSpeed (0.19) has Muon's momentum in no checkpoint below stage 3 of ZeRO"
    ]


def test_an_optimizer_without_a_form_for_processors_is_not_offloaded():
    document = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "optimizer": {"type": "Lamb"}}
    assert refusals(document) == ["optimizer.type in deepspeed_config: Lamb cannot be offloaded: it has no form for processors"]


@pytest.mark.parametrize("key", ["optimizer", "scheduler"])
def test_settings_without_a_type_are_refused(key):
    assert refusals({**ZERO2, key: {"params": {"lr": 1.0}}}) == [f"{key} in deepspeed_config: has no type"]


def test_an_optimizer_of_deepspeeds_alone_is_an_optimizer_of_smaltis():
    config = configure({**ZERO2, "optimizer": {"type": "lamb", "params": {"lr": 1.0, "max_coeff": 9}}})
    assert config.value("optimizer") == "deepspeed_lamb"
    told = resolved(config, world_size=1)["optimizer"]
    assert told["type"] == "Lamb"
    assert (told["params"]["lr"], told["params"]["max_coeff"]) == (1.0, 9)


# --- keys and values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({}, "zero_optimization in deepspeed_config: has no stage"),
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage in deepspeed_config: cannot be 0"),
        ({"zero_optimization": 2}, "zero_optimization in deepspeed_config: is 2, not a table of settings"),
        ({**ZERO2, "fp16": {"enabled": True}}, "fp16.enabled in deepspeed_config: smalti does not train in fp16"),
        ({**ZERO2, "amp": {}}, "amp in deepspeed_config: DeepSpeed has this no more"),
        ({**ZERO2, "stage3_max_live_parameters": 1}, "stage3_max_live_parameters in deepspeed_config: unknown key"),
        (
            {"zero_optimization": {"stage": 2, "overlap_com": True}},
            "zero_optimization.overlap_com in deepspeed_config: unknown key",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}},
            "zero_optimization.offload_optimizer.device in deepspeed_config: cannot be 'gpu'",
        ),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": -1}},
            "zero_optimization.reduce_bucket_size in deepspeed_config: cannot be -1",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.offload_optimizer.device in deepspeed_config: DeepSpeed offloads to nvme in stage 3 only",
        ),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "zero_optimization.zero_hpz_partition_size in"),
        ({**ZERO2, "tensor_parallel": {"autotp_size": 2}}, "tensor_parallel in deepspeed_config: cannot be used"),
        ({**ZERO2, "sequence_parallel_size": 2}, "sequence_parallel_size in deepspeed_config: cannot be used"),
        (
            {"zero_optimization": {"stage": 2, "allgather_bucket_size": 7}},
            "zero_optimization.allgather_bucket_size in deepspeed_config: cannot be 7",
        ),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": 0}},
            "zero_optimization.reduce_bucket_size in deepspeed_config: cannot be 0",
        ),
        (
            {"zero_optimization": {"stage": 2, "compute_grad_norm": False}},
            "zero_optimization.compute_grad_norm in deepspeed_config: cannot be used",
        ),
        (
            {"zero_optimization": {"stage": 3, "max_live_parameters": 5, "stage3_max_live_parameters": 6}},
            "zero_optimization.max_live_parameters in deepspeed_config: is 5, and stage3_max_live_parameters, which is",
        ),
        (
            {"zero_optimization": {"stage": 3, "module_granularity_threshold": 9}},
            "zero_optimization.module_granularity_threshold in deepspeed_config: cannot be used",
        ),
        ({**ZERO2, "prescale_gradients": True}, "prescale_gradients in deepspeed_config: cannot be used"),
        (
            {**ZERO2, "managed_gradient_accumulation": False},
            "managed_gradient_accumulation in deepspeed_config: cannot be used",
        ),
        ({**ZERO2, "log_level": "loud"}, "log_level in deepspeed_config: cannot be 'loud'"),
        ({**ZERO2, "steps_per_print": "often"}, "steps_per_print in deepspeed_config: cannot be 'often'"),
        ({**ZERO2, "communication_data_type": "fp8"}, "communication_data_type in deepspeed_config: cannot be 'fp8'"),
        ({**ZERO2, "data_types": 5}, "data_types in deepspeed_config: cannot be 5"),
        ({**ZERO2, "train_batch_size": "8"}, "train_batch_size in deepspeed_config: cannot be '8'"),
        ({**ZERO2, "bf16": {"enabled": "true"}}, "bf16.enabled in deepspeed_config: cannot be 'true'"),
        (
            {**ZERO2, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            "bf16.bf16_master_weights_and_grads in deepspeed_config: cannot be used",
        ),
        ({**ZERO2, "bf16": {"enable": True}}, "bf16.enable in deepspeed_config: unknown key"),
        ({**ZERO2, "optimizer": {"type": "Adam", "params": [1]}}, "optimizer.params in deepspeed_config: cannot be [1]"),
        (
            {**ZERO2, "optimizer": {"type": "Adam", "params": {"learning_rate": 1}}},
            "optimizer.params.learning_rate in deepspeed_config: unknown key",
        ),
        (
            {**ZERO2, "scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 5}}},
            "scheduler.params.warmup_steps in deepspeed_config: unknown key",
        ),
        ({**ZERO2, "optimizer": {"type": "Adam", "lr": 0.1}}, "optimizer.lr in deepspeed_config: unknown key"),
        ({**ZERO2, "scheduler": {"type": "WarmupLR", "param": {}}}, "scheduler.param in deepspeed_config: unknown key"),
        ({**ZERO2, "data_types": {"grad_acum_dtype": "fp32"}}, "data_types.grad_acum_dtype in deepspeed_config: unknown key"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(document, told):
    assert [each for each in refusals(document) if each.startswith(told)]


def test_comments_are_left_out_at_any_depth():
    commented = {"_comment": "x", "//": "y", "zero_optimization": {"stage": 2, "__note": 1}, "comment": "z"}
    config = configure({**ZERO2, **commented})
    document = resolved(config, world_size=1)
    assert not {"_comment", "//", "comment", "__note"} & (document.keys() | document["zero_optimization"].keys())
    assert not any("comment" in notice for notice in config.notices)


def test_a_refused_optimizer_is_the_only_problem_whatever_its_settings():
    onebit = {"type": "OneBitAdam", "params": {"freeze_step": 400, "cuda_aware": False, "comm_backend_name": "nccl"}}
    assert len(refusals({**ZERO2, "optimizer": onebit})) == 1


def test_a_misspelt_key_is_told_with_the_nearest_one():
    with pytest.raises(ConfigError, match="did you mean gradient_clipping"):
        configure({**ZERO2, "gradient_cliping": 1.0})


@pytest.mark.parametrize(
    ("document", "word"),
    [
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "in stage 2"),
        ({**ZERO2, "zero3_save_16bit_model": True}, "zero3_save_16bit_model"),
        ({**ZERO2, "activation_checkpointing": {}}, "--gradient_checkpointing"),
        ({**ZERO2, "tensorboard": {"enabled": True}}, "--report_to"),
        ({**ZERO2, "gradient_allreduce_op": "sum"}, "averaged"),
        ({"zero_optimization": {"stage": 2, "round_robin_gradients": True}}, "it is switched off"),
        ({**ZERO2, "cuda_visible_devices": "0,1"}, "DeepSpeed has no such setting"),
        ({**ZERO2, "scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": 9}}}, "last_batch_iteration"),
    ],
)
def test_what_has_no_effect_is_told_and_left_out(document, word):
    config = configure(document)
    assert [notice for notice in config.notices if "has no effect" in notice and word in notice]
    gone = {
        "zero3_save_16bit_model",
        "activation_checkpointing",
        "tensorboard",
        "gradient_allreduce_op",
        "cuda_visible_devices",
    }
    assert not resolved(config, world_size=1)["zero_optimization"].get("round_robin_gradients")
    assert not gone & resolved(config, world_size=1).keys()
    assert "offload_param" not in resolved(config, world_size=1)["zero_optimization"]


# --- sizes ----------------------------------------------------------------------------------------------------------


@given(
    stage=st.sampled_from((1, 2, 3)),
    parameters=st.integers(1, 10**11),
    share=st.floats(0, 1),
    ranks=st.integers(1, 64),
)
def test_sizes_fit_the_model(stage, parameters, share, ranks):
    largest = max(1, int(parameters * share))
    zero = {"stage": stage, "offload_param": {"device": "nvme", "nvme_path": "/x"}}
    told = sized({"zero_optimization": zero}, parameters, largest, world_size=ranks)["zero_optimization"]
    bucket = told["reduce_bucket_size"]
    assert bucket <= parameters
    assert bucket >= min(parameters, largest)
    buffer = told["offload_param"]["buffer_size"]
    assert largest <= buffer * ranks
    assert buffer % 1024 == 0


def test_a_size_that_is_given_stays_and_no_auto_is_left():
    zero = {"stage": 3, "reduce_bucket_size": 7, "stage3_prefetch_bucket_size": "auto", "stage3_max_live_parameters": "auto"}
    told = sized({"zero_optimization": zero, "log_level": "auto"}, 10**6, 10**5)
    assert told == {
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 7,
            "stage3_prefetch_bucket_size": 10**6,
            "stage3_param_persistence_threshold": 10**5,
        }
    }


# --- together with FSDP ---------------------------------------------------------------------------------------------


def test_fsdp_and_deepspeed_cannot_be_enabled_simultaneously():
    with pytest.raises(UserError, match=r"^FSDP and DeepSpeed cannot be enabled simultaneously\."):
        choose_distributed(configure(ZERO2, "--fsdp_enable"), PLUGINS)
