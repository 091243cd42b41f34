"""Profiler servers of a job of several workers: from ``--attach``, TF_CONFIG or Slurm. Pure functions.

TF_CONFIG and Slurm tell the machines of a job, not where its profilers listen: those ports are
given with ``--profiler-port``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from gputop.core.codec import parse
from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.profiler.addresses import parse_address, unix_name

MAX_HOSTS = 4096  # a mistyped range must not become a million connections

# A part of a Slurm hostlist in brackets; an IPv6 address in brackets has colons.
_BRACKETS = re.compile(r"\[([0-9,-]*)\]")
_RANGE = re.compile(r"([0-9]{1,12})(?:-([0-9]{1,12}))?")
_MAX_BRACKETS, _MAX_HOST_CHARS = 8, 400  # of one part; a name in DNS has 253 characters
# The tasks of tf.distribute that compute; "ps" and "evaluator" have no training steps.
_TRAINING_TASKS = ("chief", "master", "worker")
_HOW = "Write HOST:PORT,HOST:PORT or use ranges: node[01-04]:6009."


def split_list(text: str) -> list[str]:
    """Split a list at the commas that are not in brackets."""
    parts, depth, begin = [], 0, 0
    for i, character in enumerate(text + ","):
        depth += (character == "[") - (character == "]")
        if character == "," and depth <= 0:
            parts.append(text[begin:i].strip())
            begin = i + 1
    if depth > 0:  # a bracket that is never closed: whoever reads the last part says so
        parts.append(text[begin:].strip())
    return [part for part in parts if part]


def expand_hostlist(text: str, most: int = MAX_HOSTS) -> list[str]:
    """The hosts of a Slurm hostlist, in order: ``node[01-03,7],login`` → node01, node02, node03, node7, login.

    What follows the brackets stays (``node[1-2]-ib:6009``), several brackets multiply, and numbers
    keep their leading zeros. Raises GputopError (wrong usage), for more than ``most`` hosts, too.
    """
    hosts: list[str] = []
    for part in split_list(text):
        for host in _expand(part, text):
            hosts.append(host)
            if len(hosts) > most:
                raise _usage(text, f"it expands to more than {most} hosts")
    return list(dict.fromkeys(hosts))


def _expand(part: str, text: str) -> Iterator[str]:
    if unix_name(part) is not None:
        yield part
        return
    match = _BRACKETS.search(part)
    if part.count("[") > _MAX_BRACKETS or (match is None and len(part) > _MAX_HOST_CHARS):
        raise _usage(text, f"{part[:_MAX_HOST_CHARS]!r} is too long for a host name")
    if match is None:
        without_ipv6 = re.sub(r"\[[0-9A-Fa-f:.%\w]*:[^\]]*\]", "", part)
        if "[" in without_ipv6 or "]" in without_ipv6:
            raise _usage(text, f"{part!r} has brackets that do not contain NUMBER-NUMBER,…")
        yield part
        return
    for number in _numbers(match[1], text):
        for rest in _expand(part[match.end():], text):
            yield part[:match.start()] + number + rest


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise _usage(text, f"{item!r} is neither a number nor a range")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= MAX_HOSTS:
            raise _usage(text, f"the range {item} is empty or too long")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def parse_ports(text: str) -> tuple[int, ...]:
    """``6009``, ``6009-6012`` or ``6009,6011``: a port for each rank of a machine. Raises GputopError (wrong usage)."""
    ports: list[int] = []
    for item in text.split(","):
        match = _RANGE.fullmatch(item.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last <= 65535 or last - first >= 64:
            raise GputopError(f"{text!r} is not a list of ports: at most 64 numbers from 1 to 65535",
                              "For example: --profiler-port 6009, or 6009-6012 for four ranks per machine.",
                              EXIT_USAGE)
        ports += range(first, last + 1)
    return tuple(dict.fromkeys(ports))


def addresses(attach: Iterable[str], ports: tuple[int, ...] = (), environ: Mapping[str, str] | None = None,
              ) -> tuple[str, ...]:
    """The servers that were named, each once, in order, as :func:`parse_address` writes them.

    ``attach`` holds the texts of ``--attach``. One without a port gets ``ports``. Where there are ports and nothing to
    attach to, the job's machines are those of TF_CONFIG, else of SLURM_JOB_NODELIST. Raises GputopError (wrong usage).
    """
    listed: list[str] = []
    for text in attach:
        for host in expand_hostlist(text):
            listed += _with_ports(host, ports)
    if ports and not listed:
        for host in job_hosts(environ or {}):
            listed += _with_ports(host, ports)
    return tuple(dict.fromkeys(listed))


def _with_ports(host: str, ports: tuple[int, ...]) -> list[str]:
    rest = host.removeprefix("grpc://").rpartition("]")[2]
    if ports and ":" not in rest and not host.isdecimal():
        return [parse_address(f"{host}:{port}") for port in ports]
    return [parse_address(host)]


def job_hosts(environ: Mapping[str, str]) -> list[str]:
    """The machines of the job this environment belongs to; raises GputopError (wrong usage) where it tells none."""
    if environ.get("TF_CONFIG"):
        return tf_config_hosts(environ["TF_CONFIG"])
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if nodes:
        return expand_hostlist(nodes)
    raise GputopError("--profiler-port applies to the machines of a job, but neither TF_CONFIG nor SLURM_JOB_NODELIST "
                      "is set here", "Run gputop in the job's allocation, or name the servers: --attach HOST:PORT,…",
                      EXIT_USAGE)


def tf_config_hosts(text: str) -> list[str]:
    """The machines of a TF_CONFIG's training tasks, whose ports are tf.distribute's. Raises GputopError (usage)."""
    try:
        cluster = parse(text)["cluster"]
        tasks = [address for task in _TRAINING_TASKS for address in cluster.get(task, ())]
        hosts = [_host(address) for address in tasks]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise GputopError("TF_CONFIG is not valid for tf.distribute, which expects JSON with cluster.worker",
                          "Fix TF_CONFIG, or name the servers: --attach HOST:PORT,…", EXIT_USAGE) from None
    if not hosts:
        raise GputopError("TF_CONFIG does not name any workers", "Name the servers: --attach HOST:PORT,…", EXIT_USAGE)
    return list(dict.fromkeys(hosts))


def _host(address: str) -> str:
    """Host of an address without the port; IPv6 keeps its brackets."""
    if not address.startswith("[") and address.count(":") > 1:
        return f"[{address}]"
    return address.rpartition("]")[0] + "]" if address.startswith("[") else address.partition(":")[0]


def _usage(text: str, reason: str) -> GputopError:
    return GputopError(f"{text!r} is not a list of hosts: {reason}", _HOW, EXIT_USAGE)
