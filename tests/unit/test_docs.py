"""The pages say what is there: links, paths, keys, metrics, messages and commands."""

import ast
import dataclasses
import re
from pathlib import Path

import documented
import pytest
from documented import LOG, PAGES, ROOT

from hybrid_gkd.config import Config
from hybrid_gkd.config.loading import CONFIG_DIR, load_config
from hybrid_gkd.config.spelling import find
from hybrid_gkd.errors import ConfigError
from hybrid_gkd.launch.command_line import default_config_name, parse
from hybrid_gkd.offload.residency import MEMORY_OWNERS, RESIDENCY
from hybrid_gkd.reporting.metric_table import METRICS

SECTIONS = tuple(field.name for field in dataclasses.fields(Config))
page_of_pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
page_or_log = pytest.mark.parametrize("page", [*PAGES, *LOG], ids=lambda page: str(page.relative_to(ROOT)))


def prose(page):
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def spans(text):
    """Return the texts in backticks."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def table(page, heading):
    """The rows of the first table behind a heading, as lists of cells, without its head."""
    _, found, rest = page.read_text(encoding="utf-8").partition(f"{heading}\n")
    assert found, heading
    lines = re.search(r"(?:^\|.*\n)+", rest, re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@page_or_log
def test_a_table_is_one_piece_whose_rows_have_as_many_cells_as_its_head(page):
    """After a blank line rows are no table any more, but text."""
    for lines in re.findall(r"(?:^\|.*\n)+", prose(page), re.MULTILINE):
        head, rule, *rows = re.sub(r"`[^`]*`|\\\|", "", lines).splitlines()
        assert re.fullmatch(r"\|[-|: ]+\|", rule), lines
        assert {row.count("|") for row in (head, rule, *rows)} == {head.count("|")}, lines


@page_or_log
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", prose(linked), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, target


def test_the_table_of_contents_has_every_page():
    linked = re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    assert sorted(linked) == sorted(page.name for page in PAGES if page.parent.name == "docs" and page.stem != "README")


@page_of_pages
def test_paths_of_this_repository_exist(page):
    """A path begins with a folder or has the name of a file at the top."""
    top = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")} - {"outputs", "logs"}
    named = [span for span in spans(prose(page)) if re.fullmatch(r"[\w./-]+", span) and span.partition("/")[0] in top]
    assert not [span for span in named if ("/" in span or "." in span) and not (ROOT / span).exists()]


def keys(node, prefix=""):
    """Every dotted key; those below a free dictionary end in a dot."""
    for field in dataclasses.fields(node):
        name, value = f"{prefix}{field.name}", getattr(node, field.name)
        yield name
        if dataclasses.is_dataclass(value):
            yield from keys(value, f"{name}.")
        elif isinstance(value, dict):
            yield f"{name}."


KEYS = tuple(keys(Config()))


def is_key(name):
    """A whole key, or its end: `rollout.n` and `.server_port` are said where it is clear of what."""
    end = f".{name.lstrip('.')}"
    if end.endswith((".*", ".")):
        return any(f"{end.rstrip('*')}" in f".{key}." for key in KEYS)
    return any(f".{key}".endswith(end) or (key.endswith(".") and f".{key}" in end) for key in KEYS)


@page_of_pages
def test_configuration_keys_exist(page):
    """In prose: what begins with a section's name or looks like an override. Commands have a test of their own."""
    unknown = []
    for word in " ".join(spans(prose(page))).split():
        name, equals, _ = word.partition("=")
        dotted = re.fullmatch(r"\.?[a-z]\w*(\.\w+)*(\.\*)?", name) and "." in name
        of_verl = page.name == "verl.md" and (find(name) is not None or name.endswith(".*"))
        ours = equals or name.startswith(tuple(f"{section}." for section in SECTIONS))
        ours = ours and word != "reward_model.ground_truth"  # a column of data that is prepared for verl
        if dotted and ours and not of_verl and not is_key(name):
            unknown.append(word)
    assert not unknown


@page_of_pages
def test_metrics_exist(page):
    groups = r"(actor|timing|perf|memory|val|training|reward|(response|prompt)_length)"
    assert not [s for s in spans(prose(page)) if re.fullmatch(rf"{groups}/\w[\w/]*", s) and s not in METRICS]


