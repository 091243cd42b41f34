"""What the documents say holds: links, files, names, code blocks, install lines, pictures, figures."""

from __future__ import annotations

import ast
import gzip
import html
import importlib
import importlib.util
import json
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args
from unittest.mock import MagicMock

import pytest

from gputop.cli import main
from gputop.commands.arguments import parse, parser
from gputop.comparison.figures import Verdict
from gputop.core.own_program import PACKAGES
from gputop.doctor.node import GRANTS, manifest_lines
from gputop.export.openmetrics import families
from gputop.rules.toml_places import parse_toml
from tests import tool_modules
from tests.code_blocks import FRAMEWORKS, Block, code_blocks, parameters
from tests.source_trees import sources

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "gputop/SKILL.md")),
                    *(ROOT / "docs").rglob("*.md")])
FRAGMENTS = ROOT / "docs" / "findings"  # of a job's own code: tests/test_framework_code.py
_BLOCKS = [block for block in code_blocks(DOCUMENTS) if block.document.parent != FRAGMENTS]
PROJECT: dict[str, Any] = parse_toml((ROOT / "pyproject.toml").read_text())["project"]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for document, target in ((page, to) for page in DOCUMENTS for to in re.findall(r"\]\(([^)]+)\)", page.read_text())):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{_name(document)} links to {target}"
        assert not anchor or anchor in _anchors(file), f"{_name(document)} links to {target}"
        assert "--" not in anchor, f"{_name(document)}: a sign in a heading; the site makes {target} another way"


def test_files_that_are_named_exist() -> None:
    absent = [(_name(document), path) for document in DOCUMENTS for path in re.findall(
        r"`((?:gputop|tests|benchmarks|screenshots|docs)/[\w./-]+)`", document.read_text())
              if "NAME" not in path and not (ROOT / path).exists()]
    assert not absent


def test_modules_and_names_that_are_named_exist() -> None:
    for document, dotted in ((page, name) for page in DOCUMENTS for name in
                             set(re.findall(r"`(gputop(?:\.\w+)+)(?![\w/.-])", page.read_text()))):
        parts = dotted.split(".")
        if parts[-1] in ("json", "toml"):  # a file
            continue
        for length in range(len(parts), 0, -1):
            try:
                value = importlib.import_module(".".join(parts[:length]))
            except ModuleNotFoundError:
                continue
            for attribute in parts[length:]:
                assert hasattr(value, attribute), f"{_name(document)} names {dotted}"
                value = getattr(value, attribute)
            break


# -- code blocks ------------------------------------------------------------------------------------


def _of(*languages: str) -> list[Any]:
    return parameters(_BLOCKS, *languages)


def test_no_code_block_is_left_out() -> None:
    """A block of another language needs a test here, or one that says where its own is."""
    languages = {block.language for block in code_blocks(DOCUMENTS)}
    assert languages <= {"c", "promql", "python", "sh", "sql", "text", "toml", "yaml"}


@pytest.mark.parametrize("block", [p for p in _of("python") if not FRAMEWORKS.search(p.values[0].text)
                                   and p.values[0].document.name != "convert.md"])  # which has a test of its own
def test_python_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                     capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT if "tests/data" in block.text else tmp_path)
    exec(compile(block.text, block.document.name, "exec"), {"__name__": "page"})
    assert "for finding in" not in block.text or "input_bound" in capsys.readouterr().out


def test_trackers_get_the_step_and_the_savings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins take the calls: mlflow-skinny 3.17 and wandb 0.31 took them as well."""
    page = [block.text for block in _BLOCKS if block.document.name == "convert.md" and block.language == "python"]
    logged: list[dict[str, float]] = []
    tracker = MagicMock()
    tracker.init.return_value.__enter__.return_value.log = tracker.log_metrics = logged.append
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, tracker)
    shutil.copy(ROOT / "tests" / "data" / "keras3_slow_input.xplane.pb.gz", tmp_path / "n01.xplane.pb.gz")
    text = "\n".join(page).replace("gputop-traces", str(tmp_path / "n01.xplane.pb.gz"))
    exec(compile(text.replace('"gputop",', 'sys.executable, "-m", "gputop",'), "convert.md", "exec"), {"sys": sys})
    assert len(page) == 2 and len(logged) == 2 and logged[0] == logged[1]
    assert logged[0]["gputop/step_s"] > 0 and 0 < logged[0]["gputop/saves/input_bound"] < 1
    assert all(isinstance(value, float) for value in logged[0].values())


@pytest.mark.parametrize("block", _of("toml"))
def test_toml_is_accepted(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the commands to which one gives it."""
    assert parse_toml(block.text)
    if "[project." in block.text:  # of a package
        return
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("rules.toml").write_text(block.text)
    trace = str(ROOT / "tests" / "data" / "keras3_slow_input.xplane.pb.gz")
    assert main(["rules", "check", "rules.toml"]) == 0
    assert main(["analyze", trace, "--rules", "rules.toml"]) == 0


