# %% [markdown]
"""
# Chapter 1, walked through: from one forward to continuous generation

第 1 章导读：从一次 Forward 到持续生成。Read it beside the article's first chapter (大模型推理系统揭秘 01), whose section
numbers it has. Each of the chapter's claims is made to happen:

1. the life of one request, and what stays in memory (持续生成)
2. prefill and decode: shapes, times, intensity; how they collide, and squeeze each other
3. throughput against latency over batch size (吞吐与时延), the SLO's cut, admission control (准入控制)
4. static against continuous batching, seat by seat; reserved memory, preemption (抢占) (三个根本变化)
5. which file answers which of the four questions (阅读地图)
6. the account of the running example (贯穿全文的例子)

    python chapters/ch01_paradigm.py             the request on eight ranks
    python chapters/ch01_paradigm.py --tp 1      on one, in haste
    python chapters/ch01_paradigm.py --lang zh   中文
    python chapters/ch01_paradigm.py --save out  also writes pictures as SVG
"""
# %% Options: in a notebook, change them here; in a shell they are the defaults
OPTIONS = {"tp": 8, "lang": None, "save": None}      # ranks; "en" or "zh", None: the locale's; a folder for SVGs

import sys

# A script finds the tools beside itself, a notebook where it was opened: in this folder or in the one above.
sys.path += [f"{folder}/tools" for folder in (sys.path[0], ".", "chapters")]

from page import Page, Seats, Sentence, T, cut, greedy, ms, running_example, si, watched  # noqa: E402  (finds the rest)
from options import end_quietly  # noqa: E402

if __name__ == "__main__":
    end_quietly()
    page = Page("ch01_paradigm", __doc__, OPTIONS)
    say = page.words

# %% [markdown]
"""
Below, "here" is the tiny Llama-3 that comes with the project, on this machine's CPU, measured as you watch. "70B" is
Llama-3-70B on 8 H100s: its bytes and FLOPs are exact, its times are estimates of tools/ledger.py, marked ~.

下文的 "here" 是项目自带的小 Llama-3，在本机 CPU 上现场实测；"70B" 是 8 张 H100 上的 Llama-3-70B：字节数和 FLOP 是精确值，
时间由 tools/ledger.py 估算，以 ~ 标出。
"""
# %% What is needed
import contextlib  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
from dataclasses import dataclass, replace  # noqa: E402

import torch  # noqa: E402

import bench, ledger, sweep  # noqa: E401, E402
from kv_cache import KVCacheManager  # noqa: E402
from ledger import OUTPUT, QUESTION, SYSTEM, Ledger, ModelShape, work_of  # noqa: E402
from metrics import summarize  # noqa: E402
from model import ForwardBatch  # noqa: E402
from nano_serve import EMBEDDED_MODEL, LLM, cpu_threads  # noqa: E402
from request import Request  # noqa: E402
from scheduler import SchedulerConfig  # noqa: E402
from show import LineChart, Timeline  # noqa: E402
from simulator import SimulatedEngine  # noqa: E402

PROMPT = SYSTEM + QUESTION
BUDGET = 8192        # tokens a step, as in the ledger's account, so that the whole prompt fits into one
BIG = Ledger()                                                               # Llama-3-70B, 8 H100s, FP16
TINY = Ledger(ModelShape.from_config(EMBEDDED_MODEL), tp=1, dtype_bytes=4)   # fp32 on one rank


def engine_here(**options):
    """An LLM with the embedded model, as all cells want it but for what they say."""
    return LLM(**{"enable_prefix_caching": False, "max_num_batched_tokens": BUDGET, **options})


# %% How long will this take?

def live(llm, prompt, max_tokens=OUTPUT):
    """One request, alone. Returns (its RequestOutput, its StepRecords)."""
    before = llm.engine.num_steps
    output = llm.generate([{"prompt_token_ids": prompt}], greedy(max_tokens))[0]
    return output, llm.engine.records_since(before)


# What the cells below compute: prompts of 2,050 tokens and steps, first with --tp ranks, then with one; simulations.
PROMPTS, STEPS, PROMPTS_OF_ONE, STEPS_OF_ONE = 4, OUTPUT, 14, 2000


def forecast(tp, begun):
    """(the running example's prompt, estimated seconds of the whole chapter). begun: seconds since the program began,
    most of which each further rank will need again. A short prefill, some decodes and a simulation are timed."""
    probe = PROMPT // 2
    with engine_here() as llm:
        prompt = running_example(llm)
        live(llm, prompt[:probe], 2)
        records = live(llm, prompt[:probe], 17)[1]
    begin = time.perf_counter()
    simulated_curve((16,))
    simulation = time.perf_counter() - begin
    # A long prompt's attention costs more than its share of tokens; a step of several requests more than a lone decode.
    prefill, step = records[0].duration * PROMPT / probe, statistics.median(r.duration for r in records[1:])
    crowd = max(1.0, tp / os.cpu_count())            # ranks on one core take turns
    ranks = begun * crowd * (tp > 1) + PROMPTS * prefill + STEPS * step * crowd
    return prompt, begun + ranks + PROMPTS_OF_ONE * prefill + STEPS_OF_ONE * step + 20 * simulation


# %% The curve of section 3, which is also the forecast's probe
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def simulated_curve(batches=BATCHES):
    """The curve of the 70B, in the engine's own scheduler."""
    return sweep.sweep(BIG, batches, False, BUDGET)


if __name__ == "__main__":
    page.doing(T("timing a short piece, to say how long all of it will take"))
    prompt, seconds = forecast(page.args.tp, time.perf_counter() - page.begin)
    page.start(T("Chapter 1, walked through: from one forward to continuous generation"), seconds)
    page.say("""Read it beside the article's first chapter, whose section numbers it has. "here" is the tiny Llama-3
        that comes with the project, on this machine's CPU, measured as you watch. "70B" is Llama-3-70B on 8 H100s: its
        bytes and FLOPs are exact, its times are estimates of chapters/tools/ledger.py, marked ~. Pictures speak in
        letters, explained below each; --save DIR writes them as SVG.""")

