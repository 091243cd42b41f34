"""The tree of phases, layers and ops, filled op by op, and the table's rows made from it."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from gputop.analysis.layers.scopes import INPUT, PHASES, scope_of
from gputop.analysis.results import LayerRow, SourceLine
from gputop.trace.model import HloOp

NO_CALL = "launched by no op"
NO_OP, NO_PROGRAM, NO_SCOPE = "no op named", "XLA ops without their program", "no layer named"
LOCAL_COPIES = "copies on the GPU, no op named"
AFTER, ITSELF, EXECUTOR = "after the last kernel", "ops of its own", "executor without an op"
EAGER, COMPILED, NO_OP_RUNS = "run eagerly", "compiled functions", "no op runs"
REASONS = {
    INPUT: ("Ops that make the next batch in the training loop's own thread (num_workers=0): reading, transforms, and "
            "collating. They are part of the input wait."),
    "other ops": ("The names of these ops show no phase. They are mostly counters and metrics of the training loop, "
                  "work on the next batch, or the steps of an environment."),
    NO_OP: "These kernels have no op name, so the trace does not show where they belong.",
    LOCAL_COPIES: ("Copies within GPU memory, memsets, and copies of unknown direction that have no op name. The "
                   "framework makes such copies, for example for program arguments."),
    NO_PROGRAM: "The capture does not include the compiled program of these ops, which names their layers.",
    NO_SCOPE: "XLA created these ops itself (layouts, copies, constants), so they have no layer name.",
    NO_CALL: ("The launches of these kernels are outside PyTorch ops or not in the trace, for example because a CUDA "
              "graph launched them."),
    AFTER: "Idle time after the last recorded kernel.",
    EAGER: ("Ops that Python runs one by one have no layer name. Put the step into a tf.function (without run_eagerly) "
            "to see the layers."),
    COMPILED: ("The trace includes the times of these XLA functions (jit_compile) but not their ops. TensorFlow 2.21 "
               "and newer record the ops, and so does a run without jit_compile."),
    EXECUTOR: "Time during which TensorFlow or XLA executes a function and the trace shows none of its ops.",
    NO_OP_RUNS: "Time during which the CPU runs no op of the model: input, Python, or the time between two ops.",
}
_SWITCHED_OFF = "a capture with XLA_FLAGS=--xla_gpu_enable_command_buffer= disables them and shows the ops."
# Why kernels name no op, where XLA's do: as the trace says, and where it says nothing.
IN_GRAPHS = {NO_OP: f"XLA runs these kernels in CUDA graphs, which hide their op names: {_SWITCHED_OFF}"}
MAYBE_IN_GRAPHS = {NO_OP: f"These kernels have no op name. If XLA runs them in CUDA graphs, {_SWITCHED_OFF}"}
# Where ops stand for layers: how to have the layers named, by what wrote the trace.
NO_LAYERS = {
    "jax": ("The program has no layer names. Put jax.named_scope around parts of the model to see them here (Flax "
            "Linen modules do this, NNX modules do not). Until then, see the source lines."),
    "pytorch": ("The trace has no module names. Use torch.profiler.profile(with_stack=True, with_modules=True) to "
                "record modules, or torch.profiler.record_function to name parts of the model."),
    "nsys": "The trace has no module names. Use torch.cuda.nvtx.range to name parts of the model.",
}
_ORDER = (INPUT, *PHASES, "collectives", "copies", LOCAL_COPIES, NO_SCOPE, NO_PROGRAM, NO_OP, NO_CALL, EAGER,
          COMPILED, AFTER, EXECUTOR, NO_OP_RUNS)
_FEW_LAYERS = 0.1  # share of the forward pass in named layers: with less there are none to speak of
_FOLDED_BELOW = 0.005  # share of the whole: one row for all of them
_MAX_DEPTH, _MAX_ROWS, _MAX_SOURCES = 12, 400, 30


class ScopeSums(Struct):
    """Sums of a scope and all below it. ``known_ns`` is the device time of the ops whose FLOPs are known, ``own`` what
    belongs to no part of it: an op whose name is also a scope of others."""

    device_ns: float = 0.0
    wait_ns: float = 0.0
    kernels: float = 0.0
    flops: float = 0.0
    known_ns: float = 0.0
    bytes: float = 0.0
    children: dict[str, ScopeSums] = field(default_factory=dict)
    sources: dict[str, float] = field(default_factory=dict)
    own: ScopeSums | None = None

    def ran(self, op: HloOp, times: float) -> None:
        """Take over the bytes and FLOPs of an op that ran so many times, and nothing else in this time."""
        self.bytes = times * (op.bytes or 0)
        if op.flops is not None:
            self.known_ns, self.flops = self.device_ns, times * sum(number for _, number in op.flops)

    def add(self, other: ScopeSums) -> None:
        self.device_ns += other.device_ns
        self.wait_ns += other.wait_ns
        self.kernels += other.kernels
        self.flops += other.flops
        self.known_ns += other.known_ns
        self.bytes += other.bytes


def place_of(name: str, has_program: bool, training: bool | None) -> tuple[str, tuple[str, ...]]:
    """Root of the table and path below it."""
    if not name and not has_program:
        return NO_OP, ()
    if not has_program and ":" not in name:
        return NO_PROGRAM, (name,)
    scope = scope_of(name, training)
    return (scope.phase, scope.path) if scope.path else (NO_SCOPE, (name,) if name else ())


def put(root: ScopeSums, phase: str, path: tuple[str, ...], node: ScopeSums, source: str = "") -> None:
    """Add an op's figures to all scopes around it, the ``phase`` first."""
    scope = root
    scope.add(node)
    for part in (phase, *path[:_MAX_DEPTH]):
        scope = scope.children.setdefault(part, ScopeSums())
        scope.add(node)
    scope.own = scope.own or ScopeSums()
    scope.own.add(node)
    if source:
        for whose in (root, scope):
            whose.sources[source] = whose.sources.get(source, 0.0) + node.device_ns


