"""Chapter 2's lab: the durations of RequestMetrics. Its rules, and what is asked of it: single moments, a run that
streams and is watched after every step, a pool so small that requests are preempted, aborts."""
from grade import Found, same, show
from lab import Lab, Proof
from lang import Sentence, T

RULES = T({
    "keys": "The answer is a dict with exactly the keys queue_time, ttft, itls, tpot and e2e.",
    "queue": "The queue ends when the first step computes something of it, seconds after the arrival.",
    "ttft": "TTFT runs from the arrival, so the queue is in it, to the first token.",
    "itls": "ITLs are the gaps between one token and the next, in order: N tokens have N - 1, and the TTFT is none.",
    "tpot": "TPOT is the time from the first token to the last, divided by N - 1.",
    "e2e": "E2E runs from the arrival to the end.",
    "single": "A single token has no gap after it: TPOT is None, and there are no ITLs.",
    "waiting": "What can't be said yet is None, and not 0: a request that waits has no queue time yet, one without a "
               "token no TTFT, and its ITLs are an empty list.",
    "running": "It is asked after every step, and says what is true now: tokens come, and the end comes last.",
    "aborted": "A request may end without a token: then it has an E2E, and no TTFT.",
    "preempted": "Who was preempted and runs again keeps the first moment at which it was scheduled.",
})

PROMPTS = ["What is the KV cache?", "What is continuous batching?", "What is a token budget?", "What is preemption?",
           "What is a block table?"]
KEYS = "queue_time", "ttft", "itls", "tpot", "e2e"

# title: (rule, moments), a moment being (arrival, first scheduled, token times, finished).
MOMENTS = {T("a request from its arrival to its end"): ("e2e", [(1.0, 2.0, [4.0, 4.5, 6.5, 7.0], 7.25)]),
           T("an answer of a single token"): ("single", [(2.0, 3.0, [5.0], 5.0)]),
           T("a request that waits, and one without a token"): (
               "waiting", [(3.0, None, [], None), (4.0, 5.5, [], None)]),
           T("a request that runs"): ("running", [(5.0, 5.5, [6.0, 8.0, 8.5], None)]),
           T("requests that ended without a token"): ("aborted", [(6.0, None, [], 10.0), (7.0, 8.0, [], 11.0)])}
RULE_OF = {"queue_time": "queue", "ttft": "ttft", "itls": "itls", "tpot": "tpot", "e2e": "e2e"}


def differing(got, want):
    """The first key that differs, or None; "" if the keys themselves do."""
    if not isinstance(got, dict) or set(got) != set(KEYS):
        return ""
    return next((key for key in KEYS if not same(got[key], want[key])), None)


def found_in(got, want, rule, where=None):
    """Found, if what is said of one moment isn't right. where: (step, request)."""
    key = differing(got, want)
    if key is None:
        return None
    if not key:
        return Found(show(got), Sentence("a dict with the keys {keys}", keys=", ".join(KEYS)), RULES["keys"])
    if where is None:
        return Found(Sentence("{key} is {value}", key=key, value=show(got[key])),
                     Sentence("{key} is {value}", key=key, value=show(want[key])), RULES[rule or RULE_OF[key]])
    said = {"step": where[0], "name": where[1], "key": key}
    return Found(Sentence("after step {step}, {name}: {key} is {value}", value=show(got[key]), **said),
                 Sentence("after step {step}, {name}: {key} is {value}", value=show(want[key]), **said), RULES[rule])


def moment_proof(title, rule, moments):
    """The first is an ordinary request: there each key has its own rule."""
    def judge(data, got, want):
        found = [found_in(mine, right, None if rule == "e2e" else rule) for mine, right in zip(got, want)]
        return next(filter(None, found), None)
    return Proof(title, lambda: [("moments", [list(moment) for moment in moments])], judge, RULES[rule])


def runs():
    return [("serve", {"prompts": [[p, 6] for p in PROMPTS], "options": {"max_num_seqs": 3}, "aborts": {}})]


def small_pools():
    tight = {"block_size": 4, "num_kv_blocks": 24, "max_num_batched_tokens": 64, "max_model_len": 92}
    return [("serve", {"prompts": [[p, 40] for p in PROMPTS[:4]], "options": tight, "aborts": {}}),
            ("serve", {"prompts": [[p, 12] for p in PROMPTS], "options": {"max_num_seqs": 2},
                       "aborts": {"0": ["r4"], "3": ["r1", "r3"]}})]


def judge_run(rule):
    def judge(data, got, want):
        for (step, name, said), (_, _, right) in zip(got["said"], want["said"]):
            found = found_in(said, right, rule, (step, name))
            if found:
                return found
        return None
    return judge


LAB = Lab("request:RequestMetrics", "durations", [
    *[moment_proof(title, *moments) for title, moments in MOMENTS.items()],
    Proof(T("five requests on three seats, asked after every step"), runs, judge_run("running"), RULES["running"]),
    Proof(T("preemptions and aborts, asked after every step"), small_pools, judge_run("preempted"), RULES["preempted"]),
], lambda: ("five", {"prompts": PROMPTS, "max_tokens": 60}))
