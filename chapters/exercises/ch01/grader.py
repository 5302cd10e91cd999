"""Chapter 1's cases. What is right is asked of the project itself wherever it knows: the ledger, the scheduler and its
block pool, the metrics, the simulator. Only task 4 is counted here, token by token."""
import math
import random

from grade import Case, Found, Task, is_number, same, show
from kv_cache import KVCacheManager
from lang import Sentence, T
from ledger import LLAMA_3_8B, LLAMA_3_70B, OUTPUT, QUESTION, SYSTEM, Ledger, ModelShape
from metrics import RequestFuncOutput
from request import Request, SamplingParams
from scheduler import Scheduler, SchedulerConfig
from simulator import SimulatedEngine

RULES = T({
    # 1  kv_bytes_per_token
    "k and v": "A token leaves two vectors in the cache: its key and its value.",
    "layers": "Each layer has a K and a V of its own for the token: twice the layers keep twice as much.",
    "head_dim": "The vector of a head has head_dim numbers.",
    "kv heads": "Each KV head keeps a vector of its own: twice the KV heads keep twice as much.",
    "gqa": "Only KV heads are cached. With GQA several query heads read the same one; queries are never kept, and "
           "their number doesn't matter.",
    "dtype": "Each number takes dtype_bytes bytes, whatever the model is usually stored in.",
    "unit": "The answer is in bytes: not in numbers, bits, KiB or MB.",
    "product": "It is one product: K and V, layers, KV heads, head_dim, bytes a number, and nothing is added to it.",
    # 2  max_concurrency
    "pool": "As many requests fit as the blocks that can be handed out hold side by side: the pool's blocks divided by "
            "the blocks of one request.",
    "whole requests": "Whole requests are counted: what is left over holds a part of one, and that is none.",
    "growth": "Prompt and output are both kept. A request is largest at its end, and that is what has to fit.",
    "whole blocks": "A request owns whole blocks, and shares none: its last block is its own even when almost empty.",
    "one sequence": "Prompt and output are one sequence: the output goes on in the prompt's last block.",
    "null block": "Block 0 is the null block. It is part of the memory, but never handed out.",
    "last token": "The token sampled last is never fed in, so it has no K and V: prompt + output - 1 are stored.",
    "no part blocks": "The memory holds whole blocks only; what is left over at its end is too small for one.",
    "block size": "A block holds block_size tokens, whatever vLLM's default is.",
    "too small": "A pool too small for one request holds none: 0.",
    "empty pool": "A pool without any block to hand out holds no request: 0, and never less than that.",
    # 3  latencies
    "keys": "The answer is a dict with exactly the keys ttft, itls, tpot and e2e.",
    "seconds": "All times are in seconds, as those that you are given: no milliseconds.",
    "exact": "Times are neither rounded nor cut.",
    "ttft": "TTFT runs from the arrival to the first token: the user feels the wait in the queue, too.",
    "itls": "ITLs are the gaps between one token and the next, a list: N tokens have N - 1, in order, and the TTFT is "
            "none.",
    "tpot": "TPOT is the mean gap after the first token: from the first token to the last, divided by N - 1.",
    "two": "Two tokens have one gap between them, and that gap is their TPOT.",
    "single": "A single token has no gap after it: its TPOT is None, and its list of ITLs is empty.",
    "e2e": "End-to-end latency runs from the arrival to the last token.",
    # 4  static_waste
    "pair": "The answer is a pair of token counts: first all that were computed, then those of them that were wasted.",
    "prompts": "The prompts are computed, too: a batch's first step feeds in every position of them.",
    "last decode": "The prefill yields the first token, and the last is never fed in: n tokens take n - 1 decodes.",
    "longest output": "All rows are computed until the batch's longest has its last token, those that have ended, too.",
    "padding": "Prompts are padded to the batch's longest: the padding is computed, and nobody needs it.",
    "parts": "A rectangle is as wide as the longest prompt, and then as the longest output, whosoever they are.",
    "own batch": "Each batch is a rectangle of its own, as long as its own longest.",
    "order": "Batches are taken in the order of the jobs, max_num_seqs at a time: nobody is sorted.",
    "fewer rows": "A row is a request: a batch that is not full has fewer rows, and no empty ones.",
    "last batch": "The last batch counts as well, even if it is not full.",
    "wasted": "Wasted is what was computed and not needed: padding, and the rows of those that have ended.",
    "no jobs": "Without jobs nothing is computed: (0, 0).",
    # 5  continuous_batching
    "form": "The answer is a list with a list of names for each step.",
    "once": "A request takes part once in a step.",
    "arrival": "Nobody takes part before having arrived.",
    "idle": "A step in which nobody is there is a step: an empty list, and the clock goes on.",
    "leave": "Who has had the last token is gone from the next step on.",
    "stay": "Who is running takes part in each step, until the last token: n tokens take n steps.",
    "seats": "Never more than max_num_seqs at once: a seat is free in the step after its owner's last, not before.",
    "fcfs": "First come, first served: nobody overtakes, however short.",
    "join": "Who is there joins as soon as a seat is free: nobody waits for the others to end.",
    "end": "It goes on until everybody has had all tokens, with an entry for each step, and then it ends.",
})


