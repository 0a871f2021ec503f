"""Checks and measures a candidate beside its reference, inside a sandbox: `python3 -I -B bench.py FOLDER PACKAGES`.

    server      waits in FOLDER; runs no task's code, so its memory holds nothing. Forks a judge for each job
    judge       forks all runners, then reads the reference; draws inputs, compares. Runs none of the agent's code
    runners     `rounds` of the reference and of the candidate: each loads one function and answers calls. Those of the
                candidate have given up their rights (`guard`) before its first line runs

In each round two runners get the same inputs, drawn afresh for each call, one after the other in random order; each is
killed after its turn, with which the candidate's code comes. It runs during calls only, and is stopped (SIGSTOP) while
inputs are written and outputs copied. Every output is compared: whatever a candidate does to its process, the answer to
unknown inputs is computed in calls. Their time is processor time, by the kernel, and a candidate has one thread.
"""

import contextlib
import ctypes
import importlib
import json
import mmap
import os
import random
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
import traceback
from pathlib import Path

LIBC = ctypes.CDLL(None)
PDEATHSIG, DUMPABLE = 1, 4  # of prctl
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # Landlock's calls, on every architecture
EXECUTE, READ_FILE, READ_FOLDER = 1 << 0, 1 << 2, 1 << 3
OPEN = "open"  # a folder, for the candidate's library
READABLE = ("/usr", "/lib", "/lib64", "/etc", "/opt", "/dev/null", "/dev/urandom", OPEN)
COMPILE = ("sh", "-c", 'ulimit -f 8192; exec cc -O2 -shared -fPIC -x c - -lm -o "$0"')  # of 4 MB, at most
COMPILE_S, TURN_S = 20.0, 2.0  # the latter has a turn of the reference, however late it is
ERROR_BYTES = 300


class NoOutput(Exception):
    """A function did not give an output."""


def guard(compiles=False):
    """Gives up, for good: new processes and threads, all files but `READABLE`, the network, signals to others.

    A compiler keeps its programs, which are below folders of `READABLE`, and may write into `OPEN`.
    """
    if not compiles:
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    version = LIBC.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    files = (1 << {1: 13, 2: 14}.get(version, 15)) - 1
    size = 8 if version < 4 else 16 if version < 6 else 24  # files; network; abstract sockets and signals
    attributes = struct.pack("<QQQ", files, 3, 3)[:size]
    rules = LIBC.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(size), 0)
    for path in filter(os.path.exists, READABLE):
        allowed = READ_FILE | READ_FOLDER | EXECUTE * compiles if os.path.isdir(path) else READ_FILE
        allowed |= files * (compiles and path == OPEN)
        LIBC.syscall(ADD_RULE, rules, 1, struct.pack("<Qi", allowed, os.open(path, os.O_PATH)), 0)
    LIBC.syscall(RESTRICT_SELF, rules, 0)


def lacking():
    """What a candidate can do here that `guard` should take away, in words: processes of their own try it."""
    judge, able = os.getpid(), []
    for name, act in {
        "it can start processes": lambda: os.fork() or os._exit(0),
        "it can write files": lambda: os.open("probe", os.O_WRONLY | os.O_CREAT),
        "it can read the judge's memory": lambda: os.open(f"/proc/{judge}/mem", os.O_RDONLY),
    }.items():
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(OSError):
                guard()
                act()
                os._exit(1)
            os._exit(0)
        able += [name] if os.waitpid(pid, 0)[1] else []
    return able


