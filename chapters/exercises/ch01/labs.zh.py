"""第 1 章实验（文章第 1、4 节）：引擎的一步，即 LLMEngine.step 的主干。运行 `make lab CH=1`。

先在 nano_serve.py 里读懂一步是怎么走的，再合上它自己写。你的函数会换到 LLMEngine.step 的位置上：回放 vLLM 录下的运行，
在内嵌模型上生成 token，最后真的回答五个提问。
"""
from nano_serve import build_batch  # noqa: F401
from sampling import sample  # noqa: F401


def step(engine):
    """为所有被调度的请求走一步：调度、运行、采样、交还。不返回任何东西。

    你会用到：
      engine.scheduler.schedule()
          计划：.scheduled_requests、.num_scheduled_tokens；计划里的 token 此时已记为“已计算”
      build_batch(plan, engine.scheduler.kv_cache_manager, engine.device)
          把计划变成张量
      engine.executor.execute(batch)
          前向传播：得到 logits，凡是已算完全部 token 的请求（num_computed_tokens == num_tokens）各占一行，
          按计划里的顺序
      sample(logits, requests)
          每一行一个 token id；不是有限数的那一行为 None
      engine.scheduler.finish_request(request_id, "error")
          结束一个请求
      engine.scheduler.update_from_output(plan, {request_id: token_id})
          追加 token，结束已完成的，释放块

    计划可能是空的：那就没有东西可运行。如果前向传播抛出异常：中止现有的所有请求（engine.abort_request；
    engine.scheduler.requests 按 id 存着它们），忘掉 schedule 已经发布的块
    （engine.scheduler.kv_cache_manager.reset_prefix_cache()），再让异常继续抛出。

    vLLM: v1/engine/core.py:584 EngineCore.step
    """
    raise NotImplementedError("第 1 章实验：调度、运行、采样、交还")
