"""The grader of every chapter: runs your answers and says what they decided, what was expected, which rule that breaks.

    make grade CH=1                                    the five tasks of chapter 1
    python chapters/exercises/grade.py 1 --task 2      one of them
    python -m pytest chapters/exercises                all chapters, as tests (make test installs pytest)

A chapter is a folder of four files; a new one only adds its folder, and nothing here changes:

    ch01/tasks.py       yours: functions that state a problem and raise NotImplementedError("chapter 1, task 1: …")
    ch01/grader.py      TASKS, a list of Task: the cases, and the rule that each of them is about
    ch01/solutions.py   the reference answers
    ch01/wrong.py       wrong answers, each with the rule that the grader must name (tests/test_exercises.py)

Cases climb: each differs from those before it in one thing, so the first that fails names the rule broken. Answers run
in a thread of their own, with a time limit, on copies of the arguments; so whatever they do, a sentence comes back. Two
things are beyond it: a loop inside a single C call, and memory without end.
"""
from __future__ import annotations

import argparse
import copy
import ctypes
import functools
import linecache
import math
import os
import pathlib
import reprlib
import shutil
import sys
import textwrap
import threading
import traceback
import types
from dataclasses import dataclass
from typing import Callable, NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent / "tools"), str(HERE)]

TIME_LIMIT = 3.0    # seconds a call may take; the reference answers take milliseconds


# -- 1. What a chapter's grader is made of

class Case(NamedTuple):
    """One call: the arguments by name (they are passed in this order), the right answer, the rule the case is about."""
    arguments: dict
    expected: object
    rule: str


@dataclass
class Task:
    """One task. `cases()` gives its cases: a function, so that what a simulation has to say is only computed if asked.

    `compare(case, got)` finds what is wrong with an answer, as (your code, expected, rule), or None if it is right.
    Without it an answer is compared as a whole, and the rule is the case's.
    """
    name: str
    cases: Callable[[], list[Case]]
    compare: Callable | None = None

    def __post_init__(self):
        self.cases = functools.cache(self.cases)


@dataclass
class Report:
    """What came of one task. status: solved, not started, wrong, raised, too slow, missing. rule: the one that is
    broken, or that of the case at which the code failed, or None. lines: ((label, text), …), shown below the status."""
    name: str
    status: str
    rule: str | None = None
    lines: tuple = ()

    def text(self, width=100):
        """The lines as a small table, filled to the width."""
        rows = []
        for label, text in self.lines:
            indent = f"    {label:<11}" if label else "    "
            rows.append(textwrap.fill(text, width, initial_indent=indent, subsequent_indent=" " * len(indent),
                                      break_on_hyphens=False))
        return "".join(row + "\n" for row in rows)


def wrong_answer(task, rule, ends=True):
    """Marks a function as a wrong answer to `task` that breaks `rule`, a key of the chapter's RULES. ends: False if it
    runs for ever."""
    def mark(function):
        function.task, function.breaks, function.ends = task, rule, ends
        return function
    return mark


# -- 2. Looking at answers, whatever they are

class _Short(reprlib.Repr):
    """repr, but never long, and floats as people write them."""

    def __init__(self):
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 12
        self.maxstring = self.maxother = 60

    def repr_float(self, x, level):
        return f"{x:.10g}"


def show(value) -> str:
    """A value in a few words: plain ones as they are, anything else by its kind."""
    if value is None or isinstance(value, (bool, int, float, str, list, tuple, dict, set, frozenset)):
        try:
            return _Short().repr(value)
        except Exception:     # an int of many thousand digits, or something odd inside a list
            pass
    return f"something of type {type(value).__name__}"


def same(got, expected) -> bool:
    """Equal, as far as a task goes: a list may be a tuple, an int a float, and floats may differ in the tenth digit."""
    if isinstance(expected, (list, tuple)):
        return (isinstance(got, (list, tuple)) and len(got) == len(expected)
                and all(same(a, b) for a, b in zip(got, expected)))
    if isinstance(expected, dict):
        return (isinstance(got, dict) and got.keys() == expected.keys()
                and all(same(got[key], expected[key]) for key in expected))
    if isinstance(expected, (int, float)):
        try:
            number = isinstance(got, (int, float)) and not isinstance(got, bool)
            return number and math.isclose(got, expected, rel_tol=1e-9, abs_tol=1e-12)
        except OverflowError:
            return False
    return type(got) is type(expected) and got == expected


# -- 3. Running an answer

class TimeUp(BaseException):
    """Thrown into an answer that takes too long; not an Exception, so that `except Exception` doesn't keep it."""


def run_bounded(function, arguments, limit):
    """("returned", value), ("raised", exception) or ("too slow", the thread's innermost frame) of function(*arguments).

    A thread, because it can be left behind on every system: it is a daemon, so it holds up nobody's exit. os._exit
    raises meanwhile: it would end the grader without a word, and its exit status 0 would read as solved."""
    result, pid, exit_now = [], os.getpid(), os._exit

    def no_exit(status):
        if os.getpid() != pid:                  # a process of the answer's own may end as it likes
            exit_now(status)
        raise SystemExit(f"os._exit({status})")

    def work():
        try:
            result.append(("returned", function(*arguments)))
        except BaseException as error:          # SystemExit too: it is the answer's, not ours
            result.append(("raised", error))

    thread = threading.Thread(target=work, daemon=True, name="answer")
    os._exit = no_exit
    try:
        thread.start()
        thread.join(limit)
    finally:
        os._exit = exit_now
    if not thread.is_alive():
        return result[0]
    frame = sys._current_frames().get(thread.ident)
    for _ in range(5):                          # a bare `except:` may swallow some of them
        if thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(TimeUp))
            thread.join(0.1)
    return "too slow", frame


