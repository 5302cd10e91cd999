"""The grader of every chapter: runs your answers and says what they decided, what was expected, which rule that breaks.

    make grade CH=1                                                the five tasks of chapter 1
    python chapters/exercises/grade.py 1 --task 2 --lang zh        one of them, in Chinese
    python chapters/exercises/grade.py 1 --json                    for other programs
    python chapters/exercises/grade.py 1 --folder submissions/     a class: a table, and grades.csv in the folder
    python -m pytest chapters/exercises                            all chapters, as tests (make test installs pytest)

A chapter is a folder; a new one only adds its own, and nothing here changes:

    ch01/tasks.py, tasks.zh.py   yours: functions that state a problem and raise NotImplementedError("chapter 1, …")
    ch01/grader.py, zh.py        TASKS, a list of Task: the cases, and the rule that each is about; the Chinese of it
    ch01/solutions.py            the reference answers
    ch01/wrong.py                wrong answers, each with the rule that the grader must name (tests/test_exercises.py)

Cases climb: each differs from those before it in one thing, so the first that fails names the rule broken; a task whose
answers can be read more closely has a `compare` of its own. Answers run in another process, behind walls (sandbox.py);
this one asks, compares and judges, and never executes a line of theirs. So whatever they do, a sentence comes back.
"""
from __future__ import annotations

import argparse
import functools
import inspect
import json
import math
import os
import pathlib
import reprlib
import sys
import types
from dataclasses import dataclass, field
from typing import Callable, NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent), str(HERE.parent / "tools"), str(HERE)]

from lang import Say, Sentence, T, add_lang_option, catalogue, fill, wide  # noqa: E402
from sandbox import Other, Sandbox  # noqa: E402

TIME_LIMIT = 3.0    # seconds a call may take; the reference answers take milliseconds

ALWAYS = T({        # rules of every task
    "number": "The answer is one number, and it is returned: not printed, not a list, not a text.",
    "arguments": "The arguments are the caller's: an answer leaves its lists and dicts as it found them.",
    "state": "Each call stands alone: asked for this at once, your code is right. Something is kept from earlier "
             "calls, in a global name or in a default argument.",
})
STATUS = T({"solved": "solved", "not started": "not started", "wrong": "wrong", "raised": "raised",
            "missing": "missing", "too slow": "too slow", "ended": "ended"})
LABEL = T({"asked": "asked", "code": "your code", "expected": "expected", "rule": "rule", "about": "about",
           "printed": "printed", "file": "your file", "": ""})
DENIED = T({"process": "an answer may not start other processes", "network": "an answer may not use the network",
            "signal": "an answer may not send signals to processes",
            "file": "an answer may not read the project's files, nor change any"})


# -- 1. What a chapter's grader is made of

class Case(NamedTuple):
    """One call: the arguments by name (they are passed in this order), the right answer, the rule the case is about."""
    arguments: dict
    expected: object
    rule: str


class Found(NamedTuple):
    """What is wrong with an answer: what your code decided, what was expected (texts or Sentences), the rule."""
    code: object
    expected: object
    rule: str


@dataclass
class Task:
    """One task. `cases()` gives its cases: a function, so that what a simulation has to say is only computed if asked.

    `compare(case, got)` returns Found, or None if the answer is right. Without it an answer is compared as a whole, and
    the rule is the case's. `explain(results)`, with [(case, got)] of all cases, may name a better rule, or None.
    """
    name: str
    cases: Callable[[], list[Case]]
    compare: Callable | None = None
    explain: Callable | None = None
    points: int = 1

    def __post_init__(self):
        self.cases = functools.cache(self.cases)


@dataclass
class Report:
    """What came of one task. status: a key of STATUS. rule: the one that is broken, or that of the case at which the
    code failed, or None. lines: [(key of LABEL, text or Sentence)], shown below the status."""
    name: str
    status: str
    rule: str | None = None
    lines: list = field(default_factory=list)
    points: int = 0
    of: int = 1

    def text(self, say, width=100):
        """The lines as a small table, filled to the width."""
        rows = ""
        for label, text in self.lines:
            text = text if isinstance(text, str) and label not in ("rule", "about") else say(text)
            head = say(LABEL[label])
            indent = f"    {head}{' ' * max(1, 11 - wide(head))}" if head else "    "
            rows += fill(text, width, indent, " " * wide(indent)) + "\n"
        return rows

    def data(self, say):
        """For --json."""
        lines = {label or "code": text if isinstance(text, str) and label not in ("rule", "about") else say(text)
                 for label, text in self.lines}
        return {"task": self.name, "status": self.status, "points": self.points, "of": self.of,
                "rule": self.rule and say(self.rule), **lines}


def wrong_answer(task, rule, ends=True):
    """Marks a function as a wrong answer to `task` that breaks `rule`, a key of the chapter's RULES or of ALWAYS. ends:
    False if it runs for ever."""
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


