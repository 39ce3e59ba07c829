"""Random small JSON schemas, and whether a value fits one: for tests of structured output."""

from __future__ import annotations

import random
import re
from typing import Any

Schema = dict[str, Any]
NAMES = ("a", "name", "id_2", "größe", 'q"uote', "x y")


def random_schema(rng: random.Random, depth: int = 2) -> Schema:
    """Bounded: a random walk through its grammar ends soon."""
    scalars = [_enum, _string, _pattern, _integer, _number, _boolean, _null, _const]
    nested = [_object, _object, _array, _any_of] if depth else []
    return rng.choice(scalars + nested)(rng, depth)


def _enum(rng: random.Random, depth: int) -> Schema:
    return {"enum": rng.sample(["red", "gr\nün", 7, -1, True, None, "", "日本"], rng.randint(1, 4))}


def _string(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 2)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 4)}


def _pattern(rng: random.Random, depth: int) -> Schema:
    return {"type": "string", "pattern": rng.choice(["^[a-c]{1,3}$", "^(ab|cd)x$", "^[0-9]{3}-[A-Z]$"])}


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-120, 120)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)}


def _number(rng: random.Random, depth: int) -> Schema:
    return {"type": "number"}


def _boolean(rng: random.Random, depth: int) -> Schema:
    return {"type": "boolean"}


def _null(rng: random.Random, depth: int) -> Schema:
    return {"type": "null"}


def _const(rng: random.Random, depth: int) -> Schema:
    return {"const": rng.choice(["fixed", 12, False])}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(1, 3))
    required = [name for name in names if rng.random() < 0.6]
    properties = {name: random_schema(rng, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(rng, depth - 1),
        "minItems": low,
        "maxItems": low + rng.randint(0, 2),
    }


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}


def fits(value: Any, schema: Schema) -> bool:
    """Whether `value` is what a schema of `random_schema` describes."""
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return any(type(value) is type(one) and value == one for one in schema["enum"])
    if "const" in schema:
        return type(value) is type(schema["const"]) and value == schema["const"]
    kind = schema["type"]
    if kind == "object":
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(schema["properties"])
            and all(fits(value[name], schema["properties"][name]) for name in value)
        )
    if kind == "array":
        return (
            isinstance(value, list)
            and schema["minItems"] <= len(value) <= schema["maxItems"]
            and all(fits(one, schema["items"]) for one in value)
        )
    if kind == "string":
        if not isinstance(value, str) or ("pattern" in schema and not re.search(schema["pattern"], value)):
            return False
        return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    types = {"number": (int, float), "boolean": (bool,), "null": (type(None),)}[kind]
    return isinstance(value, types) and (kind != "number" or not isinstance(value, bool))
