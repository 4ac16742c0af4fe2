"""A second, frozen adapter that is active while a distilled model trains and off while it samples.

Plain training on a model that was distilled to few steps undoes the distillation. An assistant adapter undoes it beforehand:
the trained adapter learns the subject alone, and works on the distilled model without the assistant. It stays a separate
adapter rather than being merged and subtracted again, because sums of bf16 weights are rounded.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path

from torch import nn

from smalti import UserError
from smalti_diffusers.lora.reading import AdapterFile
from smalti_diffusers.options import TITLES

ASSISTANT = "assistant"
"""Its name among the adapters of a layer."""
KNOWN = {
    "flux": "ostris/FLUX.1-schnell-training-adapter/pytorch_lora_weights.safetensors",
    "z_image": "ostris/zimage_turbo_training_adapter/zimage_turbo_training_adapter_v2.safetensors",
}
"""Published assistants by family, on the Hugging Face Hub."""
_DISTILLED = re.compile(r"(?<!de)(?<!de[-_])(turbo|schnell|lightning|hyper|lcm|hidream-i1-(dev|fast))", re.IGNORECASE)


def attach_assistant(model: nn.Module, file: AdapterFile) -> None:
    """Add the adapter beside those that are there, on the meta device; its weights are those of the file.

    Raises UserError for another kind of adapter.
    """
    from peft import LoraConfig, inject_adapter_in_model

    if file.header.kind != "lora":
        raise UserError(
            f"{file.header.path} is a {TITLES[file.header.kind]}, and an assistant is a LoRA",
            fix="make one with `smalti adapter resize`, or leave --assistant_lora out",
        )
    ranks = file.ranks
    patterns = {f"^{re.escape(layer)}$": rank for layer, rank in ranks.items()}
    config = LoraConfig(
        r=max(ranks.values()),
        lora_alpha=max(ranks.values()),
        rank_pattern=patterns,
        alpha_pattern=dict(patterns),
        target_modules="|".join(map(re.escape, ranks)),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # two adapters are what is wanted
        inject_adapter_in_model(config, model, adapter_name=ASSISTANT, low_cpu_mem_usage=True)


def activate(model: nn.Module, names: list[str]) -> None:
    """Make all these adapters take part in the forward pass. peft also makes them trainable."""
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.set_adapter(names)


def locate(name: str) -> Path:
    """A file or folder as it is; `user/repository` or `user/repository/file` by way of the hub's cache.

    Raises UserError if it is neither, or if the repository has several files to choose from.
    """
    path = Path(name).expanduser()
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") < 1:
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    user, repository, *rest = name.split("/")
    file = "/".join(rest)
    try:
        folder = Path(snapshot_download(f"{user}/{repository}", allow_patterns=[file or "*.safetensors"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{name} is not a local file, and the download from the Hugging Face Hub failed: {reason}",
            fix="check the name and the network, or name a local .safetensors file",
        ) from error
    found = [each for each in folder.rglob("*.safetensors") if not file or each == folder / file]
    if len(found) != 1:
        held = ", ".join(sorted(each.name for each in found)) or f"no file {file or '*.safetensors'}"
        raise UserError(f"{user}/{repository} holds {held}", fix=f"--assistant_lora={user}/{repository}/FILE.safetensors")
    return found[0]


def is_distilled(name: str) -> bool:
    """Whether the name of a model says that it was distilled to few steps; "de-turbo" and the like are not."""
    return _DISTILLED.search(Path(name).name) is not None


def notice(family: str) -> str:
    """What to tell somebody who trains a distilled model without an assistant."""
    advice = f"--assistant_lora={KNOWN[family]} keeps it" if family in KNOWN else "--assistant_lora=FILE keeps it"
    return f"this model is distilled to few steps, and training undoes that with time; {advice}, or train its base model"
