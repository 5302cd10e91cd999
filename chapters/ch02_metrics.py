# %% [markdown]
"""
# Chapter 2, walked through: how to measure a serving system

第 2 章导读：如何衡量一个 LLM Serving 系统。Read it beside the article's second chapter (大模型推理系统揭秘 02); sections 1 to 5
are the article's. First the ruler, then what is measured with it:

1. four dimensions, one workload (四个维度)
2. the time line of one request, each metric computed three ways (指标总览)
3. six misreadings, each beside the right reading (常见误区)
4. load: open and closed loops, bursts, warm-up, how many requests a P99 needs, Little's law (怎么测)
5. goodput, the knee, what a token costs (有效吞吐)
6. the account of the running example, and some patients to diagnose (算一笔账)

    python chapters/ch02_metrics.py             the request on eight ranks
    python chapters/ch02_metrics.py --tp 1      on one, in haste
    python chapters/ch02_metrics.py --lang zh   中文
    python chapters/ch02_metrics.py --save out  also writes pictures as SVG
"""
# %% Options: change one, and run what follows again
OPTIONS = {"lang": None, "tp": 8, "save": None, "width": None}      # None: as the locale, the terminal say
SLO = {"ttft": 500.0, "tpot": 30.0}                                 # ms: a choice, as every SLO is
RATES = (2, 4, 8, 10, 12, 16, 20)                                   # requests/s of the sweep, on the 70B
CALM = 8                                                            # requests/s at which it is at ease
REQUESTS = 300                                                      # in each of those runs
PRICE = 2.5                                                         # of a GPU an hour, in any currency
POOLS = (1.0, 0.8, 0.6, 0.4)                                        # KV pools, in shares of what is needed
STALL = 4.0                                                         # seconds for which a server freezes
ENOUGH = (30, 100, 368, 900)                                        # requests from which a P99 is read
# Given by the article: what is promised in its example (ms, ms, s), three steps of a decode and a TTFT (ms).
PROMISE, ARTICLE_STEPS, ARTICLE_TTFT = (300, 60, 10), (10, 15, 30), 300
SIX = ((180, 40), (250, 55), (420, 35), (200, 75), (290, 58), (650, 90))    # (TTFT, TPOT) in ms: our own six

# %% Setting out
import contextlib  # noqa: E402
import math  # noqa: E402
import random  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from dataclasses import dataclass, replace  # noqa: E402

# A script finds the tools beside itself, a notebook where it was opened: in this folder or in the one above.
sys.path += [f"{folder}/tools" for folder in (sys.path[0], ".", "chapters")]

from page import Page, greedy, ms, running_example  # noqa: E402  (first: it finds the others)
from rich.text import Text  # noqa: E402

import bench, metrics, svg  # noqa: E401, E402
from lang import Sentence, T, wide  # noqa: E402
from ledger import OUTPUT, QUESTION, SYSTEM, Ledger, work_of  # noqa: E402
from loads import Server, freeze, rank_interval, real_lengths  # noqa: E402
from metrics import RequestFuncOutput, is_good, percentile, summarize  # noqa: E402
from nano_serve import LLM  # noqa: E402
from options import end_quietly  # noqa: E402
from scheduler import SchedulerConfig  # noqa: E402
from show import LineChart  # noqa: E402
from simulator import SimulatedEngine  # noqa: E402
from workloads import SampleRequest, arrival_times, random_requests  # noqa: E402

# %% The server
BIG, PROMPT = Ledger(), SYSTEM + QUESTION                           # Llama-3-70B, 8 H100s, FP16
RUNS = 78                                                           # so many of its runs take as long as the chapter
SERVER = Server(BIG, SLO, PRICE, REQUESTS)                          # under load, in virtual time


if __name__ == "__main__":
    end_quietly()
    page = Page("ch02_metrics", __doc__, OPTIONS)
    page.doing(T("timing a short run, to say how long all of it will take"))
    begin = time.perf_counter()
    SERVER.at_rate(CALM)                        # is wanted below, too, and kept
    probe, begun = time.perf_counter() - begin, begin - page.begin
    page.start(T("Chapter 2, walked through: how to measure a serving system"),
               RUNS * probe + begun * (1 + page.args.tp / 2))
    page.say("""Here: the tiny Llama-3 that comes with the project, on this CPU, measured as you watch. 70B: Llama-3-70B
        on 8 H100s, the engine's own scheduler on the ledger's clock. Its times are estimates, marked ~. Lengths are
        those of real conversations, Azure's of 2023.""")


# %% [markdown]
"""
## 1. Four dimensions (四个维度)

Latency, throughput, efficiency and quality look at different things. One workload; then one knob is turned at a
time, and the figures that move are marked.

延迟、吞吐、效率、质量，看的是不同的东西。同一份负载，每次只转一个旋钮，看哪些数字会动。
"""

# %%
KNOBS = T({"base": "as it is", "rate": "half as many again arrive", "seats": "32 seats (max_num_seqs)",
           "budget": "a budget of 512 tokens"})
DIMENSIONS = T({"median_ttft_ms": "P50 TTFT ms>", "p99_itl_ms": "P99 ITL ms>", "output_throughput": "tokens/s>",
                "mfu": "MFU>", "kept": "SLO kept>"})


def four_dimensions():
    """{knob: figures}: the same requests, one thing changed each time."""
    changes = {"base": {}, "rate": {"rate": 1.5 * CALM}, "seats": {"max_num_seqs": 32},
               "budget": {"max_num_batched_tokens": 512}}
    return {knob: SERVER.at_rate(**{"rate": CALM, **change})[1] for knob, change in changes.items()}