def cases_of(rows, names, truth):
    """Cases from rows of (rule, *arguments): the arguments get their names, the answer comes from truth(*arguments)."""
    return [Case(dict(zip(names, arguments)), truth(*arguments), RULES[rule]) for rule, *arguments in rows]


# -- 1. KV bytes a token

def ledger_kv_bytes(layers, heads, kv_heads, head_dim, dtype_bytes):
    shape = ModelShape(layers, heads * head_dim, heads, kv_heads, 1, 1, head_dim=head_dim)
    return Ledger(shape, tp=1, dtype_bytes=dtype_bytes).kv_bytes_per_token


BASE = dict(num_hidden_layers=3, num_attention_heads=20, num_key_value_heads=5, head_dim=7, dtype_bytes=2)
FACTORS = {"num_attention_heads": "gqa", "num_hidden_layers": "layers", "num_key_value_heads": "kv heads",
           "head_dim": "head_dim", "dtype_bytes": "dtype"}


def kv_bytes_cases():
    """All sizes differ, so that no two mistakes look alike; then each is doubled alone; then other models."""
    rows = [("product", BASE)] + [(rule, BASE | {name: 2 * BASE[name]}) for name, rule in FACTORS.items()]
    rows += [("dtype", BASE | {"dtype_bytes": 1}), ("product", BASE | {"num_key_value_heads": 20})]
    for m in LLAMA_3_8B, LLAMA_3_70B:
        sizes = m.num_hidden_layers, m.num_attention_heads, m.num_key_value_heads, m.head_dim, 2
        rows.append(("product", dict(zip(BASE, sizes))))
    return cases_of([(rule, *sizes.values()) for rule, sizes in rows], tuple(BASE), ledger_kv_bytes)


def explain_kv_bytes(results):
    """Which size does the answer not follow? If it follows all, only the constant before the product can be wrong."""
    if len(results) < 6 or not all(is_number(got) for _, got in results):
        return None
    for unit in (1000, 1024, 10**6, 2**20):         # rounded, too; the last case is large enough for each
        if results[-1][1] and all(abs(got - case.expected / unit) <= 1 for case, got in results):
            return RULES["unit"]
    if not results[0][1]:
        return None
    (base, got), *doubled = results[:6]
    off = [rule for rule, (case, value) in zip(FACTORS.values(), doubled)
           if not same(value / got, case.expected / base.expected)]
    if len(off) > 2:
        return RULES["product"]
    if off:                             # who counts query heads follows them, and not the KV heads
        return RULES["unit" if off == ["dtype"] and same(got * BASE["dtype_bytes"], base.expected) else off[0]]
    if same(got, base.expected):        # only another model shows it
        return None
    return RULES["k and v" if any(same(got * x, base.expected) for x in (2, 2 / 3, 0.5)) else "unit"]


# -- 2. Concurrency

def run_alone(num_blocks, block_size, num_prompt_tokens, num_output_tokens, requests=1):
    """`requests` equal requests in the engine's scheduler, all at once: (most blocks in use, preemptions, steps)."""
    tokens = num_prompt_tokens + num_output_tokens
    config = SchedulerConfig(requests, requests * tokens, tokens + 1)
    scheduler = Scheduler(config, KVCacheManager(num_blocks, block_size, enable_prefix_caching=False))
    for i in range(requests):
        scheduler.add_request(Request(str(i), [0] * num_prompt_tokens, SamplingParams(max_tokens=num_output_tokens)))
    most = preemptions = steps = 0
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        most = max(most, scheduler.kv_cache_manager.num_usable_blocks - output.num_free_blocks)
        preemptions, steps = preemptions + len(output.preempted_req_ids), steps + 1
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
    return most, preemptions, steps


