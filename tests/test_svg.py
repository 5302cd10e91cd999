"""The pictures' SVG: whole documents, texts that neither touch nor leave the picture, nothing that only colour says."""
import html
import itertools
import json
import re
import subprocess
import xml.etree.ElementTree as ElementTree

import pytest

import svg
from test_player import CHROMIUM, needs_browser

WORDS = {"en": {"free": "free", "cached": "free, still cached", "full": "full and cached", "part": "not full yet",
                "shared": "shared by two", "prefill": "prefill", "decode": "decode", "idle": "computed for nobody",
                "step": "step"},
         "zh": {"free": "空闲", "cached": "空闲，缓存还在", "full": "已满，已缓存", "part": "未满", "shared": "两个请求共享",
                "prefill": "预填充", "decode": "解码", "idle": "无人需要的计算", "step": "步"}}
PHASES = {"en": dict(zip("wPCd-xR", ("waiting", "prefill chunk", "prefill after a prefix hit", "decode",
                                     "no budget left for it", "preempted", "recompute"))),
          "zh": dict(zip("wPCd-xR", ("等待", "预填充分块", "命中前缀后的预填充", "解码", "预算用完", "抢占", "重计算")))}


def pictures(lang):
    """One of each kind, with long labels, in a language."""
    zh, w = lang == "zh", WORDS[lang]
    names = [f"请求{i}的很长很长的名字" if zh else f"request-with-a-long-name-{i}" for i in range(9)]
    curves = {name: [i * k for i in range(1, 10)] for k, name in enumerate(names[:5], 1)}
    spans = {name: [(0, i, "w"), (i, i + 1, "P"), (i + 1, 40, "d"), (40, 41, "x"), (41, 60, "w"), (60, 61, "R"),
                    (61, 62, "C"), (62, 70, "-")] for i, name in enumerate(names)}
    long = "一个相当长的标题，不得超出图的边缘，" * 5 if zh else "A title that is rather long for a picture " * 5
    unit = "词元每秒" if zh else "tokens a second"
    return {
        "line_chart": svg.line_chart(long, [1, 2, 4, 8, 16, 32, 64, 100, 128], curves, unit, unit, (20, names[0]),
                                     (2, 16, names[1]), log_x=True),
        "scatter": svg.scatter(long, {n: [(i * 37, i * k) for i in range(20)] for k, n in enumerate(names[:7])}, unit, unit),
        "bar_chart": svg.bar_chart(long, [(n, 1234.5 * i) for i, n in enumerate(names)], unit),
        "heatmap": svg.heatmap(long, [[i * j for j in range(30)] for i in range(9)], names, [f"{n}00" for n in range(30)],
                               unit, unit),
        "lanes": svg.lanes(long, spans, 700, PHASES[lang], unit, 95, names[0][:12]),
        "blocks": svg.blocks(long, [(i, [i % 9] if i < 40 else [1, 2] if i < 50 else [], i % 3 == 0) for i in range(1, 90)],
                             names, w),
        "seats": svg.seats(long, [(f"{n[:9]}", "Aaaaaa..Bbbbb   " * 6) for n in names], w),
        "table": svg.table(long, ["", f"{names[0]}>", unit], [(n, i, long * 3) for i, n in enumerate(names)])}


def texts(document):
    """[(words, left, right, top, bottom)] of every text, by the estimate of its width."""
    boxes = []
    for node in ElementTree.fromstring(document).iter("{http://www.w3.org/2000/svg}text"):
        size, x, y = (float(node.get(name)) for name in ("font-size", "x", "y"))
        width = svg.text_width(node.text or "", size)
        x -= width * {"start": 0, "middle": .5, "end": 1}[node.get("text-anchor")]
        boxes.append((node.text or "", x, x + width, y - size * .8, y + size * .2))
    return boxes


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_no_text_touches_another_or_leaves_the_picture(lang):
    for kind, document in pictures(lang).items():
        width, height = map(float, re.search(r'viewBox="0 0 (\d+) (\d+)"', document).groups())
        boxes = [box for box in texts(document) if box[0]]
        assert len(boxes) > 10, kind
        for words, left, right, top, bottom in boxes:
            assert left >= 0 and right <= width and top >= 0 and bottom <= height, (kind, words, right, width)
        for a, b in itertools.combinations(boxes, 2):
            apart = a[2] <= b[1] + 1 or b[2] <= a[1] + 1 or a[4] <= b[3] or b[4] <= a[3]
            assert apart, (kind, a, b)


