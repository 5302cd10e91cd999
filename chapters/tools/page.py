"""What every walk-through shares: its options, words and pictures, the running example, a look inside a step.

    page = Page("ch01_paradigm", __doc__, OPTIONS)     --lang, --tp, --save DIR, --width; OPTIONS: the defaults
    page.doing(T("computing"))                         what the progress line says while nothing else is printed
    page.start(T("The chapter's title"), seconds)      the first line: the title, and how long all will take
    page.section(2, T("Prefill and decode"))           page.say("… {n} tokens …", n=n)   filled to the console's width
    page.table(Sentence("title"), T(["what", "value>"]), rows)      page.show(picture, "name")   also DIR/name.svg
    running_example(llm), greedy(n)                    the prompt of 2,000 + 50 tokens; SamplingParams to the limit
    Seats([row, …])                                    who was computed in which step, a row a seat
    with watched(engine) as seen: …                    the shapes of each step, as they go through the first layer

A walk-through is one file of `# %%` cells.  A cell holds functions that compute and return values, which the tests
call, or it shows what they find, under `if __name__ == "__main__":`.  So one file runs from a shell, opens as a
notebook, and can be imported by the processes that tensor parallelism starts.  All that it says goes through `words`,
a lang.Say: English stands in the file, Chinese in NAME.zh.py beside it; this folder's words are in zh.py.
"""
import argparse
import contextlib
import json
import os
import pathlib
import sys
import threading
import time
import weakref
from types import SimpleNamespace

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

from rich import box  # noqa: E402
from rich.rule import Rule  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

import svg  # noqa: E402
from lang import Say, Sentence, T, add_lang_option, catalogue, fill, flow, wide  # noqa: E402
from options import check_folder, make_console  # noqa: E402
from request import SamplingParams  # noqa: E402
from show import save_svg  # noqa: E402

RANKS = (1, 2, 4, 8, 16)    # that the tiny model can be cut into
WIDTH = 100                 # as wide as prose should be; a narrower terminal decides for itself
TABLES = 76                 # columns that the widest table takes
SILENCE = 2                 # seconds without a word, after which a progress line says what is being done


def parse_args(doc, argv=None, options=None):
    """The options of a walk-through. options: {name: default}, as a chapter's first cell has them; in a notebook they
    hold, since sys.argv is the notebook's own, in a shell what is typed comes after them."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_lang_option(parser)
    parser.add_argument("--tp", type=int, default=8, choices=RANKS,
                        help="tensor-parallel ranks of the running example's request [%(default)s]")
    parser.add_argument("--save", metavar="DIR", help="write the pictures and tables as SVG, too")
    parser.add_argument("--width", type=int, help=f"columns to use [the terminal's, at most {WIDTH}]")
    typed = sys.argv[1:] if argv is None and "ipykernel" not in sys.modules else argv or []
    args = parser.parse_args([f"--{k}={v}" for k, v in (options or {}).items() if v is not None] + list(typed))
    try:
        if args.save:
            check_folder("--save", args.save)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return args


def keep_company(page, ended):
    """A page's thread. It only knows the page by a weak reference: who forgets to end a page is rid of both."""
    while not ended.wait(0.1) and page() is not None:
        page().break_silence()


