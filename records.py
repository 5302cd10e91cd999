"""What a step leaves behind (chapter 4): one record, from which every table, picture, trace and test is made.

Promises  plain values only (`dataclasses.asdict` is JSON), and nothing that grows with the output's length. A field
          that an older file doesn't have gets its default.
"""
from dataclasses import dataclass, field


@dataclass
class RequestStep:
    """One request's part in a step: tokens computed before it and scheduled in it, blocks hit, token sampled."""

    request_id: str
    computed: int
    scheduled: int
    hit_blocks: int
    sampled: int | None
    num_prompt_tokens: int
    arrival_time: float = 0.0  # on the engine's clock: what a picture needs to show the wait before the first step
    blocks: list[int] = field(default_factory=list)  # ids its block table gained, the hits first
    text: str = ""                                   # text that its answer gained


@dataclass
class StepRecord:
    """All that a step did, in plain values (`dataclasses.asdict` is JSON). Tables, pictures and traces draw on it
    alone. `time` (start) and `duration` (from planning to the outputs) in seconds on the engine's clock; `budget`
    and `used` in tokens; `running` and `waiting` requests and `free_blocks` as schedule() left them; `total_blocks`
    without the null block."""

    step: int
    time: float
    duration: float
    requests: list[RequestStep]
    budget: int
    used: int
    running: int
    waiting: int
    preempted: list[str]
    free_blocks: int
    total_blocks: int
    finished: list[str]
    arrived: dict = field(default_factory=dict)  # since the step before: id → prompt tokens
    aborted: list[str] = field(default_factory=list)             # since the step before, unless they arrived since, too
    block_size: int = 0                          # 0: a record without block ids
    enable_prefix_caching: bool = False
