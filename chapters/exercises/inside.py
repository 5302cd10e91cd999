"""The inner half of the sandbox: the process in which an answer runs. sandbox.py starts it and asks; here is only
answered: a file is loaded, a function is called, what it returned is sent back as plain data. Nothing here knows what
is right, so there is no verdict in this process that an answer could forge.

Order  1 Values as lines of JSON.  2 Walls: what the system takes away from this process.  3 The second wall, in Python.
       4 Load, call, reply.
"""
import ctypes
import faulthandler
import io
import json
import linecache
import os
import signal
import sys
import traceback
import types

try:
    import resource
except ImportError:         # Windows
    resource = None

MOST = 20_000               # items of a list, or characters of a string, that are sent on; no right answer has as many


# -- 1. Values. JSON knows neither a tuple nor a key that is no string, so anything but the plainest becomes {kind: …}.

def encode(value, depth=0):
    """A value as JSON can carry it; whatever is no plain data, by the name of its type alone.
    Example: ([1, 2.5], {"a"})  →  {"tuple": [{"list": [1, {"float": "2.5"}]}, {"set": ["a"]}]}"""
    if value is None or isinstance(value, bool):
        return value
    if depth < 12:
        if isinstance(value, int) and value.bit_length() < 4096:
            return int(value)
        if isinstance(value, str):
            return str(value[:MOST])
        if isinstance(value, float):
            return {"float": repr(float(value))}
        if isinstance(value, dict):
            return {"dict": [[encode(k, depth + 1), encode(value[k], depth + 1)] for k in list(value)[:MOST]]}
        for kind in (list, tuple, set, frozenset):
            if isinstance(value, kind):
                return {kind.__name__: [encode(item, depth + 1) for item in list(value)[:MOST]]}
    return {"other": type(value).__name__[:60]}


class Other:
    """What stands for a value that could not be sent: equal to nothing, with the name of its type."""

    def __init__(self, kind):
        self.kind = kind

    def __repr__(self):
        return f"<{self.kind}>"


def decode(data):
    """encode's inverse, on what may have been written by anybody: raises ValueError if it is no such thing."""
    if data is None or isinstance(data, (bool, int, str)):
        return data
    if not isinstance(data, dict) or len(data) != 1:
        raise ValueError("no value")
    (kind, content), = data.items()
    if kind == "float" and isinstance(content, str):
        return float(content)
    if kind == "other" and isinstance(content, str):
        return Other(content)
    if kind == "dict" and isinstance(content, list):
        try:
            return {decode(k): decode(v) for k, v in content}
        except TypeError:
            raise ValueError("no key") from None
    if kind in ("list", "tuple", "set", "frozenset") and isinstance(content, list):
        items = [decode(item) for item in content]
        try:
            return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)
        except TypeError:
            raise ValueError("no member") from None
    raise ValueError("no value")


# -- 2. Walls. Each is tried by itself: what could be raised is reported, and the grader says what could not.

NOBODY = 65534
NEW_USER, NEW_MOUNTS, NEW_NETWORK, NEW_PIDS, NEW_IPC = 0x10000000, 0x20000, 0x40000000, 0x20000000, 0x08000000
READ_ONLY, NO_SUID, BIND, RECURSIVE, PRIVATE = 1, 2, 4096, 16384, 1 << 18


