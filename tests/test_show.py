"""The pictures: what each letter stands for, narrow and colourless consoles, SVG, the trace."""
import io
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace

import pytest
from rich.console import Console

import bench
import show
from conftest import ROOT
from kv_cache import KVCacheManager
from request import Request, SamplingParams
from scheduler import RequestStep, Scheduler, SchedulerConfig, StepRecord
from show import BarChart, BlockMap, LineChart, StepTable, Timeline, chrome_trace, phases


def render(picture, width=100, **options):
    """What a console of this width prints, without any escape code."""
    file = io.StringIO()
    Console(file=file, width=width, **{"color_system": None, **options}).print(picture)
    return file.getvalue()


def record(step, requests, preempted=(), finished=(), time=None, duration=1.0, waiting=0):
    """A StepRecord from (id, computed, scheduled, hit blocks, sampled, arrival) tuples."""
    parts = [RequestStep(*request[:5], 4, request[5]) for request in requests]
    return StepRecord(step, float(step) if time is None else time, duration, parts, 8, sum(r.scheduled for r in parts),
                      len(parts), waiting, list(preempted), 5, 9, list(finished))


# a: two chunks, a decode, preempted in step 3, waits in 4, recomputes in 5, decodes.  b: arrives at 0.5, is admitted in
# step 2 with a hit, skips step 3 for want of budget, ends in 6.
SCRIPT = [
    record(0, [("a", 0, 3, 0, None, 0.0)]),
    record(1, [("a", 3, 1, 0, 7, 0.0)], waiting=1),
    record(2, [("a", 4, 1, 0, 8, 0.0), ("b", 2, 2, 1, 5, 0.5)]),
    record(3, [], preempted=["a"], waiting=1),
    record(4, [("b", 4, 1, 0, 5, 0.5)], waiting=1),
    record(5, [("b", 5, 1, 0, 5, 0.5), ("a", 0, 6, 0, 9, 0.0)]),
    record(6, [("b", 6, 1, 0, 5, 0.5), ("a", 6, 1, 0, 9, 0.0)], finished=["a", "b"])]


def letters(name):
    row = phases(SCRIPT)[name]
    return "".join(row.get(i, " ") for i in range(len(SCRIPT)))


def test_phases():
    assert letters("a") == "PPdxwRd"
    assert letters("b") == " wC-ddd"


def test_preempted_and_readmitted_in_turn():
    """Preempted again before it got back to decoding: still a recompute, and both preemptions show."""
    steps = [record(0, [("a", 0, 4, 0, 1, 0.0)]), record(1, [], ["a"]), record(2, [("a", 0, 2, 0, None, 0.0)]),
             record(3, [], ["a"]), record(4, [("a", 0, 5, 2, 3, 0.0)]), record(5, [("a", 5, 1, 0, 4, 0.0)])]
    assert "".join(phases(steps)["a"].values()) == "PxRxRd"


def test_timeline_rows():
    lines = render(Timeline(SCRIPT)).splitlines()
    assert lines[0].startswith("step 0") and lines[1].rstrip() == "a    PPdxwRd" and lines[2].rstrip() == "b     wC-ddd"
    for words in ("preempted (抢占)", "recompute (重计算)", "prefix hit", "waiting", "decode", "no budget"):
        assert words in " ".join(lines[3:])


def long_run(steps=300, requests=3):
    return [record(i, [(str(r), 4 + i, 1, 0, 1, 0.0) for r in range(requests)]) for i in range(steps)]


def test_timeline_shares_columns_and_names_what_it_hides():
    """300 steps in 40 columns: several steps a column, and a preemption among them is not lost."""
    records = long_run()
    records[150] = replace(records[150], requests=records[150].requests[1:], preempted=["0"])
    lines = render(Timeline(records), width=40).splitlines()
    assert all(len(line) <= 40 for line in lines)
    assert lines[1].count("x") == 1 and "One column is 9 steps" in " ".join(lines)
    assert "and 60 requests more" in render(Timeline(long_run(3, 100)))