def show(value):
    """A value in a few words: plain ones as they are, anything else by its kind."""
    return Sentence("something of type {kind}", kind=value.kind) if isinstance(value, Other) else _Short().repr(value)


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def same(got, expected) -> bool:
    """Equal, as far as a task goes: a list may be a tuple, an int a float, and floats may differ in the tenth digit."""
    if isinstance(expected, (list, tuple)):
        return (isinstance(got, (list, tuple)) and len(got) == len(expected)
                and all(same(a, b) for a, b in zip(got, expected)))
    if isinstance(expected, dict):
        return (isinstance(got, dict) and got.keys() == expected.keys()
                and all(same(got[key], expected[key]) for key in expected))
    if is_number(expected):
        try:
            return is_number(got) and math.isclose(got, expected, rel_tol=1e-9, abs_tol=1e-12)
        except OverflowError:
            return False
    return type(got) is type(expected) and got == expected


# -- 3. One task

def grade_task(task, sandbox, source, file="tasks.py", function=None, limit=TIME_LIMIT) -> Report:
    """Runs one answer through the task's cases, up to the first that fails. The sandbox has loaded `source` (or is
    loaded with it again, if an answer has ended it). function: its name there, if it isn't the task's."""
    name, results = function or task.name, []
    report = functools.partial(Report, task.name, of=task.points)
    if sandbox.process is None:
        sandbox.load(source, file, limit)
    for case in task.cases():
        arguments = list(case.arguments.values())
        reply = sandbox.call(name, arguments, limit, file)
        call = f"{task.name}({', '.join(f'{key}={_Short().repr(value)}' for key, value in case.arguments.items())})"
        printed = [("printed", reply["printed"][:200].replace("\n", " | "))] if reply.get("printed") else []
        if reply["status"] == "missing":
            return report("missing", lines=[
                ("code", Sentence("has no function {name} in {file}", name=name, file=file))])
        if reply["status"] == "not started":
            return report("not started", lines=[("", reply["words"])])
        if reply["status"] != "returned":
            # A slip of the pen breaks no rule, but what the case is about may be what it slipped on.
            return report(reply["status"], case.rule, [
                ("asked", call), ("code", failure(reply, source, file, limit)), ("expected", show(case.expected)),
                ("about", case.rule), *printed])
        results.append((case, reply["value"]))
        found = judge(task, case, reply["value"])
        if found is None and not same(reply["arguments"], arguments):
            changed = [key for key, a, b in zip(case.arguments, reply["arguments"], arguments) if not same(a, b)][0]
            found = Found(Sentence("right, but {name} is {value} afterwards", name=changed,
                                   value=show(reply["arguments"][list(case.arguments).index(changed)])),
                          Sentence("{name} stays {value}", name=changed, value=show(case.arguments[changed])),
                          ALWAYS["arguments"])
        elif found:
            found = found._replace(rule=better_rule(task, results, found, sandbox, source, file, name, limit))
        if found:
            decided = found.code
            if reply["value"] is None:
                decided = Sentence("None, as a function without a return statement has it")
            return report("wrong", found.rule, [("asked", call), ("code", decided), ("expected", found.expected),
                                                ("rule", found.rule), *printed])
    return report("solved", points=task.points)


def judge(task, case, value) -> Found | None:
    """None if the value is right."""
    if is_number(case.expected) and not is_number(value):
        return Found(show(value), show(case.expected), ALWAYS["number"])
    if task.compare:
        return task.compare(case, value)
    return None if same(value, case.expected) else Found(show(value), show(case.expected), case.rule)


def better_rule(task, results, found, sandbox, source, file, name, limit) -> str:
    """The rule that a failed case broke. Two questions decide it better than the case alone: is the answer right if it
    is asked for nothing else? And, if the task can read it, what do its answers to the other cases say?"""
    case = results[-1][0]
    if len(results) > 1:
        sandbox.load(source, file, limit)                       # a fresh module: nothing is kept but by tricks
        again = sandbox.call(name, list(case.arguments.values()), limit, file)
        if again["status"] == "returned" and judge(task, case, again["value"]) is None:
            return ALWAYS["state"]
    if task.explain is None or found.rule == ALWAYS["number"]:
        return found.rule
    for other in task.cases()[len(results):]:
        reply = sandbox.call(name, list(other.arguments.values()), limit, file)
        if reply["status"] != "returned":
            break
        results.append((other, reply["value"]))
    return task.explain(results) or found.rule


def failure(reply, source, file, limit):
    """The sentence for an answer, or a file, that did not come to its end."""
    lines, line = source.splitlines(), reply.get("line")
    where = (Sentence(" at line {line} of {file}: {text}", line=line, file=file, text=lines[line - 1].strip())
             if line and 0 < line <= len(lines) else "")
    if reply["status"] == "too slow":
        return Sentence("was still running after {limit:g} s{where}", limit=limit, where=where)
    if reply["status"] == "ended":
        code = reply["code"]
        if code is not None and code < 0:
            return Sentence("its process was killed by signal {signal}: a crash in C code, or more memory or time "
                            "than it may have", signal=-code)
        return Sentence("ended its process (exit status {code}) where a value was to be returned", code=code)
    if reply.get("forged"):
        return Sentence("sent something that is no answer")
    if reply["denied"]:
        return Sentence("{what}{where}", what=Sentence(DENIED[reply["denied"]]), where=where)
    return Sentence("{error}{where}", error=f"{reply['type']}: {reply['words']}".removesuffix(": "), where=where)


