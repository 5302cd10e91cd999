"""Chapter 2's walk-through: what its functions compute, then the whole of it as a reader runs it, in both languages."""
import math
import pathlib
import re
import subprocess
import sys
import types

import numpy as np
import pytest

import ch02_metrics as ch02
import loads
from conftest import ROOT
from ledger import OUTPUT, QUESTION, SYSTEM, work_of
from metrics import RequestFuncOutput
from nano_serve import LLM
from page import TABLES, running_example

PROMPT = SYSTEM + QUESTION


@pytest.fixture(scope="module")
def prompt():
    with LLM() as llm:
        return running_example(llm)


@pytest.fixture(scope="module")
def sweep():
    return ch02.sweep_rates()


# -- 1. Four dimensions

def test_each_knob_moves_what_the_chapter_says():
    found = ch02.four_dimensions()
    base, rate, seats, budget = (found[name] for name in ("base", "rate", "seats", "budget"))
    assert rate["output_throughput"] > 1.2 * base["output_throughput"] and rate["kept"] < base["kept"]
    assert seats["median_ttft_ms"] > 5 * base["median_ttft_ms"] and budget["p99_itl_ms"] < base["p99_itl_ms"] / 2
    for key in ch02.DIMENSIONS:                   # no knob moves all of them, and each is moved by one
        assert any(not 0.9 <= found[k][key] / base[key] <= 1.1 for k in found), key


@pytest.mark.parametrize("value, cell", [(200, "~200↑"), (109, "~109 "), (100, "~100 "), (89, "~89↓")])
def test_an_arrow_where_it_moved(value, cell):
    assert ch02.moved("median_ttft_ms", value, 100) == cell and ch02.moved("mfu", 0.2, 0.1) == "20.0%↑"


# -- 2. The time line

def test_the_time_line_and_three_ways(prompt):
    with LLM() as llm:
        sent, scheduled, came = ch02.time_line(llm.engine, prompt[:80], 30)
    assert sent <= scheduled < came[0] and came == sorted(came) and len(came) == 30
    hand, ours = ch02.by_hand(sent, came), ch02.by_metrics(sent, came)
    gaps = np.diff(came)
    expected = {"TTFT": came[0] - sent, "TPOT": (came[-1] - came[0]) / 29, "mean ITL": gaps.mean(),
                "P99 ITL": np.percentile(gaps, 99), "E2EL": came[-1] - sent}
    assert hand == pytest.approx(expected, rel=1e-9) and ours == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("n", [2, 3, 5, 100, 101, 300])
def test_p99_by_hand_is_numpys(n):
    came = list(np.cumsum(np.random.default_rng(n).random(n)))
    assert ch02.by_hand(0.0, came)["P99 ITL"] == pytest.approx(np.percentile(np.diff(came), 99), rel=1e-12)


def test_vllm_says_the_same(monkeypatch):
    """Where it is installed. Elsewhere None is said; and whatever it computes is handed on field by field."""
    came = [2.0, 2.5, 2.75, 4.0]
    theirs = ch02.by_vllm(1.0, came)
    assert theirs is None or theirs == pytest.approx(ch02.by_hand(1.0, came), rel=1e-9)
    modules = {name: types.ModuleType(name) for name in ("vllm", "vllm.benchmarks", "vllm.benchmarks.lib",
               "vllm.benchmarks.lib.endpoint_request_func", "vllm.benchmarks.serve")}
    modules["vllm.benchmarks.lib.endpoint_request_func"].RequestFuncOutput = types.SimpleNamespace

    def calculate_metrics(requests, outputs, seconds, tokenizer, percentiles, goodput):
        assert (outputs[0].itl, outputs[0].output_tokens, outputs[0].latency, seconds) == ([.5, .25, 1.25], 4, 3.0, 3.0)
        return types.SimpleNamespace(mean_ttft_ms=1.0, mean_tpot_ms=2.0, mean_itl_ms=3.0, percentiles_itl_ms=[(99, 4.0)],
                                     mean_e2el_ms=5.0), [4]
    modules["vllm.benchmarks.serve"].calculate_metrics = calculate_metrics
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert list(ch02.by_vllm(1.0, came).values()) == pytest.approx([.001, .002, .003, .004, .005])


def test_chunks_are_no_tokens():
    came = [2.0, 3.0, 4.0, 5.0, 6.0]
    plain = ch02.in_chunks(1.0, came)
    assert plain == {"TTFT": 1.0, "TPOT": 1.0, "gaps": 4, "median ITL": 1.0, "E2EL": 5.0}
    merged = ch02.in_chunks(1.0, came, merged=2)                     # at 3, 5 and 6
    assert merged == {"TTFT": 2.0, "TPOT": 0.75, "gaps": 2, "median ITL": 1.5, "E2EL": 5.0}
    early = ch02.in_chunks(1.0, came, role=1.0)
    assert early["TTFT"] == 0 and early["TPOT"] == 1.25 and early["E2EL"] == 5.0 and early["gaps"] == 5
    with_first = ch02.in_chunks(1.0, came, role=2.0)
    assert with_first | {"gaps": 4} == plain and with_first["gaps"] == 5


