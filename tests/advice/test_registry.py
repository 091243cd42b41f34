"""The registry: each rule is one complete record, and no text names an id that is no rule."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

import pytest

from gputop.advice.causes import NARROWEST_FIRST
from gputop.advice.fix_code import source_of_page
from gputop.advice.fleet_rules import FLEET_RULES
from gputop.advice.live.advise import MISSING as LIVE_INPUTS
from gputop.advice.live_rules import LIVE_RULES
from gputop.advice.registry import EXPLANATIONS, FINDING_IDS, LIMITS, RULES, SHARED_LIMITS, limit, rule_of, source
from gputop.advice.rule import Rule
from gputop.advice.trace.inputs import MISSING as TRACE_INPUTS
from gputop.advice.trace_rules import TRACE_RULES
from gputop.analysis.host.stack_lines import GAPS
from gputop.render.step_parts import PART_BY_ID, WALL_PARTS
from gputop.timeline.model import KINDS
from tests.source_trees import sources

ROOT = Path(__file__).parents[2]
# These cost no time at any place of their own: memory, kernels that could be fewer, CPUs, and how a CPU's ops compute.
NO_PLACE = {"cpu_contention", "memory_pressure", "memory_growth", "batch_size_headroom", "xla_off", "evaluation_share",
            "unfinished_step", "threads_unused", "thread_oversubscription", "double_precision", "onednn_off",
            "gradients_zeroed", "ops_without_gradient"}
AROUND_STEPS = {"time_outside_steps", "evaluation_share", "unfinished_step"}  # no part of a step
TRACE_IDS = {id_ for rule in TRACE_RULES for id_ in rule.ids}
LIVE_IDS = {id_ for rule in LIVE_RULES for id_ in rule.ids}
FLEET_IDS = {id_ for rule in FLEET_RULES for id_ in rule.ids}


# The checks of the guides that gputop began with (TensorFlow's on GPU performance and on several GPUs, the profilers'
# and PyTorch's): the finding, and words of its page where the check is advice that no trace can show.
CHECKS = (
    ("step time is mostly input", "input_bound", ""),
    ("input: synthetic data, and what the input costs", "input_bound", "gputop compare real"),
    ("input: DALI, or a loader that streams", "input_bound", "DALI"),
    ("input: prefetch, parallel calls, cache, interleave", "input_bound", "prefetch"),
    ("ops on the host, the share of their time", "host_placement", ""),
    ("ops without a GPU's kernel: tf.unique and its kind", "host_placement", "tf.unique"),
    ("kernels in 16 bits, their share", "sixteen_bit_unused", ""),
    ("tensor cores by the kernels' names", "tensor_cores_unused", ""), ("loss scaling of FP16", "loss_scaling", ""),
    ("eager execution", "eager_execution", "tf.while_loop"),
    ("XLA, its levels, and 1 if memory is scarce", "xla_off", "memory is scarce"),
    ("functions traced or compiled anew", "retracing", "TorchScript"),
    ("launches: threads of a GPU's own", "thread_contention", "gpu_private"),
    ("launches: gaps between short kernels", "launch_bound", ""),
    ("launches: CUDA graphs recorded anew", "graph_recapture", ""),
    ("one GPU before several: OneDeviceStrategy", "communication_exposed", "OneDeviceStrategy"),
    ("AllReduce against its bytes: the formula", "allreduce_slow", "(parameters × 4 bytes) / bandwidth"),
    ("AllReduces: few and large", "allreduce_count", "pack"),
    ("MultiWorkerMirroredStrategy", "communication_exposed", "MultiWorkerMirroredStrategy"),
    ("logits and activations of tensor parallelism", "communication_exposed", "loss_parallel"),
    ("MoE and expert parallelism", "communication_exposed", "MoE"),
    ("replicas that start one after the other", "staggered_launch", ""),
    ("a GPU that others wait for", "collective_waiting", ""),
    ("GPU 0 does more than the others", "gpu0_oversubscribed", ""),
    ("copies: pinned memory", "copies_pageable", "pin_memory"),
    ("copies in turns behind events, two buffers", "default_stream", "cudaStreamWaitEvent"),
    ("copies: results fetched seldom", "sync_copies", ""),
    ("memory: fragmentation, peak, what holds it", "memory_pressure", ""),
    ("memory: FSDP, pipeline and model parallelism", "memory_pressure", "Pipeline parallelism"),
    ("memory: limits of programs that share a GPU", "memory_pressure", "memory_limit"),
    ("programs that share a GPU: MPS", "shared_gpu", "nvidia-cuda-mps-control"),
    ("batch size by the head-room of memory", "batch_size_headroom", ""),
    ("SM issue beside SM active", "low_sm_active", "SM issue"), ("few blocks, low occupancy", "small_grids", ""),
    ("gaps: Python, callbacks, logging", "step_gap_host", "py-spy"),
    ("gaps: page faults, long calls of the OS, interrupts", "step_gap_host", "page-faults"),
    ("gaps: checkpoints, evaluations, ends of epochs", "time_outside_steps", ""))


def name(rule: Rule) -> str:
    return f"{rule.origin}-{rule.id}"


@pytest.mark.parametrize(("check", "finding", "words"), CHECKS)
def test_each_check_of_the_guides_has_its_finding_and_its_words(check: str, finding: str, words: str) -> None:
    assert finding in FINDING_IDS and words in source_of_page(finding), check


@pytest.mark.parametrize("rule", RULES, ids=name)
def test_a_record_is_complete(rule: Rule) -> None:
    assert rule.limits or rule.shared_limits
    prefix = "trace_memory" if name(rule) == "trace-memory_pressure" else rule.id
    assert all(own.id.startswith(f"{prefix}.") for own in rule.limits)
    assert all(id_ in LIMITS for id_ in rule.shared_limits)
    assert callable(rule.function("judge")) and callable(rule.function("describe"))
    assert set(rule.needs) <= set({"trace": TRACE_INPUTS, "live": LIVE_INPUTS, "fleet": ()}[rule.origin])
    assert {*rule.follows_from, *rule.same_as} <= TRACE_IDS
    # Causes before their symptoms: what a live rule yields to has been asked before it.
    order = [other.id for other in (FLEET_RULES if rule.origin == "fleet" else LIVE_RULES)]
    assert all(order.index(id_) < order.index(rule.id) for id_ in rule.yields_to)
    if rule.origin != "trace":
        assert not (rule.parts or rule.gaps or rule.events or rule.training_only or rule.silent_for)
        return
    assert not (rule.follows_from or rule.yields_to or rule.same_as or rule.hides_limit or rule.holds_up_job)
    assert set(rule.parts) <= {*PART_BY_ID, *WALL_PARTS} and set(rule.gaps) <= {*GAPS}
    assert bool(rule.parts) == (rule.id not in {"memory_pressure", "memory_growth"})
    assert rule.events or {*rule.ids} & {*NARROWEST_FIRST, *NO_PLACE}, "its place on the timeline; none: NO_PLACE"
    assert rule.events <= {*KINDS}


def test_ids_are_of_one_rule_each_and_have_one_place() -> None:
    for rules in (TRACE_RULES, LIVE_RULES, FLEET_RULES):
        ids = [id_ for rule in rules for id_ in rule.ids]
        assert len(ids) == len(set(ids))
    assert FINDING_IDS == TRACE_IDS | LIVE_IDS | FLEET_IDS
    assert rule_of("memory_pressure", "live").origin == "live"
    assert rule_of("gpu0_oversubscribed", "trace").id == "replica_imbalance"
    assert rule_of("no_such_rule", "live") is None
    assert len(set(NARROWEST_FIRST)) == len(NARROWEST_FIRST) and set(NARROWEST_FIRST) <= TRACE_IDS


def test_every_limit_has_a_unit_and_a_source() -> None:
    assert all(own.unit and len(own.source) > 10 for own in LIMITS.values())
    assert len(LIMITS) == len(SHARED_LIMITS) + sum(len(rule.limits) for rule in RULES) > 100
    assert limit("input_bound.share") == 0.05
    assert source("input_bound.steps", "input_bound.steps") == LIMITS["input_bound.steps"].source
    with pytest.raises(KeyError):
        limit("no.such")
    assert {"dram_bound", "memory_growth", "memory_preallocated", "no_fine_metrics", "unprotected_profiler",
            "unlisted_memory", "unused_gpu"} == EXPLANATIONS


ID = re.compile(r"[a-z0-9]+(?:_[a-z0-9]+)+")


def documents() -> list[Path]:
    """But for the reference, which is made from the code or lists the keys of JSON: `idle_gpus` is one."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    return [ROOT / "README.md", *(page for page in pages if page.parent.name != "reference")]


