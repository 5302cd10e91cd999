"""Chapter 1's lab: the engine's own step in outline. Read it after your own."""
from nano_serve import build_batch
from sampling import sample


def step(engine):
    plan, sampled = engine.scheduler.schedule(), {}
    ends = [r for r in plan.scheduled_requests if r.num_computed_tokens == r.num_tokens]
    if plan.scheduled_requests:
        try:
            logits = engine.executor.execute(build_batch(plan, engine.scheduler.kv_cache_manager, engine.device))
        except BaseException:
            for request_id in list(engine.scheduler.requests):
                engine.abort_request(request_id)
            engine.scheduler.kv_cache_manager.reset_prefix_cache()
            raise
        for request, token_id in zip(ends, sample(logits, ends)):
            if token_id is None:
                engine.scheduler.finish_request(request.request_id, "error")
            else:
                sampled[request.request_id] = token_id
    engine.scheduler.update_from_output(plan, sampled)
