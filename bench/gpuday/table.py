"""The table of all checks, the most valuable first. `python -m gpuday --list` prints it."""

from __future__ import annotations

from gpuday.checks import Bound, Check, Work

FP32 = ("--mixed_precision=no", "--no_allow_tf32")
BF16 = ("--mixed_precision=bf16",)
LORA = ("--model_type=lora", "--lora_rank=16")
RECOMPUTED = ("--gradient_checkpointing",)
RELEASED = ("--release_gradients", "--max_grad_norm=0")
COMPILED = ("--dynamo_backend=inductor",)
SHARDED = ("--fsdp_enable",)
MATH = ("--sdpa_backend=math",)


def zero(stage: int, more: str = "") -> str:
    return '--deepspeed_config={"zero_optimization": {"stage": %d%s}}' % (stage, more)  # noqa: UP031 - of braces


ZERO2_OFFLOAD = zero(2, ', "offload_optimizer": {"device": "cpu"}')
SAME = (Bound(figure="loss_difference", most=1e-3), Bound(figure="gradient_difference", most=1e-2))
"""Against the same steps on the CPU, or in another way, in fp32."""
ROUNDED = (Bound(figure="loss_difference", most=5e-3),)
"""In bf16, or in TF32."""
EXACT_PLAN = Bound(figure="peak_of_plan", least=0.9, most=1.05)
"""A rehearsal is taken as 2 % too high to 5 % too low; less than 0.9 would be a plan that refuses what fits."""


def _as_on_cpu(name: str, model: str, *words: str, package: str = "") -> Check:
    more = f" with {' '.join(words)}" if words else ""
    work = Work(model=model, words=(*FP32, *MATH, *words))
    return Check(
        name=name,
        what=f"loss and gradients of a tiny {model}{more}, against the CPU",
        minutes=0.5,
        package=package,
        work=work,
        reference=Work(model=model, words=work.words, on_cpu=True),
        bounds=SAME,
    )


def _as_plain(name: str, what: str, *words: str, gpus: int = 1) -> Check:
    """The toy model in fp32 in another way, against one process of its kind."""
    base = (*FP32, *MATH)
    return Check(
        name=name,
        what=f"{what}: losses as in one process",
        minutes=0.5,
        gpus=gpus,
        work=Work(words=(*base, *words), ranks=gpus),
        reference=Work(words=base),
        bounds=SAME,
    )


def _published(
    name: str,
    what: str,
    work: Work,
    *bounds: Bound,
    minutes: float = 1.5,
    memory: float = 0,
    reference: Work | None = None,
    plan: bool = True,
    bare: bool = False,
    **marks: str,
) -> Check:
    return Check(
        name=name,
        what=what,
        minutes=minutes,
        memory=memory,
        work=work,
        reference=reference,
        plan=plan,
        bare=bare,
        bounds=(*((EXACT_PLAN,) if plan else ()), *bounds),
        marks=marks or None,
        package="deepspeed" if any("deepspeed" in word for word in work.words) else "",
    )


def _sdxl(*words: str, batch: int = 1, edge: int = 1024) -> Work:
    return Work(model="sdxl", words=(*BF16, *words), edge=edge, batch=batch, published=True)


def _flux(*words: str, batch: int = 1, edge: int = 1024, ranks: int = 1, nodes: int = 0) -> Work:
    return Work(model="flux", words=(*BF16, *words), edge=edge, batch=batch, published=True, ranks=ranks, nodes=nodes)


def _attention(kernel: str) -> Check:
    return Check(
        name=f"attention-{kernel}",
        what=f"attention by {kernel}, in bf16: losses as by math",
        minutes=0.5,
        work=Work(model="flux", words=(*BF16, f"--sdpa_backend={kernel}")),
        reference=Work(model="flux", words=(*BF16, *MATH)),
        bounds=ROUNDED,
    )


def _zero(stage: int) -> Check:
    base = (*FP32, *MATH)
    return Check(
        name=f"zero{stage}",
        what=f"ZeRO {stage} in one process: losses as without, but for the rounding of DeepSpeed's AdamW",
        minutes=1,
        package="deepspeed",
        work=Work(words=(*base, zero(stage))),
        reference=Work(words=base),
        bounds=ROUNDED,
    )


