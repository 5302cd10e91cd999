"""Chapter 1's walk-through: what its functions compute, then the whole of it as a reader runs it."""
import io
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import ch01_paradigm as ch01
from conftest import ROOT
from checkpoint import LlamaConfig
from ledger import QUESTION, SYSTEM, Ledger, intensity, work_of
from nano_serve import LLM
from page import TABLES, Page, Seats, greedy, parse_args, running_example, si, watched
from scheduler import SchedulerConfig
from simulator import SimulatedEngine

PROMPT = SYSTEM + QUESTION


@pytest.fixture(scope="module")
def prompt():
    with LLM() as llm:
        return running_example(llm)


# -- 1. One request's life

def test_the_running_example_has_the_articles_lengths(prompt):
    assert len(prompt) == PROMPT == 2050


def test_life_of_a_request(prompt):
    """The article's counts: 2048 + 2 tokens of prefill, 129 blocks, then a token a step; 2050 + 40 - 1 have KV."""
    with LLM(enable_prefix_caching=False) as llm:
        output, records = ch01.live(llm, prompt, 40)
        again, seconds = ch01.nothing_kept(llm, prompt, 2)
        assert llm.engine.scheduler.kv_cache_manager.num_free_blocks == records[0].total_blocks, "something was kept"
    assert again == output.outputs[0].token_ids[:2] and len(seconds) == 2
    life = ch01.life_of(records, output.metrics)
    assert [(step, done, blocks) for _, step, _, done, blocks in life] == [
        ("", "", 0), ("0", "0→2048", 128), ("1", "2048→2050", 129), ("2", "2050→2051", 129),
        ("3-39", "2051→2088", 131), ("40", "2088→2089", 131), ("", "", 0)]
    assert sum(record.used for record in records) == PROMPT + 40 - 1


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


# -- 3. The batch curve

def test_simulated_curve_has_the_articles_form():
    results = ch01.simulated_curve((1, 8, 64))
    throughput, latency = [[r[key] for r in results] for key in ("output_throughput", "mean_e2el_ms")]
    assert throughput == sorted(throughput) and latency == sorted(latency)
    assert throughput[1] / throughput[0] < 8, "eight times the batch is less than eight times the throughput"
    assert throughput[2] / throughput[1] < throughput[1] / throughput[0], "it saturates"
    assert all(r["completed"] == 3 * r["batch"] and r["cached_tokens"] == 0 for r in results)
    chart = ch01.relative_chart("t", results)
    assert [max(ys) for ys in chart.series.values()] == pytest.approx([100, 100]) and chart.xs == [1, 8, 64]


def test_the_slo_cuts_where_it_says():
    results = [{"batch": b, "output_throughput": b, "mean_e2el_ms": b, "p99_ttft_ms": 1, "p99_tpot_ms": 10 * b}
               for b in (1, 2, 3, 4)]
    assert ch01.relative_chart("t", results).region[:2] == (1, 3)
    results[0]["p99_ttft_ms"] = 2 * ch01.SLO["ttft"]
    assert ch01.relative_chart("t", results).region[:2] == (2, 3)
    assert ch01.relative_chart("t", results[3:]).region is None


def test_measured_curve_counts(prompt):
    results = ch01.measured_curve(prompt, (1, 3), tokens=4)
    assert [(r["batch"], r["completed"], r["total_output_tokens"], r["total_input_tokens"]) for r in results] == [
        (1, 1, 4, QUESTION), (3, 3, 12, 3 * QUESTION)]


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


# -- 5 and 6

def test_elsewhere():
    rows = ch01.elsewhere()
    kv, weights, prefill, decode, fit = rows["the running example"]
    assert kv == 327_680 and round(weights / 1e9, 1) == 17.6
    assert rows["70B without GQA"][0] == 8 * kv and rows["70B without GQA"][4] < fit
    assert rows["70B on 8 B200s"][2] < prefill < rows["70B on 8 A100s"][2]