def moved(name, value, base):
    """A figure, with an arrow if it differs by more than a tenth."""
    arrow = "↑" if value > 1.1 * base else "↓" if value < 0.9 * base else " "
    return (f"{value:.1%}" if name in ("mfu", "kept") else f"~{value:,.0f}") + arrow


if __name__ == "__main__":
    page.section(1, T("Four dimensions"))
    page.doing(T("one knob at a time"))
    found = four_dimensions()
    page.table(Sentence("70B: {n} conversations, {rate} a second; an arrow where more than a tenth moved",
                        n=REQUESTS, rate=CALM), ["", *DIMENSIONS.values()],
               [(Sentence(KNOBS[knob]), *[moved(name, r[name], found["base"][name]) for name in DIMENSIONS])
                for knob, r in found.items()], "ch02_dimensions")
    page.say("""Latency (延迟), throughput (吞吐), efficiency (效率), quality (质量): no knob moves all of them, and what helps
        one may cost another. So a figure is named together with its load, its lengths and its limits, or it says
        nothing.""")


# %% [markdown]
"""
## 2. One time line, and what is read off it (指标总览)

t0: the client sends. t1: the engine starts on it. t2: the first token arrives; t3 .. the others. All metrics of
latency are intervals of this one line, on one clock.

t0：客户端发出。t1：引擎开始处理。t2：第一个 token 到达，之后是 t3……延迟类指标都是这条线上的区间，出自同一个时钟。
"""

# %%
def time_line(engine, prompt, max_tokens=OUTPUT):
    """One request. Returns (when it was sent, when first scheduled, when each token reached the client)."""
    sent, came = engine.clock(), []
    engine.add_request("r", prompt, greedy(max_tokens), arrival_time=sent)
    while engine.has_unfinished_requests():
        for result in engine.step():
            came += [engine.clock()] * (len(result.outputs[0].token_ids) - len(came))
    return sent, result.metrics.first_scheduled_time, came


def by_hand(sent, came):
    """The definitions, written out; seconds."""
    gaps = sorted(later - earlier for earlier, later in zip(came, came[1:]))
    rank = (len(gaps) - 1) * 0.99           # of 299 gaps: 295.02, so 2 % of the way from number 295 to 296, from 0 on
    low, high = gaps[int(rank)], gaps[min(int(rank) + 1, len(gaps) - 1)]
    return {"TTFT": came[0] - sent, "TPOT": (came[-1] - came[0]) / (len(came) - 1), "mean ITL": sum(gaps) / len(gaps),
            "P99 ITL": low + (high - low) * (rank - int(rank)), "E2EL": came[-1] - sent}


# %% The same by two others
FIELDS = {"TTFT": "mean_ttft_ms", "TPOT": "mean_tpot_ms", "mean ITL": "mean_itl_ms", "P99 ITL": "p99_itl_ms",
          "E2EL": "mean_e2el_ms"}


def by_metrics(sent, came):
    """The same by metrics.py."""
    result = summarize([RequestFuncOutput(PROMPT, sent, came, "length")], came[-1] - sent)
    return {name: result[field] / 1e3 for name, field in FIELDS.items()}


def by_vllm(sent, came):
    """The same by vLLM itself, or None where it isn't installed. vLLM: benchmarks/serve.py:556 calculate_metrics"""
    try:
        from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput as Theirs
        from vllm.benchmarks.serve import calculate_metrics
    except ImportError:
        return None
    one = Theirs(success=True, prompt_len=PROMPT, start_time=sent, ttft=came[0] - sent, latency=came[-1] - sent,
                 itl=[b - a for a, b in zip(came, came[1:])], output_tokens=len(came))
    with contextlib.redirect_stdout(sys.stderr):
        result, _ = calculate_metrics([None], [one], came[-1] - sent, None, [99], {})
    means = {name: getattr(result, field, None) for name, field in FIELDS.items()}
    return {name: float(value or dict(result.percentiles_itl_ms)[99]) / 1e3 for name, value in means.items()}


# %% Chunks
def in_chunks(sent, came, role=None, merged=1):
    """What a client reads off a stream if it stamps chunks, as `vllm bench serve` does. A chunk isn't a token: several
    may be merged, and a first one may hold the role alone (role: when it comes). How many tokens there were, the
    usage at the end says. vLLM: benchmarks/lib/endpoint_request_func.py:89 RequestFuncOutput"""
    last = [min(i + merged, len(came)) - 1 for i in range(0, len(came), merged)]             # the token that ends each
    stamps = ([] if role is None else [role]) + [came[i] for i in last]
    gaps = [b - a for a, b in zip(stamps, stamps[1:])]
    return {"TTFT": stamps[0] - sent, "TPOT": (stamps[-1] - stamps[0]) / (len(came) - 1), "gaps": len(gaps),
            "median ITL": percentile(gaps, 50), "E2EL": stamps[-1] - sent}


