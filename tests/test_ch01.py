"""Chapter 1's walk-through: what its functions compute, then the whole of it as a reader runs it."""
import io
import pathlib
import re
import subprocess
import sys
import threading
import time

import pytest
import torch

import ch01_paradigm as ch01
from conftest import ROOT
from checkpoint import LlamaConfig
from lang import Sentence
from ledger import QUESTION, SYSTEM, Ledger, intensity, work_of
from nano_serve import LLM
from page import TABLES, Page, Seats, cut, greedy, parse_args, running_example, si, watched
from scheduler import SchedulerConfig
from show import phases
from simulator import SimulatedEngine

PROMPT = SYSTEM + QUESTION


@pytest.fixture(scope="module")
def prompt():
    with LLM() as llm:
        return running_example(llm)


# -- 1. One request's life

def test_the_running_example_has_the_articles_lengths(prompt):
    assert len(prompt) == PROMPT == 2050


@pytest.mark.parametrize("budget, rows", [
    (8192, [("0", "0→2050", 129), ("1", "2050→2051", 129), ("2-38", "2051→2088", 131), ("39", "2088→2089", 131)]),
    (1024, [("0", "0→1024", 64), ("1", "1024→2048", 128), ("2", "2048→2050", 129), ("3", "2050→2051", 129),
            ("4-40", "2051→2088", 131), ("41", "2088→2089", 131)])])
def test_life_of_a_request(prompt, budget, rows):
    """The article's counts: 2050 tokens of prefill, 129 blocks, then a token a step; 2050 + 40 - 1 have KV. It is told
    from step 0, whatever the engine did before, also when the engine has kept no older record."""
    with ch01.engine_here(max_num_batched_tokens=budget, max_records=60) as llm:
        ch01.live(llm, prompt[:50], 30)
        output, records = ch01.live(llm, prompt, 40)
        again, seconds = ch01.nothing_kept(llm, prompt, 2)
        assert llm.engine.scheduler.kv_cache_manager.num_free_blocks == records[0].total_blocks, "something was kept"
    assert again == output.outputs[0].token_ids[:2] and len(seconds) == 2
    life = ch01.life_of(records, output.metrics)
    assert [(step, done, blocks) for _, step, _, done, blocks in life] == [("", "", 0), *rows, ("", "", 0)]
    assert sum(record.used for record in records) == PROMPT + 40 - 1


def test_a_forecast_grows_with_the_ranks(prompt):
    found, one = ch01.forecast(1, 2.0)
    assert found == prompt and one > 2
    assert ch01.forecast(16, 2.0)[1] > one


@pytest.mark.parametrize("text, length, shown", [
    ("one two three", 13, "one two three"), ("one two three", 12, "one two…"), ("onetwothree", 6, "onetw…")])
def test_what_is_cut_says_so(text, length, shown):
    assert cut(text, length) == shown and len(shown) <= length


# -- 2. Prefill and decode

def test_shapes_are_the_articles(prompt):
    shapes, prefill, decode = ch01.three_steps(prompt, decodes=3)
    m = ch01.TINY.model
    q, kv = [m.num_attention_heads, m.head_dim], [m.num_key_value_heads, m.head_dim]
    expected = (PROMPT, PROMPT, 1), (1, PROMPT + 1, 1), (1 + QUESTION, PROMPT + 4 + QUESTION, 2)
    for seen, (n, read, rows) in zip(shapes, expected):
        assert seen == {"input_ids": [n], "Q": [n, *q], "K": [n, *kv], "V": [n, *kv], "KV slots written": [n],
                        "KV positions read": [read], "logits": [rows, m.vocab_size]}
    assert 0 < decode < prefill


def test_watching_changes_nothing(prompt):
    with LLM(enable_prefix_caching=False) as llm:
        execute, ops = llm.engine.executor.execute, llm.engine.executor.model.ops
        plain = ch01.live(llm, prompt[:60], 5)[0].outputs[0].token_ids
        with watched(llm.engine) as seen:
            assert ch01.live(llm, prompt[:60], 5)[0].outputs[0].token_ids == plain
        assert len(seen) == 5 and llm.engine.executor.model.ops is ops and llm.engine.executor.execute == execute


