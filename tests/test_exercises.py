"""The exercises: solutions pass, stubs say which task they are, wrong answers fail by the rule they break, attacks get nothing.

Everything here is found by looking at chapters/exercises, so a new chapter is tested without a line more. What has been
solved in tasks.py doesn't matter: a stub that somebody has answered is skipped."""
import csv
import doctest
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from conftest import ROOT
from lang import Say, placeholders, wide

sys.path.insert(0, str(ROOT / "chapters" / "exercises"))

import grade  # noqa: E402
import inside  # noqa: E402
from sandbox import Sandbox  # noqa: E402
from submissions import grade_folder  # noqa: E402

CHAPTERS = grade.chapters()
GRADERS = {chapter: grade.load(grade.folder_of(chapter) / "grader.py") for chapter in CHAPTERS}
TASKS = [(chapter, number, task) for chapter in CHAPTERS for number, task in enumerate(GRADERS[chapter].TASKS, 1)]
every_task = pytest.mark.parametrize("chapter, number, task", TASKS, ids=[f"ch{c:02d}-{n}" for c, n, _ in TASKS])
FILES = [(chapter, language) for chapter in CHAPTERS for language in ("en", "zh")]
every_file = pytest.mark.parametrize("chapter, language", FILES)
MARK = "from grade import wrong_answer"


def text_of(chapter, name):
    path = grade.folder_of(chapter) / name
    if not path.exists():
        pytest.skip(f"{name} has been taken away")
    return path.read_text(encoding="utf-8")


def wrong_answers(chapter):
    """[(task, function)] of the chapter's wrong.py; none if a class has taken it away."""
    path = grade.folder_of(chapter) / "wrong.py"
    functions = vars(grade.load(path)).values() if path.exists() else ()
    marked = [function for function in functions if hasattr(function, "breaks")]
    return [(task, function) for task in GRADERS[chapter].TASKS for function in marked if function.task == task.name]


WRONG = [(chapter, task, function) for chapter in CHAPTERS for task, function in wrong_answers(chapter)]


def readable(report, chapter=1, language="en"):
    """The report as a reader gets it, after a look at its form: short lines, none of Python's own."""
    text = report.text(grade.speaker(chapter, language), 100)
    assert max(map(wide, text.splitlines()), default=0) <= 100
    assert not re.search(r"Traceback|assert|grade\.py|grader\.py|inside\.py|Sentence|\{\w+\}", text), text
    return text


def flat(text):
    return " ".join(text.split())


@pytest.fixture(scope="module")
def box():
    """A process that many tests share; after an answer that ends it, it starts again."""
    with Sandbox() as sandbox:
        yield sandbox


# -- Each chapter: what it has to hold

@every_task
def test_the_solution_passes(chapter, number, task, box):
    source = text_of(chapter, "solutions.py")
    box.load(source)
    report = grade.grade_task(task, box, source, limit=30)
    assert report.status == "solved" and report.points == report.of > 0, readable(report)


@every_task
@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_stub_says_which_task_it_is(chapter, number, task, language, box):
    path = grade.tasks_file(chapter, language)
    if "NotImplementedError" not in getattr(grade.load(path), task.name).__code__.co_names:
        pytest.skip("this one has been answered")
    (report,) = grade.grade(chapter, path, number)
    head = f"chapter {chapter}, task {number}: " if language == "en" else f"第 {chapter} 章第 {number} 题："
    assert report.status == "not started" and head in readable(report) and report.points == 0


@every_task
@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_statement_is_true(chapter, number, task, language):
    """The docstring has its number and a worked example, which the solution confirms; both have the same parameters."""
    tasks = grade.load(grade.tasks_file(chapter, language))
    text_of(chapter, "solutions.py")
    answers = grade.load(grade.folder_of(chapter) / "solutions.py")
    statement, solution = getattr(tasks, task.name), getattr(answers, task.name)
    assert statement.__doc__.startswith(f"Task {number} " if language == "en" else f"第 {number} 题")
    assert inspect.signature(statement) == inspect.signature(solution)
    assert list(inspect.signature(statement).parameters) == list(task.cases()[0].arguments)
    example = doctest.DocTestParser().get_doctest(statement.__doc__, vars(answers), task.name, None, None)
    said = []
    result = doctest.DocTestRunner().run(example, out=said.append)
    assert result.attempted > 0 and not result.failed, "".join(said)
    assert len(text_of(chapter, "solutions.py").split(f"def {task.name}(")[1].split("\n\n\n")[0].splitlines()) <= 20