_FLUX_LORA = (*LORA, *RECOMPUTED)
_COMPILES = (
    Bound(figure="breaks", most=0),
    Bound(figure="graphs", least=1, most=16),
    Bound(figure="seconds_ratio", most=1, unit="times"),
)
_FAMILIES = ("sdxl", "flux", "sd3", "qwen_image")

ONE_GPU = (
    Check(
        name="health",
        what="NVML of a real driver: `smalti health` reads every GPU that torch sees, and none would stop a run",
        minutes=0.3,
        measure="health",
        bounds=(Bound(figure="unread", most=0), Bound(figure="stopping", most=0)),
    ),
    *(_as_on_cpu(f"correct-{family.replace('_', '-')}", family) for family in _FAMILIES),
    _as_on_cpu("correct-lora", "flux", *LORA),
    _as_on_cpu("correct-int8", "flux", *LORA, "--base_model_precision=int8-torchao", package="torchao"),
    _as_on_cpu("correct-nf4", "flux", *LORA, "--base_model_precision=nf4-torchao", package="torchao"),
    _published(
        "sdxl-lora",
        "SDXL LoRA at 1024 px: memory against the plan",
        _sdxl(*LORA),
        memory=16,
        memory_sdxl_lora="peak_gib",
    ),
    Check(
        name="resume",
        what="`kill -9`, then the same command: losses equal those of a run that nobody killed, bit by bit",
        minutes=1.5,
        measure="resume",
        bounds=(
            Bound(figure="loss_difference", most=0),
            Bound(figure="resumed_from", least=1),
            Bound(figure="last_step", least=100),
        ),
    ),
    Check(
        name="saves",
        what="saves from pinned memory beside the steps: all checkpoints verify, and no step waits for one",
        minutes=1.5,
        measure="saves",
        bounds=(
            Bound(figure="unverified", most=0),
            Bound(figure="checkpoints", least=4),
            Bound(figure="blocked_seconds", most=0.5, unit="s"),
        ),
    ),
    _published(
        "sdxl-b8",
        "SDXL in full at batch 8, recomputed: a step, utilisation, memory against the plan",
        _sdxl(*RECOMPUTED, batch=8),
        Bound(figure="seconds", most=0.33, unit="s", device="H100"),
        Bound(figure="mfu", least=0.5, unit="share", device="H100"),
        memory=48,
        step_sdxl_b8="seconds",
        memory_sdxl_b8="peak_gib",
    ),
    _published(
        "sdxl-released",
        "SDXL in full at batch 1, recomputed, gradients released: memory against the plan",
        _sdxl(*RECOMPUTED, *RELEASED),
        Bound(figure="seconds_ratio", most=1.3, unit="times"),
        memory=44,
        minutes=2.5,
        reference=_sdxl(*RECOMPUTED),
    ),
    _published(
        "sdxl-released-bf16",
        "the same with weights in bf16 and Adafactor",
        _sdxl(*RECOMPUTED, *RELEASED, "--weights_dtype=bf16", "--optimizer=adafactor"),
        memory=8,
    ),
    _published(
        "bare-sdxl",
        "SDXL in full at batch 1: a step against the loop of diffusers' example on the same device",
        _sdxl(),
        Bound(figure="bare_ratio", most=1.05, unit="times"),
        memory=48,
        minutes=2.5,
        plan=False,
        bare=True,
        ratio_bare_sdxl="bare_ratio",
    ),
    _published(
        "flux-lora",
        "Flux LoRA at 1024 px, recomputed: a step, utilisation, memory against the plan",
        _flux(*_FLUX_LORA),
        Bound(figure="mfu", least=0.45, unit="share", device="H100"),
        memory=30,
        minutes=2,
        step_flux_lora="seconds",
        memory_flux_lora="peak_gib",
    ),
    _published(
        "compile-sdxl",
        "SDXL in full at batch 1, compiled by block: graphs, breaks, and steps against eager ones",
        _sdxl(*COMPILED),
        *_COMPILES,
        memory=48,
        minutes=4,
        plan=False,
        reference=_sdxl(),
    ),
    _published(
        "compile-flux-lora",
        "Flux LoRA at 1024 px, recomputed, compiled by block",
        _flux(*_FLUX_LORA, *COMPILED),
        *_COMPILES,
        memory=30,
        minutes=4,
        plan=False,
        reference=_flux(*_FLUX_LORA),
    ),
    _published(
        "lion-512",
        "SDXL in full at 512 px with Lion, compiled: two steps a second",
        _sdxl("--optimizer=lion", *COMPILED, edge=512),
        Bound(figure="seconds", most=0.5, unit="s", device="H100"),
        memory=40,
        minutes=3,
        plan=False,
        step_sdxl_lion_512="seconds",
    ),
    _published(
        "zero2-offload",
        "SDXL in full at batch 8 under ZeRO 2 with offload: no more memory than SimpleTuner publishes",
        _sdxl(*RECOMPUTED, ZERO2_OFFLOAD, batch=8),
        Bound(figure="peak_mib", most=13102, unit="MiB"),
        memory=14,
        plan=False,
        minutes=3,
        memory_sdxl_zero2_offload="peak_gib",
    ),
    _published(
        "zero2-offload-128",
        "the same at 128 px",
        _sdxl(*RECOMPUTED, ZERO2_OFFLOAD, batch=8, edge=128),
        Bound(figure="peak_mib", most=9237, unit="MiB"),
        memory=10,
        plan=False,
        minutes=3,
        memory_sdxl_zero2_offload_128="peak_gib",
    ),
    _published(
        "offload-sdxl-lora",
        "SDXL LoRA with all weights in host memory, one rank of FSDP2: memory against the plan",
        _sdxl(*LORA, *SHARDED, "--fsdp_cpu_offload"),
        Bound(figure="seconds_ratio", most=4, unit="times"),
        memory=16,
        minutes=2.5,
        reference=_sdxl(*LORA),
        memory_sdxl_lora_offload="peak_gib",
    ),
    _as_plain("sharded-one", "FSDP2 over one rank", *SHARDED),
    _as_plain("offload", "parameters in host memory", *SHARDED, "--fsdp_cpu_offload"),
    _as_plain("ema-cpu", "EMA in host memory, beside shards", *SHARDED, "--use_ema", "--ema_device=cpu"),
    _as_plain("recomputed", "activations recomputed", *SHARDED, "--fsdp_activation_checkpointing"),
    _as_plain("compiled", "compiled by block", *COMPILED),
    *(_attention(kernel) for kernel in ("flash", "efficient", "cudnn")),
    *(_zero(stage) for stage in (2, 3)),
    _published(
        "tf32",
        "SDXL in full in fp32 with TF32, against without",
        _sdxl("--mixed_precision=no"),
        *ROUNDED,
        Bound(figure="seconds_ratio", most=0.7, unit="times"),
        memory=60,
        minutes=3,
        plan=False,
        reference=_sdxl("--mixed_precision=no", "--no_allow_tf32"),
    ),
    _published(
        "channels-last",
        "SDXL in full with channels last, against without",
        _sdxl("--channels_last"),
        *ROUNDED,
        Bound(figure="seconds_ratio", most=1.02, unit="times"),
        memory=48,
        minutes=2.5,
        plan=False,
        reference=_sdxl("--no_channels_last"),
    ),
)
"""On one device."""

