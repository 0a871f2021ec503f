"""Checks and measures a candidate beside its reference, inside a sandbox: `python3 -I -B bench.py FOLDER PACKAGES`.

Python and NumPy are all there is. Who runs what:

    server      waits in FOLDER; runs no task's code, so its memory holds nothing. Forks a judge for each job
    judge       forks all runners, and only then reads the reference; draws inputs, compares, counts. Runs the text that
                draws inputs, and nothing of the agent's
    runners     `rounds` for the reference, `rounds` for the candidate; each loads one function and answers calls. Those
                of the candidate have laid down their rights (`guard`) before its first line runs

In every round a candidate's runner and a reference's get the same inputs, drawn afresh for each call, one runner after
the other in random order; each is killed when its turn is over, and the candidate's code comes into its runner with its
turn. A call lasts from before its inputs are written until after its output was copied, and every output is compared:
whatever a candidate does in its own process, the answer to unknown inputs is computed in that time. Time is processor
time, which the kernel counts: another program that wants the processor is not in it, and a runner has one thread.
"""

import contextlib
import ctypes
import json
import math
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

LIBC = ctypes.CDLL(None, use_errno=True)
PDEATHSIG, DUMPABLE, NO_NEW_PRIVS = 1, 4, 38  # of prctl
LANDLOCK = (444, 445, 446)  # create_ruleset, add_rule, restrict_self: the same numbers on every architecture
READ = 1 << 2 | 1 << 3  # files, folders
# What a candidate may read: programs and libraries.
READABLE = ("/usr", "/lib", "/lib64", "/etc", "/opt", "/dev/null", "/dev/urandom")
COMPILE = ("cc", "-O2", "-shared", "-fPIC", "-x", "c", "-", "-lm", "-o")
COMPILE_S = 20.0
ERROR_BYTES = 300
FOLDER = "open"  # what candidates may read of the server's folder


class Failed(Exception):
    """A function did not give an output."""


