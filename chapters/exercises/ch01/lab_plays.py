"""What chapter 1's lab plays with the student's `step`. Runs in the sandbox, with the engine imported; what happened is
returned as plain data, and nothing is judged here."""
import importlib
import sys

import torch

from kv_cache import KVCacheManager
from nano_serve import EngineArgs, LLMEngine
from request import Request, SamplingParams
from scheduler import Scheduler, SchedulerConfig, check_invariants

torch.set_num_threads(1)
WORDS = 64          # words of the vocabulary in a replay: the traces' sampled tokens are below it


def put_in_place(target, name):
    """The student's function, by its name in the file of answers, in the place of "module:Class.function"."""
    if name is not None:
        module, path = target.split(":")
        *owners, last = path.split(".")
        owner = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, last, getattr(sys.modules["answers"], name))


def refuse_stub(name):
    """A file without the function is told so by its own error."""
    if name is not None and not callable(getattr(sys.modules["answers"], name, None)):
        raise LookupError(f"has no function {name}")


# -- 1. vLLM's traces: the scheduler of a recorded run, and a model that says the recorded tokens

class Watched:
    """Stands before an object and notes what is asked of it, in order."""

    def __init__(self, real, notes, names):
        self.__dict__.update(_real=real, _notes=notes, _names=names)

    def __getattr__(self, name):
        value = getattr(self._real, name)
        if name not in self._names:
            return value

        def noted(*arguments):
            result = value(*arguments)
            self._notes.append((name, arguments, result))
            return result
        return noted

    def __setattr__(self, name, value):
        setattr(self._real, name, value)


def what_was_raised(error):
    """The error, and the line of the answers' file in which it came up."""
    file, line, trace = sys.modules["answers"].__file__, None, error.__traceback__
    while trace:
        line, trace = trace.tb_lineno if trace.tb_frame.f_code.co_filename == file else line, trace.tb_next
    return f"{type(error).__name__}: {error}"[:200] + (f" ({file}:{line})" if line else "")


class Recorded:
    """An executor whose logits make the recorded token of each request the likeliest, row by row."""

    def __init__(self, notes):
        self.notes, self.tokens, self.batches = notes, {}, []

    def execute(self, batch):
        plans = [result for name, _, result in self.notes if name == "schedule"]
        ends = [r for r in plans[-1].scheduled_requests if r.num_computed_tokens == r.num_tokens] if plans else []
        self.batches.append(int(batch.token_ids.shape[0]))
        logits = torch.zeros(len(ends), WORDS)                                                     # [S', V]
        for row, request in enumerate(ends):
            logits[row, self.tokens.get(request.request_id, 0)] = 100.0
        return logits

    def close(self):
        pass


def replay(target, name, run):
    """run: config, events and each step's sampled tokens of one of vLLM's runs. Returns what each step did: the plan,
    how many tokens were run, what was handed to the scheduler, who finished, and how many tokens each request has."""
    refuse_stub(name)
    put_in_place(target, name)
    engine = make_engine()
    options, events, told, seen = dict(run["config"]), list(run["events"]), [], {}
    manager = KVCacheManager(options.pop("num_blocks"), options.pop("block_size"), options.pop("enable_prefix_caching"))
    real, notes = Scheduler(SchedulerConfig(**options), manager), []
    engine.scheduler, engine.executor = Watched(real, notes, ("schedule", "update_from_output")), Recorded(notes)
    for k, tokens in enumerate(run["sampled"]):
        while events and events[0]["step"] <= k:
            event = events.pop(0)
            if "abort" in event:
                real.abort_request(event["abort"])
                continue
            add = dict(event["add"])
            params = SamplingParams(max_tokens=add.pop("max_tokens"), stop_token_ids=add.pop("stop_token_ids"),
                                    ignore_eos=True, temperature=0.0)
            seen[add["request_id"]] = Request(sampling_params=params, **add)
            real.add_request(seen[add["request_id"]])
        notes.clear()
        engine.executor.tokens, engine.executor.batches = tokens, []
        alive, error = set(real.requests), None
        try:
            engine.step()
        except NotImplementedError:
            raise
        except Exception as wrong:
            error = what_was_raised(wrong)
        plans = [result for asked, _, result in notes if asked == "schedule"]
        handed = [arguments[1] for asked, arguments, _ in notes if asked == "update_from_output"]
        planned = [list(item) for plan in plans for item in plan.num_scheduled_tokens.items()]
        told.append({"plans": len(plans), "scheduled": planned,
                     "batches": list(engine.executor.batches), "handed": [dict(h) for h in handed], "error": error,
                     "finished": sorted(alive - set(real.requests)),
                     "outputs": {i: seen[i].num_output_tokens for i in sorted(alive)}})
        if error or len(plans) != 1 or len(handed) != 1 or told[-1]["handed"][0] != tokens:
            break                                                       # what follows says nothing more
    return told