class Runner:
    """A process with one function, and the memory that it shares with the judge alone."""

    def __init__(self, job, others):
        self.places, self.size = places(job)
        self.memory, self.status = mmap.mmap(-1, self.size), None
        (orders, self.orders), (self.answers, answers) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            with contextlib.suppress(BaseException):
                for other in others:
                    other.memory.close()
                os.dup2(orders, 1000)
                os.dup2(answers, 1001)
                os.closerange(3, 1000)
                serve(os.fdopen(1000, "rb"), 1001, self.memory, self.places, job)
            os._exit(0)
        os.close(orders)
        os.close(answers)

    def load(self, code, guarded, deadline):
        """Has it load a function. Raises NoOutput."""
        os.write(self.orders, json.dumps([code, guarded]).encode() + b"\n")
        self.wait(deadline)

    def call(self, inputs, deadline):
        """(processor time in ns, output as bytes) of a call. Raises NoOutput."""
        clock = ~self.pid << 3 | 2  # what clock_getcpuclockid gives; exact of a process that does not run
        begin = time.clock_gettime_ns(clock)
        for at, data in zip(self.places, inputs, strict=False):  # the last place is the output's
            self.memory[at : at + len(data)] = data
        os.write(self.orders, b"c")
        os.kill(self.pid, signal.SIGCONT)
        self.wait(deadline)
        return time.clock_gettime_ns(clock) - begin, self.memory[self.places[-1] : self.size]

    def wait(self, deadline):
        """Until it has done what it was told, and then stops it. Raises NoOutput."""
        data = b""
        while data[:1] != b"d" and len(data) <= ERROR_BYTES:
            if not select.select([self.answers], [], [], max(deadline - time.monotonic(), 0.0))[0]:
                raise NoOutput("it takes too long")
            part = os.read(self.answers, ERROR_BYTES + 1 - len(data))
            if not part:
                code = os.waitstatus_to_exitcode(self.kill())
                raise NoOutput(f"it ended its process ({signal.strsignal(-code) if code < 0 else code})")
            data += part
        if data[:1] != b"d":
            raise NoOutput(data[1:].decode("utf-8", "replace").strip() or "no answer")
        os.kill(self.pid, signal.SIGSTOP)
        if not os.WIFSTOPPED(status := os.waitpid(self.pid, os.WUNTRACED)[1]):
            self.status = status
            raise NoOutput("it ended its process after an answer")

    def kill(self):
        """Ends it; its wait status."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.status = os.waitpid(self.pid, 0)[1]
            os.close(self.orders)
            os.close(self.answers)
            self.memory.close()
        return self.status


def places(job):
    """(where each input and the output begin in the shared memory, where the output ends), in bytes."""
    end, begins = 0, []
    for dtype, shape in job["arrays"]:
        begins.append(-(-end // 64) * 64)
        end = begins[-1] + np.dtype(dtype).itemsize * int(np.prod(shape))
    return begins, end


def serve(orders, answers, memory, begins, job):
    """What a runner does: loads what it is told, then answers each call with b"d", or b"e" and an error."""
    LIBC.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        function = loaded(memory, begins, job, *json.loads(orders.readline()))
        while True:
            os.write(answers, b"d")
            if not orders.read(1):
                return
            function()
    except BaseException as error:
        lines = [f"line {f.lineno}: " for f in traceback.extract_tb(error.__traceback__) if f.filename == "<code>"]
        text = "".join([*lines[-1:], *traceback.format_exception_only(type(error), error)[-1:]]).strip()
        os.write(answers, b"e" + text.encode("utf-8", "replace")[:ERROR_BYTES].ljust(ERROR_BYTES))


def loaded(memory, begins, job, code, guarded):
    """The function that answers a call."""
    size = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (size + job["memory_bytes"],) * 2)
    if guarded:
        guard()
    forms = zip(job["arrays"], begins, strict=True)
    *arrays, target = [np.ndarray(tuple(shape), dtype, memory, at) for (dtype, shape), at in forms]
    if job["language"] == "c":
        library = ctypes.CDLL(code)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*arrays, target)]
        return lambda: library.f(*pointers)
    space = {"__name__": "submission"}
    exec(compile(code, "<code>", "exec"), space)
    function = eval("f", space)

    def call():
        result = function(*arrays)
        if not target.shape and isinstance(result, (float, int, np.generic)):
            result = np.asarray(result)
        if type(result) is not np.ndarray:
            raise TypeError(f"f returned {type(result).__name__}, not an array")
        if result.dtype != target.dtype or result.shape != target.shape:
            raise TypeError(f"f returned {result.dtype}{result.shape}, not {target.dtype}{target.shape}")
        target[...] = result

    return call


def judged(job):
    """The report of a job. The reference is on no disk when the agent's code begins."""
    os.sched_setaffinity(0, {random.choice(list(os.sched_getaffinity(0)))})  # so that all find inputs in the same cache
    runners = []
    for _ in range(2 * job["rounds"]):
        runners.append(Runner(job, runners))
    secret = json.loads(Path("secret.json").read_text(encoding="utf-8"))
    os.unlink("secret.json")
    report = {"nonce": secret["nonce"], "fault": "task", "error": "", "task": [], "candidate": []}
    deadline = time.monotonic() + job["seconds"]
    reference, candidate, is_c = secret["reference"], job["code"], job["language"] == "c"
    try:
        reference = compiled(reference, "reference.so", False) if is_c else reference
        for runner in runners[::2]:
            runner.load(reference, False, deadline)
        if is_c:
            os.unlink(reference)
            report["fault"] = "candidate"
            candidate = compiled(candidate, f"{OPEN}/candidate.so", True)
        for pair in zip(runners[::2], runners[1::2], strict=True):
            measure(pair, candidate, job, secret, report, deadline)
        report["fault"] = ""
    except (NoOutput, OSError) as error:  # the latter: of a pipe or a clock of a runner that has ended itself
        report["error"] = str(error)
    finally:
        for runner in runners:
            runner.kill()
    return report


