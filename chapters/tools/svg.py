"""Pictures as SVG, in one light style, by few lines of our own: no library, no font to download, no clock in them.

    line_chart, scatter     curves and points, a limit, a region           bar_chart    a few numbers side by side
    lanes                   who did what from when to when                 heatmap      a number a cell
    blocks                  a pool of KV blocks: whose, shared, cached     table        rows of text

Each function takes plain values and returns a document; show.py and page.py hand it what they draw in a terminal, too.
Colour is a help and not a need: curves differ in marker and dash, phases in height and hatching, blocks in their label,
so that a greyscale print and colour-blind eyes lose nothing.  The colours are Okabe and Ito's.  An SVG can't ask how
wide its text is, so `text_width` estimates: a Chinese character is as wide as high, a Latin one about half of that.
Read Drawing first, then any one picture.
"""
from __future__ import annotations

import html
import math
import re
import unicodedata

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b3578d", "#555555", "#a87900", "#3a93c9")      # lines: dark enough
FILLS = ("#9fd3f2", "#f7b98f", "#8fdcc2", "#e3b4cf", "#d4d4d4", "#f0dc8a", "#c3d3f0")      # under dark text
DASHES = ("none", "8 4", "2 3", "10 3 2 3")
FONT = "system-ui, 'Noto Sans', 'Noto Sans CJK SC', 'PingFang SC', 'Microsoft YaHei', sans-serif"
INK, GREY, PALE = "#222222", "#666666", "#dddddd"
MARGIN = 16

# How a phase of show.PHASES looks in a lane: (fill, share of the lane's height, hatched).
PHASE_STYLES = {"w": ("#c4c4c4", .16, False), "-": ("#888888", .16, True), "d": ("#7cc3ec", .42, False),
                "P": ("#0b5c92", .86, False), "C": ("#3f8fc4", .86, True), "R": ("#e3b4cf", .86, True),
                "x": ("#ffffff", .86, False)}


def text_width(words, size: float = 13) -> float:
    """Pixels that the words take, about; East Asian ones count as wide."""
    wide = sum(1.0 if unicodedata.east_asian_width(c) in "WF" else 0.33 if c in " .,:;|!il'" else 0.72 if c.isupper()
               else 0.57 for c in str(words))
    return size * wide


def fit(words, room: float, size: float = 13) -> str:
    """The words, or as much of them as there is room for and "…"."""
    words = str(words)
    if text_width(words, size) <= room:
        return words
    while words and text_width(words + "…", size) > room:
        words = words[:-1]
    return words + "…"


def wrap(words, room: float, size: float = 13) -> list[str]:
    """Lines that fit: broken at spaces, and between Chinese characters, or anywhere if a word is too long."""
    lines, line, piece = [], "", ""
    for c in str(words) + " ":
        piece += c
        if not (c == " " or unicodedata.east_asian_width(c) in "WF" or text_width(piece, size) > room - size):
            continue
        if line and text_width((line + piece).rstrip(), size) > room:
            lines.append(line.rstrip())
            line = ""
        line, piece = line + piece, ""
    return lines + [line.rstrip()] if line.strip() or not lines else lines


def nice_top(largest: float) -> float:
    """A round number, not below `largest`, that four equal parts divide well."""
    scale = 10 ** math.floor(math.log10(largest or 1))
    return next(step * scale for step in (1, 1.2, 1.6, 2, 3, 4, 6, 8, 10) if step * scale >= (largest or 1) * 0.9999)


