"""The labs: one function of the engine itself, written by you, and proved by the project's own proofs.

    make lab CH=1
    python chapters/exercises/lab.py 1 --lang zh --file mine.py

Write the function in the chapter's labs.py (labs.zh.py has the same in Chinese). It is put in the place of the module's
own, in a process of its own, and then has to decide what vLLM decided, step by step, to generate the tokens that the
project's own function generates, and to keep the accounts. What it did comes back as data and is compared here. In the
end the engine serves five prompts with it.

A chapter's lab is two files beside labs.py; nothing here changes for a new one:

    ch01/lab.py         LAB, a Lab: which function, the rules, the proofs
    ch01/lab_plays.py   what is played with the function: runs in the other process, and imports the engine
    ch01/lab_solution.py, lab_wrong.py    as for the tasks
"""
from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import json
import pathlib
import sys
from dataclasses import dataclass
from typing import Callable

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(HERE.parent), str(HERE.parent / "tools"), str(HERE)]

import grade  # noqa: E402
from grade import failure, terminal_width, walls  # noqa: E402
from lang import Sentence, T, add_lang_option, fill, wide  # noqa: E402
from sandbox import Sandbox  # noqa: E402

LIMITS = {"cpu": 600, "memory": 16 << 30, "processes": 64}     # PyTorch maps much more memory than it uses
TRACES = ROOT / "tests" / "data" / "vllm_v0271_scheduler.json.gz"
NAMES = T({"asked": "proof", "code": "your code", "expected": "expected", "vllm": "vLLM", "rule": "rule",
           "about": "about", "": ""})


@dataclass
class Proof:
    """One thing that must hold. plays(): what to play, as [(name in lab_plays.py, data)]. judge(data, got, expected)
    returns Found or None. expected: what the project's own function made of the same play; None if `truth`: vLLM's
    traces tell by themselves."""
    title: str
    plays: Callable[[], list]
    judge: Callable
    rule: str                   # what it is about, should your code raise
    truth: bool = False
    limit: float = 60.0


@dataclass
class Lab:
    """target: the function that is replaced, as "module:Class.function"; name: yours, in labs.py."""
    target: str
    name: str
    proofs: list[Proof]
    served: Callable | None = None      # what to play in the end, and its answers as lines: (play, data)


def folder(chapter):
    return grade.folder_of(chapter)


def chapters():
    return [chapter for chapter in grade.chapters() if (folder(chapter) / "lab.py").is_file()]


@functools.cache
def lab_of(chapter) -> Lab:
    return grade.load(folder(chapter) / "lab.py").LAB


@functools.cache
def traces() -> list[dict]:
    """vLLM's recorded decisions; tests/data/README.md says how they are read."""
    return json.loads(gzip.decompress(TRACES.read_bytes()))


# -- 1. The other process

def lab_sandbox(chapter) -> Sandbox:
    """With the engine in it, read-only, and without whatever knows an answer."""
    modules = {"lab_plays": (folder(chapter) / "lab_plays.py").read_text(encoding="utf-8")}
    hide = [path for path in (ROOT / "chapters", ROOT / "tests", ROOT / ".git") if path.exists()]
    return Sandbox(LIMITS, hide, [ROOT / "nano_serve.py"], modules, path=[ROOT])


def play(sandbox, lab, source, file, name, data, limit):
    """One play with the function of `source` in place; without a source, with the engine's own."""
    if sandbox.process is None and source is not None:
        loaded = sandbox.load(source, file, limit)
        if loaded["status"] != "returned":
            return loaded
    elif sandbox.process is None:
        sandbox.start()
    return sandbox.play("lab_plays", name, [lab.target, lab.name if source is not None else None, data], limit, file)


class Expected:
    """What the engine's own function makes of each play; asked once."""

    def __init__(self, chapter):
        self.lab, self.sandbox, self.known = lab_of(chapter), lab_sandbox(chapter), {}

    def of(self, name, data, limit):
        key = (name, json.dumps(data))
        if key not in self.known:
            reply = play(self.sandbox, self.lab, None, "labs.py", name, data, limit)
            if reply["status"] != "returned":
                raise RuntimeError(f"the engine's own {self.lab.target} fails at {name}: {reply}")
            self.known[key] = reply["value"]
        return self.known[key]


# -- 2. The proofs

