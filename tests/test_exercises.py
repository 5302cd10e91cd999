"""The exercises: solutions pass, stubs say which task they are, wrong answers fail by the rule they break.

Everything here is found by looking at chapters/exercises, so a new chapter is tested without a line more. What has been
solved in tasks.py doesn't matter: a stub that somebody has answered is skipped."""
import doctest
import inspect
import os
import re
import shutil
import subprocess
import sys
import threading

import pytest
import torch

from conftest import ROOT

sys.path.insert(0, str(ROOT / "chapters" / "exercises"))

import grade  # noqa: E402

CHAPTERS = grade.chapters()
GRADERS = {chapter: grade.load(grade.folder_of(chapter) / "grader.py") for chapter in CHAPTERS}
TASKS = [(chapter, number, task) for chapter in CHAPTERS for number, task in enumerate(GRADERS[chapter].TASKS, 1)]
every_task = pytest.mark.parametrize("chapter, number, task", TASKS, ids=[f"ch{c:02d}-{n}" for c, n, _ in TASKS])


def wrong_answers(chapter):
    """[(task, function)] of the chapter's wrong.py; none if a class has taken it away."""
    path = grade.folder_of(chapter) / "wrong.py"
    functions = vars(grade.load(path)).values() if path.exists() else ()
    marked = [function for function in functions if hasattr(function, "breaks")]
    return [(task, function) for task in GRADERS[chapter].TASKS for function in marked if function.task == task.name]


WRONG = [(chapter, task, function) for chapter in CHAPTERS for task, function in wrong_answers(chapter)]


def solutions(chapter):
    path = grade.folder_of(chapter) / "solutions.py"
    if not path.exists():
        pytest.skip("the solutions have been taken away")
    return grade.load(path)


def readable(report):
    """The report as a reader gets it, after a look at its form: short lines, none of Python's own."""
    text = report.text(100)
    assert max(map(len, text.splitlines()), default=0) <= 100
    assert not re.search(r"Traceback|assert|grade\.py|grader\.py|tensor\(", text), text
    return text


# -- Each chapter: what it has to hold

@every_task
def test_the_solution_passes(chapter, number, task):
    path = grade.folder_of(chapter) / "solutions.py"
    report = grade.grade_task(task, getattr(solutions(chapter), task.name), str(path), limit=30)
    assert report.status == "solved", report.text()


@every_task
def test_the_stub_says_which_task_it_is(chapter, number, task):
    path = grade.folder_of(chapter) / "tasks.py"
    stub = getattr(grade.load(path), task.name)
    if "NotImplementedError" not in stub.__code__.co_names:
        pytest.skip("this one has been answered")
    report = grade.grade_task(task, stub, str(path))
    assert report.status == "not started" and f"chapter {chapter}, task {number}: " in readable(report)


@every_task
def test_the_statement_is_true(chapter, number, task):
    """The docstring has its number and a worked example, which the solution confirms; both have the same parameters."""
    tasks, answers = grade.load(grade.folder_of(chapter) / "tasks.py"), solutions(chapter)
    statement, solution = getattr(tasks, task.name), getattr(answers, task.name)
    assert statement.__doc__.startswith(f"Task {number} ")
    assert inspect.signature(statement) == inspect.signature(solution)
    assert list(inspect.signature(statement).parameters) == list(task.cases()[0].arguments)
    example = doctest.DocTestParser().get_doctest(statement.__doc__, vars(answers), task.name, None, None)
    said = []
    result = doctest.DocTestRunner().run(example, out=said.append)
    assert result.attempted > 0 and not result.failed, "".join(said)
    source = inspect.getsource(solution)
    assert len(source.splitlines()) <= 20


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_what_is_given_in_a_task_file_is_true_as_well(chapter):
    tasks = grade.load(grade.folder_of(chapter) / "tasks.py")
    given = {name for name, f in vars(tasks).items() if inspect.isfunction(f) and f.__module__ == tasks.__name__}
    for name in given - {task.name for task in GRADERS[chapter].TASKS}:
        example = doctest.DocTestParser().get_doctest(getattr(tasks, name).__doc__, vars(tasks), name, None, None)
        result = doctest.DocTestRunner().run(example)
        assert result.attempted > 0 and not result.failed