# %% The time line as a picture
@dataclass
class Spans:
    """What each metric spans of one request's time line, to scale: [(name, from, to)], in seconds since it was sent."""
    title: str
    rows: list

    def __rich_console__(self, console, options):
        label, end = max(wide(name) for name, *_ in self.rows), max(to for *_, to in self.rows)
        room = options.max_width - label - 14
        yield Text(self.title, style="bold")
        for name, begin, to in self.rows:
            left, right = round(room * begin / end), round(room * to / end)
            bar = "├" + "─" * (right - left - 1) + "┤" if right > left else "│"
            yield Text(f"{name}{' ' * (label - wide(name))} {' ' * left}{bar} {ms(to - begin)} ms", no_wrap=True)

    def svg(self):
        label, end = max(svg.text_width(name) for name, *_ in self.rows), max(to for *_, to in self.rows)
        drawing = svg.Drawing(760, 56 + 34 * len(self.rows), self.title)
        left, room = 16 + label + 14, 760 - 16 - label - 14 - 110
        for i, (name, begin, to) in enumerate(self.rows):
            y, x, width = 48 + 34 * i, left + room * begin / end, max(room * (to - begin) / end, 2)
            drawing.text(left - 14, y + 15, name, "end")
            drawing.rect(x, y, width, 20, svg.FILLS[i % len(svg.FILLS)], svg.COLOURS[i % len(svg.COLOURS)])
            drawing.text(x + width + 8, y + 15, f"{ms(to - begin)} ms")
        return drawing.document()


def spans(say, title, sent, scheduled, came):
    """The Spans of one request. say: a lang.Say."""
    worst = max(range(1, len(came)), key=lambda i: came[i] - came[i - 1])
    rows = [("E2EL", sent, came[-1]), ("TTFT", sent, came[0]), (say(T("queue")), sent, scheduled),
            (say(T("prefill")), scheduled, came[0]), (f"{len(came) - 1} x TPOT", came[0], came[-1]),
            (say(T("the worst ITL")), came[worst - 1], came[worst])]
    return Spans(title, [(name, begin - sent, end - sent) for name, begin, end in rows])


# %%
if __name__ == "__main__":
    page.section(2, T("One time line"))
    page.doing(Sentence("the running example, on {tp} ranks", tp=page.args.tp))
    with LLM(tensor_parallel_size=page.args.tp, enable_prefix_caching=False) as llm:
        prompt = running_example(llm)
        cold = [time_line(llm.engine, prompt[:QUESTION], 4) for _ in range(8)]     # a warm-up; section 4 looks at it
        t0, t1, came = time_line(llm.engine, prompt)
    moments = [("t0", t0, T("the client sends")), ("t1", t1, T("the engine starts")), ("t2", came[0], T("first token")),
               ("t3", came[1], T("second token")), (f"t{len(came) + 1}", came[-1], T("last token"))]
    before = [t0, *[moment for _, moment, _ in moments]]
    page.table(Sentence("The running example, here: {n} tokens in, {m} out, TP={tp}", tp=page.args.tp, n=len(prompt),
                        m=len(came)), ["", *T(["ms from t0>", "from the line above>", "what happens"])],
               [(name, ms(t - t0), ms(t - b), Sentence(what)) for (name, t, what), b in zip(moments, before)],
               "ch02_moments")
    page.show(spans(page.words, page.words(T("The intervals of one request, here")), t0, t1, came), "ch02_timeline")
    hand, ours, theirs = (way(t0, came) for way in (by_hand, by_metrics, by_vllm))
    rows = [(Sentence("by hand"), hand), ("metrics.py", ours), ("vLLM", theirs)]
    page.table(Sentence("Each metric in ms, three ways"), ["", *[f"{name}>" for name in FIELDS]],
               [(way, *([f"{1e3 * r[name]:.6f}" for name in FIELDS] if r else [Sentence("not installed"), *4 * [""]]))
                for way, r in rows], "ch02_three_ways")
    equal = all(math.isclose(r[name], hand[name], rel_tol=1e-9) for _, r in rows if r for name in FIELDS)
    page.say("""Equal to nine digits: {equal}. TTFT = t2 - t0, so a queue is in it. TPOT = (last - t2) / (N - 1), one
        number a request. ITL is each gap, {gaps} of them; their mean is the TPOT of that request. E2EL = last - t0. The
        worst gap, {worst} ms, shows in none of the means.""", equal=Sentence("yes") if equal else Sentence("no"),
             gaps=len(came) - 1, worst=ms(max(b - a for a, b in zip(came, came[1:]))))


# %%
if __name__ == "__main__":
    streams = [(T("a chunk a token"), in_chunks(t0, came)), (T("two tokens a chunk"), in_chunks(t0, came, merged=2)),
               (T("the role with the first token"), in_chunks(t0, came, role=came[0])),
               (T("the role at once"), in_chunks(t0, came, role=t1))]
    page.table(Sentence("The same answer in chunks, as a client reads it, in ms"),
               ["", *T(["TTFT>", "TPOT>", "gaps>", "median ITL>", "E2EL>"])],
               [(Sentence(how), ms(s["TTFT"]), ms(s["TPOT"]), s["gaps"], ms(s["median ITL"]), ms(s["E2EL"]))
                for how, s in streams], "ch02_chunks")
    page.say("""The article says "first output token" in one place and "first SSE chunk" in another: these are two
        things. vLLM's client stamps the first chunk that has choices, even if it holds the role and no text. vLLM's own
        server sends the role when the first token is there, so only a gap of 0 is added. A server that sends it at once
        seems to have no TTFT, and its TPOT has swallowed the prefill. Two tokens a chunk double the ITL, and the TPOT
        stays.""")


# %% [markdown]
"""
## 3. Six misreadings (常见误区)

Each is made to happen: what the dashboard says, beside what happened.

每一种都让它当面发生：左边是仪表盘说的，右边是实际发生的。
"""

# %%
def sweep_rates(rates=RATES):
    """{requests/s: (what each request saw, the figures)}: the same conversations in the same order."""
    return {rate: SERVER.at_rate(rate) for rate in rates}