_CALL = re.compile(r"(?:^|[\s(;/])(?<!-t )gputop(?= |$)((?:(?!  )(?:'[^']*'|\"[^\"]*\"|[^'\"|&;#>\n)]))*)", re.M)
_NO_CALL = re.compile(r"^ *(?:git|pip|ln|rm|podman|docker|curl|make|export GPUTOP)\b.*$|^#SBATCH.*$", re.M)


def _command_lines(text: str) -> Iterator[str]:
    """Calls of gputop, without pipes and redirections, and without what explains them."""
    text = _NO_CALL.sub("", text)
    inner = re.findall(r"\$\(([^()]*)\)", text)
    for found in _CALL.finditer(re.sub(r"\$\([^()]*\)", "4711", text) + "\n" + "\n".join(inner)):
        yield f"gputop {found[1].strip()}".replace("PID", "4711").replace("$SLURM_JOB_ID", "4711").strip()


def _understood(text: str) -> int:
    commands = list(_command_lines(text))
    for command in commands:
        parse(shlex.split(command)[1:])
    return len(commands)


@pytest.mark.parametrize("block", _of("sh"))
def test_command_lines_are_understood(block: Block) -> None:
    _understood(block.text)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"^make ([\w-]+)", block.text, re.M)) <= targets
    assert all((ROOT / name).exists() for name in re.findall(r"^(?:podman|docker) build -f (\S+)", block.text, re.M))


def test_the_page_on_conversion_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    monkeypatch.chdir(tmp_path)
    data, run = ROOT / "tests" / "data", tmp_path / "gputop-traces" / "plugins" / "profile" / "run"
    run.mkdir(parents=True)
    (run / "n01.xplane.pb").write_bytes(gzip.decompress((data / "keras3_slow_input.xplane.pb.gz").read_bytes()))
    shutil.copy(data / "v0_1_0" / "demo.gputop", "night.rec")
    page = [block for block in _BLOCKS if block.document.name == "convert.md"]
    commands = [command for block in page if block.language == "sh" for command in _command_lines(block.text)]
    assert len(commands) == 4 and all(main(shlex.split(command)[1:]) == 0 for command in commands)
    of_sqlite, of_parquet = (block.text for block in page if block.language == "sql")
    with sqlite3.connect("trace.sqlite") as tables:
        tables.execute(of_sqlite).fetchall()
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    duckdb.connect().execute(of_parquet).fetchall()


# -- what is installed ------------------------------------------------------------------------------


def test_the_packages_of_messages_are_the_project_s_extras() -> None:
    extras = PROJECT["optional-dependencies"]
    for extra, package in PACKAGES.items():
        (requirement,) = extras[extra]
        name, limit = re.fullmatch(r"([\w-]+)[^<]*(<\d+)?", requirement).groups()  # type: ignore[union-attr]
        assert package.strip("'") == name + (limit or "")


def test_each_install_line_can_be_had() -> None:
    """No index has gputop's distribution: a line names a folder, or packages that an index has."""
    known = {re.split(r"[<>=;\[ ]", requirement)[0] for requirements in
             (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()) for requirement in requirements}
    texts = [*DOCUMENTS, ROOT / "Containerfile", *(ROOT / "gputop").rglob("*.py")]
    lines = 0
    for path in texts:
        text = re.sub(r"\s*\n\s*|\\|'\"'\"'", lambda found: " " if "\n" in found[0] else "", path.read_text())
        for words in re.findall(r"(?:pip|pipx|uv tool) install ((?:-\S+ )*(?:'[^']*'|[^\s'`\")]+))", text):
            if "{" in words:  # of gputop/core/own_program.py: its packages are held above
                continue
            (wanted,) = (word for word in shlex.split(words.rstrip(",;:")) if not word.startswith("-"))
            name, _, extras = wanted.rstrip("]").partition("[")
            lines += 1
            if name == PROJECT["name"]:
                assert "--no-index" in words, "no index has it"
            elif re.fullmatch(r"\.|/src|\./[\w-]+", name):
                assert set(filter(None, extras.split(","))) <= PROJECT["optional-dependencies"].keys()
            else:
                assert re.split("[<>=]", name)[0] in known and not extras, f"{_name(path)}: pip install {words}"
    assert lines > 15


