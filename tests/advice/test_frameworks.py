"""Every rule on traces speaks of the job's own framework: no API of another one in a sentence or a snippet."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from gputop.advice.rule import Rule
from gputop.advice.trace.cpus import ThreadContention, ThreadsInterrupted
from gputop.advice.trace.embeddings import EmbeddingDense, TablesAsWhole, TablesInXla
from gputop.advice.trace.fusion import OptimizerOnCpu
from gputop.advice.trace.inputs import MISSING
from gputop.advice.trace.job import CUSTOM, EAGER, JAX, KERAS2, KERAS3, PYTORCH, UNKNOWN, Job
from gputop.advice.trace_rules import TRACE_RULES
from gputop.advice.verdict import Explanation
from gputop.diagnosis.diagnose import analyze_to_facts
from gputop.trace.lookups import detect_framework
from tests.advice.golden_words import JOBS, example, verdicts_of
from tests.advice.trace.traces import STEP, STEPS, analyzed
from tests.trace.build import Builder

C_API = r"cuda(?:Stream|Memcpy|Event|Graph|MemPrefetch)\w*\(|cudnn[A-Z]\w+"
OF_OTHERS = {
    "tensorflow": rf"torch|DataLoader|\bJAX_|\bjax\.|jnp\.|optax|{C_API}",
    "jax": rf"torch|DataLoader|TensorFlow(?! and JAX)|\btf\.(?!data)|TF_|{C_API}",
    "pytorch": rf"TensorFlow|\btf\.|TF_|[kK]eras|jnp\.|\bjax\b|JAX|XLA|optax|{C_API}", "unknown": C_API}
LOOPS = {"tensorflow": (KERAS2, KERAS3, CUSTOM, EAGER), "jax": (JAX,), "pytorch": (PYTORCH,), "unknown": (UNKNOWN,)}
# Verdicts of one framework.
ONLY_OF = {EmbeddingDense: ("pytorch",), OptimizerOnCpu: ("pytorch",), ThreadsInterrupted: ("pytorch",),
           ThreadContention: ("tensorflow", "jax"), TablesAsWhole: ("tensorflow",), TablesInXla: ("jax",)}
STRATEGY = {"tensorflow": "mirrored", "pytorch": "ddp"}
# Names that two frameworks have: JAX reads this variable, too.
SHARED = {("managed_memory", "jax"): "TF_FORCE_UNIFIED_MEMORY"}
AT = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3>>(int)"


def jobs(framework: str) -> Iterator[Job]:
    for loop in LOOPS[framework]:
        for compiled, trains, graphs, gpus in ((False, None, False, (0,)), (True, True, False, (0, 1)),
                                               (False, False, True, (0,)), (True, False, True, (0, 1))):
            yield Job("step", 0.1, framework, loop, gpus, compiled, trains, graphs, STRATEGY.get(framework, ""))


def examples(rule: Rule, framework: str) -> Iterator[Any]:
    """Verdicts of a rule with each choice that its sentences make, one at a time."""
    for kind, style in itertools.product(verdicts_of(rule), JOBS):
        if framework not in ONLY_OF.get(kind, (framework,)):
            continue
        base = example(kind, style)
        yield base
        yield from variants(base, rule)


def variants(base: Any, rule: Rule) -> Iterator[Any]:
    for field in base.__struct_fields__:
        value = getattr(base, field)
        others = {"worst": ("h2d", "d2h", "d2d"), "way": ("h2d", "d2h", "sync"), "kind": ("line", "checkpoint"),
                  "pool": ("global", "gpu_private"), "id": rule.also}.get(field, ())
        others += (not value,) if isinstance(value, bool) else (0.0, 0.9) if isinstance(value, float) else ()
        for other in (*others, *(variants(value, rule) if isinstance(value, msgspec.Struct) else ())):
            yield msgspec.structs.replace(base, **{field: other})


def words(rule: Rule, verdict: Any, job: Job) -> Explanation | None:
    try:
        described: Explanation = rule.function("describe")(verdict, job)
    except ZeroDivisionError:  # a value that no verdict has
        return None
    return described


@pytest.mark.parametrize("rule", TRACE_RULES, ids=lambda rule: rule.id)
def test_advice_is_for_the_framework_of_the_job(rule: Rule) -> None:
    # No framework allocates managed memory by itself: the program calls CUDA.
    frameworks = [name for name in OF_OTHERS if name not in rule.silent_for
                  and (rule.id, name) != ("managed_memory", "unknown")]
    for framework, verdict, job in ((name, *case) for name in frameworks
                                    for case in itertools.product(examples(rule, name), jobs(name))):
        if (own := words(rule, verdict, job)) is None:
            continue
        text = "\n".join((own.title, own.why, own.action, own.gain, own.snippet or ""))
        text = text.replace(SHARED.get((rule.id, framework), "\0"), "")
        found = re.search(OF_OTHERS[framework], text)
        assert found is None, f"{framework}: {found[0]} in: {text}"


def kernels(name: str) -> Builder:
    """A trace of kernels alone, as an Nsight report without the framework's marks."""
    b = Builder(format="nsys")
    for i in range(STEPS):
        for k in range(40):
            b.run(0, i * STEP + 300 * k, 200, name)
    return b


@pytest.mark.parametrize(("name", "framework"), [
    (AT, "pytorch"), ("_ZN2at6native29vectorized_elementwise_kernelILi4E", "pytorch"),
    ("void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, float, 8, false>", "pytorch"),
    ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>::Params)", "pytorch"),
    ("triton_poi_fused_gelu_6", "pytorch"), ("triton_softmax_3", "unknown"),
    ("void tensorflow::BiasNHWCKernel<float>(int)", "tensorflow"), ("Mul_GPU_DT_HALF_DT_HALF_kernel", "tensorflow"),
    ("ampere_sgemm_128x64_nn", "unknown"), ("loop_add_fusion_3", "unknown")])
def test_kernels_tell_the_framework(name: str, framework: str) -> None:
    assert detect_framework(kernels(name).build()) == framework


def test_a_pytorch_report_wants_nothing_of_tensorflow() -> None:
    facts = analyze_to_facts(kernels(AT).build())
    wanted = {need: MISSING[need](facts) for rule in TRACE_RULES if "pytorch" not in rule.silent_for
              for need in rule.needs}
    abstained = [own.missing for own in analyzed(kernels(AT)).abstained]
    assert abstained and any(wanted.values())
    for text in (*wanted.values(), *abstained):
        assert text is None or re.search(OF_OTHERS["pytorch"], text) is None, text
