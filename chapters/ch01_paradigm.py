"""Chapter 1, walked through: from one forward to continuous generation.

Read it beside the article's first chapter (大模型推理系统揭秘 01), whose
section numbers it has. Each of the chapter's claims is made to happen:

  1  the life of one request, and what stays in memory (持续生成)
  2  prefill and decode: shapes, times, intensity, and their collision
  3  throughput against latency over batch size (吞吐与时延), the SLO's cut
  4  static against continuous batching, seat by seat (三个根本变化)
  5  which file answers which of the four questions (阅读地图)
  6  the account of the running example (贯穿全文的例子)

    python chapters/ch01_paradigm.py             the request on eight ranks
    python chapters/ch01_paradigm.py --tp 1      on one, in haste
    python chapters/ch01_paradigm.py --save out  also writes pictures as SVG

"here": the tiny Llama-3 that comes with the project, on this machine's
CPU, measured as you watch. "70B": Llama-3-70B on 8 H100s; its bytes and
FLOPs are exact, its times are estimates of chapters/tools/ledger.py, marked ~.
"""
# %% Setting out
import random
import statistics
import sys
import time
from dataclasses import dataclass, replace

# A script finds the tools beside itself, a notebook where it was opened: in this folder or in the one above.
sys.path += [f"{folder}/tools" for folder in (sys.path[0], ".", "chapters")]

import torch  # noqa: E402

from page import Page, Seats, greedy, ms, running_example, si, watched  # noqa: E402  (first: it finds the others)
import bench, ledger, sweep  # noqa: E401, E402
from ledger import OUTPUT, QUESTION, SYSTEM, Ledger, ModelShape, work_of  # noqa: E402
from metrics import summarize  # noqa: E402
from model import ForwardBatch  # noqa: E402
from nano_serve import EMBEDDED_MODEL, LLM, EngineArgs  # noqa: E402
from options import end_quietly  # noqa: E402
from scheduler import SchedulerConfig  # noqa: E402
from show import LineChart, Timeline  # noqa: E402
from simulator import SimulatedEngine  # noqa: E402

PROMPT = SYSTEM + QUESTION
BIG = Ledger()                                                               # Llama-3-70B, 8 H100s, FP16
TINY = Ledger(ModelShape.from_config(EMBEDDED_MODEL), tp=1, dtype_bytes=4)   # fp32 on one rank

if __name__ == "__main__":
    end_quietly()
    page = Page(__doc__)


# %% 1. From one forward to continuous generation
# Prefix caching is chapter 4's. In this chapter it is off: every request computes all of its prompt.

def live(llm, prompt, max_tokens=OUTPUT):
    """One request, alone. Returns (its RequestOutput, its StepRecords)."""
    before = len(llm.engine.records)
    output = llm.generate([{"prompt_token_ids": prompt}], greedy(max_tokens))[0]
    return output, llm.engine.records[before:]


def life_of(records, metrics):
    """[(what, step, seconds, tokens computed before→after, blocks held)], a row a moment of a request that is alone.
    Decodes are all alike, so the middle ones share a row, with the median of their times."""
    prefills, decodes = [], []
    for record in records:
        (part,) = record.requests
        row = [str(record.step), record.duration, f"{part.computed}→{part.computed + part.scheduled}",
               record.total_blocks - record.free_blocks]
        (decodes if part.computed >= part.num_prompt_tokens else prefills).append(row)
    first, last = decodes[1], decodes[-2]
    middle = [f"{first[0]}-{last[0]}", statistics.median(row[1] for row in decodes[1:-1]),
              f"{first[2].split('→')[0]}→{last[2].split('→')[1]}", last[3]]
    return [("queued (排队)", "", metrics.queue_time, "", 0),
            *[(f"prefill, chunk {i + 1}", *row) for i, row in enumerate(prefills)],
            ("decode 1", *decodes[0]), (f"decode 2-{len(decodes) - 1}, each", *middle),
            (f"decode {len(decodes)}", *decodes[-1]), ("finished", "", 0.0, "", 0)]