# -- 2. The model itself

def make_engine(**options):
    return LLMEngine(EngineArgs(**{"num_kv_blocks": 64, "max_model_len": 512, "max_num_seqs": 8, **options}))


def serve(target, name, data):
    """Requests on the embedded model. data: prompts, as texts, max_tokens each, the engine's options. Returns the token
    ids of each, whether the accounts held after each step, and how many blocks are free at the end."""
    refuse_stub(name)
    put_in_place(target, name)
    engine = make_engine(**data["options"])
    requests = []
    for i, (prompt, n) in enumerate(data["prompts"]):
        engine.add_request(f"r{i}", prompt, SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True))
        requests.append(engine.scheduler.requests[f"r{i}"])
    steps, broken = 0, None
    while engine.has_unfinished_requests() and steps < 2000 and broken is None:
        engine.step()
        steps += 1
        try:
            check_invariants(engine.scheduler)
        except Exception as wrong:
            broken = f"step {steps}: {wrong}"[:200]
    manager = engine.scheduler.kv_cache_manager
    result = {"ids": [list(r.output_token_ids) for r in requests], "broken": broken, "steps": steps,
              "free": manager.num_free_blocks == manager.num_usable_blocks}
    engine.close()
    return result


def five(target, name, data):
    """The answers of the embedded model to a few questions, all at once: [(question, answer)], to be read."""
    put_in_place(target, name)
    engine, requests = make_engine(), []
    for question in data["prompts"]:
        engine.add_request(question, {"messages": [{"role": "user", "content": question}]},
                           SamplingParams(max_tokens=data["max_tokens"], temperature=0.0))
        requests.append(engine.scheduler.requests[question])
    while engine.has_unfinished_requests():
        engine.step()
    return [(r.request_id, " ".join(engine.codec.decode(list(r.output_token_ids)).split())) for r in requests]


def not_finite(target, name, data):
    """One request's logits turn to NaN in step data["step"]. Returns how each request ended, and its tokens."""
    refuse_stub(name)
    put_in_place(target, name)
    engine = make_engine()
    execute, steps, requests = engine.executor.execute, 0, []
    for i, (prompt, n) in enumerate(data["prompts"]):
        engine.add_request(f"r{i}", prompt, SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True))
        requests.append(engine.scheduler.requests[f"r{i}"])

    def broken(batch):
        logits = execute(batch).clone()
        if steps == data["step"]:
            logits[data["row"]] = float("nan")
        return logits

    engine.executor.execute = broken
    while engine.has_unfinished_requests() and steps < 200:
        engine.step()
        steps += 1
    return {"reasons": [r.finish_reason for r in requests], "ids": [list(r.output_token_ids) for r in requests],
            "left": sorted(engine.scheduler.requests)}


def run_fails(target, name, data):
    """The forward pass of step data["step"] raises. Returns whether the error got out, who is left, and how many blocks
    of the prefix cache a new request with an old prompt would find: all of it was published and never computed."""
    refuse_stub(name)
    put_in_place(target, name)
    engine = make_engine()
    execute, steps, out = engine.executor.execute, 0, None
    for i, (prompt, n) in enumerate(data["prompts"]):
        engine.add_request(f"r{i}", prompt, SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True))

    def broken(batch):
        if steps == data["step"]:
            raise RuntimeError("a rank has died")
        return execute(batch)

    engine.executor.execute = broken
    while engine.has_unfinished_requests() and steps < 50 and out is None:
        try:
            engine.step()
        except RuntimeError as error:
            out = str(error)
        steps += 1
    left = sorted(engine.scheduler.requests)
    probe = Request("probe", engine.codec.encode(data["prompts"][0][0]), SamplingParams(max_tokens=1))
    manager = engine.scheduler.kv_cache_manager
    engine.scheduler = Scheduler(engine.scheduler.config, manager)      # whatever is left in the old one
    engine.scheduler.add_request(probe)
    hit = engine.scheduler.schedule().num_computed_tokens["probe"] // manager.block_size
    return {"raised": out, "left": left, "hit": hit}
