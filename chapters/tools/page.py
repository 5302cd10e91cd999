"""What every walk-through shares: its options, words and pictures, the running example, a look inside a step.

    page = Page(__doc__)                               --tp, --save DIR, --width; prints the opening
    page.section(2, "Prefill and decode", "两种 Workload")   page.say(f"… {n} tokens …")   filled to the console's width
    page.table("title", ["what", "value>"], rows)      page.show(picture, "name")   saved as DIR/name.svg, too
    running_example(llm), greedy(n)                    the prompt of 2,000 + 50 tokens; SamplingParams to the limit
    Seats([row, …])                                    who was computed in which step, a row a seat
    with watched(engine) as seen: …                    the shapes of each step, as they go through the first layer

A walk-through is one file of `# %%` cells.  A cell holds functions that compute and return values, which the tests
call, and after them what is shown, under `if __name__ == "__main__":`.  So one file runs from a shell, opens as a
notebook, and can be imported by the processes that tensor parallelism starts.
"""
import argparse
import contextlib
import json
import pathlib
import sys
import textwrap
import time
from types import SimpleNamespace

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

from rich import box  # noqa: E402
from rich.rule import Rule  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

import svg  # noqa: E402
from options import check_folder, make_console  # noqa: E402
from request import SamplingParams  # noqa: E402
from show import save_svg  # noqa: E402

RANKS = (1, 2, 4, 8, 16)    # that the tiny model can be cut into
WIDTH = 100                 # as wide as prose should be; a narrower terminal decides for itself
TABLES = 76                 # columns that the widest table takes


def parse_args(doc, argv=None):
    """The options of a walk-through. In a notebook sys.argv is the notebook's own, so the defaults hold there."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=8, choices=RANKS,
                        help="tensor-parallel ranks of the running example's request [8]")
    parser.add_argument("--save", metavar="DIR", help="write the pictures and tables as SVG, too")
    parser.add_argument("--width", type=int, help=f"columns to use [the terminal's, at most {WIDTH}]")
    args = parser.parse_args([] if argv is None and "ipykernel" in sys.modules else argv)
    try:
        if args.save:
            check_folder("--save", args.save)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return args


class Page:
    """Where a walk-through writes: the console, and a folder of SVGs if one is wanted."""

    def __init__(self, doc, argv=None, file=None):
        self.args, self.begin = parse_args(doc, argv), time.perf_counter()
        self.console = make_console(highlight=False, file=file)
        self.console.width = self.args.width or min(self.console.width, WIDTH)
        title, _, rest = doc.strip().partition("\n")
        self.print(Text(title, style="bold"), Text(rest))
        if self.console.width < TABLES:
            self.print("", Text(f"{self.console.width} columns cut tables short; --width {TABLES} shows them whole."))

    def print(self, *things):
        for thing in things:
            self.console.print(thing)

    def section(self, number, english, chinese):
        """A heading with the article's number and words, so that the two can be read side by side."""
        self.print("", Rule(Text(f"{number}. {english}  ({chinese})", style="bold"), align="left"), "")

    def say(self, words):
        """Prose; an empty line parts paragraphs."""
        for paragraph in textwrap.dedent(words).strip().split("\n\n"):
            self.print(Text(" ".join(paragraph.split())), "")

    def table(self, title, columns, rows, name=None):
        """Rows of anything; a column whose head ends in ">" is set to the right, the first is kept whole."""
        rows = list(rows)
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
                      show_edge=False, padding=(0, 1, 0, 0))
        for i, column in enumerate(columns):
            justify, no_wrap = "right" if column.endswith(">") else "left", i == 0 and self.console.width >= 72
            table.add_column(column.removesuffix(">"), justify=justify, no_wrap=no_wrap)
        for row in rows:
            table.add_row(*[Text(str(cell)) for cell in row])
        table.svg = lambda: svg.table(title, columns, rows)          # as the other pictures have it
        self.show(table, name)

    def show(self, picture, name=None):
        """Print a picture; with --save also write DIR/name.svg."""
        self.print(picture, "")
        if name and self.args.save:
            save_svg(picture, pathlib.Path(self.args.save) / f"{name}.svg")

    def end(self, now_try):
        """What to change next, and how long this took."""
        self.print(Rule(Text("Now try", style="bold"), align="left"), "")
        for line in textwrap.dedent(now_try).strip().split("\n"):
            self.print(Text(line))
        self.print(Text(f"\n{time.perf_counter() - self.begin:.0f} seconds", style="dim"))


class Seats:
    """Who sat where: a string a seat, a letter a step.
    A letter is a request, a capital its prefill, "." a seat that is computed for nobody, " " an empty one."""

    def __init__(self, seats):
        self.seats = seats

    def __rich_console__(self, console, options):
        room = max(options.max_width - 8, 8)         # a row that is too long goes on in the next band
        for start in range(0, len(self.seats[0]), room):
            for i, row in enumerate(self.seats):
                line = Text(f"seat {i + 1}  ", no_wrap=True)
                for letter in row[start:start + room]:
                    colour = ("green", "blue", "magenta", "cyan")[ord(letter.lower()) % 4]
                    line.append(letter, "dim" if letter == "." else colour + " reverse" * letter.isupper())
                yield line
            yield Text("")

    def svg(self, title="Who sat where, step by step"):
        words = {"prefill": "prefill", "decode": "decode", "idle": "computed for nobody", "step": "step"}
        return svg.seats(title, [(f"seat {i + 1}", row) for i, row in enumerate(self.seats)], words)


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
