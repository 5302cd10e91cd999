"""Chapter 1's lab: the step of the engine. Its rules, and what is asked of it: vLLM's traces, the tokens that the
engine's own step generates, its accounts, and what happens when something fails."""
from grade import Found
from lab import Lab, Proof, traces
from lang import Sentence, T

RULES = T({
    "schedule": "A step begins by asking the scheduler, once: nobody else decides who computes how much.",
    "run": "What the scheduler planned is run, all of it and once: one batch, one forward pass.",
    "empty": "A plan may be empty. Then nothing is run, and the scheduler is told all the same.",
    "rows": "Logits have a row for each request that has now computed all its tokens, in the order of the plan: only "
            "those requests get a token, and each the one of its own row.",
    "hand back": "The tokens go back to the scheduler once, with the plan that they belong to.",
    "append": "The scheduler appends the tokens: a step that appends them, too, has them twice.",
    "likeliest": "The token is drawn by sample, from the logits of this very step.",
    "accounts": "After each step the accounts hold: who runs, who waits, which blocks are whose.",
    "not finite": "sample answers None for a row that is not finite: that request is ended with \"error\", before the "
                  "others' tokens are handed back, and the others go on.",
    "broken off": "If the forward pass fails, the error gets out, and nobody goes on: the blocks of this step were "
                  "counted as computed and are not. So all requests are aborted.",
    "published": "If the forward pass fails, the prefix cache is reset: schedule has published this step's blocks, and "
                 "nothing is in them.",
})

PROMPTS = ["What is the KV cache?", "What is continuous batching?", "What is a token budget?", "What is preemption?",
           "What is a block table?"]
LONG = " ".join(PROMPTS)
RUNS = (21, 0, 3, 6, 10, 15, 24, 26)    # of vLLM's 60: with empty plans, preemptions, aborts, priorities


# -- 1. vLLM's traces

def replays():
    """The first half of each run is enough to differ in; what vLLM decided stays here."""
    return [("replay", {"number": i, "config": traces()[i]["config"], "events": traces()[i]["events"],
                        "sampled": [step["sampled"] for step in traces()[i]["steps"][:150]]}) for i in RUNS]


def judge_replay(data, told, _):
    """Step by step, what differs first."""
    for k, (step, want) in enumerate(zip(told, traces()[data["number"]]["steps"])):
        found = judge_step(step, want)
        if found:
            code, expected, rule = found
            where = {"run": data["number"], "k": k}
            return Found(Sentence("trace {run}, step {k}: {what}", what=code, **where),
                         Sentence("trace {run}, step {k}: {what}", what=expected, **where), RULES[rule])
    return None


def judge_step(step, want):
    tokens, planned = want["sampled"], sum(n for _, n in want["scheduled"])
    plan = Sentence("{plan} planned", plan=listed(dict(want["scheduled"])))
    handed = Sentence("{tokens} handed back", tokens=listed(tokens))
    if step["plans"] != 1:
        return (Sentence("{error}", error=step["error"]) if step["error"] else
                Sentence("the scheduler was asked {n} times", n=step["plans"])), plan, "schedule"
    if step["scheduled"] != want["scheduled"]:
        return Sentence("{plan} planned", plan=listed(dict(step["scheduled"]))), plan, "hand back"
    if step["error"]:
        return (Sentence("{error}", error=step["error"]),
                handed if planned else Sentence("an empty plan, and nothing to run"),
                "run" if planned and not step["batches"] else "rows" if planned else "empty")
    if step["batches"] != ([planned] if planned else []):
        return (Sentence("{n} forward passes, of {tokens} tokens", n=len(step["batches"]), tokens=step["batches"]),
                Sentence("one of {n} tokens", n=planned) if planned else Sentence("an empty plan, and nothing to run"),
                "run" if planned else "empty")
    if len(step["handed"]) != 1:
        return (Sentence("tokens handed back {n} times", n=len(step["handed"])), handed,
                "hand back" if planned else "empty")
    if step["handed"][0] != tokens:
        return Sentence("{tokens} handed back", tokens=listed(step["handed"][0])), handed, "rows"
    if step["finished"] != want["finished"]:
        return (Sentence("{names} ended", names=", ".join(step["finished"]) or Sentence("nobody")),
                Sentence("{names} ended", names=", ".join(want["finished"]) or Sentence("nobody")), "append")
    return None


