"""What is run together: plans of runs, each a script with its arguments and the longest it may take."""

from dataclasses import dataclass, field

from common import MODES


@dataclass(frozen=True)
class Run:
    """One process."""

    name: str
    script: str
    arguments: list[str]
    limit_s: int
    environment: dict[str, str] = field(default_factory=dict)
    about_s: int = 0  # how long it is expected to take; with less time left it does not begin


def sleep(name: str, mode: str, arguments: str, limit_s: int = 240, about_s: int = 0) -> Run:
    words = ["--mode", mode, "--label", name, *arguments.split()]
    return Run(f"{name}-{mode}", "sleep.py", words, limit_s, about_s=about_s)


def both(name: str, arguments: str, limit_s: int = 240, about_s: int = 0) -> list[Run]:
    """The same with poorwill and with vLLM's own allocator."""
    return [sleep(name, mode, arguments, limit_s, about_s) for mode in ["poorwill", "cumem"]]


def loads(name: str, arguments: str, limit_s: int = 240) -> list[Run]:
    """A load with and without the split limit that newer vLLMs set."""
    plain = f"{arguments} --kv-gib 4 --cycles 1"
    return [*both(name, plain, limit_s), *both(f"{name}-split20", f"{plain} --max-split-mib 20", limit_s)]


def offloaders(name: str, arguments: str) -> Run:
    return Run(name, "offloaders.py", arguments.split(), 120)


def offload_engine(name: str, arguments: str, about_s: int = 0) -> Run:
    # Compiled models compute in another order.
    kind = "compiled" if "--graphs" in arguments else "eager"
    words = [*arguments.split(), "--tokens-file", f"/tmp/poorwill-bench-offload-{kind}.json"]
    return Run(f"engine-{name}", "offload_engine.py", words, 120, about_s=about_s)


def variant(name: str, mode: str, more: str = "", prefix: str = "", about_s: int = 0) -> Run:
    words = ["--mode", mode, *more.split(), name]
    return Run(f"{prefix}{name}-{mode}", "variants.py", words, 180, about_s=about_s)


def ranks(name: str, arguments: str, limit_s: int, mode: str = "poorwill") -> Run:
    return Run(f"ranks-{name}-{mode}", "ranks.py", ["--mode", mode, *arguments.split()], limit_s)


def rl(name: str, arguments: str, about_s: int) -> Run:
    return Run(f"rl-{name}", "rl.py", arguments.split(), 420, about_s=about_s)