def nothing_kept(llm, prompt, n):
    """Traditional serving of the same text: a request is one forward, and nothing of it is kept. To go on, the client
    sends everything again, n times. Returns (token ids, seconds each)."""
    known, seconds = list(prompt), []
    for _ in range(n):
        begin = time.perf_counter()
        known += live(llm, known, 1)[0].outputs[0].token_ids
        seconds.append(time.perf_counter() - begin)
    return known[len(prompt):], seconds


if __name__ == "__main__":
    page.section(1, "From one forward to continuous generation", "从一次 Forward 到持续生成")
    with LLM(tensor_parallel_size=page.args.tp, enable_prefix_caching=False) as llm:
        prompt, codec, eos = running_example(llm), llm.engine.codec, llm.engine.config.eos_token_ids
        output, records = live(llm, prompt)
        again, again_seconds = nothing_kept(llm, prompt, 2)
    answer, life = output.outputs[0].token_ids, life_of(records, output.metrics)
    N, M, budget, tp = len(prompt), len(answer), records[0].budget, page.args.tp
    page.say(f"""The request: {N} prompt tokens in, {M} out, on {tp} rank(s) of tensor parallel (TP, 张量并行). A step of
        the engine computes at most {budget} tokens, its token budget (Token 预算). So the prompt takes
        {len(records) - M + 1} steps, each a chunk. The last chunk yields the first token; from then on each step feeds
        in the token of the step before.""")
    mib = [TINY.block_size * one.kv_bytes_per_token / 2 ** 20 for one in (TINY, BIG)]      # a block
    page.table("The life of one request (请求的生命周期)",
               ["", "step>", "ms>", "computed>", "KV blocks>", "MiB here>", "MiB, 70B>"],
               [(*row[:2], ms(row[2]), *row[3:], *[f"{row[-1] * m:.1f}" for m in mib]) for row in life], "ch01_life")
    page.show(Timeline(records))
    page.say(f"""What stays between two steps is the KV cache: the keys and values of all tokens so far, in blocks of
        {TINY.block_size} tokens. It grows with each step, and nobody knows how far. (The last token was never fed in,
        so it has no K and V.)""")
    end = next((i for i, token in enumerate(answer) if token in eos), None)
    page.say("Here the limit ended it, because this run ignores EOS. " + (
        "The model did not say EOS." if end is None else
        f"The model said EOS as token {end + 1}: there it would have stopped, and nobody could have known before.")
        + f" It wrote: {codec.decode(answer[:end])[:400]}")
    again_ms, decode_ms = ms(statistics.mean(again_seconds)), ms(statistics.median(output.metrics.itls))
    page.say(f"""Traditional serving makes a batch, one forward, an answer, and forgets. The next token then costs the
        whole sequence again. Tried for two tokens (the same two: {again == answer[:2]}): {again_ms} ms each, where a
        decode took {decode_ms} ms. All {M} would compute {sum(range(N, N + M)):,} tokens instead of
        {sum(r.used for r in records):,}. So the state is not a nuisance: it is what makes generation affordable.""")


# %% 2. Prefill and decode
# From here on one rank: eight ranks on two cores take turns, and their times would be the operating system's.

DECODES = 16      # the time of one is their median


def three_steps(prompt, decodes=DECODES):
    """A prefill, some decodes, then a step that holds both. Returns ({what: shape} of the prefill, of the first decode
    and of the last step, seconds of the prefill, median seconds of a decode)."""
    with LLM(enable_prefix_caching=False, max_num_batched_tokens=PROMPT) as llm, watched(llm.engine) as seen:
        llm.engine.add_request("a", prompt, greedy(OUTPUT))
        for _ in range(1 + decodes):
            llm.engine.step()
        llm.engine.add_request("b", prompt[:QUESTION], greedy(OUTPUT))
        llm.engine.step()
        seconds = [record.duration for record in llm.engine.records]
    return [seen[0], seen[1], seen[-1]], seconds[0], statistics.median(seconds[1:-1])


