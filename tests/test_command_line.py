"""The command line: in pipes, in terminals of several sizes, under Ctrl-C, pasted into, and misspelt."""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
import toys
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

import command_line
import terminal as terminal_module
from command_line import main
from terminal import Patience, WordWrap, visible

ALPHABET = toys.chain(list(b"abcdefghijklmnopqrstuvwxyz"))
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


# -- In pipes ----------------------------------------------------------------------------------------------------------------------

def cli(capsys, *args):
    """main() in this process, its stdout no terminal: (exit code, stdout, stderr)."""
    code = main(list(map(str, args)))
    out, err = capsys.readouterr()
    assert "\x1b" not in out, "escape codes where no terminal is"
    return code, out, err


@pytest.fixture(scope="module")
def alphabet():
    return toys.table_checkpoint({**ALPHABET, ord("z"): toys.EOS}, eos=toys.EOS, max_position_embeddings=64)


def cheap(folder):
    return "--model", folder, "--num-kv-blocks", 200, "--block-size", 4


def test_without_arguments_it_answers_a_few_questions(capsys):
    code, out, err = cli(capsys, "--max-tokens", 40)
    assert code == 0 and err == ""
    for n in range(1, 6):
        assert f"[{n}] " in out
    assert re.search(r"5 of 5 answers, \d+ tokens in [\d.]+ s: \d+ tokens/s, TTFT mean \d+ ms, max \d+ ms\n$", out)


def test_prompts_steps_records_and_output(capsys, alphabet, tmp_path):
    code, out, err = cli(capsys, *cheap(alphabet), "--prompt", "a", "--prompt", "[bold]x", "--max-tokens", 3, "--steps",
                         "--records", tmp_path / "r.jsonl", "--output", tmp_path / "o.jsonl")
    assert code == 0 and err == "" and "[1] a\nbcd\n(3 tokens, length)\n" in out and "[2] [bold]x\nyz\n(3 tokens, stop)\n" in out
    answers = [json.loads(line) for line in open(tmp_path / "o.jsonl", encoding="utf-8")]
    assert [(a["index"], a["prompt"], a["text"], a["token_ids"], a["finish_reason"]) for a in sorted(answers, key=lambda a: a["index"])] == [
        (0, "a", "bcd", list(b"bcd"), "length"), (1, "[bold]x", "yz", [*b"yz", toys.EOS], "stop")]
    assert all(a["ttft"] > 0 and a["e2e"] >= a["ttft"] and a["num_prompt_tokens"] == 1 + len(a["prompt"]) for a in answers)
    records = [json.loads(line) for line in open(tmp_path / "r.jsonl", encoding="utf-8")]
    assert [r["step"] for r in records] == [0, 1, 2] and sum(r["used"] for r in records) == 2 + 8 + 4
    steps = out.replace("\n    ", "  ")
    assert re.match(r"step 0  [\d.]+ ms  budget 10/2048  running 2  waiting 0  free 196/199  0 0\+2→98  1 0\+8→121\nstep 1  ", steps)
    assert out.index("step 2  ") < out.index("[1] a"), "a step stands before the answers that it ended"


BAD_LINES = ['{"prompt": "a"}', "broken", "[1]", '{"prompt": "a", "prompt_token_ids": [97]}', "{}", '{"prompt": null}', '{"prompt": 5}',
             '{"messages": []}', '{"messages": 5}', '{"messages": [5]}', '{"prompt_token_ids": 5}', '{"prompt_token_ids": []}',
             '{"prompt_token_ids": [97, 99999]}', '{"prompt": "\\ud83d"}', '{"prompt": "a", "temperature": NaN}', '{"prompt": "a", "top_k": -5}',
             '{"prompt": "a", "max_tokens": "5"}', '{"prompt": "a", "colour": 1}', '{"prompt": "a", "stop": ""}', '{"prompt": "' + "a" * 99 + '"}',
             "[" * 100_000, '{"prompt": "w", "max_tokens": 9, "stop": ["z"]}', '{"prompt_token_ids": [121]}', '{"prompt": "a\u2028b", "n": 2}']


