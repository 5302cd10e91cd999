"""Chapter 2's walk-through in Chinese."""
ZH = {
    "Chapter 2, walked through: how to measure a serving system": "第 2 章演示：如何衡量一个 LLM Serving 系统",
    "Here: the tiny Llama-3 that comes with the project, on this CPU, measured as you watch. 70B: Llama-3-70B on 8 "
    "H100s, the engine's own scheduler on the ledger's clock. Its times are estimates, marked ~. Lengths are those of "
    "real conversations, Azure's of 2023.":
        "“本机”指项目自带的微型 Llama-3，在这台 CPU 上当场实测。“70B”指 8 张 H100 上的 Llama-3-70B：调度器就是引擎自己的，时钟由账本给出，所以时间是估算值，带 ~ 号。请求长度取自真实"
        "对话：Azure 2023 年的公开数据。",
    "timing a short run, to say how long all of it will take": "先跑一小段，估计全程需要多久",
    # 1
    "Four dimensions": "总览：四个维度",
    "one knob at a time": "一次只动一个旋钮",
    "70B: {n} conversations, {rate} a second; an arrow where more than a tenth moved":
        "70B：{n} 个对话请求，每秒 {rate} 个；变动超过一成的标箭头",
    "as it is": "原样",
    "half as many again arrive": "到达率提高一半",
    "32 seats (max_num_seqs)": "32 个座位（max_num_seqs）",
    "a budget of 512 tokens": "Token 预算降到 512",
    "P50 TTFT ms>": "P50 TTFT 毫秒>",
    "P99 ITL ms>": "P99 ITL 毫秒>",
    "tokens/s>": "token/秒>",
    "MFU>": "MFU>",
    "SLO kept>": "SLO 达标率>",
    "Latency (延迟), throughput (吞吐), efficiency (效率), quality (质量): no knob moves all of them, and what helps one may "
    "cost another. So a figure is named together with its load, its lengths and its limits, or it says nothing.":
        "延迟、吞吐、效率、质量：每个旋钮牵动的维度都不一样，对一个有利，往往对另一个不利。所以报一个指标，要连同负载、长度和限额一起报，否则等于什么也没说。",
    # 2
    "One time line": "指标总览：一条时间线",
    "the running example, on {tp} ranks": "贯穿全文的例子，{tp} 个 rank",
    "The running example, here: {n} tokens in, {m} out, TP={tp}":
        "贯穿全文的例子，本机实测：输入 {n} 个 token，输出 {m} 个，TP={tp}",
    "ms from t0>": "距 t0 毫秒>",
    "from the line above>": "距上一行>",
    "what happens": "发生了什么",
    "The intervals of one request, here": "一个请求的各个区间，本机",
    "queue": "排队",
    "prefill": "Prefill（预填充）",
    "the worst ITL": "最长的 ITL",
    "the client sends": "客户端发出请求",
    "the engine starts": "引擎开始处理",
    "first token": "第一个 token",
    "second token": "第二个 token",
    "last token": "最后一个 token",
    "Each metric in ms, three ways": "每个指标算三遍（毫秒）",
    "by hand": "手算",
    "not installed": "未安装",
    "yes": "是",
    "no": "否",
    "Equal to nine digits: {equal}. TTFT = t2 - t0, so a queue is in it. TPOT = (last - t2) / (N - 1), one number a "
    "request. ITL is each gap, {gaps} of them; their mean is the TPOT of that request. E2EL = last - t0. The worst "
    "gap, {worst} ms, shows in none of the means.":
        "九位有效数字全部一致：{equal}。TTFT = t2 - t0，排队也算在内。TPOT =（末 token 时刻 - t2）/（N - 1），一个请求只有一个数。ITL 是每一个间隔，共 {gaps} 个，它们的"
        "均值就是这个请求的 TPOT。E2EL = 末 token 时刻 - t0。最长的间隔有 {worst} 毫秒，在任何一个均值里都看不见。",
    "The same answer in chunks, as a client reads it, in ms": "同一个回答按 chunk 到达，客户端量到的（毫秒）",
    "TTFT>": "TTFT>",
    "TPOT>": "TPOT>",
    "gaps>": "间隔数>",
    "median ITL>": "ITL 中位数>",
    "E2EL>": "E2EL>",
    "a chunk a token": "一个 chunk 一个 token",
    "two tokens a chunk": "一个 chunk 两个 token",
    "the role with the first token": "role 与首 token 同时",
    "the role at once": "role 立刻发出",
    "The article says \"first output token\" in one place and \"first SSE chunk\" in another: these are two things. "
    "vLLM's client stamps the first chunk that has choices, even if it holds the role and no text. vLLM's own server "
    "sends the role when the first token is there, so only a gap of 0 is added. A server that sends it at once seems "
    "to have no TTFT, and its TPOT has swallowed the prefill. Two tokens a chunk double the ITL, and the TPOT stays.":
        "文章一处说“第一个输出 token”，另一处说“第一个 SSE chunk”，这是两回事。vLLM 的压测客户端给第一个带 choices 的 chunk 打时间戳，哪怕里面只有 role、没有文字。vLLM 自己的"
        "服务端等首 token 出来才发 role，所以只是多出一个 0 间隔。换成一收到请求就发 role 的服务端，TTFT 看起来几乎为零，Prefill 的时间则混进了 TPOT。一个 chunk 装两个 token"
        "，ITL 翻倍，TPOT 不变。",
    # 3
    "Six misreadings": "常见误区：六种误读",
    "the sweep over request rates": "逐个到达率扫描",
    "1. The mean alone. At {rate} conversations a second the mean E2E latency is ~{mean:.1f} s. P50 is ~{p50:.1f} s, "
    "P95 ~{p95:.1f} s, P99 ~{p99:.1f} s: {below:.0%} are quicker than the mean, and one in a hundred takes "
    "{times:.1f} times as long.":
        "误读一：只看平均值。每秒 {rate} 个对话请求时，E2E 时延平均 ~{mean:.1f} 秒。可是 P50 为 ~{p50:.1f} 秒，P95 为 ~{p95:.1f} 秒，P99 为 ~{p99:.1f} "
        "秒：{below:.0%} 的请求比平均值快，而每一百个里有一个要等平均值的 {times:.1f} 倍。",
    "2. TTFT taken for the time of a prefill. It counts from t0, and where load nears what can be served, most of it "
    "is queue:":
        "误读二：把 TTFT 当成 Prefill 时间。TTFT 从 t0 算起，负载接近极限时，大部分是排队：",
    "70B: what a TTFT is made of": "70B：TTFT 由什么组成",
    "TTFT, P50": "TTFT，P50",
    "queue, P50": "排队，P50",
    "prefill steps, P50": "Prefill 各步，P50",
    "requests/s": "请求/秒",
    "From {low} to {high} requests a second the median TTFT grows {grows:,.0f}-fold, the steps that compute the "
    "prompt {steps:.1f}-fold. Who speeds up prefill here works at the wrong end.":
        "到达率从每秒 {low} 个升到 {high} 个，TTFT 中位数涨到 {grows:,.0f} 倍，而计算 prompt 的那几步只涨到 {steps:.1f} 倍。这时去优化 Prefill，是用错了力气。",
    "a long prompt among decodes": "Decode 途中来了一个长 prompt",
    "3. TPOT taken for smoothness. Four streams decode, then a prompt of {n} tokens arrives:":
        "误读三：用 TPOT 判断输出是否流畅。四个请求正在 Decode，这时来了一个 {n} token 的 prompt：",
    "{where}, in one step": "{where}，一步算完",
    "{where}, in chunks": "{where}，分块",
    "here": "本机",
    "One of the four streams, in ms": "四路输出之一（毫秒）",
    "worst ITL>": "最长 ITL>",
    "worst to median>": "最长/中位>",
    "prompt in one step": "prompt 一步算完",
    "prompt in chunks": "prompt 分块",
    "70B: gaps of one stream as a long prompt arrives; the TPOTs hardly differ":
        "70B：长 prompt 到来时一路输出的间隔；两者的 TPOT 几乎一样",
    "TPOT divides the stall by all tokens of the answer. The reader of the stream sees it stand still. P99 and the "
    "worst of ITL are the figures for that.":
        "TPOT 把卡顿摊到整个回答的所有 token 上，可是读的人眼看着它停住了。要看流畅与否，看 ITL 的 P99 和最大值。",
    "4. GPU utilisation taken for efficiency. It says that some kernel is running, and in each of these steps one "
    "always is:":
        "误读四：把 GPU 利用率当成效率。它只说明有 kernel 在跑，而下面每一步里始终有 kernel 在跑：",
    "a prefill of {n} tokens": "Prefill，{n} 个 token",
    "a decode, batch {n}": "Decode，批大小 {n}",
    "70B, steps at {n} tokens of context": "70B，上下文 {n} 个 token 时的一步",
    "GPU utilisation>": "GPU 利用率>",
    "step ms>": "一步毫秒>",
    "bandwidth (MBU)>": "带宽（MBU）>",
    "The article holds memory bandwidth for a cause of low GPU utilisation. It is not: a kernel that waits for memory "
    "is running. What is low in a decode is the MFU: per mille at batch 1, per cent only at larger ones. That is no "
    "defect: what a decode is made of is reading memory, and MBU says how well it does that. The honest pair is (MFU, "
    "MBU).":
        "文章说 GPU 利用率低可能是因为受显存带宽限制。并非如此：等显存的 kernel 也算在运行。Decode 时低的是 MFU：batch 为 1 时只有千分之几，batch 大了才到百分之几。这不是缺陷："
        "Decode 干的就是读显存，读得好不好要看 MBU。诚实的报法是 MFU 和 MBU 一起报。",
    "the same rate, other lengths": "到达率相同，长度不同",
    "5. Requests a second alone. The same rate, of three kinds of request:":
        "误读五：只看每秒请求数。到达率相同的三种请求：",
    "70B, {rate:g} requests/s": "70B，每秒 {rate:g} 个请求",
    "conversation": "对话",
    "code completion": "代码补全",
    "the running example": "贯穿全文的例子",
    "requests/s>": "请求/秒>",
    "output tokens/s>": "输出 token/秒>",
    "P50 in>": "输入 P50>",
    "P50 out>": "输出 P50>",
    "all tokens/s>": "全部 token/秒>",
    "smaller and smaller pools": "KV 池越来越小",
    "6. A full KV memory taken for a good one. The same load on smaller and smaller pools:":
        "误读六：KV 显存占得越满越好。同样的负载，池子越来越小：",
    "70B, KV pools in shares of what is needed": "70B，KV 池占所需的比例",
    "pool>": "池>",
    "mean use>": "平均占用>",
    "preempted>": "抢占>",
    "recomputed tokens>": "重算 token>",
    "P99 TTFT ms>": "P99 TTFT 毫秒>",
    "The fuller the memory, the worse the service. The article speaks of swapping KV out and in here; vLLM V1 doesn't "
    "swap. Who is preempted (抢占) gives its blocks back and is computed again (重计算), as counted above.":
        "池子越满，服务越差。文章在这里说到 KV 换出换入，但 vLLM V1 并不换出：被抢占的请求交还所有块，之后重新计算，上表数的就是重算的 token。",
    "Six misreadings, in figures of the runs above": "六种误读，数字出自上面各次运行",
    "what the dashboard says": "仪表盘说",
    "what happened": "实际发生的",
    "the mean alone": "只看平均值",
    "TTFT = prefill": "TTFT = Prefill 时间",
    "TPOT = smooth": "TPOT = 流畅",
    "utilisation = efficiency": "利用率 = 效率",
    "requests/s alone": "只看请求/秒",
    "full = good": "越满越好",
    "mean E2E ~{s:.1f} s": "E2E 平均 ~{s:.1f} 秒",
    "TTFT ~{ms:,.0f} ms": "TTFT ~{ms:,.0f} 毫秒",
    "TPOT ~{a:.1f}, ~{b:.1f} ms": "TPOT ~{a:.1f}、~{b:.1f} 毫秒",
    "GPU utilisation 100 %": "GPU 利用率 100%",
    "{a:.1f}, {b:.1f} requests/s": "每秒 {a:.1f}、{b:.1f} 个请求",
    "KV use {a:.0%}, {b:.0%}": "KV 占用 {a:.0%}、{b:.0%}",
    "P99 ~{s:.1f} s": "P99 为 ~{s:.1f} 秒",
    "~{ms:,.0f} ms of it in the queue": "其中 ~{ms:,.0f} 毫秒在排队",
    "worst gap ~{a:.0f}, ~{b:.0f} ms": "最长间隔 ~{a:.0f}、~{b:.0f} 毫秒",
    "MFU ~{mfu:.2%}, MBU ~{mbu:.0%}": "MFU 为 ~{mfu:.2%}，MBU 为 ~{mbu:.0%}",
    "~{a:,.0f}, ~{b:,.0f} output tokens/s": "每秒输出 ~{a:,.0f}、~{b:,.0f} 个 token",
    "SLO kept {a:.0%}, {b:.0%}": "SLO 达标 {a:.0%}、{b:.0%}",
    # 4
    "Load: who sends, and when": "怎么测：谁在发请求，什么时候发",
    "Coordinated omission. A server freezes for {stall:g} s. {clients} clients send the next request when they have "
    "an answer, so they send nothing while it stands, and measure nothing. {late} requests were late, and counted "
    "from when they were sent nobody notices:":
        "协同遗漏（coordinated omission）。服务端停顿 {stall:g} 秒。{clients} 个客户端拿到回答才发下一个请求，停顿期间什么也没发，也就什么也没量到。有 {late} 个请求发晚了；从实"
        "际发出的时刻算起，谁也看不出来：",
    "70B, E2E latency in s as the server freezes": "70B，服务端停顿时的 E2E 时延（秒）",
    "closed, from sending (wrong)>": "闭环，从发出算（错）>",
    "closed, from due>": "闭环，从该发时算>",
    "open loop>": "开环>",
    "70B, the same requests at the same mean rate, {rate} a second":
        "70B，同样的请求，同样的平均到达率，每秒 {rate} 个",
    "fixed gaps": "固定间隔",
    "Poisson": "泊松",
    "bursts": "突发",
    "Warm-up, here: of {n} equal requests, the first that this process ever served had its token after {first} ms, "
    "the others after {rest} in the median, {times:.1f} times as quick. It paid for memory, caches and threads, and "
    "shows how this server starts, not how it serves. So the first ones are in no figure.":
        "预热，本机实测：{n} 个相同的请求，本进程服务的第一个等了 {first} 毫秒才有 token，其余的中位数是 {rest} 毫秒，快 {times:.1f} 倍。第一个替大家付了内存、缓存和线程的账，反映的是服"
        "务怎么启动，不是怎么运行。所以最初几个请求不计入任何指标。",
    "a long run, for the P99": "为 P99 跑一次长的",
    "70B: how sure is the P99 of TTFT? In ms": "70B：TTFT 的 P99 有多可靠？（毫秒）",
    "requests>": "请求数>",
    "P99>": "P99>",
    "surely above>": "必定高于>",
    "surely below>": "必定低于>",
    "other samples: least>": "别的样本：最小>",
    "most>": "最大>",
    "\"Surely\" is 95 %: an interval between two ranks, whatever the distribution. Below {least} requests it has no "
    "upper end: all of them may lie under the true P99. A P99 of a hundred requests is hardly more than the second "
    "worst of them.":
        "“必定”指 95% 的把握：取两个名次之间的区间，与分布无关。少于 {least} 个请求，就给不出上限：它们可能全都低于真正的 P99。一百个请求的 P99，差不多就是倒数第二慢的那个。",
    "Little's law on a real run": "在真实运行上验证 Little 定律",
    "Little's law, here: L = λW. The engine's steps saw {L:.2f} requests inside in the mean; {rate:.1f} arrived a "
    "second and were there for {W:.3f} s each, which makes {product:.2f}, {off:+.1%}. What differs is the time in "
    "which a request was there and the engine, busy with a step, hadn't looked. Two of the three give the third: "
    "where they don't agree by more than that, something was measured wrongly.":
        "Little 定律，本机实测：L = λW。引擎逐步看到系统里平均有 {L:.2f} 个请求；每秒到达 {rate:.1f} 个，每个停留 {W:.3f} 秒，乘起来是 {product:.2f}，相差"
        " {off:+.1%}。差在请求已到、引擎还在忙上一步没顾上看的那段时间。三个量知道两个就能算出第三个：若差得比这还多，就是哪里量错了。",
    # 5
    "Goodput, the knee, what a token costs": "有效吞吐、拐点与成本",
    "Six requests in {s} s, with a promise of {a} ms for TTFT and {b} ms for TPOT:":
        "{s} 秒里六个请求，承诺 TTFT 不超过 {a} 毫秒，TPOT 不超过 {b} 毫秒：",
    "Six requests": "六个请求",
    "TTFT ms>": "TTFT 毫秒>",
    "TPOT ms>": "TPOT 毫秒>",
    "kept": "达标",
    "{rate:.1f} requests a second, goodput {good:.1f}, as in the article's example: two break one limit each, one "
    "both. A request keeps all limits or it isn't good. vLLM knows limits on ttft, tpot and e2el only.":
        "每秒 {rate:.1f} 个请求，有效吞吐 {good:.1f}，与文章的例子一致：两个各超了一项，一个两项全超。一个请求必须全部达标才算数。vLLM 只支持 ttft、tpot、e2el 三种限额。",
    "70B, conversations, requests a second; SLO: TTFT {ttft:g} ms, TPOT {tpot:g} ms":
        "70B，对话，单位为请求/秒；SLO：TTFT {ttft:g} 毫秒，TPOT {tpot:g} 毫秒",
    "offered>": "到达>",
    "served>": "完成>",
    "good>": "达标>",
    "P99 TTFT>": "P99 TTFT>",
    "MBU>": "MBU>",
    "cost>": "成本>",
    "of good>": "达标的成本>",
    "served (吞吐)": "完成（吞吐）",
    "within the SLO (有效吞吐)": "达标（有效吞吐）",
    "95 % keep the SLO": "95% 达标",
    "70B: throughput rises on, goodput falls": "70B：吞吐还在升，有效吞吐已经掉下去",
    "requests offered a second": "每秒到达的请求",
    "Up to {turn} a second what is served is good. Beyond that the throughput still rises, the MFU with it, tokens "
    "get cheaper, and the goodput falls. A run ends with its last answer, so a little less is served than offered. "
    "The last two columns: what a million output tokens cost at {price:g} an hour and GPU, and those of good requests "
    "alone. The cheapest tokens are those that come too late.":
        "每秒 {turn} 个以内，完成的都达标。再往上，吞吐和 MFU 还在升，token 越来越便宜，有效吞吐却往下掉。一次运行要等最后一个回答出来才结束，所以完成的总比到达的略少。最后两列是每百万输出 token 的成"
        "本（每张 GPU 每小时 {price:g}），以及只算达标请求时的成本。最便宜的 token，正是来得太晚的那些。",
    "Cost and MFU need their convention said, too: here output tokens are counted, prompts are not; and FLOPs of the "
    "model, whatever the kernels do beside. `vllm bench` of 0.27.1 has six subcommands (latency, mm-processor, serve, "
    "startup, sweep, throughput); the article counts four.":
        "成本和 MFU 也要说清口径：这里只数输出 token，不数 prompt；FLOPs 按模型算，不管 kernel 另外做了什么。另外，0.27.1 的 `vllm bench` 有六个子命令（latency、"
        "mm-processor、serve、startup、sweep、throughput），文章只数了四个。",
    # 6
    "The account, and a patient": "算一笔账，再看几个病人",
    "E2E of the running example: TTFT + {n} decodes": "贯穿全文的例子的 E2E：TTFT + {n} 次 Decode",
    "a decode step of": "Decode 一步",
    "batch of that step>": "对应的 batch>",
    "E2E s>": "E2E 秒>",
    "decode's share>": "Decode 占比>",
    "{step} ms, as the article": "{step} 毫秒（文章）",
    "the ledger, alone": "账本，单个请求",
    "none": "无",
    "The article computes with decode steps of {a}, {b} and {c} ms in different chapters. They are the same machine "
    "at different batches, as the ledger has it (the batch whose step takes at most that long); so none is wrong, but "
    "a table must not mix them. Here each account is settled with one step, said beside it: the ledger's, "
    "~{alone:.1f} ms alone.":
        "文章在不同章节用了 {a}、{b}、{c} 毫秒三种 Decode 步长。按账本看，那是同一套机器在不同 batch 下的样子（表中是步长不超过该值的最大 batch）；哪个都不算错，但不能混在一张表里。本项目的账只"
        "用一种步长，并且写在旁边：账本给出的，单个请求 ~{alone:.1f} 毫秒。",
    "six patients": "六个病人",
    "70B, six patients: what is broken in each? ms": "70B，六个病人：各自坏在哪里？（毫秒）",
    "P50 TTFT>": "P50 TTFT>",
    "its queue>": "其中排队>",
    "P50 TPOT>": "P50 TPOT>",
    "P99 ITL>": "P99 ITL>",
    "The answers": "答案",
    "it was": "病因",
    "what the figures say to look at first": "从指标看，先查什么",
    "nothing": "没病",
    "too few seats": "座位太少",
    "long prompts, in one piece": "长 prompt 不分块",
    "KV pool too small": "KV 池太小",
    "too many at once": "同时太多",
    "hardly any load": "几乎没有负载",
    "nothing to be done": "不用管",
    "the queue: more seats, more replicas, admission": "排队：加座位、加副本、准入控制",
    "chunked prefill, a smaller budget": "分块预填充，减小预算",
    "KV pool: fewer seats, more memory": "KV 池：减座位、加显存",
    "fewer seats, more GPUs": "减座位、加 GPU",
    "batch more, fewer GPUs": "多拼批、减 GPU",
    "The order is the article's: define, split by phase, mean against tail, then the resource, then a remedy; and "
    "goodput says whether it helped.":
        "顺序就是文章的顺序：先定义，再分阶段，再看均值和尾部，然后找资源，最后下药；有没有用，看有效吞吐。",
    "--tp 1 instead of 8: which of the metrics of section 2 change, and which definitions?":
        "把 --tp 8 换成 1：第 2 节的哪些指标会变？定义呢？",
    "in this file, SLO = {{\"ttft\": 500.0, \"tpot\": 20.0}}: where is the knee now, and what does a good token cost "
    "there?":
        "在本文件里把 SLO 改成 {{\"ttft\": 500.0, \"tpot\": 20.0}}：拐点移到哪里？那里一个达标的 token 要多少钱？",
    "in this file, CALM = 12: which of the six misreadings get worse?":
        "在本文件里令 CALM = 12：六种误读里哪几种更严重？",
    "python chapters/tools/sweep.py --slo ttft:500 tpot:20: the same curve over the number of clients; what is the "
    "knee of a closed loop?":
        "python chapters/tools/sweep.py --slo ttft:500 tpot:20：横轴换成客户端数的同一条曲线；闭环的拐点在哪里？",
    "python chapters/tools/bench.py --request-rate 8 --goodput ttft:500 tpot:50: the table of vllm bench serve, of "
    "the engine here":
        "python chapters/tools/bench.py --request-rate 8 --goodput ttft:500 tpot:50：给本机的引擎打一张 vllm bench serve 的表",
    "Then the exercises, make grade CH=2, and the lab, make lab CH=2; and the article's chapter 3.":
        "然后做练习（make grade CH=2）和实验（make lab CH=2），再读文章第 3 章。",
}
