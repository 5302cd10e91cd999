"""A terminal for the tests: a process in a pseudo-terminal of a given size, and what a person sees on its screen."""
import codecs
import errno
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
import unicodedata


class Screen:
    """What a terminal shows after what was written to it: text, \\r \\n \\b, and the sequences that move and erase. Any
    other control character or sequence is an AssertionError: nobody here has a reason to send one."""

    def __init__(self, columns, rows):
        self.columns, self.rows, self.x, self.y = columns, rows, 0, 0
        self.lines, self.scrolled = [[" "] * columns for _ in range(rows)], []

    def feed(self, text):
        while text:
            if text.startswith("\x1b["):
                match = re.match(r"\x1b\[([?>=]?)([\d;]*)([A-Za-z])", text)
                assert match, f"an unknown sequence: {text[:20]!r}"
                self._sequence(match[1], int(match[2].split(";")[0] or 0), match[3])
                text = text[match.end():]
            else:
                self._character(text[0])
                text = text[1:]

    def _sequence(self, private, n, what):
        if what == "A":
            self.y = max(self.y - max(n, 1), 0)
        elif what == "B":
            self.y = min(self.y + max(n, 1), self.rows - 1)
        elif what == "C":
            self.x = min(self.x + max(n, 1), self.columns - 1)
        elif what == "D":
            self.x = max(self.x - max(n, 1), 0)
        elif what == "K":
            start, stop = {0: (self.x, self.columns), 1: (0, self.x + 1), 2: (0, self.columns)}[n]
            for x in range(start, stop):
                self.lines[self.y][x] = " "
        elif what == "P":
            line = self.lines[self.y]
            self.lines[self.y] = (line[:self.x] + line[self.x + max(n, 1):] + [" "] * max(n, 1))[:self.columns]
        elif what == "J" and n == 0:
            self._sequence("", 0, "K")
            for y in range(self.y + 1, self.rows):
                self.lines[y] = [" "] * self.columns
        else:
            assert what == "m" or private == "?" and what in "hl", f"what is ESC [ {private} {n} {what}?"

    def _character(self, c):
        if c == "\r":
            self.x = 0
        elif c == "\n":
            self.y += 1
            if self.y == self.rows:
                self.scrolled.append(self.lines.pop(0))
                self.lines.append([" "] * self.columns)
                self.y -= 1
        elif c == "\b":
            self.x = max(min(self.x, self.columns - 1) - 1, 0)
        elif c == "\t":                                      # typed: the system's own echo
            self.x = min(self.x // 8 * 8 + 8, self.columns - 1)
        elif c == "\x07":
            pass                                             # readline rings at an empty history
        else:
            assert unicodedata.category(c) not in ("Cc", "Zl", "Zp") and c not in "\u202e\u2066", f"a raw {c!r}"
            width = 2 if unicodedata.east_asian_width(c) in "WF" else 1
            if self.x + width > self.columns:
                self._character("\r")
                self._character("\n")
            self.lines[self.y][self.x:self.x + width] = [c, ""][:width]
            self.x += width

    def text(self, whole=False):
        """The lines in view, or all since the beginning, without what is blank at their right and below."""
        lines = self.scrolled + self.lines if whole else self.lines
        return "\n".join("".join(line).rstrip() for line in lines).rstrip("\n")


class Terminal:
    """A process with a pseudo-terminal for stdin, stdout, stderr. `seen`: all it wrote; `screen`: what that shows."""

    def __init__(self, command, env, columns=80, rows=24):
        self.fd, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(command, env={**env, "TERM": "xterm"}, stdin=slave, stdout=slave, stderr=slave,
                                        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        os.close(slave)
        self.seen, self.rest, self.screen = "", "", Screen(columns, rows)
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, until=None, seconds=60):
        """Everything shown, until a pattern appears in what is new or the process ends."""
        deadline, new = time.monotonic() + seconds, ""
        while until is None or not re.search(until, new):
            assert time.monotonic() < deadline, f"no {until!r} in {new!r}; on the screen:\n{self.screen.text()}"
            if not select.select([self.fd], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(self.fd, 65536)
            except OSError as error:                 # Linux's end of a terminal
                assert error.errno == errno.EIO
                break
            if not data:
                break
            text = self.rest + self.decoder.decode(data)                 # neither a character nor a sequence is shown
            cut = re.search(r"(\x1b(\[[?>=]?[\d;]*)?)?$", text).start()   # by halves
            text, self.rest = text[:cut], text[cut:]
            self.screen.feed(text)
            new += text
        self.seen += new
        return new

    def write(self, text):
        os.write(self.fd, text.encode())

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.fd)