def test_a_broken_line_costs_only_itself(capsys, alphabet, tmp_path):
    """Good are the first and the last three. One of those holds U+2028, at which str.splitlines would cut it in two."""
    data = "\n\n".join(BAD_LINES).encode() + b"\n\xff\n"
    (tmp_path / "p.jsonl").write_bytes(b"\xef\xbb\xbf" + data.replace(b"\n\n[1]", b"\r\n\n[1]"))
    code, out, err = cli(capsys, *cheap(alphabet), "--prompts", tmp_path / "p.jsonl", "--max-tokens", 2, "--output", tmp_path / "o.jsonl")
    assert code == 1 and err == "" and "5 of 26 answers" in out and "21 refused or failed" in out
    answers = [json.loads(line) for line in open(tmp_path / "o.jsonl", encoding="utf-8")]
    good = sorted((a["index"], a["answer"], a["text"]) for a in answers if not a["error"])
    assert good == [(0, 0, "bc"), (21, 0, "xy"), (22, 0, "z"), (23, 0, "cd"), (23, 1, "cd")]
    bad = {a["index"]: a["error"] for a in answers if a["error"]}
    assert sorted(bad) == [*range(1, 21), 24] and all(a["finish_reason"] == "error" for a in answers if a["error"])
    assert "line 3" in bad[1] and "exactly one of" in bad[3] and "temperature" in bad[14] and "'colour'" in bad[17] and "99999" in bad[12]


def test_a_plain_file_of_prompts_one_a_line(capsys, alphabet, tmp_path):
    (tmp_path / "p.txt").write_bytes('a\r\n\nx\n{"prompt": "b"}\n'.encode())
    code, out, _ = cli(capsys, *cheap(alphabet), "--prompts", tmp_path / "p.txt", "--prompt", "c", "--max-tokens", 1)
    assert code == 0 and "4 of 4 answers" in out and "[1] c\nd\n" in out and "[2] a\nb\n" in out and "[3] x\ny\n" in out
    (tmp_path / "none.txt").write_bytes(b"\n \n")
    code, out, _ = cli(capsys, *cheap(alphabet), "--prompts", tmp_path / "none.txt")
    assert code == 0 and "0 of 0 answers" in out, "no question asked, none answered"


def test_sampling_options_reach_the_answers(capsys, alphabet):
    code, out, _ = cli(capsys, *cheap(alphabet), "--prompt", "a", "--stop", "e", "--stop", "q")
    assert code == 0 and "[1] a\nbcd\n(4 tokens, stop)" in out
    code, out, _ = cli(capsys, *cheap(alphabet), "--prompt", "x", "--ignore-eos", "--max-tokens", 3, "--temperature", 1, "--top-k", 1)
    assert code == 0 and "[1] x\nyz\n(3 tokens, length)" in out
    code, out, _ = cli(capsys, "--raw", "--prompt", "Once upon a time", "--max-tokens", 5)
    assert code == 0 and "[1] Once upon a time\n" in out


@pytest.mark.parametrize("args, message", [
    (["--temperature", "-1"], "temperature"), (["--temperature", "nan"], "temperature"), (["--top-p", "0"], "top_p"), (["--stop", ""], "stop"),
    (["--max-tokens", "0"], "max_tokens"), (["--prompts", "/no/such/file"], "/no/such/file"), (["--output", "/no/such/folder/o"], "/no/such/folder/o"),
    (["--records", "."], "directory"), (["--model", "./nothing"], "nothing"), (["--block-size", "-3"], "--block-size")], ids=str)