class Drawing:
    """Shapes as they are added, then document().  Whatever text comes in is escaped."""

    def __init__(self, width: float, height: float, title: str = ""):
        self.width, self.height, self.parts = width, height, []
        self.title = str(title)
        if title:
            self.text(MARGIN, 24, fit(title, width - 2 * MARGIN, 15), size=15, weight="bold")

    def text(self, x, y, words, anchor="start", fill=INK, size=13, weight="normal"):
        bold = f' font-weight="{weight}"' if weight != "normal" else ""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" '
                          f'font-size="{size}"{bold}>'
                          f"{html.escape(str(words))}</text>")

    def rect(self, x, y, width, height, fill, stroke="none", hatched=False, stroke_width=1.0):
        size = f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, .5):.1f}" height="{height:.1f}"'
        self.parts.append(f'{size} fill="{fill}" stroke="{stroke}" stroke-width="{stroke_width:g}"/>')
        if hatched:
            self.parts.append(f'{size} fill="url(#hatch)"/>')

    def path(self, d, stroke=INK, width=1.0, dash="none", fill="none"):
        self.parts.append(f'<path d="{d}" fill="{fill}" stroke="{stroke}" stroke-width="{width:g}" '
                          f'stroke-dasharray="{dash}" stroke-linejoin="round"/>')

    def marker(self, i, x, y, r=4.2):
        """The i-th of seven markers, each another shape."""
        d, t, s = 2 * r, 1.2 * r, 1.4 * r
        shape = (f"m{-r} 0a{r} {r} 0 1 0 {d} 0a{r} {r} 0 1 0 {-d} 0z", f"m{-r} {-r}h{d}v{d}h{-d}z",
                 f"m0 {-t:.2f}l{t:.2f} {d}h{-2 * t:.2f}z",
                 f"m0 {-s:.2f}l{s:.2f} {s:.2f}l{-s:.2f} {s:.2f}l{-s:.2f} {-s:.2f}z",
                 f"m{-r} {-r}l{d} {d}m0 {-d}l{-d} {d}", f"m0 {-s:.2f}v{2 * s:.2f}m{-s:.2f} {-s:.2f}h{2 * s:.2f}",
                 f"m0 {t:.2f}l{t:.2f} {-d}h{-2 * t:.2f}z")[i % 7]
        colour, crossed = COLOURS[i % 7], i % 7 in (4, 5)
        self.path(f"M{x:.1f} {y:.1f}{shape}", colour, 2.2 if crossed else 1, fill="none" if crossed else colour)

    def legend(self, items, y, x=MARGIN, swatch=26) -> float:
        """items: [(function(x, y) that draws a swatch, words)], in as many rows as they need.  Returns the last's y."""
        start = x
        for draw, words in items:
            room = swatch + 6 + text_width(words) + 18
            if x > start and x + room - 18 > self.width - MARGIN:
                x, y = start, y + 22
            draw(x, y)
            self.text(x + swatch + 6, y + 4.5, fit(words, self.width - MARGIN - x - swatch - 6))
            x += room
        return y

    def document(self) -> str:
        w, h = math.ceil(self.width), math.ceil(self.height)
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="img" '
            f'font-family="{FONT}"><title>{html.escape(self.title)}</title>',
            '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)">'
            '<path d="M0 0v6" stroke="#000" stroke-opacity=".55" stroke-width="1.8"/></pattern></defs>',
            f'<rect width="{w}" height="{h}" fill="#fff"/>', *self.parts, "</svg>\n"])


# --- charts -----------------------------------------------------------------------------------------------------------


def _axes(drawing, left, top, w, h, y_top, y_label):
    """Grid, y numbers and both axes; the label stands above the y axis, where it needs no turning of the head."""
    for i in range(5):
        y = top + h * (1 - i / 4)
        drawing.path(f"M{left:.1f} {y:.1f}h{w:.1f}", INK if i == 0 else PALE)
        drawing.text(left - 8, y + 4.5, f"{y_top * i / 4:,g}", "end", GREY)
    drawing.text(left, top - 12, y_label, fill=GREY)


def _x_ticks(drawing, ticks, y, at):
    """Numbers under the axis: all of them, or every second, fifth, tenth …, the first step at which none touch."""
    def room(some):
        return all(at(b) - at(a) > (text_width(f"{a:g}") + text_width(f"{b:g}")) / 2 + 7 for a, b in zip(some, some[1:]))
    ticks = list(ticks)
    every = next((n * scale for scale in (1, 10, 100, 1000) for n in (1, 2, 5) if room(ticks[::n * scale])), len(ticks))
    for x in ticks[::every]:
        drawing.text(at(x), y + 18, f"{x:g}", "middle", GREY)
        drawing.path(f"M{at(x):.1f} {y:.1f}v4", GREY)