def wall_in(setup) -> list[str]:
    """Raises the walls that this system has; returns those that stand, of files, network, processes, memory, time.

    On Linux: namespaces of its own, without a network, in which only its own processes exist and die with it, all files
    are read-only, and those of setup["hide"] are empty. Needs unprivileged user namespaces, which some systems forbid.
    """
    stand = []
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            not_as_root(libc, setup["needs"])
            uid, gid = os.getuid(), os.getgid()
            check(libc.unshare(NEW_USER | NEW_MOUNTS | NEW_NETWORK | NEW_PIDS | NEW_IPC))
            stand += ["network", "processes"]
            for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        except OSError:
            pass
        if "processes" in stand:
            become_the_first(libc)          # the new namespace of processes begins with the next one
            try:
                mount_walls(libc, setup)
                stand.append("files")
            except OSError:
                pass
            drop_capabilities(libc)
    if resource:
        limits = setup["limits"]
        wanted = [("RLIMIT_CPU", limits["cpu"]), ("RLIMIT_AS", limits["memory"]), ("RLIMIT_FSIZE", 1 << 24),
                  ("RLIMIT_NOFILE", 128), ("RLIMIT_CORE", 0)]
        if "processes" in stand:            # elsewhere the number counts all processes of this user, not only these
            wanted.append(("RLIMIT_NPROC", limits["processes"]))
        for name, value in wanted:
            try:
                resource.setrlimit(getattr(resource, name), (value, value))
                stand += {"RLIMIT_CPU": ["time"], "RLIMIT_AS": ["memory"]}.get(name, [])
            except (AttributeError, ValueError, OSError):
                pass
    return stand


def check(result):
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def not_as_root(libc, needs):
    """Root is bound by no limit of processes: become nobody, if nobody may read what is needed."""
    if os.geteuid():
        return
    os.seteuid(NOBODY)
    readable = all(os.access(path, os.R_OK, effective_ids=True) for path in [os.__file__, sys.prefix, *needs])
    os.seteuid(0)
    if readable:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        libc.prctl(4, 1, 0, 0, 0)           # PR_SET_DUMPABLE, lost by this: else /proc/self is root's


def become_the_first(libc):
    """Goes on as process 1 of the new namespace. The process of before waits for its end, and ends the same way."""
    child = os.fork()
    if child:
        for fd in (0, 1, 2):
            os.close(fd)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
            os.kill(os.getpid(), -status)
        os._exit(status)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: dies with the one that waits


def mount_walls(libc, setup):
    """All is read-only, what is to be hidden is empty, /tmp is new and small, and /proc shows only these processes."""
    def mount(source, target, kind, flags, data=None):
        check(libc.mount(source and source.encode(), target.encode(), kind and kind.encode(), flags,
                         data and data.encode()))

    mount(None, "/", None, RECURSIVE | PRIVATE)
    attributes = (ctypes.c_uint64 * 4)(1, 0, 0, 0)                         # MOUNT_ATTR_RDONLY, of all mounts
    check(libc.syscall(442, -1, b"/", 0x8000, ctypes.byref(attributes), 32))     # mount_setattr, since Linux 5.12
    for path in setup["hide"]:
        if os.path.isdir(path):
            mount("tmpfs", path, "tmpfs", NO_SUID | READ_ONLY, "size=4k")
        elif os.path.exists(path):
            mount("/dev/null", path, None, BIND)
    try:
        mount("proc", "/proc", "proc", NO_SUID)
    except OSError:                                                        # in a container that masks some of it
        mount("tmpfs", "/proc", "tmpfs", NO_SUID | READ_ONLY, "size=4k")
    folder = setup["scratch"]
    needed = sys.prefix, sys.base_prefix, *setup["needs"]
    if not any(os.path.realpath(path).startswith(folder + os.sep) for path in needed):
        mount("tmpfs", folder, "tmpfs", NO_SUID, "size=16m")
        os.chdir(folder)


def drop_capabilities(libc):
    """So that none of it can be undone: no capabilities, none to be had from any file."""
    for capability in range(64):
        libc.prctl(24, capability, 0, 0, 0)                                # PR_CAPBSET_DROP
    libc.prctl(38, 1, 0, 0, 0)                                             # PR_SET_NO_NEW_PRIVS
    libc.capset(ctypes.byref((ctypes.c_uint32 * 2)(0x20080522, 0)), ctypes.byref((ctypes.c_uint32 * 6)()))


# -- 3. The second wall: for systems without the first, and because it can say at which line somebody ran into it

class Denied(PermissionError):
    """What an answer may not do: `what` is process, network, signal or file."""

    def __init__(self, what):
        super().__init__(f"not allowed here: {what}")
        self.what = what


