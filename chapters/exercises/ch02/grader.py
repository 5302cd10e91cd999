"""Chapter 2's cases. What is right is asked of the project itself: its metrics, its workload sender, its ledger. Only
the mean concurrency is found here, moment by moment, and in the last case by Little's law."""
import heapq
import statistics
from types import SimpleNamespace

import bench
from grade import Case, Found, Task, is_number, same, show
from lang import Sentence, T
from ledger import OUTPUT, QUESTION, SYSTEM, Ledger, work_of
from loads import Server
from metrics import RequestFuncOutput, add_efficiency, is_good, percentile

RULES = T({
    # 1  percentile
    "rank": "The percentile stands at rank (n - 1) * p / 100 of the sorted values, counted from 0.",
    "sorted": "Values come in any order: they are sorted first, by size.",
    "between": "Between two ranks it is interpolated: as far between the two values as the rank is between their "
               "ranks.",
    "equal": "Each value counts, equal ones too.",
    "ends": "The 0th percentile is the smallest value, the 100th the largest: no rank lies beyond them.",
    "one": "A single value is all of its percentiles.",
    "no values": "Without values there is no percentile: None.",
    "exact": "The percentile is neither rounded nor cut.",
    # 2  goodput
    "rate": "Goodput is a rate: good requests over the duration of the run, in requests a second.",
    "ms": "Limits are in milliseconds, times in seconds.",
    "by request": "It is judged request by request: neither a mean nor a percentile decides for all.",
    "all limits": "A good request keeps all limits that are given.",
    "given": "Only the limits that are given count, whatever the other times are.",
    "at the limit": "Who needs exactly as long as the limit has kept it.",
    "single": "An answer of one token has no TPOT: it counts as 0, and keeps any limit.",
    "failed": "A request that failed is not good, however quickly.",
    "none good": "Without good requests the goodput is 0.",
    # 3  mean_concurrency
    "area": "It is the time that all spent inside, added up, over the time that there was.",
    "side by side": "Requests that are there at the same time count each: it is neither the share of busy time nor the "
                    "peak.",
    "idle": "Time in which nobody is there counts, too: it is divided by the whole from begin to end.",
    "begin": "The time runs from begin, wherever on the clock that lies.",
    "before": "Who came before begin counts from begin on.",
    "after": "Who leaves after end counts up to end.",
    "elsewhere": "Who was there only before begin or only after end adds nothing, and takes nothing away.",
    "still there": "Who hasn't left (None) is there to the end.",
    # 4  response_times
    "service": "A user waits until the answer is there: the seconds that the request takes are part of it.",
    "not before due": "No request is sent before it is due, however free a client is.",
    "from due": "The wait begins when the request is due: what it waits for a client is part of it.",
    "queue": "A client takes one request after the other: a late one makes those behind it late.",
    "clients": "Each of the clients has a request of its own: as many as there are can be under way at once.",
    "first free": "The next request goes to the client that is free first, not round in turn.",
    "one each": "The answer has a number for each request, in the order of the requests.",
    # 5  read_stream
    "keys": "The answer is a dict with exactly the keys ttft, itls, tpot and e2el.",
    "from sending": "Times run from when the request was sent, in seconds.",
    "role": "A first chunk without text holds the role: it is no token.",
    "usage": "A last chunk without text holds the usage: the answer ended before it.",
    "silent": "A chunk in the middle without text (half a character, for one) ends no gap.",
    "gaps": "ITLs are the gaps between chunks with text, in order: one fewer than those chunks.",
    "merged": "A chunk may hold several tokens: TPOT is divided by num_tokens - 1, whatever the chunks.",
    "one token": "A single token has no gap after it: TPOT is None, and there are no ITLs.",
    # 6  mfu
    "tokens": "Each scheduled token is computed, those of a prefill as those of a decode, and no other.",
    "history": "A token attends to all positions computed before it.",
    "causal": "The i-th new token attends to i new positions, itself among them, and to no later one.",
    "peak": "What could have been computed is the peak of all GPUs, for all the time.",
    "whole run": "All FLOPs over all the time: the mean of the steps' shares weighs a short step like a long one.",
    "empty step": "Time in which nothing is computed is time.",
})


