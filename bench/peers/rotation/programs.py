"""Programs that are measured or needed for it: found, configured, started, their CPU time read, and ended."""

import ctypes
import grp
import http.client
import json
import os
import platform
import pwd
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from figures import parent_of, ticks_of

MARK = "POORWILL_BENCH_ROTATION"  # whoever has this in its environment with our folder was started by us
STARTING_S = 30
ENDING_S = 20
STDERR_BYTES = 2000
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


class Failed(Exception):
    """Something that was started did not do what it is there for."""


class Missing(Exception):
    """A program that is needed is not there, or not what it has to be."""


def found(given: str, what: str, how: str) -> str:
    """The path of a program."""
    path = shutil.which(given)
    if not path:
        raise Missing(f"{what}: there is no program `{given}`; {how}")
    return path


def said(command: list[str], what: str) -> str:
    """What a program prints, on whichever output."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"{what}: `{' '.join(command)}` cannot be run: {error}") from error
    if ran.returncode:
        raise Missing(
            f"{what}: `{' '.join(command)}` ended with {ran.returncode}: {ran.stderr[-300:].strip()}"
        )
    return (ran.stdout + ran.stderr).strip()


def free_ports(count: int) -> list[int]:
    """Ports that were free just now, and that clients are not given."""
    ports: list[int] = []
    first = 20_000 + os.getpid() % 500 * 20
    for port in range(first, 32_000):
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise Failed("no port is free from 20000 to 32000")


def pinned(cpus: list[int], command: list[str]) -> list[str]:
    return ["taskset", "-c", ",".join(map(str, cpus)), *command]


class Children:
    """All that was started; leaving the context ends it, and what it has started."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.mark = f"{MARK}={folder}"
        self.processes: list[subprocess.Popen] = []
        self.commands: list[list[str]] = []

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, *_) -> None:
        # The last that was started leans on those before it.
        for process in reversed(self.processes):
            end(process)
        until = time.monotonic() + ENDING_S
        while (left := marked(self.mark)) and time.monotonic() < until:
            for pid in left:
                kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def start(self, name: str, command: list[str], **more) -> subprocess.Popen:
        """Starts a program; what it writes goes to files of this name, unless said otherwise."""
        self.commands.append(command)
        environment = {**os.environ, MARK: str(self.folder), **more.pop("environment", {})}
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=more.pop("stdin", subprocess.DEVNULL),
                stdout=more.pop("stdout", log),
                stderr=log,
                preexec_fn=die_with_parent,
                **more,
            )
        self.processes.append(process)
        return process

    def run(self, command: list[str], limit_s: float) -> str:
        """What a program prints that ends by itself."""
        process = self.start("once", command, stdout=subprocess.PIPE, text=True)
        try:
            printed, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"`{' '.join(command)}` still ran after {limit_s:.0f} s") from error
        finally:
            end(process, signal.SIGKILL)
            process.stdout.close()
            self.processes.remove(process)
        if process.returncode:
            raise Failed(f"`{' '.join(command)}` ended with {process.returncode}: {self.log('once')}")
        return printed

    def log(self, name: str) -> str:
        """The end of what a program has written."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace")[-STDERR_BYTES:].strip() if path.exists() else ""

    def until_answers(self, name: str, process: subprocess.Popen, port: int, path: str = "/health") -> None:
        self.until(name, process, lambda: ask(port, "GET", path)[0] == 200)

    def until(self, name: str, process: subprocess.Popen, is_so, limit_s: float = STARTING_S) -> None:
        began = time.monotonic()
        while True:
            if process.poll() is not None:
                raise Failed(f"{name} ended with {process.returncode}: {self.log(name)}")
            try:
                if is_so():
                    return
            except (OSError, http.client.HTTPException):
                pass
            if time.monotonic() - began > limit_s:
                raise Failed(f"{name} was not ready after {limit_s:.0f} s: {self.log(name)}")
            time.sleep(0.02)


def die_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def end(process: subprocess.Popen, how: int = signal.SIGTERM) -> None:
    if process.poll() is None:
        process.send_signal(how)
    if process.stdin:
        process.stdin.close()
    try:
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def kill(pid: int, how: int) -> None:
    try:
        os.kill(pid, how)
    except ProcessLookupError:
        pass


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def marked(mark: str) -> list[int]:
    """The processes that have this in their environment."""
    found = []
    for pid in pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if mark.encode() in environment.split(b"\0") and pid != os.getpid():
            found.append(pid)
    return found


def family(pid: int) -> list[int]:
    """A process, and those that it has started."""
    parents = {}
    for one in pids():
        try:
            parents[one] = parent_of(Path(f"/proc/{one}/stat").read_text())
        except OSError:
            continue
    members = [pid]
    for member in members:
        members += [one for one, parent in parents.items() if parent == member]
    return members


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its threads, those that have ended too, in nanoseconds' steps."""
    try:
        # The kernel's clock of a process: that of /proc/PID/stat, which has hundredths of a second only.
        return time.clock_gettime_ns((~pid << 3) | 2) / 1e9
    except OSError:
        return ticks_of(Path(f"/proc/{pid}/stat").read_text()) / os.sysconf("SC_CLK_TCK")