def _extra_rows() -> list[tuple[str, str]]:
    return re.findall(r"^\| `\[(\w+)\]` \| (.*) \|$", (ROOT / "docs" / "start" / "install.md").read_text(), re.M)


def test_the_calls_of_a_block_are_found() -> None:
    text = ("a $(gputop run --print-path) b\n(gputop doctor) &\n/v/bin/gputop config > x  # y\ngputop stacks PID\n"
            "podman build -t gputop .\ngputop --on-dip 'sm<0.6*median'   # z\nkubectl x -- gputop stacks\ngputop\n")
    assert sorted(_command_lines(text)) == sorted([
        "gputop doctor", "gputop config", "gputop stacks 4711", "gputop --on-dip 'sm<0.6*median'", "gputop stacks",
        "gputop", "gputop run --print-path"])
    assert sum(_understood(block.text) for block in _BLOCKS if block.document.name == "first-capture.md") == 7
    with pytest.raises(SystemExit):
        _understood("gputop analyse x")


@pytest.mark.parametrize("block", parameters(code_blocks(DOCUMENTS), "sh"))
def test_a_shell_reads_it(block: Block) -> None:
    shell = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True, check=False)
    assert shell.returncode == 0, shell.stderr


@pytest.mark.parametrize("block", _of("yaml"))
def test_yaml_is_what_its_reader_expects(block: Block) -> None:
    """Workflows, manifests and files of Prometheus: their form, and the calls of gputop in them."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    document = yaml.safe_load(block.text)
    for line in re.findall(r"^.*(?:bin/gputop |\$\(gputop ).*$", block.text, re.M):
        assert _understood(re.sub(r"^\s*(?:- )?", "", line))
    for container in (container for spec in _specs(document) for container in spec["containers"]):
        if "gputop" in container["image"] and "command" not in container:
            parse(container["args"])
        assert {m["name"] for m in container.get("volumeMounts", ())} <= _volumes(document)
    for rule in (rule for group in document.get("groups", ()) for rule in group["rules"]):
        _metrics_exist(rule["expr"])
        assert rule["alert"] and rule["annotations"]["summary"]


def _specs(node: Any) -> Iterator[dict[str, Any]]:
    """The specifications of pods in a manifest."""
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        for value in node.values():
            yield from _specs(value)


def _volumes(document: dict[str, Any]) -> set[str]:
    return {volume["name"] for spec in _specs(document) for volume in spec.get("volumes", ())}


def test_the_debugging_pod_has_every_right_that_doctor_asks_for() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    (pod,) = (document for block in _of("yaml") if block.values[0].document.name == "kubernetes.md"
              and (document := yaml.safe_load(block.values[0].text)).get("kind") == "Pod")
    spec = yaml.safe_load(manifest_lines(GRANTS))["spec"]
    (container,), (of_page,) = spec.pop("containers"), pod["spec"]["containers"]
    assert {name: pod["spec"][name] for name in spec} == spec
    assert {name: of_page[name] for name in container} == container
    assert pod["apiVersion"] == "v1" and set(container) == {"name", "env", "securityContext", "volumeMounts"}


def _metrics_exist(expression: str) -> None:
    assert set(re.findall(r"gputop_\w+", expression)) <= {family.name for family in families()}, expression


@pytest.mark.parametrize("block", _of("promql"))
def test_queries_name_metrics_that_exist(block: Block) -> None:
    _metrics_exist(block.text)
    for query in block.text.splitlines() if shutil.which("promtool") else ():
        rules = {"groups": [{"name": "page", "rules": [{"record": "page", "expr": query}]}]}
        checked = subprocess.run(["promtool", "check", "rules", "/dev/stdin"], input=json.dumps(rules),
                                 capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr


def test_the_dashboard_is_one() -> None:
    dashboard = json.loads((ROOT / "docs" / "tasks" / "grafana-dashboard.json").read_text())
    assert dashboard["schemaVersion"] >= 30 and dashboard["title"] == "gputop"
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"datasource", "instance"}
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 10
    assert all(panel["datasource"]["uid"] == "${datasource}" and panel["gridPos"]["w"] <= 24 for panel in panels)
    for expression in (target["expr"] for panel in panels for target in panel["targets"]):
        _metrics_exist(expression)
        assert 'instance=~"$instance"' in expression and expression.count("(") == expression.count(")")


@pytest.mark.parametrize(("command", "extra"), [
    ("stacks", "stacks"), ("capture", "stacks"), ("xprof", "xprof"), ("export", "export"),
    ("convert", "parquet")])
def test_an_extra_is_named_with_the_command_that_needs_it(command: str, extra: str) -> None:
    (row,) = (row for name, row in _extra_rows() if name == extra)
    assert f"`pip install {PACKAGES[extra]}`" in row and (f"`gputop {command}" in row or command == "capture")
    helped = parser()._commands.choices[command].format_help()  # type: ignore[attr-defined]
    assert f"pip install {PACKAGES[extra]}" in " ".join(helped.split())


# -- figures, words, pictures -----------------------------------------------------------------------


@pytest.mark.parametrize("document", ["gputop/SKILL.md", "docs/reference/python.md"])
def test_the_verdicts_of_a_comparison_are_listed(document: str) -> None:
    text = (ROOT / document).read_text()
    assert not [verdict for verdict in get_args(Verdict) if f'"{verdict}"' not in text]


def test_the_cost_in_the_readme_is_that_of_the_last_series() -> None:
    cost, readme = ((ROOT / name).read_text() for name in ("docs/project/cost.md", "README.md"))
    cpu = re.search(r"^\| monitor, CPU .*\| nvitop \| ([\d.]+) \|$", cost, re.M)
    memory = re.search(r"^\| monitor, memory \| (\d+ MB) \| nvitop", cost, re.M)
    assert cpu is not None and f"{float(cpu[1]):.1f} times nvitop's CPU" in readme
    assert memory is not None and memory[1] in readme


PICTURES = sorted((ROOT / "screenshots").glob("*.svg"))


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_nothing_is_pending_in_a_picture(picture: Path) -> None:
    text = html.unescape(re.sub(r"<style.*?</style>|<[^>]+>", " ", picture.read_text(), flags=re.S))
    text = " ".join(text.split())  # hard spaces, too
    pending = re.compile(r"not there yet|\breading\b|being analyzed|opening the|gputop itself", re.IGNORECASE)
    assert "gputop" in text and not pending.findall(text)


def test_the_table_of_packages_has_the_order_that_the_linter_holds() -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    layers = re.search(r'name = "Packages in layers".*?layers = \[(.*?)\]', settings, re.S)
    assert layers is not None
    page = (ROOT / "docs/contributing/architecture.md").read_text()
    table = re.findall(r"^\| `gputop/(\w+)(?:\.py)?` \|", page, re.M)
    assert table == re.findall(r'"gputop\.(\w+)"', layers[1])[::-1]


def test_calls_in_sentences_and_tables_are_understood() -> None:
    """Their commands and options; what else a call needs may be left out of a sentence."""
    main_parser = parser()
    calls = {call for document in DOCUMENTS for call in re.findall(r"`gputop( [^`]*)`", document.read_text())}
    for call in sorted(calls):
        words = call.replace("…", "").partition(" -- ")[0].split()
        own = main_parser._commands.choices.get(words[0]) if words else None  # type: ignore[attr-defined]
        assert own is not None or not words or words[0].startswith("-"), f"gputop{call}"
        known = {*main_parser._option_string_actions, *(own or main_parser)._option_string_actions}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, f"gputop{call}"
    assert len(calls) > 50


def test_the_messages_of_the_troubleshooting_page_are_printed() -> None:
    text = "".join((ROOT / "docs" / page).read_text() for page in ("troubleshooting.md", "tasks/other-profilers.md"))
    said = _literals()
    messages = re.findall(r"^## `(.+)`$", text, re.M)
    assert len(messages) >= 10 and not [message for message in messages if message not in said]


def _literals() -> str:
    """All texts of the program, implicit joins made, what is filled in taken for a usual value."""
    values = {"scope": "1"}
    texts = []
    for source in sources():
        for node in source.nodes:
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(part.value) if isinstance(part, ast.Constant) else
                                     values.get(ast.unparse(part).strip("f'{}"), "…") for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_comments_cite_only_documents_that_exist() -> None:
    for file in (ROOT / "gputop").rglob("*.py"):
        for cited in re.findall(r"(?<![\w/])docs/[\w/-]+\.md", file.read_text()):
            assert (ROOT / cited).exists(), f"{_name(file)} cites {cited}"


def test_the_readme_can_be_read_in_two_minutes() -> None:
    """Its words without code and the targets of links: 225 a minute."""
    readme = (ROOT / "README.md").read_text()
    text = re.sub(r"^```.*?^```|\]\([^)]*\)", " ", readme, flags=re.M | re.S)
    assert len(re.findall(r"[^\s|]*\w[^\s|]*", text)) <= 450
    assert all(needed in readme for needed in ("`make run`", "`make test`", "gcc", "git clone "))
    assert re.search(r"git clone (\S+)", readme)[1] == PROJECT["urls"]["Source"]  # type: ignore[index]


# -- the site ---------------------------------------------------------------------------------------


def _nav(node: Any) -> Iterator[str]:
    for child in node if isinstance(node, list) else node.values() if isinstance(node, dict) else ():
        yield from [child] if isinstance(child, str) else _nav(child)


def test_each_page_is_in_the_navigation() -> None:
    listed = list(_nav(parse_toml(tool_modules.tool("site_pages").settings())["project"]["nav"]))
    assert len(listed) == len(set(listed))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    pages |= set(map(str, tool_modules.made_pages()))
    assert set(listed) == pages | {"contributing/README.md"}, "zensical.toml lists the pages"
    index = (ROOT / "docs" / "index.md").read_text()
    assert not [page for page in pages if f"({page}" not in index and page != "index.md" and page.split("/")[0] in (
        "start", "tasks", "concepts", "project", "troubleshooting.md", "faq.md")]


def test_the_site_warns_and_enlarges() -> None:
    text = "> [!WARNING]\n> It ends.\n> So ask.\n\n> quoted\n\n![A](a.svg)\n"
    assert tool_modules.tool("site_pages").for_the_site(text) == (
        "!!! warning\n\n    It ends.\n    So ask.\n\n> quoted\n\n[![A](a.svg)](a.svg)\n")


def test_a_link_in_docs_puts_no_other_file_on_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tool_modules.tool("site_pages")
    (tmp_path / "secret").write_text("a key")
    for name in ("docs", "docs/contributing", "screenshots"):
        (tmp_path / name).mkdir()
    (tmp_path / "docs" / "a.md").write_text("page")
    (tmp_path / "CONTRIBUTING.md").write_text("page")
    for name, value in (("ROOT", tmp_path), ("DOCS", tmp_path / "docs"), ("PAGES", tmp_path / "build" / "pages"),
                        ("SETTINGS", tmp_path / "build" / "zensical.toml")):
        monkeypatch.setattr(tool, name, value)
    (tmp_path / "zensical.toml").write_text(tool.ALL_FINDINGS)
    assert tool.main() == 0 and (tmp_path / "build" / "pages" / "a.md").exists()
    (tmp_path / "docs" / "b.md").symlink_to(tmp_path / "secret")
    with pytest.raises(SystemExit, match=r"b\.md is a symbolic link"):
        tool.main()
    (tmp_path / "docs" / "b.md").unlink()
    (tmp_path / "CONTRIBUTING.md").unlink()
    (tmp_path / "CONTRIBUTING.md").symlink_to("secret")
    with pytest.raises(SystemExit, match=r"CONTRIBUTING\.md is a symbolic link"):
        tool.main()


def test_links_of_the_site_lead_to_its_copies_or_to_the_repository() -> None:
    tool = tool_modules.tool("site_pages")
    page = ROOT / "docs" / "tasks" / "hang.md"
    text = ("[a](slurm.md#b) ![c](../../screenshots/d.svg) [e](../../CONTRIBUTING.md#f) [g](../../gputop/SKILL.md) "
            "[h](https://i.j) [k](../reference/README.md#keys) [l](../reference/README.md)")
    assert tool.rewritten(text, page, Path("tasks/hang.md")) == (
        "[a](slurm.md#b) ![c](../screenshots/d.svg) [e](../contributing/README.md#f) "
        f"[g]({tool.REPOSITORY}gputop/SKILL.md) [h](https://i.j) [k](../reference/keys.md) [l](../reference/README.md)")
