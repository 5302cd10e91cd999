"""Everything that is said exists twice, in English and in Chinese: the English stands where it is said, the Chinese in
a catalogue beside the file.

    ch01_paradigm.py        say = Say(language, catalogue(__file__))
                            say("{n} tokens in {seconds:.1f} s", n=12, seconds=0.5)
    ch01_paradigm.zh.py     ZH = {"{n} tokens in {seconds:.1f} s": "{n} 个 token，用时 {seconds:.1f} 秒"}

A template has its values by name, so that the Chinese may put them in another order. Never hand an f-string to `say`:
what it would look up is different every time. A template that is kept for later, or stands in a table of its own, is
marked with `T`, so that the test finds it (tests/test_lang.py; it looks at every file that imports from here);
`Sentence` keeps one together with its values.

    HEADS = T(["step", "free blocks"])                         [say(head) for head in HEADS]
    found = Sentence("step {step}: {who}", step=3, who="a")    say(found)

A file's catalogue is NAME.zh.py beside it; a folder's, for all files in it that have none of their own, is zh.py.
"""
import argparse
import ast
import os
import pathlib
import re
import string
import unicodedata

LANGUAGES = ("en", "zh")


# -- 1. Which language

def default_language(environ=os.environ) -> str:
    """What the locale asks for, in the order that POSIX gives its variables: "zh" for zh_CN.UTF-8, else "en"."""
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        if environ.get(name):
            return "zh" if environ[name].lower().startswith("zh") else "en"
    return "en"


def add_lang_option(parser: argparse.ArgumentParser) -> None:
    """--lang en|zh, by default the locale's."""
    parser.add_argument("--lang", choices=LANGUAGES, default=default_language(),
                        help="the language of what is printed (语言); default: the locale's, here %(default)s")


# -- 2. Saying it

def T(templates):
    """Marks a template, or a list or dict (its values) of them, as something to be said later, and returns it."""
    return templates


class Sentence:
    """A template and its values, to be said once the language is known. A value may be a Sentence itself."""

    def __init__(self, template, /, **values):
        self.template, self.values = template, values

    def __eq__(self, other):
        return isinstance(other, Sentence) and (self.template, self.values) == (other.template, other.values)

    def __repr__(self):
        return f"Sentence({self.template!r}, **{self.values!r})"


class Say:
    """say(template, **values) → the sentence in the language. `language` is "en" or "zh"; the catalogues are looked up
    one after the other. What none of them has is said in English."""

    def __init__(self, language, *catalogues):
        if language not in LANGUAGES:
            raise ValueError(f"language is {language!r}, must be one of {', '.join(LANGUAGES)}")
        self.language = language
        self.translations = {}
        for entries in reversed(catalogues if language == "zh" else ()):
            self.translations |= {key(english): chinese for english, chinese in entries.items()}

    def __call__(self, template, /, **values) -> str:
        if isinstance(template, Sentence):
            template, values = template.template, template.values | values
        values = {name: self(value) if isinstance(value, Sentence) else value for name, value in values.items()}
        return self.translations.get(key(template), template).format(**values)


def key(template: str) -> str:
    """Line breaks and indents of the source don't count: a template may be broken wherever its line is full."""
    return " ".join(template.split())


def catalogue(path) -> dict[str, str]:
    """The Chinese of the file `path`, or of a folder; {} if there is no catalogue, so English is said."""
    path = pathlib.Path(path)
    own, shared = path.with_name(f"{path.stem}.zh.py"), (path if path.is_dir() else path.parent) / "zh.py"
    where = own if own.is_file() else shared
    if not where.is_file():
        return {}
    namespace = {}
    exec(compile(where.read_bytes(), str(where), "exec"), namespace)      # a name with a dot can't be imported
    return namespace["ZH"]


# -- 3. Setting it

def wide(text: str) -> int:
    """Columns that a text takes in a terminal: a Chinese character takes two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def flow(text: str) -> list[str]:
    """Paragraphs (empty lines part them), each as one line. Between two Chinese characters a line break is nothing, nor
    is it beside Chinese punctuation."""
    joined = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        line = " ".join(paragraph.split())
        line = re.sub(r"(?<=[\u3000-\u9fff\uff00-\uffef]) (?=[\u3000-\u9fff\uff00-\uffef])", "", line)
        joined.append(re.sub(r"(?<=[\u3000-\u303f\uff00-\uffef]) | (?=[\u3000-\u303f\uff00-\uffef])", "", line))
    return joined


def fill(text: str, width: int, first: str = "", rest: str = "") -> str:
    """One paragraph in lines of at most `width` columns. English breaks at spaces, Chinese anywhere but before a
    comma or after a bracket that opens.
    first, rest: what the first line and all others begin with."""
    pieces = re.findall(r"[（《]*(?:[\u3000-\u9fff\uff00-\uffef]|[^\s\u3000-\u9fff\uff00-\uffef]+)"
                        r"[，。、；：！？）》”]*|\s+", text.strip())
    room, lines, line = max(width - wide(rest), 8), [], first
    for piece in (piece[i:i + room] for piece in pieces for i in range(0, len(piece), room)):     # no word is longer
        if wide(line) + wide(piece.rstrip()) > width and line.strip() and line not in (first, rest):
            lines.append(line.rstrip())
            line = rest
            if piece.isspace():
                continue
        line += piece
    return "\n".join([*lines, line.rstrip()])


# -- 4. What the test asks: which templates does a file have, and what does a template hold?

def templates(source: str) -> list[str]:
    """Every template in a Python source: the first argument of say(…), x.say(…) and Sentence(…), and all that is marked
    by T(…). Raises ValueError for an f-string there: it can't be looked up."""
    found = []

    def collect(node, tables):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            raise ValueError(f"line {node.lineno}: an f-string is no template; give its values by name")
        elif isinstance(node, ast.IfExp):
            collect(node.body, tables)
            collect(node.orelse, tables)
        elif tables and isinstance(node, (ast.Dict, ast.List, ast.Tuple)):
            for value in node.values if isinstance(node, ast.Dict) else node.elts:
                collect(value, tables)

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "id", getattr(node.func, "attr", None))
            if name in ("say", "Sentence", "T"):
                collect(node.args[0], tables=name == "T")
    return found


def placeholders(template: str) -> set[str]:
    """Example: "{n:,} of {total}"  →  {"n", "total"}"""
    return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
