"""The Python tool: what the roles and the planner are shown of a program that ran in the episode's own sandbox."""

from __future__ import annotations

from collections.abc import MutableMapping

from jaxagent.envs.python import hidden_tests
from jaxagent.envs.python.programs import Programs

NO_OUTPUT = "(no output)"
OUT_OF_MEMORY = "Execution error: out of memory"


async def run(programs: Programs, code: str, timeout_s: float, counters: MutableMapping[str, float]) -> str:
    """What a program prints, or what it fails with. Counts "failed_programs" and "timed_out_programs".

    Raises:
      RuntimeError: of the sandbox, which no program is to blame for.
    """
    if len(code) > hidden_tests.MAX_FILE_CHARS:
        counters["failed_programs"] += 1
        return f"Execution error: the program has more than {hidden_tests.MAX_FILE_CHARS} characters"
    ran = await programs.run(code.replace("\0", ""))
    output = ran.output.strip()
    if ran.timed_out:
        counters["timed_out_programs"] += 1
        return f"{output}\nExecution error: timed out after {timeout_s:g} s".lstrip("\n")
    if ran.exit_code != 0:
        counters["failed_programs"] += 1
        return OUT_OF_MEMORY if ran.out_of_memory else f"Execution error: {output or f'exit code {ran.exit_code}'}"
    return output or NO_OUTPUT