class Page:
    """Where a walk-through writes: the console, and a folder of SVGs if one is wanted."""

    def __init__(self, name, doc, options=None, argv=None, file=None):
        self.args, self.begin = parse_args(doc, argv, options), time.perf_counter()
        self.words = Say(self.args.lang, catalogue(HERE.parent / f"{name}.py"), catalogue(HERE))
        self.chinese = Say("zh", catalogue(HERE.parent / f"{name}.py"))
        self.console = make_console(highlight=False, file=file)
        self.console.width = self.args.width or min(self.console.width, WIDTH)
        self.what, self.spoke, self.ended = T("starting"), self.begin, threading.Event()
        self.forecast = None
        threading.Thread(target=keep_company, args=(weakref.ref(self), self.ended), daemon=True).start()

    # -- progress ------------------------------------------------------------------------------------------------------

    def doing(self, what):
        """what: a template, or a Sentence; said with the seconds so far once nothing has been printed for a while."""
        self.what = what

    def break_silence(self):
        """To stderr, so that a page that is written to a file holds the page alone."""
        now = time.perf_counter()
        if now - self.spoke >= SILENCE:
            self.spoke = now
            line = self.words(T("… {what}, {seconds:.0f} s"), what=self.words(self.what), seconds=now - self.begin)
            with contextlib.suppress(OSError, ValueError):      # nobody reads it any more
                print(line, file=sys.stderr, flush=True)

    # -- words ---------------------------------------------------------------------------------------------------------

    def print(self, *things):
        for thing in things:
            self.console.print(thing)
        self.spoke = time.perf_counter()

    def start(self, title, seconds):
        """The first line. seconds: how long all of it will take, from the start of the program."""
        self.forecast = seconds
        self.print(Text(self.words(T("{title} (about {seconds:.0f} s in all on {cores} cores, TP={tp})"),
                                   title=self.words(title), seconds=seconds, cores=os.cpu_count(), tp=self.args.tp),
                        style="bold"), "")
        if self.console.width < TABLES:
            self.say("{width} columns cut tables short; --width {tables} shows them whole.",
                     width=self.console.width, tables=TABLES)

    def section(self, number, title):
        """A heading with the article's number and words, so that the two can be read side by side."""
        chinese = self.chinese(title)
        text = chinese if self.args.lang == "zh" else f"{title}  ({chinese})"
        text = f"{number}. {text}"
        if wide(text) + 2 > self.console.width:      # a rule would cut it
            self.print("", Text(fill(text, self.console.width), style="bold"), Rule(), "")
        else:
            self.print("", Rule(Text(text, style="bold"), align="left"), "")

    def say(self, template, **values):
        """Prose; an empty line parts paragraphs."""
        for paragraph in flow(self.words(template, **values)):
            self.print(Text(fill(paragraph, self.console.width)), "")

    def cell(self, value):
        return self.words(value) if isinstance(value, Sentence) else str(value)

    def table(self, title, columns, rows, name=None):
        """title: a Sentence. columns: templates; one that ends in ">" is set to the right, in both languages. rows: of
        anything, a Sentence is said. The first column is kept whole."""
        title, columns = self.cell(title), [self.words(column) if column else "" for column in columns]
        rows = [[self.cell(cell) for cell in row] for row in rows]
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
                      show_edge=False, padding=(0, 1, 0, 0))
        for i, column in enumerate(columns):
            justify, no_wrap = "right" if column.endswith(">") else "left", i == 0 and self.console.width >= 72
            table.add_column(column.removesuffix(">"), justify=justify, no_wrap=no_wrap, overflow="fold")
        for row in rows:
            table.add_row(*[Text(cell) for cell in row])
        table.svg = lambda: svg.table(title, columns, rows)          # as the other pictures have it
        self.show(table, name)

    def show(self, picture, name=None):
        """Print a picture, in the page's language; with --save also write DIR/name.svg."""
        if hasattr(picture, "say"):
            picture.say = self.words
        self.print(picture, "")
        if name and self.args.save:
            save_svg(picture, pathlib.Path(self.args.save) / f"{name}.svg")

    def end(self, *now_try):
        """What to change next, a Sentence each, and how long this took."""
        self.ended.set()
        self.print(Rule(Text(self.words(T("Now try")), style="bold"), align="left"), "")
        for i, line in enumerate(now_try, 1):
            number = f"{i}. "
            self.print(Text(fill(" ".join(flow(self.words(line))), self.console.width, number, " " * len(number))))
        self.print("", Text(self.words(T("{seconds:.0f} seconds; the first line said {forecast:.0f}."),
                                       seconds=time.perf_counter() - self.begin, forecast=self.forecast or 0),
                            style="dim"))


