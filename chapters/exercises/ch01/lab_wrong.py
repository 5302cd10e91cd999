"""Wrong steps, each with the rule that the lab has to name. They are made of parts; a wrong one changes one."""
from nano_serve import build_batch
from sampling import sample


def ends_of(plan):
    return [r for r in plan.scheduled_requests if r.num_computed_tokens == r.num_tokens]


def abort_all(engine):
    for request_id in list(engine.scheduler.requests):
        engine.abort_request(request_id)
    engine.scheduler.kv_cache_manager.reset_prefix_cache()


def make(plan_of=lambda engine: engine.scheduler.schedule(), ends=ends_of, empty=False, draw=sample, failed="error",
         hand_back=lambda engine, plan, sampled: engine.scheduler.update_from_output(plan, sampled), rescue=abort_all,
         run=lambda engine, batch: engine.executor.execute(batch), swallow=False):
    """The right step, but for the parts that are given."""
    def step(engine):
        plan, sampled = plan_of(engine), {}
        if plan.scheduled_requests or empty:
            try:
                logits = run(engine, build_batch(plan, engine.scheduler.kv_cache_manager, engine.device))
            except Exception:
                rescue(engine)
                if swallow:
                    return
                raise
            for request, token_id in zip(ends(plan), draw(logits, ends(plan))):
                if token_id is None and failed:
                    engine.scheduler.finish_request(request.request_id, failed)
                else:
                    sampled[request.request_id] = token_id
        hand_back(engine, plan, sampled)
    return step


def keep(engine):
    """Nothing is aborted, nothing forgotten."""


def abort_without_forgetting(engine):
    for request_id in list(engine.scheduler.requests):
        engine.abort_request(request_id)


def append_too(engine, plan, sampled):
    for request in plan.scheduled_requests:
        if request.request_id in sampled:
            request.append_output_token_id(sampled[request.request_id])
    engine.scheduler.update_from_output(plan, sampled)


def never(engine, plan, sampled):
    """The tokens go nowhere."""


def twice(engine, plan, sampled):
    engine.scheduler.update_from_output(plan, sampled)
    engine.scheduler.update_from_output(plan, sampled)


def after_an_empty_plan_nothing(engine, plan, sampled):
    if plan.scheduled_requests:
        engine.scheduler.update_from_output(plan, sampled)


def plan_twice(engine):
    engine.scheduler.schedule()
    return engine.scheduler.schedule()


def run_twice(engine, batch):
    engine.executor.execute(batch)
    return engine.executor.execute(batch)


def run_before(logits=[]):
    """The logits of the step before, where they fit."""
    def run(engine, batch):
        logits.append(engine.executor.execute(batch).clone())
        old = logits[-2] if len(logits) > 1 else logits[-1]
        return old if old.shape == logits[-1].shape else logits[-1]
    return run


def first_row(logits, ends):
    return sample(logits[:1].repeat(len(ends), 1), ends) if ends else []


def in_decode(plan):
    return [r for r in ends_of(plan) if r.num_output_tokens]


def no_schedule(engine):
    engine.has_unfinished_requests()


def without_a_run(engine):
    plan = engine.scheduler.schedule()
    engine.scheduler.update_from_output(plan, {r.request_id: 0 for r in ends_of(plan)})


def a_token_for_everybody(engine):
    plan = engine.scheduler.schedule()
    if plan.scheduled_requests:
        logits = engine.executor.execute(build_batch(plan, engine.scheduler.kv_cache_manager, engine.device))
        tokens = sample(logits, ends_of(plan))
        tokens = tokens or [0]
        sampled = {r.request_id: tokens[min(i, len(tokens) - 1)] for i, r in enumerate(plan.scheduled_requests)}
        engine.scheduler.update_from_output(plan, sampled)
    else:
        engine.scheduler.update_from_output(plan, {})


WRONG = {       # name: (step, the rule that it breaks)
    "no schedule": (no_schedule, "schedule"),
    "scheduled twice": (make(plan_twice), "schedule"),
    "nothing is run": (without_a_run, "run"),
    "run twice": (make(run=run_twice), "run"),
    "an empty plan is run": (make(empty=True), "empty"),
    "an empty plan is not handed back": (make(hand_back=after_an_empty_plan_nothing), "empty"),
    "rows the other way round": (make(draw=lambda logits, ends: sample(logits.flip(0), ends)), "rows"),
    "the first row for all": (make(draw=first_row), "rows"),
    "tokens by the plan's order": (make(ends=lambda plan: plan.scheduled_requests), "rows"),
    "a token for everybody": (a_token_for_everybody, "rows"),
    "a token for those in decode only": (make(ends=in_decode), "rows"),
    "never handed back": (make(hand_back=never), "hand back"),
    "handed back twice": (make(hand_back=twice), "hand back"),
    "appended twice": (make(hand_back=append_too), "append"),
    "the least likely": (make(draw=lambda logits, ends: sample(-logits, ends)), "rows"),
    "rounded logits": (make(draw=lambda logits, ends: sample((logits / 4).round(), ends)), "likeliest"),
    "the logits of the step before": (make(run=run_before()), "rows"),
    "None is handed back": (make(failed=None), "not finite"),
    "not finite is an abort": (make(failed="abort"), "not finite"),
    "nobody is aborted": (make(rescue=keep), "broken off"),
    "the error is swallowed": (make(swallow=True), "broken off"),
    "the prefix cache is kept": (make(rescue=abort_without_forgetting), "published"),
}
step = None     # the lab's test puts one of them here
