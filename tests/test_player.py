"""The player in a real browser: what it shows of a step is what the scheduler did, and no run is too long for it."""
import html
import json
import random
import re
import shutil
import subprocess
from dataclasses import asdict, replace

import pytest

import show
from conftest import ROOT
from kv_cache import KVCacheManager
from request import Request, SamplingParams
from scheduler import Scheduler, SchedulerConfig, check_invariants

PLAYER = (ROOT / "chapters/tools/player.html").read_text(encoding="utf-8")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(not CHROMIUM, reason="needs chromium (apt-get install chromium)")


def simulate(num_requests, steps=10**9, num_blocks=24, budget=24, seqs=5, shared=8, length=(2, 14), output=(2, 14)):
    """(StepRecords of a real scheduler with a stand-in for the model, what it knew after each plan): some prompts start
    alike, some requests are preempted, one is aborted while it waits, one while it runs."""
    manager = KVCacheManager(num_blocks, 4)
    scheduler = Scheduler(SchedulerConfig(seqs, budget, 64), manager)
    rng, records, truth = random.Random(1), [], []
    for i in range(num_requests):
        prompt = list(range(shared)) * (i % 2) + [rng.randrange(999) for _ in range(rng.randint(*length))]
        scheduler.add_request(Request(f"r{i}", prompt, SamplingParams(max_tokens=rng.randint(*output))))
    while scheduler.has_unfinished_requests() and len(records) < steps:
        if len(records) == 3:
            scheduler.abort_request(next(reversed(scheduler.waiting)))
            scheduler.abort_request(scheduler.running[-1].request_id)
        plan = scheduler.schedule()
        tables = [manager.get_block_ids(r.request_id) for r in scheduler.running]
        held = [block for table in tables for block in table]
        free = manager.block_pool.free_block_queue.get_all_free_blocks()
        truth.append({"waiting": len(scheduler.waiting), "running": len(plan.scheduled_requests),
                      "held": len(set(held)),
                      "shared": sum(held.count(block) > 1 for block in set(held)),
                      "cached": sum(block.block_hash is not None for block in free)})
        sampled = {r.request_id: 7 for r in plan.scheduled_requests if r.num_computed_tokens == r.num_tokens}
        ended = [r.request_id for r in scheduler.update_from_output(plan, sampled)]
        records.append(scheduler.make_record(len(records), plan, sampled, 0.1 * len(records), 0.1, ended,
                                             {name: f" w{len(records)}" for name in sampled}))
        check_invariants(scheduler)
    return records, truth


RECORDS, TRUTH = simulate(60)


def long_run(num_steps=5000, at_once=16, queue=1500, blocks=2000):
    """Records as the scheduler would write them, written directly: requests take turns of 200 steps, 31 blocks each."""
    records, slots = [], [None] * at_once
    template, part, count = RECORDS[0], RECORDS[0].requests[0], 0
    for step in range(num_steps):
        parts, ended = [], []
        arrived = {f"q{i}": 300 for i in range(queue + at_once)} if step == 0 else {}
        for slot in range(at_once):
            if slots[slot] is None or step - slots[slot][1] == 200 + 3 * slot:
                if slots[slot]:
                    ended.append(slots[slot][0])
                slots[slot], count = (f"q{count}", step), count + 1
                if count > queue + at_once:
                    arrived[slots[slot][0]] = 300
            name, began = slots[slot]
            first, age = 1 + slot * 31, step - began
            new = list(range(first, first + 18)) if age == 0 else [first + 18 + age // 16]
            new = new if age == 0 or (age % 16 == 0 and age < 200) else []
            parts.append(replace(part, request_id=name, computed=0 if age == 0 else 299 + age, text=" word",
                                 scheduled=300 if age == 0 else 1, hit_blocks=0, sampled=7, num_prompt_tokens=300,
                                 blocks=new))
        if records:
            records[-1].finished.extend(ended)
        records.append(replace(template, step=step, time=float(step), requests=parts, budget=2048, finished=[],
                               arrived=arrived, used=sum(p.scheduled for p in parts),
                               total_blocks=blocks, block_size=16, preempted=[]))
    return records


def browse(tmp_path, page, address="", extra="", budget=4000):
    """The page's DOM after `extra`, a script that runs once the page stands; budget: milliseconds of virtual time, or
    None for real time, when the DOM is taken as soon as the page is loaded."""
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", f"<script>{{ {extra} }}</script></body>"), encoding="utf-8")
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900",
               f"--user-data-dir={tmp_path}/profile", "--dump-dom", f"{path.as_uri()}{address}"]
    command += [f"--virtual-time-budget={budget}"] if budget else []
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def result(dom):
    """What `extra` has put into the element that the page keeps for it."""
    return json.loads(html.unescape(re.search(r'<pre id="result">(.*?)</pre>', dom, re.DOTALL)[1]))


ASK = """const report = (value) => {
  const pre = Object.assign(document.createElement("pre"), { id: "result", textContent: JSON.stringify(value) });
  document.getElementById("result")?.remove();
  document.body.append(pre);
};
"""