DENSE = "--kind dense"
GRAPHS = f"{DENSE} --kv-gib 8 --graphs"
TAGS = "--by-tag --level2"
MXFP8 = "--kind moe --quantization mxfp8"
SLICES = "--hami HAMi-core --headers HAMi-core/headers"
# What a load needs at its peak, as measured, times 1.1, and half a GiB for the context before it.
TIGHT_MXFP8 = f"{MXFP8} --kv-gib 0.5 --free-gib 20.7 --cycles 1"
TIGHT_MXFP4 = "--kind mxfp4 --kv-gib 0.5 --free-gib 18.3 --cycles 1"
# All that is open of vLLM 0.33 in one visit of 25 minutes, what is worth most first. What compiles comes
# before what is compared with it, so that neither pays for the other.
CURRENT = [
    rl("now-small", "--kind small --expandable", 280),
    rl("now-small-moe", "--kind small-moe --modes poorwill", 170),
    variant("hybrid", "poorwill", "--swaps 10", "now-", 50),
    variant("lora", "poorwill", "", "now-", 30),
    variant("fp8-kv", "poorwill", "", "now-", 30),
    sleep("now-tight-mxfp8", "poorwill", TIGHT_MXFP8, 180, 90),  # compiles what all of mxfp8 use
    sleep("now-tight-mxfp8", "cumem", TIGHT_MXFP8, 120, 40),
    *both("now-tight-mxfp4", TIGHT_MXFP4, 120, 40),
    sleep("now-graphs", "poorwill", f"{GRAPHS} --cycles 3 {TAGS}", 240, 75),
    sleep("now-graphs-asleep", "poorwill", f"{GRAPHS} --offload-graphs --cycles 3 {TAGS}", 240, 65),
    sleep("now-graphs-expandable", "poorwill", f"{GRAPHS} --expandable --cycles 2 --by-tag", 240, 60),
    sleep("now-mxfp8-expandable", "poorwill", f"{MXFP8} --expandable --kv-gib 4 --cycles 2", 120, 30),
    offload_engine("now-none-graphs", "--whose none --graphs", 50),
    offload_engine("now-prefetch-graphs", "--whose poorwill --way prefetch --graphs --sleep", 55),
    offload_engine("now-uva-graphs", "--whose poorwill --way uva --graphs --sleep", 55),
    Run("now-slices", "slices.py", SLICES.split(), 300, about_s=60),
    *(
        sleep(f"now-mxfp8-{turn}", mode, f"{MXFP8} --kv-gib 4 --cycles 0", 120, 25)
        for turn in (1, 2)
        for mode in ["poorwill", "cumem"]
    ),
    variant("hybrid", "cumem", "", "now-", 35),
    variant("lora", "cumem", "", "now-", 30),
    variant("fp8-kv", "cumem", "", "now-", 30),
    sleep("now-graphs", "cumem", f"{GRAPHS} --cycles 3 {TAGS}", 240, 65),
]
PLANS: dict[str, list[Run]] = {
    # Does it work at all?
    "first": [sleep("first", "poorwill", f"{DENSE} --layers 4 --kv-gib 2 --cycles 2 {TAGS}", 180)],
    "dense": [
        *both("dense", f"{DENSE} --kv-gib 8 --cycles 3 --changed {TAGS}"),
        sleep("dense-prepared", "poorwill", f"{DENSE} --kv-gib 8 --cycles 3 --first prepared"),
        sleep("dense-cold", "poorwill", f"{DENSE} --kv-gib 8 --cycles 2 --first cold"),
    ],
    "graphs": [
        *both("graphs", f"{GRAPHS} --cycles 3 {TAGS}"),
        sleep("graphs-prepared", "poorwill", f"{GRAPHS} --cycles 3 --first prepared"),
    ],
    "thirty": [
        sleep("thirty", "poorwill", f"{DENSE} --kv-gib 8 --cycles 31 --summary --first prepared"),
        sleep("thirty-graphs", "poorwill", f"{GRAPHS} --cycles 31 --summary"),
    ],
    "full": both("full", f"{DENSE} --cycles 4 {TAGS}"),
    "moe": [
        sleep("moe", "poorwill", "--kind moe --kv-gib 4 --cycles 4 --first prepared --by-tag", 280),
        sleep("moe", "cumem", "--kind moe --kv-gib 4 --cycles 3 --by-tag", 280),
    ],
    # Weights as of a trained model, which codes make smaller.
    "weights": [
        sleep("weights", "poorwill", "--kind moe --kv-gib 4 --cycles 4 --fill normal", 200),
        sleep("weights", "cumem", "--kind moe --kv-gib 4 --cycles 3 --fill normal", 200),
        sleep("weights-prepared", "poorwill", "--kind moe --kv-gib 4 --fill normal --first prepared", 200),
    ],
    # What docs/benchmarks/vllm.md shows, in two parts of ten minutes each.
    "report": [
        sleep("report-moe", "poorwill", "--kind moe --kv-gib 4 --cycles 4 --first prepared"),
        sleep("report-moe", "cumem", "--kind moe --kv-gib 4 --cycles 2"),
        sleep("report-full", "poorwill", f"{DENSE} --cycles 4 --by-tag --first prepared"),
        sleep("report-full", "cumem", f"{DENSE} --cycles 3"),
        sleep("report-graphs", "poorwill", f"{GRAPHS} --cycles 31 --summary --first prepared --throughput"),
        sleep("report-graphs", "cumem", f"{GRAPHS} --cycles 3 --throughput"),
        sleep("report-dense", "poorwill", f"{DENSE} --kv-gib 8 --cycles 31 --summary --first prepared"),
    ],
    "mxfp8": loads("mxfp8", "--kind moe --quantization mxfp8"),
    "mxfp4": loads("mxfp4", "--kind mxfp4"),
    "fp8": loads("fp8", "--kind moe --quantization fp8"),
    "tight": [
        *both(
            "mxfp8-tight",
            "--kind moe --quantization mxfp8 --max-split-mib 20 --kv-gib 0.5 --free-gib 21 --cycles 1",
        ),
        *both("mxfp4-tight", "--kind mxfp4 --max-split-mib 20 --kv-gib 0.5 --free-gib 19 --cycles 1"),
    ],
    # The first start of each mode compiles, and does not count.
    "speed": [
        *(sleep("speed-warm", mode, f"{GRAPHS} --cycles 0", 180) for mode in MODES),
        *(
            sleep(f"speed-{turn}", mode, f"{GRAPHS} --cycles 0 --throughput", 180)
            for turn in (1, 2)
            for mode in (MODES if turn == 1 else MODES[::-1])
        ),
    ],
    "reload": [
        Run(f"reload-{mode}", "reload.py", ["--mode", mode, "--cycles", "5"], 240)
        for mode in ["poorwill", "cumem"]
    ],
    "server": [Run("server-poorwill", "server.py", ["--mode", "poorwill"], 560)],
    "killed": [
        Run(
            "killed-poorwill",
            "server.py",
            "--mode poorwill --only killed_in_a_sleep,killed_asleep".split(),
            400,
        )
    ],
    "server-cumem": [Run("server-cumem", "server.py", ["--mode", "cumem"], 560)],
    "two": [
        Run(f"two-{mode}", "two_engines.py", ["--mode", mode, "--rounds", "10"], 280)
        for mode in ["poorwill", "cumem"]
    ],
    "variants": [
        variant(name, mode) for name in ["fp8-kv", "lora", "hybrid"] for mode in ["poorwill", "cumem"]
    ],
    # What trainers call.
    "rl": [rl(kind, f"--kind {kind}", 290) for kind in ["small", "small-moe"]],
    # A slice of the card; HAMi-core is looked for in a folder beside the working directory.
    "slices": [Run("slices", "slices.py", SLICES.split(), 300, about_s=60)],
    "vllm-0.33": CURRENT,
    # Layers with weights in host memory; no engine.
    "offloaders": [
        offloaders("poorwill-prefetch", "--whose poorwill --way prefetch"),
        offloaders("vllm-prefetch", "--whose vllm --way prefetch"),
        offloaders("drop-in-prefetch", "--whose poorwill-in-vllm --way prefetch"),
        offloaders("poorwill-prefetch-graphs", "--whose poorwill --way prefetch --graphs"),
        offloaders("vllm-prefetch-graphs", "--whose vllm --way prefetch --graphs"),
        offloaders("poorwill-prefetch-few", "--whose poorwill --way prefetch --tokens 64"),
        offloaders("vllm-prefetch-few", "--whose vllm --way prefetch --tokens 64"),
        offloaders("poorwill-uva-few", "--whose poorwill --way uva --tokens 64"),
        offloaders("vllm-uva-few", "--whose vllm --way uva --tokens 64"),
        offloaders("drop-in-uva-few", "--whose poorwill-in-vllm --way uva --tokens 64"),
    ],
    # Runs without an offloader write what others compare with.
    "offload-engine": [
        offload_engine("none", "--whose none"),
        *(
            offload_engine(f"{whose}-{way}", f"--whose {whose} --way {way}")
            for way in ["uva", "prefetch"]
            for whose in ["vllm", "poorwill"]
        ),
        *(
            offload_engine(f"poorwill-{way}-sleep", f"--whose poorwill --way {way} --sleep")
            for way in ["uva", "prefetch"]
        ),
        offload_engine("none-graphs", "--whose none --graphs"),
        *(
            offload_engine(f"poorwill-{way}-graphs", f"--whose poorwill --way {way} --graphs --sleep")
            for way in ["uva", "prefetch"]
        ),
    ],
    # These need two GPUs of one host. Each is one visit of eight minutes at most.
    "ranks": [
        *(ranks("tp", "--tp 2", 120, mode) for mode in ["poorwill", "cumem"]),
        ranks("pp", "--pp 2", 120),
        ranks("dp", "--dp 2", 120),
    ],
    "ranks-faults": [ranks("faults", "--tp 2 --faults", 470)],
    "ranks-kills": [ranks("kills", "--tp 2 --kills all", 470)],
    "ranks-figures": [
        *(
            ranks(f"figures{'-nccl' * bool(more)}", f"--tp 2 --kind dense --layers 16 --figures {more}", 160)
            for more in ["", "--suspend-nccl"]
        ),
        ranks("hibernate-driver", "--tp 2 --hibernate driver --suspend-nccl", 150),
    ],
    "ranks-stock": [ranks("faults", "--tp 2 --faults", 470, "cumem")],
    "ranks-nccl": [
        ranks("tp-nccl", "--tp 2 --suspend-nccl", 120),
        ranks("faults-nccl", "--tp 2 --suspend-nccl --faults --only NCCL", 120),
        ranks("hibernate", "--tp 2 --hibernate poorwill --suspend-nccl", 120),
    ],
    # Two servers behind `poorwill rotate`.
    "rotation": [
        Run(f"rotation-{mode}", "rotation.py", ["--mode", mode, *more.split()], 420)
        for mode, more in {
            "poorwill": "",
            "cumem": "--skip slept_by_others,validated,engine_killed,rotation_killed",
        }.items()
    ],
    # Engines that leave the card: one through many cycles, ten in rotation.
    "hibernate": [
        Run("hibernate", "hibernate.py", "--mode poorwill --graphs --cycles 100 --kills".split(), 560),
        Run("hibernate-cumem", "hibernate.py", "--mode cumem --graphs --cycles 3".split(), 200),
        Run("hibernate-rotation", "hibernate_rotation.py", ["--mode", "poorwill"], 560),
    ],
    # The same with two GPUs: refused by name.
    "hibernate-ranks": [
        Run("hibernate-ranks", "hibernate.py", "--mode poorwill --kind small --ranks 2".split(), 240)
    ],
    # Two kernels, under budgets of shared memory; no engine.
    "pruner": [Run(f"pruner-{keys}", "pruner.py", ["--keys", str(keys)], 400) for keys in (128, 256)],
    # What shares of the card become with graphs; eight engines each.
    "budgets": [
        Run("budgets", "budgets.py", [], 560),
        Run("budgets-v2", "budgets.py", ["--v2", "--shares", "0.92,0.88"], 500),
    ],
    "bad": [Run("bad-input", "bad_input.py", [], 560)],
}