def split_ttft(outputs):
    """Medians of (TTFT, the queue's part, the rest: steps that computed the prompt), in ms."""
    parts = [(o.ttft, o.queue_time, o.ttft - o.queue_time) for o in outputs if o.success]
    return [1e3 * percentile(list(column), 50) for column in zip(*parts)]


# %% A long prompt among decodes
def newcomer(engine, prompt, others=4, tokens=64, head_start=12):
    """`others` decode, then a long prompt arrives. Returns when the tokens of one of the others came."""
    for i in range(others):
        engine.add_request(f"short-{i}", prompt[i * QUESTION:(i + 1) * QUESTION], greedy(tokens))
    done, steps = {}, 0
    while engine.has_unfinished_requests():
        if steps == head_start:
            engine.add_request("long", prompt, greedy(4))
        done |= {result.request_id: result.metrics for result in engine.step()}
        steps += 1
    return done["short-0"].token_times


BUDGETS = {"whole": PROMPT + 8, "chunks": 256}


def smooth_or_not(prompt):
    """{(where, how): times of one stream's tokens}, the newcomer's prompt in one step or in chunks; here after a
    warm-up, and by turns."""
    found, limits = {}, {"max_model_len": PROMPT + OUTPUT, "max_num_seqs": 8}
    for how, budget in BUDGETS.items():
        with LLM(enable_prefix_caching=False, max_num_batched_tokens=budget, **limits) as llm:
            newcomer(llm.engine, prompt[:4 * QUESTION], tokens=16)
            found["here", how] = newcomer(llm.engine, prompt)
        config = SchedulerConfig(max_num_batched_tokens=budget, **limits)
        found["70B", how] = newcomer(SimulatedEngine(BIG, config, enable_prefix_caching=False), prompt)
    return found


# %% Utilisation, lengths, pools
def utilisation(batches=(1, 32, 64, 256)):
    """[(batch, or None for a prefill, seconds of the step, MFU, MBU)]. In each a kernel runs all the time."""
    rows = []
    for batch in (None, *batches):
        work = work_of([(0, PROMPT)] if batch is None else [(PROMPT, 1)] * batch)
        one = {"duration": BIG.step_time(work)}
        metrics.add_efficiency(one, BIG.model_flops(work), BIG.model_bytes(work), BIG.hardware, BIG.tp)
        rows.append((batch, one["duration"], one["mfu"], one["mbu"]))
    return rows


def same_rate(rate=CALM / 2, n=200):
    """{kind: figures}: as many requests a second, of other lengths."""
    kinds = {T("conversation"): real_lengths("conv", n), T("code completion"): real_lengths("code", n),
             T("the running example"): random_requests(n, QUESTION, OUTPUT, prefix_len=SYSTEM)}
    return {kind: SERVER.at_rate(rate, requests)[1] for kind, requests in kinds.items()}


def pools(shares=POOLS, rate=10):
    """[(share, blocks, figures)]: KV pools in shares of the most that the run needs if there is enough."""
    need = SERVER.at_rate(rate)[1]["kv_peak"]
    blocks = [round(need * share) + 2 for share in shares]
    return [(share, n, SERVER.at_rate(rate, num_kv_blocks=n)[1]) for share, n in zip(shares, blocks)]


# %%
if __name__ == "__main__":
    page.section(3, T("Six misreadings"))
    page.doing(T("the sweep over request rates"))
    sweep = sweep_rates()
    e2es = [o.latency for o in sweep[CALM][0]]
    mean = statistics.fmean(e2es)
    page.say("""1. The mean alone. At {rate} conversations a second the mean E2E latency is ~{mean:.1f} s. P50 is
        ~{p50:.1f} s, P95 ~{p95:.1f} s, P99 ~{p99:.1f} s: {below:.0%} are quicker than the mean, and one in a hundred
        takes {times:.1f} times as long.""", rate=CALM, mean=mean, p50=percentile(e2es, 50), p95=percentile(e2es, 95),
             p99=percentile(e2es, 99), below=sum(e < mean for e in e2es) / len(e2es),
             times=percentile(e2es, 99) / mean)
    split = {rate: split_ttft(outputs) for rate, (outputs, _) in sweep.items()}
    page.say("""2. TTFT taken for the time of a prefill. It counts from t0, and where load nears what can be served,
        most of it is queue:""")
    names = [page.words(name) for name in T(["TTFT, P50", "queue, P50", "prefill steps, P50"])]
    page.show(LineChart(page.words(T("70B: what a TTFT is made of")), list(RATES),
                        {name: [split[rate][i] for rate in RATES] for i, name in enumerate(names)},
                        page.words(T("requests/s")), "ms"), "ch02_ttft")
    page.say("""From {low} to {high} requests a second the median TTFT grows {grows:,.0f}-fold, the steps that compute
        the prompt {steps:.1f}-fold. Who speeds up prefill here works at the wrong end.""",
             low=RATES[0], high=RATES[-1],
             grows=split[RATES[-1]][0] / split[RATES[0]][0], steps=split[RATES[-1]][2] / split[RATES[0]][2])