class Seats:
    """Who sat where: a string a seat, a letter a step.
    A letter is a request, a capital its prefill, "." a seat that is computed for nobody, " " an empty one."""

    def __init__(self, seats, say=Say("en")):
        self.seats, self.say = seats, say

    def names(self):
        return [self.say("seat {i}", i=i + 1) for i in range(len(self.seats))]

    def __rich_console__(self, console, options):
        room = max(options.max_width - 8, 8)         # a row that is too long goes on in the next band
        names = self.names()
        label = max(map(wide, names))
        for start in range(0, len(self.seats[0]), room):
            for name, row in zip(names, self.seats):
                line = Text(name + " " * (label - wide(name) + 2), no_wrap=True)
                for letter in row[start:start + room]:
                    colour = ("green", "blue", "magenta", "cyan")[ord(letter.lower()) % 4]
                    line.append(letter, "dim" if letter == "." else colour + " reverse" * letter.isupper())
                yield line
            yield Text("")

    def svg(self, title=None):
        words = {"prefill": self.say("prefill"), "decode": self.say("decode"),
                 "idle": self.say("computed for nobody"), "step": self.say("step")}
        return svg.seats(title or self.say("Who sat where, step by step"), list(zip(self.names(), self.seats)), words)


def cut(text, length):
    """The text, or its beginning and "…": a quotation that is cut says so. Ends with a word, if it has any."""
    if len(text) <= length:
        return text
    whole = text[:length - 1].rsplit(None, 1)[0] if " " in text[:length - 1] else text[:length - 1]
    return whole.rstrip() + "…"


def ms(seconds, estimated=False):
    """Milliseconds for a table; an estimate gets a "~"."""
    return f"{'~' * estimated}{1e3 * seconds:,.1f}"


def si(value, unit):
    """Example: si(9.67e9, "FLOP") → "9.67 GFLOP"."""
    scale = next((s for s in ("T", "G", "M", "k") if value >= 10 ** (3 * " kMGT".index(s))), "")
    return f"{value / 10 ** (3 * ' kMGT'.index(scale or ' ')):.3g} {scale}{unit}"


def running_example(llm):
    """The running example's prompt for the tiny model, as token ids: ledger.SYSTEM + ledger.QUESTION of them."""
    text = json.loads((HERE.parent.parent / "models" / "running_example.json").read_text(encoding="utf-8"))
    messages = [{"role": "system", "content": text["system"]}, {"role": "user", "content": text["question"]}]
    return llm.engine.inputs.tokenize({"messages": messages})[1]


def greedy(max_tokens):
    """To the limit, whatever the model says, so that the counts are the article's."""
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


@contextlib.contextmanager
def watched(engine):
    """Inside, each step of an LLMEngine appends {what: shape} to the list it gives; the first layer speaks for all."""
    executor, seen = engine.executor, []
    execute, ops = executor.execute, executor.model.ops

    def rope_and_write_kv(qk, v, cos, sin, k_cache, v_cache, slot_mapping):
        q = qk[:, :-v.shape[1]]
        shapes = {"Q": q.shape, "K": v.shape, "V": v.shape, "KV slots written": slot_mapping.unique().shape}
        for what, shape in shapes.items():
            seen[-1].setdefault(what, list(shape))
        return ops.rope_and_write_kv(qk, v, cos, sin, k_cache, v_cache, slot_mapping)

    def watched_execute(batch):
        seen.append({"input_ids": list(batch.token_ids.shape), "KV positions read": [int(batch.seq_lens.sum())]})
        logits = execute(batch)
        seen[-1]["logits"] = list(logits.shape)
        return logits

    executor.execute = watched_execute
    executor.model.ops = SimpleNamespace(**{**vars(ops), "rope_and_write_kv": rope_and_write_kv})
    try:
        yield seen
    finally:
        executor.execute, executor.model.ops = execute, ops
