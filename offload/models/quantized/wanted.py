"""What a user asks for: the format of every module's weight, by patterns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from offload.kernels.weight_format import WeightFormat

DEFAULT = "default"
PLAIN = "none"
_CLIP = "-clip"


@dataclass(frozen=True)
class Wanted:
    """A format, and whether every group's range is clipped where that lowers its error."""

    form: WeightFormat
    clip: bool = False

    @classmethod
    def parse(cls, text: str) -> Wanted:
        """As `WeightFormat.parse`, with -clip at the end: int4-g128-zp-clip."""
        if not isinstance(text, str):
            raise TypeError(f"a format for weights is a text such as 'int4', got {text!r}")
        clip = text.endswith(_CLIP)
        form = WeightFormat.parse(text.removesuffix(_CLIP))
        if clip and (form.kind == "fp8" or form.block == (0, 0)):
            raise ValueError(
                f"{text!r}: what {form.kind} gains by clipping is nothing; leave it out"
            )
        return cls(form, clip)

    @property
    def name(self) -> str:
        """The text that `parse` makes this of."""
        return self.form.name + (_CLIP if self.clip else "")


@dataclass(frozen=True)
class Wishes:
    """Formats by module. `patterns` are regular expressions, searched for in the modules' names;
    the first that is found decides, else `default`. None leaves a weight as it is.
    """

    default: Wanted | None
    patterns: tuple[tuple[str, Wanted | None], ...] = ()

    @classmethod
    def of(cls, quantization: str | Mapping[str, str]) -> Wishes:
        """Of one format for all, or of patterns such as {"default": "int4", "lm_head": "int8"},
        where "none" leaves a weight as it is.

        Raises TypeError or ValueError, naming what is wrong.
        """
        if isinstance(quantization, str):
            return cls(Wanted.parse(quantization))
        if not isinstance(quantization, Mapping):
            raise TypeError(
                "quantization must be a format such as 'int4', or a dict of patterns to formats, "
                f"got {quantization!r}"
            )
        found: dict[str, Wanted | None] = {}
        for pattern, text in quantization.items():
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ValueError(
                    f"quantization: {pattern!r} is no regular expression ({error})"
                ) from None
            found[pattern] = None if text == PLAIN else Wanted.parse(text)
        default = found.pop(DEFAULT, None)
        if default is None and not any(found.values()):
            raise ValueError(f"quantization={dict(quantization)!r} asks for no format")
        return cls(default, tuple(found.items()))

    def find(self, names: Iterable[str]) -> tuple[Wanted | None, str | None]:
        """The format for a module of these names, and the pattern that says so."""
        names = list(names)
        for pattern, wanted in self.patterns:
            if any(re.search(pattern, name) for name in names):
                return wanted, pattern
        return self.default, None

    @property
    def key(self) -> str:
        """Text that is equal for equal wishes."""
        rows = [(DEFAULT, self.default), *self.patterns]
        return ";".join(f"{name}={x.name if x is not None else PLAIN}" for name, x in rows)