# %%
if __name__ == "__main__":
    page.doing(T("a long prompt among decodes"))
    streams, rows = smooth_or_not(prompt), []
    for where in ("here", "70B"):
        for how, label in zip(BUDGETS, T(["{where}, in one step", "{where}, in chunks"])):
            times, mark = streams[where, how], where == "70B"
            gaps = [b - a for a, b in zip(times, times[1:])]
            rows.append((Sentence(label, where=Sentence("here") if where == "here" else where),
                         ms((times[-1] - times[0]) / len(gaps), mark), ms(percentile(gaps, 50), mark),
                         ms(max(gaps), mark), f"{max(gaps) / percentile(gaps, 50):.0f}x"))
    page.say("3. TPOT taken for smoothness. Four streams decode, then a prompt of {n} tokens arrives:", n=PROMPT)
    page.table(Sentence("One of the four streams, in ms"),
               ["", *T(["TPOT>", "median ITL>", "worst ITL>", "worst to median>"])], rows, "ch02_smooth")
    tracks = {page.words(name): [1e3 * (b - a) for a, b in zip(streams["70B", how], streams["70B", how][1:])]
              for how, name in zip(BUDGETS, T(["prompt in one step", "prompt in chunks"]))}
    page.show(LineChart(page.words(T("70B: gaps of one stream as a long prompt arrives; the TPOTs hardly differ")),
                        list(range(2, 65)), tracks, "token", "ms"), "ch02_stall")
    page.say("""TPOT divides the stall by all tokens of the answer. The reader of the stream sees it stand still. P99
        and the worst of ITL are the figures for that.""")


# %%
if __name__ == "__main__":
    page.say("""4. GPU utilisation taken for efficiency. It says that some kernel is running, and in each of these steps
        one always is:""")
    label = {None: Sentence("a prefill of {n} tokens", n=PROMPT)}
    page.table(Sentence("70B, steps at {n} tokens of context", n=PROMPT),
               ["", *T(["GPU utilisation>", "step ms>", "MFU>", "bandwidth (MBU)>"])],
               [(label.get(batch, Sentence("a decode, batch {n}", n=batch)), "100%", ms(seconds, True), f"~{mfu:.2%}",
                 f"~{mbu:.0%}") for batch, seconds, mfu, mbu in utilisation()], "ch02_utilisation")
    page.say("""The article holds memory bandwidth for a cause of low GPU utilisation. It is not: a kernel that waits
        for memory is running. What is low in a decode is the MFU: per mille at batch 1, per cent only at larger ones.
        That is no defect: what a decode is made of is reading memory, and MBU says how well it does that. The honest
        pair is (MFU, MBU).""")


# %%
if __name__ == "__main__":
    page.doing(T("the same rate, other lengths"))
    kinds = same_rate()
    page.say("5. Requests a second alone. The same rate, of three kinds of request:")
    page.table(Sentence("70B, {rate:g} requests/s", rate=CALM / 2),
               ["", *T(["P50 in>", "P50 out>", "requests/s>", "output tokens/s>", "all tokens/s>", "MFU>"])],
               [(Sentence(kind), *[f"{percentile(r[key], 50):,.0f}" for key in ("input_lens", "output_lens")],
                 *[f"~{r[key]:,.1f}" for key in ("request_throughput", "output_throughput", "total_token_throughput")],
                 f"~{r['mfu']:.1%}") for kind, r in kinds.items()],
               "ch02_kinds")
    page.doing(T("smaller and smaller pools"))
    tight = pools()
    page.say("6. A full KV memory taken for a good one. The same load on smaller and smaller pools:")
    page.table(Sentence("70B, KV pools in shares of what is needed"),
               T(["pool>", "mean use>", "preempted>", "recomputed tokens>", "P50 TTFT ms>", "P99 TTFT ms>",
                  "SLO kept>"]),
               [(f"{share:.0%}", f"{r['kv_use']:.0%}", r["preemptions"], f"{r['recomputed']:,}",
                 *[f"~{r[key]:,.0f}" for key in ("median_ttft_ms", "p99_ttft_ms")], f"{r['kept']:.0%}")
                for share, _, r in tight], "ch02_pools")
    page.say("""The fuller the memory, the worse the service. The article speaks of swapping KV out and in here; vLLM V1
        doesn't swap. Who is preempted (抢占) gives its blocks back and is computed again (重计算), as counted above.""")


# %% Side by side
if __name__ == "__main__":
    busy, (_, _, decode_mfu, decode_mbu), (stall, smooth) = split[RATES[-1]], utilisation((1,))[1], [
        [b - a for a, b in zip(streams["70B", how], streams["70B", how][1:])] for how in BUDGETS]
    (_, chat), (_, code), *_ = kinds.items()
    (_, _, roomy), *_, (_, _, full) = tight
    says = [Sentence("mean E2E ~{s:.1f} s", s=mean), Sentence("TTFT ~{ms:,.0f} ms", ms=busy[0]),
            Sentence("TPOT ~{a:.1f}, ~{b:.1f} ms", a=1e3 * statistics.fmean(stall), b=1e3 * statistics.fmean(smooth)),
            Sentence("GPU utilisation 100 %"),
            Sentence("{a:.1f}, {b:.1f} requests/s", a=chat["request_throughput"], b=code["request_throughput"]),
            Sentence("KV use {a:.0%}, {b:.0%}", a=roomy["kv_use"], b=full["kv_use"])]
    happened = [Sentence("P99 ~{s:.1f} s", s=percentile(e2es, 99)),
                Sentence("~{ms:,.0f} ms of it in the queue", ms=busy[1]),
                Sentence("worst gap ~{a:.0f}, ~{b:.0f} ms", a=1e3 * max(stall), b=1e3 * max(smooth)),
                Sentence("MFU ~{mfu:.2%}, MBU ~{mbu:.0%}", mfu=decode_mfu, mbu=decode_mbu),
                Sentence("~{a:,.0f}, ~{b:,.0f} output tokens/s", a=chat["output_throughput"],
                         b=code["output_throughput"]),
                Sentence("SLO kept {a:.0%}, {b:.0%}", a=roomy["kept"], b=full["kept"])]
    names = T(["the mean alone", "TTFT = prefill", "TPOT = smooth", "utilisation = efficiency", "requests/s alone",
               "full = good"])
    page.table(Sentence("Six misreadings, in figures of the runs above"),
               ["", *T(["what the dashboard says", "what happened"])],
               [(Sentence(name), *pair) for name, *pair in zip(names, says, happened)], "ch02_misreadings")


