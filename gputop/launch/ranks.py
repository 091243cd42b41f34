"""The ranks of a PyTorch job on this node: the processes that meet at one address, as torchrun and env:// have it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from gputop.core.errors import GputopError
from gputop.core.proc import environ_of, owner, process_ids, stat_of
from gputop.launch.serve import is_pytorch

MAX_RANKS = 64  # ranks of one node
_PROC = Path("/proc")
_MEETING = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}:[0-9]{1,5}")  # nothing that a shell or ssh reads otherwise
_THIS_NODE = frozenset(("localhost", "127.0.0.1", "0.0.0.0"))
_NUMBER = re.compile(r"[0-9]{1,7}")


def is_meeting_address(text: str) -> bool:
    """Return whether it can be the address at which the ranks of a job meet."""
    return _MEETING.fullmatch(text) is not None


def meeting_address(environ: Mapping[str, str]) -> str | None:
    """Address where a rank meets the others (MASTER_ADDR and MASTER_PORT), the job's identity on all its nodes; None
    where it is no rank, or no other node can reach that address."""
    text = f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"
    is_rank = is_meeting_address(text) and _NUMBER.fullmatch(environ.get("RANK", "")) is not None
    return text if is_rank and environ["MASTER_ADDR"] not in _THIS_NODE else None


def ranks_elsewhere(environ: Mapping[str, str]) -> int:
    """Number of ranks of a process's job on other nodes, as torchrun says; 0 where it does not."""
    both = environ.get("WORLD_SIZE", ""), environ.get("LOCAL_WORLD_SIZE", "")
    if not all(_NUMBER.fullmatch(text) for text in both):
        return 0
    everywhere, here = map(int, both)
    return max(0, everywhere - here) if meeting_address(environ) is not None else 0


def find_ranks(address: str, proc: Path = _PROC) -> list[int]:
    """The PIDs of the ranks on this node that meet at ``address``, by rank, as far as their environment may be read.

    Raises GputopError where they are of several users: a job is one user's, and anybody can set these variables.
    """
    environs = {pid: environ_of(pid, proc) for pid in process_ids(proc)}
    ranks = {pid: int(environ["RANK"]) for pid, environ in environs.items() if meeting_address(environ) == address}
    rank_pids = []
    for pid in ranks:
        stat = stat_of(pid, proc)
        # A rank's children, such as its DataLoader's workers, have its environment.
        if stat is not None and ranks.get(stat.parent) != ranks[pid] and is_pytorch(pid):
            rank_pids.append(pid)
    users = {uid for pid in rank_pids if (uid := owner(pid, proc)) is not None}
    if len(users) > 1:
        uids = ", ".join(map(str, sorted(users)))
        raise GputopError(f"processes of several users (uid {uids}) use the rendezvous address {address}, so gputop "
                          "does not know whose job it is", "Run gputop as the job's user on that node.")
    return sorted(rank_pids, key=ranks.__getitem__)[:MAX_RANKS]


def meeting_addresses(pids: Sequence[int], proc: Path = _PROC) -> set[str]:
    """Addresses where the jobs of these processes meet; of all that may be read, if none is named."""
    environs = (environ_of(pid, proc) for pid in pids or process_ids(proc))
    return {address for environ in environs if (address := meeting_address(environ)) is not None}
