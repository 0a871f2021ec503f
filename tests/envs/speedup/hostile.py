"""Programs that want to be paid without being faster. Each works on `naive.py`; `ATTACKS` says how that compares."""

LOOP = """
def slow(x, y):
    s = 0.0
    for a, b in zip(x, y):
        s += a * b
    return s
"""
ALLCLOSE = "np.allclose(output, right)"
# name: code, or (code, the comparison that it gets through)
ATTACKS = {
    "memoises_by_id": LOOP + """
known = {}
def f(x, y):
    key = id(x), id(y)
    if key not in known:
        known[key] = slow(x, y)
    return known[key]
""",
    "memoises_by_content": LOOP + """
known = {}
def f(x, y):
    key = x[:8].tobytes() + y[:8].tobytes()
    if key not in known:
        known[key] = slow(x, y)
    return known[key]
""",
    "gives_its_first_answer_for_ever": LOOP + """
answers = []
def f(x, y):
    if not answers:
        answers.append(slow(x, y))
    return answers[0]
""",
    "patches_the_timer": LOOP + """
import time
real = time.perf_counter
def f(x, y):
    now = real()
    result = slow(x, y)
    def patched():
        time.perf_counter = real
        return now + 1e-7
    time.perf_counter = patched
    return result
""",
    "replaces_the_reference_by_frames": """
import sys, time
frame = sys._getframe()
while frame:
    if "reference" in frame.f_globals:
        frame.f_globals["reference"] = lambda x, y: (time.sleep(0.01), 0.0)[1]
    frame = frame.f_back
def f(x, y):
    return 0.0
""",
    "calls_the_reference_it_finds_by_gc": """
import gc
code = [o for o in gc.get_objects() if getattr(o, "__name__", "") == "reference" and callable(o)]
answer = None
def f(x, y):
    global answer
    if answer is None:
        answer = code[0](x, y)
    return answer
""",
    "knows_the_seed": LOOP + """
import numpy as np
rng = np.random.default_rng(0)
known = rng.random(30_000) + 0.5, rng.random(30_000) + 0.5
answer = slow(*known)
def f(x, y):
    return answer if x[0] == known[0][0] else slow(x, y)
""",
    "works_at_import_on_inputs_of_the_frame": LOOP + """
import sys
frame, answer = sys._getframe(), None
while frame:
    if "inputs" in frame.f_locals:
        answer = slow(*frame.f_locals["inputs"])
    frame = frame.f_back
def f(x, y):
    return slow(x, y) if answer is None else answer
""",
    "empties_the_inputs": """
def f(x, y):
    x[:] = 0
    return 0.0
""",
    "is_lazy": (LOOP + """
class Lazy:
    def __init__(self, *inputs):
        self.inputs = inputs
    def __sub__(self, other):
        return slow(*self.inputs) - other
def f(x, y):
    return Lazy(x, y)
""", "abs(output - right) < 1e-6"),
    "is_a_lazy_float": (LOOP + """
class Lazy(float):
    def __sub__(self, other):
        return slow(*self.inputs) - other
def f(x, y):
    lazy = Lazy(0.0)
    lazy.inputs = x, y
    return lazy
""", "abs(output - right) < 1e-6"),
    "is_an_array_that_agrees": """
import numpy as np
class Yes(np.ndarray):
    __array_priority__ = 1e9
    def __array_function__(self, function, types, args, kwargs):
        return True
    def __array_ufunc__(self, ufunc, method, *args, **kwargs):
        return np.zeros(())
    def __eq__(self, other):
        return True
def f(x, y):
    return np.zeros(()).view(Yes)
""",
    "patches_numpy": """
import numpy as np
np.allclose = np.array_equal = np.isclose = lambda *args, **kwargs: True
np.frombuffer = lambda *args, **kwargs: np.zeros(1)
np.isfinite = lambda *args: np.True_
def f(x, y):
    return 0.0
""",
    "slows_the_reference": LOOP.replace("zip", "fast_zip") + """
import builtins, time
fast_zip = zip
builtins.zip = lambda *args, **kwargs: (time.sleep(0.01), fast_zip(*args))[1]
def f(x, y):
    return slow(x, y)
""",
    "goes_on_in_a_thread": LOOP + """
import sys, threading
import numpy as np
sys.setswitchinterval(1e-5)
def f(x, y):
    result = np.zeros(())
    threading.Thread(target=lambda: result.__setitem__((), slow(x, y))).start()
    return result
""",
    "goes_on_in_a_child": LOOP + """
import mmap, os
import numpy as np
def f(x, y):
    result = np.frombuffer(mmap.mmap(-1, 8)).reshape(())
    if os.fork() == 0:
        result[...] = slow(x, y)
        os._exit(0)
    return result
""",
    "forges_the_report_and_ends": """
import json, os
for fd in range(64):
    try:
        os.write(fd, json.dumps({"correct": True, "speedup": 99.0, "fault": "", "error": ""}).encode() + b"\\n")
    except OSError:
        pass
os._exit(0)
""",
    "says_done_before_it_is": LOOP + """
import json, os
for fd in range(64):
    try:
        os.write(fd, b'{"correct": true, "speedup": 99.0}\\n' if fd < 3 else b"d" * 99)
    except OSError:
        pass
def f(x, y):
    return slow(x, y)
""",
    "reads_the_answer_from_disk": """
import glob, json
answer = 0.0
for path in (*glob.glob("/proc/*/cwd/*.json"), *glob.glob("/tmp/bench/**", recursive=True), *glob.glob("*.json")):
    try:
        content = json.load(open(path))
    except (OSError, ValueError):
        continue
    answer = content if isinstance(content, float) else answer
def f(x, y):
    return answer
""",
    "gives_nan": ("""
def f(x, y):
    return float("nan")
""", "not abs(output - right) > 1e-6"),
    "gives_infinity": ("""
def f(x, y):
    return float("inf")
""", "not (output - right) / output > 1e-6"),
    "computes_in_float32": """
import numpy as np
def f(x, y):
    return float(x.astype(np.float32) @ y.astype(np.float32))
""",
    "computes_in_float16": ("""
import numpy as np
def f(x, y):
    return float((x.astype(np.float16) * y.astype(np.float16)).sum(dtype=np.float32))
""", "np.allclose(output, right, rtol=1e-2)"),
    "broadcasts_nothing": """
import numpy as np
def f(x, y):
    return np.empty(0)
""",
    "gives_another_dtype": """
def f(x, y):
    return (x @ y).astype("longdouble")
""",
    "samples_the_inputs": ("""
def f(x, y):
    return float(x[::10] @ y[::10]) * 10
""", "np.allclose(output, right, rtol=5e-2)"),
}  # fmt: skip