SEVERAL_GPUS = (
    Check(
        name="nccl",
        what="collective operations of all GPUs of the node: exact sums, bytes per second",
        minutes=0.5,
        measure="collectives",
        gpus=2,
        bounds=(Bound(figure="wrong", most=0), Bound(figure="all_reduce", least=1, unit="GB/s")),
    ),
    _as_plain("ddp-two", "two ranks of DDP with the same samples", gpus=2),
    _as_plain("sharded-two", "two ranks of FSDP2 with the same samples", *SHARDED, gpus=2),
    _as_plain("clip-offload-two", "the same with clipping of gradients in host memory", *SHARDED, "--fsdp_cpu_offload", gpus=2),
    *(
        Check(
            name=f"context-{name}",
            what=f"tokens of each image over two ranks ({name}): losses as in one process",
            minutes=0.7,
            gpus=2,
            only_cuda=True,
            work=Work(
                model="flux",
                words=(*FP32, "--context_parallel_size=2", f"--context_parallel_comm_strategy={name}"),
                ranks=2,
            ),
            reference=Work(model="flux", words=FP32),
            bounds=SAME,
        )
        for name in ("allgather", "alltoall")
    ),
    _as_plain("hsdp-four", "HSDP, two replicas of two shards", *SHARDED, "--fsdp_shard_size=2", gpus=4),
    Check(
        name="lost-rank",
        what="`kill -9` of one of two ranks: the other one names it, saves and ends",
        minutes=1,
        measure="lost_rank",
        gpus=2,
        bounds=(
            Bound(figure="ended_seconds", most=60),
            Bound(figure="lost_steps", most=1),
            Bound(figure="named", least=1),
        ),
    ),
)
"""On one node with two or more."""


