"""What the grader and the labs say, in Chinese; lang.py says how it is looked up."""
ZH = {
    "The answer is one number, and it is returned: not printed, not a list, not a text.":
        "答案是一个数，要用 return 返回：不是打印出来，也不是列表或文本。",
    "The arguments are the caller's: an answer leaves its lists and dicts as it found them.":
        "参数属于调用者：传进来的列表和字典，用完应当保持原样。",
    "Each call stands alone: asked for this at once, your code is right. Something is kept from earlier calls, in a "
    "global name or in a default argument.":
        "每次调用彼此独立：单独问这一题，你的代码是对的。有什么东西从前面的调用里留了下来，藏在全局变量或默认参数里。",
    "solved": "通过", "not started": "尚未作答", "wrong": "不对", "raised": "抛出异常", "missing": "缺少函数",
    "too slow": "超时", "ended": "进程已退出",
    "asked": "调用", "your code": "你的代码", "expected": "应为", "rule": "规则", "about": "考点", "printed": "打印输出",
    "your file": "你的文件", "": "",
    "an answer may not start other processes": "答案里不能启动别的进程",
    "an answer may not use the network": "答案里不能访问网络",
    "an answer may not send signals to processes": "答案里不能向进程发信号",
    "an answer may not read the project's files, nor change any": "答案里不能读取项目的文件，也不能改动任何文件",
    "something of type {kind}": "一个 {kind} 类型的对象",
    "has no function {name} in {file}": "{file} 里没有函数 {name}",
    "right, but {name} is {value} afterwards": "结果正确，但调用之后 {name} 变成了 {value}",
    "{name} stays {value}": "{name} 仍是 {value}",
    "None, as a function without a return statement has it": "None，没有 return 语句的函数就会这样",
    " at line {line} of {file}: {text}": "，位于 {file} 第 {line} 行：{text}",
    "was still running after {limit:g} s{where}": "{limit:g} 秒后仍未结束{where}",
    "its process was killed by signal {signal}: a crash in C code, or more memory or time than it may have":
        "进程被信号 {signal} 杀死：C 代码崩溃，或者用掉了超出限制的内存或时间",
    "ended its process (exit status {code}) where a value was to be returned":
        "本该返回一个值，却结束了进程（退出码 {code}）",
    "sent something that is no answer": "发回来的东西不是答案",
    "{what}{where}": "{what}{where}",
    "{error}{where}": "{error}{where}",
    "chapter {chapter}, task {task}, {name}: {status}": "第 {chapter} 章第 {task} 题 {name}：{status}",
    "{solved} of {total} solved, {points} of {of} points ({file})":
        "共 {total} 题，通过 {solved} 题，得分 {points} / {of}（{file}）",
    "Answers run in a process of their own; on this system it is not limited in: {walls}.":
        "答案在单独的进程里运行；在这个系统上，以下方面没有限制：{walls}。",
    "{count} submissions; + solved, - wrong, . not started": "{count} 份提交；+ 通过，- 不对，. 尚未作答",
    "task {number}, {name}: solved by {solved} of {count}": "第 {number} 题 {name}：{count} 人中有 {solved} 人通过",
    "written: {file}": "已写入 {file}",
    "proof": "证明", "vLLM": "vLLM", "holds": "成立", "{proof}: {status}": "{proof}：{status}",
    "chapter {chapter}, lab: {name} in the place of {target}; some seconds a proof":
        "第 {chapter} 章实验：用 {name} 顶替 {target}；每项证明需要几秒",
    "All proofs hold. Five prompts, served with your function:": "所有证明都成立。下面五个提问由你的函数来回答：",
}