# %% [markdown]
"""
## 4. Load: who sends, and when (怎么测)

Open loop (开环): requests come when they come. Closed loop (闭环): the next is sent when an answer is there.

开环：请求想来就来。闭环：拿到回答才发下一个。
"""

# %%
def omission(rate=3, clients=3, n=300):
    """A server that freezes. {percentile: E2E in seconds (in a closed loop of few clients, from when it was sent; of
    the same run, from when it was due; in an open loop)}; how many the closed loop sent late."""
    requests = random_requests(n, 400, 50)
    times, freezing = arrival_times(requests, rate, math.inf), freeze(20.0, STALL)
    closed, opened = (SERVER.send(requests, times, most, progress=freezing)[0] for most in (clients, None))
    sent, due = [o.latency for o in closed], [o.latency + o.client_queue_time for o in closed]
    late = sum(o.client_queue_time > 0.001 for o in closed)
    return {p: [percentile(seconds, p) for seconds in (sent, due, [o.latency for o in opened])]
            for p in (50, 95, 99)}, late


def bursts(rate=CALM):
    """{burstiness: figures}: the same requests at the same mean rate; gaps fixed, exponential (Poisson), in bursts."""
    return {b: SERVER.at_rate(rate, burstiness=b)[1] for b in (math.inf, 1.0, 0.1)}


# %% How many requests, and Little's law
def enough(sizes=ENOUGH, rate=CALM):
    """[(n, P99 of the TTFT of n requests, its interval, the least and the largest P99 of other n)], in ms."""
    outputs, _ = SERVER.at_rate(rate, real_lengths(n=max(sizes)))
    ttfts, rows = [1e3 * o.ttft for o in outputs], []
    random.Random(0).shuffle(ttfts)                             # else neighbours share a queue
    for n in sizes:
        some, (low, high) = sorted(ttfts[:n]), rank_interval(n)
        others = [percentile(ttfts[i:i + n], 99) for i in range(0, len(ttfts) - n + 1, n)]
        rows.append((n, percentile(some, 99), some[low], None if high is None else some[high],
                     *((min(others), max(others)) if len(others) > 1 else (None, None))))
    return rows


def little(prompt, n=40, seconds=2.0):
    """Little's law on a real run: (mean number in the system, as the engine's own steps saw it; arrivals a second; mean
    time in the system, as the clients saw it)."""
    requests = [SampleRequest(prompt[i:i + QUESTION], 24) for i in range(n)]
    with LLM(enable_prefix_caching=False, max_num_seqs=4) as llm:
        bench.warm_up(llm.engine, requests[0], 2)
        outputs, duration = bench.run(llm.engine, requests, arrival_times(requests, n / seconds))
        steps = llm.engine.records
    inside = sum((step.running + step.waiting) * step.duration for step in steps)
    return inside / duration, n / duration, statistics.fmean(o.latency for o in outputs)


# %%
if __name__ == "__main__":
    page.section(4, T("Load: who sends, and when"))
    found, late = omission()
    page.say("""Coordinated omission. A server freezes for {stall:g} s. {clients} clients send the next request when
        they have an answer, so they send nothing while it stands, and measure nothing. {late} requests were late, and
        counted from when they were sent nobody notices:""", stall=STALL, clients=3, late=late)
    page.table(Sentence("70B, E2E latency in s as the server freezes"),
               ["", *T(["closed, from sending (wrong)>", "closed, from due>", "open loop>"])],
               [(f"P{p}", *[f"~{seconds:.2f}" for seconds in row]) for p, row in found.items()], "ch02_omission")
    gaps = bursts()
    names = T(["fixed gaps", "Poisson", "bursts"])
    page.table(Sentence("70B, the same requests at the same mean rate, {rate} a second", rate=CALM),
               ["", *T(["tokens/s>", "P50 TTFT ms>", "P99 TTFT ms>", "SLO kept>"])],
               [(Sentence(name), *[f"~{r[key]:,.0f}" for key in ("output_throughput", "median_ttft_ms", "p99_ttft_ms")],
                 f"{r['kept']:.0%}") for name, r in zip(names, gaps.values())], "ch02_bursts")
    ttfts = [came[0] - sent for sent, _, came in cold]
    page.say("""Warm-up, here: of {n} equal requests, the first that this process ever served had its token after
        {first} ms, the others after {rest} in the median, {times:.1f} times as quick. It paid for memory, caches and
        threads, and shows how this server starts, not how it serves. So the first ones are in no figure.""",
             n=len(ttfts),
             first=ms(ttfts[0]), rest=ms(statistics.median(ttfts[1:])), times=ttfts[0] / statistics.median(ttfts[1:]))


