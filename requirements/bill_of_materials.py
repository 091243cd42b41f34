"""Prints what is installed beside gputop as a bill of materials: CycloneDX 1.5, JSON.

    make sbom      # of an installation without the tests: gputop.cdx.json

One component for each distribution in the environment of this Python: name, version, package URL, license, and one
SHA-256 over its RECORD, in which the installer wrote the hash of every file.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import uuid
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from typing import Any

_TOOLS = {"pip", "setuptools", "wheel"}  # of the environment, not of gputop
_MAX_LICENSE_CHARS = 100  # some put the text itself there


def component(found: Distribution) -> dict[str, Any]:
    """A CycloneDX component."""
    name, version = normalized(found.metadata["Name"]), found.version
    url = f"pkg:pypi/{name}@{version}"
    entry: dict[str, Any] = {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}
    license_ = found.metadata.get("License-Expression") or found.metadata.get("License") or ""
    if 0 < len(license_) <= _MAX_LICENSE_CHARS and "\n" not in license_:
        entry["licenses"] = [{"license": {"name": license_}}]
    record = found.read_text("RECORD")
    if record:
        entry["properties"] = [{"name": "record:sha256", "value": hashlib.sha256(record.encode()).hexdigest()}]
    return entry


def normalized(name: str) -> str:
    """A project's name as indexes write it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needs(found: Distribution, present: set[str]) -> Iterator[str]:
    """The distributions in the environment that this one names; those for extras, too, where they are there."""
    for requirement in found.requires or ():
        name = normalized(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])
        if name in present:
            yield name


def bill(found: list[Distribution]) -> dict[str, Any]:
    """The document."""
    by_name = {normalized(d.metadata["Name"]): d for d in found if normalized(d.metadata["Name"]) not in _TOOLS}
    own = by_name.pop("gputop-tf")
    entries = {name: component(d) for name, d in sorted(by_name.items())}
    root = {**component(own), "type": "application"}
    graph = [{"ref": entry["bom-ref"], "dependsOn": sorted({entries[n]["bom-ref"] for n in needs(d, set(entries))})}
             for entry, d in ((root, own), *((entries[name], by_name[name]) for name in entries))]
    return {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "serialNumber": f"urn:uuid:{uuid.uuid4()}",
            "metadata": {"component": root}, "components": list(entries.values()), "dependencies": graph}


if __name__ == "__main__":
    json.dump(bill(list(distributions())), sys.stdout, indent=2)
    print()