@every_file
def test_what_is_given_in_a_task_file_is_true_as_well(chapter, language):
    tasks = grade.load(grade.tasks_file(chapter, language))
    given = {name for name, f in vars(tasks).items() if inspect.isfunction(f) and f.__module__ == tasks.__name__}
    for name in given - {task.name for task in GRADERS[chapter].TASKS}:
        example = doctest.DocTestParser().get_doctest(getattr(tasks, name).__doc__, vars(tasks), name, None, None)
        result = doctest.DocTestRunner().run(example)
        assert result.attempted > 0 and not result.failed


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_both_task_files_ask_the_same(chapter):
    english, chinese = (grade.load(grade.folder_of(chapter) / name) for name in ("tasks.py", "tasks.zh.py"))
    functions = [[name for name, f in vars(module).items() if inspect.isfunction(f)] for module in (english, chinese)]
    assert functions[0] == functions[1]
    for name in functions[0]:
        a, b = getattr(english, name), getattr(chinese, name)
        assert inspect.signature(a) == inspect.signature(b)
        calls = [[(e.source.split("#")[0].strip(), e.want) for e in doctest.DocTestParser().get_examples(f.__doc__)]
                 for f in (a, b)]
        assert calls[0] == calls[1]


@pytest.fixture(scope="module")
def wrong_boxes():
    boxes = {}
    yield boxes
    for sandbox in boxes.values():
        sandbox.close()


@pytest.mark.parametrize("chapter, task, function", WRONG, ids=[f"ch{c:02d}-{f.__name__}" for c, _, f in WRONG])
def test_a_wrong_answer_fails_by_its_rule(chapter, task, function, wrong_boxes):
    source = text_of(chapter, "wrong.py").replace(MARK, "wrong_answer = lambda *_, **__: lambda function: function")
    sandbox = wrong_boxes.setdefault(chapter, Sandbox())
    report = grade.grade_task(task, sandbox, source, "wrong.py", function.__name__, limit=10 if function.ends else 1)
    assert report.status in ("wrong", "raised", "too slow") and report.points == 0, report.status
    rule = (GRADERS[chapter].RULES | grade.ALWAYS)[function.breaks]
    assert report.rule == rule, readable(report)
    assert flat(rule) in flat(readable(report)) and f"{task.name}(" in readable(report)
    chinese = readable(report, chapter, "zh")
    assert "".join(grade.speaker(chapter, "zh")(rule).split()) in "".join(chinese.split()) and "规则" in chinese or "考点" in chinese


@every_task
def test_wrong_answers_enough(chapter, number, task):
    mine = [function for c, t, function in WRONG if (c, t) == (chapter, task)]
    if not mine:
        pytest.skip("the wrong answers have been taken away")
    assert len(mine) >= 15 and len({function.breaks for function in mine}) >= 5


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_rule_is_broken_by_somebody(chapter):
    text_of(chapter, "wrong.py")
    assert {function.breaks for c, _, function in WRONG if c == chapter} >= set(GRADERS[chapter].RULES)
    assert not any(placeholders(rule) for rule in GRADERS[chapter].RULES.values())


# -- The harness: whatever the answer does, a sentence comes back