# %%
if __name__ == "__main__":
    page.doing(T("a long run, for the P99"))
    least = next(n for n in range(1, 2000) if rank_interval(n)[1] is not None)
    page.table(Sentence("70B: how sure is the P99 of TTFT? In ms"),
               T(["requests>", "P99>", "surely above>", "surely below>", "other samples: least>", "most>"]),
               [(n, *["?" if x is None else f"~{x:,.0f}" for x in values]) for n, *values in enough()], "ch02_enough")
    page.say(""""Surely" is 95 %: an interval between two ranks, whatever the distribution. Below {least} requests it
        has no upper end: all of them may lie under the true P99. A P99 of a hundred requests is hardly more than the
        second worst of them.""",
             least=least)
    page.doing(T("Little's law on a real run"))
    L, arrivals, W = little(prompt)
    page.say("""Little's law, here: L = λW. The engine's steps saw {L:.2f} requests inside in the mean; {rate:.1f}
        arrived a second and were there for {W:.3f} s each, which makes {product:.2f}, {off:+.1%}. What differs is the
        time in which a request was there and the engine, busy with a step, hadn't looked. Two of the three give the
        third: where they don't agree by more than that, something was measured wrongly.""",
             L=L, rate=arrivals, W=W, product=arrivals * W,
             off=arrivals * W / L - 1)


# %% [markdown]
"""
## 5. Goodput (有效吞吐), the knee, what a token costs

What was served is throughput; what was served as promised is goodput.

完成了多少是吞吐，按承诺完成了多少才是有效吞吐。
"""

# %%
def six_requests(requests=SIX, promise=PROMISE):
    """[(TTFT, TPOT, kept?)], requests/s, goodput: each as metrics.py judges it; a request keeps all limits or none."""
    ttft, tpot, seconds = promise
    outputs = [RequestFuncOutput(1, 0.0, [first / 1e3, (first + gap) / 1e3], "length") for first, gap in requests]
    limits = {"ttft": ttft, "tpot": tpot}
    result = summarize(outputs, seconds, limits)
    kept = [is_good(o, limits) for o in outputs]
    return list(zip(*zip(*requests), kept)), result["request_throughput"], result["request_goodput"]


def knee(results, share=0.95):
    """The largest rate at which this share of all requests still keeps the SLO; None if none does."""
    return max((rate for rate, (_, r) in results.items() if r["kept"] >= share), default=None)


# %%
if __name__ == "__main__":
    page.section(5, T("Goodput, the knee, what a token costs"))
    judged, rate, good = six_requests()
    page.say("Six requests in {s} s, with a promise of {a} ms for TTFT and {b} ms for TPOT:", a=PROMISE[0],
             b=PROMISE[1], s=PROMISE[2])
    page.table(Sentence("Six requests"), ["", *T(["TTFT ms>", "TPOT ms>", "kept"])],
               [(f"R{i}", ttft, tpot, Sentence("yes") if kept else Sentence("no")) for i, (ttft, tpot, kept)
                in enumerate(judged, 1)], "ch02_six")
    page.say("""{rate:.1f} requests a second, goodput {good:.1f}, as in the article's example: two break one limit each,
        one both. A request keeps all limits or it isn't good. vLLM knows limits on ttft, tpot and e2el only.""",
             rate=rate, good=good)


# %%
if __name__ == "__main__":
    turn = knee(sweep)
    page.table(Sentence("70B, conversations, requests a second; SLO: TTFT {ttft:g} ms, TPOT {tpot:g} ms", **SLO),
               T(["offered>", "served>", "good>", "tokens/s>", "P99 TTFT>", "MFU>", "MBU>", "cost>", "of good>"]),
               [(rate, *[f"~{r[key]:,.1f}" for key in ("request_throughput", "request_goodput")],
                 *[f"~{r[key]:,.0f}" for key in ("output_throughput", "p99_ttft_ms")], *[f"{r[key]:.0%}" for key in
                 ("mfu", "mbu")], f"~{r['cost_per_million_output_tokens']:.1f}",
                 f"~{r['cost_per_million_output_tokens'] / r['kept']:,.1f}" if r["kept"] else "-")
                for rate, (_, r) in sweep.items()], "ch02_sweep")
    lines = {page.words(name): [sweep[rate][1][key] for rate in RATES] for name, key in
             zip(T(["served (吞吐)", "within the SLO (有效吞吐)"]), ("request_throughput", "request_goodput"))}
    region = turn and (RATES[0], turn, page.words(T("95 % keep the SLO")))
    page.show(LineChart(page.words(T("70B: throughput rises on, goodput falls")), list(RATES), lines,
                        page.words(T("requests offered a second")), page.words(T("requests/s")), region=region),
              "ch02_knee")
    page.say("""Up to {turn} a second what is served is good. Beyond that the throughput still rises, the MFU with it,
        tokens get cheaper, and the goodput falls. A run ends with its last answer, so a little less is served than
        offered. The last two columns: what a million output tokens cost at {price:g} an hour and GPU, and those of good
        requests alone. The cheapest tokens are those that come too late.""", turn=turn, price=PRICE)
    page.say("""Cost and MFU need their convention said, too: here output tokens are counted, prompts are not; and FLOPs
        of the model, whatever the kernels do beside. `vllm bench` of 0.27.1 has six subcommands (latency, mm-processor,
        serve, startup, sweep, throughput); the article counts four.""")


# %% [markdown]
"""
## 6. The account (算一笔账), and a patient

First the running example's account is settled; then some servers with something wrong in each.

先把贯穿全文的例子算清楚，再看几台出了毛病的服务器。
"""