def workload(one, chunk, seconds=None):
    """What a step's matrix products ask of one GPU (or this CPU), exactly, and which shares of its peaks that is.
    seconds: what the step took; None for the ledger's estimate."""
    ops = [op for op in one.step_ops(work_of([chunk])) if op.kind in ("gemm", "attention")]
    flops, moved = sum(op.count * op.flops for op in ops), sum(op.count * op.bytes for op in ops)
    seconds = seconds or one.step_time(work_of([chunk]))
    shares = flops / seconds / one.hardware.peak_flops, moved / seconds / one.hardware.bandwidth
    return {"seconds": seconds, "flops": flops, "bytes": moved, "intensity": flops / moved, "shares": shares}


def collide(engine, prompt, others=4, head_start=12, tokens=48):
    """`others` short requests decode; after some steps `prompt` arrives. The engine may be real or simulated.
    Returns {"itls": the gaps between one of the others' tokens, "ttft": the newcomer's, "records": …}, in seconds."""
    for i in range(others):
        engine.add_request(f"short-{i}", prompt[i * QUESTION:(i + 1) * QUESTION], greedy(tokens))
    metrics = {}
    while engine.has_unfinished_requests():
        if len(engine.records) == head_start:
            engine.add_request("long", prompt, greedy(4))
        metrics |= {result.request_id: result.metrics for result in engine.step()}
    times = metrics["short-0"].token_times
    return {"itls": [b - a for a, b in zip(times, times[1:])], "records": engine.records,
            "ttft": metrics["long"].token_times[0] - metrics["long"].arrival_time}


CHUNK = 256
OPTIONS = {"whole": {"max_num_batched_tokens": PROMPT + OUTPUT, "enable_chunked_prefill": False},
           "chunked": {"max_num_batched_tokens": CHUNK}}


def collisions(prompt):
    """{(where, how): what `collide` found}: the prompt in one piece and in chunks, here and on the 70B."""
    found, limits = {}, {"max_model_len": PROMPT + OUTPUT, "max_num_seqs": 64}
    for how, options in OPTIONS.items():
        with LLM(enable_prefix_caching=False, **limits, **options) as llm:
            found["here", how] = collide(llm.engine, prompt)
        simulated = SimulatedEngine(BIG, SchedulerConfig(**limits, **options), enable_prefix_caching=False)
        found["70B", how] = collide(simulated, prompt)
    return found


