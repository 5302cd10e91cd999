"""Pictures of a run, all drawn from its StepRecords: in a terminal of any width, with or without colour, or as SVG.

    python chapters/tools/show.py records.jsonl                        the step table and the timeline
    python chapters/tools/show.py records.jsonl --trace trace.json     open it in ui.perfetto.dev or chrome://tracing
    python chapters/tools/show.py records.jsonl --player out.html      a page that plays the steps, in any browser

`nano_serve.py --records FILE` and `bench.py --records FILE` write such a file, one StepRecord a line.

    StepTable   what each step did            Timeline    who did what in which step
    BlockMap    who holds which KV block      LineChart   curves, a limit, a region
    BarChart    a few numbers side by side    chrome_trace, save_svg

Each picture is a rich renderable: `rich.print(Timeline(records))`.  A letter says what a colour says, so a black and
white printout loses nothing, and a picture asks the console for its width.  Its svg() draws it anew, with svg.py.
vLLM has no such file; its metrics go to
Prometheus, its traces to OpenTelemetry.  Read `phases` first: it alone decides what a request was doing in a step.
"""
from __future__ import annotations

import argparse
import html
import itertools
import json
import math
import pathlib
import sys
from dataclasses import asdict, dataclass, field

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

from rich.console import Console, Group  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

import svg  # noqa: E402
from lang import Say, T, wide  # noqa: E402
from options import check_types, end_quietly, make_console, naming  # noqa: E402
from scheduler import RequestStep, StepRecord  # noqa: E402

# What a request does in a step: letter and words; its colour.  A cell for several steps shows the first that occurs.
PHASES = T({"x": "preempted (抢占)", "R": "recompute (重计算)", "C": "prefill after a prefix hit", "P": "prefill chunk",
            "w": "waiting", "-": "no budget left for it", "d": "decode"})
STYLES = {"x": "bold white on red", "R": "bold white on magenta", "C": "bold black on cyan", "P": "bold white on blue",
          "w": "black on white", "-": "yellow", "d": "black on green"}
ENGLISH = Say("en")         # what a picture speaks unless it is told otherwise