def line_chart(title, xs, series, x_label="", y_label="", limit=None, region=None, log_x=False, y_top=None, width=760,
               height=400) -> str:
    """series: {name: [y or None, ...]} over xs; limit: (y, label), a line across; region: (x from, x to, label),
    shaded.  The y axis starts at 0."""
    points = {name: [(x, y) for x, y in zip(xs, ys) if y is not None] for name, ys in series.items()}
    return _chart(title, points, list(xs), x_label, y_label, limit, region, log_x, y_top, width, height, True)


def scatter(title, points, x_label="", y_label="", limit=None, region=None, log_x=False, y_top=None, width=760,
            height=400) -> str:
    """points: {name: [(x, y), ...]}."""
    xs = [x for some in points.values() for x, _ in some] or [0, 1]
    low, high = min(xs), max(xs)
    if log_x:
        ticks = [2 ** i for i in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)]
    else:                                            # round numbers around all of them, 0 among them
        step = nice_top(max(abs(low), abs(high)) / 4)
        ticks = [step * i for i in range(min(math.floor(low / step), 0), max(math.ceil(high / step), 0) + 1)]
    return _chart(title, points, ticks, x_label, y_label, limit, region, log_x, y_top, width, height, False)


def _chart(title, points, ticks, x_label, y_label, limit, region, log_x, y_top, width, height, joined) -> str:
    ys = [y for some in points.values() for _, y in some]
    y_top = y_top or nice_top(max(ys + [limit[0] if limit else 0, 0]))
    drawing = Drawing(width, height, title)

    def sample(i):
        def draw(x, y):
            if joined:
                drawing.path(f"M{x:.1f} {y:.1f}h26", COLOURS[i % 7], 2, DASHES[i % 4])
            drawing.marker(i, x + 13, y)
        return draw
    items = [(sample(i), name) for i, name in enumerate(points)]
    if limit:
        items.append((lambda x, y: drawing.path(f"M{x:.1f} {y:.1f}h26", INK, 1.4, "3 3"), limit[1]))
    if region:
        items.append((lambda x, y: drawing.rect(x, y - 7, 26, 14, "#eef5e6", GREY), region[2]))
    top = drawing.legend(items, 48) + 44
    left = MARGIN + max(text_width(f"{y_top * i / 4:,g}") for i in range(5)) + 10
    w, h = width - left - 28, height - top - 56
    low, high = [math.log(v) if log_x else v for v in (min(ticks), max(ticks))]

    def at(x):
        return left + w * (((math.log(x) if log_x else x) - low) / (high - low) if high > low else 0.5)

    def up(y):
        return top + h * (1 - y / y_top)
    if region:
        drawing.rect(at(region[0]), top, max(at(region[1]) - at(region[0]), 3), h, "#eef5e6")
    _axes(drawing, left, top, w, h, y_top, y_label)
    _x_ticks(drawing, ticks, top + h, at)
    drawing.text(left + w / 2, height - 14, x_label, "middle", GREY)
    if limit:
        drawing.path(f"M{left:.1f} {up(limit[0]):.1f}h{w:.1f}", INK, 1.4, "3 3")
    for i, some in enumerate(points.values()):
        if joined and some:
            drawing.path("M" + "L".join(f"{at(x):.1f} {up(y):.1f}" for x, y in some), COLOURS[i % 7], 2, DASHES[i % 4])
        every = max(1, len(some) // 40)              # markers that don't grow together into a band
        for x, y in some if not joined else some[::every]:
            drawing.marker(i, at(x), up(y))
    return drawing.document()


def bar_chart(title, rows, unit="", width=760) -> str:
    """rows: [(label, value from 0), ...]; the number stands behind its bar."""
    numbers = [f"{value:,.4g}{unit and ' ' + unit}" for _, value in rows]
    label = min(max(text_width(name) for name, _ in rows), width * .4)
    room = width - 2 * MARGIN - label - 12 - max(map(text_width, numbers)) - 10
    largest, drawing = max(value for _, value in rows) or 1, Drawing(width, 50 + 30 * len(rows), title)
    for i, ((name, value), number) in enumerate(zip(rows, numbers)):
        y, x = 42 + 30 * i, MARGIN + label + 12
        drawing.text(x - 12, y + 15.5, fit(name, label), "end")
        drawing.rect(x, y, room * value / largest if value else .5, 22, FILLS[0], COLOURS[0])
        drawing.text(x + room * value / largest + 8, y + 15.5, number)
    return drawing.document()


def heatmap(title, rows, row_labels, column_labels, x_label="", y_label="", width=760) -> str:
    """rows[i][j]: a number, or None for a hole; the darker, the larger, and each says its number if there is room."""
    values = [v for row in rows for v in row if v is not None]
    low, span = min(values), (max(values) - min(values)) or 1
    left = MARGIN + max(map(text_width, row_labels)) + 10
    cell = (width - left - MARGIN) / len(column_labels)
    tall, top = min(max(cell, 20), 30), 62
    drawing = Drawing(width, top + tall * len(rows) + 52, title)
    drawing.text(left, top - 12, y_label, fill=GREY)
    for i, row in enumerate(rows):
        drawing.text(left - 8, top + tall * (i + .5) + 4.5, row_labels[i], "end", GREY)
        for j, value in enumerate(row):
            share = 0 if value is None else (value - low) / span
            fill = "#ffffff" if value is None else "#%02x%02x%02x" % tuple(
                round(a + (b - a) * share) for a, b in zip((0xf0, 0xf6, 0xfb), (0x08, 0x3e, 0x66)))
            drawing.rect(left + cell * j, top + tall * i, cell - 1, tall - 1, fill, PALE, hatched=value is None)
            number = "" if value is None else f"{value:.3g}"
            if number and text_width(number, 12) < cell - 4:
                drawing.text(left + cell * (j + .5), top + tall * (i + .5) + 4, number, "middle",
                             "#fff" if share > .58 else INK, 12)
    edge = -math.inf
    for j, words in enumerate(column_labels):
        x, half = left + cell * (j + .5), text_width(words) / 2
        if x - half > edge + 5:
            drawing.text(x, top + tall * len(rows) + 17, words, "middle", GREY)
            edge = x + half
    drawing.text(left + (width - left - MARGIN) / 2, drawing.height - 10, x_label, "middle", GREY)
    return drawing.document()


# --- lanes and blocks -------------------------------------------------------------------------------------------------


def draw_phase(drawing, letter, x, y, width, height):
    """A piece of a lane: the height says what the colour says."""
    fill, share, hatched = PHASE_STYLES[letter]
    tall = height * share
    border = {"P": "#fff", "C": "#fff", "R": INK, "x": "#b3261e"}.get(letter, "none") if width >= 4 else "none"
    drawing.rect(x, y + (height - tall) / 2, width, tall, fill, border, hatched)
    if letter == "x":
        dx, dy = min(width, 14) / 2 - 1, tall / 2 - 2
        middle_x, middle_y = x + width / 2, y + height / 2
        drawing.path(f"M{middle_x - dx:.1f} {middle_y - dy:.1f}l{2 * dx:.1f} {2 * dy:.1f}m0 {-2 * dy:.1f}"
                     f"l{-2 * dx:.1f} {2 * dy:.1f}", "#b3261e", 2)


def lanes(title, rows, num_columns, phases, x_label="step", first_column=0, note="", width=None) -> str:
    """rows: {name: [(first column, end, letter), ...]}, a lane a request, time to the right; phases: {letter: words}
    for the legend.  A preemption is drawn last and no narrower than can be seen."""
    used = {letter for spans in rows.values() for _, _, letter in spans}
    label = min(max([text_width(name) for name in rows] + [30]), 170)
    left = MARGIN + label + 10
    width = width or min(960, max(560, left + MARGIN + 26 * num_columns))
    column = min((width - left - MARGIN) / max(num_columns, 1), 44)
    drawing = Drawing(width, 0, title)

    def sample(letter):
        return lambda x, y: draw_phase(drawing, letter, x + 3, y - 9, 20, 18)
    order = [(letter, phases[letter]) for letter in "wPCd-xR" if letter in phases]
    top = drawing.legend([(sample(letter), words) for letter, words in order if letter in used], 50) + 30
    ticks, bottom = max(1, math.ceil(42 / column)), top + 22 * len(rows)
    for size in (1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 5000):
        if size >= ticks:
            ticks = size
            break
    for i in range(-first_column % ticks, num_columns, ticks):
        drawing.path(f"M{left + column * i:.1f} {top - 4:.1f}V{bottom + 4:.1f}", PALE)
        drawing.text(left + column * (i + .5 * (column > 20)), bottom + 19, first_column + i,
                     "middle" if column > 20 else "start", GREY)
    for i, (name, spans) in enumerate(rows.items()):
        y = top + 22 * i
        drawing.text(left - 10, y + 15, fit(name, label), "end")
        for start, end, letter in sorted(spans, key=lambda s: s[2] == "x"):
            width = max(column * (end - start), 7 * (letter == "x"))
            draw_phase(drawing, letter, left + column * start, y + 1, width, 20)
    drawing.text(left + column * num_columns / 2, bottom + 38, x_label, "middle", GREY)
    if note:
        drawing.text(MARGIN, bottom + 38, note, fill=GREY)
    drawing.height = bottom + 50
    return drawing.document()


def blocks(title, cells, names, words, width=760) -> str:
    """A pool, block by block.  cells: [(block id, indices into names of the holders, full and cached?)]; words: what
    the legend calls "free", "cached", "shared", "full" and "part"."""
    size = 34 if len(cells) <= 200 else 22
    columns = max(1, int((width - 2 * MARGIN - 44) // size)) // 4 * 4
    drawing, left = Drawing(width, 0, title), MARGIN + 44

    def cell(x, y, holders, cached, label):
        fill = FILLS[holders[0] % len(FILLS)] if holders else "#ffffff"
        drawing.rect(x, y, size - 3, size - 3, fill, INK if cached and holders else GREY if holders else PALE,
                     hatched=len(holders) > 1, stroke_width=2 if cached and holders else 1)
        if len(holders) > 1:
            drawing.rect(x + 5, y + 6, size - 13, size - 15, "#ffffff")
        if not holders and cached:
            drawing.rect(x + size / 2 - 4, y + size / 2 - 4, 5, 5, GREY)
        drawing.text(x + (size - 3) / 2, y + size / 2 + 3, fit(label, size - 4, 12), "middle", size=12)
    short = [re.split(r"\W|_", name)[-1][-3:] for name in names]          # req-12 → 12
    who = [(lambda x, y, i=i: cell(x, y - size / 2, [i], True, short[i]), name) for i, name in enumerate(names)]
    kinds = [(lambda x, y: cell(x, y - size / 2, [4], True, ""), words["full"]),
             (lambda x, y: cell(x, y - size / 2, [4], False, ""), words["part"]),
             (lambda x, y: cell(x, y - size / 2, [4, 1], True, "×2"), words["shared"]),
             (lambda x, y: cell(x, y - size / 2, [], False, ""), words["free"]),
             (lambda x, y: cell(x, y - size / 2, [], True, ""), words["cached"])]
    y = 56
    for items in (who[:16], kinds):
        for i, (draw, text) in enumerate(items):
            room = size + 8 + text_width(text) + 16
            if i == 0:
                x = MARGIN
            elif x + room > width - MARGIN:
                x, y = MARGIN, y + size + 4
            draw(x, y)
            drawing.text(x + size + 4, y + 4, text)
            x += room
        y += (size + 6) * bool(items)
    top = y - size / 2 + 8
    for i, (block_id, holders, cached) in enumerate(cells):
        x, y = left + i % columns * size, top + i // columns * size
        if i % columns == 0:
            drawing.text(left - 8, y + size / 2 + 3, block_id, "end", GREY, 12)
        label = f"×{len(holders)}" if len(holders) > 1 else short[holders[0]] if holders else ""
        cell(x, y, holders, cached, label)
    drawing.height = top + math.ceil(len(cells) / columns) * size + 12
    return drawing.document()


def seats(title, rows, words, width=760) -> str:
    """page.Seats: rows of letters, a letter a step.  words: what the legend calls "prefill", "decode", "idle"."""
    left, steps = MARGIN + max(text_width(name) for name, _ in rows) + 10, len(rows[0][1])
    width = max(width, 480)
    column, drawing = min((width - left - MARGIN) / max(steps, 1), 30), Drawing(width, 0, title)

    def piece(x, y, letter, w):
        if letter == ".":
            drawing.rect(x, y, w, 24, "#ffffff", PALE, hatched=True)
            return
        i = ord(letter.lower()) - ord("a")
        dark = letter.isupper()
        drawing.rect(x, y + 6 * (not dark), w, 24 - 12 * (not dark), COLOURS[i % 7] if dark else FILLS[i % 7], GREY)
    items = [(lambda x, y: piece(x, y - 12, "A", 26), words["prefill"]),
             (lambda x, y: piece(x, y - 12, "a", 26), words["decode"])]
    if any("." in row for _, row in rows):
        items.append((lambda x, y: piece(x, y - 12, ".", 26), words["idle"]))
    top = drawing.legend(items, 52) + 24
    for r, (name, row) in enumerate(rows):
        y, start = top + 30 * r, 0
        drawing.text(left - 10, y + 17, name, "end")
        while start < steps:
            end = start + 1
            while end < steps and row[end] == row[start]:
                end += 1
            x, w = left + column * start, column * (end - start)
            if row[start] != " ":
                piece(x, y, row[start], w)
                if row[start].islower() and w > 9:
                    drawing.text(x + w / 2, y + 16.5, row[start].upper(), "middle", size=12)
            start = end
    drawing.path(f"M{left:.1f} {top + 30 * len(rows) + 2:.1f}h{column * steps:.1f}", INK)
    ticks = range(0, steps + 1, 10 if steps > 20 else 2)
    _x_ticks(drawing, ticks, top + 30 * len(rows) + 2, lambda i: left + column * i)
    drawing.text(left + column * steps / 2, top + 30 * len(rows) + 40, words["step"], "middle", GREY)
    drawing.height = top + 30 * len(rows) + 52
    return drawing.document()


def table(title, columns, rows, width=960) -> str:
    """columns: heads, one that ends in ">" is set to the right; rows: anything.  Long texts wrap."""
    heads, cells = [str(c).removesuffix(">") for c in columns], [[str(cell) for cell in row] for row in rows]
    sizes = [max([1.1 * text_width(head), *map(text_width, column)]) + 4 for head, *column in zip(heads, *cells)]
    gap, room = 22, width - 2 * MARGIN
    while (over := sum(sizes) + gap * (len(sizes) - 1) - room) > 0:
        widest = sizes.index(max(sizes))
        narrower = max(sizes[widest] - over, room / (len(sizes) + 1))
        if narrower >= sizes[widest]:
            break                                    # nobody has room to give: the picture gets wider
        sizes[widest] = narrower
    total = sum(sizes) + gap * (len(sizes) - 1)
    drawing = Drawing(max(total, text_width(title, 15) * 1.05 if title else 0) + 2 * MARGIN, 0, title)
    y = 52 if title else 26
    for r, row in enumerate([heads, *cells]):
        x, tall = MARGIN, 1
        if r and r % 2 == 0:
            stripe = len(drawing.parts)
        for size, head, words in zip(sizes, columns, row):
            lines, right = wrap(words, size), str(head).endswith(">")
            tall = max(tall, len(lines))
            for i, line in enumerate(lines):
                drawing.text(x + size * right, y + 18 * i, line, "end" if right else "start",
                             weight="bold" if r == 0 else "normal")
            x += size + gap
        if r and r % 2 == 0:         # a stripe, under the words
            drawing.parts.insert(stripe, f'<rect x="{MARGIN - 6}" y="{y - 16:.1f}" width="{total + 12:.1f}" '
                                         f'height="{18 * tall + 5}" fill="#f5f5f5"/>')
        y += 18 * tall + 5
        if r == 0:
            drawing.path(f"M{MARGIN - 6} {y - 15:.1f}h{total + 12:.1f}", INK)
            y += 6
    drawing.height = y - 4
    return drawing.document()
