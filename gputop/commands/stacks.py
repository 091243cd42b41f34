"""``gputop stacks``: which rank did not come, by NCCL's RAS, by PyTorch's flight recorder, and by where the ranks of
this node stand."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gputop.commands.attach import confirmed
from gputop.commands.option_types import pid
from gputop.core.errors import EXIT_OK, EXIT_USAGE, GputopError, NoDataError
from gputop.text import console
from gputop.text.console import say

if TYPE_CHECKING:
    from gputop.ranks.flight_recorder import Dumps
    from gputop.ranks.model import RasAnswer
    from gputop.ranks.stacks import ProcessStacks
    from gputop.ranks.stacks_document import StacksNccl

_APART_S = 3.0  # between two answers of a witness: a job that works launches some collectives meanwhile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pids", type=pid, nargs="*", metavar="PID",
                        help="processes on this node (default: all that have loaded TensorFlow, JAX or CUDA)")
    parser.add_argument("--flight-recorder", nargs="+", default=(), metavar="FILE",
                        help="read these PyTorch flight recorder dumps, in pickle or JSON: one file per rank, whose "
                             "name ends with the rank number (default: the dumps that the processes wrote). Without "
                             "PID, gputop reads nothing else")
    parser.add_argument("--native", action="store_true",
                        help="also show native frames. This pauses each process (for 18 s with TensorFlow), and the "
                             "job may end if its workers do not answer each other for that long")
    parser.add_argument("--threads", action="store_true",
                        help="show the stacks of all threads, not only the main threads")
    parser.add_argument("--yes", action="store_true",
                        help="do not ask before gputop pauses a process or reads another user's process")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    from gputop.core.proc import process_ids
    from gputop.ranks.desync import lines as report_lines
    from gputop.ranks.flight_recorder import read_files, read_of_processes
    from gputop.ranks.processes import ended_siblings, training_processes
    from gputop.ranks.stack_groups import jobs

    if args.demo is not None:
        return _simulated(args)
    if args.flight_recorder and not args.pids:
        return _only_dumps(args)
    pids = args.pids or training_processes()
    pids = [*pids, *(ended_siblings(pids, process_ids()) if pids and not args.pids else ())]
    if not pids:
        raise NoDataError("no process on this node that you may read has loaded TensorFlow, JAX or CUDA",
                          "Name the process: gputop stacks PID. Use sudo if it belongs to another user.")
    if not args.yes and not _agreed(pids, args.native):
        say("nothing was done")
        return EXIT_OK
    first, last, processes, problem = _read(pids, native=args.native)
    lines, nccl = _nccl(first, last)
    files = args.flight_recorder  # those that are named, else those that the processes have written
    dumps = [read_files(files)] if files else read_of_processes(pids)
    by_job = [processes] if args.pids else jobs(processes)  # those that are named are compared
    _write(args, [*lines, *report_lines(dumps, time.time())], nccl, dumps, by_job)
    if problem is not None:
        raise problem
    unread = [process.problem for process in processes if process.problem is not None]
    return EXIT_OK if not unread or any(process.threads for process in processes) else unread[0].exit_code


def _write(args: argparse.Namespace, witnesses: Iterable[str], nccl: StacksNccl, dumps: Sequence[Dumps],
           by_job: Sequence[Sequence[ProcessStacks]]) -> None:
    """Write what the witnesses say and the stacks of each job; with --json the document of both."""
    from gputop.ranks.stack_groups import report
    from gputop.ranks.stacks_document import StacksDocument

    if args.json:
        console.write_json(StacksDocument.of(nccl, dumps, by_job))
    else:
        console.write_text("\n".join([*witnesses, "", *report(by_job, threads=args.threads)]).rstrip())


def _read(pids: Sequence[int], *, native: bool,
          ) -> tuple[RasAnswer | GputopError, RasAnswer | GputopError, Sequence[ProcessStacks], GputopError | None]:
    """Read the stacks between two answers of NCCL; of the stacks also why there are none, as NCCL's answers are shown
    all the same."""
    from gputop.ranks.processes import local_addresses
    from gputop.ranks.stacks import read_all

    hosts = local_addresses()
    first = _ask(pids, hosts, "asking")
    began_s = time.monotonic()
    processes: Sequence[ProcessStacks] = ()
    problem = None
    try:
        processes = read_all(pids, native=native)
    except GputopError as error:
        problem = error
    if isinstance(first, GputopError):
        return first, first, processes, problem
    time.sleep(max(0.0, _APART_S - (time.monotonic() - began_s)))
    return first, _ask(pids, hosts, "to see what has moved, asking again"), processes, problem


def _simulated(args: argparse.Namespace) -> int:
    """Write the stacks of the demo's job, whose processes do not exist. Raises GputopError where it does not hang."""
    from gputop.session.simulated_ranks import SimulatedRanks
    from gputop.sources.simulated import SimulatedSource

    if args.pids or args.flight_recorder:
        raise GputopError("the processes of a demo do not exist, so you cannot name them", "gputop --demo hang stacks",
                          EXIT_USAGE)
    source = SimulatedSource(args.demo)
    source.open()
    try:
        ranks = SimulatedRanks(source)
        if not ranks.pids:
            raise NoDataError("the job of this demo does not hang, and has no simulated stacks",
                              "gputop --demo hang stacks")
        last = ranks.ask(ranks.pids, ranks.hosts())
        lines, nccl = _nccl(ranks.earlier() or last, last)
        processes = ranks.stacks(ranks.pids, args.native)
    finally:
        source.close()
    _write(args, ["*** SIMULATED: these processes do not exist ***", *lines], nccl, (), [processes])
    return EXIT_OK


