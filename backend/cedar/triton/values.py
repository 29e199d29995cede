# SPDX-License-Identifier: Apache-2.0
"""One value of a request at a time: from a tensor or JSON to a Python value, or an error that names the field."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cedar.errors import CedarError, invalid
from cedar.triton.tensors import NUMPY, Tensor

_WHOLE = re.compile(r"[+-]?[0-9]{1,20}")
_NUMBER = re.compile(r"[+-]?([0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})([eE][+-]?[0-9]{1,3})?")
INT32 = range(-(2**31), 2**31)


def shown(value: object) -> str:
    """A value for an error message, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"


def check_tensor(tensor: Tensor, array: NDArray[Any]) -> None:
    """INVALID_ARGUMENT when type or shape are not the table's (Triton refuses most of these itself)."""
    if array.dtype != NUMPY[tensor.dtype] and not (tensor.dtype == "BYTES" and array.dtype.kind in "SO"):
        raise invalid(tensor.name, f"has type {array.dtype}", tensor.type_and_dims)
    if array.ndim != 1 or (tensor.dims[0] != -1 and array.shape[0] != tensor.dims[0]):
        raise invalid(tensor.name, f"has shape {list(array.shape)}", tensor.type_and_dims)


def scalar(tensor: Tensor, array: NDArray[Any]) -> object:
    """The one element of a scalar tensor as a Python value; BYTES stay bytes."""
    check_tensor(tensor, array)
    item = array[0]
    return item.item() if isinstance(item, np.generic) else item


def as_text(field: str, value: object, allowed: str) -> str:
    """Text from bytes (strict UTF-8) or a JSON string."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise invalid(field, f"is not valid UTF-8 (byte {error.start})", allowed) from None
    if not isinstance(value, str):
        raise invalid(field, f"is {shown(value)}", allowed)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid(field, f"character {error.start} is half of a surrogate pair", allowed) from None
    return value


def as_int(field: str, value: object, allowed: str) -> int:
    """A whole number, also as text or as a float without fraction."""
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise invalid(field, f"is {shown(value)}", allowed)


def as_int32(field: str, value: object, allowed: str) -> int:
    """`as_int` within the range of the tensor type."""
    number = as_int(field, value, allowed)
    if number not in INT32:
        raise invalid(field, f"is {shown(number)}", f"{allowed}, below 2^31")
    return number


def as_float(field: str, value: object, allowed: str) -> float:
    """A finite number, also as text."""
    number = math.nan
    if isinstance(value, str):
        number = float(value) if _NUMBER.fullmatch(value) else math.nan
    elif isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and value in INT32):
        number = float(value)
    if not math.isfinite(number):
        raise invalid(field, f"is {shown(value)}", allowed)
    return number


def as_bool(field: str, value: object, allowed: str) -> bool:
    """A boolean, also as the text true or false."""
    if isinstance(value, bool):
        return value
    text = value.lower() if isinstance(value, str) else None
    if text in ("true", "false"):
        return text == "true"
    raise invalid(field, f"is {shown(value)}", allowed)


def as_texts(field: str, value: object, allowed: str) -> tuple[str, ...]:
    """One text, or a list of texts."""
    if isinstance(value, list):
        return tuple(as_text(f"{field}[{i}]", item, allowed) for i, item in enumerate(value))
    return (as_text(field, value, allowed),)


def as_ids(field: str, value: object, allowed: str) -> tuple[int, ...]:
    """A list of token ids."""
    if not isinstance(value, list):
        raise invalid(field, f"is {shown(value)}", allowed)
    return tuple(as_int32(f"{field}[{i}]", item, allowed) for i, item in enumerate(value))


CONVERT = {
    "INT32": as_int32,
    "UINT64": as_int,
    "FP32": as_float,
    "BOOL": as_bool,
    "BYTES": as_text,
    "TEXTS": as_texts,
    "IDS": as_ids,
}
"""KServe datatype, or kind of a `cedar.triton.tensors.JsonKey` -> its conversion."""


def json_object(field: str, text: str, allowed: str) -> dict[str, Any]:
    """A JSON object without NaN, infinities and repeated keys."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            names = [name for name, _ in items]
            twice = next(name for name in names if names.count(name) > 1)
            raise invalid(f"{field}.{twice}", "is given twice", allowed)
        return found

    def constant(name: str) -> object:
        raise invalid(field, f"contains {name}", allowed)

    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except CedarError:
        raise
    except (ValueError, RecursionError) as error:
        raise invalid(field, f"is not valid JSON ({error})", allowed) from None
    if not isinstance(value, dict):
        raise invalid(field, f"is a JSON {type(value).__name__}", allowed)
    return value