def scheduler_concurrency(kv_cache_bytes, kv_bytes_per_token, block_size, num_prompt_tokens, num_output_tokens):
    """How often the blocks that one request was seen to hold go into those that the real pool hands out."""
    num_blocks = kv_cache_bytes // (kv_bytes_per_token * block_size)
    usable = KVCacheManager(num_blocks, block_size).num_usable_blocks if num_blocks > 1 else 0
    roomy = 2 + (num_prompt_tokens + num_output_tokens) // block_size
    return usable // run_alone(roomy, block_size, num_prompt_tokens, num_output_tokens)[0]


def concurrency_cases():
    """Where two mistakes could meet, one of them is made harmless: in the first cases a block more or less in the pool,
    or a token more or less in a request, changes nothing."""
    one = Ledger()
    example = (one.kv_cache_blocks() * one.block_size * one.kv_bytes_per_token, one.kv_bytes_per_token, one.block_size,
               SYSTEM + QUESTION, OUTPUT)
    rows = [("pool", 101 * 160, 10, 16, 640, 1), ("growth", 101 * 160, 10, 16, 160, 481),
            ("whole blocks", 41 * 160, 10, 16, 32, 6), ("one sequence", 41 * 160, 10, 16, 17, 10),
            ("null block", 9 * 160, 10, 16, 40, 5), ("last token", 7 * 160, 10, 16, 16, 17),
            ("no part blocks", 8 * 160 + 150, 10, 16, 10, 3), ("block size", 101 * 40, 10, 4, 120, 11),
            ("too small", 4 * 160, 10, 16, 60, 20), ("empty pool", 1 * 160, 10, 16, 10, 3),
            ("empty pool", 150, 10, 16, 10, 3), ("pool", 1000, 10, 4, 6, 3), ("pool", *example)]
    names = "kv_cache_bytes", "kv_bytes_per_token", "block_size", "num_prompt_tokens", "num_output_tokens"
    return cases_of(rows, names, scheduler_concurrency)


def compare_concurrency(case, got):
    """A share of a request, or one rounded up, is called that."""
    if same(got, case.expected):
        return None
    first = case.arguments["num_prompt_tokens"] == 640
    part = got == case.expected + 1 if first else False
    if isinstance(got, float) and got != int(got) and int(got) == case.expected or part:
        return Found(show(got), show(case.expected), RULES["whole requests"])
    return Found(show(got), show(case.expected), case.rule)


# -- 3. Latencies

def measured_latencies(arrival_time, first_scheduled_time, token_times):
    output = RequestFuncOutput(1, arrival_time, token_times)
    return {"ttft": output.ttft, "itls": output.itls, "tpot": output.tpot, "e2e": output.latency}


def simulated_times():
    """Three running examples, two seats: (arrival, first scheduled, token times) of the third, that has to wait."""
    engine = SimulatedEngine(Ledger(), SchedulerConfig(2, 2048, 4096))
    for name in "abc":
        engine.add_request(name, [0] * (SYSTEM + QUESTION), SamplingParams(max_tokens=5), arrival_time=0.0)
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output.metrics for output in engine.step()}
    return done["c"].arrival_time, done["c"].first_scheduled_time, done["c"].token_times


def latencies_cases():
    """Binary fractions, so that no rounding blurs a case; the last, from a simulation, shows who rounds."""
    rows = [("tpot", 0.0, 0.0, [2.0, 3.0, 4.5]), ("tpot", 0.0, 0.0, [1.0, 1.25, 1.5, 3.5]),
            ("itls", 0.0, 0.0, [2.0, 5.0, 5.0, 5.5]), ("two", 0.0, 0.0, [1.0, 1.5]),
            ("ttft", 10.0, 12.5, [13.0, 13.5, 14.5]), ("single", 0.0, 0.5, [1.5]), ("exact", *simulated_times())]
    return cases_of(rows, ("arrival_time", "first_scheduled_time", "token_times"), measured_latencies)


