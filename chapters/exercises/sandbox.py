"""Where answers run: a process of its own for each file, behind walls (inside.py), and this side of it, that asks.

The grader, the cases and the right answers stay on this side, where nothing of an answer is ever executed: what comes
through the pipe is plain data, and is compared here. So nothing that an answer prints, patches, writes or ends changes
its verdict; all it can do is to return the right value.

    with Sandbox() as sandbox:
        sandbox.load("def double(x):\\n    return 2 * x")         {"status": "returned", …}
        sandbox.call("double", [3])                               {"status": "returned", "value": 6, …}

Linux has walls around files, network, processes, memory and time, where the system permits user namespaces; elsewhere
it is a plain child process with a time limit, and `missing` says what it lacks.
"""
from __future__ import annotations

import json
import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

from inside import Other, decode, encode  # noqa: F401  (Other: for those who look at values)

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
EXERCISE = {"cpu": 60, "memory": 1 << 30, "processes": 16}       # seconds, bytes, processes and threads
WALLS = ("files", "network", "processes", "memory", "time")
LONGEST_REPLY = 16 << 20                                         # bytes; beyond it a reply is none


def hidden_from_exercises() -> list[str]:
    """Everything that knows an answer: the chapters with their exercises, the engine's modules, tests, history."""
    folders = [ROOT / name for name in ("chapters", "tests", "extras", ".git")]
    return [str(path) for path in (*folders, *ROOT.glob("*.py")) if path.exists()]