def test_a_wrong_option_is_said_in_one_line(capsys, monkeypatch, args, message):
    """Before any weight is read."""
    monkeypatch.setattr("nano_serve.make_executor", lambda *args: pytest.fail("the model was loaded"))
    code, out, err = cli(capsys, *args)
    assert code == 2 and out == "" and err.startswith("error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize("args", [["--no-such-option"], ["--max-tokens", "many"], ["--chat", "--prompt", "x"]], ids=str)
def test_a_wrong_option_is_said_in_two_lines(capsys, args):
    with pytest.raises(SystemExit) as exit:
        main(args)
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and out == "" and args[0] in err and "--help" in err and err.count("\n") == 2


def feed_input(monkeypatch, *lines):
    lines = iter(lines)

    def read(prompt=""):
        line = next(lines, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line
    monkeypatch.setattr("builtins.input", read)


@pytest.fixture(scope="module")
def parrot():
    return toys.table_checkpoint({**ALPHABET, ord("z"): toys.EOS}, eos=toys.EOS, chat_template=TEMPLATE, max_position_embeddings=64)


def test_a_conversation_grows_and_starts_over(capsys, monkeypatch, parrot, tmp_path):
    """From a pipe: an empty line ends nothing, and what was asked is shown."""
    feed_input(monkeypatch, "v", "  x ", "", "/new", "y", "\udcff", "y" * 70, "y")
    code, out, err = cli(capsys, *cheap(parrot), "--chat", "--output", tmp_path / "o.jsonl", "--records", tmp_path / "r.jsonl")
    assert code == 1 and err == "", "two messages were refused"
    lines = out.splitlines()[1:]
    assert lines[:7] == ["you> v", "wxyz", "you> x", "yz", "you> /new", "you> y", "z"]
    assert lines[7:9] == ["you> ?", "error: the prompt can't be tokenized: TextInputSequence must be str"]
    assert lines[9] == "you> " + "y" * 70 and "--max-model-len" in lines[10] and lines[11:] == ["you> y", "z"]
    answers = [json.loads(line) for line in open(tmp_path / "o.jsonl")]
    assert [(a["prompt"], a["num_prompt_tokens"]) for a in answers] == [("v", 2), ("x", 7), ("y", 2), ("y", 4)]
    assert len(open(tmp_path / "r.jsonl").readlines()) == sum(len(a["token_ids"]) for a in answers)


def test_who_reads_may_have_enough():
    """`| head -1`: the pipe's other end is closed while there is more to write. No complaint."""
    questions = "What is TTFT?\n" * 3
    for args in ((), ("--chat",), ("--steps",)):
        process = start(*args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdin.write(questions)
        process.stdin.close()
        process.stdout.readline()
        process.stdout.close()
        assert said(process.stderr.read()) == "", args
        process.wait(timeout=60)


def test_a_long_prompt_is_not_shown_whole(capsys, parrot):
    code, out, err = cli(capsys, *cheap(parrot), "--prompt", "y" * 5000)
    assert code == 1 and "y" * 500 + " …" in out and "y" * 501 not in out and "--max-model-len" in out


@pytest.mark.parametrize("end, code", [([KeyboardInterrupt()], 130), ([], 0)], ids=str)
def test_ctrl_c_in_a_conversation_ends_the_answer_and_at_the_prompt_the_program(capsys, monkeypatch, parrot, end, code):
    from nano_serve import LLMEngine
    step, calls = LLMEngine.step, []

    def interrupted(engine):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(engine)
    monkeypatch.setattr(LLMEngine, "step", interrupted)
    feed_input(monkeypatch, "a", "x", *end)
    found, out, err = cli(capsys, *cheap(parrot), "--chat")
    assert found == code and err == "" and out.splitlines()[1:] == ["you> a", "bc (interrupted)", "you> x", "yz"]


# -- In processes of their own --------------------------------------------------------------------------------------------------

def environment(**more):
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR")}
    return {**env, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


def command(*args):
    return [sys.executable, str(ROOT / "nano_serve.py"), *map(str, args)]


def start(*args, env=None, text=True, **kwargs):
    return subprocess.Popen(command(*args), env=environment(**(env or {})), text=text, **kwargs)


def said(err):
    """stderr without the lines that ask for patience, on a slow machine."""
    return re.sub(r"(?m)^.* … \d+ s\n", "", err)


def wait_for(condition, process, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"it ended with {process.returncode}"
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def test_ctrl_c_in_mid_generation_keeps_what_is_finished(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "hi", "max_tokens": 3}\n' + '{"prompt": "a story", "max_tokens": 4000, "ignore_eos": true}\n' * 3)
    output = tmp_path / "o.jsonl"
    process = start("--prompts", tmp_path / "p.jsonl", "--output", output, "--records", tmp_path / "r.jsonl", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        wait_for(lambda: output.exists() and output.read_text().endswith("\n"), process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130 and said(err) == ""
    (answer,) = map(json.loads, output.read_text().splitlines())
    assert answer["index"] == 0 and len(answer["token_ids"]) == 3
    assert "1 of 4 answers, 3 tokens" in out and out.endswith("; interrupted\n")
    steps = [json.loads(line)["step"] for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert steps == list(range(len(steps))) and len(steps) >= 3


def test_a_hub_id_offline_says_what_to_do(tmp_path):
    process = start("--model", "nobody/nothing-here", env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=60)
    err = said(err)
    assert process.returncode == 2 and out == "" and err.startswith("error: nobody/nothing-here") and "hf download nobody/nothing-here" in err
    assert "Traceback" not in err and err.count("\n") == 1


def test_a_reader_that_goes_away_and_a_locale_without_unicode(alphabet, tmp_path):
    """`… | head -1`, from another directory, with an encoding that has no 世: no traceback, no hang."""
    process = start(*cheap(alphabet), "--prompt", "世a", *["--prompt", "b"] * 3, "--max-tokens", 20, env={"PYTHONIOENCODING": "ascii"}, cwd=tmp_path,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    line = process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=30) in (0, 1, 2) and line in ("[1] ?a\n", "[2] b\n") and "Traceback" not in err


pytest.importorskip("pty")


def terminal(*args, columns=40, rows=10, env=None):
    from screen import Terminal
    return Terminal(command(*args), environment(**(env or {})), columns, rows)


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")


def test_in_a_terminal_answers_grow_in_place(alphabet):
    """In a narrow one, and in one too small for anything."""
    terminals = [terminal(*cheap(alphabet), *["--prompt", "[b]世a"] * 5, "--max-tokens", 20, columns=c, rows=r) for c, r in ((40, 10), (3, 2))]
    for t in terminals:
        try:
            shown = t.read()
            assert t.process.wait(timeout=20) == 0
        finally:
            t.close()
        check_live_view(shown)


def check_live_view(shown):
    assert "\x1b[?25l" in shown and shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is hidden meanwhile, and comes back"
    text = re.sub(r"\s", "", plain(shown))                   # in three columns a blank is where a line ends
    assert text.count("bcdefghijklmnopqrstu(20tokens,length)") == 5 and "5of5answers" in text and "Traceback" not in text


def test_a_conversation_in_a_terminal_with_ctrl_c():
    """Ctrl-C as a key: the terminal sends the signal. The first ends an answer, the next, at the prompt, the program."""
    t = terminal("--chat", "--max-tokens", 4000, "--ignore-eos")
    try:
        t.read("you> ")
        t.write("Tell me a story.\n")
        t.read(r"\w+ \w+ \w+ \w+ \w+")
        t.write("\x03")
        assert "(interrupted)" in t.read("you> ")
        for _ in range(10):      # Python's input() misses a signal between its prompt and its read; a person presses again
            t.write("\x03")
            try:
                t.process.wait(timeout=3)
                break
            except subprocess.TimeoutExpired:
                pass
        t.read()
        assert t.process.returncode == 130
    finally:
        t.close()
    assert "Traceback" not in t.seen


# -- Byte for byte, or made visible ------------------------------------------------------------------------------------------------

NASTY = "\t \r\x1b[2J\x07\u202e\u009bm ".encode()        # each byte once: tab, a title's bell, clear the screen, from right to left
SHOWN = r"\r\x1b[2J\x07\u202e\x9bm"


@pytest.fixture(scope="module")
def nasty():
    """Says all that after the letter a, and ends."""
    data = [*b"a\t\r\x1b[2J\x07", *"\u202e\u009b".encode(), *b"m "]
    assert set(NASTY) == set(data) - set(b"a")
    return toys.table_checkpoint({**toys.chain(data), ord(" "): toys.EOS}, eos=toys.EOS, chat_template=TEMPLATE, max_position_embeddings=64)


@pytest.mark.parametrize("chat", [False, True])
def test_what_the_model_says_reaches_a_pipe_and_a_file_byte_for_byte(nasty, tmp_path, chat):
    answer = b"\t\r\x1b[2J\x07" + "\u202e\u009b".encode() + b"m "
    with open(tmp_path / "out", "wb") as file:
        process = start(*cheap(nasty), *(["--chat"] if chat else ["--prompt", "a"]), text=False, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.PIPE)
        process.communicate(b"a\n", timeout=60)
    out = (tmp_path / "out").read_bytes()
    assert process.returncode == 0 and (b"you> a\n" if chat else b"[1] a\n") + answer + b"\n" in out


def test_long_lines_reach_a_pipe_unbroken(capsys, alphabet):
    code, out, _ = cli(capsys, *cheap(alphabet), "--prompt", "a", "--prompt", "x " * 20, "--max-tokens", 20)
    assert "bcdefghijklmnopqrstu\n" in out and "[2] " + "x " * 20 + "\n" in out, "with its trailing blank"


def test_on_a_terminal_control_characters_are_shown_and_not_executed(nasty, tmp_path):
    """The model's, the prompt's, those of a refusal, a path and an option: Screen fails at each that comes through raw."""
    evil = "\x1b]0;owned\x07\u202e\u009b"
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": evil + "a"}) + "\n" + json.dumps({"prompt": "a", evil: 1}) + "\n")
    runs = [(["--prompts", tmp_path / "p.jsonl", *cheap(nasty), "--steps"], [SHOWN, r"[1] \x1b]0;owned\x07\u202e\x9ba", r"unknown field '\x1b]0;owned"]),
            (["--model", "./none" + evil], [r"./none\x1b]0;owned\x07\u202e\x9b"]), (["--x" + evil], [r"--x\x1b]0;owned\x07\u202e\x9b"])]
    for args, wanted in runs:
        t = terminal(*args, columns=100, rows=30)
        try:
            t.read()
            shown = t.screen.text(whole=True)
        finally:
            t.close()
        for text in wanted:
            assert text in shown, (text, shown)
    t = terminal("--chat", *cheap(nasty))
    try:
        t.read("you> ")
        t.write("a\n")
        t.read("you> ")
        assert SHOWN in t.screen.text()
    finally:
        t.close()


def test_visible():
    assert visible("a\tb\nö世👩🏽‍🚀 ©") == "a\tb\nö世👩🏽‍🚀 ©", "what is harmless stays"
    for code in [*range(32), 127, *range(128, 160), 0x2028, 0x202a, 0x202e, 0x2066, 0x2069, 0xd800]:
        if chr(code) not in "\t\n":
            shown = visible(chr(code))
            assert shown.isascii() and shown.isprintable() and shown.startswith("\\")


# -- Words wrap ----------------------------------------------------------------------------------------------------------------

@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(["a", "bc", "def", "ghijklmnop", " ", " ", "\n", "世界", "\t", "q" * 30]), max_size=30), st.integers(8, 30), st.data())
def test_words_wrap_however_they_come(pieces, width, data):
    from screen import Screen
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    screens = Screen(width, 400), Screen(width, 400)
    whole, parts = WordWrap(), WordWrap()
    screens[0].feed(whole.feed(text, width).replace("\n", "\r\n"))
    for start, end in zip([0, *cuts], [*cuts, len(text)]):
        screens[1].feed(parts.feed(text[start:end], width).replace("\n", "\r\n"))
    shown = screens[1].text()
    assert shown == screens[0].text(), "the same, whatever the pieces"
    assert "".join(shown.split()) == "".join(text.split()), "nothing is lost or doubled"
    for word in re.findall(r"[a-p]+", text):
        assert len(word) >= width or "q" in text or "世" in text or word in re.split(r"\s+", shown), f"{word} is broken"


def test_an_answer_grows_in_sight(monkeypatch, tmp_path):
    """Whatever its length: the last words are among the lines shown, no word is cut, and half of the screen is enough."""
    from rich.console import Console
    report = command_line.Report(command_line.make_parser().parse_args([]))
    report.terminal, report.console, report.progress = True, Console(width=40, height=12, force_terminal=True), lambda: "busy"
    words, answer = [], command_line.RequestOutput.ended("0", "length")
    answer.finished = False
    for i in range(400):
        words.append(f"word{i}")
        answer.outputs[0].text = " ".join(words)
        report.update(0, "question " * 20, answer)
        lines = [line.rstrip() for line in console_lines(report)]
        assert len(lines) <= 6 and all(len(line) <= 40 for line in lines) and lines[0].endswith("…")
        assert lines[-1].split()[-1] == words[-1] and set(" ".join(lines[1:]).split()) <= set(words)
    assert console_lines(report)[-1].strip() != "busy"
    monkeypatch.setattr(report, "last_sign", time.monotonic() - 3)
    assert console_lines(report)[-1].strip() == "busy", "nothing came for a while: what is it at?"


def console_lines(report):
    with report.console.capture() as capture:
        report.console.print(report._view())
    return plain(capture.get()).splitlines()


@pytest.mark.parametrize("columns", [40, 80])
def test_a_chats_answer_wraps_at_words(columns):
    t = terminal("--chat", "--max-tokens", 60, columns=columns, rows=24)
    try:
        t.read("you> ")
        t.write("Tell me a story about an owl.\n")
        t.read("you> ")
        lines = t.screen.text(whole=True).split("\n")
        t.write("/quit\n")
        t.read()
        assert t.process.wait(timeout=20) == 0
    finally:
        t.close()
    first = lines.index("you> Tell me a story about an owl.") + 1
    paragraph = lines[first:lines.index("", first)]
    assert len(paragraph) > 1 and all(len(line) < columns for line in paragraph)
    for line, after in zip(paragraph, paragraph[1:]):        # no line is broken before it must be, nor in a word
        assert len(line) + 1 + len(after.split()[0]) >= columns
    text = subprocess.run(command("--max-tokens", 60, "--prompt", "Tell me a story about an owl."), capture_output=True, text=True, env=environment()).stdout
    assert " ".join(paragraph) in text


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("name", command_line.PUBLISHED)
def test_eighty_columns_are_enough(capsys, name, size):
    assert main(["--shards", "--model", name, "-tp", str(size)]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 16 and max(map(len, out.splitlines())) <= 80
    assert all(len(line.split()) in (5, 6) for line in out.splitlines()[2:11]), "columns don't touch"


def test_steps_fit_the_terminal(capsys, monkeypatch, alphabet):
    for width in (80, 50):
        monkeypatch.setenv("COLUMNS", str(width))
        _, out, _ = cli(capsys, *cheap(alphabet), *["--prompt", "a"] * 9, "--steps", "--max-tokens", 3)
        lines = out[:out.index("[1]")].splitlines()
        assert max(map(len, lines)) <= width and len(lines) > 6
        assert re.sub(r"\n +", "  ", out).count("  8 0+2→98\n") == 1


def test_help_fits_and_needs_no_torch():
    code = "import sys, command_line\ntry: command_line.main(['--help'])\nfinally: assert 'torch' not in sys.modules and 'rich' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(COLUMNS="80"), capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and max(map(len, done.stdout.splitlines())) <= 80
    for f in command_line.dataclasses.fields(command_line.EngineArgs):
        assert "--" + f.name.replace("_", "-") in done.stdout


# -- Typing and pasting ------------------------------------------------------------------------------------------------------

HIDE = """import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name in {names}:
            raise ImportError(name + " is hidden")
sys.meta_path.insert(0, Hidden())
"""


def hiding(folder, *names):
    """An environment in which Python has no such modules."""
    (folder / "sitecustomize.py").write_text(HIDE.format(names=set(names)))
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize("kind", ["readline", "bare"])
def test_what_is_pasted_is_one_message(parrot, tmp_path, kind):
    """Blank lines, a tab, and a line that would end the chat, in it; with readline, and on a Python that has none."""
    t = terminal("--chat", *cheap(parrot), "--output", tmp_path / "o.jsonl", columns=80, rows=24,
                 env=hiding(tmp_path, "readline") if kind == "bare" else {})
    try:
        assert "\x1b[?2004h" in t.read("you> "), "the terminal is asked to mark what is pasted"
        t.write("\x1b[200~x\n\n/quit\n\tb\x1b[201~")
        time.sleep(0.2)
        t.write("\n")
        t.read("cdefghijklmnopqrstuvwxyz[^>]*you> ")
        if kind == "readline":                               # the arrow brings it back, edited: a line goes in one piece
            t.write("w\n")
            t.read("xyz[^>]*you> ")
            t.write("\x1b[Av\x02\x7f\n")                     # w, then "v" behind it, left, backspace: v
            t.read("wxyz[^>]*you> ")
        t.write("/quit\n")
        t.read()
        assert t.process.wait(timeout=20) == 0
    finally:
        t.close()
    prompts = [json.loads(line)["prompt"] for line in open(tmp_path / "o.jsonl", encoding="utf-8")]
    assert prompts == ["x\n\n/quit\n\tb"] + ["w", "v"] * (kind == "readline")


def test_commands_of_a_chat(parrot, tmp_path):
    """An empty line ends nothing; what looks like a command and isn't one is not sent to the model."""
    t = terminal("--chat", *cheap(parrot), "--output", tmp_path / "o.jsonl", columns=80, rows=24)
    try:
        t.read("you> ")
        for line, answer in (("", ""), ("y", "z\r\n"), ("/help", "/clear"), ("/clear", "new conversation"), ("y", "z\r\n"), ("/hlep", "no command"), ("/new", "")):
            t.write(line + "\n")
            t.read(answer + "[^>]*you> ")
        t.write("\x04")
        t.read()
        assert t.process.wait(timeout=20) == 0
    finally:
        t.close()
    assert [json.loads(line)["num_prompt_tokens"] for line in open(tmp_path / "o.jsonl")] == [2, 2], "/clear forgets"


def test_the_prompt_is_not_piped_on(parrot):
    """Typed at a terminal, read by a program: the program gets the conversation, the person the prompt."""
    import pty
    fd, slave = pty.openpty()
    process = start("--chat", *cheap(parrot), stdin=slave, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    os.write(fd, b"w\n/quit\n")
    out, err = process.communicate(timeout=60)
    os.close(slave), os.close(fd)
    assert out.splitlines()[1:] == ["you> w", "xyz", "you> /quit"] and said(err).endswith("you> you> ")


# -- Patience ------------------------------------------------------------------------------------------------------------------

def test_what_takes_long_says_so(capfd, monkeypatch, alphabet):
    """Loading, and prompts being read; as lines where stderr is no terminal."""
    import nano_serve
    monkeypatch.setattr(Patience, "FIRST", 0.2)
    make, step = nano_serve.make_executor, nano_serve.LLMEngine.step
    monkeypatch.setattr(nano_serve, "make_executor", lambda *args: time.sleep(0.5) or make(*args))
    monkeypatch.setattr(nano_serve.LLMEngine, "step", lambda engine: (step(engine), time.sleep(0.1))[0])
    assert main([*map(str, cheap(alphabet)), "--prompt", "a" * 40, "--prompt", "b", "--max-tokens", "2", "--max-num-batched-tokens", "8"]) == 0
    out, err = capfd.readouterr()
    assert f"loading {pathlib.Path(alphabet).name}, 0.0 GB … 0 s\n" in err
    assert re.search(r"reading prompts: \d+ of 4[13] tokens; waiting: 1 … \d s\n", err) or re.search(r"reading prompts: \d+ of 43 tokens … \d s\n", err)
    assert "…" not in out


def test_patience_on_a_terminal_leaves_nothing_behind(monkeypatch):
    from screen import Screen
    written = []
    monkeypatch.setattr(terminal_module, "_write_stderr", written.append)
    monkeypatch.setattr(Patience, "FIRST", 0.05)
    monkeypatch.setenv("COLUMNS", "30")
    patience = Patience("loading \x1b[2J something with a long name")
    patience.terminal = True
    with patience:
        time.sleep(0.3)
        screen = Screen(30, 5)
        screen.feed("".join(written))
        assert screen.text().startswith(r"loading \x1b[2J some") and len(screen.text()) < 30
    screen = Screen(30, 5)
    screen.feed("".join(written))
    assert screen.text() == "" and not patience.thread.is_alive()
    with Patience("quick"):
        pass
    assert "quick" not in "".join(written)


def test_a_checkpoint_without_a_tokenizer_takes_ids(capsys, alphabet, tmp_path):
    folder = toys.copy_of(alphabet)
    (folder / "tokenizer.json").unlink()
    (tmp_path / "p.jsonl").write_text('{"prompt_token_ids": [120]}\n{"prompt": "a"}\n')
    code, out, _ = cli(capsys, *cheap(folder), "--prompts", tmp_path / "p.jsonl", "--output", tmp_path / "o.jsonl")
    answers = {a["index"]: a for a in map(json.loads, open(tmp_path / "o.jsonl"))}
    assert code == 1 and answers[0]["token_ids"] == [*b"yz", toys.EOS] and answers[0]["text"] == "" and "no tokenizer.json" in answers[1]["error"]


@pytest.mark.parametrize("field, value", [("ignore_eos", "false"), ("skip_special_tokens", None), ("include_stop_str_in_output", "no"),
                                          ("stop", 0), ("stop_token_ids", 0), ("n", 10 ** 8), ("priority", "x"), ("priority", None)])
def test_a_field_of_the_wrong_type_costs_its_line_alone(capsys, tmp_path, field, value):
    (tmp_path / "p.jsonl").write_text('{"prompt": "hi"}\n' + json.dumps({"prompt": "x", field: value}) + "\n")
    code, out, err = cli(capsys, "--num-kv-blocks", 50, "--max-tokens", 2, "--prompts", tmp_path / "p.jsonl", "--output", tmp_path / "o.jsonl")
    answers = {a["index"]: a for a in map(json.loads, open(tmp_path / "o.jsonl"))}
    assert code == 1 and len(answers[0]["token_ids"]) == 2 and field in answers[1]["error"]


def test_files_are_not_lost_to_a_run_that_cannot_start(capsys, tmp_path):
    (tmp_path / "o.jsonl").write_text("kept\n")
    code, _, err = cli(capsys, "--prompt", "hi", "--output", tmp_path / "o.jsonl", "--block-size", 0)
    assert code == 2 and "--block-size" in err and (tmp_path / "o.jsonl").read_text() == "kept\n"
    code, _, err = cli(capsys, "--prompt", "hi", "--output", tmp_path / "o.jsonl", "--records", tmp_path / "o.jsonl")
    assert code == 2 and "different files" in err and (tmp_path / "o.jsonl").read_text() == "kept\n"


def test_a_line_with_an_error_key_of_its_own_is_a_line_with_an_unknown_field(capsys, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "hi", "error": "mine"}\nno json\n{"prompt": "hi", "cache_salt": "a"}\n')
    code, out, err = cli(capsys, "--num-kv-blocks", 50, "--max-tokens", 2, "--prompts", tmp_path / "p.jsonl",
                         "--output", tmp_path / "o.jsonl")
    answers = {a["index"]: a for a in map(json.loads, open(tmp_path / "o.jsonl"))}
    assert code == 1 and "unknown field 'error'" in answers[0]["error"] and "line 2" in answers[1]["error"]
    assert answers[2]["error"] is None and len(answers[2]["token_ids"]) == 2
