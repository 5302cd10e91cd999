"""What the commands of this folder share: whatever is wrong with an option or a file is named, if possible beforehand.

What checks raises ValueError (check_types: TypeError), and a command prints that as one line, `bench.py: error: …`, and
exits with 2.  Who stops a command gets no traceback: end_quietly."""
import contextlib
import functools
import os
import sys
import tempfile
import typing

from rich.console import Console

type_hints = functools.cache(typing.get_type_hints)


def check_at_least(args, limits: dict[int, str]) -> None:
    """limits: {the least value: names of options}.  An option that was not given, None, is not looked at.
    Example: {1: "num_prompts"} raises "--num-prompts is 0, must be at least 1"."""
    for limit, names in limits.items():
        for name in names.split():
            if (value := getattr(args, name)) is not None and value < limit:
                raise ValueError(f"--{name.replace('_', '-')} is {value}, must be at least {limit}")


@contextlib.contextmanager
def naming(option: str, path):
    """An OSError inside becomes a ValueError that names the option and its path, which a full disk would not."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}") from None


def check_writable(option: str, path) -> None:
    """That the path can be opened for writing, to be known before a long run.  Leaves everything as it was."""
    with naming(option, path):
        existed = os.path.exists(path)
        open(path, "a").close()
        if not existed:
            os.remove(path)


def check_folder(option: str, path) -> None:
    """That files can be written into the folder, which is made if it is not there yet."""
    with naming(option, path):
        os.makedirs(path, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()


def check_types(thing):
    """The dataclass instance itself, if each field is what its class says: plain types, `X | None`, lists of those."""
    def fits(value, kind) -> bool:
        if typing.get_origin(kind) is list:
            return isinstance(value, list) and all(fits(item, *typing.get_args(kind)) for item in value)
        return isinstance(value, (int, float) if kind is float else kind)

    for name, kind in type_hints(type(thing)).items():
        if not fits(getattr(thing, name), kind):
            raise TypeError(f"{name} is {getattr(thing, name)!r}, must be {getattr(kind, '__name__', kind)}")
    return thing


def end_quietly() -> None:
    """For a script, before it does anything: Ctrl-C ends it with 130, a reader that has gone (`| head -1`) with 1.

    A hook for what nobody has caught, since a walk-through has no function that one could put a `try` around."""
    def hook(kind, error, trace):
        if issubclass(kind, KeyboardInterrupt):
            sys.exit(130)
        if issubclass(kind, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())     # for what is still to be flushed
            sys.exit(1)
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook


def make_console(**options) -> Console:
    """A console on stdout, whatever that is: what its encoding lacks becomes "?", and a width of 0 means 80."""
    if hasattr(sys.stdout, "reconfigure"):      # a notebook's has no such method
        sys.stdout.reconfigure(errors="replace")
    console = Console(**options)
    console.width = console.width or 80
    return console
