"""The labs: the solution is proved, each wrong one fails by the rule it breaks, and what is seen is vLLM's decision. A new
chapter's lab is found by itself."""
import re
import shutil
import sys

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "chapters" / "exercises"))

import grade  # noqa: E402
import lab  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the labs' proofs run on Linux")
CHAPTERS = lab.chapters()


def source_of(chapter, name):
    path = lab.folder(chapter) / name
    if not path.exists():
        pytest.skip(f"{name} has been taken away")
    return path.read_text(encoding="utf-8")


def wrong_steps():
    """(chapter, name, rule), read from the text: the file imports the engine, which only the sandbox needs."""
    for chapter in CHAPTERS:
        path = lab.folder(chapter) / "lab_wrong.py"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        yield from ((chapter, *found) for found in re.findall(r'^    "([^"]+)": \(.*"([^"]+)"\),?$', text, re.MULTILINE))


WRONG = list(wrong_steps())


@pytest.fixture(scope="module")
def proving():
    """prove(chapter, source): the last Report, in processes that all tests share."""
    kept = {}

    def prove(chapter, source):
        if chapter not in kept:
            kept[chapter] = lab.lab_sandbox(chapter), lab.Expected(chapter)
        sandbox, expected = kept[chapter]
        return [(proof.title, report) for proof, report in lab.prove(chapter, source, "labs.py", sandbox, expected)]

    yield prove
    for sandbox, expected in kept.values():
        sandbox.close()
        expected.sandbox.close()


def rules(chapter):
    lab.lab_of(chapter)
    return sys.modules[f"exercises_ch{chapter:02d}_lab"].RULES


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_solution_is_proved(chapter, proving):
    reports = proving(chapter, source_of(chapter, "lab_solution.py"))
    assert [report.status for _, report in reports] == ["solved"] * len(lab.lab_of(chapter).proofs), reports[-1][1].lines


@pytest.mark.parametrize("chapter", CHAPTERS)
@pytest.mark.parametrize("name, head", [("labs.py", "chapter {}, lab: "), ("labs.zh.py", "第 {} 章实验：")])
def test_the_stub_says_what_it_is(chapter, name, head, proving):
    if "raise NotImplementedError" not in source_of(chapter, name):
        pytest.skip("this one has been answered")
    ((_, report),) = proving(chapter, source_of(chapter, name))
    assert report.status == "not started" and head.format(chapter) in report.lines[0][1]


@pytest.mark.parametrize("chapter, name, rule", WRONG, ids=[f"ch{c:02d}-{name}" for c, name, _ in WRONG])
def test_a_wrong_one_fails_by_its_rule(chapter, name, rule, proving):
    source = source_of(chapter, "lab_wrong.py") + f"\n{lab.lab_of(chapter).name} = WRONG[{name!r}][0]\n"
    _, report = proving(chapter, source)[-1]
    assert report.rule == rules(chapter)[rule], (report.status, report.lines)
    for language in ("en", "zh"):
        say = grade.speaker(chapter, language)
        text = lab.text_of(report, say)
        assert "".join(say(report.rule).split()) in "".join(text.split())
        assert not re.search(r"Traceback|Sentence|\{\w+\}|inside\.py|lab_plays", text), text


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_wrong_ones_enough(chapter):
    mine = [rule for c, _, rule in WRONG if c == chapter]
    if not mine:
        pytest.skip("the wrong ones have been taken away")
    assert len(mine) >= 10 and len(set(mine)) >= 5


def test_the_step_of_the_trace_is_named(proving):
    """Decisions are vLLM's: which run, which step, what was handed back there and what vLLM handed back."""
    source = source_of(1, "lab_wrong.py") + "\nstep = WRONG['rows the other way round'][0]\n"
    _, report = proving(1, source)[-1]
    text = lab.text_of(report, grade.speaker(1, "en"))
    run, k = map(int, re.search(r"your code  trace (\d+), step (\d+): ", text).groups())
    want = lab.traces()[run]["steps"][k]["sampled"]
    assert len(want) > 1 and f"vLLM       trace {run}, step {k}: " in text
    assert ", ".join(f"{name}: {n}" for name, n in want.items()) + " handed back" in " ".join(text.split())


@pytest.mark.parametrize("source, status, sentence", [
    ("def walk(engine):\n    pass\n", "missing", "has no function step in labs.py"),
    ("def step(engine)\n    pass\n", "raised", "SyntaxError: expected ':' at line 1 of labs.py"),
    ("import os\ndef step(engine):\n    os._exit(0)\n", "ended", "ended its process (exit status 0)"),
    ("def step(engine):\n    open('/etc/passwd', 'a')\n", "wrong", "not allowed here: file (labs.py:2)"),
    ("import os\ndef step(engine):\n    os.system('echo holds')\n", "wrong", "not allowed here: process (labs.py:3)"),
])
def test_whatever_it_does_a_sentence_comes_back(source, status, sentence, proving):
    _, report = proving(1, source)[-1]
    text = " ".join(lab.text_of(report, grade.speaker(1, "en")).split())
    assert report.status == status and sentence in text, text


def test_the_command(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(source_of(1, "lab_solution.py"))
    assert lab.main(["1", "--file", str(path), "--lang", "en"]) == 0
    out = capsys.readouterr().out
    assert out.count(": holds\n") == 4 and "Five prompts" in out and len(out.split("Five prompts")[1].splitlines()) == 11
    path.write_text("def step(engine):\n    engine.scheduler.schedule()\n")
    assert lab.main(["1", "--file", str(path), "--lang", "zh"]) == 1
    out = capsys.readouterr().out
    assert "不对" in out and "规则       " in out
    for arguments, sentence in ((["99"], "chapter 99 has no lab"), (["1", "--file", "nowhere.py"], "there is no file nowhere.py")):
        with pytest.raises(SystemExit):
            lab.main(arguments)
        assert sentence in capsys.readouterr().err


@pytest.mark.skipif(not shutil.which("make"), reason="no make here")
def test_make_has_a_lab():
    assert re.search(r"^lab: .*\n\t@\$\(BIN\)/python chapters/exercises/lab\.py \$\(CH\)", (ROOT / "Makefile").read_text(), re.MULTILINE)