def _on_nodes(*words: str, nodes: int, ranks: int, batch: int = 1) -> Work:
    return Work(words=(*FP32, *MATH, *words), nodes=nodes, ranks=ranks, batch=batch)


def _hsdp(gpus: int) -> tuple[str, ...]:
    """One replica per node."""
    return (*SHARDED, f"--fsdp_shard_size={gpus}")


def _steps_on_nodes(gpus: int) -> tuple[Check, ...]:
    two, full = 2 * gpus, (*_hsdp(gpus), "--fsdp_activation_checkpointing")
    return (
        Check(
            name="nodes-hsdp",
            what="HSDP with one replica per node, the same samples on all ranks: losses as of one rank",
            minutes=2,
            gpus=gpus,
            nodes=2,
            work=_on_nodes(*_hsdp(gpus), nodes=2, ranks=two),
            reference=_on_nodes(nodes=1, ranks=1),
            bounds=SAME,
        ),
        Check(
            name="nodes-memory",
            what="Flux in full under HSDP, recomputed, batch 1: memory of a rank against the plan",
            minutes=8,
            gpus=gpus,
            nodes=2,
            memory=40,
            work=_flux(*full, ranks=two, nodes=2),
            plan=True,
            bounds=(EXACT_PLAN,),
            marks={"memory_flux_hsdp": "peak_gib"},
        ),
        Check(
            name="nodes-scaling",
            what="the same at batch 4, two nodes against one: a step may take so much longer",
            minutes=10,
            gpus=gpus,
            nodes=2,
            memory=70,
            work=_flux(*full, ranks=two, nodes=2, batch=4),
            reference=_flux(*full, ranks=gpus, nodes=1, batch=4),
            bounds=(Bound(figure="seconds_ratio", most=1.1, unit="times"),),
            marks={"scaling_two_nodes": "seconds_ratio"},
        ),
    )


def cluster(gpus: int) -> tuple[Check, ...]:
    """On two nodes with this number of GPUs each; some need four nodes."""
    return (
        Check(
            name="nodes-nccl",
            what="collective operations over all ranks: exact sums, bytes per second",
            minutes=2,
            measure="collectives",
            gpus=gpus,
            nodes=2,
            work=Work(nodes=2, ranks=2 * gpus),
            bounds=(Bound(figure="wrong", most=0), Bound(figure="all_reduce", least=10, unit="GB/s")),
            marks={"nccl_two_nodes": "all_reduce"},
        ),
        *_steps_on_nodes(gpus),
        Check(
            name="nodes-save",
            what="a checkpoint of all ranks on shared storage: it verifies, bytes per second",
            minutes=4,
            measure="nodes_save",
            gpus=gpus,
            nodes=2,
            bounds=(Bound(figure="unverified", most=0), Bound(figure="gb_per_second", least=1, unit="GB/s")),
            marks={"save_two_nodes": "gb_per_second"},
        ),
        Check(
            name="nodes-elastic",
            what="one of two nodes is killed: the run continues on the other from its last checkpoint",
            minutes=6,
            measure="nodes_elastic",
            gpus=gpus,
            nodes=2,
            bounds=(
                Bound(figure="lost_steps", most=5),
                Bound(figure="steps_after", least=3),
                Bound(figure="ended", most=7, least=7),
            ),
        ),
        Check(
            name="nodes-flux-32",
            what="Flux in full on 32 H100 at batch 8 of each rank: 15 s a step",
            minutes=12,
            gpus=gpus,
            nodes=-(-32 // gpus),
            memory=70,
            work=_flux(*_hsdp(gpus), "--fsdp_activation_checkpointing", ranks=32, nodes=-(-32 // gpus), batch=8),
            bounds=(Bound(figure="seconds", most=15, unit="s", device="H100"),),
            marks={"step_flux_32": "seconds"},
        ),
    )


GPU_DAY = (*ONE_GPU, *SEVERAL_GPUS)


def named(name: str, per_node: int = 0) -> Check:
    """The check of this name. Raises KeyError."""
    return {check.name: check for check in (*GPU_DAY, *cluster(per_node or 8))}[name]
