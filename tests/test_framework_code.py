"""The code of the docs and of fixes that takes something from a framework, each block in a process with TensorFlow."""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path

import pytest

from gputop.advice.fix_code import code
from gputop.cli import main
from tests.code_blocks import FRAMEWORKS, ROOT, Block, code_blocks, parameters
from tests.forked_processes import start

pytestmark = pytest.mark.tensorflow
DOCUMENTS = sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "findings")
PAGES = sorted((ROOT / "gputop" / "advice" / "pages").glob("*.md"))
_MODULES = {"tf": "tensorflow", "keras": "keras", "torch": "torch", "jax": "jax", "gc": "gc"}
_LOOKS_UP = """
import importlib
for module, *attributes in {names!r}:
    value = importlib.import_module(module)
    for i, attribute in enumerate(attributes, 1):
        try:
            value = getattr(value, attribute)
        except AttributeError:
            value = importlib.import_module(".".join([module, *attributes[:i]]))
"""


def _run(code: str, folder: Path) -> None:
    """Run code in a process of its own that works in a folder."""
    script = folder / "code.py"
    script.write_text(f"import os; os.chdir({str(folder)!r})\n{code}")
    process = start(script, [], dict(os.environ))
    with process.stdin, process.stdout, process.stderr:
        process.stdin.close()
        errors = process.stderr.read()
        assert process.wait() == 0, errors


@pytest.mark.parametrize("block", [p for p in parameters(code_blocks(DOCUMENTS), "python")
                                   if FRAMEWORKS.search(p.values[0].text)])
def test_a_block_of_the_docs_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for framework in FRAMEWORKS.findall(block.text):
        if importlib.util.find_spec(framework) is None:
            pytest.skip(f"{framework} is not installed")
    _run(block.text, tmp_path)
    if "export_chrome_trace" in block.text:
        monkeypatch.chdir(tmp_path)
        assert main(["analyze", "trace.json.gz"]) == 0


def test_the_code_of_fixes_names_what_exists(tmp_path: Path) -> None:
    """It is a part of a job's own code: it is parsed, and what it takes from a framework is there."""
    trees = [ast.parse(block.text, str(block.document)) for block in code_blocks(PAGES) if block.language == "python"]
    attributes = {ast.unparse(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = [(module, *name.split(".")[1:]) for name in sorted(attributes) if "(" not in name
             for module in [_MODULES.get(name.partition(".")[0])] if module and importlib.util.find_spec(module)]
    assert len(trees) > 200 and len(names) > 50
    _run(_LOOKS_UP.format(names=names), tmp_path)


def test_the_fix_for_a_keras_model_without_xla_names_the_layer_that_turns_it_off(tmp_path: Path) -> None:
    """What gputop advises changes something: without the layer that it names Keras compiles, with it never."""
    listing = (code("xla_off", "keras") or "").splitlines()[1]
    _run(f"""
import contextlib, io, keras

class Odd(keras.layers.Dense):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.supports_jit = False

for layers, names, compiles in (([keras.layers.Dense(2), Odd(2, name="odd")], "['odd']", False),
                                ([keras.layers.Dense(2)], "[]", True)):
    model = keras.Sequential([keras.Input((3,)), *layers])
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec({listing!r})
    assert said.getvalue().strip() == names, said.getvalue()
    model.compile("sgd", "mse", jit_compile=True)
    assert model.jit_compile is compiles, (names, model.jit_compile)
""", tmp_path)