def family_cpu_s(pid: int) -> float:
    return sum(map(cpu_s, family(pid)))


def ask(
    port: int, method: str, path: str, body: dict | None = None, limit_s: float = 60
) -> tuple[int, bytes]:
    """A request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit_s)
    try:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def nginx_lacks(version: str) -> set[str]:
    """Modules that this nginx was built without, of those that want a folder for temporary files."""
    return set(re.findall(r"--without-http_(fastcgi|scgi|uwsgi)_module", version))


def nginx_conf(folder: Path, lacks: set[str], server: str, is_logged: bool) -> str:
    """One worker, and nothing in it that has to be root's or the distribution's."""
    owner = pwd.getpwuid(os.getuid()).pw_name
    group = grp.getgrgid(os.getgid()).gr_name
    user = f"user {owner} {group};\n" if os.getuid() == 0 else ""
    temporary = ["client_body", "proxy", *sorted({"fastcgi", "scgi", "uwsgi"} - lacks)]
    paths = "".join(f'    {name}_temp_path "{folder}/{name}";\n' for name in temporary)
    logs = f'"{folder}/access.log"' if is_logged else "off"
    return (
        f'{user}daemon off;\nworker_processes 1;\npid "{folder}/nginx.pid";\n'
        f'error_log "{folder}/error.log";\n'
        "events { worker_connections 4096; }\n"
        f"http {{\n{paths}    access_log {logs};\n    default_type application/json;\n"
        # So that a connection lasts for all requests of a run, and bodies stay in memory.
        "    keepalive_requests 100000000;\n"
        "    client_body_buffer_size 256k;\n    client_max_body_size 32m;\n"
        f"{server}}}\n"
    )


def nginx_proxy(listen: int, to: int) -> str:
    return (
        f"    upstream engine {{ server 127.0.0.1:{to}; keepalive 256; keepalive_requests 100000000; }}\n"
        f"    server {{\n        listen 127.0.0.1:{listen};\n"
        "        location / {\n            proxy_pass http://engine;\n            proxy_http_version 1.1;\n"
        '            proxy_set_header Connection "";\n            proxy_buffering off;\n        }\n    }\n'
    )


def nginx_engine(listen: int, answer: str) -> str:
    """An engine that is always awake, and gives everybody the same answer at once."""
    if set(answer) & set("'$\\"):
        raise ValueError("nginx would read something into this answer")
    canary = '{"choices": [{"text": "the same", "finish_reason": "length"}]}'
    return (
        f"    server {{\n        listen 127.0.0.1:{listen};\n"
        f"        location = /v1/chat/completions {{ return 200 '{answer}'; }}\n"
        f"        location = /v1/completions {{ return 200 '{canary}'; }}\n"
        "        location = /is_sleeping { return 200 '{\"is_sleeping\": false}'; }\n"
        "        location = /health { return 200; }\n    }\n"
    )


def start_nginx(
    children: Children, nginx: str, lacks: set[str], name: str, cpus: list[int], server: str, is_logged: bool
) -> subprocess.Popen:
    folder = children.folder / name
    folder.mkdir()
    conf = folder / "nginx.conf"
    conf.write_text(nginx_conf(folder, lacks, server, is_logged))
    command = [nginx, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(conf)]
    return children.start(name, pinned(cpus, command))


def quoted(text: str) -> str:
    """A string of TOML."""
    return json.dumps(text)


def rotation_toml(folder: Path, front: int, control: int, gpu: str, rules: str, models: list[dict]) -> str:
    text = (
        f'state = {quoted(str(folder / "state"))}\n[front]\nlisten = "127.0.0.1:{front}"\n'
        f'[control]\nlisten = "127.0.0.1:{control}"\n'
        f'[memory]\nmeasure = "processes"\ngpu = {quoted(gpu)}\n{rules}'
    )
    for model in models:
        text += f'[[model]]\nname = {quoted(model["name"])}\nurl = "http://127.0.0.1:{model["port"]}"\n'
        if "command" in model:
            words = ", ".join(map(quoted, model["command"]))
            text += f"need = {quoted(model['need'])}\ncommand = [{words}]\n"
    return text


def start_rotation(
    children: Children, poorwill: str, name: str, cpus: list[int] | None, toml: str, level: str = "info"
) -> subprocess.Popen:
    folder = children.folder / name
    folder.mkdir(exist_ok=True)
    path = folder / "rotate.toml"
    path.write_text(toml)
    command = [poorwill, "rotate", "--config", str(path)]
    return children.start(
        name, pinned(cpus, command) if cpus else command, environment={"POORWILL_LOG": level}
    )


def llama_swap_yaml(model: str, to: int) -> str:
    """One model, whose engine runs already. What llama-swap starts for it does nothing."""
    return (
        f'models:\n  {quoted(model)}:\n    cmd: "sleep infinity"\n'
        f'    proxy: "http://127.0.0.1:{to}"\n    ttl: 0\n    concurrencyLimit: 256\n'
    )


def start_llama_swap(
    children: Children, llama_swap: str, name: str, cpus: list[int], listen: int, yaml: str
) -> subprocess.Popen:
    folder = children.folder / name
    folder.mkdir()
    path = folder / "config.yaml"
    path.write_text(yaml)
    command = [llama_swap, "-config", str(path), "-listen", f"127.0.0.1:{listen}"]
    return children.start(name, pinned(cpus, command))


def status_of(control: int) -> dict:
    return json.loads(ask(control, "GET", "/rotate/status")[1])


def until_ready(children: Children, name: str, process: subprocess.Popen, control: int) -> None:
    """Until all of its models are."""
    children.until(name, process, lambda: all(model["is_ready"] for model in status_of(control)["models"]))


def stand_in(poorwill: str, port: int, model: str, size: str, tokens_per_s: int) -> list[str]:
    return [
        *[poorwill, "mock-engine", "--listen", f"127.0.0.1:{port}", "--model", model],
        *["--bytes", size, "--tokens-per-s", str(tokens_per_s)],
    ]


def machine() -> dict:
    """What it is measured on, and what else went on there."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*: (.*)$", cpuinfo, re.MULTILINE)
    cpus = sorted(os.sched_getaffinity(0))
    siblings = {}
    for cpu in cpus:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings[str(cpu)] = path.read_text().strip() if path.exists() else None
    return {
        "system": platform.platform(),
        "kernel": platform.release(),
        "processor": model[1] if model else platform.machine(),
        "is_virtual": " hypervisor" in cpuinfo,
        "cpus": cpus,
        "thread_siblings": siblings,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average_before": os.getloadavg(),
        "python": platform.python_version(),
    }
