"""
Plain data between a program that is not trusted and the one that judges it, as JSON with tags: values only, no code.

Little of the standard library is used, since this runs inside of the sandbox too, which starts anew for each program.
What is no JSON becomes an object with one key: `t` tuple, `s` set, `z` frozenset, `d` dict as pairs, `b` bytes in hex,
`c` complex, `i` large integer in hex.
"""

import json
import os


MAX_DEPTH = 100
# Decimal digits of larger integers take quadratic time, and Python refuses more than 4300 of them.
MAX_JSON_INTEGER = 10**1000
# Keys of a set or dict that may be numbers or tuples of them.
MAX_HASHED = 5_000


class PlainDataError(ValueError):
    """A value that is no plain data, or bytes that do not describe one."""


def encode(value: object) -> bytes:
    """
    Encode plain data.

    Args:
        value (`object`):
            `None`, a `bool`, `int`, `float`, `complex`, `str` or `bytes`, or a list, tuple, set or dict of them. An
            object of a subclass is sent as one of the base class.

    Raises:
        PlainDataError: for anything else, and what is nested more than 100 deep.
    """
    return json.dumps(_tagged(value, 0)).encode()


def decode(data: bytes) -> object:
    """
    Decode what [`encode`] or anyone else wrote, in time and memory proportional to its size.

    Args:
        data (`bytes`): The encoded value.

    Raises:
        PlainDataError: for anything but an encoded value, and for sets and dicts of more than 5,000 keys that are no
            texts.
    """
    try:
        return _untagged(json.loads(data), 0)
    except PlainDataError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise PlainDataError(f"not an encoded value: {type(error).__name__}") from error


def _tagged(value: object, depth: int) -> object:
    if depth > MAX_DEPTH:
        raise PlainDataError(f"nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        value = int.__index__(value)
        return value if -MAX_JSON_INTEGER < value < MAX_JSON_INTEGER else {"i": hex(value)}
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    depth += 1
    if isinstance(value, dict):
        return {"d": [[_tagged(key, depth), _tagged(item, depth)] for key, item in value.items()]}
    for kind, tag in ((list, None), (tuple, "t"), (set, "s"), (frozenset, "z")):
        if isinstance(value, kind):
            items = [_tagged(item, depth) for item in value]
            return {tag: items} if tag else items
    raise PlainDataError(f"a {type(value).__name__} is no plain data")


def _untagged(value: object, depth: int) -> object:
    if depth > MAX_DEPTH:
        raise PlainDataError(f"nested more than {MAX_DEPTH} deep")
    depth += 1
    if isinstance(value, list):
        return [_untagged(item, depth) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise PlainDataError("an object with other than one tag")
    ((tag, body),) = value.items()
    if tag == "i":
        return int(body, 16)
    if tag == "b":
        return bytes.fromhex(body)
    if tag == "c":
        real, imaginary = body
        return complex(float(real), float(imaginary))
    if not isinstance(body, list):
        raise PlainDataError(f"a tag {tag!r:.20} without items")
    if tag == "d":
        keys = _hashable([_untagged(key, depth) for key, _ in body])
        return dict(zip(keys, (_untagged(item, depth) for _, item in body), strict=True))
    kinds = {"t": tuple, "s": set, "z": frozenset}
    if tag not in kinds:
        raise PlainDataError(f"an unknown tag {tag!r:.20}")
    items = [_untagged(item, depth) for item in body]
    return tuple(items) if tag == "t" else kinds[tag](_hashable(items))


def _hashable(items: list) -> list:
    # Numbers may be chosen so that all have one hash, and inserting them takes the square of their number.
    if len(items) > MAX_HASHED and not all(isinstance(item, str) for item in items):
        raise PlainDataError(f"a set or dict of more than {MAX_HASHED:,} keys that are no texts")
    return items


def read_exactly(descriptor: int, size: int) -> bytes | None:
    """Read `size` (`int`) bytes from a `descriptor` (`int`), or `None` at its end."""
    parts = []
    while size:
        part = os.read(descriptor, min(size, 2**20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def write_all(descriptor: int, data: bytes) -> None:
    """Write `data` (`bytes`) to a `descriptor` (`int`)."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def read_message(descriptor: int) -> bytes | None:
    """Read bytes that [`write_message`] wrote from a `descriptor` (`int`), or `None` at its end."""
    head = read_exactly(descriptor, 4)
    return None if head is None else read_exactly(descriptor, int.from_bytes(head, "big"))


def write_message(descriptor: int, message: bytes) -> None:
    """Write a `message` (`bytes`) behind its length to a `descriptor` (`int`)."""
    write_all(descriptor, len(message).to_bytes(4, "big") + message)