# %%
def step_at(milliseconds, batches=range(1, 513)):
    """The largest batch of running examples, halfway through their answers, whose decode takes at most that long; None
    if not even one alone does."""
    fits = [n for n in batches if 1e3 * BIG.step_time(work_of([(PROMPT + OUTPUT // 2, 1)] * n)) <= milliseconds]
    return fits[-1] if fits else None


def account(ttft, step):
    """(E2E in ms, the decodes' share of it): the first token is the prefill's, so OUTPUT - 1 decodes follow."""
    decodes = (OUTPUT - 1) * step
    return ttft + decodes, decodes / (ttft + decodes)


# %% Patients
# What is broken, and how: one thing each. The healthy run is what the others are compared with.
FAULTS = T({"healthy": "nothing", "queue": "too few seats", "stall": "long prompts, in one piece",
            "pool": "KV pool too small", "batch": "too many at once", "idle": "hardly any load"})
FIRST_LOOK = T({"healthy": "nothing to be done", "queue": "the queue: more seats, more replicas, admission",
                "stall": "chunked prefill, a smaller budget", "pool": "KV pool: fewer seats, more memory",
                "batch": "fewer seats, more GPUs", "idle": "batch more, fewer GPUs"})


def patients():
    """{fault: figures}"""
    long = [replace(r, prompt_token_ids=[i] * 8000) if i % 5 == 2 else r for i, r in enumerate(SERVER.requests)]
    return {"healthy": SERVER.at_rate(CALM)[1], "queue": SERVER.at_rate(CALM, max_num_seqs=24)[1],
            "stall": SERVER.at_rate(CALM / 2, long, max_num_batched_tokens=16384)[1],
            "pool": SERVER.at_rate(CALM, num_kv_blocks=3000)[1], "batch": SERVER.at_rate(1.75 * CALM)[1],
            "idle": SERVER.at_rate(CALM / 16)[1]}


def diagnose(r, healthy):
    """The article's order: whose phase, mean against tail, which resource. The first that fits names the fault."""
    if r["preemptions"]:
        return "pool"
    if r["median_engine_queue_time_ms"] > r["median_ttft_ms"] / 2:
        return "queue"
    if r["p99_itl_ms"] > 2 * healthy["p99_itl_ms"]:
        return "stall"
    if r["median_tpot_ms"] > 1.4 * healthy["median_tpot_ms"]:
        return "batch"
    return "idle" if r["mfu"] < healthy["mfu"] / 3 else "healthy"


# %%
if __name__ == "__main__":
    page.section(6, T("The account, and a patient"))
    alone = 1e3 * BIG.step_time(work_of([(PROMPT + OUTPUT // 2, 1)]))
    prefill = 1e3 * BIG.step_time(work_of([(0, PROMPT)]))
    rows = [(Sentence("{step} ms, as the article", step=step), f"{ARTICLE_TTFT}", step,
             step_at(step) or Sentence("none"), *account(ARTICLE_TTFT, step)) for step in ARTICLE_STEPS]
    rows.append((Sentence("the ledger, alone"), f"~{prefill:.0f}", f"~{alone:.1f}", 1, *account(prefill, alone)))
    page.table(Sentence("E2E of the running example: TTFT + {n} decodes", n=OUTPUT - 1),
               T(["a decode step of", "TTFT ms>", "step ms>", "batch of that step>", "E2E s>", "decode's share>"]),
               [(*row[:4], f"{row[4] / 1e3:.2f}", f"{row[5]:.1%}") for row in rows], "ch02_account")
    page.say("""The article computes with decode steps of {a}, {b} and {c} ms in different chapters. They are the same
        machine at different batches, as the ledger has it (the batch whose step takes at most that long); so none is
        wrong, but a table must not mix them. Here each account is settled with one step, said beside it: the ledger's,
        ~{alone:.1f} ms alone.""", a=ARTICLE_STEPS[0], b=ARTICLE_STEPS[1], c=ARTICLE_STEPS[2], alone=alone)


# %%
if __name__ == "__main__":
    page.doing(T("six patients"))
    sick = patients()
    healthy = sick["healthy"]
    page.table(Sentence("70B, six patients: what is broken in each? ms"),
               ["", *T(["P50 TTFT>", "its queue>", "P50 TPOT>", "P99 ITL>", "preempted>", "tokens/s>", "MFU>"])],
               [(i, *[f"~{r[key]:,.0f}" for key in ("median_ttft_ms", "median_engine_queue_time_ms", "median_tpot_ms",
                 "p99_itl_ms")], r["preemptions"], f"~{r['output_throughput']:,.0f}", f"{r['mfu']:.0%}")
                for i, r in enumerate(sick.values(), 1)], "ch02_patients")
    page.table(Sentence("The answers"), ["", *T(["it was", "what the figures say to look at first"])],
               [(i, Sentence(FAULTS[fault]), Sentence(FIRST_LOOK[diagnose(r, healthy)]))
                for i, (fault, r) in enumerate(sick.items(), 1)], "ch02_answers")
    page.say("""The order is the article's: define, split by phase, mean against tail, then the resource, then a remedy;
        and goodput says whether it helped.""")
    page.end(T("--tp 1 instead of 8: which of the metrics of section 2 change, and which definitions?"),
             T("in this file, SLO = {{\"ttft\": 500.0, \"tpot\": 20.0}}: where is the knee now, and what does a good "
               "token cost there?"),
             T("in this file, CALM = 12: which of the six misreadings get worse?"),
             T("python chapters/tools/sweep.py --slo ttft:500 tpot:20: the same curve over the number of clients; "
               "what is the knee of a closed loop?"),
             T("python chapters/tools/bench.py --request-rate 8 --goodput ttft:500 tpot:50: the table of vllm bench "
               "serve, of the engine here"),
             T("Then the exercises, make grade CH=2, and the lab, make lab CH=2; and the article's chapter 3."))
