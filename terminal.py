"""What a terminal needs and a file doesn't (chapter 3): control characters made visible, words wrapped, lines typed in.

Promises  nothing that a model or a prompt holds is executed by a terminal: each control character is shown by its
          escape. What takes longer than two seconds says so.
Order     1 visible.  2 WordWrap: text as it comes, wrapped.  3 Typist: reading a message.  4 Patience: long waits.
"""
import contextlib
import os
import re
import shutil
import sys
import threading
import time

# -- 1. What may be shown ---------------------------------------------------------------------------------------------

# C0 but for tab and newline, DEL, C1 (in which 0x9b alone opens an escape sequence); the line separators of Unicode;
# what turns the direction of writing, so that a line reads as something else than it says; halves of surrogate pairs.
NOT_SHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
                       "\ud800-\udfff]")


def visible(text):
    r"""Text as a terminal may have it: "\x1b[2J" in place of the character that would clear the screen."""
    return NOT_SHOWN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def columns():
    """How wide the lines may be: the terminal's width, or 80 where none is."""
    return max(shutil.get_terminal_size((80, 24)).columns, 2)


def folded(parts, width, indent="    "):
    """Pieces of text, laid side by side with two blanks between, in lines of at most `width`; the second line and later
    are indented. A piece is never cut, so that it can be searched for."""
    lines = [""]
    for part in parts:
        gap = "  " if lines[-1].strip() else ""
        if gap and len(lines[-1]) + len(gap) + len(part) > width:
            lines, gap = lines + [indent], ""
        lines[-1] += gap + part
    return "\n".join(lines)


# -- 2. Text as it comes ----------------------------------------------------------------------------------------------

class WordWrap:
    """Wraps at words what comes in pieces of words. What there is of a word is shown at once; if it outgrows its line,
    it is taken back and moved to the next. Example, eleven columns, then "four" grows by "teen":

        three four     →   three
                           fourteen
    """

    def __init__(self):
        self.column, self.word = 0, ""                       # of the cursor; what stands left of it, back to a blank

    def feed(self, text, width):
        """The next piece  →  what to write to a terminal of `width` columns. The last stays empty: behind a character
        in it terminals differ in where the cursor is."""
        from rich.cells import cell_len
        out = []
        for c in text:
            cells = 8 - self.column % 8 if c == "\t" else cell_len(c)
            if c == "\n":
                self.column, self.word = 0, ""
            elif self.column + cells >= width and c in " \t":
                c, self.column, self.word = "\n", 0, ""      # a blank at the edge is the line's end
            else:
                if self.column + cells >= width and self.column:
                    moved = self.word if cell_len(self.word) < self.column else ""      # a line of one word is cut
                    out.append("\b" * cell_len(moved) + "\x1b[K\n" + moved)
                    self.column, self.word = cell_len(moved), moved
                self.column += cells
                self.word = "" if c in " \t" or cells == 2 else self.word + c           # 世界 may break anywhere
                c = " " * cells if c == "\t" else c
            out.append(c)
        return "".join(out)


# -- 3. Typing --------------------------------------------------------------------------------------------------------

class Typist:
    """Reads messages from whoever sits there, or from a pipe. At a terminal: line editing and history by the system's
    readline, and a text that is pasted is one message, blank lines and all. The terminal marks what is pasted
    ("bracketed paste": ESC[200~ … ESC[201~). GNU readline takes that in; where Python has no readline, the marks are
    read here. macOS's libedit and Windows know no marks: there what follows within a twentieth of a second belongs to
    the same paste."""

    PASTED, END = "\x1b[200~", "\x1b[201~"

    def __init__(self):
        self.typed = sys.stdin is not None and sys.stdin.isatty()
        self.own_line = self.typed and sys.stdout.isatty()   # else the prompt must not get into what is piped on
        self.kind = None
        if hasattr(sys.stdin, "reconfigure"):                # a byte that is no text costs its message, not the program
            sys.stdin.reconfigure(errors="surrogateescape")
        if self.own_line:
            try:
                import readline
                self.kind = "libedit" if "libedit" in (readline.__doc__ or "") else "readline"
            except ImportError:                              # Windows, whose console edits lines by itself
                self.kind = "bare" if os.name == "posix" else "windows"
            if self.kind == "readline":
                readline.parse_and_bind("set enable-bracketed-paste on")
                readline.parse_and_bind("tab: tab-insert")

    def read(self, prompt):
        """The next message. Raises EOFError at the end, KeyboardInterrupt at Ctrl-C."""
        if not self.own_line:
            if self.typed:
                print(prompt, end="", file=sys.stderr, flush=True)
            return input()
        if self.kind == "bare":
            print("\x1b[?2004h", end="", flush=True)
        try:
            text = input(prompt)
            if text.startswith(self.PASTED):
                while self.END not in text:
                    text += "\n" + input()
                text = text.replace(self.PASTED, "").replace(self.END, "")
            while self.kind in ("libedit", "windows") and self._more():
                text += "\n" + input()
        finally:
            if self.kind == "bare":
                print("\x1b[?2004l", end="", flush=True)
        return text

    def _more(self):
        if self.kind == "windows":
            import msvcrt
            time.sleep(0.05)
            return msvcrt.kbhit()
        import select
        return bool(select.select([sys.stdin], [], [], 0.05)[0])


# -- 4. Long waits ----------------------------------------------------------------------------------------------------

class Patience:
    """While its block runs: says on stderr, after two seconds, what is being done and for how long. On a terminal that
    is one line, rewritten each second and gone at the end; elsewhere a line after 2, 4, 8, … seconds.

    what: a text, or a function that gives it. `stop()` ends it early: an answer has begun. It writes past Python's
    buffers, whose locks a process that is forked meanwhile would inherit."""

    FIRST = 2.0

    def __init__(self, what):
        self.what, self.over, self.shown = (lambda: what) if isinstance(what, str) else what, threading.Event(), False
        self.terminal = sys.stderr is not None and sys.stderr.isatty()

    def __enter__(self):
        self.start = time.monotonic()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *exc):
        self.stop()

    def _run(self):
        due = self.FIRST
        while not self.over.wait(max(self.start + due - time.monotonic(), 0)):
            line = f"{visible(self.what())} … {time.monotonic() - self.start:.0f} s"
            if self.terminal:
                line, due = f"\r{line[:columns() - 1]}\x1b[K", due + 1
            else:
                line, due = line + "\n", 2 * due
            self.shown = True
            _write_stderr(line)

    def stop(self):
        """No line after this, and none left standing on a terminal."""
        if not self.over.is_set():
            self.over.set()
            self.thread.join()
            if self.shown and self.terminal:
                _write_stderr("\r\x1b[K")


def _write_stderr(text):
    try:
        os.write(sys.stderr.fileno(), text.encode(sys.stderr.encoding or "utf-8", "replace"))
    except (OSError, ValueError, AttributeError):            # closed, or no file: then nobody is looking
        pass


@contextlib.contextmanager
def progress(total, wanted):
    """A line on stderr that counts finished requests, if it is wanted and somebody is looking."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda: bar.advance(task)