# -- 3. Misreadings

def test_ttft_is_mostly_queue_under_load(sweep):
    low, high = (ch02.split_ttft(sweep[rate][0]) for rate in (ch02.RATES[0], ch02.RATES[-1]))
    assert high[0] > 5 * low[0] and high[2] < 3 * low[2] and high[1] > high[0] / 2
    one = RequestFuncOutput(1, 1.0, [4.0, 5.0], "length", queue_time=2.0)
    assert ch02.split_ttft([one]) == [3000, 2000, 1000]


def test_tpot_hides_a_stall(prompt):
    found = ch02.smooth_or_not(prompt)
    assert set(found) == {(where, how) for where in ("here", "70B") for how in ("whole", "chunks")}
    gaps = {key: np.diff(times) for key, times in found.items()}
    assert all(len(g) == 63 for g in gaps.values())
    assert max(gaps["70B", "whole"]) > 4 * max(gaps["70B", "chunks"])
    assert gaps["70B", "whole"].mean() == pytest.approx(gaps["70B", "chunks"].mean(), rel=0.1)
    assert max(gaps["here", "whole"]) > 5 * np.median(gaps["here", "whole"])


def test_utilisation_is_no_efficiency():
    rows = {batch: (seconds, mfu, mbu) for batch, seconds, mfu, mbu in ch02.utilisation()}
    one, work = ch02.BIG, work_of([(PROMPT, 1)])
    seconds, mfu, mbu = rows[1]
    assert seconds == one.step_time(work) and mfu == pytest.approx(one.model_flops(work) / seconds / 8 / 989.4e12)
    assert mbu == pytest.approx(one.model_bytes(work) / seconds / 8 / 3.35e12)
    assert mfu < 0.01 < rows[32][1] < rows[64][1] < rows[256][1] < rows[None][1] < 1      # per mille, then per cent
    assert rows[None][2] < 0.1 and all(0.3 < rows[b][2] < 1 for b in (1, 32, 64, 256))


def test_requests_a_second_say_nothing_of_lengths():
    kinds = ch02.same_rate(n=60)
    tokens = {kind: r["output_throughput"] / r["request_throughput"] for kind, r in kinds.items()}
    assert tokens["the running example"] == pytest.approx(OUTPUT) and tokens["code completion"] < 40
    assert all(r["completed"] == 60 for r in kinds.values())


def test_a_fuller_pool_serves_worse():
    tight = ch02.pools((1.0, 0.6), rate=10)
    (_, enough, first), (_, less, second) = tight
    assert first["preemptions"] == first["recomputed"] == 0 and enough > less
    assert second["preemptions"] > 0 and second["recomputed"] > 0 and second["kv_use"] > first["kv_use"]
    assert second["p99_ttft_ms"] > 2 * first["p99_ttft_ms"] and second["kept"] < first["kept"]


# -- 4. Load

def test_coordinated_omission():
    found, late = ch02.omission()
    assert late > 10 and all(sent <= due for sent, due, _ in found.values())
    sent, due, opened = found[99]
    assert sent < 1 < ch02.STALL / 2 < min(due, opened), "the freeze shows only from when requests were due"


def test_a_freeze_is_one_freeze():
    server = loads.Server(requests=1)
    requests = loads.real_lengths(n=6)
    calm = server.send(requests, [0.0] * 6)[1]["duration"]
    frozen = server.send(requests, [0.0] * 6, progress=loads.freeze(calm / 2, 3.0))[1]["duration"]
    assert frozen == pytest.approx(calm + 3.0, rel=1e-6)


def test_bursts_wait_longer():
    fixed, poisson, bursts = ch02.bursts().values()
    assert fixed["total_output_tokens"] == poisson["total_output_tokens"] == bursts["total_output_tokens"]
    assert fixed["p99_ttft_ms"] < poisson["p99_ttft_ms"] < bursts["p99_ttft_ms"]


@pytest.mark.parametrize("n, p, confidence", [(10, 50, .95), (40, 90, .95), (100, 99, .9), (367, 99, .95), (368, 99, .95),
                                              (1000, 99, .95)])
def test_rank_interval(n, p, confidence):
    """By the binomial itself: each end is missed with at most half of what is left, and the next rank inwards more often."""
    low, high = loads.rank_interval(n, p, confidence)
    q, tail = p / 100, (1 - confidence) / 2

    def at_most(k):                               # the chance that at most k of n values lie below the true percentile
        return sum(math.comb(n, i) * q ** i * (1 - q) ** (n - i) for i in range(k + 1))
    assert low is None or at_most(low) <= tail * 1.000001
    assert at_most(0 if low is None else low + 1) > tail
    assert (1 - at_most(n - 1) > tail) if high is None else (1 - at_most(high) <= tail * 1.000001 and at_most(high - 1) < 1 - tail)
    assert (n >= 368) == (high is not None) if p == 99 and confidence == .95 else True