# %% [markdown]
"""
## 1. From one forward to continuous generation · 从一次 Forward 到持续生成

One request is followed from its arrival to its end, with its times and the memory it holds. Then the same is tried the
traditional way: one forward a request, and nothing is kept.

跟踪一个请求从到达到结束：每一步的时间、占用的显存。再用传统方式做同一件事：一次请求一次 Forward，什么也不保留。
"""
# %% The life of one request

def life_of(records, metrics):
    """[(what, step, seconds, tokens computed before→after, blocks held)], a row a moment of a request that is alone.
    Decodes are all alike, so the middle ones share a row, with the median of their times."""
    prefills, decodes, zero = [], [], records[0].step
    for record in records:
        (part,) = record.requests
        row = [str(record.step - zero), record.duration, f"{part.computed}→{part.computed + part.scheduled}",
               record.total_blocks - record.free_blocks]
        (decodes if part.computed >= part.num_prompt_tokens else prefills).append(row)
    first, last = decodes[1], decodes[-2]
    middle = [f"{first[0]}-{last[0]}", statistics.median(row[1] for row in decodes[1:-1]),
              f"{first[2].split('→')[0]}→{last[2].split('→')[1]}", last[3]]
    return [(Sentence("queued (排队)"), "", metrics.queue_time, "", 0),
            *[(Sentence("prefill, chunk {i}", i=i + 1) if prefills[1:] else Sentence("prefill"), *row)
              for i, row in enumerate(prefills)],
            (Sentence("decode {i}", i=1), *decodes[0]),
            (Sentence("decode {i}-{j}, each", i=2, j=len(decodes) - 1), *middle),
            (Sentence("decode {i}", i=len(decodes)), *decodes[-1]), (Sentence("finished"), "", 0.0, "", 0)]


def nothing_kept(llm, prompt, n):
    """Traditional serving of the same text: a request is one forward, and nothing of it is kept. To go on, the client
    sends everything again, n times. Returns (token ids, seconds each)."""
    known, seconds = list(prompt), []
    for _ in range(n):
        begin = time.perf_counter()
        known += live(llm, known, 1)[0].outputs[0].token_ids
        seconds.append(time.perf_counter() - begin)
    return known[len(prompt):], seconds


# %%
if __name__ == "__main__":
    page.section(1, T("From one forward to continuous generation"))
    page.doing(Sentence("serving the request, TP={tp}", tp=page.args.tp))
    with engine_here(tensor_parallel_size=page.args.tp) as llm:
        codec, eos = llm.engine.codec, llm.engine.config.eos_token_ids
        live(llm, prompt, 1)                                              # a warm-up
        output, records = live(llm, prompt)
        again, again_seconds = nothing_kept(llm, prompt, 2)
    page.doing(T("computing"))
    answer, life = output.outputs[0].token_ids, life_of(records, output.metrics)
    N, M, chunks = len(prompt), len(answer), len(records) - len(answer) + 1
    page.say("""The request: {N} prompt tokens in, {M} out, at a tensor parallel size (TP, 张量并行) of {tp}. A step of
        the engine computes at most {budget} tokens, its token budget (Token 预算). Steps that the prompt takes:
        {chunks}; the last yields the first token. From then on each step feeds in the token of the step before.""",
             N=N, M=M, tp=page.args.tp, budget=records[0].budget, chunks=chunks)
    mib = [TINY.block_size * one.kv_bytes_per_token / 2 ** 20 for one in (TINY, BIG)]      # a block
    page.table(Sentence("The life of one request (请求的生命周期)"),
               T(["", "step>", "ms>", "computed>", "KV blocks>", "MiB here>", "MiB, 70B>"]),
               [(*row[:2], ms(row[2]), *row[3:], *[f"{row[-1] * m:.1f}" for m in mib]) for row in life], "ch01_life")
    page.say("""What stays between two steps is the KV cache: the keys and values of all tokens so far, in blocks of
        {size} tokens. It grows as the answer does, and nobody knows how far. (The last token was never fed in, so it
        has no K and V.)""", size=TINY.block_size)

# %%
if __name__ == "__main__":
    end = next((i for i, token in enumerate(answer) if token in eos), None)
    said = Sentence("The model did not say EOS.") if end is None else Sentence(
        "The model said EOS as token {n}: there it would have stopped, and nobody could have known before.", n=end + 1)
    page.say("Here the limit ended it, because this run ignores EOS. {said} It wrote: “{text}”", said=said,
             text=cut(" ".join(codec.decode(answer[:end]).split()), 360))
    page.say("""Traditional serving makes a batch, one forward, an answer, and forgets. The next token then costs the
        whole sequence again. Tried for two tokens ({same}): {again} ms each, where a decode took {decode} ms. All {M}
        would compute {all:,} tokens instead of {used:,}. So the state is not a nuisance: it is what makes generation
        affordable.""", again=ms(statistics.mean(again_seconds)), decode=ms(statistics.median(output.metrics.itls)),
             same=Sentence("the same two come out") if again == answer[:2] else Sentence("other tokens come out"),
             M=M, all=sum(range(N, N + M)), used=sum(r.used for r in records))

# %% [markdown]
"""
## 2. Prefill and decode: two workloads · 两种完全不同的 GPU Workload

The shapes of both, what they cost, and what happens when they meet: a long prefill makes decodes wait (2.2), many
decodes leave a prefill little of the budget (2.3). From here on one rank: eight ranks on two cores take turns, and
their times would be the operating system's.

两者的 shape、代价，以及相遇时的互相影响：长 Prefill 让 Decode 等待（2.2），Decode 太多又挤压 Prefill（2.3）。从这里起只用
一个 rank：八个 rank 在两个核上轮流执行，测到的会是操作系统的时间。
"""
# %% 2.1 Shapes and costs
DECODES = 16      # the time of one is their median