def test_the_run_has_what_the_page_is_to_show():
    assert any(r.preempted for r in RECORDS) and any(t["shared"] for t in TRUTH) and any(t["cached"] for t in TRUTH)
    assert RECORDS[3].aborted and any(p.hit_blocks for r in RECORDS for p in r.requests) and len(RECORDS) > 64


@needs_browser
@pytest.mark.parametrize("snapshot", [3, 64])
def test_every_step_shows_what_the_scheduler_knew(snapshot, tmp_path):
    """Forwards, backwards and in leaps: queue, running, blocks held, shared, free but cached, against the scheduler."""
    page = show.player_page(RECORDS, "t").replace("SNAPSHOT = 64", f"SNAPSHOT = {snapshot}")
    order = [*range(len(RECORDS)), *range(len(RECORDS) - 1, -1, -1)]
    order += random.Random(2).choices(range(len(RECORDS)), k=60)
    dom = browse(tmp_path, page, extra=ASK + f"""
        report({order}.map((at) => {{ seek(at); draw(); return {{ ...document.body.dataset }}; }}));""")
    for at, shown in zip(order, result(dom), strict=True):
        assert {key: int(shown[key]) for key in TRUTH[at]} == TRUTH[at], f"step {at}"
        assert int(shown["step"]) == at and int(shown["steps"]) == len(RECORDS)


@needs_browser
def test_texts_words_and_languages(tmp_path):
    at = next(i for i, record in enumerate(RECORDS) if record.preempted)
    victim, chunk = RECORDS[at].preempted[0], RECORDS[0].requests[0]
    dom = browse(tmp_path, show.player_page(RECORDS, "t"), f"#step={at}&lang=zh", ASK + f"""
        const zh = $("status").textContent + $("queue").textContent;
        setLanguage("en"); draw();
        const en = $("status").textContent + $("queue").textContent;
        const texts = [...$("texts").children].map((c) => c.textContent);
        seek(0); draw();
        report([zh, en, texts, $("status").textContent]);""")
    zh, en, texts, first = result(dom)
    assert f"{victim} 被抢占" in zh and f"{victim} is preempted" in en and "preempted" in en.split("ms.")[1]
    assert f"{chunk.request_id} computes 0→{chunk.scheduled} (prefill chunk)" in first and "arrived" in first
    for part, shown in zip(RECORDS[at].requests, texts):
        text = "".join(p.text for r in RECORDS[:at + 1] for p in r.requests if p.request_id == part.request_id)
        assert shown == part.request_id + text


@needs_browser
def test_lanes(tmp_path):
    """The phases that the page finds are show.phases', so also in a record from before there were arrivals."""
    old = [replace(r, arrived={}, aborted=[], block_size=0,
                   requests=[replace(p, blocks=[], text="") for p in r.requests]) for r in RECORDS]
    script = ASK + """report(Object.fromEntries(requests.map((r) => [r.id, steps.map((_, i) => {
        const span = spanAt(r, i); return span && span[1] !== "." ? span[1] : " "; }).join("")])));"""
    letters = {name: "".join(row.get(i, " ") for i in range(len(RECORDS)))
               for name, row in show.phases(RECORDS).items()}
    aborted = set(RECORDS[3].aborted)
    for records in (RECORDS, old):
        lanes = result(browse(tmp_path, show.player_page(records, "t"), extra=script))
        assert {n: row for n, row in lanes.items() if n not in aborted} == {
            n: row for n, row in letters.items() if n not in aborted}
    dom = browse(tmp_path, show.player_page(old, "t"), "#lang=en")
    assert "these records don't say by whom" in dom and f'data-held="{TRUTH[0]["held"]}"' in dom


@needs_browser
def test_it_plays_to_the_end_and_keys_work(tmp_path):
    dom = browse(tmp_path, show.player_page(RECORDS, "t"), "#play=1&speed=100")
    assert int(re.search(r'data-step="(\d+)"', dom)[1]) > 5, "the browser's own frames move it on"
    dom = browse(tmp_path, show.player_page(RECORDS, "t"), extra=ASK + """
        const seen = [];
        play(true);
        for (let frame = 0; frame < 3000 && playing; frame++) { tick(frame * 20); seen.push(cursor); }
        report([seen, playing]);""")
    seen, playing = result(dom)
    assert seen == sorted(seen) and seen[-1] == len(RECORDS) - 1 and not playing
    assert abs(len(seen) - (len(RECORDS) - 1) / 5 * 50) < 15, "5 steps a second, at 50 frames"
    first = next(i for i, record in enumerate(RECORDS) if record.preempted)
    dom = browse(tmp_path, show.player_page(RECORDS, "t"), extra=ASK + """
        const seen = [], press = (key, more = {}) => {
          document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, ...more })); draw();
          seen.push([cursor, playing, lang, +$("speed").value]); };
        setLanguage("en");
        press("ArrowRight"); press("ArrowRight", { shiftKey: true }); press("ArrowLeft"); press("End"); press("Home");
        press("x"); press("l"); press("ArrowUp"); press(" "); press(" ");
        report(seen);""")
    last = len(RECORDS) - 1
    assert [row[0] for row in result(dom)] == [1, 11, 10, last, 0, first, first, first, first, first]
    assert [row[2:] for row in result(dom)[5:8]] == [["en", 5], ["zh", 5], ["zh", 10]]
    assert [row[1] for row in result(dom)[7:]] == [False, True, False]