def compare_latencies(case, got):
    """Key by key, each with its own rule."""
    if not isinstance(got, dict) or set(got) != set(case.expected):
        return Found(show(got), Sentence("a dict with the keys {keys}", keys=", ".join(case.expected)), RULES["keys"])
    for key, expected in case.expected.items():
        if same(got[key], expected):
            continue
        rule = key
        numbers, wanted = flat(got[key]), flat(expected)
        if numbers and len(numbers) == len(wanted) and any(wanted):
            if all(math.isclose(a, 1000 * b, rel_tol=0.01) for a, b in zip(numbers, wanted)):
                rule = "seconds"
            elif all(math.isclose(a, b, rel_tol=0.01) for a, b in zip(numbers, wanted)):
                rule = "exact"
        if len(case.arguments["token_times"]) == 1 and key in ("itls", "tpot"):
            rule = "single"
        elif case.rule == RULES["two"] and key == "tpot" and rule == "tpot":
            rule = "two"
        return Found(Sentence("{key} is {value}", key=key, value=show(got[key])),
                     Sentence("{key} is {value}", key=key, value=show(expected)), RULES[rule])
    return None


def flat(value):
    """A number as a list of one, a list of numbers as it is, anything else as nothing."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return list(values) if all(is_number(v) for v in values) else []


# -- 4. Waste

def counted_waste(jobs, max_num_seqs):
    """Builds each rectangle and looks at every cell of it: does the row's request need this token?"""
    computed = wasted = 0
    for first in range(0, len(jobs), max_num_seqs):
        batch = jobs[first:first + max_num_seqs]
        for prompt, output in batch:
            for column in range(max(p for p, _ in batch)):                # the step that computes the prompts
                computed, wasted = computed + 1, wasted + (column >= prompt)
            for tokens_before in range(1, max(n for _, n in batch)):      # a decode each, for who has them already
                computed, wasted = computed + 1, wasted + (tokens_before >= output)
    return computed, wasted


def waste_cases():
    rng = random.Random(1)
    many = [(rng.randint(8, 80), min(4 + int(rng.expovariate(1 / 20)), 80)) for _ in range(11)]
    rows = [("last decode", [(50, 4)], 1), ("longest output", [(5, 4), (5, 1), (5, 2)], 3),
            ("padding", [(9, 3), (2, 3)], 2), ("parts", [(9, 2), (3, 5)], 2),
            ("own batch", [(2, 2), (3, 1), (8, 6), (9, 4)], 2), ("order", [(2, 2), (9, 1), (3, 6), (4, 4)], 2),
            ("fewer rows", [(4, 3), (4, 3), (4, 3)], 2), ("fewer rows", [(5, 4), (5, 1)], 8), ("order", many, 4),
            ("no jobs", [], 2)]
    return cases_of(rows, ("jobs", "max_num_seqs"), counted_waste)


def compare_waste(case, got):
    """As a whole, but what the numbers themselves tell is called that."""
    if same(got, case.expected):
        return None
    (computed, wasted), rule = case.expected, case.rule
    if rule == RULES["no jobs"]:
        pass
    elif not isinstance(got, (list, tuple)) or len(got) != 2 or not all(is_number(n) for n in got) \
            or same(got[::-1], case.expected) or 0 < got[1] < 1 or same(got, (computed - wasted, wasted)):
        rule = RULES["pair"]
    elif rule == RULES["last decode"] and got[0] < 50:
        rule = RULES["prompts"]
    elif rule == RULES["fewer rows"] and got[0] < computed:
        rule = RULES["last batch"]
    elif same(got[0], computed) and rule not in (RULES["last decode"], RULES["longest output"], RULES["padding"]):
        rule = RULES["wasted"]
    return Found(show(got), show(case.expected), rule)


# -- 5. Continuous batching

def scheduler_steps(jobs, max_num_seqs):
    """What the engine's scheduler decides, with memory and token budget (Token 预算) for everybody."""
    config = SchedulerConfig(max_num_seqs, max(64, max_num_seqs), 1024)
    scheduler = Scheduler(config, KVCacheManager(1024, 16, enable_prefix_caching=False))
    steps, coming = [], list(jobs)
    while coming or scheduler.has_unfinished_requests():
        while coming and coming[0][1] <= len(steps):
            name, _, output_tokens = coming.pop(0)
            scheduler.add_request(Request(name, [0], SamplingParams(max_tokens=output_tokens)))
        output = scheduler.schedule()
        steps.append(list(output.num_scheduled_tokens))
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
    return steps


