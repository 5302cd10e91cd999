"""Chapter 1's lab (article §1, §4): the step of the engine, LLMEngine.step in outline. `make lab CH=1`; 中文版：labs.zh.py

Read first in nano_serve.py what a step is, then close it. Your function is put in the place of LLMEngine.step, replays
vLLM's recorded runs, generates on the embedded model, and then serves five prompts.
"""
from nano_serve import build_batch  # noqa: F401
from sampling import sample  # noqa: F401


def step(engine):
    """One step for everybody who is scheduled: schedule, run, sample, hand back. Returns nothing.

    What you need:
      engine.scheduler.schedule()
          the plan: .scheduled_requests, .num_scheduled_tokens; it has counted the plan's tokens as computed already
      build_batch(plan, engine.scheduler.kv_cache_manager, engine.device)
          the plan as tensors
      engine.executor.execute(batch)
          the forward pass: logits, a row for each request that has now computed all its tokens
          (num_computed_tokens == num_tokens), in the plan's order
      sample(logits, requests)
          a token id for each row, None for one that is not finite
      engine.scheduler.finish_request(request_id, "error")
          ends a request
      engine.scheduler.update_from_output(plan, {request_id: token_id})
          appends the tokens, ends who is done, frees

    A plan may be empty: nothing can be run then. And if the forward pass raises: abort all requests that there are
    (engine.abort_request; engine.scheduler.requests has them by id), forget the blocks that schedule has published
    (engine.scheduler.kv_cache_manager.reset_prefix_cache()), and let the error go on.

    vLLM: v1/engine/core.py:584 EngineCore.step
    """
    raise NotImplementedError("chapter 1, lab: schedule, run, sample, hand back")