def three_steps(prompt, decodes=DECODES):
    """A prefill, some decodes, then a step that holds both. Returns ({what: shape} of the prefill, of the first decode
    and of the last step, seconds of the prefill, median seconds of a decode)."""
    with engine_here() as llm:
        live(llm, prompt, 2)                                              # a warm-up
        before, engine = llm.engine.num_steps, llm.engine
        with watched(engine) as seen:
            engine.add_request("a", prompt, greedy(OUTPUT))
            for _ in range(1 + decodes):
                engine.step()
            engine.add_request("b", prompt[:QUESTION], greedy(OUTPUT))
            engine.step()
        seconds = [record.duration for record in engine.records_since(before)]
    return [seen[0], seen[1], seen[-1]], seconds[0], statistics.median(seconds[1:-1])


def workload(one, chunk, seconds=None):
    """What a step's matrix products ask of one GPU (or this CPU), exactly, and which shares of its peaks that is.
    seconds: what the step took; None for the ledger's estimate."""
    ops = [op for op in one.step_ops(work_of([chunk])) if op.kind in ("gemm", "attention")]
    flops, moved = sum(op.count * op.flops for op in ops), sum(op.count * op.bytes for op in ops)
    seconds = seconds or one.step_time(work_of([chunk]))
    shares = flops / seconds / one.hardware.peak_flops, moved / seconds / one.hardware.bandwidth
    return {"seconds": seconds, "flops": flops, "bytes": moved, "intensity": flops / moved, "shares": shares}


# %%
if __name__ == "__main__":
    page.section(2, T("Prefill and decode: two workloads"))
    shapes, prefill_seconds, decode_seconds = three_steps(prompt)
    page.say("The article's two data flows (数据流), as the tensors that have just gone through the first layer:")
    whats = T({"input_ids": "input_ids", "Q": "Q", "K": "K", "V": "V", "KV slots written": "KV slots written",
               "KV positions read": "KV positions read", "logits": "logits"})
    page.table(Sentence("Three real steps"), T(["", "prefill", "decode", "decode + prefill"]),
               [(say(words), *[step[what] for step in shapes]) for what, words in whats.items()], "ch01_shapes")
    (read,) = shapes[2]["KV positions read"]
    page.say("""Q is [N, H, d], K and V are [N, Hkv, d]. A decode is a prefill with N = 1; and as the last column
        shows, the engine has no phases at all. It lays the tokens of all requests end to end, each request reads its
        own history, and only its last position becomes logits. The columns are the first step, the second, and the one
        after {decodes} decodes, in which a newcomer's prompt of {question} tokens is computed, too. There the first
        request reads {first} positions, its prompt's and {answer} of its answer; the newcomer's {question} make that
        {read}.""", decodes=DECODES, question=QUESTION, first=read - QUESTION, answer=read - QUESTION - PROMPT,
             read=read)

# %%
if __name__ == "__main__":
    here = Ledger(TINY.model, ledger.this_machine(), tp=1, dtype_bytes=4)
    rows = []
    for where, what, one, chunk, measured in (
            (T("here"), T("prefill"), here, (0, PROMPT), prefill_seconds), ("70B", "prefill", BIG, (0, PROMPT), None),
            ("here", T("decode"), here, (PROMPT, 1), decode_seconds), ("70B", "decode", BIG, (PROMPT, 1), None)):
        w = workload(one, chunk, measured)
        rows.append((say("{where}, {what}", where=say(where), what=say(what)), ms(w["seconds"], measured is None),
                     si(w["flops"], "FLOP"), si(w["bytes"], "B"), f"{w['intensity']:.1f}",
                     *[f"{share:.1%}" for share in w["shares"]]))
    page.table(Sentence("The matrix products of a step at {n} tokens (70B: on each GPU)", n=PROMPT),
               T(["", "ms>", "FLOPs>", "moved>", "FLOP/byte>", "of peak>", "of bandwidth>"]), rows,
               "ch01_workloads")
    ridge = [one.hardware.peak_flops / one.hardware.bandwidth for one in (BIG, here)]
    page.say("""FLOP/byte is the intensity (计算强度). While it fetches one byte, an H100 could compute {ridge:.0f}
        FLOPs (this machine, as measured: {ours:.1f}). Prefill uses each weight for {n} tokens and lies above:
        compute-bound. Decode uses it for one and lies below: memory-bound. The tiny model's decode is near neither
        limit here. Its {weights} of weights are too small a job: much of the time goes to starting many small
        operations.""", ridge=ridge[0], ours=ridge[1], n=PROMPT, weights=si(TINY.weight_bytes, "B"))

# %% 2.2 A long prefill among decodes
CHUNK = 256
WAYS = {"whole": {"max_num_batched_tokens": PROMPT + OUTPUT, "enable_chunked_prefill": False},
        "chunked": {"max_num_batched_tokens": CHUNK}}
LIMITS = {"max_model_len": PROMPT + OUTPUT, "max_num_seqs": 64}


def collide(engine, prompt, others=4, head_start=12, tokens=48):
    """`others` short requests decode; after some steps `prompt` arrives. The engine may be real or simulated.
    Returns {"itls": the gaps between one of the others' tokens, "ttft": the newcomer's, "records": …}, in seconds."""
    for i in range(others):
        engine.add_request(f"short-{i}", prompt[i * QUESTION:(i + 1) * QUESTION], greedy(tokens))
    metrics, before = {}, engine.num_steps
    while engine.has_unfinished_requests():
        if engine.num_steps == before + head_start:
            engine.add_request("long", prompt, greedy(4))
        metrics |= {result.request_id: result.metrics for result in engine.step()}
    times, records = metrics["short-0"].token_times, engine.records[before - engine.num_steps:]
    return {"itls": [b - a for a, b in zip(times, times[1:])],
            "records": [replace(record, step=i) for i, record in enumerate(records)],
            "ttft": metrics["long"].token_times[0] - metrics["long"].arrival_time}