def batching_cases():
    rng, arrival, many = random.Random(5), 0, []
    for i in range(16):
        arrival += rng.choice((0, 0, 1, 3))
        many.append((f"r{i}", arrival, rng.choice((1, 2, 3, 9))))
    rows = [("stay", [("a", 0, 3), ("b", 0, 5)], 2), ("leave", [("a", 0, 3), ("b", 0, 1)], 2),
            ("seats", [("a", 0, 2), ("b", 0, 2), ("c", 0, 2)], 2),
            ("join", [("a", 0, 4), ("b", 0, 1), ("c", 0, 2), ("d", 0, 1)], 2),
            ("join", [("a", 0, 2), ("b", 0, 2), ("c", 0, 1), ("d", 0, 1)], 2),
            ("fcfs", [("a", 0, 1), ("b", 0, 5), ("c", 0, 1), ("d", 0, 2)], 1),
            ("arrival", [("a", 0, 3), ("b", 2, 2), ("c", 2, 1)], 3), ("idle", [("a", 0, 1), ("b", 3, 2)], 2),
            ("idle", [("a", 2, 1)], 1), ("join", many, 3), ("end", [], 2)]
    return cases_of(rows, ("jobs", "max_num_seqs"), scheduler_steps)


def compare_steps(case, got):
    """Looks for the first step that differs, then asks which rule it breaks. Order within a step doesn't count."""
    jobs, max_num_seqs = case.arguments["jobs"], case.arguments["max_num_seqs"]
    arrivals, right = {name: arrival for name, arrival, _ in jobs}, case.expected
    if not isinstance(got, (list, tuple)) or not all(
            isinstance(step, (list, tuple, set, frozenset)) and all(isinstance(name, str) for name in step)
            for step in got):
        form = Sentence("a list of steps like {step}", step=show(right[0] if right else []))
        return Found(show(got), form, RULES["form"])
    for i, step in enumerate(got):
        theirs, ours = sorted(step), sorted(right[i]) if i < len(right) else []
        if theirs == ours and i < len(right):
            continue
        rule = rule_of_step(theirs, ours, right[:i], arrivals, i, max_num_seqs, right[i:])
        return Found(Sentence("step {i}: {names}", i=i, names=listed(theirs)),
                     Sentence("step {i}: {names}", i=i, names=listed(ours)) if i < len(right) else
                     Sentence("{n} steps, then everybody has ended", n=len(right)), RULES[rule])
    if len(got) < len(right):
        return Found(Sentence("ends after {n} steps", n=len(got)), Sentence(
            "{n} steps; in step {i}: {names}", n=len(right), i=len(got), names=listed(right[len(got)])), RULES["end"])
    return None


def listed(step):
    return ", ".join(step) or Sentence("nobody")


def rule_of_step(theirs, ours, past, arrivals, i, max_num_seqs, coming):
    """Which rule does step i break, if the steps before it, `past`, were right?"""
    came = {name for step in past for name in step}
    running = set(past[-1]) & set(ours) if past else set()             # who took part and has tokens to come
    new = [name for name in theirs if name not in came]
    waiting = [name for name, arrival in arrivals.items() if arrival <= i and name not in came]
    if not coming and not theirs:
        return "end"                                                   # an idle step when all is over
    if not set(theirs) <= set(arrivals):
        return "form"
    if len(set(theirs)) < len(theirs):
        return "once"
    if coming and not ours and theirs == sorted(next(step for step in coming if step)):
        return "idle"                                                  # the next busy step, too early
    if any(arrivals[name] > i for name in theirs):
        return "arrival"
    if any(name in came and name not in running for name in theirs):
        return "leave"
    if not running <= set(theirs):
        return "stay"
    if len(theirs) > max_num_seqs:
        return "seats"
    return "join" if sorted(new) == sorted(waiting[:len(new)]) else "fcfs"


TASKS = [Task("kv_bytes_per_token", kv_bytes_cases, explain=explain_kv_bytes, points=15),
         Task("max_concurrency", concurrency_cases, compare_concurrency, points=20),
         Task("latencies", latencies_cases, compare_latencies, points=20),
         Task("static_waste", waste_cases, compare_waste, points=20),
         Task("continuous_batching", batching_cases, compare_steps, points=25)]