def where(home, frames) -> str:
    """The innermost of the frames (outermost first, as (file, line)) that lies in the file `home`, with its text."""
    for file, line in reversed(frames):
        if file == home:
            return f" at line {line} of {pathlib.Path(home).name}: {linecache.getline(home, line).strip()}"
    return ""


def failure(outcome, value, home, limit) -> tuple[str, str]:
    """(status, sentence) for an answer, or a file, that did not come to its end."""
    if outcome == "too slow":
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(value)][::-1]
        return "too slow", f"was still running after {limit:g} s{where(home, frames)}"
    if isinstance(value, NotImplementedError):
        return "not started", str(value)
    if isinstance(value, SyntaxError) and value.filename == home:
        return "raised", f"{type(value).__name__}: {value.msg}" + where(home, [(home, value.lineno or 1)])
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(value.__traceback__)]
    return "raised", f"{type(value).__name__}: {value}".rstrip(": ") + where(home, frames)


def load(path):
    """A file as a module, from its text as it is now: compiled files are told apart by the second, which an edit can
    outrun. Raises whatever the file raises."""
    path = pathlib.Path(path).resolve()
    linecache.checkcache(str(path))
    module = types.ModuleType(f"exercises_{path.parent.name}_{path.stem}")
    sys.modules[module.__name__] = module      # a dataclass looks its own module up there
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    return module


def grade_task(task, function, home, limit=TIME_LIMIT) -> Report:
    """Run one answer through the task's cases, up to the first that fails. home: the file the answer is in."""
    if not callable(function):
        return Report(task.name, "missing", None, (("your code", f"has no function {task.name} in {home}"),))
    for case in task.cases():
        outcome, value = run_bounded(function, copy.deepcopy(list(case.arguments.values())), limit)
        call = f"{task.name}({', '.join(f'{name}={show(value)}' for name, value in case.arguments.items())})"
        if outcome != "returned":
            status, sentence = failure(outcome, value, str(home), limit)
            if status == "not started":
                return Report(task.name, status, None, (("", sentence),))
            # A slip of the pen breaks no rule, but what the case is about may be what it slipped on.
            return Report(task.name, status, case.rule, (("asked", call), ("your code", sentence),
                                                         ("expected", show(case.expected)), ("about", case.rule)))
        found = (task.compare(case, value) if task.compare else
                 None if same(value, case.expected) else (show(value), show(case.expected), case.rule))
        if found:
            decided = "None, as a function without a return statement has it" if value is None else found[0]
            return Report(task.name, "wrong", found[2], (("asked", call), ("your code", decided),
                                                         ("expected", found[1]), ("rule", found[2])))
    return Report(task.name, "solved")


# -- 4. A chapter

def chapters() -> list[int]:
    return sorted(int(folder.name[2:]) for folder in HERE.glob("ch[0-9][0-9]"))


def folder_of(chapter: int) -> pathlib.Path:
    return HERE / f"ch{chapter:02d}"


def tasks_of(chapter: int) -> list[Task]:
    return load(folder_of(chapter) / "grader.py").TASKS


def grade(chapter, path=None, only=None, limit=TIME_LIMIT):
    """Yields the Report of each task of a chapter (or of number `only`), as its grading ends. path: the answers."""
    path = pathlib.Path(path or folder_of(chapter) / "tasks.py").resolve()
    outcome, answers = run_bounded(load, [path], limit)
    for number, task in enumerate(tasks_of(chapter), 1):
        if only not in (None, number):
            continue
        if outcome == "returned":
            yield grade_task(task, getattr(answers, task.name, None), path, limit)
        else:
            status, sentence = failure(outcome, answers, str(path), limit)
            yield Report(task.name, status, None, (("your file", sentence),))


def main(argv=None) -> int:
    """Prints each task's report; 0 if all are solved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chapter", type=int)
    parser.add_argument("--task", type=int, help="only this one")
    parser.add_argument("--file", help="answers that lie elsewhere than in the chapter's tasks.py")
    args = parser.parse_args(argv)
    if args.chapter not in chapters():
        parser.error(f"chapter {args.chapter} has no exercises; chapters with some: {', '.join(map(str, chapters()))}")
    count = len(tasks_of(args.chapter))
    if args.task is not None and not 1 <= args.task <= count:
        parser.error(f"chapter {args.chapter} has tasks 1 to {count}, not {args.task}")
    if args.file and not pathlib.Path(args.file).is_file():
        parser.error(f"there is no file {args.file}")
    width, reports = min(100, shutil.get_terminal_size().columns), []
    for report in grade(args.chapter, args.file, args.task):
        reports.append(report)
        number = args.task or len(reports)
        print(f"chapter {args.chapter}, task {number}, {report.name}: {report.status}\n{report.text(width)}", end="",
              flush=True)
    solved = sum(report.status == "solved" for report in reports)
    print(f"{solved} of {len(reports)} solved")
    return int(solved < len(reports))


if __name__ == "__main__":
    import grade as itself      # under the name by which the chapters' files import it: one module, not two
    from options import end_quietly
    end_quietly()
    sys.exit(itself.main())
