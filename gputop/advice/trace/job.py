"""The facts about the job that the words of a finding need besides the verdict."""

from __future__ import annotations

from msgspec import Struct

from gputop.advice.fix_code import code
from gputop.advice.trace.facts import TraceFacts, once_per_trace
from gputop.advice.trace.inputs import all_allocators
from gputop.analysis.host.host_causes import runs_eagerly
from gputop.analysis.steps.jax_calls import own_ops
from gputop.analysis.steps.phases import PREDICTION
from gputop.analysis.steps.pytorch_ops import FORWARD
from gputop.trace.graph_captures import uses_graphs
from gputop.trace.lookups import PYTHON_FUNCTION, computes_on_cpu, name_mask, optimizer_names

# The styles of the training loop.
KERAS2, KERAS3, CUSTOM, EAGER, JAX, PYTORCH, UNKNOWN = (
    "Keras 2", "Keras 3", "custom", "eager", "JAX", "PyTorch", "unknown")
KERAS = (KERAS2, KERAS3)
# What code for such a loop is called in the pages, before the name of its framework.
_KEYS = {KERAS2: ("keras2", "keras"), KERAS3: ("keras3", "keras"), CUSTOM: ("custom",)}
# Calls of what jax.jit made; of what torch.compile made: TorchDynamo's regions, and AOTAutograd's functions.
_COMPILED = {
    "jax": r"PjitFunction\(",
    "pytorch": (r"Torch-Compiled Region|triton_(?:poi|per|red|tem|for)_fused|"
                r"(?:autograd::engine::evaluate_function: )?CompiledFunction(?:Backward)?$"),
}
_COMPILES = (7, 0)  # the least compute capability that Triton knows
# PyTorch's names of what only training runs.
_BACKWARD = ("backward", "_bwd", "bwd_", "wgrad", "autograd::engine", "optimizer.")
# The gradient of a convolution's input (dgrad) is no proof: a transposed convolution computes the same.
_JAX_BACKWARD = r".*transpose\(jvp"
# Kernels and ops of servers of language models: a key-value cache in pages, and batches that change with each request.
_SERVES = (r"(?i).*(?:paged_?(?:attention|kv)|reshape_and_cache|store_?kv_?cache|kv_?cache_(?:update|store)|"
           r"batch(?:decode|prefill)with|\bvllm(?:::|/)|\bsglang|\bflashinfer(?:::|/)|tensorrt_llm|\blmdeploy)")
_SERVES_WORDS = ("paged", "reshape_and_cache", "kvcache", "kv_cache", "decodewith", "prefillwith", "vllm",
                 "sglang", "flashinfer", "tensorrt_llm", "lmdeploy")
# Of a model's layers, whatever runs it: their kernels, those of cuDNN, and ranges of the user's.
_OF_MODELS_WORDS = ("cudnn", "softmax", "relu", "gelu", "layernorm", "layer_norm", "batchnorm", "batch_norm", "bn_fw",
                    "bn_bw", "dropout", "attention", "fmha", "dgrad", "wgrad", "fprop", "nchw", "nhwc", "embedding",
                    "logits", "cross_entropy", "crossentropy", "train", "epoch", "infer", "token", "backprop")
_OF_MODELS = f"(?i).*(?:{'|'.join(_OF_MODELS_WORDS)})"
_SERVED = "signature_wrapper"  # the function of a SavedModel's signature
_SERVERS = {"SGLang": r".*\bsglang(?:[/:]|_profiler)", "vLLM": r"(?:.*/)?vllm/|.*\bvllm::"}


