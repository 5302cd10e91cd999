"""What a step leaves behind (chapter 4): one record, from which every table, picture, trace and test is made.

Promises  plain values only (`dataclasses.asdict` is JSON), and nothing that grows with the output's length. A field
          that an older file doesn't have gets its default.
Who makes it: Scheduler.make_record, once a step has run. Who reads it: LLMEngine.records, `--records FILE`, show.py.
"""
from dataclasses import dataclass, field


@dataclass
class RequestStep:
    """One request's part in a step: tokens computed before it and scheduled in it, blocks hit, token sampled."""

    request_id: str
    computed: int              # tokens whose K and V were there before the step, hits included
    scheduled: int             # tokens that the step computed; computed + scheduled = all known: then one is sampled
    hit_blocks: int            # in the step that admitted it, else 0
    sampled: int | None        # the new token's id
    num_prompt_tokens: int
    arrival_time: float = 0.0  # on the engine's clock: what a picture needs to show the wait before the first step
    blocks: list[int] = field(default_factory=list)  # ids its block table gained, the hits first
    text: str = ""                                   # text that its answer gained


@dataclass
class StepRecord:
    """All that a step did, in plain values. Tables, pictures and traces draw on it alone.

    `time` (start) and `duration` (from planning to the outputs) in seconds on the engine's clock; `budget` and `used`
    in tokens; `running` and `waiting` (the preempted among them) requests and `free_blocks` as schedule() left them;
    `total_blocks` without the null block. Example, step 1 of scheduler.py's opening, A 8→10 and B 0→3 of a budget of 8:
    budget 8, used 5, running 2, waiting 0, requests of computed 8 and 0, scheduled 2 and 3, each with a token sampled.
    """

    step: int
    time: float
    duration: float
    requests: list[RequestStep]
    budget: int
    used: int
    running: int
    waiting: int
    preempted: list[str]       # before anything was computed; they wait again
    free_blocks: int
    total_blocks: int
    finished: list[str]        # by a token or a stop string of this step
    arrived: dict = field(default_factory=dict)  # since the step before: id → prompt tokens
    aborted: list[str] = field(default_factory=list)             # since the step before, unless they arrived since, too
    block_size: int = 0                          # 0: a record without block ids
    enable_prefix_caching: bool = False
