"""Which layers OneTrainer adapts, as targets of an adapter here: all linear layers and convolutions, or those of a filter.

Names are those of diffusers, there too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from smalti_migrate.entries import ENCODERS, literal
from smalti_migrate.rules import Found, Imported, Values

PRESETS: Mapping[str, Mapping[str, str]] = (
    {family: {"attn-mlp": "attentions", "attn-only": "attn"} for family in ENCODERS}
    | {"flux": {"attn-mlp": "attn,ff.net,proj_mlp", "attn-only": "attn", "blocks": "transformer_block"}}
    | {"chroma": {"attn-mlp": "attn,ff.net,proj_mlp", "attn-only": "attn", "blocks": "transformer_block"}}
    | {"ernie": {"attn-mlp": "self_attention,mlp", "attn-only": "self_attention", "blocks": "layers"}}
    | {"flux2": {"blocks": "transformer_block"}, "sd3": {"attn-only": "attn", "blocks": "transformer_block"}}
    | {"pixart": {"attn-mlp": "attn1,attn2,ff.net", "attn-only": "attn1,attn2", "blocks": "transformer_block"}}
    | {"qwen_image": {"attn-mlp": "attn,img_mlp,txt_mlp", "attn-only": "attn", "blocks": "transformer_block"}}
    | {"sana": {"attn-mlp": "attn1,attn2,ff.", "attn-only": "attn1,attn2", "blocks": "transformer_block"}}
    | {"anima": {"attn-mlp": "attn1,attn2,ff", "attn-only": "attn1,attn2", "blocks": "transformer_block"}}
    | {"krea2": {"attn-mlp": "attn,ff", "attn-only": "attn", "blocks": "transformer_blocks"}}
    | {"ideogram": {"attn-mlp": "attention,feed_forward", "blocks": "layers"}, "z_image": {"blocks": "layers"}}
)
"""`layer_filter_preset` -> the filter that its window sets, by family. A file may have the name alone."""
_DEPTHWISE = "transformer_blocks.0.ff.conv_depth"
"""The convolution with groups in each of the 20 or 28 blocks of Sana."""


def add_layers(found: Values, family: str, kind: str, result: Imported) -> None:
    """Set `lora_targets`, and list what is trained there and not here."""
    given = found.first("layer_filter", default="")
    preset = found.get("layer_filter_preset")
    if "layer_filter" not in found and preset is not None:
        given = Found(value=PRESETS.get(family, {}).get(str(preset.value), ""), place=preset.place)
    if kind != "lora":
        if given.value:
            result.leave(
                given.place, "all layers are trained, without an adapter", fix='model_type = "lora"', value=given.value
            )
        return
    regex = found.on("layer_filter_regex")
    filters = [each.strip() for each in str(given.value).split(",")]
    if regex and (wrong := [each for each in filters if not _is_pattern(each)]):
        fix = "name the layers in lora_targets"
        result.leave(given.place, "it is not a regular expression", fix=fix, value=", ".join(wrong))
        return
    targets = [_target(each, regex) for each in filters]
    names = ("layer_filter_preset", "layer_filter_regex" if regex else "")
    places = dict.fromkeys([given.place, *(found[key].place for key in names if key in found)])
    result.add("lora_targets", targets, f"{', '.join(places)}; linear layers and convolutions with such a name")
    if family == "sana" and any(re.fullmatch(target, _DEPTHWISE) for target in targets):
        why = "convolutions with groups are not adapted here: ff.conv_depth of each block"
        result.leave(given.place, why, value=given.value)


def _target(text: str, regex: bool) -> str:
    """A filter as a target: names that contain the text, or in which the expression is found."""
    if not text:
        return ".*"
    return f".*(?:{text}).*" if regex else f".*{literal(text)}.*"


def _is_pattern(text: str) -> bool:
    try:
        re.compile(f".*(?:{text}).*")
    except re.error:
        return False
    return True
