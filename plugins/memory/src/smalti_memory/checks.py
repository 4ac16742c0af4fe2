"""Checks of a run with a streamed base, before the launch. Imports no torch."""

from __future__ import annotations

from smalti import Config, Problem
from smalti.config import LaunchOptions, ModelOptions, cuda_graph_problem
from smalti_memory.options import ActivationOptions, MemoryOptions, under_fsdp


def problems(config: Config) -> list[Problem]:
    """All complaints at once."""
    options, model = config[MemoryOptions], config[ModelOptions]
    if not options.stream_base:
        return []
    where, found = config.source("stream_base"), []
    if model.model_type != "lora":
        message = "stream_base needs weights that do not train, and model_type=full trains all of them"
        found.append(Problem(message=message, where=where, fix="--model_type=lora, or --no_stream_base"))
    if not model.gradient_checkpointing and not under_fsdp(config):  # which gathers the weights of a block again
        message = "stream_base needs gradient_checkpointing: the backward pass uses the weights of every block again"
        found.append(Problem(message=message, where=where, fix="--gradient_checkpointing, or --no_stream_base"))
    graphs = cuda_graph_problem(config[LaunchOptions], "with stream_base: weights move between places in memory")
    return found if graphs is None else [*found, graphs]


def activation_problems(config: Config) -> list[Problem]:
    """Of a run that keeps activations in host memory."""
    if config[ActivationOptions].offload_activations and not (
        config[ModelOptions].gradient_checkpointing or config.values().get("fsdp_activation_checkpointing")
    ):
        message = "offload_activations needs recomputation: without it, blocks keep far more than their inputs"
        fix = "--gradient_checkpointing, or --no_offload_activations"
        return [Problem(message=message, where=config.source("offload_activations"), fix=fix)]
    return []
