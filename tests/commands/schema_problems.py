"""Where a document breaks its JSON Schema."""

from __future__ import annotations

import json
from typing import Any

from gputop.commands.schema import json_schema

KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,), "null": (type(None),), "integer": (int,),
    "number": (int, float)}


def violations(value: Any, schema: dict[str, Any], defs: dict[str, Any], at: str = "$") -> list[str]:
    """Where a document breaks a schema; a key that the schema does not name is one."""
    if "$ref" in schema:
        return violations(value, defs[schema["$ref"].rpartition("/")[2]], defs, at)
    if "anyOf" in schema:
        found = [violations(value, one, defs, at) for one in schema["anyOf"]]
        return min(found, key=len)
    out = []
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return [f"{at}: {type(value).__name__} where {kind} belongs"]
    if "enum" in schema and value not in schema["enum"]:
        out.append(f"{at}: {value!r} is none of {schema['enum']}")
    if isinstance(value, dict) and ("properties" in schema or "additionalProperties" in schema):
        known, other = schema.get("properties", {}), schema.get("additionalProperties")
        out += [f"{at}: without {key}" for key in schema.get("required", ()) if key not in value]
        for key, item in value.items():
            if key in known:
                out += violations(item, known[key], defs, f"{at}.{key}")
            elif isinstance(other, dict):
                out += violations(item, other, defs, f"{at}.{key}")
            elif other is None or other is False:
                out.append(f"{at}.{key}: gputop/commands/schema.py does not know this key")
    if isinstance(value, list):
        items = [*schema.get("prefixItems", ())]
        items += [schema["items"]] * (len(value) - len(items)) if isinstance(schema.get("items"), dict) else []
        for i, (item, own) in enumerate(zip(value, items, strict=False)):
            out += violations(item, own, defs, f"{at}[{i}]")
    return out


def problems(name: str, document: Any) -> list[str]:
    schema = json_schema(name)
    return violations(json.loads(json.dumps(document)), schema, schema["$defs"])[:5]