def guard():
    """Gives up, for good: new processes and threads, all files but programs and `FOLDER`, signals to others."""
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    LIBC.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    create, add, restrict = LANDLOCK
    version = LIBC.syscall(create, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return
    everything = (1 << {1: 13, 2: 14}.get(version, 15)) - 1  # that is done to files; network; signals
    attributes = struct.pack("<QQQ", everything, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = LIBC.syscall(create, attributes, ctypes.c_size_t(len(attributes)), 0)
    for path in (*READABLE, FOLDER):
        if os.path.exists(path):
            opened = os.open(path, os.O_PATH)
            allowed = READ if os.path.isdir(path) else READ & 1 << 2
            LIBC.syscall(add, rules, 1, struct.pack("<Qi", allowed, opened), 0)
            os.close(opened)
    LIBC.syscall(restrict, rules, 0)
    os.close(rules)


def lacking():
    """What `guard` does not take away here, in words: a process of its own tries it."""
    judge = os.getpid()
    tries = {
        "it can start processes": lambda: os.fork() or os._exit(0),
        "it can write files": lambda: open("probe", "w").close(),
        "it can read the judge's memory": lambda: open(f"/proc/{judge}/mem", "rb").close(),
    }
    pid = os.fork()
    if pid == 0:
        guard()
        able = 0
        for number, act in enumerate(tries.values()):
            with contextlib.suppress(OSError):
                act()
                able |= 1 << number
        os._exit(able)
    able = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [name for number, name in enumerate(tries) if able & 1 << number]


class Runner:
    """A process with one function, and the memory that it shares with the judge alone."""

    def __init__(self, job, others):
        self.places, self.size = places(job)
        self.memory = mmap.mmap(-1, self.size)
        ends = os.pipe(), os.pipe()
        (orders, self.orders), (self.sight, answers) = ends
        self.status = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for other in others:
                    other.memory.close()
                first, last = sorted((orders, answers))
                for begin, end in ((3, first), (first + 1, last), (last + 1, 1024)):
                    os.closerange(begin, end)
                serve(orders, answers, self.memory, self.places, job)
            finally:
                os._exit(1)
        os.close(orders)
        os.close(answers)

    def load(self, code, guarded, deadline):
        """Has it load a function. Raises Failed."""
        message = json.dumps([code, guarded]).encode()
        message = struct.pack("<I", len(message)) + message
        while message:
            message = message[os.write(self.orders, message) :]
        self.wait(deadline)

    def call(self, inputs, deadline):
        """(processor time in ns, output as bytes) of a call. Raises Failed."""
        clock = ~self.pid << 3 | 2  # what clock_getcpuclockid gives
        begin = time.clock_gettime_ns(clock)
        for at, data in zip(self.places, inputs, strict=False):  # the last place is the output's
            self.memory[at : at + len(data)] = data
        os.write(self.orders, b"c")
        self.wait(deadline)
        output = self.memory[self.places[-1] : self.size]
        return time.clock_gettime_ns(clock) - begin, output

    def wait(self, deadline):
        """Until it has done what it was told. Raises Failed."""
        data = b""
        while data[:1] != b"d" and len(data) <= ERROR_BYTES:
            if not select.select([self.sight], [], [], max(deadline - time.monotonic(), 0.0))[0]:
                raise Failed("it takes too long")
            part = os.read(self.sight, ERROR_BYTES + 1 - len(data))
            if not part:
                self.kill()
                code = os.waitstatus_to_exitcode(self.status)
                raise Failed(f"it ended its process ({signal.strsignal(-code) if code < 0 else code})")
            data += part
        if data[:1] != b"d":
            raise Failed(data[1:].decode("utf-8", "replace").strip() or "no answer")

    def kill(self):
        """Ends it."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.status = os.waitpid(self.pid, 0)[1]
            os.close(self.orders)
            os.close(self.sight)
            self.memory.close()


def places(job):
    """(where each input and the output begin in the shared memory, where the output ends), in bytes."""
    end, begins = 0, []
    for dtype, shape in (*job["inputs"], job["output"]):
        begins.append(-(-end // 64) * 64)
        end = begins[-1] + np.dtype(dtype).itemsize * math.prod(shape)
    return begins, end


def serve(orders, answers, memory, begins, job):
    """What a runner does: loads what it is told, then answers each call. Never comes back."""
    LIBC.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    (length,) = struct.unpack("<I", received(orders, 4))
    code, guarded = json.loads(received(orders, length))
    call = attempt(answers, lambda: loaded(memory, begins, job, code, guarded))
    while call and received(orders, 1):
        attempt(answers, call)
    os._exit(0)


def received(orders, count):
    """So many bytes of the judge's orders."""
    data = b""
    while len(data) < count:
        part = os.read(orders, count - len(data))
        if not part:
            os._exit(0)
        data += part
    return data


def attempt(answers, act):
    """Answers whether it went well, or with the error in `ERROR_BYTES`; what it gave, or None."""
    try:
        result = act()
    except BaseException as error:
        frames = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "<code>"]
        lines = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()
        text = (f"line {frames[-1]}: " if frames else "") + lines[-1]
        os.write(answers, b"e" + text.encode("utf-8", "replace")[:ERROR_BYTES].ljust(ERROR_BYTES))
        return None
    os.write(answers, b"d")
    return result


def loaded(memory, begins, job, code, guarded):
    """The function that answers a call."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (size + job["memory_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (int(job["seconds"]) + 2,) * 2)
    if guarded:
        guard()
    *arrays, target = [
        np.ndarray(tuple(shape), dtype, memory, at)
        for (dtype, shape), at in zip((*job["inputs"], job["output"]), begins, strict=True)
    ]
    if job["language"] == "c":
        function = ctypes.CDLL(code).f
        function.restype = None
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*arrays, target)]
        return lambda: function(*pointers)
    space = {"__name__": "submission"}
    exec(compile(code, "<code>", "exec"), space)
    function = space["f"]

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
    """What became of a job. Both of its files are gone before any of the agent's code is at work."""
    runners = []
    for _ in range(2 * job["rounds"]):
        runners.append(Runner(job, runners))
    with open("secret.json") as file:
        secret = json.load(file)
    os.unlink("secret.json")
    report = {"nonce": secret["nonce"], "fault": "task", "error": "", "reference_ns": [], "candidate_ns": []}
    deadline = time.monotonic() + job["seconds"]
    references, candidates = runners[::2], runners[1::2]
    try:
        reference = secret["reference"]
        if job["language"] == "c":
            reference = compiled(reference, "reference.so")
        for runner in references:
            runner.load(reference, False, deadline)
        if job["language"] == "c":
            os.unlink("reference.so")
        report["fault"] = "candidate"
        candidate = job["code"]
        if job["language"] == "c":
            candidate = compiled(candidate, f"{FOLDER}/candidate.so")
        for pair in zip(references, candidates, strict=True):
            measure(pair, candidate, job, secret, report, deadline)
        report["fault"] = ""
    except Failed as error:
        report["error"] = str(error)
    finally:
        for runner in runners:
            runner.kill()
    return report


def measure(pair, candidate, job, secret, report, deadline):
    """One round: adds its times to the report. Raises Failed: a call fails, or an output is wrong."""
    calls = [drawn(job, secret) for _ in range(1 + job["calls"])]  # the first is not counted: pages and caches are cold
    outputs, names = {}, ["reference", "candidate"]
    random.SystemRandom().shuffle(names)
    for name in names:
        runner = pair[name == "candidate"]
        report["fault"] = "candidate" if name == "candidate" else "task"
        if name == "candidate":
            runner.load(candidate, True, deadline)
        played = [runner.call(inputs, deadline) for inputs in calls]
        runner.kill()
        outputs[name] = [output for _, output in played]
        report[name + "_ns"].append([ns for ns, _ in played[1:]])
    report["fault"] = "candidate"
    for number, (right, output) in enumerate(zip(outputs["reference"], outputs["candidate"], strict=True)):
        compare(number, right, output, job["output"], secret["tolerance"])


def drawn(job, secret):
    """Fresh inputs, as bytes. Raises Failed: they are of another form than the job says."""
    rng = np.random.default_rng(int.from_bytes(os.urandom(16), "little"))
    arrays = []
    for draw, (dtype, shape) in zip(secret["draws"], job["inputs"], strict=True):
        array = np.asarray(eval(draw, {"rng": rng, "np": np}))
        if array.dtype != np.dtype(dtype) or list(array.shape) != list(shape):
            raise Failed(f"{draw} gives {array.dtype}{array.shape}, not {dtype}{tuple(shape)}")
        arrays.append(array.tobytes())
    return arrays


def compare(number, right, output, form, tolerance):
    """Raises Failed unless every number of an output is finite, and as near as `tolerance` times the largest right one;
    whole numbers are equal."""
    right, output = (np.frombuffer(data, form[0]) for data in (right, output))
    if not np.isfinite(output).all():
        raise Failed(f"wrong: call {number} gives numbers that are not finite")
    right, output = right.astype(np.float64), output.astype(np.float64)
    error = float(np.abs(right - output).max(initial=0.0))
    most = tolerance * float(np.abs(right).max(initial=0.0)) if np.dtype(form[0]).kind == "f" else 0.0
    if not error <= most:
        raise Failed(f"wrong: call {number} is off by {error:.2g}")


def compiled(text, path):
    """A shared library of a C text. Raises Failed, with the compiler's first complaint."""
    try:
        done = subprocess.run([*COMPILE, path], input=text.encode(), capture_output=True, timeout=COMPILE_S)
    except subprocess.TimeoutExpired:
        raise Failed("the compiler takes too long") from None
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").splitlines()
        raise Failed(next((line for line in lines if "error" in line), "cc fails")[:ERROR_BYTES])
    return os.path.abspath(path)


def put(report):
    """Hands a report to who reads the pipe."""
    with open("result", "w") as file:
        json.dump(report, file)


def main(folder):
    """The server. It ends with its sandbox."""
    os.chdir(folder)
    LIBC.prctl(DUMPABLE, 0, 0, 0, 0)  # so that no other process reads or changes this one and its children
    put(
        {
            "numpy": np and np.__version__,
            "python": sys.version_info[:2],
            "cc": bool(shutil.which("cc")),
            "able": lacking(),
        }
    )
    while True:
        with open("job") as file:
            file.read()
        pid = os.fork()
        if pid == 0:
            try:
                with open("public.json") as file:
                    job = json.load(file)
                os.unlink("public.json")
                report = judged(job)
            except BaseException as error:
                report = {"failure": repr(error)}
            put(report)
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.path[:0] = sys.argv[2:]
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    try:
        import numpy as np

        np.random.default_rng()  # so that it is loaded
    except ImportError:
        np = None
    main(sys.argv[1])