class Job(Struct, frozen=True):
    basis: str  # what shares are of: "step", "window" or "period"
    period_s: float  # length of one step, or of the window
    framework: str  # tensorflow, jax, pytorch or unknown
    loop: str  # how the training loop is written (:func:`training_loop`)
    gpus: tuple[int, ...]  # those that ran kernels
    compiled: bool = False  # JAX: the user jitted functions; PyTorch: torch.compile compiled a part of the model
    trains: bool | None = None  # False: it only runs a model; None: not known
    graphs: bool = False  # CUDA graphs run, or are recorded
    strategy: str = ""  # how it is distributed: mirrored or multi_worker (tf.distribute), ddp, fsdp; "": not told
    compiles: bool = True  # False: torch.compile, which the job could use, knows none of its GPUs
    server: str = ""  # of language models, vLLM or SGLang, in a job that only runs a model; "": not told
    general: bool = False  # nothing in the trace is of a program that learns: a simulation, or other work
    batch_judged: bool = False  # memory is known: batch_size_headroom says whether a larger batch is worth it

    @property
    def then_larger(self) -> str:
        """A sentence, behind others, that advises more work in each kernel; none where another finding may."""
        more = "run more requests or samples together" if self.trains is False else "raise the batch size"
        return "" if self.batch_judged else f" Then {more} if memory allows."

    @property
    def each(self) -> str:
        """Words for what figures are of: "each step", "the window"."""
        return "the window" if self.basis == "window" else f"each {self.basis}"

    @property
    def keras(self) -> bool:
        """Return whether Keras' fit runs the loop."""
        return self.loop in KERAS

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of code for this job (:mod:`gputop.advice.fix_code`), the closest first."""
        return (*_KEYS.get(self.loop, ()), self.framework)

    @property
    def xla(self) -> str | None:
        """TensorFlow: code for XLA on the whole step, as far as it goes."""
        if len(self.gpus) > 1:  # Keras does not compile whole steps under tf.distribute
            return code("xla_off", "clusters")
        return code("xla_off", *(() if self.gpus or not self.keras else ("keras-cpu",)), *self.keys, "tensorflow")

    @classmethod
    def of(cls, facts: TraceFacts) -> Job:
        calls = _COMPILED.get(facts.framework)
        compiled = calls is not None and bool((name_mask(facts.trace, calls) & ~own_ops(facts.trace)).any())
        return cls(facts.basis, facts.period_s, facts.framework, training_loop(facts), facts.active_numbers,
                   compiled, trains(facts), uses_graphs(facts.trace), _strategy(facts),
                   facts.framework != "pytorch" or compiled or (facts.least_capability or _COMPILES) >= _COMPILES,
                   _server(facts), is_general(facts),
                   trains(facts) is not False and (facts.framework != "jax" or shows_training(facts))
                   and all_allocators(facts) is not None)


@once_per_trace
def trains(facts: TraceFacts) -> bool | None:
    """Return whether the job trains.

    1. Something of a backward pass or an optimizer: yes. A job may also serve its model, as in reinforcement learning.
    2. Without that, something that only servers of language models run: no.
    3. Without either, no for PyTorch, whose names show both: its ops or, within CUDA graphs, its kernels. Of others it
       is not known: XLA's fusions tell nothing.

    On a CPU it is known of PyTorch, where an op with weights runs, and of steps that predict.
    """
    trace, pytorch = facts.trace, facts.framework == "pytorch"
    if (steps := facts.steps) is not None and not shows_training(facts) and (
            steps.times.phase == PREDICTION or _SERVED in steps.times.anchor):
        return False
    if not facts.active and not (pytorch and computes_on_cpu(trace) and name_mask(trace, FORWARD).any()):
        return None
    if shows_training(facts):
        return True if pytorch else None
    return False if pytorch or name_mask(trace, _SERVES, _SERVES_WORDS).any() else None


def is_general(facts: TraceFacts) -> bool:
    """Return whether the program on the GPUs is of no framework and runs nothing that models have. What optimizers are
    called is no proof, as simulations have momentum, too."""
    if facts.framework != "unknown" or facts.trace.format == "xspace":
        return False
    return not (name_mask(facts.trace, _OF_MODELS, _OF_MODELS_WORDS) | name_mask(
        facts.trace, _SERVES, _SERVES_WORDS)).any()


@once_per_trace
def shows_training(facts: TraceFacts) -> bool:
    """Return whether something in the trace is of a backward pass or an optimizer."""
    backward = (name_mask(facts.trace, rf"(?!{PYTHON_FUNCTION})", _BACKWARD)
                if facts.framework in ("pytorch", "unknown") else name_mask(facts.trace, _JAX_BACKWARD))
    return bool((backward | optimizer_names(facts.trace)).any())


def _server(facts: TraceFacts) -> str:
    """The server that runs the model, by Python's functions and its own kernels."""
    if trains(facts) is not False:
        return ""
    return next((server for server, pattern in _SERVERS.items() if name_mask(facts.trace, pattern).any()), "")


def _strategy(facts: TraceFacts) -> str:
    several = len(facts.active_numbers) > 1
    if facts.framework == "tensorflow" and several and (
            facts.waits is not None or name_mask(facts.trace, r"(?:.*/)?replica_\d+/").any()):
        return "multi_worker" if len(facts.trace.hosts) > 1 else "mirrored"
    if facts.framework == "pytorch":
        for strategy, pattern in (("fsdp", r"FSDP::|FullyShardedDataParallel"), ("ddp", r"DistributedDataParallel")):
            if name_mask(facts.trace, pattern).any():
                return strategy
    return ""


def training_loop(facts: TraceFacts) -> str:
    """Style of the training loop, for advice that must be true for it: a trace names no versions. Keras 2 and 3 by the
    names of their step functions; a loop of one's own runs others, or none, and may have Keras 2's marks."""
    if facts.framework in ("jax", "pytorch"):
        return JAX if facts.framework == "jax" else PYTORCH
    functions = facts.analysis.functions
    names = [use.name for use in functions.functions] if functions is not None else []
    anchor = facts.steps.times.anchor if facts.steps is not None else ""
    if any(name.startswith(("one_step_on_", "multi_step_on_")) for name in names):
        return KERAS3
    if any(name.startswith(("train_function", "test_function", "predict_function")) for name in names) or (
            not names and anchor.startswith(("train markers", "test markers")) and facts.framework == "tensorflow"):
        return KERAS2
    if "Keras' step function" in anchor:
        return KERAS3
    if runs_eagerly(facts.analysis.ops):
        return EAGER
    return CUSTOM if names or facts.framework == "tensorflow" else UNKNOWN