def test_intensity_lies_on_the_two_sides_of_the_ridge():
    prefill, decode = ch01.workload(ch01.BIG, (0, PROMPT)), ch01.workload(ch01.BIG, (PROMPT, 1))
    ridge = ch01.BIG.hardware.peak_flops / ch01.BIG.hardware.bandwidth
    assert decode["intensity"] < 2 < ridge < prefill["intensity"]
    assert all(0 < share < 1 for w in (prefill, decode) for share in w["shares"])
    measured = ch01.workload(ch01.BIG, (0, PROMPT), 2 * prefill["seconds"])
    assert measured["shares"][0] == pytest.approx(prefill["shares"][0] / 2) and measured["flops"] == prefill["flops"]
    # By hand, of 8 GPUs: 2 FLOPs a weight and token of the layers, 4 d a (query, key) pair and head, a row of logits.
    m, pairs = ch01.BIG.model, PROMPT * (PROMPT + 1) // 2
    weights = m.num_hidden_layers * m.hidden_size * (2 * 64 * 128 + 2 * 8 * 128 + 3 * m.intermediate_size)
    by_hand = 2 * weights * PROMPT + 4 * 128 * 64 * pairs * m.num_hidden_layers + 2 * m.hidden_size * m.vocab_size
    assert 8 * prefill["flops"] == by_hand and prefill["intensity"] == intensity(ch01.BIG, work_of([(0, PROMPT)]))


def chunks_of(records, name):
    return [part.scheduled for record in records for part in record.requests if part.request_id == name]


def test_a_long_prefill_makes_the_others_wait_unless_it_is_cut(prompt):
    found = ch01.collisions(prompt)
    for where in ("here", "70B"):
        whole, cut = found[where, "whole"], found[where, "chunked"]
        assert len(whole["itls"]) == len(cut["itls"]) == 47
        assert chunks_of(whole["records"], "long") == [PROMPT, 1, 1, 1]
        # Four decodes go first in each step and leave the rest of the budget to the newcomer.
        chunks = chunks_of(cut["records"], "long")
        assert chunks[:-4] == [ch01.CHUNK - 4] * (len(chunks) - 4) and sum(chunks[:-3]) == PROMPT
        assert all(record.used <= ch01.CHUNK for record in cut["records"])
    # In virtual time it can be said to the microsecond: the worst gap is the step with the whole prompt in it.
    whole, cut = found["70B", "whole"], found["70B", "chunked"]
    assert max(whole["itls"]) == pytest.approx(ch01.BIG.step_time(work_of([(QUESTION + 11, 1)] * 4 + [(0, PROMPT)])))
    assert whole["ttft"] == pytest.approx(max(whole["itls"]))
    assert max(cut["itls"]) < max(whole["itls"]) / 3 and cut["ttft"] > whole["ttft"]
    here = found["here", "whole"]
    assert max(here["itls"]) == here["itls"][11], "the gap in which the prompt was computed"


def test_collide_takes_any_engine(prompt):
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=4096)
    found = ch01.collide(SimulatedEngine(Ledger(), config), prompt, others=2, head_start=3, tokens=8)
    assert len(found["itls"]) == 7 and {part.request_id for r in found["records"] for part in r.requests} == {
        "short-0", "short-1", "long"}


def test_collisions_are_measured_warm_and_in_turns(prompt, monkeypatch):
    """A round that doesn't count, then rounds in which both ways take turns; the least disturbed is taken."""
    played, worst = [], iter([1, 1, 2, 2, 7, 5, 4, 6])      # simulated; warming up; two rounds

    def collide(engine, _):
        played.append((not isinstance(engine, SimulatedEngine), engine.scheduler.config.enable_chunked_prefill))
        return {"itls": [.5, next(worst)]}
    monkeypatch.setattr(ch01, "collide", collide)
    found = ch01.collisions(prompt)
    assert played == [(False, False), (False, True)] + 3 * [(True, False), (True, True)]
    assert max(found["here", "whole"]["itls"]) == 4 and max(found["here", "chunked"]["itls"]) == 5