def second_wall(hide, scratch):
    """An audit hook, which can't be taken off again: https://docs.python.org/3/library/audit_events.html"""
    denied = {"subprocess.Popen": "process", "os.system": "process", "os.fork": "process", "os.forkpty": "process",
              "os.posix_spawn": "process", "os.spawn": "process", "os.exec": "process", "os.startfile": "process",
              "socket.connect": "network", "socket.bind": "network", "socket.sendto": "network",
              "socket.getaddrinfo": "network", "os.kill": "signal", "os.killpg": "signal",
              "os.remove": "file", "os.rename": "file", "os.rmdir": "file", "os.truncate": "file",
              "shutil.rmtree": "file"}
    hidden = tuple(os.path.normcase(os.path.realpath(path)) for path in hide)
    realpath, normcase, fsdecode, under = os.path.realpath, os.path.normcase, os.fsdecode, str.startswith
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def hook(event, arguments):
        if event in denied:
            raise Denied(denied[event])
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            path = normcase(realpath(fsdecode(arguments[0])))
            if any(path == one or under(path, one + os.sep) for one in hidden):
                raise Denied("file")
            if arguments[2] & writing and not under(path, scratch + os.sep) and path != os.devnull:
                raise Denied("file")

    sys.addaudithook(hook)


# -- 4. Load, call, reply

def main():
    """One line in, one line out, until the grader has had enough. What the answer prints goes to file 2, apart."""
    commands, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8", "replace", write_through=True)
    setup = json.loads(commands.readline())
    sys.path[:0] = setup["path"]
    for name, text in setup["modules"].items():         # plain helpers of the grader's, beside the answers
        sys.modules[name] = run_text(name, f"{name}.py", text)
    stand = wall_in(setup)
    second_wall(setup["hide"], setup["scratch"])
    dumps, write = json.dumps, os.write

    def reply(message):
        sys.stdout.flush()
        write(1, b"\x04")                               # what was printed until now belongs to this reply
        data = dumps(message).encode() + b"\n"
        while data:
            data = data[write(replies, data):]

    reply({"stand": stand})
    try:
        serve(commands, replies, reply)
    except BaseException:                               # an answer has broken json, or the like: its own loss
        os._exit(1)


def serve(commands, replies, reply):
    for line in commands:
        command = json.loads(line)
        # Should it take too long, a thread without Python in it writes where we are, into the replies' pipe.
        faulthandler.dump_traceback_later(command["limit"], file=replies)
        try:
            if "load" in command:
                run_text("answers", command["file"], command["load"])
                message = {"status": "returned", "value": None}
            else:
                message = call(sys.modules[command["in"]], command)
        except BaseException as error:                  # SystemExit too: it is the answer's, not ours
            message = what_was_raised(error)
        faulthandler.cancel_dump_traceback_later()
        reply(message)


def run_text(name, file, text):
    """A module from its text. Its lines are left where tracebacks look for them."""
    module = types.ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module                          # a dataclass looks its own module up there
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    exec(compile(text, file, "exec"), module.__dict__)
    return module


def call(module, command):
    function = getattr(module, command["call"], None)
    if not callable(function):
        return {"status": "missing"}
    arguments = [decode(argument) for argument in command["arguments"]]
    value = function(*arguments)
    return {"status": "returned", "value": encode(value), "arguments": [encode(argument) for argument in arguments]}


def what_was_raised(error):
    """The error's type, words, line in the answer's file, and what was denied; by type alone if it has no words."""
    try:
        words = str(error)[:300]
    except Exception:
        words = ""
    line = error.lineno if isinstance(error, SyntaxError) and error.filename else None
    if line is not None:
        words = error.msg
    frames = [(frame.f_code.co_filename, n) for frame, n in traceback.walk_tb(error.__traceback__)][-200:]
    return {"status": "not started" if isinstance(error, NotImplementedError) else "raised",
            "type": type(error).__name__, "words": words, "denied": getattr(error, "what", None)
            if isinstance(error, Denied) else None, "line": line, "frames": frames}


if __name__ == "__main__":
    main()