def messages():
    """Every text of the package; what is filled in is a zero byte. A ConfigError's key and rule are one text."""
    def text(node):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return re.sub(r"%[-+.\d]*[sdgfr]", "\0", node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(text(part) or "\0" for part in node.values)
        return None

    for file in sorted((ROOT / "hybrid_gkd").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and len(node.args) > 1 and getattr(node.func, "id", "") == "ConfigError":
                yield f"{text(node.args[0])}: {text(node.args[1])}"
            if (found := text(node)) is not None:
                yield found.replace("\n", " ")


@pytest.mark.slow
def test_quoted_messages_are_those_of_the_code():
    """The first column of docs/troubleshooting.md; `...` is anything."""
    texts = "\n".join(messages())
    quoted = [
        span for line in (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| ") and not line.startswith("| you see") for span in spans(line.split(" | ")[0])
    ]
    assert len(quoted) > 60

    def occurs(span):
        parts = [re.escape(part) for part in span.split("...")]
        return any(map(str.strip, parts)) and re.search("[^\n]*".join(parts), texts)

    assert not [span for span in quoted if span not in METRICS and not is_key(span) and not occurs(span)]


def test_the_residency_table_is_that_of_the_code():
    rows = table(ROOT / "docs" / "architecture.md", "## Residency")
    columns = (
        "actor_params", "frozen_params", "optimizer_state", "ema_params", "critic_params", "critic_optimizer_state",
        "ref_params", "reward_model_params", "engine_weights", "kv_cache",
    )  # fmt: skip
    assert set(columns) == set(MEMORY_OWNERS)
    found = {row[0]: {name for name, cell in zip(columns, row[1:], strict=True) if cell == "GPU"} for row in rows}
    assert found == RESIDENCY


PLAIN = set("errors process_limits transfer types runtime config search_path standard_streams".split())
"""Packages that all others may import; the table leaves them out."""


def imported_modules(file):
    """Modules of this package that a file imports, also for types alone."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hybrid_gkd."):
            yield node.module


@pytest.mark.slow
def test_the_table_of_packages_names_every_import():
    wrong, above = {}, set()
    for names, _, imports in table(ROOT / "CONTRIBUTING.md", "## Packages and imports"):
        packages, imported = {Path(span).stem for span in spans(names)}, set()
        above |= packages
        for path in (ROOT / span for span in spans(names)):
            for file in path.glob("**/*.py") if path.is_dir() else [path]:
                imported |= {module.split(".")[1] for module in imported_modules(file)}
        if imports != "all packages below" and imported - PLAIN - packages != set(filter(None, imports.split(", "))):
            wrong[names] = imported - PLAIN - packages
        assert not (imported & above) - packages, f"{names} imports what stands above it"
    assert not wrong


def test_every_command_is_run_or_says_why_not():
    known = [*documented.RUN_BY_TEST_DOCS, *documented.RUN_ELSEWHERE, *documented.NOT_RUN]
    assert len(known) == len(set(known))
    assert set(documented.commands()) == set(known)
    for place in documented.RUN_ELSEWHERE.values():
        file, _, name = place.partition("::")
        assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), place


@pytest.mark.parametrize("command", [each for each in documented.commands() if documented.arguments(each) is not None])
def test_the_arguments_of_a_documented_run_are_accepted(command, tmp_path):
    if "--install-only" in command:
        return
    options = parse(documented.arguments(command))
    name = options.config_name or default_config_name(options.overrides)
    folder = CONFIG_DIR if (CONFIG_DIR / f"{name}.yaml").is_file() else tmp_path
    if folder == tmp_path:
        (folder / f"{name}.yaml").write_text(documented.example(f"{name}.yaml", "yaml"), encoding="utf-8")
    try:
        load_config(options.overrides, config_name=name, config_path=folder)
    except ConfigError as error:
        pytest.fail(f"{command}: {error}")


def test_run_gkd_is_the_program_with_the_same_arguments():
    """So that the tests of commands need not go through the installation."""
    assert (ROOT / "run_gkd.sh").read_text(encoding="utf-8").endswith('\nexec "$python" -m hybrid_gkd "$@"\n')


@pytest.mark.parametrize("command", [each for each in documented.commands() if "python benchmarks/" in each])
def test_options_of_documented_benchmarks_exist(command):
    file = ROOT / re.search(r"benchmarks/\w+\.py", command)[0]
    for option in re.findall(r"(--[\w-]+)", command):
        assert f'"{option}"' in file.read_text(encoding="utf-8"), option


def test_every_public_report_names_a_test_that_there_is():
    tests = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    for *_, names in table(ROOT / "tests" / "public_reports.md", "keeps it from coming back."):
        assert spans(names)
        assert [name for name in spans(names) if f"def {name}(" not in tests] == []