@needs_browser
def test_the_estimated_widths_hold_in_a_browser(tmp_path):
    """A text is at most a tenth wider than was thought, in the fonts of this machine."""
    page = tmp_path / "page.html"
    page.write_text("<meta charset=utf-8>" + "".join(pictures(lang)[kind] for lang in WORDS for kind in pictures(lang)) + """
        <pre id=result></pre><script>result.textContent = JSON.stringify([...document.querySelectorAll("text")]
        .map((t) => [t.textContent, +t.getAttribute("font-size"), t.getComputedTextLength()]))</script>""", encoding="utf-8")
    dom = subprocess.run([CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri(),
                          f"--user-data-dir={tmp_path}/profile"], capture_output=True, text=True, timeout=120).stdout
    measured = json.loads(html.unescape(re.search(r'<pre id="result">(.*?)</pre>', dom, re.DOTALL)[1]))
    assert len(measured) > 500
    for words, size, width in measured:
        assert width <= 1.1 * svg.text_width(words, size) + 4, words


def test_what_comes_in_is_escaped_and_nothing_is_fetched():
    evil = '</text><script>alert("1")</script>&amp;'
    words, document = dict.fromkeys(WORDS["en"], evil), []
    document += [svg.line_chart(evil, [1, 2], {evil: [1, 2]}, evil, evil, (1, evil), (1, 2, evil)), svg.bar_chart(evil, [(evil, 1)], evil)]
    document += [svg.scatter(evil, {evil: [(1, 2)]}, evil, evil), svg.heatmap(evil, [[1, None]], [evil], [evil, evil], evil, evil)]
    document += [svg.lanes(evil, {evil: [(0, 1, "d")]}, 1, {"d": evil}, evil, 0, evil), svg.blocks(evil, [(1, [0], True)], [evil], words)]
    document += [svg.seats(evil, [(evil, "Aa.")], words), svg.table(evil, [evil], [[evil]])]
    for text in document:
        root = ElementTree.fromstring(text)
        assert {node.tag.split("}")[1] for node in root.iter()} <= set("svg title defs pattern path rect text".split())
        assert not re.search(r"@font-face|@import|href|url\((?!#hatch)", text) and root[0].text == evil


def grey(colour):
    return sum(int(colour[i:i + 2], 16) * share for i, share in ((1, .299), (3, .587), (5, .114)))


def test_without_colour_nothing_is_lost():
    """Any two phases, and any two curves, differ in shape, hatching or by a clear step of grey."""
    for a, b in itertools.combinations(svg.PHASE_STYLES.values(), 2):
        assert abs(a[1] - b[1]) > .2 or a[2] != b[2] or abs(grey(a[0]) - grey(b[0])) > 40, (a, b)
    shapes = []
    for i in range(7):
        drawing = svg.Drawing(10, 10)
        drawing.marker(i, 5, 5)
        shapes.append(re.search(r' d="(.*?)"', drawing.parts[0])[1])
    assert len(set(shapes)) == 7
    assert min(grey(fill) for fill in svg.FILLS) > 160 > max(grey(line) for line in svg.COLOURS), "dark letters, white ground"
    document = svg.blocks("", [(1, [0], True), (2, [1], True), (3, [0, 1], True)], ["a", "b"], WORDS["en"])
    assert ["a", "b", "×2"] == [box[0] for box in texts(document)][-3:] and "url(#hatch)" in document


def test_geometry():
    """Bars are as long as their numbers say; a lane's piece lies in its columns; a point where x and y put it."""
    widths = [float(w) for w in re.findall(r'width="([\d.]+)" height="22.0"', svg.bar_chart("", [("a", 8), ("b", 4), ("c", 0)]))]
    assert widths[0] == pytest.approx(2 * widths[1], abs=.2) and widths[2] < 1
    pieces = re.findall(r'x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="8.4"',
                        svg.lanes("", {"a": [(0, 10, "d"), (20, 40, "d")]}, 40, {}))
    (x0, w0), (x1, w1) = [(float(x), float(w)) for x, w in pieces]
    assert w1 == pytest.approx(2 * w0, abs=.2) and x1 - x0 == pytest.approx(2 * w0, abs=.2)
    line = re.search(r'd="M([\d. L]+)" fill="none" stroke="#0072b2" stroke-width="2"', svg.line_chart(
        "", [1, 2, 4], {"a": [0, 4, 2]}, log_x=True).replace("h26", "@"))[1]
    (xa, ya), (xb, yb), (xc, yc) = [map(float, point.split()) for point in line.split("L")]
    assert xb - xa == pytest.approx(xc - xb, abs=.2) and ya - yc == pytest.approx(yc - yb, abs=.2)


@pytest.mark.parametrize("words", ["", "a", "a long sentence of many short words", "没有空格的一长句中文也要能够折行", "x" * 99])
def test_wrap_and_fit(words):
    for room in (20, 60, 200):
        lines = svg.wrap(words, room)
        assert "".join("".join(lines).split()) == "".join(words.split()) and lines
        assert all(svg.text_width(line) <= room for line in lines)
        cut = svg.fit(words, room)
        assert svg.text_width(cut) <= room and (cut == words or cut.endswith("…"))


@pytest.mark.parametrize("value, top", [(0, 1), (1, 1), (1.01, 1.2), (7, 8), (99, 100), (0.013, 0.016)])
def test_nice_top(value, top):
    assert svg.nice_top(value) == pytest.approx(top)