def collisions(prompt, rounds=2):
    """{(where, how): what `collide` found}: the prompt in one piece and in chunks, here and on the 70B. Here both
    engines are warmed and take turns; of each the round counts whose worst gap is smallest, the least disturbed one."""
    found = {("70B", how): collide(SimulatedEngine(BIG, SchedulerConfig(**LIMITS, **options),
                                                   enable_prefix_caching=False), prompt)
             for how, options in WAYS.items()}
    with contextlib.ExitStack() as stack:
        engines = {how: stack.enter_context(engine_here(**LIMITS, **options)).engine for how, options in WAYS.items()}
        runs = [{how: collide(engine, prompt) for how, engine in engines.items()} for _ in range(1 + rounds)][1:]
    return found | {("here", how): min((run[how] for run in runs), key=lambda f: max(f["itls"])) for how in WAYS}


# %%
if __name__ == "__main__":
    found, names = collisions(prompt), T({"whole": "whole", "chunked": "chunked"})
    page.say("""Both use the same hardware. Below, four requests are decoding when a prompt of {n} tokens arrives.
        Computed in one step, it makes everybody wait. In chunks of at most {chunk} (chunked prefill, 分块预填充) it makes
        several steps a little longer, and its own first token may come later. ITL (inter-token latency) is the gap
        between two tokens of a request, TTFT the time to its first.""", n=PROMPT, chunk=CHUNK)
    for where in ("here", "70B"):
        itls = {say(names[how]): [1e3 * gap for gap in found[where, how]["itls"]] for how in WAYS}
        title = say("ITL of a decoding request as the long prompt arrives, {where}", where=say(where))
        page.show(LineChart(title, list(range(2, OUTPUT))[:len(next(iter(itls.values())))], itls, say("token number"),
                            "ms"), f"ch01_itl_{where}")
    rows = []
    for where, how in ((where, how) for where in ("here", "70B") for how in WAYS):
        f = found[where, how]
        times = statistics.median(f["itls"]), max(f["itls"]), f["ttft"]
        rows.append((say("{where}, {what}", where=say(where), what=say(names[how])),
                     *[ms(t, where == "70B") for t in times]))
    page.table(Sentence("The price of a long prefill, in ms"),
               T(["", "others' median ITL>", "others' worst ITL>", "newcomer's TTFT>"]), rows, "ch01_collision")
    page.say("The chunked run, step by step:")
    page.show(Timeline(found["here", "chunked"]["records"]), "ch01_timeline")

# %% 2.3 Many decodes squeeze a prefill

def squeeze(decodes, budget=CHUNK):
    """`decodes` requests are decoding when the running example's prompt arrives. Returns (budget they leave it in a
    step, steps it takes, seconds to its first token), of the real scheduler on the ledger's clock."""
    engine = SimulatedEngine(BIG, SchedulerConfig(budget, budget, 8192), enable_prefix_caching=False)
    for i in range(decodes):
        engine.add_request(f"{i}", [0] * 16, greedy(OUTPUT))
    while any(r.num_output_tokens == 0 for r in engine.scheduler.requests.values()):
        engine.step()
    before, arrival = len(engine.records), engine.clock()
    engine.add_request("long", [0] * PROMPT, greedy(2))
    while (request := engine.scheduler.requests["long"]).num_output_tokens == 0:
        engine.step()
    return budget - decodes, len(engine.records) - before, request.token_times[0] - arrival