@pytest.mark.parametrize("chapter, task, function", WRONG, ids=[f"ch{c:02d}-{f.__name__}" for c, _, f in WRONG])
def test_a_wrong_answer_fails_by_its_rule(chapter, task, function):
    home = str(grade.folder_of(chapter) / "wrong.py")
    report = grade.grade_task(task, function, home, limit=10 if function.ends else 1)
    assert report.status in ("wrong", "raised", "too slow"), report.status
    rule = GRADERS[chapter].RULES[function.breaks]
    assert report.rule == rule
    text = readable(report)
    assert " ".join(rule.split()) in " ".join(text.split()) and f"{task.name}(" in text


@every_task
def test_five_wrong_answers_a_task_and_three_rules(chapter, number, task):
    mine = [function for c, t, function in WRONG if (c, t) == (chapter, task)]
    if not mine:
        pytest.skip("the wrong answers have been taken away")
    assert len(mine) >= 5 and len({function.breaks for function in mine}) >= 3


# -- The harness: whatever the answer does, a sentence comes back

TASK = grade.Task("double", lambda: [grade.Case({"numbers": [1, 2]}, [2, 4], "Each number doubles.")])
ODD = {     # the answer's file: (status, what the report says)
    "def double(numbers):\n    return [2 * n for n in numbers]": ("solved", ""),
    "def double(numbers):\n    return tuple(2.0 * n for n in numbers)": ("solved", ""),
    "def double(numbers):\n    numbers += numbers\n    return numbers": ("wrong", "your code [1, 2, 1, 2]"),
    "def double(numbers):\n    print(numbers)": ("wrong", "None, as a function without a return statement"),
    "def double(numbers):\n    return (2 * n for n in numbers)": ("wrong", "something of type generator"),
    "import torch\ndef double(numbers):\n    return 2 * torch.tensor(numbers)": ("wrong", "something of type Tensor"),
    "def double(numbers):\n    return [float('nan'), 10 ** 400]": ("wrong", "[nan, 1"),
    "def double(numbers):\n    return [2, 10 ** 9999]": ("wrong", "your code"),
    "def double(numbers):\n    return [True, 4]": ("wrong", "[True, 4]"),
    "def double(numbers):\n    numbers.append(numbers)\n    return numbers": ("wrong", "[1, 2, [1, 2, ["),
    "def double(numbers):\n    return list(range(10 ** 6))": ("wrong", "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...]"),
    "class Odd:\n    def __eq__(self, other):\n        1 / 0\ndef double(numbers):\n    return [Odd(), Odd()]":
        ("wrong", "Odd"),
    "def double(numbers):\n    return half(numbers)\ndef half(numbers):\n    return numbers[2] / 2":
        ("raised", "IndexError: list index out of range at line 4 of tasks.py: return numbers[2] / 2"),
    "def double(numbers):\n    return double(numbers)": ("raised", "RecursionError"),
    "def double():\n    return 2": ("raised", "TypeError: double() takes 0 positional arguments but 1 was given"),
    "import sys\ndef double(numbers):\n    sys.exit(1)": ("raised", "SystemExit: 1 at line 3 of tasks.py: sys.exit(1)"),
    "def double(numbers):\n    raise NotImplementedError('to do')": ("not started", "to do"),
    "def double(numbers):\n    while numbers:\n        pass":
        ("too slow", "was still running after 0.2 s at line"),
    "def double(numbers):\n    while True:\n        try:\n            numbers = numbers\n        except Exception:\n"
    "            pass": ("too slow", "was still running after 0.2 s at line"),
    "def twice(numbers):\n    return 2": ("missing", "has no function double"),
    "double = 2": ("missing", "has no function double"),
    "def double(numbers)\n    return 2":
        ("raised", "SyntaxError: expected ':' at line 1 of tasks.py: def double(numbers)"),
    "def double(numbers):\nreturn 2": ("raised", "at line 2 of tasks.py: return 2"),
    "import nowhere_to_be_found": ("raised", "ModuleNotFoundError: No module named 'nowhere_to_be_found' at line 1"),
    "while True:\n    pass": ("too slow", "was still running after 0.2 s at line"),
    "x = '\x00'": ("raised", "null bytes"),
    "import os\nos._exit(0)": ("raised", "SystemExit: os._exit(0) at line 2 of tasks.py: os._exit(0)"),
    "from os import _exit\ndef double(numbers):\n    _exit(0)": ("raised", "os._exit(0) at line 3 of tasks.py: _exit"),
    "import os\ndef double(numbers):\n    child = os.fork()\n    if not child:\n        os._exit(2)\n"
    "    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 4]": ("solved", ""),
}