@needs_browser
def test_what_a_request_says_stays_text(tmp_path):
    """Markup in ids, in text and in the file's name neither leaves the script element nor becomes elements."""
    evil = '</script><script>document.body.dataset.broken="1"</script><!--<b id="broken">\u2028&lt;'
    part = replace(RECORDS[0].requests[0], request_id=evil, text=evil)
    records = [replace(RECORDS[0], requests=[part], arrived={evil: 3}),
               replace(RECORDS[1], requests=[], preempted=[evil])]
    show.player_page(records, "\ud800").encode()
    page = show.player_page(records, evil)
    assert page.count("</script>") == PLAYER.count("</script>") and "<!--<b" not in page
    dom = browse(tmp_path, page, "#step=1")
    assert "data-broken" not in dom and '<b id="broken">' not in dom and 'data-steps="2"' in dom
    assert html.escape(evil[:40], quote=False) in dom


@needs_browser
def test_a_file_dropped_on_it_and_a_line_that_is_none(tmp_path):
    lines = "\n".join(json.dumps(asdict(record)) for record in RECORDS[:5])
    for bad, words in (("", ""), ('\n{"step": 1}', "x.jsonl, line 6: not a StepRecord"), ("\n{", "x.jsonl, line 6")):
        dom = browse(tmp_path, PLAYER, "#lang=en", ASK + f"""
            const files = new DataTransfer();
            files.items.add(new File([{json.dumps(lines + bad)}], "x.jsonl"));
            document.dispatchEvent(new DragEvent("drop", {{ dataTransfer: files, bubbles: true }}));""")
        assert 'data-steps="5"' in dom and words in dom
    assert 'id="main" hidden' in browse(tmp_path, PLAYER), "without a file there is nothing to show"


@needs_browser
def test_a_long_run_is_smooth(tmp_path):
    """5,000 steps of 16 requests each and a queue of 1,500, a pool of 2,000 blocks: a frame, with the canvas read back,
    stays within a sixtieth of a second twice over even on one slow core; so do leaps, which play from a snapshot."""
    records = long_run()
    dom = browse(tmp_path, show.player_page(records, "t"), extra=ASK + """
        const time = (at) => { const begin = performance.now(); seek(at); draw();
          for (const name of ["lanes", "pool"]) $(name).getContext("2d").getImageData(0, 0, 1, 1);
          return performance.now() - begin; };
        const sorted = (list) => list.sort((a, b) => a - b), play = [], leap = [];
        for (let i = 0; i < 300; i++) play.push(time(2000 + i));
        for (let i = 0; i < 100; i++) leap.push(time((i * 2741) % 5000));
        report({ play: sorted(play), leap: sorted(leap), steps: steps.length });""", budget=None)
    times = result(dom)
    for name in ("play", "leap"):
        some = times[name]
        print(f"{name}: median {some[len(some) // 2]:.1f} ms, 95 % {some[len(some) * 95 // 100]:.1f} ms")
    assert times["steps"] == 5000
    assert times["play"][150] < 33 and times["leap"][50] < 66


@needs_browser
def test_more_requests_than_lanes(tmp_path):
    """Sixteen lanes: those that run come before those that wait, and the wheel brings the others, to the last and back."""
    dom = browse(tmp_path, show.player_page(RECORDS, "t"), extra=ASK + """
        const turn = (by) => { $("lanes").dispatchEvent(new WheelEvent("wheel", { deltaY: by })); return scrolled; };
        report([turn(9), turn(9), ...Array.from({ length: 40 }, () => turn(9)).slice(-1), turn(-9), $("lanesNote").textContent]);""")
    first, second, end, back, note = result(dom)
    assert (first, second, end, back) == (3, 6, 60 - 16, 60 - 16 - 3) and "44" in note


def test_both_languages_say_the_same_things():
    """Each key in both, with the same values filled in, and every key that the page uses is there."""
    blocks = re.search(r"const WORDS = \{(.*?)\n\};", PLAYER, re.DOTALL)[1].split("\n  zh: {")
    entries = [dict(re.findall(r'(\w+): ((?:"[^"]*"(?: \+\s*)?)+)', block)) for block in blocks]
    assert entries[0].keys() == entries[1].keys() and len(entries[0]) > 35
    for key, english in entries[0].items():
        assert sorted(re.findall(r"\{\w+\}", english)) == sorted(re.findall(r"\{\w+\}", entries[1][key])), key
        assert re.search(r"[\u4e00-\u9fff]", entries[1][key]), key
    used = set(re.findall(r'say\("(\w+)"', PLAYER)) | set(re.findall(r'data-word="(\w+)"', PLAYER))
    assert used <= entries[0].keys()


def test_it_needs_no_network():
    assert not re.search(r"https?://|@import|src=|<link", PLAYER)