if __name__ == "__main__":
    crowds = [CHUNK * k // 16 for k in (0, 4, 8, 12, 15)]
    squeezed = [squeeze(n) for n in crowds]
    page.say("""It goes the other way round, too. Running requests are served first, one token of the budget each; the
        newcomer's prompt gets what they leave. A budget of {budget}, the 70B:""", budget=CHUNK)
    page.table(Sentence("Decodes squeeze a prefill (挤压 Prefill)"),
               T(["requests decoding>", "budget left>", "steps for the prompt>", "newcomer's TTFT, ms>"]),
               [(n, left, steps, ms(ttft, True)) for n, (left, steps, ttft) in zip(crowds, squeezed)], "ch01_squeeze")
    page.say("""With {n} of them the first token comes {times:.0f} times as late as with none, though no step computes
        more tokens. A larger budget would give the prompt more of each step, and make each decode wait longer.""",
             n=crowds[-1], times=squeezed[-1][2] / squeezed[0][2])

# %% [markdown]
"""
## 3. Throughput against latency · 吞吐与时延：无法同时最优的权衡

The article's curve, computed; what an SLO leaves of it; and what can be done when more arrive than it allows.

把文章的曲线算出来；看 SLO 从中切下哪一段；来的请求超出这一段时，又能怎么办。
"""
# %% 3.1 The curve, and the SLO's cut
SLO = {"ttft": 5000, "tpot": 30}             # ms: a choice, as every SLO is
ARTICLE = {"throughput": [12, 25, 45, 68, 85, 92], "latency": [10, 16, 25, 39, 60, 88]}      # its picture, 1 to 32
CURVES = T({"throughput": "throughput (吞吐)", "latency": "latency of a request (单请求延迟)"})
KEYS = {"throughput": "output_throughput", "latency": "mean_e2el_ms"}


def measured_curve(prompt, batches=BATCHES[:6], tokens=16):
    """The curve here: `batch` requests of QUESTION tokens at once, `tokens` out of each."""
    results = []
    with engine_here() as llm:
        for warm_up in (True, False):
            for batch in batches[-1:] if warm_up else batches:
                requests = [bench.SampleRequest(prompt[i * QUESTION:(i + 1) * QUESTION], tokens) for i in range(batch)]
                outputs, seconds = bench.run(llm.engine, requests, [0.0] * batch)
                results += [] if warm_up else [{"batch": batch, **summarize(outputs, seconds)}]
    return results


def relative(results):
    """The article's picture: throughput and latency in percent of their largest."""
    return {name: [100 * r[key] / max(r[key] for r in results) for r in results] for name, key in KEYS.items()}


def relative_chart(title, results, say):
    """As a chart, with the batches that keep the SLO."""
    good = sweep.feasible(results, SLO)
    region = (good[0], good[-1], say("within the SLO")) if good else None
    series = {say(CURVES[name]): values for name, values in relative(results).items()}
    return LineChart(title, [r["batch"] for r in results], series, say("batch size"), say("% of the largest"),
                     region=region, log_x=True)


# %%
def show_curve(title, results, name):
    good, rows = sweep.feasible(results, SLO), []
    for r in results:
        times = [f"{r[f'p{p}_{of}_ms']:,.0f}" for of in ("tpot", "ttft") for p in (50, 99)]
        kept = Sentence("kept") if r["batch"] in good else Sentence("broken")
        rows.append((r["batch"], f"{r['output_throughput']:,.0f}", *times, kept))
    page.table(title, T(["batch>", "tokens/s>", "P50 TPOT>", "P99 TPOT>", "P50 TTFT>", "P99 TTFT>", "SLO"]), rows,
               f"{name}_table")
    page.show(relative_chart(say("Batch size, throughput and latency: {title}", title=title), results, say), name)


if __name__ == "__main__":
    page.section(3, T("Throughput against latency"))
    page.doing(T("simulating the batch sizes"))
    simulated = simulated_curve()
    page.say("""The running example from 1 to {most} clients, each of which sends its next request when the last is
        answered, through the engine's own scheduler on the ledger's clock. TPOT is a request's mean time per token
        after the first; P99 is what 99 of 100 stay below; times are in ms. All start at once, so the worst TTFT is the
        first wave's last: with a budget of {budget} tokens a step takes in {fit} prompts at most. The prefix cache is
        off, so each request computes its whole prompt. SLO (service level objective, 服务等级目标): P99 TTFT {ttft}, TPOT
        {tpot}.""", most=BATCHES[-1], budget=BUDGET, fit=BUDGET // PROMPT, **SLO)
    show_curve(Sentence("70B on 8 H100s, simulated"), simulated, "ch01_batch_curve")
    good, last = [r for r in simulated if r["batch"] in sweep.feasible(simulated, SLO)], simulated[-1]
    best = good[-1] if good else simulated[0]
    if good:
        ratio = {name: last[key] / best[key] for name, key in {**KEYS, "ttft": "p50_ttft_ms"}.items()}
        page.say("""It cuts the curve at batch {batch}: {speed:,.0f} tokens/s. Batch {last} has {throughput:.1f} times
        the throughput, {latency:.1f} times the latency (mean E2E, the chart's second line), and, as a newcomer's
        prefill shares its steps with so many decodes, {ttft:.1f} times the median TTFT. What a server is built for is
        the best point within the SLO, not the largest batch.""", batch=best["batch"], last=last["batch"],
                 speed=best["output_throughput"], **ratio)

# %%
if __name__ == "__main__":
    shares = relative(simulated)
    rows = [(batch, *[f"{numbers[i]:.0f} %" for name in KEYS for numbers in (ARTICLE[name], shares[name])])
            for i, batch in enumerate(BATCHES[:len(ARTICLE["latency"])])]
    page.table(Sentence("The article's picture is a sketch"), T(["batch>", "throughput, article>", "simulated>",
                                                                "latency, article>", "simulated>"]), rows)
    page.say("""The article draws a schematic curve, to show its form; it names no model and no hardware. Its throughput
        is at {theirs} % where it ends, at batch {batch}. The 70B, simulated, has reached {ours:.0f} % of its largest
        there and grows on: on such hardware saturation comes later. And its latency there is {lat:.1f} times that of
        batch 1, not {article:.1f} times.""",
             batch=rows[-1][0], lat=shares["latency"][len(rows) - 1] / shares["latency"][0],
             article=ARTICLE["latency"][-1] / ARTICLE["latency"][0], theirs=ARTICLE["throughput"][-1],
             ours=shares["throughput"][len(rows) - 1])
    page.doing(T("measuring the batch sizes"))
    show_curve(Sentence("the tiny model here, measured"), measured_curve(prompt), "ch01_batch_curve_here")

# %% 3.2 Admission control: what to do with too many
def burst(n, **limits):
    """n clients send the running example at once. Returns (figures of the accepted, the refusals' texts)."""
    config = SchedulerConfig(**{"max_num_seqs": BATCHES[-1], "max_num_batched_tokens": BUDGET, "max_model_len": 8192,
                                **limits})
    engine = SimulatedEngine(BIG, config, enable_prefix_caching=False, keep_records=False)
    outputs, seconds = bench.run(engine, bench.random_requests(n, PROMPT, OUTPUT), [0.0] * n)
    return summarize(outputs, seconds), [output.error for output in outputs if output.error]


if __name__ == "__main__":
    page.doing(T("simulating a burst"))
    seats, clients, rows = best["batch"], 4 * best["batch"], []
    for what, limits in ((Sentence("let all run"), {}),
                         (Sentence("let {n} run, the rest waits", n=seats), {"max_num_seqs": seats}),
                         (Sentence("let {n} wait, refuse the rest", n=seats),
                          {"max_num_seqs": seats, "max_num_waiting": seats})):
        f, refused = burst(clients, **limits)
        kept = all(f[f"p99_{name}_ms"] <= limit for name, limit in SLO.items())
        rows.append((what, f["completed"], len(refused), *[f"~{f[f'p99_{of}_ms']:,.0f}" for of in ("tpot", "ttft")],
                     Sentence("kept") if kept else Sentence("broken")))
    page.say("""Now {clients} clients send their request in the same moment, {times} times what keeps the SLO. The
        engine can let them all run, let {n} run (--max-num-seqs) while the rest waits, or let only as many wait
        (--max-num-waiting) and refuse the rest: that is admission control (准入控制). To have too many run breaks
        the TPOT of all; to let them wait breaks the TTFT of the last. Who is refused knows at once, and can go to
        another replica.""", clients=clients, times=clients // seats, n=seats)
    page.table(Sentence("Too many at once: the 70B, in ms"),
               T(["", "answered>", "refused>", "P99 TPOT>", "P99 TTFT>", "SLO"]), rows, "ch01_admission")
    page.say("What the refused are told: “{words}”", words=cut(refused[0], 200))

# %% [markdown]
"""
## 4. Three changes · 三个根本变化

Static computation becomes dynamic, stateless becomes stateful, one workload becomes a mixture. First the traditional
batch against the engine's, with the same model and the same thread(s). Then the memory: reserved up front, or block by
block, until there is none and somebody has to give way.

从静态计算到动态执行，从无状态到带状态，从单一 Workload 到混合。先比较传统的静态批处理与引擎的连续批处理（同一个模型、同样的
线程数），再看显存：按最坏情况一次性预留，还是按块增长，直到不够用、有人被抢占。
"""
# %% 4.1 Static against continuous batching
SEATS = 4


def make_jobs(prompt, n=12, seed=4):
    """[(prompt, tokens to come)], most short, some long. No way of batching may look at the second number early."""
    rng, jobs = random.Random(seed), []
    for _ in range(n):
        start, length = rng.randrange(len(prompt) - 80), rng.randint(8, 80)
        jobs.append((prompt[start:start + length], min(4 + int(rng.expovariate(1 / 20)), 80)))
    return jobs


@dataclass
class Run:
    """What a way of batching did. seats: as page.Seats has them; chunks: a step's (computed, scheduled) of each row;
    ends: when each job had its answer, in seconds; tokens: its ids."""
    seats: list
    chunks: list
    ends: dict
    tokens: dict

    def figures(self, jobs):
        computed, out = sum(n for step in self.chunks for _, n in step), sum(n for _, n in jobs)
        wasted = computed - sum(len(prompt) + n - 1 for prompt, n in jobs)     # a job's last token is never fed in
        ends, seconds_70b = self.ends.values(), sum(BIG.step_time(work_of(step)) for step in self.chunks)
        return {"steps": len(self.chunks), "computed": computed, "wasted": wasted, "tokens/s": out / max(ends),
                "wait": statistics.mean(ends), "70B": out / seconds_70b}

    def changes(self):
        """The three changes: sets of active requests; least and most tokens of state; steps with both workloads."""
        held = [sum(computed + n for computed, n in step) for step in self.chunks]
        mixed = sum(len({n > 1 for _, n in step}) == 2 for step in self.chunks)
        return len({"".join(column).lower() for column in zip(*self.seats)}), (min(held), max(held)), mixed


# %% The traditional loop
def rectangle(token_ids, start, tables, block_size, last):
    """A padded batch of token_ids [S, n]: row s begins at position start[s], and token last[s] of it gets logits."""
    S, n = token_ids.shape
    positions = start[:, None] + torch.arange(n)                                                   # [S, n]
    slots = tables.gather(1, positions // block_size) * block_size + positions % block_size        # [S, n]
    return ForwardBatch(token_ids.flatten(), positions.flatten(), slots.flatten(), (torch.arange(S + 1) * n).int(),
                        (start + n).int(), tables.int(), torch.arange(S) * n + last)


def static_batching(engine, jobs):
    """The traditional loop (静态批处理) on the same model: take SEATS requests, pad, run until the longest ends, answer all.

    KV memory is reserved at once, for the longest. Padding stands to the right: no real token sees it, and its KV slots
    are overwritten by the row's own tokens before they are read. A row that has ended is computed on, for nobody."""
    size, begin = engine.args.block_size, time.perf_counter()
    run = Run([""] * SEATS, [], {}, {i: [] for i in range(len(jobs))})
    for first in range(0, len(jobs), SEATS):
        group = jobs[first:first + SEATS]
        S, longest, steps = len(group), max(len(prompt) for prompt, _ in group), max(n for _, n in group)
        tables = 1 + torch.arange(S * -(-(longest + steps) // size)).view(S, -1)       # [S, B]; 0 is the null block
        lens = torch.tensor([len(prompt) for prompt, _ in group])                      # [S]
        padded = [prompt + [0] * (longest - len(prompt)) for prompt, _ in group]
        batch = rectangle(torch.tensor(padded), torch.zeros_like(lens), tables, size, lens - 1)
        for step in range(steps):
            sampled = engine.executor.execute(batch).argmax(-1)                        # [S]
            run.chunks.append([(0, longest) if step == 0 else (n + step - 1, 1) for n in lens.tolist()])
            for i in range(SEATS):
                alive = i < S and step < group[i][1]
                run.seats[i] += chr(ord("A" if step == 0 else "a") + first + i) if alive else "." if i < S else " "
                if alive:
                    run.tokens[first + i].append(sampled[i].item())
            batch = rectangle(sampled[:, None], lens + step, tables, size, 0)
        run.ends |= {first + i: time.perf_counter() - begin for i in range(S)}
    return run


# %% The engine's way
def continuous_batching(llm, jobs):
    """The engine (连续批处理) with as many seats: who has ended leaves, and the next one joins in the step after."""
    run, seat_of, before, begin = Run([""] * SEATS, [], {}, {}), {}, llm.engine.num_steps, llm.engine.clock()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in jobs], [greedy(n) for _, n in jobs])
    job_of = {output.request_id: i for i, output in enumerate(outputs)}
    for record in llm.engine.records_since(before):
        row = [" "] * SEATS
        for part in record.requests:
            free = set(range(SEATS)) - set(seat_of.values())
            seat = seat_of.setdefault(part.request_id, min(free, default=None))
            row[seat] = chr(ord("A" if part.computed < part.num_prompt_tokens else "a") + job_of[part.request_id])
        run.seats = [done + letter for done, letter in zip(run.seats, row)]
        run.chunks.append([(part.computed, part.scheduled) for part in record.requests])
        for request_id in record.finished:
            del seat_of[request_id]
    run.ends = {i: output.metrics.finish_time - begin for i, output in enumerate(outputs)}
    run.tokens = {i: output.outputs[0].token_ids for i, output in enumerate(outputs)}
    return run


def both_ways(jobs, rounds=3):
    """{how: Run}: on one engine, with its threads, a first round to warm up, then taking turns. Of each the round
    counts that was the median. Returns also the number of threads."""
    runs = {"static": [], "continuous": []}
    with engine_here(max_num_seqs=SEATS, max_num_batched_tokens=2048) as llm:
        with cpu_threads(llm.engine._threads):              # the engine's own step does the same
            for _ in range(1 + rounds):
                runs["static"].append(static_batching(llm.engine, jobs))
                runs["continuous"].append(continuous_batching(llm, jobs))
            threads = torch.get_num_threads()
    return {how: sorted(some[1:], key=lambda run: max(run.ends.values()))[rounds // 2]
            for how, some in runs.items()}, threads


# %%
if __name__ == "__main__":
    page.section(4, T("Three changes"))
    page.doing(T("batching in two ways, in turns"))
    jobs = make_jobs(prompt)
    runs, threads = both_ways(jobs)
    same = runs["static"].tokens == runs["continuous"].tokens
    page.say("""{n} requests, {seats} seats. A letter is a request, a capital its prefill, a dot the seat of a request
        that has ended, computed for nobody; the padding of short prompts hides in the capitals and is counted in the
        table. First the traditional way, a batch at a time; then the engine's. {same}""", n=len(jobs), seats=SEATS,
             same=Sentence("Both give the same text.") if same else Sentence("The texts differ!"))
    WAYS_TO_BATCH = T({"static": "static (静态)", "continuous": "continuous (连续)"})
    for how, run in runs.items():
        page.say("{how} batching, {n} steps:", how=say(WAYS_TO_BATCH[how]), n=len(run.chunks))
        page.show(Seats(run.seats), f"ch01_seats_{how}")

# %%
if __name__ == "__main__":
    figures, rows = {how: run.figures(jobs) for how, run in runs.items()}, []
    for how, f in figures.items():
        wasted = f"{f['wasted']} ({f['wasted'] / f['computed']:.0%})"
        speeds = f"{f['tokens/s']:.0f}", f"~{f['70B']:.0f}"
        rows.append((say(WAYS_TO_BATCH[how]), f["steps"], f["computed"], wasted, f"{f['wait']:.2f}", *speeds))
    page.table(Sentence("Static against continuous batching"), T(["", "steps>", "tokens computed>", "for nobody>",
               "mean answer, s>", "tokens/s here>", "70B>"]), rows, "ch01_batching")
    here, big = [figures["continuous"][key] / figures["static"][key] for key in ("tokens/s", "70B")]
    page.say("""Both ran on one engine with as many threads ({threads}), warmed up, taking turns; the median of three
        rounds. The engine also keeps records and makes text of the tokens, and has {here:.1f} times the throughput
        (70B: ~{big:.1f} times). The static loop wastes the padding of short prompts and the seats of those who have
        ended.""",
             threads=threads, here=here, big=big)
    sets, (least, most), mixed = runs["continuous"].changes()
    page.say("""The three changes, in the figures of the continuous run. From static to dynamic: {sets} different sets
        of active requests in {steps} steps. From stateless to stateful: {least} to {most} tokens of KV held. From one
        workload to a mixture: {mixed} steps that prefill for one request while others decode.""",
             sets=sets, steps=figures["continuous"]["steps"], least=least, most=most, mixed=mixed)

# %% 4.2 Memory: reserved up front, or block by block
POOL, MOST = 64, 200          # blocks; the tokens that an answer may have at most


def at_once(tokens):
    """How many requests the pool lets in side by side if each is given room for `tokens` when it comes."""
    manager, n = KVCacheManager(POOL + 1, TINY.block_size, False), 0           # and the null block
    while manager.allocate_slots(Request(str(n), [0] * QUESTION, greedy(MOST)), tokens):
        n += 1
    return n


def fill_pool(up_front, n=16, seed=0):
    """n requests of QUESTION tokens, whose answers end when they end. Returns their run's figures and StepRecords."""
    rng = random.Random(seed)
    lengths = [min(8 + int(rng.expovariate(1 / 80)), MOST) for _ in range(n)]
    seats = at_once(QUESTION + MOST if up_front else QUESTION)
    config = SchedulerConfig(seats, BUDGET, QUESTION + MOST)
    engine = SimulatedEngine(BIG, config, POOL + 1, enable_prefix_caching=False)
    for i, length in enumerate(lengths):
        engine.add_request(f"req-{i}", [0] * QUESTION, greedy(length))
    while engine.has_unfinished_requests():
        engine.step()
    records = engine.records
    used = statistics.mean(1 - record.free_blocks / record.total_blocks for record in records)
    return {"seats": seats, "used": used, "steps": len(records), "seconds": engine.clock(),
            "preempted": sum(len(record.preempted) for record in records),
            "again": sum(record.used for record in records) - sum(QUESTION + length - 1 for length in lengths)}, records


# %%
if __name__ == "__main__":
    rows, kept, f = [], {}, None
    for what, up_front in ((Sentence("reserved up front"), True), (Sentence("block by block"), False)):
        first, (f, kept[up_front]) = f, fill_pool(up_front)
        rows.append((what, f["seats"], f"{f['used']:.0%}", f["steps"], f["preempted"], f["again"],
                     ms(f["seconds"], True)))
    page.say("""A pool of {pool} blocks; requests of {question} tokens, whose answers may have up to {most} and mostly
        end far earlier. Memory that is given out once must be enough for the longest. Given out block by block as a
        request grows, it holds more requests. But they all grow, and nobody keeps a block back: once none is free, the
        request that was admitted last gives up all of its blocks (preemption, 抢占), waits, and computes its tokens again
        (recompute, 重计算).""", pool=POOL, question=QUESTION, most=MOST)
    page.table(Sentence("The same requests in the same pool, the 70B"), T(["", "let in>", "pool in use>", "steps>",
               "preempted>", "tokens again>", "ms>"]), rows, "ch01_memory")
    page.say("The second run, step by step:")
    page.show(Timeline(kept[False]), "ch01_preemption")
    page.say("The {again} tokens computed twice are the price. With it the run took {share:.0%} of the other's time.",
             again=f["again"], share=f["seconds"] / first["seconds"])

# %% [markdown]
"""
## 5. The reading map · 阅读地图

Four questions, the files that answer them here, and the two constraints that cut across: models change, hardware
changes.

四个问题、回答它们的文件，以及两个横切约束：模型在变、硬件在变。
"""
# %%
MAP = list(zip(T(["How to measure? (如何衡量)", "How to schedule? (如何调度)", "How to keep state? (如何管理状态)",
                  "How to compute? (如何计算)", "Models change (模型在变)", "Hardware changes (硬件在变)"]),
               ("2", "3, 4, 13", "5, 9", "6, 7, 8", "10, 11", "12"),
               ("chapters/tools/metrics.py, bench.py", "nano_serve.py, scheduler.py", "kv_cache.py",
                "attention.py, kernels.py, sampling.py, worker.py", "model.py, checkpoint.py",
                "kernels.py, cpu_kernels.py, chapters/tools/givens.py")))
ELSEWHERE = dict(zip(
    T(["the running example", "Llama-3-8B on one GPU", "70B without GQA", "70B on 8 A100s", "70B on 8 B200s"]),
    ((BIG.model, "h100", 8), (ledger.LLAMA_3_8B, "h100", 1),
     (replace(BIG.model, num_key_value_heads=BIG.model.num_attention_heads), "h100", 8),
     (BIG.model, "a100", 8), (BIG.model, "b200", 8))))


def elsewhere():
    """{what: (KV bytes a token, weight bytes a GPU, seconds of the prefill, of a decode, requests that fit)}"""
    rows = {}
    for what, (shape, chip, tp) in ELSEWHERE.items():
        one = Ledger(shape, ledger.HARDWARE[chip], tp)
        prefill, decode = (one.step_time(work_of([chunk])) for chunk in ((0, PROMPT), (PROMPT, 1)))
        fit = (one.kv_cache_blocks() - 1) // one.num_blocks(PROMPT + OUTPUT)
        rows[what] = one.kv_bytes_per_token, one.weight_bytes_per_gpu, prefill, decode, fit
    return rows


if __name__ == "__main__":
    page.section(5, T("The reading map"))
    page.table(Sentence("Four questions, and two constraints that cut across them"),
               T(["question", "chapters", "where"]),
               [(say(question), chapters, where) for question, chapters, where in MAP])
    page.say("What the constraints mean: the same request, with another model or on other hardware.")
    page.table(Sentence("The same request elsewhere"),
               T(["", "KiB a token>", "GB a GPU>", "prefill ms>", "decode ms>", "at once>"]),
               [(say(what), f"{kv / 1024:g}", f"{weights / 1e9:.1f}", ms(prefill, True), ms(decode, True), f"~{n}")
                for what, (kv, weights, prefill, decode, n) in elsewhere().items()], "ch01_elsewhere")

# %% [markdown]
"""
## 6. The running example · 一个贯穿全文的例子

Its account (算一笔账), with which all later chapters go on.

先把账算出来，后面各章都要用。
"""
# %%
if __name__ == "__main__":
    page.section(6, T("The running example"))
    m, kv, kv_gpu = BIG.model, BIG.kv_bytes_per_token, BIG.kv_bytes_per_token_per_gpu
    page.say("""The two base quantities (算一笔账). Weights: {parameters:,} parameters x {n} bytes = {weights:.1f} GB,
        {share:.1f} GB on each of {tp} GPUs. KV of a token: 2 (K and V) x {layers} layers x {heads} KV heads x {d} x {n}
        bytes = {kv:,} bytes = {kib} KiB, {kib_gpu} KiB a GPU.""", parameters=BIG.num_parameters, n=BIG.dtype_bytes,
             weights=BIG.weight_bytes / 1e9, share=BIG.weight_bytes_per_gpu / 1e9, tp=BIG.tp,
             layers=m.num_hidden_layers,
             heads=m.num_key_value_heads, d=m.head_dim, kv=kv, kib=kv // 1024, kib_gpu=kv_gpu // 1024)
    page.table(Sentence("Llama-3-70B, FP16, 8 x H100 80GB, TP=8"), T(["", "value>", "how"]),
               ledger.account(BIG, say), "ch01_account")
    held = [row[-1] for row in life]
    page.say("""The request of section 1 kept the same books: {prompt} blocks after the prompt, {end} at the end,
        {steps} steps. Only a token's share differs: {bytes:,} bytes, in fp32.""", prompt=held[chunks], end=max(held),
             steps=len(records), bytes=TINY.kv_bytes_per_token)

# %%
if __name__ == "__main__":
    page.end(
        Sentence("--tp 4: fewer ranks; are the tokens and the blocks the same?"),
        Sentence("python chapters/tools/sweep.py --no-enable-prefix-caching --slo ttft:{ttft} tpot:20: only the limit "
                 "of TPOT is another; where does it cut now?", ttft=SLO["ttft"]),
        Sentence("In this file, CHUNK = 64, then 1024: who pays, the newcomer or the others?"),
        Sentence("In this file, SEATS = 8: the static loop takes fewer steps; does its waste shrink, and why not?"),
        Sentence("In this file, POOL = 128: who is preempted now? From which size on nobody?"),
        Sentence("Then the exercises, chapters/exercises/ch01/tasks.py, with make grade CH=1; and the article's "
                 "chapter 2."))