# -- 4. A chapter

def chapters() -> list[int]:
    return sorted(int(folder.name[2:]) for folder in HERE.glob("ch[0-9][0-9]"))


def folder_of(chapter: int) -> pathlib.Path:
    return HERE / f"ch{chapter:02d}"


def load(path):
    """A file of the project's own, never of a student's, as a module."""
    path = pathlib.Path(path).resolve()
    module = types.ModuleType(f"exercises_{path.parent.name}_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module      # a dataclass looks its own module up there
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    return module


@functools.cache
def tasks_of(chapter: int) -> list[Task]:
    return load(folder_of(chapter) / "grader.py").TASKS


def speaker(chapter: int, language: str) -> Say:
    return Say(language, catalogue(folder_of(chapter)), catalogue(HERE))


def tasks_file(chapter: int, language="en") -> pathlib.Path:
    """The file that a reader of this language answers in."""
    path = folder_of(chapter) / ("tasks.zh.py" if language == "zh" else "tasks.py")
    return path if path.is_file() else folder_of(chapter) / "tasks.py"


def grade(chapter, path=None, only=None, limit=TIME_LIMIT, sandbox=None):
    """Yields the Report of each task of a chapter (or of number `only`), as its grading ends. path: the answers."""
    path = pathlib.Path(path or tasks_file(chapter))
    source, file = path.read_text(encoding="utf-8", errors="replace"), path.name
    with sandbox or Sandbox() as box:
        loaded = box.load(source, file, limit)
        for number, task in enumerate(tasks_of(chapter), 1):
            if only not in (None, number):
                continue
            if loaded["status"] == "returned":
                yield grade_task(task, box, source, file, limit=limit)
            else:
                line = ("", loaded["words"]) if loaded["status"] == "not started" else (
                    "file", failure(loaded, source, file, limit))
                yield Report(task.name, loaded["status"], lines=[line], of=task.points)


# -- 5. The command

def main(argv=None) -> int:
    """Prints each task's report; 0 if all are solved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chapter", type=int)
    parser.add_argument("--task", type=int, help="only this one")
    parser.add_argument("--file", help="answers that lie elsewhere than in the chapter's tasks.py or tasks.zh.py")
    parser.add_argument("--folder", help="answers of a class: NAME.py or NAME/tasks.py each; writes grades.csv there")
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")
    add_lang_option(parser)
    args = parser.parse_args(argv)
    if args.chapter not in chapters():
        parser.error(f"chapter {args.chapter} has no exercises; chapters with some: {', '.join(map(str, chapters()))}")
    count = len(tasks_of(args.chapter))
    if args.task is not None and not 1 <= args.task <= count:
        parser.error(f"chapter {args.chapter} has tasks 1 to {count}, not {args.task}")
    if args.file and not pathlib.Path(args.file).is_file():
        parser.error(f"there is no file {args.file}")
    if args.folder and not pathlib.Path(args.folder).is_dir():
        parser.error(f"there is no folder {args.folder}")
    say = speaker(args.chapter, args.lang)
    if args.folder:
        from submissions import print_class
        return print_class(args, say)
    return print_reports(args, say)


def print_reports(args, say) -> int:
    width, reports, sandbox = terminal_width(), [], Sandbox()
    path = pathlib.Path(args.file or tasks_file(args.chapter, args.lang))
    for report in grade(args.chapter, path, args.task, sandbox=sandbox):
        reports.append(report)
        if not args.json:
            print(say("chapter {chapter}, task {task}, {name}: {status}", chapter=args.chapter, name=report.name,
                      task=args.task or len(reports), status=say(STATUS[report.status])))
            print(report.text(say, width), end="", flush=True)
    solved = sum(report.status == "solved" for report in reports)
    points, of = sum(report.points for report in reports), sum(report.of for report in reports)
    if args.json:
        print(json.dumps({"chapter": args.chapter, "file": str(path), "points": points, "of": of,
                          "not limited here": sandbox.missing, "tasks": [r.data(say) for r in reports]},
                         indent=1, ensure_ascii=False))
    else:
        print(say("{solved} of {total} solved, {points} of {of} points ({file})", solved=solved, total=len(reports),
                  points=points, of=of, file=path.name))
        print(walls(sandbox, say), end="")
    return int(solved < len(reports))


def walls(sandbox, say) -> str:
    """What this system doesn't keep an answer from; nothing where it has all walls."""
    return "" if not sandbox.missing else say(
        "Answers run in a process of their own; on this system it is not limited in: {walls}.",
        walls=", ".join(sandbox.missing)) + "\n"


def terminal_width() -> int:
    return min(100, os.get_terminal_size().columns if sys.stdout.isatty() else 100) or 80


if __name__ == "__main__":
    import grade as itself      # under the name by which the chapters' files import it: one module, not two
    from options import end_quietly
    end_quietly()
    sys.exit(itself.main())