def measure(pair, candidate, job, secret, report, deadline):
    """One round: adds its times in ns to the report. Raises NoOutput: a call fails, or an output is wrong."""
    report["fault"] = "task"
    calls = [drawn(job, secret) for _ in range(1 + job["calls"])]  # the first is not counted: pages and caches are cold
    outputs, names = {}, ["task", "candidate"]
    random.SystemRandom().shuffle(names)
    for name in names:
        runner, report["fault"] = pair[name == "candidate"], name
        if name == "candidate":
            runner.load(candidate, True, deadline)
        late = deadline if name == "candidate" else max(deadline, time.monotonic() + TURN_S)
        played = [runner.call(inputs, late) for inputs in calls]
        runner.kill()
        outputs[name] = [output for _, output in played]
        report[name].append([ns for ns, _ in played[1:]])
    report["fault"] = "candidate"
    for number, (right, output) in enumerate(zip(outputs["task"], outputs["candidate"], strict=True)):
        compare(number, right, output, job["arrays"][-1][0], secret["tolerance"])


def drawn(job, secret):
    """Fresh inputs, as bytes. Raises NoOutput: they are of another form than the job says."""
    rng, inputs = np.random.default_rng(int.from_bytes(os.urandom(16), "little")), []
    for draw, (dtype, shape) in zip(secret["draws"], job["arrays"], strict=False):
        array = np.asarray(eval(draw, {"rng": rng, "np": np}))
        if array.dtype != np.dtype(dtype) or list(array.shape) != shape:
            raise NoOutput(f"{draw} gives {array.dtype}{array.shape}, not {dtype}{shape}")
        inputs.append(array.tobytes())
    return inputs


def compare(number, right, output, dtype, tolerance):
    """Raises NoOutput unless all numbers of an output are finite and within `tolerance` times the largest right one."""
    right, output = (np.frombuffer(data, dtype).astype(np.float64) for data in (right, output))
    error = float(np.abs(right - output).max())
    most = tolerance * float(np.abs(right).max()) if np.dtype(dtype).kind == "f" else 0.0
    if not (np.isfinite(output).all() and error <= most):
        raise NoOutput(f"wrong: call {number} is off by {error:.2g}")


def compiled(text, path, guarded):
    """A shared library of a C text. Raises NoOutput, with the compiler's first complaint."""
    pipe, env = subprocess.PIPE, {**os.environ, "TMPDIR": os.path.abspath(OPEN)}
    limit = (lambda: guard(compiles=True)) if guarded else None
    with subprocess.Popen(
        [*COMPILE, path], stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True, preexec_fn=limit
    ) as cc:
        try:
            _, complaints = cc.communicate(text.encode("utf-8", "replace"), COMPILE_S)
        except subprocess.TimeoutExpired:
            raise NoOutput("the compiler takes too long") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(cc.pid, signal.SIGKILL)  # with all that it has started
    if cc.returncode:
        errors = [line for line in complaints.decode("utf-8", "replace").splitlines() if "error" in line]
        raise NoOutput((errors or ["cc fails"])[0][:ERROR_BYTES])
    return os.path.abspath(path)


def main(folder):
    """The server. It ends with its sandbox."""
    os.chdir(folder)
    LIBC.prctl(DUMPABLE, 0, 0, 0, 0)  # so that no other process reads or changes this one and its children
    about = {"numpy": getattr(sys.modules.get("numpy"), "__version__", None), "python": sys.version_info[:2]}
    Path("result").write_text(json.dumps(about | {"cc": bool(shutil.which("cc")), "able": lacking()}), encoding="utf-8")
    while True:
        Path("job").read_text(encoding="utf-8")
        pid = os.fork()
        if pid == 0:
            try:
                report = judged(json.loads(Path("public.json").read_text(encoding="utf-8")))
            except BaseException as error:
                report = {"failure": repr(error)}
            Path("result").write_text(json.dumps(report), encoding="utf-8")
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.path[:0] = sys.argv[2:]
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    with contextlib.suppress(ImportError):
        np = importlib.import_module("numpy")
        np.random.default_rng()  # so that it is loaded
    main(sys.argv[1])