TASK = grade.Task("double", lambda: [grade.Case({"numbers": [1, 2]}, [2, 4], "Each number doubles.")])
ODD = {     # the answer's file: (status, what the report says)
    "def double(numbers):\n    return [2 * n for n in numbers]": ("solved", ""),
    "def double(numbers):\n    print('hello')\n    return tuple(2.0 * n for n in numbers)": ("solved", ""),
    "def double(numbers):\n    numbers += numbers\n    return numbers": ("wrong", "your code [1, 2, 1, 2]"),
    "def double(numbers):\n    print(numbers)": ("wrong", "None, as a function without a return statement"),
    "def double(numbers):\n    print('a\\nb')\n    return 3": ("wrong", "printed a | b"),
    "def double(numbers):\n    return (2 * n for n in numbers)": ("wrong", "something of type generator"),
    "import numpy\ndef double(numbers):\n    return 2 * numpy.array(numbers)": ("wrong", "something of type ndarray"),
    "import numpy\ndef double(numbers):\n    return [numpy.float64(2), numpy.float64(4)]": ("solved", ""),
    "def double(numbers):\n    return [float('nan'), 10 ** 400]": ("wrong", "[nan, 1"),
    "def double(numbers):\n    return [2, 10 ** 9999]": ("wrong", "your code"),
    "def double(numbers):\n    return [True, 4]": ("wrong", "[True, 4]"),
    "def double(numbers):\n    numbers.append(numbers)\n    return numbers": ("wrong", "[1, 2, [1, 2, ["),
    "def double(numbers):\n    return list(range(10 ** 6))": ("wrong", "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...]"),
    "class Odd:\n    def __eq__(self, other):\n        return True\ndef double(numbers):\n    return [Odd(), Odd()]":
        ("wrong", "Odd"),
    "class Odd(list):\n    def __iter__(self):\n        1 / 0\ndef double(numbers):\n    return Odd([2, 4])":
        ("raised", "ZeroDivisionError: division by zero at line 3 of tasks.py: 1 / 0"),
    "def double(numbers):\n    return half(numbers)\ndef half(numbers):\n    return numbers[2] / 2":
        ("raised", "IndexError: list index out of range at line 4 of tasks.py: return numbers[2] / 2"),
    "def double(numbers):\n    return double(numbers)": ("raised", "RecursionError"),
    "def double():\n    return 2": ("raised", "TypeError: double() takes 0 positional arguments but 1 was given"),
    "import sys\ndef double(numbers):\n    sys.exit(1)": ("raised", "SystemExit: 1 at line 3 of tasks.py: sys.exit(1)"),
    "def double(numbers):\n    raise NotImplementedError('to do')": ("not started", "to do"),
    "def double(numbers):\n    while numbers:\n        pass":
        ("too slow", "was still running after 0.3 s at line"),
    "def double(numbers):\n    while True:\n        try:\n            numbers = numbers\n        except BaseException:\n"
    "            pass": ("too slow", "was still running after 0.3 s at line"),
    "def twice(numbers):\n    return 2": ("missing", "has no function double"),
    "double = 2": ("missing", "has no function double"),
    "def double(numbers)\n    return 2":
        ("raised", "SyntaxError: expected ':' at line 1 of tasks.py: def double(numbers)"),
    "def double(numbers):\nreturn 2": ("raised", "at line 2 of tasks.py: return 2"),
    "import nowhere_to_be_found": ("raised", "ModuleNotFoundError: No module named 'nowhere_to_be_found' at line 1"),
    "while True:\n    pass": ("too slow", "was still running after 0.3 s at line"),
    "x = '\x00'": ("raised", "null bytes"),
    "raise NotImplementedError('all to do')": ("not started", "all to do"),
}


def graded(answer, tmp_path, monkeypatch, limit=10, task=TASK):
    (tmp_path / "tasks.py").write_text(answer)
    monkeypatch.setattr(grade, "tasks_of", lambda chapter: [task])
    (report,) = grade.grade(1, tmp_path / "tasks.py", limit=limit)
    return report


@pytest.mark.parametrize("answer", ODD, ids=range(len(ODD)))
def test_odd_answers(answer, tmp_path, monkeypatch):
    status, sentence = ODD[answer]
    report = graded(answer, tmp_path, monkeypatch, 0.3 if status == "too slow" else 10)
    text = flat(readable(report))
    assert report.status == status and sentence in text, (report.status, text)
    assert len(text) < 700
    readable(report, language="zh")


@pytest.mark.parametrize("got, expected, equal", [
    (0.1 + 0.2, 0.3, True), (2, 2.0, True), (0.3001, 0.3, False), ("2", 2, False), (None, 0, False), (0, None, False),
    ([], (), True), ([1], [1, 1], False), ("ab", ["a", "b"], False), ({"a": 1}, {"a": 1.0}, True),
    ({}, {"a": 1}, False), (False, 0, False), (inside.Other("Tensor"), 2, False)])
def test_same(got, expected, equal):
    assert grade.same(got, expected) is equal


@pytest.mark.parametrize("value", [None, True, 3, -2.5, float("inf"), "é", [1, (2, "x")], {"a": [1], 2: None}, {1, 2}, frozenset("a"),
                                   [[[[]]]], 10 ** 30, ()])
