"""What the READMEs say: their links lead somewhere, their commands run and show what the sentences beside them claim, both
languages have the same commands, and chapters have the series' numbers everywhere."""
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT

from command_line import make_parser

READMES = [*ROOT.glob("README*.md"), *(ROOT / "chapters").rglob("README*.md"), ROOT / "models/README.md"]
ELSEWHERE = ("make ", "source ", "pip ", "python3 -m venv", "python -m pytest")        # set-up, which .ci/run does


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.S)


def commands(path):
    """The lines of a README's shell blocks, without comments."""
    lines = [re.sub(r"(^|\s+)# .*", "", line) for block in blocks(path, "sh") for line in block.splitlines()]
    return [line for line in lines if line]


@pytest.mark.parametrize("path", READMES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"https?://", target):
            file, _, anchor = target.partition("#")
            there = path.parent / file if file else path
            assert there.exists(), f"{path.name}: {target}"
            titles = re.findall(r"(?m)^#+ (.*)", there.read_text(encoding="utf-8")) if anchor else []
            assert not anchor or anchor in [re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles], target


def test_both_languages_give_the_same_commands():
    assert len(commands(ROOT / "README.md")) > 25 and commands(ROOT / "README.md") == commands(ROOT / "README.zh-CN.md")
    same = [re.sub(r'#.*|"[^"]*"', "", block) for block in blocks(ROOT / "README.md", "python")]
    assert len(same) == 2 and same == [re.sub(r'#.*|"[^"]*"', "", block) for block in blocks(ROOT / "README.zh-CN.md", "python")]


@pytest.mark.parametrize("path", READMES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_are_commands(path):
    targets = re.findall(r"(?m)^([a-z]+):", (ROOT / "Makefile").read_text())
    for line in commands(path):
        words = shlex.split(line)
        if words[0] == "make":
            assert words[1] in targets, line
        elif words[:2] == ["python", "nano_serve.py"]:
            make_parser().parse_args(words[2:])              # ends with an error if an option is unknown
        elif words[0] == "python" and words[1] != "-m":
            assert (ROOT / words[1]).is_file(), line
        elif words[0] == "pip":
            assert (ROOT / words[-1]).is_file(), line
        else:
            assert words[0] in ("source", "echo", "python", "python3"), f"what is {line!r}?"


def test_the_readme_is_up_to_date_about_options():
    """No option is named that isn't there."""
    known = {o for action in make_parser()._actions for o in action.option_strings}
    tools = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "chapters").rglob("*.py"))
    for path in ROOT.glob("README*.md"):
        for option in re.findall(r"`(--[a-z][a-z-]+)", path.read_text(encoding="utf-8")):
            assert option in known or f'"{option}"' in tools, f"{path.name}: {option}"


# -- The series' numbers -------------------------------------------------------------------------------------------------------

def table(path, columns):
    """The rows of all tables that have so many columns, as lists of cells."""
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [row for row in rows if len(row) == columns]


def linked(cell):
    return [os.path.basename(target) for target in re.findall(r"\]\(([^)]+)\)", cell)]


def chapters_of(path):
    """The numbers in a module's first line, or a notebook's title: "(chapter 3)", "(chapters 1 and 10)", "Chapter 1, walked"."""
    first = path.read_text(encoding="utf-8").removeprefix('# %% [markdown]\n"""\n').split("\n", 1)[0]
    match = re.search(r"[Cc]hapters? ([\d, and]*\d)", first)
    return {int(n) for n in re.findall(r"\d+", match[1])} if match else set()


def modules():
    files = [*ROOT.glob("*.py"), *ROOT.glob("*.[ch]"), *(ROOT / "extras").glob("*.py"), *(ROOT / "chapters").glob("*.py"), *(ROOT / "chapters/tools").glob("*.py")]
    return {path.name: path for path in files if path.name != "__init__.py" and ".zh" not in path.name and path.name != "zh.py"}


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_chapters_have_the_series_numbers(name):
    """Fourteen rows, in order; a module that says in its first line to be of a chapter stands in that chapter's row."""
    chapters = {int(row[0]): row for row in table(ROOT / "chapters" / name, 5) if row[0].isdigit()}
    assert list(chapters) == list(range(1, 15))
    for module, path in modules().items():
        for number in chapters_of(path):
            assert module in linked(chapters[number][2] + chapters[number][3]), f"{module} says chapter {number}, {name} doesn't"
    for module in (p.name for p in ROOT.glob("*.py")):
        assert chapters_of(ROOT / module), f"{module} doesn't say which chapter it belongs to"
    for file in (path for path in (ROOT / "chapters").glob("ch??_*.py") if ".zh" not in path.name):
        assert chapters_of(file) == {int(file.name[2:4])} and file.name in linked(chapters[int(file.name[2:4])][2])


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_where_to_read_gives_the_modules_own_numbers(name):
    rows = [row for row in table(ROOT / name, 3) if re.fullmatch(r"[\d, 、]+", row[2])]
    listed = {module for row in rows for module in linked(row[0])}
    assert listed >= {p.name for p in ROOT.glob("*.py")} | {p.name for p in ROOT.glob("*.c")}
    for row in rows:
        for module in linked(row[0]):
            assert chapters_of(modules()[module]) == {int(n) for n in re.findall(r"\d+", row[2])}, module