def no_layers(root: ScopeSums, how: str) -> dict[str, str]:
    """Argument of :func:`table_rows`: ``how``, a key of :data:`NO_LAYERS`, where ops of the forward pass are in no
    layer."""
    forward = root.children.get("forward")
    if forward is None or not how:
        return {}
    inside = sum(child.device_ns + child.wait_ns for child in forward.children.values() if child.children)
    return {"forward": NO_LAYERS[how]} if inside < _FEW_LAYERS * (forward.device_ns + forward.wait_ns) else {}


def _parts(node: ScopeSums, itself: str) -> list[tuple[str, ScopeSums]]:
    """The scopes in a scope, by falling time; with its own ops, as ``itself``, where it has both."""
    parts = dict(node.children)
    if parts and node.own is not None:
        parts[itself] = node.own
    return sorted(parts.items(), key=lambda item: (-item[1].device_ns - item[1].wait_ns, item[0]))


def table_rows(root: ScopeSums, unit: int, reasons: Mapping[str, str]) -> list[LayerRow]:
    """The tree in order, parents before children, siblings by falling time; what costs little is one row. ``reasons``:
    in place of those of :data:`REASONS`."""
    rows: list[LayerRow] = []
    whole = root.device_ns + root.wait_ns
    least = _FOLDED_BELOW * whole

    def row(name: str, parent: int | None, node: ScopeSums) -> None:
        rows.append(LayerRow(
            name=name, parent=parent, device_s=node.device_ns / unit / 1e9, wait_s=node.wait_ns / unit / 1e9,
            share=(node.device_ns + node.wait_ns) / whole if whole else 0.0, kernels=node.kernels / unit,
            flops=node.flops / unit if node.known_ns else None,
            flops_known=node.known_ns / node.device_ns if node.device_ns else 0.0,
            bytes=node.bytes / unit if node.bytes else None,
            source=max(node.sources, key=lambda s: node.sources[s], default=""),
            reason=reasons.get(name, REASONS.get(name, "")) if parent is None else ""))

    def visit(name: str, node: ScopeSums, parent: int | None) -> None:
        while len(node.children) == 1:  # a scope that holds nothing but one other
            (inner, child), = node.children.items()
            if parent is None or child.kernels != node.kernels or child.wait_ns != node.wait_ns:
                break
            name, node = f"{name}/{inner}", child
        row(name, parent, node)
        below(node, len(rows) - 1)

    def below(node: ScopeSums, parent: int) -> None:
        children = _parts(node, ITSELF if rows[parent].parent is not None else NO_OP)
        shown = [(name, child) for name, child in children if child.device_ns + child.wait_ns >= least]
        if len(rows) + len(shown) > _MAX_ROWS:
            shown = []
        for name, child in shown:
            visit(name, child, parent)
        others = children[len(shown):]
        if shown and len(others) == 1:
            visit(*others.pop(), parent)
        if shown and others:
            rest = ScopeSums()
            for _, child in others:
                rest.add(child)
            row(f"{len(others)} more", parent, rest)

    for name in _ORDER:
        if name in root.children:
            visit(name, root.children[name], None)
    return rows


def source_lines(root: ScopeSums, unit: int) -> tuple[SourceLine, ...] | None:
    """Lines of source by device time; None where the programs name none."""
    if not root.sources:
        return None
    lines = sorted(root.sources.items(), key=lambda item: (-item[1], item[0]))
    return tuple(SourceLine(line, time / unit / 1e9, time / root.device_ns if root.device_ns else 0.0)
                 for line, time in lines[:_MAX_SOURCES])