def cases_of(rows, names, truth):
    """Cases from rows of (rule, *arguments): the arguments get their names, the answer comes from truth(*arguments)."""
    return [Case(dict(zip(names, arguments)), truth(*arguments), RULES[rule]) for rule, *arguments in rows]


# -- 1. Percentile

def percentile_cases():
    rows = [("rank", [10, 20, 30, 40, 50], 25), ("rank", [10, 20, 30, 40, 50], 75), ("sorted", [3, 100, 20, 5, 1], 75),
            ("between", [10, 20, 40, 80, 160, 320], 30),
            ("between", [16, 0, 8, 64, 32], 90), ("equal", [5, 5, 5, 9], 50),
            ("ends", [4, 2, 8], 100), ("ends", [4, 2, 8], 0), ("one", [7], 99), ("no values", [], 50),
            ("exact", [0.125, 0.25, 0.0625, 0.3125], 99), ("rank", list(range(1, 101)), 99)]
    return cases_of(rows, ("values", "p"), percentile)


# -- 2. Goodput

def judged_goodput(requests, limits, duration):
    good = [r["success"] and is_good(SimpleNamespace(ttft=r["ttft"], tpot=r["tpot"], latency=r["e2el"]), limits)
            for r in requests]
    return sum(good) / duration


def request(ttft, tpot=0.03125, e2el=2.0, success=True):
    return {"ttft": ttft, "tpot": tpot, "e2el": e2el, "success": success}


def goodput_cases():
    """Cases hold one trap each. Where a mean could be right by chance, a case before it has named the other mistake."""
    both = {"ttft": 500, "tpot": 50}
    rows = [("rate", [request(0.25), request(0.125), request(0.25)], {"ttft": 500}, 4),
            ("ms", [request(0.75), request(0.625), request(0.875)], {"ttft": 500}, 4),
            ("by request", [request(0.125), request(0.25), request(0.75)], {"ttft": 500}, 4),
            ("by request", [request(0.125), request(4.0), request(0.75)], {"ttft": 500}, 4),
            ("all limits", [request(0.25, 0.0625), request(0.75, 0.03125), request(0.25, 0.03125)], both, 10),
            ("all limits", [request(0.25, 0.03125, 9.0), request(0.25, 0.03125, 2.0)], both | {"e2el": 8000}, 10),
            ("given", [request(9.0, 0.5, 20.0), request(9.0, 0.5, 40.0)], {"e2el": 30000}, 10),
            ("at the limit", [request(0.5), request(0.25)], {"ttft": 500}, 2),
            ("single", [request(0.25, None, 0.25), request(0.25)], both, 2),
            ("failed", [request(0.0, None, 0.0, False), request(0.25)], both, 2),
            ("none good", [request(9.0)], {"ttft": 500}, 2), ("none good", [], {"ttft": 500}, 2),
            ("all limits", *six())]
    return cases_of(rows, ("requests", "limits", "duration"), judged_goodput)


def compare_goodput(case, got):
    """One good request where there is none is called that, whatever else the case is about."""
    if same(got, case.expected):
        return None
    one = not case.expected and len(case.arguments["requests"]) > 1 and same(got, 1 / case.arguments["duration"])
    return Found(show(got), show(case.expected), RULES["none good"] if one else case.rule)


def six():
    """As in the article: of six requests in 10 s two break one limit each, one breaks both."""
    times = (180, 40), (250, 55), (420, 35), (200, 75), (290, 58), (650, 90)
    requests = [request(ttft / 1e3, tpot / 1e3, (ttft + 299 * tpot) / 1e3) for ttft, tpot in times]
    return requests, {"ttft": 300, "tpot": 60}, 10


# -- 3. Mean concurrency

def watched_concurrency(intervals, begin, end):
    """Looks at each moment at which something changes: who is there until the next?"""
    ends = [(a, end if b is None else b) for a, b in intervals]
    moments = sorted({begin, end} | {t for pair in ends for t in pair if begin < t < end})
    pieces = zip(moments, moments[1:])
    return sum((later - now) * sum(a <= now < b for a, b in ends) for now, later in pieces) / (end - begin)