def test_enough_requests_for_a_p99():
    rows = ch02.enough(sizes=(50, 400))
    (n, few, above, below, least, most), (m, many, above_m, below_m, *_) = rows
    assert (n, m) == (50, 400) and below is None and above_m <= many <= below_m and least < most
    assert least <= few <= most and above <= few


def test_littles_law_on_a_real_run(prompt):
    L, rate, W = ch02.little(prompt, n=16, seconds=0.8)
    assert L > 0 and rate * W == pytest.approx(L, rel=0.5)


# -- 5. Goodput

def test_the_articles_six_requests():
    judged, rate, good = ch02.six_requests()
    assert [kept for *_, kept in judged] == [True, True, False, False, True, False]
    assert (rate, good) == (0.6, 0.3) and [row[:2] for row in judged] == list(ch02.SIX)


def test_throughput_rises_and_goodput_falls(sweep):
    turn = ch02.knee(sweep)
    assert ch02.RATES[0] < turn < ch02.RATES[-1]
    at, last = sweep[turn][1], sweep[ch02.RATES[-1]][1]
    assert last["request_throughput"] > at["request_throughput"] and last["mfu"] > at["mfu"]
    assert last["request_goodput"] < at["request_goodput"] / 2
    assert last["cost_per_million_output_tokens"] < at["cost_per_million_output_tokens"]
    assert at["kept"] >= 0.95 and ch02.knee({1: (None, {"kept": 0.94}), 2: (None, {"kept": 0.2})}) is None


def test_cost_by_hand(sweep):
    r = sweep[ch02.CALM][1]
    dollars = ch02.PRICE * 8 * r["duration"] / 3600
    assert r["cost_per_million_output_tokens"] == pytest.approx(1e6 * dollars / r["total_output_tokens"])


# -- 6. The account and the patients

def test_the_accounts_of_three_steps():
    assert ch02.account(300, 30) == (9270, pytest.approx(0.9676, abs=1e-4))
    assert ch02.account(300, 10)[0] == 300 + 299 * 10
    steps = [ch02.step_at(step) for step in ch02.ARTICLE_STEPS]
    assert all(a is None or a < b for a, b in zip(steps, steps[1:]))
    for step, batch in zip(ch02.ARTICLE_STEPS, steps):
        times = [1e3 * ch02.BIG.step_time(work_of([(PROMPT + OUTPUT // 2, 1)] * n)) for n in (batch or 0, (batch or 0) + 1) if n]
        assert times[-1] > step and (batch is None or times[0] <= step)


def test_each_patient_is_named():
    sick = ch02.patients()
    assert set(sick) == set(ch02.FAULTS) == set(ch02.FIRST_LOOK)
    assert {fault: ch02.diagnose(r, sick["healthy"]) for fault, r in sick.items()} == {fault: fault for fault in sick}


def test_a_server_runs_the_same_only_once():
    server = loads.Server(slo={"ttft": 500}, requests=20)
    assert server.at_rate(4) is server.at_rate(4) and server.at_rate(4) is not server.at_rate(4, max_num_seqs=2)
    assert server.at_rate(4, loads.real_lengths("code", 5))[1]["completed"] == 5
    assert [r.timestamp for r in loads.real_lengths("conv", 601)[599:]] == [None, None]
    assert loads.real_lengths("conv", 601)[600].prompt_token_ids == loads.real_lengths("conv", 1)[0].prompt_token_ids


# -- The lab's plays are what they are meant to be, and the whole chapter runs

def test_the_labs_small_pool_preempts():
    sys.path.insert(0, str(ROOT / "chapters" / "exercises"))
    import lab
    module = sys.modules[type(lab.lab_of(2).proofs[0]).__module__]
    with lab.lab_sandbox(2) as sandbox:
        (name, data), _ = lab.lab_of(2).proofs[-1].plays()
        reply = module.play(sandbox, lab.lab_of(2), None, "labs.py", name, data, 60)
    assert reply["status"] == "returned" and reply["value"]["preemptions"] > 0


@pytest.mark.timeout(400)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_whole_chapter_runs(language, tmp_path):
    """As a reader runs it, offline and in a terminal that is just wide enough."""
    script = pathlib.Path(ch02.__file__)
    result = subprocess.run([sys.executable, str(script), "--tp", "1", "--save", str(tmp_path), "--width", str(TABLES),
                             "--lang", language], cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", timeout=360)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "…" not in result.stdout, "a table is cut short"
    yes = "Equal to nine digits: yes" if language == "en" else "九位有效数字全部一致：是"
    assert yes in " ".join(result.stdout.split()) and len(re.findall(r"^─* ?\d\. ", result.stdout, re.MULTILINE)) >= 6
    pictures = {path.name for path in tmp_path.glob("*.svg")}
    assert {f"{name}.svg" for name in re.findall(r'"(ch02_[a-z]+)"\)', script.read_text(encoding="utf-8"))} <= pictures
    assert len(pictures) >= 15 and {"ch02_knee.svg", "ch02_ttft.svg", "ch02_stall.svg"} <= pictures
    if language == "zh":
        assert not re.search(r"\b(?:the|which|that|is)\b", re.sub(r"`[^`]*`|vllm bench serve", "", result.stdout))