@pytest.mark.parametrize("steps", [1, 10, 11, 101, 181, 301])
def test_no_number_of_the_ruler_is_cut(steps):
    for width in range(20, 100):
        ruler = render(Timeline(long_run(steps, 1)), width).splitlines()[0].removeprefix("step ")
        per = -(-steps // (width - 5))
        assert all(int(number) == 10 * i * per for i, number in enumerate(ruler.split())), (width, ruler)
        assert all(ruler[10 * i] == number[0] for i, number in enumerate(ruler.split()))
    assert render(Timeline(long_run(301, 1)), 80).splitlines()[0].split()[-2:] == ["250", "300"], "there is room for it"


@pytest.mark.parametrize("width", [20, 30, 50, 80, 160])
def test_no_line_is_wider_than_the_console(width):
    manager = KVCacheManager(64, 4)
    pictures = [StepTable(SCRIPT), Timeline(SCRIPT), Timeline(long_run()), BlockMap(manager),
                BarChart("bars", [("static batching", 120.5), ("continuous", 3000)], "tok/s"),
                LineChart("lines", [1, 2, 4, 256], {"a": [1, 5, 9, 12], "b": [3, None, 2, 1]}, "batch", "ms",
                          (6, "SLO"), (1, 4, "within the SLO"), log_x=True)]
    for picture in pictures:
        text = render(picture, width)
        assert all(len(line) <= width for line in text.splitlines()), picture
        assert "\x1b" not in text


def test_step_table():
    wide, narrow = render(StepTable(SCRIPT), 120), render(StepTable(SCRIPT), 44)
    assert "a d 4, b C 2→4 (1 block hit)" in wide and "a preempted" in wide and "a done, b done" in wide
    assert "free blocks" in wide and "5/9" in wide and "free blocks" not in narrow
    assert "a preempted" in narrow and "b d 6" in narrow, "a narrow table still says who did what"
    narrowest = "".join(render(StepTable(SCRIPT), 20).split())
    assert "tokens" not in narrowest and "bd5" in narrowest, "it still does in 20 columns"
    many = render(StepTable(long_run(100, 12)), 100)
    assert "12 decodes" in many and "60 steps more" in many and len(many.splitlines()) < 60


def test_block_map():
    """Block size 4, ten tokens: two full blocks, published, and one that is not; a second request shares both."""
    manager = KVCacheManager(9, 4)
    scheduler = Scheduler(SchedulerConfig(4, 64, 32), manager)
    scheduler.add_request(Request("first", range(10), SamplingParams(max_tokens=4)))
    scheduler.schedule()
    assert render(BlockMap(manager)).splitlines()[0] == "    0  0AAa....."
    scheduler.add_request(Request("second", [*range(8), 50, 51], SamplingParams(max_tokens=4)))
    scheduler.schedule()
    text = render(BlockMap(manager))
    assert text.splitlines()[0] == "    0  022ab...." and "a first   b second" in text
    scheduler.abort_request("first")
    scheduler.abort_request("second")
    assert sorted(render(BlockMap(manager)).splitlines()[0][7:]) == sorted("0++......"), "freed, and still cached"


def test_colour_is_a_help_and_not_a_need():
    """Stripped of its escape codes, the coloured picture is the colourless one."""
    coloured = render(Timeline(SCRIPT), color_system="truecolor", force_terminal=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == render(Timeline(SCRIPT))


def test_bar_chart_lengths():
    lines = render(BarChart("t", [("a", 10), ("b", 5), ("c", 0), ("d", 0.01)]), 60).splitlines()[1:]
    bars = [line.count("█") for line in lines]
    assert abs(bars[0] - 2 * bars[1]) <= 1 and bars[2] == 0 and bars[3] == 1, "what is not zero is seen"
    ascii_file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=ascii_file, width=60).print(BarChart("t", [("a", 10)]))
    ascii_file.seek(0)
    assert "#" in ascii_file.read()


def test_line_chart_geometry():
    chart = LineChart("t", [1, 2, 4, 8], {"up": [0, 1, 2, 4], "flat": [2, 2, None, 2]}, log_x=True)
    assert chart.top == 4
    assert [x for x, _ in chart.points("up")] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert [y for _, y in chart.points("up")] == [0, 0.25, 0.5, 1]
    assert [x for x, _ in chart.points("flat")] == pytest.approx([0, 1 / 3, 1]), "a missing point is left out"
    rows = render(chart, 60).splitlines()
    plot = [row.split("│", 1)[1] for row in rows if "│" in row]
    assert plot[0].rstrip().endswith("o") and plot[-1].startswith("o"), "4 is at the top right, 0 at the bottom left"
    assert "o up   x flat" in rows[-1]
    assert LineChart("t", [1], {"one": [0.0]}).top == 1 and "o" in render(LineChart("t", [1], {"one": [0.0]}), 40)


def test_line_chart_limit_and_region():
    chart = LineChart("t", [1, 2, 4], {"a": [1, 2, 4]}, limit=(2, "SLO 2 ms"), region=(1, 2, "good"), log_x=True)
    rows = render(chart, 60)
    assert "--- SLO 2 ms" in rows and re.search(r"\[=+ good =+\]", rows)


@pytest.mark.parametrize("picture", [
    Timeline(SCRIPT), StepTable(SCRIPT), BarChart("t", [("a<b>", 1)]),
    LineChart("a < b & c", [1, 2], {"p<q": [1, 2]}, limit=(1, "<limit>"), region=(1, 2, "&"))],
    ids=lambda picture: type(picture).__name__)
def test_svg_is_well_formed_and_repeatable(picture, tmp_path):
    first, second = tmp_path / "new" / "1.svg", tmp_path / "2.svg"
    show.save_svg(picture, first)
    show.save_svg(picture, second)
    assert first.read_bytes() == second.read_bytes()
    assert ElementTree.parse(first).getroot().tag.endswith("svg")
    if isinstance(picture, LineChart):
        texts = [node.text for node in ElementTree.parse(first).getroot().iter() if node.text]
        assert "a < b & c" in texts and "<limit>" in texts


# --- the trace --------------------------------------------------------------------------------------------------------


def lane(trace, name):
    """[(title, start, end) in whole steps] of a request's lane."""
    events = trace["traceEvents"]
    tid = next(e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"] == name)
    slices = [e for e in events if e["ph"] == "X" and e["tid"] == tid]
    return [(e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in slices]


def test_trace_lanes():
    trace = chrome_trace(SCRIPT)
    assert lane(trace, "a") == [("queued", 0, 0), ("prefill 0→3", 0, 1), ("prefill 3→4", 1, 2), ("decode", 2, 3),
                                ("preempted", 3, 5), ("recompute 0→6", 5, 6), ("decode", 6, 7)]
    assert lane(trace, "b") == [("queued", 0.5, 2), ("prefill 2→4", 2, 3), ("decode", 4, 5), ("decode", 5, 6),
                                ("decode", 6, 7)]


def test_trace_counters_and_format():
    events = chrome_trace(SCRIPT)["traceEvents"]
    assert json.loads(json.dumps(events)) == events
    assert all(event["ph"] in "XCM" and event["pid"] in (0, 1) for event in events)
    assert all(event["ts"] >= 0 and event.get("dur", 0) >= 0 for event in events if event["ph"] != "M")
    names = ("KV blocks", "token budget", "requests")
    counters = {name: [e["args"] for e in events if e["name"] == name and e["ph"] == "C"] for name in names}
    assert counters["KV blocks"] == [{"used": 4, "free": 5}] * 7
    assert counters["token budget"][5] == {"used": 7, "unused": 1}
    assert counters["requests"][4] == {"running": 1, "waiting": 1}


def test_empty_run():
    assert chrome_trace([])["traceEvents"] and phases([]) == {}
    render(Timeline([])), render(StepTable([]))


# --- files and the command --------------------------------------------------------------------------------------------


def test_records_from_before_there_were_block_ids_are_read(tmp_path):
    row = asdict(SCRIPT[2])
    for name in ("arrived", "aborted", "block_size", "enable_prefix_caching"):
        del row[name]
    for part in row["requests"]:
        del part["blocks"], part["text"]
    (tmp_path / "old.jsonl").write_text(json.dumps(row))
    assert show.load_records(tmp_path / "old.jsonl") == [SCRIPT[2]]


def test_records_survive_the_file(tmp_path):
    path = tmp_path / "records.jsonl"
    bench.write_records(path, SCRIPT)
    assert show.load_records(path) == SCRIPT
    path.write_text(path.read_text() + '{"step": 1}\n')
    with pytest.raises(ValueError, match=f"{path}:8"):
        show.load_records(path)


def test_command(tmp_path):
    path, trace = tmp_path / "records.jsonl", tmp_path / "trace.json"
    bench.write_records(path, SCRIPT)

    def command(*arguments):
        return subprocess.run([sys.executable, str(ROOT / "chapters/tools/show.py"), *arguments], capture_output=True,
                              text=True, timeout=60, env={"COLUMNS": "70", "PATH": "", "PYTHONIOENCODING": "utf-8"})
    shown = command(str(path), "--save", str(tmp_path / "pictures"))
    assert shown.returncode == 0 and "PPdxwRd" in shown.stdout and "\x1b" not in shown.stdout
    assert {p.name for p in (tmp_path / "pictures").iterdir()} == {"steps.svg", "timeline.svg"}
    assert command(str(path), "--trace", str(trace)).returncode == 0
    assert json.loads(trace.read_text()) == chrome_trace(SCRIPT)
    drawn = (tmp_path / "pictures" / "timeline.svg").read_text(encoding="utf-8")
    assert all(f">{words}</text>" in drawn for words in ("a", "b", "waiting", "preempted (抢占)", "decode"))
    assert "a C 2→4" not in drawn and "b C 2→4 (1 block hit)" in (tmp_path / "pictures" / "steps.svg").read_text("utf-8")
    page = tmp_path / "out.html"
    assert command(str(path), "--player", str(page)).returncode == 0
    data = page.read_text(encoding="utf-8").split('id="records">')[1].split("</script>")[0]
    assert [json.loads(line) for line in data.strip().splitlines()] == [asdict(record) for record in SCRIPT]
    assert "<title>records.jsonl</title>" in page.read_text(encoding="utf-8")
    wrong = command(str(tmp_path / "none.jsonl"))
    assert wrong.returncode == 2 and "none.jsonl" in wrong.stderr and "Traceback" not in wrong.stderr


@pytest.mark.parametrize("field,value", [("request_id", 5), ("request_id", [5]), ("scheduled", None), ("sampled", "7"),
                                         ("preempted", [["a"]]), ("duration", "1"), ("requests", None)])
def test_a_record_with_a_field_of_another_type_is_named(field, value, tmp_path, capsys):
    row, path = asdict(SCRIPT[2]), tmp_path / "records.jsonl"
    (row if field in row else row["requests"][1])[field] = value
    path.write_text(json.dumps(asdict(SCRIPT[0])) + "\n" + json.dumps(row))
    assert show.main([str(path)]) == 2
    shown = capsys.readouterr()
    assert f"show.py: error: {path}:2 is not a StepRecord: " in shown.err and not shown.out
    assert field == "requests" or f"{field} is {value!r}, must be " in shown.err


@pytest.mark.parametrize("option,path", [("--trace", "/nope/x"), ("--player", "/nope/x"), ("--save", "/proc/x")])
def test_a_file_that_cannot_be_written_is_named(option, path, tmp_path, capsys):
    bench.write_records(tmp_path / "records.jsonl", SCRIPT)
    assert show.main([str(tmp_path / "records.jsonl"), option, path]) == 2
    assert f"show.py: error: {option} {path}: " in capsys.readouterr().err


@pytest.mark.parametrize("environment", [{"COLUMNS": "0", "PYTHONIOENCODING": "utf-8"},
                                         {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_any_width_and_encoding_shows_something(environment, tmp_path):
    bench.write_records(tmp_path / "records.jsonl", SCRIPT)
    done = subprocess.run([sys.executable, ROOT / "chapters/tools/show.py", tmp_path / "records.jsonl"],
                          capture_output=True, timeout=60, env={"PATH": "", **environment})
    assert done.returncode == 0 and b"PPdxwRd" in done.stdout, done.stderr