def real_schedule():
    """A few running examples on the simulated 70B: (intervals, begin, end), and L by Little's law: λ times W."""
    requests = bench.random_requests(12, QUESTION, OUTPUT // 10, prefix_len=SYSTEM)
    outputs, figures = Server(requests=1).send(requests, [0.25 * i for i in range(12)])
    duration = figures["duration"]
    intervals = [(o.start_time, o.start_time + o.latency) for o in outputs]
    return (intervals, 0.0, duration), 12 / duration * statistics.fmean(o.latency for o in outputs)


def concurrency_cases():
    rows = [("area", [(0, 1), (1, 4)], 0, 4), ("side by side", [(0, 4), (0, 2), (1, 4)], 0, 4),
            ("idle", [(1, 3)], 0, 8),
            ("begin", [(10, 14), (12, 18)], 10, 18), ("before", [(-4, 2), (0, 8)], 0, 8),
            ("after", [(0, 8), (6, 16)], 0, 8),
            ("before", [(-8, 16)], 0, 8), ("elsewhere", [(0, 8), (-3, -1), (9, 12)], 0, 8),
            ("still there", [(2, None), (0, 8)], 0, 8), ("idle", [], 0, 8)]
    names, (arguments, little) = ("intervals", "begin", "end"), real_schedule()
    return cases_of(rows, names, watched_concurrency) + [Case(dict(zip(names, arguments)), little, RULES["area"])]


# -- 4. Response times

class Scripted:
    """An engine for bench.run, in virtual time: request i takes seconds[i], whoever else is there."""

    def __init__(self, seconds):
        self.seconds, self.now, self.ends = seconds, 0, []

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def add_request(self, request_id, prompt_token_ids, sampling_params, arrival_time):
        i = int(request_id.split("-")[1])
        heapq.heappush(self.ends, (arrival_time + self.seconds[i], i, arrival_time))

    def step_until(self, until):
        """The next end, if it comes by then."""
        if self.ends[0][0] > until:
            self.now = until
            return []
        self.now, i, start = heapq.heappop(self.ends)
        metrics = SimpleNamespace(token_times=[self.now], num_cached_tokens=0, num_preemptions=0, finish_time=self.now,
                                  arrival_time=start, first_scheduled_time=start)
        return [SimpleNamespace(request_id=f"req-{i}", finished=True, metrics=metrics, error=None,
                                outputs=[SimpleNamespace(text="", finish_reason="length")])]


def sent_by_bench(due, seconds, clients):
    """bench.run's own closed loop; what it measures from sending, and the wait for a place, together."""
    requests = [bench.SampleRequest([0], 1) for _ in due]
    outputs, _ = bench.run(Scripted(seconds), requests, due, max_concurrency=clients)
    return [output.latency + output.client_queue_time for output in outputs]


def response_cases():
    stall = [1] * 5 + [20] + [1] * 14
    rows = [("service", [0, 4], [2, 3], 1), ("not before due", [3, 10], [2, 1], 1), ("from due", [0, 1], [4, 2], 1),
            ("queue", [0, 1, 2], [6, 2, 1], 1), ("clients", [0, 0, 1], [4, 4, 4], 3),
            ("first free", [0, 0, 1, 2], [12, 1, 2, 1], 2), ("first free", [0, 1, 2, 3, 4], [9, 3, 1, 1, 4], 2),
            ("queue", list(range(0, 40, 2)), stall, 2), ("one each", [0, 5], [1, 1], 9), ("one each", [], [], 2)]
    return cases_of(rows, ("due", "seconds", "clients"), sent_by_bench)


def compare_responses(case, got):
    """A list that has another length, or another order, is called that."""
    if same(got, case.expected):
        return None
    listed = isinstance(got, (list, tuple)) and all(is_number(x) for x in got)
    wrong = not listed or len(got) != len(case.expected) or sorted(got) == sorted(case.expected)
    return Found(show(got), show(case.expected), RULES["one each"] if wrong else case.rule)


# -- 5. Stream

def told_by_metrics(sent, chunks, num_tokens):
    """The chunks with text as metrics.py's token times; TPOT as vLLM's client has it, with the usage's number."""
    output = RequestFuncOutput(1, sent, [time for time, text in chunks if text])
    tpot = (output.latency - output.ttft) / (num_tokens - 1) if num_tokens > 1 else None
    return {"ttft": output.ttft, "itls": output.itls, "tpot": tpot, "e2el": output.latency}


def stream_cases():
    rows = [("gaps", 0.0, [(2.0, "A"), (2.5, "B"), (4.0, "C")], 3), ("from sending", 8.0, [(9.0, "A"), (9.5, "B")], 2),
            ("role", 1.0, [(1.25, ""), (3.0, "A"), (3.5, "B"), (4.5, "C")], 3),
            ("usage", 1.0, [(2.0, "A"), (2.5, "B"), (4.0, "")], 2),
            ("silent", 0.0, [(1.0, "A"), (1.25, ""), (2.0, "é"), (2.5, "B")], 4),
            ("merged", 0.0, [(1.0, "A"), (2.0, "B C D"), (3.0, "E")], 5),
            ("one token", 1.0, [(1.25, ""), (2.0, "A")], 1),
            ("merged", 0.5, [(0.75, ""), (1.5, "A B"), (2.5, "C D"), (2.75, "")], 4)]
    return cases_of(rows, ("sent", "chunks", "num_tokens"), told_by_metrics)


def compare_stream(case, got):
    if not isinstance(got, dict) or set(got) != set(case.expected):
        return Found(show(got), Sentence("a dict with the keys {keys}", keys=", ".join(case.expected)), RULES["keys"])
    for key, expected in case.expected.items():
        if not same(got[key], expected):
            return Found(Sentence("{key} is {value}", key=key, value=show(got[key])),
                         Sentence("{key} is {value}", key=key, value=show(expected)), case.rule)
    return None


# -- 6. MFU

def ledger_mfu(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    works, result = [work_of(chunks) for chunks, _ in steps], {"duration": sum(seconds for _, seconds in steps)}
    flops = sum(work.tokens * flops_per_token + work.pairs * flops_per_pair for work in works)
    add_efficiency(result, flops, 0, SimpleNamespace(peak_flops=peak_flops, bandwidth=1), num_gpus)
    return result["mfu"]


def mfu_cases():
    """The running example alone comes last: its prefill and its decodes, at the ledger's times."""
    one, prompt = Ledger(), SYSTEM + QUESTION
    m, q = one.model, one.model.num_attention_heads * one.model.head_dim
    kv = m.num_key_value_heads * m.head_dim
    token = 2 * m.num_hidden_layers * m.hidden_size * (2 * q + 2 * kv + 3 * m.intermediate_size)
    chunks = [(0, prompt)] + [(prompt + i, 1) for i in range(OUTPUT - 1)]
    real = [([chunk], one.step_time(work_of([chunk]))) for chunk in chunks]
    rows = [("tokens", [([(0, 1), (0, 1)], 1.0)], 8, 0, 64, 1),
            ("tokens", [([(0, 5), (3, 1), (7, 2)], 1.0)], 8, 0, 256, 1),
            ("peak", [([(0, 4)], 2.0)], 8, 0, 64, 4), ("history", [([(9, 1)], 1.0)], 8, 1, 64, 1),
            ("causal", [([(0, 4)], 1.0)], 8, 2, 128, 1), ("history", [([(6, 3)], 1.0)], 8, 2, 256, 1),
            ("whole run", [([(0, 6)], 1.0), ([(6, 1)], 3.0)], 8, 0, 64, 1),
            ("empty step", [([(0, 4)], 1.0), ([], 1.0)], 8, 0, 64, 1),
            ("causal", real, token, 4 * q * m.num_hidden_layers, one.hardware.peak_flops, one.tp)]
    return cases_of(rows, ("steps", "flops_per_token", "flops_per_pair", "peak_flops", "num_gpus"), ledger_mfu)


TASKS = [Task("percentile", percentile_cases, points=15), Task("goodput", goodput_cases, compare_goodput, points=15),
         Task("mean_concurrency", concurrency_cases, points=15),
         Task("response_times", response_cases, compare_responses, points=20),
         Task("read_stream", stream_cases, compare_stream, points=15), Task("mfu", mfu_cases, points=20)]
