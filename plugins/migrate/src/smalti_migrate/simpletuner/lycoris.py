"""`lora_type` and `lycoris_config`: the LyCORIS adapters of SimpleTuner, which has them in a file of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from smalti.system import load_json, read_regular
from smalti_migrate.simpletuner.rules import Convert, is_empty, is_on, plain

_ALGORITHMS = {"lokr": "lokr", "loha": "loha", "lora": "lora", "locon": "lora", "tlora": "lora"}
_WITHOUT_EFFECT = {"bypass_mode"}
"""Another way to compute the same."""
_OFF = {"dropout", "rank_dropout", "module_dropout", "use_tucker", "use_cp", "use_scalar", "decompose_both", "dora_wd"}
_OFF |= {"weight_decompose", "train_norm", "rescaled", "constraint", "rank_dropout_scale"}
_READ = {"algo", "multiplier", "linear_dim", "linear_alpha", "factor", "full_matrix", "apply_preset", "rs_lora"}
_READ |= {"tlora_min_rank", "tlora_alpha"}
_PRESET = {"target_module", "target_name", "exclude_name", "module_algo_map", "name_algo_map"}
_LACKING = {"sana": {"FeedForward"}}
"""Classes that SimpleTuner's files name for a family that has no such modules; LyCORIS passes over them."""


def adapter_kind(value: object, values: Mapping[str, object]) -> Mapping[str, object]:
    """`lora_type`: what `lycoris_config` says. Raises ValueError for what is not supported."""
    if plain(value) == "lycoris":
        return _lycoris(values)
    return {"lora_kind": value}


def unless_lycoris(option: str) -> Convert:
    """A conversion of an option of plain LoRAs, which SimpleTuner does not read beside `lycoris_config`."""

    def convert(value: object, values: Mapping[str, object]) -> Mapping[str, object]:
        return {} if plain(values.get("lora_type")) == "lycoris" else {option: value}

    return convert


def _lycoris(values: Mapping[str, object]) -> dict[str, object]:
    content = _content(values.get("lycoris_config"))
    known = _READ | _OFF | _WITHOUT_EFFECT
    if unknown := sorted(content.keys() - known):
        raise ValueError(f"{', '.join(unknown)} in lycoris_config: no such setting here")
    if on := sorted(name for name in _OFF & content.keys() if is_on(content[name])):
        raise ValueError(f"{', '.join(on)} in lycoris_config is not supported")
    if plain(content.get("multiplier", 1)) != 1:
        raise ValueError("multiplier in lycoris_config: an adapter is trained at the strength 1 here")
    algorithm = str(content.get("algo", "lokr")).lower()
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"algo = {algorithm} in lycoris_config is not supported; lokr, loha, lora and tlora are")
    found: dict[str, object] = {"lora_kind": _ALGORITHMS[algorithm], "lora_dropout": 0.0}
    if is_on(content.get("rs_lora", False)):
        found["use_rslora"] = True
    if algorithm == "tlora":
        found |= {"tlora_min_rank": content.get("tlora_min_rank", 1), "tlora_alpha": content.get("tlora_alpha", 1.0)}
    full = algorithm == "lokr" and is_on(content.get("full_matrix", False))
    if full:
        found["lokr_full"] = True
    else:
        found |= {"lora_rank": content.get("linear_dim", 16), "lora_alpha": content.get("linear_alpha", 1)}
    if algorithm == "lokr":
        found["lokr_factor"] = content.get("factor", -1)
    family = str(plain(values.get("model_family"))).replace("-", "_")
    return found | _preset(content.get("apply_preset", {}), algorithm, _LACKING.get(family, set()))


def _content(given: object) -> Mapping[str, object]:
    """The settings: a table, or the JSON file with one."""
    if is_empty(given):
        raise ValueError("lycoris_config, the file with its settings, is missing")
    content = given
    if not isinstance(given, Mapping):
        path = Path(str(given)).expanduser()
        try:
            content = load_json(read_regular(path))
        except (OSError, ValueError) as error:
            raise ValueError(f"lycoris_config cannot be read: {path}: {error}") from error
    if not isinstance(content, Mapping):
        raise ValueError("lycoris_config is not a table of settings")
    return cast(Mapping[str, object], content)


def _preset(preset: object, algorithm: str, lacking: set[str]) -> dict[str, object]:
    """`apply_preset`: which layers are adapted, by the classes of modules and by names."""
    if not isinstance(preset, Mapping):
        raise ValueError("apply_preset in lycoris_config is not a table")
    if unknown := sorted(preset.keys() - _PRESET):
        raise ValueError(f"{', '.join(unknown)} in apply_preset of lycoris_config: no such setting here")
    targets = [each for each in (*preset.get("target_module", ()), *preset.get("target_name", ())) if each not in lacking]
    own = {**preset.get("module_algo_map", {}), **preset.get("name_algo_map", {})}
    patterns: dict[str, list[str]] = {}
    names = {"factor": "lokr_factor_pattern", "linear_dim": "lora_rank_pattern", "linear_alpha": "lora_alpha_pattern"}
    for name, settings in own.items():
        if name not in targets:
            continue
        if plain(settings.get("algo", algorithm)) != algorithm:
            raise ValueError(f"{name} in lycoris_config has another algo; a run trains one kind of adapter")
        for key, value in settings.items():
            if key in names:
                patterns.setdefault(names[key], []).append(f"{_expression(name)}={value}")
    found: dict[str, object] = dict(patterns)
    if targets:
        found["lora_targets"] = [_expression(each) for each in targets]
    if excluded := preset.get("exclude_name", ()):
        found["lora_exclude"] = [_expression(each) for each in excluded]
    return found


def _expression(name: str) -> str:
    """A name with `*` for any text as a regular expression."""
    return str(name).replace(".", r"\.").replace("*", ".*") if "*" in str(name) else str(name)