def listed(tokens):
    """Example: {"r0": 16, "r3": 1}  →  "r0: 16, r3: 1"."""
    return ", ".join(f"{name}: {n}" for name, n in tokens.items()) or Sentence("nothing")


# -- 2. Tokens and accounts on the embedded model

def servings():
    small = {"max_num_batched_tokens": 24, "block_size": 4, "num_kv_blocks": 40, "max_model_len": 120}
    return [("serve", {"prompts": [[p, 8] for p in PROMPTS], "options": {}}),
            ("serve", {"prompts": [[LONG, 6]] + [[p, 12] for p in PROMPTS], "options": small})]


def judge_serving(data, got, want):
    if got["broken"]:
        return Found(Sentence("{error}", error=got["broken"]), Sentence("accounts that hold"), RULES["accounts"])
    for i, (mine, right) in enumerate(zip(got["ids"], want["ids"])):
        if mine != right:
            k = next((k for k, (a, b) in enumerate(zip(mine, right)) if a != b), min(len(mine), len(right)))
            return Found(Sentence("prompt {i}, token {k}: {tokens}", i=i, k=k, tokens=mine[k:k + 6]),
                         Sentence("prompt {i}, token {k}: {tokens}", i=i, k=k, tokens=right[k:k + 6]),
                         RULES["likeliest"])
    if not got["free"]:
        return Found(Sentence("blocks are still held at the end"), Sentence("accounts that hold"), RULES["accounts"])
    return None


# -- 3. Failures

def failures():
    return [("not_finite", {"prompts": [[p, 6] for p in PROMPTS[:3]], "step": 2, "row": 1})]


def judge_not_finite(data, got, want):
    if got == want:
        return None
    for i, (mine, right) in enumerate(zip(got["reasons"], want["reasons"])):
        if mine != right:
            return Found(Sentence("request {i} ended with {reason}", i=i, reason=repr(mine)),
                         Sentence("request {i} ended with {reason}", i=i, reason=repr(right)), RULES["not finite"])
    return Found(Sentence("other tokens: {tokens}", tokens=str(got["ids"])[:60]),
                 Sentence("other tokens: {tokens}", tokens=str(want["ids"])[:60]), RULES["not finite"])


def broken_runs():
    return [("run_fails", {"prompts": [[LONG, 6], [PROMPTS[0], 6]], "step": 0}),
            ("run_fails", {"prompts": [[LONG, 6], [PROMPTS[0], 6]], "step": 2})]


def judge_broken(data, got, want):
    if not got["raised"] or got["left"]:
        return Found(Sentence("the error got out: {raised}; still there: {left}",
                              raised=got["raised"] or Sentence("no"),
                              left=", ".join(got["left"]) or Sentence("nobody")),
                     Sentence("the error got out: {raised}; still there: {left}", raised=want["raised"],
                              left=Sentence("nobody")), RULES["broken off"])
    if got["hit"] != want["hit"]:
        return Found(Sentence("a new request finds {n} blocks of it", n=got["hit"]),
                     Sentence("a new request finds {n} blocks of it", n=want["hit"]), RULES["published"])
    return None


LAB = Lab("nano_serve:LLMEngine.step", "step", [
    Proof(T("vLLM's traces, 8 of its runs"), replays, judge_replay, RULES["run"], truth=True),
    Proof(T("the tokens of the engine's own step, and the accounts after each"), servings, judge_serving,
          RULES["accounts"]),
    Proof(T("a request whose logits are not finite"), failures, judge_not_finite, RULES["not finite"]),
    Proof(T("a forward pass that fails"), broken_runs, judge_broken, RULES["broken off"]),
], lambda: ("five", {"prompts": PROMPTS, "max_tokens": 60}))