@pytest.mark.parametrize("decodes", [0, 64, 240])
def test_decodes_squeeze_a_prefill(decodes):
    left, steps, ttft = ch01.squeeze(decodes)
    assert left == ch01.CHUNK - decodes and steps == -(-PROMPT // left)
    assert ttft > steps * ch01.BIG.step_time(work_of([(0, 1)]))


# -- 3. The batch curve

def test_simulated_curve_has_the_articles_form():
    results = ch01.simulated_curve((1, 8, 64))
    throughput, latency = [[r[key] for r in results] for key in ("output_throughput", "mean_e2el_ms")]
    assert throughput == sorted(throughput) and latency == sorted(latency)
    assert throughput[1] / throughput[0] < 8, "eight times the batch is less than eight times the throughput"
    assert throughput[2] / throughput[1] < throughput[1] / throughput[0], "it saturates"
    assert all(r["completed"] == 3 * r["batch"] and r["cached_tokens"] == 0 for r in results)
    chart = ch01.relative_chart("t", results, str)
    assert [max(ys) for ys in chart.series.values()] == pytest.approx([100, 100]) and chart.xs == [1, 8, 64]


def test_the_slo_cuts_where_it_says():
    results = [{"batch": b, "output_throughput": b, "mean_e2el_ms": b, "p99_ttft_ms": 1, "p99_tpot_ms": 10 * b}
               for b in (1, 2, 3, 4)]
    assert ch01.relative_chart("t", results, str).region[:2] == (1, 3)
    results[0]["p99_ttft_ms"] = 2 * ch01.SLO["ttft"]
    assert ch01.relative_chart("t", results, str).region[:2] == (2, 3)
    assert ch01.relative_chart("t", results[3:], str).region is None


def test_measured_curve_counts(prompt):
    results = ch01.measured_curve(prompt, (1, 3), tokens=4)
    assert [(r["batch"], r["completed"], r["total_output_tokens"], r["total_input_tokens"]) for r in results] == [
        (1, 1, 4, QUESTION), (3, 3, 12, 3 * QUESTION)]


def test_the_articles_curve_is_a_sketch():
    """The chapter says how far the simulation is from it, at its last batch."""
    shares = ch01.relative(ch01.simulated_curve((1, 32, 256)))
    assert len(ch01.ARTICLE["throughput"]) == len(ch01.ARTICLE["latency"]) == ch01.BATCHES.index(32) + 1
    assert shares["throughput"][1] < ch01.ARTICLE["throughput"][-1] and max(shares["latency"]) == 100


def test_a_burst_is_let_in_or_not():
    """8 run: all of 24 are answered later; 4 may wait, so in one moment only 4 of 24 get in."""
    all_run, refused = ch01.burst(24)
    assert all_run["completed"] == 24 and not refused
    queued, refused = ch01.burst(24, max_num_seqs=8)
    assert queued["completed"] == 24 and not refused and queued["p99_tpot_ms"] < all_run["p99_tpot_ms"]
    assert queued["p99_ttft_ms"] > all_run["p99_ttft_ms"]
    some, refused = ch01.burst(24, max_num_seqs=8, max_num_waiting=4)
    assert some["completed"] == 4 and len(refused) == 20 and all("--max-num-waiting" in words for words in refused)
    assert some["p99_ttft_ms"] < all_run["p99_ttft_ms"]


# -- 4. Static against continuous batching

@pytest.fixture(scope="module")
def both(prompt):
    jobs = ch01.make_jobs(prompt)
    with LLM(enable_prefix_caching=False, max_num_seqs=ch01.SEATS) as llm:
        static = ch01.static_batching(llm.engine, jobs)
        return jobs, static, ch01.continuous_batching(llm, jobs)


def test_batching_changes_no_text(both, prompt):
    jobs, static, continuous = both
    with LLM(enable_prefix_caching=False) as llm:
        alone = {i: ch01.live(llm, *job)[0].outputs[0].token_ids for i, job in enumerate(jobs)}
    assert static.tokens == alone and continuous.tokens == alone


def test_padding_is_never_read(prompt):
    """The same with NaN in every KV slot beforehand."""
    jobs = ch01.make_jobs(prompt)[:6]
    with LLM(enable_prefix_caching=False) as llm:
        clean = ch01.static_batching(llm.engine, jobs).tokens
        llm.engine.executor.kv_cache.fill_(float("nan"))
        assert ch01.static_batching(llm.engine, jobs).tokens == clean
        assert all(k[0].isnan().all() for k in llm.engine.executor.kv_cache.k), "block 0 is the null block, nobody's"


def test_what_static_batching_wastes(both):
    jobs, static, continuous = both
    groups = [jobs[i:i + ch01.SEATS] for i in range(0, len(jobs), ch01.SEATS)]
    steps = sum(max(n for _, n in group) for group in groups)
    padding = sum(max(len(p) for p, _ in group) - len(p) for group in groups for p, _ in group)
    dead = sum(max(n for _, n in group) - n for group in groups for _, n in group)
    figures = static.figures(jobs)
    assert (figures["steps"], figures["wasted"]) == (steps, padding + dead)
    assert "".join(static.seats).count(".") == dead > 0 and padding > 0
    assert figures["computed"] - figures["wasted"] == sum(len(p) + n - 1 for p, n in jobs)
    expected = []                        # what the ledger is told: padded prompts, then each row from its own length on
    for group in groups:
        expected.append([(0, max(len(p) for p, _ in group))] * len(group))
        expected += [[(len(p) + i, 1) for p, _ in group] for i in range(max(n for _, n in group) - 1)]
    assert static.chunks == expected


def test_continuous_batching_wastes_nothing(both):
    jobs, static, continuous = both
    figures = continuous.figures(jobs)
    assert figures["wasted"] == 0 and figures["steps"] < len(static.chunks)
    assert figures["70B"] > static.figures(jobs)["70B"]
    assert figures["computed"] == sum(len(p) + n - 1 for p, n in jobs)


def test_seats(both):
    """Every job sits in one seat, without a gap, for as many steps as it has tokens; a free seat is taken at once."""
    jobs, static, continuous = both
    for run in (static, continuous):
        for i, (_, n) in enumerate(jobs):
            letter = chr(ord("a") + i)
            pieces = [piece for row in run.seats for piece in re.findall(f"{letter}+", row.lower())]
            assert pieces == [letter * n] and "".join(run.seats).count(letter.upper()) == 1
        assert len({len(row) for row in run.seats} | {len(run.chunks)}) == 1
    last_join = max(row.index(c) for row in continuous.seats for c in row if c.isupper())
    assert not any(" " in row[:last_join] for row in continuous.seats)
    sets, (least, most), mixed = continuous.changes()
    columns = ["".join(column) for column in zip(*continuous.seats)]
    assert sets == len({frozenset(column.lower()) - {" "} for column in columns})
    assert 0 < least < most <= sum(sorted(len(p) + n for p, n in jobs)[-ch01.SEATS:])
    assert mixed == sum(column != column.lower() and column != column.upper() for column in columns)


def test_rectangle_is_a_forward_batch():
    """Rows of two, from positions 0 and 3; block size 4, tables 1 2 and 3 4."""
    token_ids, start, tables = torch.tensor([[5, 6], [7, 8]]), torch.tensor([0, 3]), torch.tensor([[1, 2], [3, 4]])
    batch = ch01.rectangle(token_ids, start, tables, 4, torch.tensor([0, 1]))
    assert batch.positions.tolist() == [0, 1, 3, 4] and batch.slot_mapping.tolist() == [4, 5, 15, 16]
    assert batch.query_start_loc.tolist() == [0, 2, 4] and batch.seq_lens.tolist() == [2, 5]
    assert batch.logits_indices.tolist() == [0, 3] and batch.token_ids.tolist() == [5, 6, 7, 8]


def test_both_ways_of_batching_have_the_same_conditions(prompt, monkeypatch):
    """One engine, a round to warm up, turns; and each forward pass has the engine's number of threads."""
    seen, jobs = [], ch01.make_jobs(prompt)[:5]
    before, threads = torch.get_num_threads(), []
    for name in ("static_batching", "continuous_batching"):
        def watched_way(engine, some, way=getattr(ch01, name), name=name):
            executor = getattr(engine, "engine", engine).executor
            execute = executor.execute
            executor.execute = lambda batch: (threads.append((name, torch.get_num_threads())), execute(batch))[1]
            seen.append((name, id(executor)))
            try:
                return way(engine, some)
            finally:
                executor.execute = execute
        monkeypatch.setattr(ch01, name, watched_way)
    torch.set_num_threads(before + 1)          # not the engine's: whoever doesn't set it is found out
    try:
        runs, said = ch01.both_ways(jobs)
    finally:
        torch.set_num_threads(before)
    assert [name for name, _ in seen] == 4 * ["static_batching", "continuous_batching"]
    assert len({executor for _, executor in seen}) == 1
    assert {n for _, n in threads} == {said} and {name for name, _ in threads} == {name for name, _ in seen}
    assert runs["static"].tokens == runs["continuous"].tokens


def test_memory_reserved_or_block_by_block():
    """64 blocks of 16: room for 4 x 250 tokens, or for 16 x 50. Who reserves is never preempted, who grows computes
    again what was thrown away."""
    assert ch01.at_once(QUESTION + ch01.MOST) == 4 and ch01.at_once(QUESTION) == 16
    (reserved, records), (grown, steps) = ch01.fill_pool(True), ch01.fill_pool(False)
    assert reserved["preempted"] == reserved["again"] == 0 == sum(len(record.preempted) for record in records)
    assert max(record.running for record in records) == 4 and max(record.running for record in steps) == 16
    letters = "".join(letter for row in phases(steps).values() for letter in row.values())
    assert grown["preempted"] == letters.count("x") > 0 and "R" in letters
    assert grown["again"] > 0 and grown["seconds"] < reserved["seconds"] and grown["used"] > reserved["used"]
    thrown_away, held = 0, {}
    for record in steps:
        thrown_away += sum(held[name] for name in record.preempted)
        held |= {part.request_id: part.computed + part.scheduled for part in record.requests}
    assert grown["again"] == thrown_away


# -- 5 and 6

def test_elsewhere():
    rows = ch01.elsewhere()
    kv, weights, prefill, decode, fit = rows["the running example"]
    assert kv == 327_680 and round(weights / 1e9, 1) == 17.6
    assert rows["70B without GQA"][0] == 8 * kv and rows["70B without GQA"][4] < fit
    assert rows["70B on 8 B200s"][2] < prefill < rows["70B on 8 A100s"][2]


def test_the_map_names_what_exists():
    for _, chapters, where in ch01.MAP:
        for name in re.findall(r"\w+\.py", where):
            assert (ROOT / name).exists() or (ROOT / "chapters/tools" / name).exists(), name
        assert all(2 <= int(n) <= 14 for n in chapters.split(", "))


# -- What all walk-throughs share

@pytest.mark.parametrize("value, words", [(9.67e9, "9.67 GFLOP"), (999, "999 FLOP"), (1000, "1 kFLOP"),
                                          (35.1e12, "35.1 TFLOP"), (0, "0 FLOP")])
def test_si(value, words):
    assert si(value, "FLOP") == words


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("width", [40, 80])
def test_a_page_keeps_to_its_width(width, lang, tmp_path):
    out = io.StringIO()
    page = Page("ch01_paradigm", "Title", None, ["--width", str(width), "--save", str(tmp_path), "--lang", lang], out)
    page.start("Three changes", 12.3)
    page.section(4, "Three changes")
    page.say("words " * 40)
    page.say("Three changes " * 9)
    page.table(Sentence("Three real steps"), ["", "steps>", "at once>"], [("a label", 1, Sentence("kept"))] * 3,
               "a_table")
    page.show(Seats(["Aaa" * 40, "Bb." * 40]), "seats")
    page.end(Sentence("The chunked run, step by step:"))
    from rich.cells import cell_len
    shown = out.getvalue()
    assert max(cell_len(line) for line in shown.splitlines()) <= width
    assert {path.name for path in tmp_path.iterdir()} == {"a_table.svg", "seats.svg"}
    chinese = ["三个根本变化", "座位 1", "可同时容纳", "满足", "分块的那次运行"]
    assert [words in shown for words in chinese] == 5 * [lang == "zh"] or lang == "en" and "seat 1" in shown
    for name in ("a_table", "seats"):
        picture = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
        assert bool(re.search("[\u4e00-\u9fff]", picture)) == (lang == "zh")
    assert page.args.tp == 8 and greedy(3).max_tokens == 3


def test_a_table_in_chinese_stands_in_line():
    """Each column of numbers ends at one place, whatever characters stand to its left."""
    out = io.StringIO()
    page = Page("ch01_paradigm", "Title", None, ["--width", "80", "--lang", "zh"], out)
    page.table(Sentence("Three changes"), ["question", "steps>"],
               [(Sentence("kept"), 1), ("ab", 234), ("排队 b, c, d", 56)])
    from rich.cells import cell_len
    lines = [line.rstrip() for line in out.getvalue().splitlines() if line.strip()][1:]
    assert len({cell_len(line) for line in lines if "─" not in line}) == 1


def test_options_of_a_notebook_hold_unless_something_is_typed(monkeypatch):
    assert parse_args("", [], {"tp": 2, "lang": "zh", "save": None}).tp == 2
    args = parse_args("", ["--tp", "4"], {"tp": 2, "lang": "zh", "save": None})
    assert (args.tp, args.lang, args.save) == (4, "zh", None)
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    monkeypatch.setattr(sys, "argv", ["kernel", "-f", "connection.json"])
    assert parse_args("", None, {"tp": 2, "lang": "en"}).tp == 2


def test_a_page_that_is_silent_says_what_it_does(capfd, monkeypatch):
    monkeypatch.setattr("page.SILENCE", .2)
    page = Page("ch01_paradigm", "Title", None, ["--lang", "zh"], io.StringIO())
    page.doing("simulating a burst")
    time.sleep(.9)
    page.end()
    said = capfd.readouterr().err.splitlines()
    assert 2 <= len(said) <= 5 and all(re.fullmatch("……(正在启动|正在模拟突发请求)，已用 \\d 秒", line) for line in said)
    time.sleep(.5)
    assert not capfd.readouterr().err, "it has ended"


def test_a_folder_that_cannot_be_written_is_named_before_the_walk_through(tmp_path, capsys):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "x"
    with pytest.raises(SystemExit, match="2"):
        Page("ch01_paradigm", "Title", None, ["--save", str(path)])
    shown = capsys.readouterr()
    assert not shown.out and shown.err.endswith(f": error: --save {path}: Not a directory\n")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("width, hint", [(20, True), (TABLES - 1, True), (TABLES, False), (100, False)])
def test_a_page_too_narrow_for_its_tables_says_so(width, hint):
    out = io.StringIO()
    Page("ch01_paradigm", "Title", None, ["--width", str(width), "--lang", "en"], out).start("Three changes", 1)
    assert (f"--width {TABLES}" in " ".join(out.getvalue().split())) == hint


@pytest.mark.parametrize("tp", range(-1, 33))
def test_a_page_takes_the_ranks_that_the_tiny_model_has_room_for(tp):
    def works(function, *arguments):
        try:
            return function(*arguments) is not False
        except (ValueError, SystemExit):
            return False
    config = LlamaConfig.from_folder(ch01.EMBEDDED_MODEL)
    assert works(parse_args, "", [f"--tp={tp}"]) == works(config.check_tensor_parallel, tp)


def cells(path):
    """[(head, lines)] of a walk-through, without the empty lines at an end."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# %%"):
            found.append((line, []))
        found[-1][1].append(line)
    return [(head, "\n".join(lines).rstrip().split("\n")) for head, lines in found]


@pytest.mark.parametrize("path", sorted((ROOT / "chapters").glob("ch??_*[!h].py")), ids=lambda path: path.stem)
def test_a_walk_through_opens_as_a_notebook(path):
    """It begins with its title, as prose; then the options; prose before each section; no cell over 40 lines."""
    if path.name.endswith(".zh.py"):
        return
    all_cells = cells(path)
    assert not [head for head, lines in all_cells if len(lines) > 40]
    (first, title), (_, options) = all_cells[:2]
    assert first == "# %% [markdown]" and title[1] == '"""' and title[2].startswith("# Chapter") and title[-1] == '"""'
    assert any(line.startswith("OPTIONS = {") for line in options)
    prose = [lines for head, lines in all_cells if "[markdown]" in head]
    assert sum(lines[2].startswith("## ") for lines in prose) == 6
    for lines in prose[1:]:
        assert re.search("[\u4e00-\u9fff]{4}", "\n".join(lines)), f"in English only: {lines[2]}"
    assert all("__name__" in "\n".join(lines) for _, lines in all_cells if "page.say(" in "\n".join(lines))


def read_live(process):
    """Its lines as they come on both streams, each with the seconds from one to the next."""
    lines, begin = [], time.perf_counter()
    lock = threading.Lock()

    def read(stream, name):
        for line in stream:
            with lock:
                lines.append((time.perf_counter() - begin, name, line.rstrip("\n")))
    threads = [threading.Thread(target=read, args=pair) for pair in ((process.stdout, "out"), (process.stderr, "err"))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return lines


@pytest.mark.timeout(400)
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_whole_chapter_runs(lang, tmp_path):
    """As a reader runs it, offline and in a narrow terminal: nothing cut, nothing silent, all of it in one language."""
    script = pathlib.Path(ch01.__file__)
    command = [sys.executable, script, "--tp", "1", "--save", tmp_path, "--width", str(TABLES), "--lang", lang]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               encoding="utf-8")
    lines = read_live(process)
    errors = [line for _, name, line in lines if name == "err"]
    assert process.wait(360) == 0, "\n".join(errors[-30:])
    progress = re.compile("… .*, \\d+ s" if lang == "en" else "…….*，已用 \\d+ 秒")
    assert all(progress.fullmatch(line) for line in errors), errors
    shown = [line for _, name, line in lines if name == "out"]
    words = " ".join(" ".join(shown).split())
    # The first line says how long; the last says how long it was.
    seconds = re.search(r"\(about (\d+) s in all" if lang == "en" else "（全程约 (\\d+) 秒", words)
    took, said = re.search(r"(\d+) seconds; the first line said (\d+)" if lang == "en" else
                           "用时 (\\d+) 秒；第一行的预计是 (\\d+) 秒", shown[-1]).groups()
    assert seconds.group(1) == said and int(took) / 5 < int(said) < 5 * int(took)
    assert words.count("…") == 1 and "…”" in words, "a table is cut short, or the quotation does not say that it is"
    (read,) = re.findall(r"\[2050\] \[2051\] \[(\d+)\]", words)
    pattern = (r"the first request reads (\d+) positions, its prompt's and (\d+) of its answer" if lang == "en" else
               r"第一个请求读 ?(\d+) ?个位置，即它的 ?prompt ?加上 ?(\d+)")
    first, answer = re.search(pattern, words.replace("第 一", "第一").replace("一 个", "一个")).groups()
    assert int(first) + QUESTION == int(read) and PROMPT + int(answer) == int(first)
    gap = max(b - a for (a, _, _), (b, _, _) in zip(lines, lines[1:]))
    assert gap < 3 + 3, "silence"                   # and as much again for a machine that is busy
    pictures = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.svg")}
    wanted = set(re.findall(r'"(ch01_\w+)"', script.read_text(encoding="utf-8"))) - {"ch01_paradigm"}
    assert {f"{name}.svg" for name in wanted} <= pictures.keys() and len(pictures) > len(wanted)
    assert all(picture.startswith("<svg") for picture in pictures.values())
    if lang == "zh":
        english = [line for line in shown if re.search(r"\b(the|of|is|with|and)\b", line) and "它写的" not in line]
        quoted = 8                                  # the model's answer, and the refusal, are quoted as they are
        assert len(english) <= quoted, english
        assert all(re.search("[\u4e00-\u9fff]", picture) for picture in pictures.values())
    else:
        assert not [name for name, picture in pictures.items() if re.search("Batch Size 对|座位|等待", picture)]
