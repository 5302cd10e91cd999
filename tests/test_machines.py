"""Other machines, as far as one can pretend: a Python without POSIX's modules and calls, as on Windows; and macOS, where
processes are spawned. Beside that: no Python newer than 3.10 is needed."""
import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest
from conftest import ROOT

# os.name stays "posix", so what is asked for only there stays, too (os.killpg, SIGKILL), and os.uname, which NumPy wants.
WINDOWS = """
import os, signal, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name in {"resource", "fcntl", "termios", "tty", "pty", "pwd", "grp", "readline", "syslog", "curses"}:
            raise ImportError(name + " is hidden")
sys.meta_path.insert(0, Hidden())
def no_sysconf(name):                                           # missing on Windows; but asyncio asks for it here
    raise OSError(name)
os.sysconf = no_sysconf
for name in ("fork", "forkpty", "sched_getaffinity", "sched_setaffinity", "sched_yield", "setsid", "getpgid",
             "setpgrp", "getuid", "geteuid", "chown", "mkfifo", "wait3", "nice"):
    delattr(os, name)
for name in ("SIGSTOP", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGCHLD", "SIGUSR1", "alarm", "setitimer", "pthread_sigmask"):
    delattr(signal, name)
"""
MACOS = """
import os, sys
sys.modules["triton"] = None                                   # there is none for macOS
sys.platform = "darwin"
sys.modules["_scproxy"] = type(sys)("_scproxy")                # the system's proxies, which urllib asks for
sys.modules["_scproxy"]._get_proxy_settings = sys.modules["_scproxy"]._get_proxies = dict
del os.sched_getaffinity, os.sched_yield, os.fork            # which is there, but must not be used
"""
# What a reader starts first, and the exit code: the grader's is 1 while a task is unsolved.
COMMANDS = [(["nano_serve.py", "--prompt", "What is TTFT?", "--max-tokens", "5"], 0), (["chapters/tools/ledger.py"], 0),
            (["chapters/exercises/grade.py", "1", "--task", "1", "--file", "{empty}"], 1),
            (["chapters/tools/bench.py", "--num-prompts", "2", "--random-input-len", "4", "--random-output-len", "2"], 0)]


def start(tmp_path, system, arguments):
    (tmp_path / "sitecustomize.py").write_text(system)
    (tmp_path / "tasks.py").write_text("")
    arguments = [a.format(empty=tmp_path / "tasks.py") for a in arguments]
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=120,
                          capture_output=True, text=True)


@pytest.mark.parametrize("arguments, code", COMMANDS, ids=lambda x: x[0] if isinstance(x, list) else "")
def test_it_starts_without_posix(tmp_path, arguments, code):
    done = start(tmp_path, WINDOWS, arguments)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr


def test_every_module_can_be_imported_without_posix(tmp_path):
    """All but bench_peers.py and what a test or a student's answer is run by: those say themselves what they need."""
    modules = [path for path in (*ROOT.glob("*.py"), *(ROOT / "extras").glob("*.py"), *(ROOT / "chapters").glob("*.py"), *(ROOT / "chapters/tools").glob("*.py")) if ".zh" not in path.name]
    names = [p.stem for p in modules if p.stem not in ("nano_serve", "__init__")]
    assert {"worker", "terminal", "ch01_paradigm", "ledger", "async_engine"} <= set(names)
    paths = [str(ROOT), str(ROOT / "extras"), str(ROOT / "chapters"), str(ROOT / "chapters/tools")]
    done = start(tmp_path, WINDOWS, ["-c", f"import sys; sys.path[:0] = {paths!r}; import nano_serve, {', '.join(names)}"])
    assert done.returncode == 0, done.stderr


def test_two_ranks_as_on_macos(tmp_path):
    """Spawned, each with an interpreter of its own, from the command line; and the same text as one rank's."""
    prompt = ["nano_serve.py", "--prompt", "What is a KV cache?", "--max-tokens", "8"]
    one, two = start(tmp_path, "", prompt), start(tmp_path, MACOS, [*prompt, "-tp", "2"])
    assert two.returncode == 0, two.stderr
    assert two.stdout.split("\n\n")[0] == one.stdout.split("\n\n")[0]
    waits = re.findall(r"loading .*", two.stderr)
    assert all("on 2 ranks; each starts a Python and imports PyTorch" in wait for wait in waits)


NEWER = {"ExceptionGroup", "BaseExceptionGroup", "tomllib", "StrEnum", "TaskGroup", "Self", "batched", "override", "LiteralString",
         "assert_never", "reveal_type", "EnumCheck", "sleep_forever", "UTC", "add_note"}


def test_nothing_newer_than_python_3_10():
    """By syntax, where an interpreter can say it, and by name for the usual suspects; .ci/run starts each interpreter found."""
    for path in [p for folder in (".", "extras", "chapters", "tests", "models") for p in
                 ((ROOT / folder).glob("*.py") if folder == "." else (ROOT / folder).rglob("*.py"))]:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 10))
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | {
            alias.name for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names}
        assert not (found := used & NEWER), f"{path}: {found}"
        timeouts = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "timeout" and getattr(n.value, "id", "") == "asyncio"]
        assert not timeouts, f"{path}: asyncio.timeout is of 3.11"


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-test.txt"])
def test_every_requirement_is_pinned_for_each_python(file):
    """For each package and each Python there is just one pin."""
    for version in ((3, 10), (3, 11), (3, 12), (3, 13), (3, 14)):
        pins = {}
        for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
            line = line.split("#")[0].strip()
            if not line or line.startswith("-r"):
                continue
            requirement, _, marker = line.partition(";")
            name, pin = re.fullmatch(r"([\w-]+)==([\d.]+) *", requirement).groups()
            compare = re.search(r'python_version (>=|<) "3\.(\d+)"', marker)
            if not compare or (version >= (3, int(compare[2]))) == (compare[1] == ">="):
                assert name not in pins, f"{name} is pinned twice for Python {version}"
                pins[name] = pin
        assert len(pins) >= 4
        assert pathlib.Path(ROOT / file).is_file()