if __name__ == "__main__":
    page.section(2, "Prefill and decode: two workloads", "两种完全不同的 GPU Workload")
    shapes, prefill_seconds, decode_seconds = three_steps(prompt)
    page.say("The article's two data flows (数据流), as the tensors that have just gone through the first layer:")
    whats = "input_ids", "Q", "K", "V", "KV slots written", "KV positions read", "logits"
    page.table("Three real steps", ["", "prefill", "decode", "decode + prefill"],
               [(what, *[step[what] for step in shapes]) for what in whats], "ch01_shapes")
    (read,) = shapes[2]["KV positions read"]
    page.say(f"""Q is [N, H, d], K and V are [N, Hkv, d]. A decode is a prefill with N = 1; and as the last column
        shows, the engine has no phases at all. It lays the tokens of all requests end to end, each request reads its
        own history, and only its last position becomes logits. The columns are the first step, the second, and the one
        after {DECODES} decodes, in which a newcomer's prompt of {QUESTION} tokens is computed, too. There the first
        request reads {read - QUESTION} positions, its prompt's and {read - QUESTION - PROMPT} of its answer; the
        newcomer's {QUESTION} make that {read}.""")
    here = Ledger(TINY.model, ledger.this_machine(), tp=1, dtype_bytes=4)
    asked, rows = {"here, prefill": (here, (0, PROMPT), prefill_seconds), "70B, prefill": (BIG, (0, PROMPT)),
                   "here, decode": (here, (PROMPT, 1), decode_seconds), "70B, decode": (BIG, (PROMPT, 1))}, []
    for what, step in asked.items():
        w = workload(*step)
        rows.append((what, ms(w["seconds"], "70B" in what), si(w["flops"], "FLOP"), si(w["bytes"], "B"),
                     f"{w['intensity']:.1f}", *[f"{share:.1%}" for share in w["shares"]]))
    page.table(f"The matrix products of a step at {PROMPT} tokens (70B: on each GPU)",
               ["", "ms>", "computed>", "moved>", "FLOP/byte>", "of peak>", "of bandwidth>"], rows, "ch01_workloads")
    ridge = [one.hardware.peak_flops / one.hardware.bandwidth for one in (BIG, here)]
    page.say(f"""FLOP/byte is the intensity (计算强度). While it fetches one byte, an H100 could compute {ridge[0]:.0f}
        FLOPs (this machine, as measured: {ridge[1]:.0f}). Prefill uses each weight for {PROMPT} tokens and lies above:
        compute-bound. Decode uses it for one and lies below: memory-bound. The tiny model's decode comes near neither
        limit here. Its {si(TINY.weight_bytes, 'B')} of weights are too small a job: the time goes to starting many
        small operations.""")
    found = collisions(prompt)
    page.say(f"""Both use the same hardware. Below, four requests are decoding when a prompt of {PROMPT} tokens
        arrives. Computed in one step, it makes everybody wait. In chunks of at most {CHUNK} (chunked prefill, 分块预填充)
        it makes several steps a little longer, and its own first token may come later. ITL (inter-token latency) is
        the gap between two tokens of a request, TTFT the time to its first.""")
    for where in ("here", "70B"):
        itls = {how: [1e3 * gap for gap in found[where, how]["itls"]] for how in OPTIONS}
        page.show(LineChart(f"ITL of a decoding request as the long prompt arrives, {where}",
                            list(range(2, len(itls["whole"]) + 2)), itls, "token", "ms"), f"ch01_itl_{where}")
    rows = []
    for (where, how), f in sorted(found.items(), reverse=True):
        times = statistics.median(f["itls"]), max(f["itls"]), f["ttft"]
        rows.append((f"{where}, {how}", *[ms(t, where == "70B") for t in times]))
    page.table("The price of a long prefill, in ms",
               ["", "others' median ITL>", "others' worst ITL>", "newcomer's TTFT>"], rows, "ch01_collision")
    page.say("The chunked run, step by step:")
    page.show(Timeline(found["here", "chunked"]["records"]), "ch01_timeline")


# %% 3. Throughput against latency

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SLO = {"ttft": 5000, "tpot": 30}             # ms: a choice, as every SLO is


def simulated_curve(batches=BATCHES):
    """The curve of the 70B, in the engine's own scheduler, with the engine's default budget."""
    return sweep.sweep(BIG, batches, False, EngineArgs.max_num_batched_tokens)


def measured_curve(prompt, batches=BATCHES[:6], tokens=16):
    """The curve here: `batch` requests of QUESTION tokens at once, `tokens` out of each."""
    results = []
    with LLM(enable_prefix_caching=False) as llm:
        for batch in batches:
            requests = [bench.SampleRequest(prompt[i * QUESTION:(i + 1) * QUESTION], tokens) for i in range(batch)]
            outputs, seconds = bench.run(llm.engine, requests, [0.0] * batch)
            results.append({"batch": batch, **summarize(outputs, seconds)})
    return results


def relative_chart(title, results):
    """The article's picture: throughput and latency in percent of their largest, and the batches that keep the SLO."""
    good, xs = sweep.feasible(results, SLO), [r["batch"] for r in results]
    curves = {"throughput (吞吐)": "output_throughput", "latency of a request (单请求延迟)": "mean_e2el_ms"}
    series = {name: [100 * r[key] / max(r[key] for r in results) for r in results] for name, key in curves.items()}
    region = (good[0], good[-1], "within the SLO") if good else None
    return LineChart(title, xs, series, "batch size", "% of the largest", region=region, log_x=True)


