"""Which layers the networks of kohya's sd-scripts adapt, as targets of an adapter here, and what chooses among them.

Facts of networks/lora.py, lora_flux.py, lora_sd3.py, lora_lumina.py and lora_anima.py. Names are those of diffusers.
One layer there can be several in diffusers: query, key and value, but for SDXL, and the feed-forward in single blocks of Flux.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from smalti_migrate.command_lines import words_of
from smalti_migrate.converters import number, switch
from smalti_migrate.entries import ENCODERS, LAYERS, NO_CONVOLUTIONS, ONE_RANK
from smalti_migrate.kohya.tables import NETWORKS, RATIOS
from smalti_migrate.rules import Found, Imported, UnconvertibleError, Values

BLOCKS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(ENCODERS, ("attentions",)),
    **dict.fromkeys(("chroma", "flux"), ("transformer_blocks", "single_transformer_blocks")),
    "sd3": ("transformer_blocks",),
    "lumina2": ("layers", "noise_refiner", "context_refiner"),
    "anima": ("transformer_blocks[.][0-9]+[.](attn[12]|ff)",),
}
"""The blocks of which every linear layer is adapted, by family; of those of Anima the modulation is not."""
_LAST = {"lumina2": ("norm_out.*",)}
"""Layers after the blocks, which are adapted unless `train_blocks` chooses blocks."""
_CONVOLUTIONS = ("resnets.*", "downsamplers.*", "upsamplers.*")
"""What `conv_dim` adds in a U-Net."""
TEXT_LAYERS = {"flux": 72, "sd3": 264, "lumina2": 182}
"""Layers of text encoders that are adapted too by default: of CLIP-L 72, of CLIP-G 192, of Gemma 2 182."""
_CHOICES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    **{key: {"double": BLOCKS["flux"][:1], "single": BLOCKS["flux"][1:]} for key in ("chroma", "flux")},
    "lumina2": {
        "transformer": ("layers",),
        "refiners": ("noise_refiner", "context_refiner"),
        "noise_refiner": ("noise_refiner",),
        "context_refiner": ("context_refiner",),
    },
}
"""`train_blocks`, other than all."""
_NUMBERS: Mapping[str, Mapping[str, str]] = {
    **{
        key: {"train_double_block_indices": BLOCKS[key][0], "train_single_block_indices": BLOCKS[key][1]}
        for key in ("chroma", "flux")
    },
    "sd3": {"train_block_indices": "transformer_blocks"},
}
"""Arguments that choose blocks by their numbers."""
_TEXT, _IMAGE = "attn.(add_.*|to_add_out)", "attn2?.(to_[qkv]|to_out.0)"
_CHROMA = {
    "img_attn_dim": ("transformer_blocks", _IMAGE),
    "txt_attn_dim": ("transformer_blocks", _TEXT),
    "img_mlp_dim": ("transformer_blocks", "ff.net.*"),
    "txt_mlp_dim": ("transformer_blocks", "ff_context.*"),
    "single_dim": ("single_transformer_blocks", "(attn.*|proj_mlp|proj_out)"),
}
_KINDS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "chroma": _CHROMA,
    "flux": {
        **_CHROMA,
        "img_mod_dim": ("transformer_blocks", "norm1.linear"),
        "txt_mod_dim": ("transformer_blocks", "norm1_context.linear"),
        "single_mod_dim": ("single_transformer_blocks", "norm.linear"),
    },
    "sd3": {
        "x_attn_dim": ("transformer_blocks", _IMAGE),
        "context_attn_dim": ("transformer_blocks", _TEXT),
        "x_mlp_dim": ("transformer_blocks", "ff.net.*"),
        "context_mlp_dim": ("transformer_blocks", "ff_context.*"),
        "x_mod_dim": ("transformer_blocks", "norm1.linear"),
        "context_mod_dim": ("transformer_blocks", "norm1_context.linear"),
    },
}
"""Ranks of one kind of layers: argument -> the blocks, and the layers in them. 0 leaves them out."""
_EMBEDDERS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "chroma": {"in_dims": ("x_embedder", "", "", "", "context_embedder")},
    "flux": {
        "in_dims": (
            "x_embedder",
            *(f"time_text_embed.{each}_embedder.*" for each in ("timestep", "text", "guidance")),
            "context_embedder",
        )
    },
    "sd3": {
        "emb_dims": (
            *("context_embedder", "time_text_embed.timestep_embedder.*", "pos_embed.proj"),
            *("time_text_embed.text_embedder.*", "norm_out.linear", "proj_out"),
        )
    },
    "lumina2": {
        "embedder_dims": ("x_embedder", *(f"time_caption_embed.{each}_embedder.*" for each in ("timestep", "caption")))
    },
}
"""Ranks of layers around the blocks, in this order. 0 leaves one out, as the absence of the argument does."""
_NO_EFFECT = ("split_qkv", "verbose")
_CONV = {"conv_dim": 0, "conv_alpha": 1}
_NO_CONVOLUTIONS = "LoRA of convolutions is supported for SD and SDXL only, in whose blocks they are"
_WHY = {"train_t5xxl": "text encoders are not trained here"}


def words_in(given: Found) -> dict[str, str]:
    """`weight_decay=0.1`, `betas=0.9,0.99`: a list of texts, or one text."""
    words = given.value if isinstance(given.value, list) else words_of(str(given.value), {})[0]
    return {key: value.strip("\"'") for key, _, value in (str(word).partition("=") for word in words)}


def add_layers(found: Values, family: str, result: Imported) -> None:
    """Set `lora_targets`, and list what is adapted there and not here."""
    module, given = found.first("network_module"), found.first("network_args", default="")
    words, place = words_in(given), given.place
    if ratio := _ratios(words)[0]:
        result.add("loraplus_lr_ratio", ratio, f"{place} {', '.join(key for key in RATIOS if key in words)}")
    words = {key: value for key, value in words.items() if key not in RATIOS}
    if family not in BLOCKS or ("network_module" in found and str(module.value) not in NETWORKS):
        fix = "lora_targets = [...]; the family has a default"
        result.leave(module.place, "the layers that it adapts are not known here", fix=fix, value=module.value)
        known = "network_module" not in found or str(module.value) in NETWORKS
        for key, value in words.items():
            why = _NO_CONVOLUTIONS if key in _CONV else "the layers that it chooses are not known here"
            result.leave(f"{place} {key}", why if known else "networks of one's own are not loaded", value=value)
        return
    rank, alpha = (found.first(key, default=of).read(number) for key, of in (("network_dim", 4), ("network_alpha", 1)))
    targets = [*_blocks(family, words), *_around(family, words, rank)]
    conv = tuple(number(words.pop(key, start)) for key, start in _CONV.items()) if family in ENCODERS else (0, 1)
    if conv == (rank, alpha):
        targets += _CONVOLUTIONS
    elif conv[0]:
        why = NO_CONVOLUTIONS.format(LAYERS[family])
        fix = f"conv_dim={rank} and conv_alpha={alpha}, as of the other layers, are converted"
        result.leave(f"{place} conv_dim", why, fix=fix, value=f"{conv[0]}, conv_alpha = {conv[1]}")
    result.add("lora_targets", targets, f"{place}; all linear layers of these blocks")
    for key, value in words.items():
        if not _is_done(key, value, family, rank):
            ranks = "dim" in key
            why = _WHY.get(
                key,
                _NO_CONVOLUTIONS if key in _CONV else ONE_RANK if ranks else "this argument of the network has no counterpart",
            )
            result.leave(f"{place} {key}", why, fix="lora_targets chooses layers" if ranks else "", value=value)


def _ratios(words: Mapping[str, str]) -> tuple[float, float]:
    """The ratios of LoRA+ of the model, and of text encoders; 0 is none."""
    model, both, encoders = (number(words.get(key) or "0") for key in RATIOS)
    return model or both, encoders or both


def add_text_encoders(found: Values, family: str, result: Imported) -> None:
    """Train the text encoders of SD and SDXL, which is the default there. Of other families list that they are trained."""
    only, rate = found.first("network_train_unet_only", default=False), found.get("text_encoder_lr")
    if only.read(switch):
        result.settled += [each.place for each in (only, rate) if each is not None]
    elif family in ENCODERS:
        _add_encoders(found, only.place, result)
    elif rate is not None:
        result.leave(rate.place, "text encoders of this family are not trained here", value=rate.value)
    elif family in TEXT_LAYERS:
        why = f"text encoders are not trained here; there the LoRA has {TEXT_LAYERS[family]} layers of them too"
        result.leave(only.place, why, value=False)


def _add_encoders(found: Values, place: str, result: Imported) -> None:
    """Set their learning rate, which is the first there if there are several, and the layers that no default has."""
    rate, words = found.get("text_encoder_lr"), found.first("network_args", default="")
    if rate is None and "unet_lr" in found:
        rate = found.first("learning_rate", default=2e-6)
    values = [] if rate is None else rate.value if isinstance(rate.value, list) else [rate.value]
    if rate is not None and values and number(values[0]) == 0:
        result.settled.append(rate.place)
        return
    result.add("train_text_encoder", True, place)
    if rate is not None and values:
        result.add("text_encoder_lr", number(values[0]), rate.place + (", the first, as there" if len(values) > 1 else ""))
    model, encoders = (ratio or 1 for ratio in _ratios(words_in(words)))
    if model != encoders:
        why = f"text encoders have the ratio of LoRA+ that the model has here: {model:g}"
        result.leave(f"{words.place} {RATIOS[-1]}", why, fix="loraplus_lr_ratio is of both", value=encoders)
    if (line := result.lines.get("lora_targets")) is not None and isinstance(line.value, list):
        result.add("lora_targets", [*line.value, "fc1", "fc2"], f"{line.source}, and of the text encoders")


def _blocks(family: str, words: Mapping[str, str]) -> Iterator[str]:
    """The layers of blocks. Of blocks by numbers, and without some kinds of layers, as the arguments say."""
    choice = words.get("train_blocks", "all")
    numbers = {block: _numbers(words[key]) for key, block in _NUMBERS.get(family, {}).items() if key in words}
    for block in _CHOICES.get(family, {}).get(choice, BLOCKS[family]):
        count = numbers.get(block, "[0-9]+")
        kinds = {key: end for key, (of, end) in _KINDS.get(family, {}).items() if of == block}
        kept = [end for key, end in kinds.items() if words.get(key) != "0"]
        if not count or (kinds and not kept):
            continue
        if len(kept) < len(kinds):
            yield from (f"{block}[.]{count}[.]{end}" for end in kept)
        else:
            yield f"{block}.*" if block not in numbers else f"{block}[.]{count}[.].*"
    if choice == "all":
        yield from _LAST.get(family, ())


def _numbers(text: str) -> str:
    """A pattern of the numbers in "0-3,7"; empty if there are none."""
    if text in ("all", "none", ""):
        return "[0-9]+" if text == "all" else ""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.strip().isdigit() or (dash and not last.strip().isdigit()):
            raise UnconvertibleError(f"{text} are no numbers of blocks")
        found += range(int(first), int(last if dash else first) + 1)
    return f"({'|'.join(map(str, found))})"


def _around(family: str, words: Mapping[str, str], rank: int | float) -> Iterator[str]:
    """Layers around the blocks that have the rank of the others."""
    for key, targets in _EMBEDDERS.get(family, {}).items():
        for target, dim in zip(targets, _ranks(words.get(key, "")), strict=False):
            if target and number(dim) == rank:
                yield target


def _ranks(value: str) -> Sequence[str]:
    return [part.strip() for part in value.strip("[] ").split(",") if part.strip()]


def _is_done(key: str, value: str, family: str, rank: int | float) -> bool:
    """Whether the targets say what this argument asks for, or it asks for nothing."""
    if key == "train_blocks":
        return value in ("all", *_CHOICES.get(family, ()))
    if key in _NO_EFFECT or key in _NUMBERS.get(family, {}):
        return True
    if key in _EMBEDDERS.get(family, {}):
        return all(number(dim) in (0, rank) for dim in _ranks(value))
    if key.endswith("_dim"):
        return number(value) == rank or (number(value) == 0 and key in _KINDS.get(family, {}))
    return value in ("", "0", "0.0", "None", "False")