class Sandbox:
    """A process for one file of answers. A reply is a dict; its "status" is returned, missing, not started, raised, or
    too slow or ended, after which the process is gone. It starts again with the next load()."""

    def __init__(self, limits=EXERCISE, hide=None, needs=(), modules=None, path=(),
                 python=sys.executable):
        self.python, self.process = python, None
        hide = hidden_from_exercises() if hide is None else [str(path) for path in hide]
        self.setup = {"limits": limits, "hide": hide,
                      "needs": [str(path) for path in needs], "modules": modules or {}, "path": [str(p) for p in path],
                      "scratch": os.path.realpath(tempfile.gettempdir())}
        self.stand, self.missing = [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # -- starting and ending

    def start(self):
        self.close()
        # Nothing of our environment goes along but what Python needs; threads of number libraries count as processes.
        keep = ("PATH", "SYSTEMROOT", "TEMP", "TMP", "TMPDIR", "LANG", "LC_ALL")
        environ = {name: os.environ[name] for name in keep if name in os.environ}
        environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self.process = subprocess.Popen(
            [self.python, "-I", "-B", "-X", "utf8", str(HERE / "inside.py")], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, cwd=HERE.anchor,
            start_new_session=os.name == "posix")
        self.replies, self.printed, self.marks = queue.Queue(), bytearray(), 0
        out, err = self.process.stdout, self.process.stderr
        self.readers = [threading.Thread(target=self._read_replies, args=(out, self.replies), daemon=True),
                        threading.Thread(target=self._read_prints, args=(err,), daemon=True)]
        for reader in self.readers:
            reader.start()
        reply = self._ask(self.setup, 30)
        if "stand" not in reply:
            raise RuntimeError(f"the process for the answers did not start: {reply}")
        self.stand = reply["stand"]
        self.missing = [wall for wall in WALLS if wall not in self.stand]

    def close(self):
        if self.process is None:
            return
        self._kill()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            try:
                pipe.close()
            except OSError:
                pass
        self.process = None

    def _kill(self):
        """The process and whatever it has started: with a namespace of its own, all dies with it; else by the group."""
        if os.name == "posix":
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        self.process.kill()
        self.process.wait()
        for reader in self.readers:
            reader.join(1)

    # -- reading: two threads, since a pipe that nobody empties stops its writer, and Windows can't wait for two

    @staticmethod
    def _read_replies(pipe, replies):
        try:
            while line := pipe.readline(LONGEST_REPLY):
                replies.put(line)
        except (OSError, ValueError):
            pass

    def _read_prints(self, pipe):
        """Keeps the first 4,000 bytes since the last reply, counts the marks that inside.py sets before each."""
        try:
            while data := os.read(pipe.fileno(), 1 << 16):
                self.printed += data[:max(0, 4000 - len(self.printed))]
                self.marks += data.count(b"\x04")
        except (OSError, ValueError):
            pass

    # -- asking

    def load(self, source: str, file="tasks.py", limit=3.0) -> dict:
        """Runs a file's text as a module, in the process that is there or a new one."""
        if self.process is None:
            self.start()
        return self._ask({"load": source, "file": file, "limit": limit}, limit, file)

    def call(self, name: str, arguments: list, limit=3.0, file="tasks.py") -> dict:
        """Calls a function of the file that was loaded, on copies of the arguments. A reply that returned has "value"
        and, as they are after the call, "arguments"; every reply has what was "printed"."""
        return self.play("answers", name, arguments, limit, file)

    def play(self, module: str, name: str, arguments: list, limit: float, file: str) -> dict:
        """call(), but of a function in one of the grader's own modules over there."""
        reply = self._ask({"call": name, "in": module, "arguments": [encode(a) for a in arguments], "limit": limit},
                          limit, file)
        if reply["status"] == "returned":
            try:
                reply["value"] = decode(reply.get("value"))
                reply["arguments"] = [decode(argument) for argument in reply["arguments"]]
            except (ValueError, KeyError, TypeError, RecursionError):
                return {"status": "raised", "type": "", "words": "", "line": None, "forged": True}
        return reply

    def _ask(self, message, limit, file="tasks.py"):
        marks, self.printed, trace = self.marks, bytearray(), []
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            pass                                    # it is gone, as will be seen below
        deadline, ended = time.monotonic() + limit + 0.4, False
        while True:
            try:
                line = self.replies.get(timeout=0.02 if not ended else 0.2)
            except queue.Empty:
                if ended:
                    return self._gone({"status": "ended", "code": self.process.poll()})
                if time.monotonic() > deadline:
                    return self._gone({"status": "too slow", "line": _innermost(trace, file)})
                ended = self.process.poll() is not None
                continue
            reply = self._reply(line, file)
            if reply is not None:
                for _ in range(100):                # until all that was printed before the reply has been read
                    if self.marks > marks:
                        break
                    time.sleep(0.002)
                return reply | {"printed": self._words()}
            trace.append(line.decode(errors="replace"))
            if len(trace) > 10_000:
                return self._gone({"status": "too slow", "line": None})

    def _reply(self, line, file):
        """A reply, checked; None for a line that is none."""
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(reply, dict) or not ("stand" in reply or reply.get("status") in (
                "returned", "missing", "not started", "raised")):
            return None
        if reply.get("status") in ("raised", "not started"):
            frames = reply.pop("frames", None)
            if reply.get("line") is None and isinstance(frames, list):
                lines = [f[1] for f in frames if isinstance(f, list) and len(f) == 2 and f[0] == file]
                reply["line"] = lines[-1] if lines else None
            reply = {"status": reply["status"],
                     "line": reply.get("line") if isinstance(reply.get("line"), int) else None,
                     "denied": reply.get("denied") if reply.get("denied") in DENIED else None,
                     "type": str(reply.get("type"))[:60], "words": str(reply.get("words"))[:300]}
        return reply

    def _words(self):
        return bytes(self.printed).replace(b"\x04", b"").decode(errors="replace").strip()

    def _gone(self, reply):
        self._kill()
        reply["printed"] = self._words()
        self.close()
        return reply


DENIED = ("process", "network", "signal", "file")


def _innermost(trace, file):
    """The line of `file` that comes first in a traceback of faulthandler's, which begins with the innermost."""
    for line in trace:
        if found := re.search(rf'File "{re.escape(file)}", line (\d+)', line):
            return int(found[1])
    return None