@pytest.mark.parametrize("answer", ODD, ids=range(len(ODD)))
def test_odd_answers(answer, tmp_path, monkeypatch):
    (tmp_path / "tasks.py").write_text(answer)
    monkeypatch.setattr(grade, "tasks_of", lambda chapter: [TASK])
    status, sentence = ODD[answer]
    (report,) = grade.grade(1, tmp_path / "tasks.py", limit=0.2 if status == "too slow" else 10)
    text = " ".join(readable(report).split())
    assert report.status == status and sentence in text, (report.status, text)
    assert len(text) < 600


def test_an_answer_that_is_too_slow_is_stopped():
    spin = grade.Task("spin", lambda: [grade.Case({}, 1, "It ends.")])
    namespace = {}
    exec("def spin():\n    while True:\n        pass", namespace)
    assert grade.grade_task(spin, namespace["spin"], "<string>", 0.1).status == "too slow"
    assert not any(thread.name == "answer" for thread in threading.enumerate())


def test_exiting_is_only_taken_away_from_answers():
    before = os._exit
    assert grade.run_bounded(lambda: os._exit, [], 1)[1] is not before and os._exit is before


def test_an_edit_within_the_same_second_is_seen(tmp_path):
    path = tmp_path / "tasks.py"
    for value in (1, 2):
        path.write_text(f"answer = {value}")
        os.utime(path, (0, 0))
        assert grade.load(path).answer == value


@pytest.mark.parametrize("got, expected, equal", [
    (0.1 + 0.2, 0.3, True), (2, 2.0, True), (0.3001, 0.3, False), ("2", 2, False), (None, 0, False), (0, None, False),
    ([], (), True), ([1], [1, 1], False), ("ab", ["a", "b"], False), ({"a": 1}, {"a": 1.0}, True),
    ({}, {"a": 1}, False), (False, 0, False), (torch.tensor(2), 2, False)])
def test_same(got, expected, equal):
    assert grade.same(got, expected) is equal


# -- The command line and pytest

def test_command_line(tmp_path, capsys):
    answers = tmp_path / "mine.py"
    text = (grade.folder_of(1) / "tasks.py").read_text()
    answers.write_text(text + "\n\ndef kv_bytes_per_token(L, H, Hkv, d, size):\n    return 2 * L * Hkv * d * size\n")
    assert grade.main(["1", "--task", "1", "--file", str(answers)]) == 0
    assert capsys.readouterr().out == "chapter 1, task 1, kv_bytes_per_token: solved\n1 of 1 solved\n"
    answers.write_text("def kv_bytes_per_token(L, H, Hkv, d, size):\n    return 2 * L * H * d * size\n")
    assert grade.main(["1", "--file", str(answers)]) == 1
    out = capsys.readouterr().out
    assert "chapter 1, task 1, kv_bytes_per_token: wrong\n" in out
    assert "    your code  16\n    expected   4\n    rule       Only KV heads are cached." in out
    assert out.count(": missing") == 4 and out.endswith("0 of 5 solved\n")
    for arguments, sentence in ((["1", "--task", "6"], "chapter 1 has tasks 1 to 5, not 6"),
                                (["99"], "chapter 99 has no exercises; chapters with some: 1"),
                                (["1", "--file", "nowhere.py"], "there is no file nowhere.py")):
        with pytest.raises(SystemExit):
            grade.main(arguments)
        assert sentence in capsys.readouterr().err