def test_values_cross_the_pipe_as_they_are(value):
    got = inside.decode(json.loads(json.dumps(inside.encode(value))))
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("data", [{}, {"list": 1}, {"float": 1}, {"eval": "1"}, [1], {"set": [{"list": []}]},
                                  {"dict": [[{"list": []}, 1]]}, {"dict": [1]}, {"a": 1, "b": 2}, {"float": "x"}])
def test_what_is_no_value_is_refused(data):
    with pytest.raises(ValueError):
        inside.decode(data)


def test_times_and_state_are_named(tmp_path, monkeypatch):
    cases = grade.Task("f", lambda: [grade.Case({"x": [1]}, 1, "One."), grade.Case({"x": [1]}, 1, "Two.")])
    report = graded("seen = []\ndef f(x):\n    seen.append(1)\n    return len(seen)", tmp_path, monkeypatch, task=cases)
    assert report.rule == grade.ALWAYS["state"]
    report = graded("def f(x):\n    return x.pop()", tmp_path, monkeypatch, task=cases)
    assert report.rule == grade.ALWAYS["arguments"] and "x is [] afterwards" in readable(report)
    report = graded("def f(x):\n    return [1]", tmp_path, monkeypatch, task=cases)
    assert report.rule == grade.ALWAYS["number"]


# -- Attacks get nothing: no point, no harm, and a sentence

linux = pytest.mark.skipif(sys.platform != "linux", reason="the walls are Linux's")
HEAD = "import atexit, builtins, ctypes, gc, json, os, pickle, signal, sys, threading, time\n"
FORGED = '{"status": "returned", "value": {"list": [2, 4]}, "arguments": [{"list": [1, 2]}]}'
ATTACKS = {     # what is tried: (the body of double, statuses that may come of it)
    "patch the grader": ("import grade\ngrade.same = lambda *_: True\nreturn 0", "raised"),
    "patch the grader by its path": (f"sys.path.insert(0, {str(ROOT / 'chapters' / 'exercises')!r})\nimport grade\n"
                                     "grade.same = lambda *_: True\nreturn 0", "raised"),
    "patch the runner": ("main = sys.modules['__main__']\nmain.encode = lambda *_: [2, 4]\nreturn 0", "wrong raised"),
    "patch what it imports": ("json.loads = json.dumps = lambda *_: 0\nbuiltins.isinstance = lambda *_: True\nreturn 0",
                              "wrong raised too slow ended"),
    "print a verdict": ("print('chapter 1, task 1, double: solved')\nreturn 0", "wrong"),
    "write to every file": ("for fd in range(3, 30):\n    try:\n        os.write(fd, b'solved\\n')\n    except OSError:\n"
                            "        pass\nreturn 0", "wrong"),
    "close every file": ("os.closerange(0, 100)\nreturn 0", "ended too slow"),
    "pickle": ("class P:\n    def __reduce__(self):\n        return os._exit, (0,)\nreturn [P(), pickle.dumps(P())]", "wrong"),
    "end well": ("os._exit(0)", "ended"),
    "end well at exit": ("atexit.register(os._exit, 0)\nsys.exit(0)", "raised"),
    "kill the grader": ("os.kill(os.getppid(), 9)\nreturn 0", "raised"),
    "kill the grader in C": (f"ctypes.CDLL(None).kill({os.getpid()}, 9)\nreturn 0", "wrong"),
    "kill everybody": ("ctypes.CDLL(None).kill(-1, 9)\nreturn 0", "wrong ended"),
    "fork": ("os.fork()\nreturn 0", "raised"),
    "a hundred forks": ("libc = ctypes.CDLL(None)\nfor _ in range(100):\n    if libc.fork() == 0:\n        time.sleep(600)\n"
                        "return 0", "wrong"),
    "sleep in C, deaf to signals": ("signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\nctypes.CDLL(None).sleep(600)",
                                    "too slow"),
    "all the memory": ("return [bytearray(10 ** 8) for _ in range(10 ** 4)]", "raised too slow"),
    "output without end": ("while True:\n    print('x' * 1000)", "too slow"),
    "replies without end": ("while True:\n    for fd in range(3, 20):\n        try:\n            os.write(fd, b'x' * 60000)\n"
                            "        except OSError:\n            pass", "too slow ended"),
    "crash": ("ctypes.string_at(0)", "ended"),
    "the network": ("import socket\nsocket.create_connection(('127.0.0.1', 9), 1)", "raised"),
    "a list that lies": ("class L(list):\n    __class__ = int\n    __eq__ = lambda *_: True\nreturn L([0])", "wrong raised"),
    "a command": ("os.system('echo solved')\nreturn 0", "raised"),
    "leave a file": (f"open({str(ROOT / 'solved')!r}, 'w')\nreturn 0", "raised"),
}