def show_curve(title, results, name):
    good, rows = sweep.feasible(results, SLO), []
    for r in results:
        times = [f"{r[f'p{p}_{of}_ms']:,.0f}" for of in ("tpot", "ttft") for p in (50, 99)]
        rows.append((r["batch"], f"{r['output_throughput']:,.0f}", *times, "kept" if r["batch"] in good else "broken"))
    columns = ["batch>", "tokens/s>", "P50 TPOT>", "P99 TPOT>", "P50 TTFT>", "P99 TTFT>", "SLO"]
    page.table(title, columns, rows, f"{name}_table")
    page.show(relative_chart(f"Batch size, throughput and latency: {title}", results), name)


if __name__ == "__main__":
    page.section(3, "Throughput against latency", "吞吐与时延：无法同时最优的权衡")
    simulated = simulated_curve()
    page.say(f"""The running example from 1 to {BATCHES[-1]} clients, each of which sends its next request when the
        last is answered, through the engine's own scheduler on the ledger's clock. TPOT is a request's mean time per
        token after the first; P99 is what 99 of 100 stay below; times are in ms. All start at once, so the worst TTFT
        is the first wave's last. The prefix cache is off, so each request computes its whole prompt; the budget of
        {EngineArgs.max_num_batched_tokens} splits that over two steps, hence a TTFT above one prefill's time.
        SLO (service level objective, 服务等级目标): P99 TTFT {SLO['ttft']}, TPOT {SLO['tpot']}.""")
    show_curve("70B on 8 H100s, simulated", simulated, "ch01_batch_curve")
    good, last = [r for r in simulated if r["batch"] in sweep.feasible(simulated, SLO)], simulated[-1]
    if good:
        best, ratio = good[-1], lambda key: f"{last[key] / good[-1][key]:.1f} times"
        page.say(f"""It cuts the curve at batch {best['batch']}: {best['output_throughput']:,.0f} tokens/s. Batch
            {last['batch']} has {ratio('output_throughput')} the throughput, {ratio('mean_e2el_ms')} the latency (mean
            E2E, the chart's second line); as a newcomer's prefill shares its steps with so many decodes,
            {ratio('p50_ttft_ms')} the median TTFT. What a server is built for is the best point within the SLO, not
            the largest batch.""")
    show_curve("the tiny model here, measured", measured_curve(prompt), "ch01_batch_curve_here")


# %% 4. Three changes: static against continuous batching

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


def continuous_batching(llm, jobs):
    """The engine (连续批处理) with as many seats: who has ended leaves, and the next one joins in the step after."""
    run, seat_of, before, begin = Run([""] * SEATS, [], {}, {}), {}, len(llm.engine.records), llm.engine.clock()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in jobs], [greedy(n) for _, n in jobs])
    job_of = {output.request_id: i for i, output in enumerate(outputs)}
    for record in llm.engine.records[before:]:
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


if __name__ == "__main__":
    page.section(4, "Three changes", "三个根本变化")
    jobs = make_jobs(prompt)
    with LLM(enable_prefix_caching=False, max_num_seqs=SEATS) as llm:
        runs = {"static": static_batching(llm.engine, jobs), "continuous": continuous_batching(llm, jobs)}
    same = runs["static"].tokens == runs["continuous"].tokens
    page.say(f"""{len(jobs)} requests, {SEATS} seats. A letter is a request, a capital its prefill, a dot the seat of
        a request that has ended, computed for nobody; the padding of short prompts hides in the capitals and is counted
        in the table. First the traditional way, a batch at a time; then the engine's. The text is the same:
        {same}.""")
    for how, run in runs.items():
        page.say(f"{how} batching, {len(run.chunks)} steps:")
        page.show(Seats(run.seats), f"ch01_seats_{how}")
    figures, rows = {how: run.figures(jobs) for how, run in runs.items()}, []
    for how, f in figures.items():
        wasted = f"{f['wasted']} ({f['wasted'] / f['computed']:.0%})"
        speeds = f"{f['tokens/s']:.0f}", f"~{f['70B']:.0f}"
        rows.append((how, f["steps"], f["computed"], wasted, f"{f['wait']:.2f} s", *speeds))
    page.table("Static against continuous batching", ["", "steps>", "tokens computed>", "for nobody>",
                                                      "mean answer>", "tokens/s here>", "70B>"], rows, "ch01_batching")
    sets, (least, most), mixed = runs["continuous"].changes()
    page.say(f"""The static loop wastes the padding of short prompts and the seats of those who have ended. The three
        changes, in the figures of the continuous run. From static to dynamic: {sets} different sets of active requests
        in {figures['continuous']['steps']} steps. From stateless to stateful: {least} to {most} tokens of KV held.
        From one workload to a mixture: {mixed} steps that prefill for one request while others decode.""")