def test_pytest_on_the_folder(tmp_path):
    """Two tasks answered, one of them wrongly, three untouched: as a student would leave them."""
    shutil.copytree(ROOT / "chapters" / "exercises", tmp_path / "exercises")
    stubs = "".join(f"def {name}(*arguments):\n    raise NotImplementedError('chapter 1, task {n}: to do')\n\n\n"
                    for n, name in enumerate([task.name for task in GRADERS[1].TASKS], 1) if n > 2)
    (tmp_path / "exercises" / "ch01" / "tasks.py").write_text(
        stubs + "def kv_bytes_per_token(L, H, Hkv, d, size):\n    return 2 * L * Hkv * d * size\n\n\n"
        "def max_concurrency(memory, per_token, size, prompt, output):\n"
        "    return memory // (per_token * size) // -(-(prompt + output - 1) // size)\n")
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "exercises"], cwd=tmp_path,
                          capture_output=True, text=True, timeout=120,
                          env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'chapters/tools'}"})
    assert done.returncode == 1 and "4 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "chapter 1, task 2, max_concurrency: wrong" in done.stdout
    assert "rule       Block 0 is the null block." in done.stdout
    assert all(f"    chapter 1, task {n}: to do" in done.stdout for n in (3, 4, 5))
    assert "Traceback" not in done.stdout and "def test_task" not in done.stdout


def test_the_projects_own_suite_leaves_the_tasks_alone(pytestconfig):
    assert pytestconfig.getini("testpaths") == ["tests"]


# -- Chapter 1: what the grader takes for right, is

def test_ch01_concurrency_is_what_the_scheduler_can_do():
    """Exactly `expected` requests run side by side as fast as one alone; one more, and one waits or is preempted."""
    ch01, tried = GRADERS[1], 0
    for case in ch01.concurrency_cases():
        memory, per_token, size, prompt, output = case.arguments.values()
        if 0 < case.expected < 50:
            blocks = memory // (per_token * size)
            assert ch01.run_alone(blocks, size, prompt, output, case.expected)[1:] == (0, output)
            _, preemptions, steps = ch01.run_alone(blocks, size, prompt, output, case.expected + 1)
            assert preemptions or steps > output
            tried += 1
    assert tried >= 6


def test_ch01_solutions_agree_with_the_walk_throughs_engine():
    """The same jobs on the tiny model: tokens that the static loop computed, seats in each step of the engine."""
    import ch01_paradigm as ch01
    from nano_serve import LLM
    answers = solutions(1)
    jobs = ch01.make_jobs(list(range(100, 300)), 6)
    jobs = [(prompt[:20 + i], min(n, 6 + i)) for i, (prompt, n) in enumerate(jobs)]
    with LLM(enable_prefix_caching=False, max_num_seqs=ch01.SEATS) as llm:
        static, continuous = ch01.static_batching(llm.engine, jobs), ch01.continuous_batching(llm, jobs)
    figures = static.figures(jobs)
    lengths = [(len(prompt), n) for prompt, n in jobs]
    assert answers.static_waste(lengths, ch01.SEATS) == (figures["computed"], figures["wasted"])
    steps = answers.continuous_batching([(chr(ord("a") + i), 0, n) for i, (_, n) in enumerate(lengths)], ch01.SEATS)
    seen = ["".join(sorted("".join(column).lower().replace(" ", ""))) for column in zip(*continuous.seats)]
    assert ["".join(sorted(step)) for step in steps] == seen


@pytest.mark.skipif(not shutil.which("make"), reason="no make here")
@pytest.mark.parametrize("code, ends", [(0, 0), (1, 0), (2, 2), (130, 2)])
def test_make_grade_takes_an_unsolved_task_for_no_error(code, ends, tmp_path):
    """A python that exits with the chapter's number: 1 is the grader's "not all solved"."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "requirements.txt").touch()
    (tmp_path / ".venv" / ".run").touch()
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\nexit "$2"\n')
    python.chmod(0o755)
    done = subprocess.run(["make", "-f", ROOT / "Makefile", "grade", f"CH={code}"], cwd=tmp_path, capture_output=True,
                          text=True, timeout=60, env={"PATH": os.environ["PATH"]})     # without the MAKEFLAGS around us
    assert done.returncode == ends and bool(done.stderr) == bool(ends), done.stderr