def _only_dumps(args: argparse.Namespace) -> int:
    """Write what the dumps alone say, of a job that may have ended or run elsewhere."""
    from gputop.ranks.desync import lines
    from gputop.ranks.flight_recorder import read_files
    from gputop.ranks.stacks_document import StacksNccl

    dumps = read_files(args.flight_recorder)
    if not dumps.dumps:
        raise NoDataError("; ".join(dumps.problems), "Name dumps that PyTorch has written, such as nccl_trace_rank_0.")
    _write(args, lines([dumps], time.time()), StacksNccl(problem="not asked: no PID"), [dumps], [])
    return EXIT_OK


def _agreed(pids: Sequence[int], native: bool) -> bool:
    from gputop.core.proc import user_name
    from gputop.ranks.stacks import WHAT_NATIVE_DOES, others_of

    others = others_of(pids)
    reasons = [WHAT_NATIVE_DOES] * native
    if others:
        reasons.append(f"process{'es' if len(others) > 1 else ''} {', '.join(map(str, others))} of "
                       + ", ".join(dict.fromkeys(map(user_name, others.values()))))
    if not reasons:
        return True
    if not sys.stdin.isatty():
        raise GputopError(f"gputop needs your confirmation, but there is no terminal to ask on: {'; '.join(reasons)}",
                          "To proceed without confirmation: gputop stacks --yes", EXIT_USAGE)
    return confirmed("\n".join(console.one_line(line, 300) for line in reasons), "Read the stacks? [y/N] ")


def _ask(pids: Sequence[int], hosts: frozenset[str], doing: str) -> RasAnswer | GputopError:
    from gputop.ranks.nccl_ras import TIMEOUT_S, ask_job
    from gputop.session.ras_worker import read_in_worker

    try:
        return ask_job(pids, hosts, lambda address: say(
            f"{doing} NCCL's RAS at {address}, for at most {TIMEOUT_S:.0f} s: RAS waits for the slowest rank"),
                       read_in_worker)
    except GputopError as error:
        return error


def _nccl(first: RasAnswer | GputopError, last: RasAnswer | GputopError) -> tuple[list[str], StacksNccl]:
    """Answer of NCCL, as lines and for the document."""
    from gputop.advice.live.ranks import counts_text, place_text, title
    from gputop.core.codec import document_of
    from gputop.ranks.model import StacksAbsence, find_absence, unchanged
    from gputop.ranks.stacks_document import StacksNccl

    if isinstance(first, GputopError) or isinstance(last, GputopError):
        error = first if isinstance(first, GputopError) else last
        assert isinstance(error, GputopError)
        return [f"NCCL   {error.message}. {error.fix}"], StacksNccl(problem=error.message)
    seconds = last.time_s - first.time_s
    absence = find_absence(first, last)
    still = unchanged(first, last)
    nccl = StacksNccl(version=last.nccl, apart_s=seconds, unchanged=still if last.counts_all else None,
                      absence=None if absence is None else document_of(StacksAbsence, absence))
    if absence is not None:
        places = [f"       {place_text(rank)}." for rank in absence.absent[:16]]
        moved = f"       {counts_text(absence)} No rank launched a collective for {seconds:.1f} s."
        return [f"NCCL   {title(absence)}.", moved, *places], nccl
    if not last.counts_all:
        says = (f"the ranks agree. NCCL {last.nccl} does not show whether they make progress; NCCL 2.28.7 and newer do"
                if still else "the ranks continue")
    else:
        says = (f"all ranks have launched the same collectives, but none in the last {seconds:.1f} s: the job is doing "
                "something else or is stuck inside a collective" if still else "the ranks continue")
    return [f"NCCL   No rank is missing: {says}."], nccl