def load_records(path) -> list[StepRecord]:
    """StepRecords from JSON lines.  ValueError names the first line that is not one."""
    records = []
    for number, line in enumerate(pathlib.Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
                requests = [check_types(RequestStep(**request)) for request in row["requests"]]
                records.append(check_types(StepRecord(**{**row, "requests": requests})))
            except (TypeError, KeyError, ValueError) as error:
                raise ValueError(f"{path}:{number} is not a StepRecord: {error}") from None
    return records


def phases(records) -> dict[str, dict[int, str]]:
    """{request id: {index in records: letter of PHASES}}, requests in order of admission.

    A request prefills until it samples; then each scheduled token is a decode, until a preemption sends it back to
    compute everything again.  Example: w P P d d x w R d."""
    letters: dict[str, dict[int, str]] = {}
    last: dict[str, int] = {}                  # where a request was scheduled last
    mode: dict[str, str] = {}                  # P, then d, then R after a preemption
    for index, record in enumerate(records):
        for request in record.requests:
            name, row = request.request_id, letters.setdefault(request.request_id, {})
            if name not in mode:
                mode[name] = "P"
                arrived = next((i for i in range(index, 0, -1) if records[i - 1].time < request.arrival_time), 0)
                gap, fill = range(arrived, index), "w"
            else:
                gap, fill = range(last[name] + 1, index), "w" if mode[name] == "R" else "-"
            row.update({i: fill for i in gap if i not in row})
            row[index] = "C" if request.hit_blocks and mode[name] == "P" else mode[name]
            last[name] = index
            if request.sampled is not None:
                mode[name] = "d"
        for name in record.preempted:
            if name in letters:
                letters[name][index], mode[name], last[name] = "x", "R", index
    return letters


def describe(request, letter: str, say=ENGLISH) -> str:
    """One request's part in a step, as in `a P 0→512` or `b d 513`."""
    done = f"{request.computed}→{request.computed + request.scheduled}" if letter != "d" else f"{request.computed}"
    hit = f" ({say('1 block hit' if request.hit_blocks == 1 else '{n} blocks hit', n=request.hit_blocks)})"
    return f"{request.request_id} {letter} {done}{hit if request.hit_blocks else ''}"


def legend(letters, say=ENGLISH) -> Text:
    text = Text()
    for letter, words in PHASES.items():
        if letter in letters:
            text.append(f" {letter} ", STYLES[letter])
            text.append(f" {say(words)}   ")
    return text


@dataclass
class StepTable:
    """One row a step: when, how long, who, how much of the budget.  A narrow console gets fewer columns.

    More than `max_steps` steps are cut in the middle, and the gap says how many it hides."""
    records: list
    max_steps: int = 40
    say: Say = field(default=ENGLISH, repr=False, compare=False)

    def __rich_console__(self, console, options):
        letters, records, half = phases(self.records), self.records, self.max_steps // 2
        columns = {"step": lambda r, i: str(r.step), "start ms": lambda r, i: f"{1e3 * (r.time - records[0].time):.1f}",
                   "took ms": lambda r, i: f"{1e3 * r.duration:.1f}", "requests": lambda r, i: self.who(r, i, letters),
                   "tokens": lambda r, i: f"{r.used}/{r.budget}", "run": lambda r, i: str(r.running),
                   "wait": lambda r, i: str(r.waiting), "free blocks": lambda r, i: f"{r.free_blocks}/{r.total_blocks}"}
        if options.max_width < 90:
            columns = {name: columns[name] for name in ("step", "took ms", "requests", "tokens", "wait")}
        if options.max_width < 60:
            columns = {name: columns[name] for name in ("step", "requests", "tokens")}
        if options.max_width < 30:
            columns = {name: columns[name] for name in ("step", "requests")}
        table = Table(title=self.say("steps"), title_justify="left", pad_edge=False)
        for name in columns:
            table.add_column(self.say(name), **({"ratio": 1, "overflow": "fold"} if name == "requests" else
                                      {"justify": "right", "no_wrap": True}))
        hidden = range(half, len(records) - half) if len(records) > self.max_steps else range(0)
        for i, record in enumerate(records):
            if i not in hidden:
                table.add_row(*[cell(record, i) for cell in columns.values()])
            elif i == hidden[0]:
                table.add_row(*["…" if name == "step" else self.say("{n} steps more", n=len(hidden))
                                if name == "requests" else ""
                                for name in columns])
        yield table

    def svg(self) -> str:
        """The same rows; all columns."""
        letters, records, half = phases(self.records), self.records, self.max_steps // 2
        hidden = range(half, len(records) - half) if len(records) > self.max_steps else range(0)
        rows = [(r.step, f"{1e3 * (r.time - records[0].time):.1f}", f"{1e3 * r.duration:.1f}", self.who(r, i, letters),
                 f"{r.used}/{r.budget}", r.running, r.waiting, f"{r.free_blocks}/{r.total_blocks}")
                for i, r in enumerate(records) if i not in hidden]
        if hidden:
            rows.insert(half, ("…", "", "", self.say("{n} steps more", n=len(hidden)), "", "", "", ""))
        heads = T(["step", "start ms", "took ms", "requests", "tokens", "run", "wait", "free blocks"])
        return svg.table(self.say("steps"), [self.say(h) + ">" * (h != "requests") for h in heads], rows)

    def who(self, record, index, letters) -> str:
        """Everybody by name while they are few; decodes, which are all alike, are counted once they are many."""
        parts = [(request, letters[request.request_id][index]) for request in record.requests]
        decodes = [request for request, letter in parts if letter == "d"]
        text = [describe(r, letter, self.say) for r, letter in parts if letter != "d" or len(decodes) <= 3]
        text += [self.say("{n} decodes", n=len(decodes))] if len(decodes) > 3 else []
        text += [self.say("{name} preempted", name=name) for name in record.preempted]
        text += [self.say("{name} done", name=name) for name in record.finished]
        return ", ".join(text) or self.say("nobody")


@dataclass
class Timeline:
    """A row a request, a column a step; a column stands for several steps when there are more steps than columns."""
    records: list
    max_requests: int = 40
    say: Say = field(default=ENGLISH, repr=False, compare=False)

    def __rich_console__(self, console, options):
        letters = phases(self.records)
        names = list(letters)[:self.max_requests]
        head = self.say("step")
        label = min(max([len(name) for name in names] + [wide(head)]), 16)
        steps, room = len(self.records), max(options.max_width - label - 1, 8)
        per = max(1, -(-steps // room))
        columns = -(-steps // per)
        ruler = ""
        for i in range(0, columns, 10):
            number = str(self.records[i * per].step)
            if i + len(number) <= room:               # half of a number would be another one
                ruler = ruler.ljust(i) + number
        yield Text(head + " " * (label - wide(head) + 1) + ruler, style="dim", no_wrap=True)
        for name in names:
            row = Text(f"{name[-label:]:<{label}} ", no_wrap=True)
            cells = [[letters[name].get(i) for i in range(start, min(start + per, steps))]
                     for start in range(0, steps, per)]
            cells = [next((letter for letter in PHASES if letter in cell), " ") for cell in cells]
            for letter, same in itertools.groupby(cells):
                row.append(letter * len(list(same)), STYLES.get(letter, ""))
            yield row
        if len(letters) > len(names):
            yield Text(self.say("… and {n} requests more", n=len(letters) - len(names)))
        yield legend({letter for row in letters.values() for letter in row.values()}, self.say)
        if per > 1:
            yield Text(self.say("One column is {n} steps: the first of these letters that occurs in them.", n=per),
                       style="dim")

    def svg(self, title: str | None = None) -> str:
        """A lane a request; every chunk and every preemption has its own piece, whatever the number of steps."""
        rows, letters = {}, phases(self.records)
        for name in list(letters)[:self.max_requests]:
            rows[name] = spans = []
            for i, letter in sorted(letters[name].items()):
                if spans and spans[-1][1:] == (i, letter) and letter in "wd-":
                    spans[-1] = spans[-1][0], i + 1, letter
                else:
                    spans.append((i, i + 1, letter))
        more = len(letters) - len(rows)
        words = {letter: self.say(words) for letter, words in PHASES.items()}
        return svg.lanes(title or self.say("Who did what in which step"), rows, len(self.records), words,
                         self.say("step"), first_column=self.records[0].step if self.records else 0,
                         note=self.say("… and {n} requests more", n=more) if more else "")


@dataclass
class BlockMap:
    """The pool, block by block: the requests' letters, and what is free or remembered.

    A capital says that the block is full and named, so that the prefix cache can find it."""
    kv_cache_manager: object
    say: Say = field(default=ENGLISH, repr=False, compare=False)

    def __rich_console__(self, console, options):
        manager, colours = self.kv_cache_manager, ("green", "blue", "magenta", "cyan", "yellow", "red")
        names = list(manager.req_to_block_ids)
        holders: dict[int, list[int]] = {}
        for index, name in enumerate(names):
            for block_id in manager.get_block_ids(name):
                holders.setdefault(block_id, []).append(index)
        per_row = max(8, min(64, (options.max_width - 7) // 8 * 8))
        row = Text()
        for block in manager.block_pool.blocks:
            if block.block_id % per_row == 0:
                if block.block_id:
                    yield row
                row = Text(f"{block.block_id:>5}  ", no_wrap=True)
            who = holders.get(block.block_id, [])
            if block.block_id == 0:
                row.append("0", "dim")
            elif not who:
                row.append("." if block.block_hash is None else "+", "dim")
            elif len(who) > 1:
                row.append(str(len(who)) if len(who) < 10 else "*", "bold reverse")
            else:
                letter = chr(ord("a") + who[0] % 26)
                row.append(letter.upper() if block.block_hash else letter, colours[who[0] % 6])
        yield row
        yield Text(self.say("0 null block   . free   + free, still cached   2-9 * held by so many   "
                            "capital: full and cached"))
        yield Text("   ".join(f"{chr(ord('a') + i % 26)} {name}" for i, name in enumerate(names)))

    def svg(self, title: str | None = None) -> str:
        manager, names = self.kv_cache_manager, list(self.kv_cache_manager.req_to_block_ids)
        tables = [manager.get_block_ids(name) for name in names]
        cells = [(block.block_id, [i for i, table in enumerate(tables) if block.block_id in table],
                  block.block_hash is not None) for block in manager.block_pool.blocks[1:]]
        words = T({"full": "full and cached", "part": "not full yet", "free": "free", "shared": "shared by two",
                   "cached": "free, still cached"})
        return svg.blocks(title or self.say("The KV block pool"), cells, names,
                          {kind: self.say(text) for kind, text in words.items()})


@dataclass
class BarChart:
    """Labelled numbers as bars from zero: [(label, value), ...], none negative.  `unit` stands behind each number."""
    title: str
    rows: list
    unit: str = ""

    def __rich_console__(self, console, options):
        label = max(len(str(name)) for name, _ in self.rows)
        number = max(len(f"{value:,.4g}") for _, value in self.rows)
        room = max(4, options.max_width - label - number - len(self.unit) - 4)
        largest = max(value for _, value in self.rows) or 1
        yield Text(self.title, style="bold")
        for i, (name, value) in enumerate(self.rows):
            bar = ("#" if options.ascii_only else "█") * max(round(room * value / largest), int(value > 0))
            yield Text.assemble(f"{name!s:<{label}} ", f"{value:>{number},.4g}{self.unit and ' ' + self.unit} ",
                                (bar, ("blue", "green", "magenta", "cyan")[i % 4]), no_wrap=True)

    def svg(self) -> str:
        return svg.bar_chart(self.title, self.rows, self.unit)


MARKERS = "ox+*#%@"


@dataclass
class LineChart:
    """Curves over shared x values; each has a marker, so colour is a help and not a need.  The y axis starts at 0.

    series: {name: [y, ...]}, None where there is none.  limit: (y, label), a line across, such as an SLO.  region:
    (x from, x to, label), marked under the axis, such as where the SLO holds.  log_x spaces 1, 2, 4, 8 evenly.
    `svg()` is the same chart with real lines."""
    title: str
    xs: list
    series: dict
    x_label: str = ""
    y_label: str = ""
    limit: tuple | None = None
    region: tuple | None = None
    log_x: bool = False
    height: int = 12

    def __post_init__(self):
        values = [y for ys in self.series.values() for y in ys if y is not None]
        self.top = svg.nice_top(max(values + [self.limit[0] if self.limit else 0]))

    def at(self, x) -> float:
        """0..1 along the x axis."""
        low, high, x = [math.log(v) if self.log_x else v for v in (min(self.xs), max(self.xs), x)]
        return (x - low) / (high - low) if high > low else 0.5

    def points(self, name) -> list[tuple[float, float]]:
        """The curve in 0..1 x 0..1, y upwards."""
        return [(self.at(x), y / self.top) for x, y in zip(self.xs, self.series[name]) if y is not None]

    def __rich_console__(self, console, options):
        ticks = {0: f"{self.top:,g}", self.height // 2: f"{self.top / 2:,g}", self.height: "0"}
        left = max(len(text) for text in ticks.values())
        columns = max(16, min(options.max_width - left - 6, 100))
        grid = [[" "] * (columns + 1) for _ in range(self.height + 1)]
        dot = "." if options.ascii_only else "·"
        if self.limit:
            grid[round(self.height * (1 - self.limit[0] / self.top))] = ["-"] * (columns + 1)
        for i, name in enumerate(self.series):
            points = self.points(name)
            for (x0, y0), (x1, y1) in zip(points, points[1:]):
                for column in range(math.ceil(x0 * columns), math.floor(x1 * columns) + 1):
                    y = y0 + (y1 - y0) * (column / columns - x0) / ((x1 - x0) or 1)
                    grid[round(self.height * (1 - y))][column] = dot
            for x, y in points:
                grid[round(self.height * (1 - y))][round(x * columns)] = MARKERS[i % len(MARKERS)]
        yield Text(self.title, style="bold")
        yield Text(self.y_label, style="dim")
        edge = "|" if options.ascii_only else "│"
        for i, row in enumerate(grid):
            yield Text(f"{ticks.get(i, ''):>{left}} {edge}{''.join(row)}", no_wrap=True)
        below = [" "] * (columns + 12)
        for x in self.xs:
            text, start = f"{x:g}", round(self.at(x) * columns)
            if all(c == " " for c in below[max(start - 1, 0):start + len(text) + 1]):
                below[start:start + len(text)] = text
        yield Text(" " * (left + 2) + "".join(below).rstrip(), no_wrap=True)
        yield Text(" " * (left + 2) + self.x_label, style="dim")
        if self.region:
            start, end = [round(self.at(x) * columns) for x in self.region[:2]]
            inside = f" {self.region[2]} ".center(end - start - 1, "=")
            bar = inside if len(inside) == end - start - 1 else "=" * max(end - start - 1, 0)
            yield Text(" " * (left + 2 + start) + f"[{bar}]" + ("" if bar is inside else f" {self.region[2]}"))
        yield Text("   ".join([f"{MARKERS[i % len(MARKERS)]} {name}" for i, name in enumerate(self.series)]
                              + ([f"--- {self.limit[1]}"] if self.limit else [])))

    def svg(self) -> str:
        """The chart as an SVG document."""
        return svg.line_chart(self.title, self.xs, self.series, self.x_label, self.y_label, self.limit, self.region,
                              self.log_x, self.top)


def save_svg(picture, path) -> None:
    """Write a picture, which has a method svg(), as a file.  The same picture gives the same file."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(picture.svg(), encoding="utf-8")


def chrome_trace(records) -> dict:
    """The run in Chrome's trace format, for ui.perfetto.dev: a lane a request (queued, each prefill chunk, each decode,
    preempted); counters for KV blocks, token budget, running and waiting.  Microseconds from the first arrival."""
    names, events, zero = {}, [], min([record.time for record in records]
                                      + [r.arrival_time for record in records for r in record.requests], default=0.0)
    waiting_since: dict[str, tuple[float, str]] = {}

    def slice_(name, tid, start, end, **args):
        events.append({"name": name, "ph": "X", "pid": 1, "tid": tid, "ts": (start - zero) * 1e6,
                       "dur": max(end - start, 0.0) * 1e6, "args": args})

    letters = phases(records)
    for index, record in enumerate(records):
        end = record.time + record.duration
        for request in record.requests:
            name = request.request_id
            if name not in names:
                names[name] = len(names) + 1
                waiting_since[name] = (request.arrival_time, "queued")
            if name in waiting_since:
                since, why = waiting_since.pop(name)
                slice_(why, names[name], since, record.time)
            letter = letters[name][index]
            reach = f" {request.computed}→{request.computed + request.scheduled}"
            title = "decode" if letter == "d" else ("recompute" if letter == "R" else "prefill") + reach
            slice_(title, names[name], record.time, end, step=record.step, computed=request.computed,
                   scheduled=request.scheduled, hit_blocks=request.hit_blocks, sampled=request.sampled)
        for name in record.preempted:
            waiting_since[name] = (record.time, "preempted")
        used = record.total_blocks - record.free_blocks
        for counter, values in {"KV blocks": {"used": used, "free": record.free_blocks},
                                "token budget": {"used": record.used, "unused": record.budget - record.used},
                                "requests": {"running": record.running, "waiting": record.waiting}}.items():
            events.append({"name": counter, "ph": "C", "pid": 0, "ts": (record.time - zero) * 1e6, "args": values})
    heads = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "engine"}},
             {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "requests"}}]
    heads += [{"name": "thread_name", "ph": "M", "pid": 1, "tid": tid, "args": {"name": name}}
              for name, tid in names.items()]
    return {"traceEvents": heads + events, "displayTimeUnit": "ms"}


def player_page(records, title: str) -> str:
    """player.html with the records in it. What a request's text holds stays text: in JSON only strings have a "<", and
    written as \\u003c it can't close the script element, open a comment, or end the title."""
    rows = "\n".join(json.dumps(asdict(record)).replace("<", "\\u003c") for record in records)
    page = (HERE / "player.html").read_text(encoding="utf-8")
    title = title.encode("utf-8", "replace").decode()     # a lone surrogate is no text
    page = page.replace("<title>nano-serve player</title>", f"<title>{html.escape(title)}</title>")
    return page.replace('id="records"></script>', f'id="records">\n{rows}\n</script>')


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", help="StepRecords as JSON lines")
    parser.add_argument("--trace", metavar="OUT.json", help="write a Chrome/Perfetto trace instead of printing")
    parser.add_argument("--player", metavar="OUT.html", help="write a page that plays the steps instead of printing")
    parser.add_argument("--save", metavar="DIR", help="save the step table and the timeline as SVG too")
    parser.add_argument("--max-steps", type=int, default=40, help="rows of the step table before its middle is cut")
    args, console = parser.parse_args(argv), make_console()
    try:
        records = load_records(args.file)
        if not records:
            raise ValueError(f"{args.file} holds no step")
        if args.trace:
            with naming("--trace", args.trace):
                pathlib.Path(args.trace).write_text(json.dumps(chrome_trace(records)), encoding="utf-8")
            print(f"{args.trace}: {len(records)} steps; open it in https://ui.perfetto.dev")
            return 0
        if args.player:
            with naming("--player", args.player):
                page = player_page(records, pathlib.Path(args.file).name)
                pathlib.Path(args.player).write_text(page, encoding="utf-8")
            print(f"{args.player}: {len(records)} steps; open it in a browser")
            return 0
        pictures = {"steps": StepTable(records, args.max_steps), "timeline": Timeline(records)}
        console.print(Group(*pictures.values()))
        with naming("--save", args.save):
            for name, picture in pictures.items() if args.save else ():
                save_svg(picture, pathlib.Path(args.save) / f"{name}.svg")
    except (OSError, ValueError) as error:
        print(f"show.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    end_quietly()
    sys.exit(main())
