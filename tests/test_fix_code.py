"""The code of fixes: where it stands, how rules name it, and that it runs in jobs of the frameworks it is for."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gputop.advice import finding_pages
from gputop.advice.fix_code import _BLOCK, _Block, as_shown, code, joined, source_of_page
from gputop.advice.rule import Limit
from gputop.advice.trace.job import Job
from tests.environments import JAX, PYTORCH, TENSORFLOW_215, environment

ADVICE = Path(__file__).parents[1] / "gputop" / "advice"
PAGES = sorted((ADVICE / "pages").glob("*.md"))
RUNNER = Path(__file__).with_name("fix_jobs.py")
# Not without a GPU, or not with one process; what they name is looked up all the same (test_framework_code).
_NEEDS = re.compile(
    r"torch\.cuda\.|pin_memory\(\)|[(]['\"]cuda['\"], non_blocking|host\.copy_|Join\(|fully_shard|GPU:0|"
    r"DistributedDataParallel|loss_parallel|list_physical_devices|'cudnn'|"
    r"(?:cross_device_op|communication_option)s=|make_mesh\(\(8")
# What stands for arguments that the job has already.
_GIVEN = {"grain.DataLoader(...,": "grain.DataLoader(data_source=[1, 2], sampler=grain.SequentialSampler(2),",
          "DataLoader(...,": "DataLoader(dataset,", "model.fit(...,": "model.fit(x, y, validation_data=(x, y),",
          "model.compile(...,": "model.compile('sgd', 'mse',",
          "    ...\nmodel.fit": "    def __len__(self): return 1\n    def __getitem__(self, i): return x, y\nmodel.fit",
          "use_multiprocessing=True": "use_multiprocessing=False"}


def blocks() -> list[tuple[str, _Block]]:
    return [(page.stem, _Block.of(found)) for page in PAGES for found in _BLOCK.finditer(page.read_text())
            if found[1] == "python"]


def framework_of(block: _Block) -> str:
    text = block.filled({})
    if any("keras2" in key for key in block.keys):
        return "keras2"
    if "torchscript" in block.keys:
        return "pytorch"
    if re.search(r"\btf\.|keras|model\.(?:fit|compile|predict)|\bds\b|strategy|compute_loss", text):
        return "tensorflow"
    of_jax = r"jax|jnp|\bjit\b|ocp\.|losses\.append\(loss\)|PartitionSpec|(?:train|run)_step|grain|to_host_as"
    return "jax" if re.search(of_jax, text) else "pytorch"


def run_in(python: str, framework: str) -> None:
    codes = {}
    for page, block in blocks():
        text = block.filled({})
        if framework_of(block) == framework and not _NEEDS.search(text):
            for words, given in _GIVEN.items():
                text = text.replace(words, given)
            codes[f"{page}: {' '.join(sorted(block.keys))} {text.splitlines()[0]}"] = text
    assert len(codes) >= 2
    ran = subprocess.run([python, str(RUNNER), "tensorflow" if framework == "keras2" else framework],
                         input=json.dumps(codes), capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    errors = json.loads(ran.stdout.splitlines()[-1])
    missing = ("No module named", "name 'grain'", "name 'optax'", "name 'ocp'", "name 'optimizer'")
    failed = [f"{name}: {error}" for name, error in errors.items() if not any(word in error for word in missing)]
    assert not failed, "\n".join(failed)


@pytest.mark.tensorflow
def test_the_code_for_tensorflow_runs() -> None:
    run_in(sys.executable, "tensorflow")


@pytest.mark.parametrize(("framework", "recipe"), [("keras2", TENSORFLOW_215), ("jax", JAX), ("pytorch", PYTORCH)])
def test_the_code_runs_in_the_framework_that_it_is_for(framework: str, recipe: object) -> None:
    run_in(str(environment(recipe).python), framework)


def test_each_key_that_a_rule_names_is_in_its_page() -> None:
    """As far as both are literal: the words of the rules (test_words) hold the others."""
    checked = 0
    for file in sorted(ADVICE.rglob("*.py")):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "code" and all(
                    isinstance(argument, ast.Constant) for argument in call.args[:2]):
                page, key = (argument.value for argument in call.args[:2])
                assert code(page, key), (file.name, page, key)
                checked += 1
    assert checked > 40


def test_no_rule_holds_code_of_a_page() -> None:
    lines = {line.strip() for path in PAGES for found in _BLOCK.finditer(source_of_page(path.stem))
             for line in found[3].splitlines() if len(line.strip()) > 25}
    for file in sorted(ADVICE.rglob("*.py")):
        text = [node.value for node in ast.walk(ast.parse(file.read_text()))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        assert not [line for line in lines for words in text if line in words], file.name


def test_no_two_pages_hold_the_same_code() -> None:
    held: dict[str, str] = {}
    for page in PAGES:
        for found in _BLOCK.finditer(page.read_text()):
            if found[2] and len(found[3].splitlines()) > 1:
                assert held.setdefault(found[3], page.stem) == page.stem, found[3]


def test_values_are_filled_in_and_keys_are_not_shown() -> None:
    assert code("threads_unused", "nothing", "pytorch", THREADS=3) == (
        "torch.set_num_threads(3)  # at the start of the script\n# or: OMP_NUM_THREADS=3 torchrun …")
    assert code("threads_unused", "nothing") is None and joined(None, "a", "", "b") == "a\nb" and joined(None) is None
    shown = as_shown(source_of_page("threads_unused"))
    assert "set_num_threads(8)" in shown and "THREADS=8" not in shown.partition("\n# or")[0]
    assert all(found[2] == "" for page in PAGES for found in _BLOCK.finditer(as_shown(page.read_text())))
    assert code("step_gap_host", "function", FUNCTION="WHERE", WHERE="a.py:1") == (
        "if step % 100 == 0:\n    WHERE(...)  # a.py:1"), "a value is no name"
    breaks = code("elementwise_unfused", "graph-breaks") or ""
    assert (code("launch_bound", "pytorch-compiled") or "").startswith(f"{breaks}\nmodel = torch.compile")


@pytest.mark.parametrize(("loop", "framework", "gpus", "words"), [
    ("Keras 3", "tensorflow", 1, "supports_jit"), ("Keras 3", "tensorflow", 0, "model.compile(optimizer, loss, jit"),
    ("custom", "tensorflow", 1, "@tf.function(jit_compile=True)"), ("Keras 2", "tensorflow", 4, "tf_xla_auto_jit")])
def test_xla_is_advised_for_the_loop_of_the_job(loop: str, framework: str, gpus: int, words: str) -> None:
    assert words in (Job("step", 0.1, framework, loop, tuple(range(gpus))).xla or "")


@pytest.mark.parametrize(("value", "unit", "shown"), [
    (0.005, "ratio", "0.5%"), (1.1, "ratio", "1.1×"), (50e-6, "s", "50 µs"), (0.0123, "s", "12.3 ms"),
    (90, "s", "90 s"), (900, "s", "15 min"), (1 << 28, "bytes", "256 MiB"), (25e6, "bytes", "25 MB"),
    (1234, "bytes", "1234 B"), (5e6, "B/s", "5 MB/s"), (3, "count", "3"), (83, "°C", "83 °C")])
def test_a_page_shows_thresholds_in_units_of_people(value: float, unit: str, shown: str) -> None:
    limit = Limit("input_bound.share", value, unit, "a guide")
    assert f"| {shown} | a guide |" in finding_pages.page("input_bound", lambda id_: limit)