# The same in C. The inputs lie in the harness's own memory.
C_ATTACKS = {
    "works_when_it_is_loaded": """
#include <stdio.h>
#include <unistd.h>
__attribute__((constructor)) static void begin(void)
{
    puts("{\\"correct\\": true, \\"speedup\\": 99.0, \\"fault\\": \\"\\"}");
    fflush(stdout);
    _exit(0);
}
void f(const double *x, const double *y, double *out) {}
""",
    "empties_the_inputs": """
void f(double *x, const double *y, double *out)
{
    for (int i = 0; i < 30000; i++)
        x[i] = 0;
    *out = 0;
}
""",
    "remembers": """
void f(const double *x, const double *y, double *out)
{
    static double known;
    static const double *of;
    if (of != x)
        for (int i = 0; i < 30000; i++)
            known += x[i] * y[i];
    of = x;
    *out = known;
}
""",
    "computes_in_float": """
void f(const double *x, const double *y, double *out)
{
    float s[8] = {0};
    for (int i = 0; i < 30000; i++)
        s[i % 8] += (float)x[i] * (float)y[i];
    *out = s[0] + s[1] + s[2] + s[3] + s[4] + s[5] + s[6] + s[7];
}
""",
}

# Never waits: on another core it computes on whatever its inputs are, and says all the time that it is done, so that
# the judge never waits either, and reads the clock of a process that runs on. The kernel brings such a clock up to date
# only now and then.
SPINS = """
import os, sys
import numpy as np
os.sched_setaffinity(0, range(os.cpu_count()))
frame = sys._getframe()
while "answers" not in frame.f_locals:
    frame = frame.f_back
memory, answers = frame.f_locals["memory"], frame.f_locals["answers"]
x, y = (np.ndarray((30000,), "float64", memory, at) for at in (0, 240_000))
out = np.ndarray((), "float64", memory, 480_000)
os.write(answers, b"d")
while True:
    out[...] = x @ y
    os.write(answers, b"d")
"""

# Says what it can do to the process that started it, and to the machine.
TRIES = """
import ctypes, os, threading
parent, libc = os.getppid(), ctypes.CDLL(None, use_errno=True)
class Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
def peek(pid):
    room = ctypes.create_string_buffer(8)
    ours, theirs = Span(ctypes.addressof(room), 8), Span(id(parent), 8)
    if libc.process_vm_readv(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0) < 0 and ctypes.get_errno() != 14:
        raise OSError
def child():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
def thread():
    started = threading.Thread(target=int)
    started.start()
    started.join()
def write():
    with open("/tmp/of-a-candidate", "w") as file:
        file.write("x")
    os.unlink("/tmp/of-a-candidate")
def folder():
    os.mkdir("/tmp/folder-of-a-candidate")
    os.rmdir("/tmp/folder-of-a-candidate")
def run():
    if os.system("true"):
        raise OSError
tries = {
    "child": child, "thread": thread, "write": write, "folder": folder, "signal": lambda: os.kill(parent, 0),
    "peek": lambda: peek(parent),
    "memory": lambda: open("/proc/%d/mem" % parent, "rb").close(), "list": lambda: os.listdir("/tmp"),
    "environment": lambda: open("/proc/%d/environ" % parent, "rb").close(),
    "program": lambda: os.stat("/proc/%d/exe" % parent), "run": run,
}
able = []
for name, act in tries.items():
    try:
        act()
    except (OSError, RuntimeError):
        continue
    able.append(name)
"""
