"""The house keeps its own rules: what imports what, what is documented, what a lock may say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Container
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from console.environment import PROJECT

PACKAGES = {
    "benchmarks",
    "cluster_server",
    "console",
    "inference_brain",
    "kvss_agent",
    "swdriver_shim",
    "telemetry",
    "tests",
    "workload_manager",
}
LOCK = {"acquire", "join", "notify", "notify_all", "set", "wait"}
LOG = {"debug", "info", "warning", "error", "exception"}
OF_OTHERS = {"docs/engines/vllm.md: mamba_mixer2.py"}  # files that docs name, and that are not ours


def pyproject() -> dict[str, object]:
    return tomllib.loads((PROJECT / "pyproject.toml").read_text())


def test_there_is_no_further_python_package() -> None:
    found = {path.parent.name for path in PROJECT.glob("*/__init__.py")}
    assert found == PACKAGES


def test_packages_import_only_what_they_may() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_no_module_needs_itself_by_way_of_others() -> None:
    """Not for types alone, and not within a function either."""
    files = [path for one in PACKAGES - {"tests"} for path in (PROJECT / one).rglob("*.py")]
    paths = {name_of(path): path for path in files}
    TopologicalSorter({name: imports_of(path, paths) - {name} for name, path in paths.items()}).prepare()


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path, known: Container[str]) -> set[str]:
    """Which of the known modules it imports."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{one.name}" for one in node.names]
            found.update(name if name in known else node.module for name in names)
    return {one for one in found if one in known}


def test_every_dependency_is_justified() -> None:
    project = pyproject()["project"]
    groups = pyproject()["dependency-groups"]
    assert isinstance(project, dict)
    assert isinstance(groups, dict)
    lists = [project["dependencies"], *project["optional-dependencies"].values(), *groups.values()]
    wanted = [item for group in lists for item in group]
    names = {re.split(r"[\[<>=~!; ]", item)[0] for item in wanted if isinstance(item, str)} - {
        "tidegate"
    }
    text = (PROJECT / "docs" / "dependencies.md").read_text()
    documented = set(re.findall(r"^\| `([a-z0-9-]+)`", text, re.MULTILINE))
    assert documented == names


@pytest.mark.parametrize("name", ["run", "dev", "models", "engines", "routers", "uv"])
def test_a_lock_is_hashed_and_names_no_index(name: str) -> None:
    text = (PROJECT / "requirements" / f"{name}.txt").read_text()
    assert "://" not in text
    pinned = re.findall(r"^[a-z0-9][^\s;]*==", text, re.MULTILINE)
    assert pinned
    for block in re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]:
        assert "--hash=sha256:" in block, block[:80]


def test_every_verb_of_the_makefile_has_its_line_of_help() -> None:
    text = (PROJECT / "Makefile").read_text()
    documented = set(re.findall(r"^([a-z-]+):.*## ", text, re.MULTILINE))
    wanted = {"up", "down", "check", "test", "lint", "fmt", "bench", "sim", "docs", "clean"} | {
        "test-models",
        "test-engines",
        "bench-models",
    }
    assert wanted <= documented


@pytest.mark.parametrize(
    "path", sorted(PROJECT.glob("*.md")) + sorted(PROJECT.glob("docs/**/*.md")), ids=str
)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", prose(path)):
        if "://" in target:
            continue
        there = path.parent / target if target else path
        assert there.exists(), target
        if anchor and there.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", prose(there), re.MULTILINE)
            assert anchor in map(anchor_of, headings), f"{target}#{anchor}"


def prose(path: Path) -> str:
    """Without blocks of code, where a line may begin with #."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchor_of(heading: str) -> str:
    """As GitHub makes it."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.strip().lower())
    return re.sub(r"[^\w -]", "", text).replace(" ", "-")


def test_the_architecture_names_every_folder_and_no_other() -> None:
    paths = {path.relative_to(PROJECT) for path in (*PROJECT.glob("*/"), *PROJECT.glob("*/*/"))}
    folders = {
        f"{path}/"
        for path in paths
        if path.parts[0] != "traces"  # a folder of one's own
        and not any(part.startswith((".", "__")) for part in path.parts)
        and path.parts[:-1] != ("templates",)  # one for each app
        and any(one.is_file() and one.suffix != ".pyc" for one in (PROJECT / path).rglob("*"))
    }
    text = (PROJECT / "ARCHITECTURE.md").read_text()
    table = text[text.index("## Folders") : text.index("## Inside the console")]
    assert set(re.findall(r"`([\w.]+/(?:\w+/)?)`", table)) == folders


def test_each_figure_of_the_benchmarks_stands_once() -> None:
    text = (PROJECT / "docs" / "benchmarks.md").read_text()
    ids = Counter(re.findall(r"^\| `([^`]+)`", text, re.MULTILINE))
    assert [one for one, times in ids.items() if times > 1] == []


