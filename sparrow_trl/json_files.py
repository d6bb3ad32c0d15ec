"""Strict JSON objects on disk: what is read is bounded and unambiguous, what is written is never half-written."""

import json
import math
import os
import re
import reprlib
import uuid
from pathlib import Path
from typing import Any


MAX_JSON_BYTES = 4 * 2**20


def parse_json_object(data: bytes, source: str, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """
    Parse a JSON object that may come from anywhere.

    Args:
        data (`bytes`):
            UTF-8 encoded JSON.
        source (`str`):
            Where `data` comes from, for the error messages.
        max_bytes (`int`, *optional*, defaults to 4 MiB):
            Largest size of `data`.

    Returns:
        `dict[str, Any]`

    Raises:
        ValueError: when `data` is too large, not UTF-8, not JSON, nested too deeply, not an object at its top level,
            or holds a duplicated key or a number that is not finite.
    """
    if len(data) > max_bytes:
        raise ValueError(f"{source} is larger than {max_bytes:,} bytes, the limit for a file of this kind.")
    try:
        parsed = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_finite_float,
            parse_float=_finite_float,
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{source} is nested too deeply.") from error
    except ValueError as error:
        raise ValueError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{source} must hold a JSON object at its top level, not a {type(parsed).__name__}.")
    return parsed


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Parse the file at `path` (`pathlib.Path`), of at most `max_bytes` (`int`), with [`parse_json_object`]."""
    with open(path, "rb") as file:
        return parse_json_object(file.read(max_bytes + 1), str(path), max_bytes)


def dump_json_object(value: dict[str, Any], source: str, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """
    Serialize `value` as indented JSON that [`parse_json_object`] reads back, with each list of numbers on one line.

    Raises:
        ValueError: when `value` holds a number that is not finite, or is too large to be read back.
    """
    text = json.dumps(value, indent=2, allow_nan=False)
    # A raw line feed never occurs inside a JSON string, so this only touches the layout of lists.
    text = re.sub(r"\[\n\s*([-+.,\deE\s]*?)\s*\]", lambda match: f"[{' '.join(match[1].split())}]", text)
    data = text.encode() + b"\n"
    if len(data) > max_bytes:
        raise ValueError(f"{source} would be larger than {max_bytes:,} bytes, the limit for a file of this kind.")
    return data


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that readers see the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {reprlib.repr(key)} appears twice")
        result[key] = value
    return result


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value