def prove(chapter, source, file="labs.py", sandbox=None, expected=None, only=None):
    """Yields (proof, Report) for each proof, to the first that fails. A sandbox that is given may have run other
    sources before, and stays open."""
    lab, box, own = lab_of(chapter), sandbox or lab_sandbox(chapter), expected or Expected(chapter)
    with contextlib.ExitStack() as stack:
        if sandbox is None:
            stack.enter_context(box)
        if expected is None:
            stack.enter_context(own.sandbox)
        if box.process is not None and (loaded := box.load(source, file))["status"] != "returned":
            yield lab.proofs[0], unfinished(lab, lab.proofs[0], loaded, source, file)
            return
        for proof in lab.proofs:
            for name, data in proof.plays():
                reply = play(box, lab, source, file, name, data, proof.limit)
                if reply["status"] != "returned":
                    report = unfinished(lab, proof, reply, source, file)
                else:
                    want = None if proof.truth else own.of(name, data, proof.limit)
                    found = proof.judge(data, reply["value"], want)
                    label = "vllm" if proof.truth else "expected"
                    report = found and grade.Report(lab.name, "wrong", found.rule, [
                        ("asked", Sentence(proof.title)), ("code", found.code), (label, found.expected),
                        ("rule", found.rule)])
                if report:
                    yield proof, report
                    return
            yield proof, grade.Report(lab.name, "solved", points=1)


def unfinished(lab, proof, reply, source, file):
    if reply["status"] == "missing" or str(reply.get("words", "")).startswith("has no function"):
        return grade.Report(lab.name, "missing", None, [
            ("code", Sentence("has no function {name} in {file}", name=lab.name, file=file))])
    if reply["status"] == "not started":
        return grade.Report(lab.name, "not started", None, [("", reply["words"])])
    return grade.Report(lab.name, reply["status"], proof.rule, [
        ("asked", Sentence(proof.title)), ("code", failure(reply, source, file, proof.limit)), ("about", proof.rule)])


def text_of(report, say, width=100):
    rows = ""
    for label, text in report.lines:
        text = text if isinstance(text, str) and label not in ("rule", "about") else say(text)
        head = say(NAMES[label])
        indent = f"    {head}{' ' * max(1, 11 - wide(head))}" if head else "    "
        rows += fill(text, width, indent, " " * wide(indent)) + "\n"
    return rows


# -- 3. The command

def main(argv=None) -> int:
    """Prints each proof as it holds, or what broke it; 0 if all hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chapter", type=int)
    parser.add_argument("--file", help="a file that lies elsewhere than in the chapter's labs.py")
    add_lang_option(parser)
    args = parser.parse_args(argv)
    if args.chapter not in chapters():
        parser.error(f"chapter {args.chapter} has no lab; chapters with one: {', '.join(map(str, chapters()))}")
    chinese = folder(args.chapter) / "labs.zh.py"
    own = chinese if args.lang == "zh" and chinese.is_file() else folder(args.chapter) / "labs.py"
    path = pathlib.Path(args.file or own)
    if not path.is_file():
        parser.error(f"there is no file {path}")
    say, lab = grade.speaker(args.chapter, args.lang), lab_of(args.chapter)
    source, sandbox = path.read_text(encoding="utf-8", errors="replace"), lab_sandbox(args.chapter)
    print(say("chapter {chapter}, lab: {name} in the place of {target}; some seconds a proof", chapter=args.chapter,
              name=lab.name, target=lab.target), flush=True)
    with sandbox:
        held = print_proofs(args.chapter, source, path.name, sandbox, say)
        if held:
            print(say("All proofs hold. Five prompts, served with your function:"), flush=True)
            for prompt, answer in play(sandbox, lab, source, path.name, *lab.served(), 60)["value"]:
                print(f"  {prompt}\n    {answer.strip()}")
    print(walls(sandbox, say), end="")
    return int(not held)


def print_proofs(chapter, source, file, sandbox, say) -> bool:
    for proof, report in prove(chapter, source, file, sandbox):
        print(say("{proof}: {status}", proof=say(proof.title),
                  status=say("holds") if report.status == "solved" else say(grade.STATUS[report.status])), flush=True)
        if report.status != "solved":
            print(text_of(report, say, terminal_width()), end="")
            return False
    return True


if __name__ == "__main__":
    import lab as itself      # under the name by which the chapters' files import it: one module, not two
    from options import end_quietly
    end_quietly()
    sys.exit(itself.main())