@linux
@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_get_nothing(attack, tmp_path, monkeypatch):
    body, statuses = ATTACKS[attack]
    before = processes()
    report = graded(HEAD + "def double(numbers):\n    " + body.replace("\n", "\n    "), tmp_path, monkeypatch, limit=1)
    assert report.points == 0 and report.status in [s.strip() for s in re.findall(r"too slow|\w+", statuses)], report
    assert readable(report) and readable(report, language="zh")
    assert not (ROOT / "solved").exists()
    for _ in range(100):
        if not processes() - before:
            break
        time.sleep(0.05)
    assert not processes() - before, "somebody is left behind"


def processes():
    """Those that run the sandbox's inner half."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                found |= {pid} if b"inside.py" in file.read() else set()
        except OSError:
            pass
    return found


@linux
def test_a_forged_reply_is_an_answer_and_no_verdict(tmp_path, monkeypatch):
    """Whoever writes the right value into the pipe has answered that one call; the next is asked all the same."""
    task = grade.Task("double", lambda: [grade.Case({"numbers": [1, 2]}, [2, 4], "One."),
                                         grade.Case({"numbers": [5]}, [10], "Two.")])
    body = f"def double(numbers):\n    for fd in range(3, 20):\n        try:\n            os.write(fd, b'{FORGED}\\n')\n" \
           "        except OSError:\n            pass\n    return 0"
    report = graded(HEAD + body, tmp_path, monkeypatch, limit=1, task=task)
    assert report.status == "wrong" and report.points == 0


@linux
@pytest.mark.parametrize("path", ["chapters/exercises/ch01/solutions.py", "chapters/exercises/ch01/grader.py", "scheduler.py",
                                  "chapters/exercises/grade.py", "tests/test_exercises.py"])
def test_what_knows_the_answers_cannot_be_read(path, box):
    """Neither by Python, nor, where there are namespaces, by C."""
    box.load("import ctypes\n"
             "def python(path):\n    try:\n        return len(open(path).read())\n    except OSError:\n        return 0\n"
             "def in_c(path):\n    libc = ctypes.CDLL(None)\n    fd = libc.open(path.encode(), 0)\n"
             "    return max(0, libc.read(fd, ctypes.create_string_buffer(9), 9))\n")
    assert box.call("python", [str(ROOT / path)])["value"] == 0
    if "files" not in box.missing:
        assert box.call("in_c", [str(ROOT / path)])["value"] == 0
        assert box.call("in_c", [os.__file__])["value"] == 9, "something is amiss with this test"


@linux
def test_a_process_of_the_answers_dies_with_it():
    """Without namespaces, by its group; with them, whatever it calls itself."""
    with Sandbox() as sandbox:
        sandbox.load("import ctypes, os, time\ndef f():\n    libc = ctypes.CDLL(None)\n    if libc.fork() == 0:\n"
                     "        libc.setsid()\n        time.sleep(600)\n    return 1\n")
        sandbox.call("f", [])
        if "processes" in sandbox.missing:
            pytest.skip("no namespaces here")
        pid = sandbox.process.pid
    time.sleep(0.1)
    assert not [p for p in processes() if os.path.exists(f"/proc/{p}") and os.getsid(int(p)) == pid]


def test_without_walls_it_is_a_plain_process_and_says_so(monkeypatch, tmp_path, capsys):
    """As on a system that has neither namespaces nor limits."""
    monkeypatch.setattr("sandbox.WALLS", ("files", "network", "processes", "memory", "time", "moon"))
    answers = tmp_path / "tasks.py"
    answers.write_text("def latencies(a, s, t):\n    return {}\n")
    assert grade.main(["1", "--task", "3", "--file", str(answers), "--lang", "en"]) == 1
    assert "on this system it is not limited in:" in capsys.readouterr().out
    text = (ROOT / "chapters" / "exercises" / "inside.py").read_text()
    probe = text.replace("import resource", "raise ImportError").replace('sys.platform == "linux"', "False").replace(
        'if __name__ == "__main__":\n    main()', "print(wall_in({}), 2 * 21)")
    done = subprocess.run([sys.executable, "-I", "-c", probe], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[] 42\n", done.stderr


# -- A class

def test_a_class_is_graded_in_time_and_resumed(tmp_path):
    """Forty students, solved or not or hanging; the second time nobody is graded again, but for the one who handed in anew."""
    right, stub = text_of(1, "solutions.py"), text_of(1, "tasks.py")
    for i in range(38):
        (tmp_path / f"student{i:02d}.py").write_text(right if i % 2 else stub)
    (tmp_path / "学生").mkdir()
    (tmp_path / "学生" / "tasks.py").write_text(right)
    (tmp_path / "=loop.py").write_text("while True:\n    pass\n")
    start, seen = time.perf_counter(), []
    rows = grade_folder(1, tmp_path, lambda student, row: seen.append(student), workers=2)
    assert time.perf_counter() - start < 60 and len(rows) == len(seen) == 40
    with open(tmp_path / "grades.csv", newline="", encoding="utf-8-sig") as file:
        table = {row["student"]: row for row in csv.DictReader(file)}
    assert table["学生"]["points"] == table["student01"]["points"] == "100" and table["student00"]["points"] == "0"
    assert table["'=loop"]["points"] == "0" and "too slow" in table["'=loop"].values()
    (tmp_path / "student00.py").write_text(right)
    start = time.perf_counter()
    rows = grade_folder(1, tmp_path, workers=2)
    assert time.perf_counter() - start < 5 and {row["student"]: str(row["points"]) for row in rows}["student00"] == "100"


# -- The command line and pytest

def test_command_line(tmp_path, capsys):
    answers = tmp_path / "mine.py"
    text = (grade.folder_of(1) / "tasks.py").read_text()
    answers.write_text(text + "\n\ndef kv_bytes_per_token(L, H, Hkv, d, size):\n    return 2 * L * Hkv * d * size\n")
    assert grade.main(["1", "--task", "1", "--file", str(answers), "--lang", "en"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("chapter 1, task 1, kv_bytes_per_token: solved\n1 of 1 solved, 15 of 15 points (mine.py)\n")
    answers.write_text("def kv_bytes_per_token(L, H, Hkv, d, size):\n    return 2 * L * H * d * size\n")
    assert grade.main(["1", "--file", str(answers), "--lang", "en"]) == 1
    out = capsys.readouterr().out
    assert "chapter 1, task 1, kv_bytes_per_token: wrong\n" in out
    assert "    your code  1680\n    expected   420\n    rule       Only KV heads are cached." in out
    assert out.count(": missing") == 4 and "0 of 5 solved, 0 of 100 points (mine.py)\n" in out
    assert grade.main(["1", "--file", str(answers), "--lang", "zh"]) == 1
    out = capsys.readouterr().out
    assert "第 1 章第 1 题 kv_bytes_per_token：不对\n" in out and "    你的代码   1680\n    应为       420\n    规则       缓存里只有 KV 头" in out
    assert grade.main(["1", "--file", str(answers), "--json", "--lang", "en"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["points"], told["of"], len(told["tasks"])) == (0, 100, 5) and told["tasks"][0]["status"] == "wrong"
    assert told["tasks"][0]["rule"].startswith("Only KV heads")
    folder = tmp_path / "class"
    folder.mkdir()
    shutil.copy(answers, folder / "anna.py")
    assert grade.main(["1", "--folder", str(folder), "--lang", "en"]) == 0
    out = capsys.readouterr().out
    assert "anna         0 / 100  - . . . ." in out and "task 1, kv_bytes_per_token: solved by 0 of 1" in out
    for arguments, sentence in ((["1", "--task", "6"], "chapter 1 has tasks 1 to 5, not 6"),
                                (["99"], "chapter 99 has no exercises; chapters with some: 1"),
                                (["1", "--file", "nowhere.py"], "there is no file nowhere.py"),
                                (["1", "--folder", "nowhere"], "there is no folder nowhere")):
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
                          env=os.environ | {"LC_ALL": "C.UTF-8", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'chapters/tools'}"})
    open_tasks = sum(len(grader.TASKS) for grader in GRADERS.values()) - 1               # other chapters' are all open
    assert done.returncode == 1 and f"{open_tasks} failed, 1 passed" in done.stdout, done.stdout + done.stderr
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
    text_of(1, "solutions.py")
    answers = grade.load(grade.folder_of(1) / "solutions.py")
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