def test_the_glossary_is_the_same_in_both_languages():
    words = [[row[:2] for row in table(ROOT / "chapters" / name, 4) if re.search(r"[\u4e00-\u9fff]", row[1])] for name in ("README.md", "README.zh-CN.md")]
    assert len(words[0]) > 50 and words[0] == words[1]


# -- The tour --------------------------------------------------------------------------------------------------------------------

def run(command, folder):
    """A line of the README, as if this folder had the project in it."""
    command = re.sub(r"^python ", f"{shlex.quote(sys.executable)} ", command)
    command = re.sub(r" ((chapters/)?[\w/]+\.py)\b", lambda m: f" {shlex.quote(str(ROOT / m[1]))}", command)
    return subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"})


@pytest.fixture(scope="module")
def tour(tmp_path_factory):
    """{command: its output} of the README's commands, run one after the other in one folder."""
    folder, shown = tmp_path_factory.mktemp("tour"), {}
    for command in commands(ROOT / "README.md"):
        if command.startswith(ELSEWHERE) or "--model ~" in command or "HuggingFaceTB" in command or "ch01_" in command:
            continue                                 # what needs a network or a folder of somebody's; chapters have tests
        if "--folder submissions/" in command:
            (folder / "submissions").mkdir()
            (folder / "submissions/anna.py").write_text((ROOT / "chapters/exercises/ch01/tasks.py").read_text(encoding="utf-8"), encoding="utf-8")
        if command == "python nano_serve.py" and command in shown:
            continue
        done = run(command, folder)
        assert done.returncode == 0 and "Traceback" not in done.stderr, (command, done.stderr)
        shown[command] = done.stdout
    return folder, shown


def answers(text):
    """{number: the answers under it} of nano_serve.py's output."""
    found = {}
    for number, answer in re.findall(r"(?m)^\[(\d+)\] .*\n((?:.*\n)*?)\(\d+ tokens, \w+\)$", text):
        found.setdefault(int(number), []).append(answer)
    return found


@pytest.mark.slow
def test_the_tour_shows_what_it_says(tour):
    folder, shown = tour
    find = lambda *words: next(out for command, out in shown.items() if all(w in command for w in words))
    assert len(shown) > 18
    assert re.search(r"\b1 18\+1→614\b", find("an owl"))
    assert answers(find("small.jsonl", "nano_serve")) == answers(shown["python nano_serve.py"]), "the same texts from a small pool"
    records = [json.loads(line) for line in open(folder / "small.jsonl", encoding="utf-8")]
    assert [i for r in records for i in r["preempted"]] == ["4", "4"]
    again = [p for r in records for p in r["requests"] if p["request_id"] == "4" and p["computed"] == 0]
    assert len(again) == 3 and again[1]["scheduled"] > again[0]["scheduled"], "recomputed from 0, its output included"
    assert "budget 16/16" in find("--max-num-batched-tokens 16")
    written = [json.loads(line) for line in open(folder / "answers.jsonl", encoding="utf-8")]
    assert [a["index"] for a in written] == [1, 0, 0], "the lower priority number goes first"
    assert written[1]["text"] != written[2]["text"], "two different answers"
    assert "<html" in (folder / "out.html").read_text(encoding="utf-8")[:2000]
    for module in ("scheduler", "kv_cache", "request", "sampling", "model", "worker", "collectives", "kernels"):
        assert shown[f"python {module}.py"].count("\n") >= 2, module


@pytest.mark.slow
def test_the_readmes_python_runs(tmp_path):
    for i, block in enumerate(blocks(ROOT / "README.md", "python")):
        (tmp_path / f"block{i}.py").write_text(block, encoding="utf-8")
        done = subprocess.run([sys.executable, f"block{i}.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0 and len(done.stdout) > 200, done.stderr