def test_the_table_of_findings_names_all_rules_and_only_rules() -> None:
    text = (ROOT / "docs" / "findings" / "README.md").read_text(encoding="utf-8")
    trace, live = text.split("## From a trace", 1)[1].split("## Live", 1)
    live, fleet = live.split("## In a cluster", 1)
    assert set(re.findall(r"^\| \[`(\w+)`", fleet, re.M)) == FLEET_IDS
    assert set(re.findall(r"^\| \[`(\w+)`", trace, re.M)) == TRACE_IDS
    assert set(re.findall(r"^\| \[`(\w+)`", live, re.M)) == LIVE_IDS


def test_no_document_and_no_code_misspells_an_id() -> None:
    words = {word for path in documents() for quoted in re.findall(r"`+([^`]+)`+", path.read_text(encoding="utf-8"))
             for word in ID.findall(quoted)}
    assert not {word: near for word in words - FINDING_IDS if (near := get_close_matches(word, FINDING_IDS, 1, 0.9))}
    prefixes = {id_.split(".")[0] for id_ in LIMITS}  # no code names an id that is no rule
    named: dict[str, set[str]] = {}
    for module in sources():
        if module.folder in ("advice", "diagnosis"):
            own = {word for word in ids_in_code(module.nodes) if ID.fullmatch(word)}
            named[module.name] = own - FINDING_IDS - prefixes
    assert not {name: own for name, own in named.items() if own}


def ids_in_code(nodes: Sequence[ast.AST]) -> set[str]:
    """Strings of the code that stand where an id of a finding or a limit is meant."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("Finding", "Abstained"):
                found |= strings(next((k.value for k in node.keywords if k.arg == "id"), *node.args[:1]))
            elif called in ("gpus_explained_by", "gpus_left_out", "found", "rule_of", "was_shown_as"):
                found |= set().union(*(strings(argument) for argument in node.args[:1]))
            elif called in ("limit", "source", "seconds"):
                found |= {text.split(".")[0] for argument in node.args for text in strings(argument) if "." in text}
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "id":
            found |= set().union(*(strings(other) for other in node.comparators))
    return found


def strings(node: ast.AST | None) -> set[str]:
    return {own.value for own in ast.walk(node) if isinstance(own, ast.Constant) and isinstance(own.value, str)
            } if node is not None else set()