# %% 5. The reading map

MAP = [("How to measure?", "如何衡量", "2, 8", "chapters/tools/metrics.py, bench.py"),
       ("How to schedule?", "如何调度", "5, 10", "scheduler.py"),
       ("How to keep state?", "如何管理状态", "4, 9", "kv_cache.py"),
       ("How to compute?", "如何计算", "3, 6, 7", "model.py, kernels.py, worker.py"),
       ("Models change", "模型在变", "3, 7", "LlamaConfig, weight_plan in model.py"),
       ("Hardware changes", "硬件在变", "6, 8", "kernels.py, chapters/tools/ledger.py")]
ELSEWHERE = {"the running example": (BIG.model, "h100", 8), "Llama-3-8B on one GPU": (ledger.LLAMA_3_8B, "h100", 1),
             "70B without GQA": (replace(BIG.model, num_key_value_heads=BIG.model.num_attention_heads), "h100", 8),
             "70B on 8 A100s": (BIG.model, "a100", 8), "70B on 8 B200s": (BIG.model, "b200", 8)}


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
    page.section(5, "The reading map", "阅读地图")
    page.table("Four questions, and two constraints that cut across them", ["question", "问题", "chapters", "where"], MAP)
    page.say("What the constraints mean: the same request, with another model or on other hardware.")
    page.table("The same request elsewhere", ["", "KiB a token>", "GB a GPU>", "prefill ms>", "decode ms>", "at once>"],
               [(what, f"{kv / 1024:g}", f"{weights / 1e9:.1f}", ms(prefill, True), ms(decode, True), f"~{n}")
                for what, (kv, weights, prefill, decode, n) in elsewhere().items()], "ch01_elsewhere")


# %% 6. The running example's account
if __name__ == "__main__":
    page.section(6, "The running example", "一个贯穿全文的例子")
    m, kv, kv_gpu = BIG.model, BIG.kv_bytes_per_token, BIG.kv_bytes_per_token_per_gpu
    page.say(f"""The two base quantities (算一笔账). Weights: {BIG.num_parameters:,} parameters x {BIG.dtype_bytes} bytes =
        {BIG.weight_bytes / 1e9:.1f} GB, {BIG.weight_bytes_per_gpu / 1e9:.1f} GB on each of {BIG.tp} GPUs. KV of a
        token: 2 (K and V) x {m.num_hidden_layers} layers x {m.num_key_value_heads} KV heads x {m.head_dim} x
        {BIG.dtype_bytes} bytes = {kv:,} bytes = {kv // 1024} KiB, {kv_gpu // 1024} KiB a GPU.""")
    page.table("Llama-3-70B, FP16, 8 x H100 80GB, TP=8", ["", "value>", "how"], ledger.account(BIG), "ch01_account")
    held = [row[-1] for row in life]
    page.say(f"""The request of section 1 kept the same books: {held[len(records) - M + 1]} blocks after the prompt,
        {max(held)} at the end, {len(records)} steps. Only a token's share differs: {TINY.kv_bytes_per_token:,} bytes,
        in fp32.""")
    page.end("""
        --tp 4 instead of 8: fewer ranks, the same tokens
        python chapters/tools/sweep.py --no-enable-prefix-caching --slo ttft:5000 tpot:20: where does it cut now?
        in this file, CHUNK = 64, then 1024: who pays, the newcomer or the others?
        in this file, SEATS = 8: the static loop takes fewer steps; does its waste shrink, and why not?
        Then the exercises, chapters/exercises/ch01/tasks.py, with make grade CH=1; and the article's chapter 2.""")
