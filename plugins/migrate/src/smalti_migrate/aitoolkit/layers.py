"""Which layers ai-toolkit adapts, as targets of an adapter here, and which alpha it uses.

Facts of toolkit/lora_special.py and the models in it. Names are those of diffusers, but for FLUX.2 and Chroma also there.
"""

from __future__ import annotations

from collections.abc import Mapping

from smalti_migrate.converters import number, switch, whole
from smalti_migrate.entries import ENCODERS, LAYERS, NO_CONVOLUTIONS, literal
from smalti_migrate.rules import Found, Imported, Values

BLOCKS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(ENCODERS, ("attentions.*",)),
    **dict.fromkeys(("chroma", "flux", "flux2"), ("transformer_blocks.*", "single_transformer_blocks.*")),
    **dict.fromkeys(("anima", "sd3", "pixart", "qwen_image"), ("transformer_blocks.*",)),
    "lumina2": ("layers.*", "noise_refiner.*", "context_refiner.*"),
    **dict.fromkeys(("ernie", "z_image"), ("layers.*",)),
    "auraflow": (".*",),
}
"""The layers with `network.transformer_only`, which is the default. In AuraFlow it changes nothing."""
ALL: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(ENCODERS, BLOCKS["sdxl"]),
    "chroma": ("^(?!distilled_guidance_layer).*",),
    **dict.fromkeys(("sd3", "pixart"), ("^(?!pos_embed).*",)),
}
"""The layers without it, if they are not all: convolutions over patches, and what makes Chroma's modulation, do not learn."""
CONVOLUTIONS = ("resnets.*", "downsamplers.*", "upsamplers.*")
"""What `network.conv` adds in a U-Net. No block of the other families has convolutions."""
UNSCALED = ("anima", "chroma", "ernie", "flux", "flux2", "lumina2", "qwen_image", "sd3", "z_image")
"""Families whose adapters have no alpha there: it is the rank, whatever the file says."""
_PREFIXES = dict.fromkeys(ENCODERS, "lora_unet") | {"pixart": "lora_transformer", "auraflow": "lora_transformer"}
"""What stands before the names of layers there, if it is not `transformer`."""


def add_adapter(found: Values, family: str, result: Imported) -> None:
    """Set rank, alpha and `lora_targets`, and list what is adapted there and not here."""
    rank = found.first("network.rank", "network.linear", default=4)
    alpha = found.first("network.linear_alpha", "network.alpha", default=1.0)
    if family in UNSCALED:
        note = f"; alpha is the rank there for this model, not {alpha.value}" if alpha.value != rank.value else ""
        alpha = Found(value=rank.value, place=f"{rank.place}, {alpha.place}{note}")
    result.add("lora_rank", rank.read(whole), rank.place)
    result.add("lora_alpha", alpha.read(number), alpha.place)
    if family in BLOCKS:
        _add_targets(found, family, result)


def _add_targets(found: Values, family: str, result: Imported) -> None:
    only = found.first("network.transformer_only", default=True)
    targets = BLOCKS[family] if only.read(switch) else ALL.get(family, (".*",))
    conv = found.get("network.conv")
    if family in ENCODERS and conv is not None and conv.read(number):
        scaled = found.get("network.conv_alpha") or conv
        ours = result.value("lora_rank"), result.value("lora_alpha")
        if (conv.read(number), scaled.read(number)) == ours:
            targets += CONVOLUTIONS
            result.settled += [conv.place, scaled.place]
        else:
            why = NO_CONVOLUTIONS.format(LAYERS[family])
            fix = f"network.conv = {ours[0]} and network.conv_alpha = {ours[1]}, as of the other layers, are converted"
            result.leave(conv.place, why, fix=fix, value=f"{conv.value}, conv_alpha = {scaled.value}")
            result.settled.append(scaled.place)
    words = {key: found.get(f"network.network_kwargs.{key}_if_contains") for key in ("ignore", "only")}
    if family in ("chroma", "flux2"):
        for given in filter(None, words.values()):
            if given.value:
                why, fix = "the layers of this model have other names there", "name the layers in lora_targets"
                result.leave(given.place, why, fix=fix, value=given.value)
        words = {}
    conditions = "".join(_condition(key, given.value, family) for key, given in words.items() if given is not None)
    place = ", ".join([only.place, *(given.place for given in words.values() if given is not None and given.value)])
    shown = [f"^{conditions}{each.removeprefix('^') if each[0] == '^' else f'.*{each}'}" for each in targets]
    result.add("lora_targets", shown if conditions else list(targets), f"{place}; all linear layers of these blocks")


def _condition(key: str, words: object, family: str) -> str:
    """A look ahead over the name of a layer: it contains one of these words, or none of them."""
    listed = [str(word) for word in (words if isinstance(words, list) else [words]) if word]
    patterns = [pattern for word in listed for pattern in _patterns(word, family, underscored=key == "only")]
    if key == "only":
        return f"(?={'|'.join(patterns)})" if patterns else ""
    return f"(?!{'|'.join(patterns)})" if patterns else ""


def _patterns(word: str, family: str, *, underscored: bool) -> list[str]:
    """What a name begins with that contains this word there, where a prefix stands before it."""
    prefix, word = _PREFIXES.get(family, "transformer") + ".", word.replace("$$", ".")
    if word in prefix:
        return [""]
    ends = [word[len(prefix) - at :] for at in range(len(prefix)) if word.startswith(prefix[at:])]
    patterns = [*map(literal, ends), f".*{literal(word)}"]
    return [each.replace("_", "[._]") for each in patterns] if underscored and family in _PREFIXES else patterns