def test_every_file_that_docs_name_is_there() -> None:
    """In the present tense: decisions and findings tell of files that were."""
    tops = [path for path in PROJECT.iterdir() if not path.name.startswith(".")]
    there = [str(path) for top in tops for path in (top, *top.rglob("*"))]
    docs = [*PROJECT.glob("*.md"), *PROJECT.glob("docs/**/*.md")]
    missing = {
        f"{doc.relative_to(PROJECT)}: {name}"
        for doc in docs
        if "adr" not in doc.parts and doc.name != "CHANGELOG.md"
        for name in re.findall(r"`([\w/.-]*\w\.(?:py|js|html|c))\b", doc.read_text())
        if not any(path.endswith(f"/{name.removeprefix('./')}") for path in there)
    }
    assert missing <= OF_OTHERS


def test_examples_make_an_idempotency_key_in_one_way() -> None:
    """By a command that is on every machine: an empty key is refused."""
    where = {"docs": "md", "templates": "html", "console": "py"}
    files = [path for folder, kind in where.items() for path in (PROJECT / folder).rglob(f"*.{kind}")]
    keys = [
        f"{path.relative_to(PROJECT)}: {key}"
        for path in files
        for key in re.findall(r'Idempotency-Key"?: "?(\$\(.*?\))', path.read_text())
    ]
    assert len(keys) > 30
    assert [one for one in keys if not one.endswith(": $(date +%s%N)")] == []


def test_help_names_each_default() -> None:
    """Of options whose default is a value, not the absence of one."""
    silent = [
        f"{path.relative_to(PROJECT)}:{call.lineno}"
        for package in sorted(PACKAGES - {"benchmarks", "tests"})
        for path in sorted((PROJECT / package).rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and _hides_its_default(call)
    ]
    assert silent == []


def _hides_its_default(call: ast.Call) -> bool:
    named = {one.arg: one.value for one in call.keywords}
    option = call.args[0] if call.args else None
    if not isinstance(option, ast.Constant) or not str(option.value).startswith("--"):
        return False
    if "default" not in named:
        return False
    default = named["default"]
    is_value = not isinstance(default, ast.Constant) or default.value not in (None, False, True, "")
    is_value = is_value and ast.unparse(default) != "argparse.SUPPRESS"
    told = ast.unparse(named["help"]) if "help" in named else ""
    return is_value and "default" not in told and not re.search(r"\(\d+\w*\)", told)


def test_no_line_of_a_template_is_longer_than_120_characters() -> None:
    found = [
        f"{path.relative_to(PROJECT)}:{number}"
        for path in PROJECT.glob("templates/**/*.html")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if len(line) > 120
    ]
    assert found == []


def test_what_is_counted_is_said_in_one_way() -> None:
    """`counted` of telemetry.units has the plural, and the comma of thousands."""
    by_hand = re.compile(r"""\{'' if [^}]+ else 'e?s'|["']1 [a-z ]+["'] if """)
    found = {
        f"{path.relative_to(PROJECT)}: {found[0]}"
        for package in PACKAGES - {"tests"}
        for path in PROJECT.glob(f"{package}/**/*.py")
        for found in by_hand.finditer(path.read_text())
    }
    assert found == set()


def test_no_handler_of_a_signal_takes_a_lock() -> None:
    """Of an event, or of a log: what it interrupts may have that one, and both wait for ever. Handlers
    of an event loop are called by the loop."""
    found = []
    for path in sorted(path for one in PACKAGES - {"tests"} for path in (PROJECT / one).rglob("*.py")):
        if "signal.signal(" in (text := path.read_text()):
            tree = ast.parse(text)
            called = {each.name: each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
            for each in ast.walk(tree):
                if isinstance(each, ast.Call) and ast.unparse(each.func) == "signal.signal":
                    handler = each.args[1]
                    name = ast.unparse(handler).rpartition(".")[2]
                    found += [
                        f"{path.relative_to(PROJECT)}:{inner.lineno}"
                        for inner in ast.walk(called.get(name, handler))
                        if isinstance(inner, ast.With)
                        or (isinstance(inner, ast.Attribute) and inner.attr in LOCK | LOG)
                    ]
    assert not found


def test_no_test_imports_another_test_file() -> None:
    """What several files need is in a support module or a conftest."""
    found = {
        f"{path.relative_to(PROJECT)}: {node.module}"
        for path in PROJECT.glob("tests/**/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and re.search(r"(^|\.)test_\w+$", node.module or "")
    }
    assert found == set()


@pytest.mark.xdist_group("of the house")
def test_whoever_hands_tests_out_knows_their_groups(request: pytest.FixtureRequest) -> None:
    """Else each worker would start a whole stack of its own."""
    is_handed_out_by_groups = getattr(request.config.option, "loadgroup", False)
    assert request.node.nodeid.endswith("@of the house") == is_handed_out_by_groups
