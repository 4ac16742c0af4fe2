"""What a visit trains on of the captions of an image: one of them, with its tags shuffled or dropped.

Pure functions: of the captions and the entry which texts there are, of (seed, epoch, sample, visit) which one is taken. So
nothing depends on ranks, threads or resumes, and all texts can be encoded before training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from smalti.data.datasets.caption_filters import caption_filter
from smalti.data.datasets.spec import CaptionShuffle, DatasetSpec
from smalti.system import derive_seed, permutation, uniform

CACHED_VARIANTS = 4
"""Variants of a caption where texts are encoded before training, and the entry does not say how many."""
TRIGGER_PLACE = "[trigger]"
"""What `trigger_word` replaces in captions, as in ai-toolkit."""

_SEPARATORS = {"comma": ",", "space": " ", "semicolon": ";", "period": "."}


@dataclass(frozen=True, kw_only=True)
class CaptionPolicy:
    """What the entry of a dataset says about captions."""

    spec: DatasetSpec

    @cached_property
    def keeps_captions(self) -> bool:
        """Whether each text is a caption of the index, unchanged."""
        spec = self.spec
        added = spec.caption_prefix or spec.caption_suffix or spec.trigger_word
        return not (added or spec.caption_filter_list or self._varies or spec.caption_weights)

    def texts(self, captions: Sequence[str]) -> tuple[str, ...]:
        """Returns every text that a visit may pick where texts are encoded before training, each once."""
        if self.keeps_captions:
            return tuple(captions)
        found = [caption for caption, weight in self._weighted(captions) if weight]
        if self._varies:
            found = [self._variant(caption, number) for caption in found for number in range(self._choices(cached=True))]
        return tuple(dict.fromkeys(map(self._completed, found)))

    def first(self, captions: Sequence[str]) -> str:
        """Returns the text of a held-out image: its first caption, with its tags in their order."""
        if self.keeps_captions:
            return captions[0]
        return self._completed(next(caption for caption, weight in self._weighted(captions) if weight))

    def pick(self, captions: Sequence[str], *, seed: int, epoch: int, sample: int, visit: int, cached: bool) -> str:
        """Returns the text of a visit.

        `visit` is unique over the run. With `cached` texts it is one of `texts`; otherwise each visit can have a variant of
        its own.
        """
        fraction = uniform(derive_seed("caption", seed, epoch, sample)) if len(captions) > 1 else 0.0
        if self.keeps_captions:
            return captions[int(fraction * len(captions))]
        caption = _chosen(list(self._weighted(captions)), fraction)
        if self._varies:
            choices = self._choices(cached=cached)
            number = derive_seed("variant", seed, visit)
            caption = self._variant(caption, int(uniform(number) * choices) if choices else number)
        return self._completed(caption)

    @cached_property
    def _shuffle(self) -> CaptionShuffle:
        return self.spec.caption_shuffle or CaptionShuffle(enable=False)

    @cached_property
    def _varies(self) -> bool:
        return self._shuffle.enable or self.spec.caption_tag_dropout_rate > 0

    def _choices(self, *, cached: bool) -> int:
        """Returns the number of variants of a caption; 0 is no limit."""
        count = self._shuffle.count or (CACHED_VARIANTS if cached else 0)
        return count + self._shuffle.include_original if count else 0

    def _weighted(self, captions: Sequence[str]) -> Iterator[tuple[str, float]]:
        """Yields the captions that there are, with their weights; all count alike where none of them has a weight."""
        weights = self.spec.caption_weights
        weights = (*weights, *[0.0] * len(captions)) if weights else (1.0,) * len(captions)
        given = [(caption, weight) for caption, weight in zip(captions, weights, strict=False) if caption]
        alike = not any(weight for _, weight in given)
        yield from ((self._filtered(caption), 1.0 if alike else weight) for caption, weight in given)

    def _filtered(self, caption: str) -> str:
        text = caption
        for substitute in self._filters:
            text = substitute(text)
        return caption if text == caption else " ".join(text.split())

    def _variant(self, caption: str, number: int) -> str:
        """Returns a caption with its tags shuffled and some of them dropped. `number` says which variant it is.

        Depends on the text of the caption, not on the image: runs and images with the same caption share its variants.
        """
        shuffle, rate = self._shuffle, self.spec.caption_tag_dropout_rate
        if shuffle.include_original:
            if number == 0:
                return caption
            number -= 1
        separator = _SEPARATORS.get(shuffle.split_on, shuffle.split_on)
        front, text = self._without_prompt(caption)
        tags = [tag for part in text.split(separator) if (tag := part.strip())]
        kept, others = tags[: shuffle.position_start], tags[shuffle.position_start :]
        key = derive_seed("tags", shuffle.seed, caption, number)
        if shuffle.enable:
            others = [others[place] for place in permutation(len(others), key)]
        if rate:
            dropped = derive_seed("dropped", key)
            others = [tag for place, tag in enumerate(others) if uniform(derive_seed(dropped, place)) >= rate]
        joined = (" " if separator == " " else f"{separator} ").join([*kept, *others])
        return f"{front}{joined}".strip()

    def _without_prompt(self, caption: str) -> tuple[str, str]:
        """Splits a caption into the instance prompt before it, which stays in front, and the rest."""
        front = f"{self.spec.instance_prompt} "
        if self.spec.prepend_instance_prompt and caption.startswith(front):
            return front, caption[len(front) :]
        return "", caption

    def _completed(self, text: str) -> str:
        """Returns a text with the trigger word in it, and prefix and suffix around it."""
        spec = self.spec
        if word := spec.trigger_word:
            text = text.replace(TRIGGER_PLACE, word)
            text = text if word in text else f"{word} {text}".strip()
        text = f"{spec.caption_prefix} {text}".strip() if spec.caption_prefix else text
        if not (suffix := spec.caption_suffix):
            return text
        return f"{text}{suffix}" if suffix[0] in ",.;:" else f"{text} {suffix}".strip()

    @cached_property
    def _filters(self) -> tuple[Callable[[str], str], ...]:
        return tuple(map(caption_filter, self.spec.caption_filter_list))


def _chosen(weighted: Sequence[tuple[str, float]], fraction: float) -> str:
    """Returns the caption at a fraction, in [0, 1), of the sum of all weights."""
    rest = fraction * sum(weight for _, weight in weighted)
    for caption, weight in weighted:
        rest -= weight
        if rest < 0:
            return caption
    return next(caption for caption, weight in reversed(weighted) if weight)