def test_the_map_names_what_exists():
    for _, _, chapters, where in ch01.MAP:
        for name in re.findall(r"\w+\.py", where):
            assert (ROOT / name).exists() or (ROOT / "chapters/tools" / name).exists(), name
        assert all(1 <= int(n) <= 10 for n in chapters.split(", "))


# -- What all walk-throughs share

@pytest.mark.parametrize("value, words", [(9.67e9, "9.67 GFLOP"), (999, "999 FLOP"), (1000, "1 kFLOP"),
                                          (35.1e12, "35.1 TFLOP"), (0, "0 FLOP")])
def test_si(value, words):
    assert si(value, "FLOP") == words


@pytest.mark.parametrize("width", [40, 80])
def test_a_page_keeps_to_its_width(width, tmp_path):
    out = io.StringIO()
    page = Page("Title\n\nText\n", ["--width", str(width), "--save", str(tmp_path)], out)
    page.section(1, "A heading that is rather long for a narrow terminal", "一个很长的标题")
    page.say("words " * 40)
    page.table("A table", ["what", "value>", "another>"], [("a label", "1", "2")] * 3, "a_table")
    page.show(Seats(["Aaa" * 40, "Bb." * 40]), "seats")
    from rich.cells import cell_len
    assert max(cell_len(line) for line in out.getvalue().splitlines()) <= width
    assert {path.name for path in tmp_path.iterdir()} == {"a_table.svg", "seats.svg"}
    assert page.args.tp == 8 and greedy(3).max_tokens == 3


def test_a_folder_that_cannot_be_written_is_named_before_the_walk_through(tmp_path, capsys):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "x"
    with pytest.raises(SystemExit, match="2"):
        Page("Title\n\nText\n", ["--save", str(path)])
    shown = capsys.readouterr()
    assert not shown.out and shown.err.endswith(f": error: --save {path}: Not a directory\n")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("width, hint", [(20, True), (TABLES - 1, True), (TABLES, False), (100, False)])
def test_a_page_too_narrow_for_its_tables_says_so(width, hint):
    out = io.StringIO()
    Page("Title\n\nText\n", ["--width", str(width)], out)
    assert (f"--width {TABLES}" in out.getvalue()) == hint


@pytest.mark.parametrize("tp", range(-1, 33))
def test_a_page_takes_the_ranks_that_the_tiny_model_has_room_for(tp):
    def works(function, *arguments):
        try:
            return function(*arguments) is not False
        except (ValueError, SystemExit):
            return False
    config = LlamaConfig.from_folder(ch01.EMBEDDED_MODEL)
    assert works(parse_args, "", [f"--tp={tp}"]) == works(config.check_tensor_parallel, tp)


@pytest.mark.timeout(400)
def test_the_whole_chapter_runs(tmp_path):
    """As a reader runs it, offline and in a terminal of 80 columns."""
    script = pathlib.Path(ch01.__file__)
    result = subprocess.run([sys.executable, str(script), "--tp", "1", "--save", str(tmp_path), "--width", str(TABLES)],
                            cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", timeout=360)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "…" not in result.stdout, "a table is cut short"
    words = " ".join(result.stdout.split())
    (read,) = re.findall(r"KV positions read \[2050\] \[2051\] \[(\d+)\]", words)
    first, answer, newcomer, total = re.search(
        r"the first request reads (\d+) positions, its prompt's and (\d+) of its answer; "
        r"the newcomer's (\d+) make that (\d+)", words).groups()
    assert read == total and int(first) + int(newcomer) == int(total) and PROMPT + int(answer) == int(first)
    assert f"after {int(answer) - 1} decodes" in words, "its own step computes one more"
    pictures = {path.name for path in tmp_path.glob("*.svg")}
    wanted = set(re.findall(r'"(ch01_\w+)"', script.read_text(encoding="utf-8")))
    assert {f"{name}.svg" for name in wanted} <= pictures and len(pictures) > len(wanted)
    assert all(path.read_text(encoding="utf-8").startswith("<svg") for path in tmp_path.glob("*.svg"))
