"""The check of numbers in configurations."""

from collections.abc import Iterable
from math import inf
from numbers import Integral


def check_numbers(config, bounds: Iterable[tuple[str, type, float, float]], optional: tuple[str, ...] = ()) -> None:
    """
    Refuse, with a `ValueError` that names the field, numbers of another kind or out of bounds.

    Args:
        config: Object with the fields.
        bounds (`Iterable[tuple[str, type, float, float]]`):
            Name of each field, `numbers.Integral` or `numbers.Real`, and the lowest and highest value.
        optional (`tuple[str, ...]`, *optional*, defaults to `()`): Names of those that may be `None`.
    """
    for name, kind, lowest, highest in bounds:
        value = getattr(config, name)
        if name in optional and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kind) or not lowest <= value <= highest:
            noun = "an integer" if kind is Integral else "a number"
            limits = f"of at least {lowest}" if highest == inf else f"between {lowest} and {highest}"
            raise ValueError(f"{name} must be {noun} {limits}, but it is {value!r}.")
