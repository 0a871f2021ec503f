"""`execute` as an agent program needs it: half an hour, many processes, much output, an end that nothing escapes."""

import asyncio

from jaxagent.sandbox.base import MIB, Limits, Spec

MANY = Spec(limits=Limits(processes=128, flood_bytes=64 * MIB))


async def test_a_deaf_program_is_killed_at_its_deadline(anywhere):
    """Deaf to SIGTERM and ^C, with children in its group that are deaf, too, and hold its output."""
    async with await anywhere.start() as sandbox:
        deaf = "trap '' TERM INT HUP QUIT; (while :; do sleep 1; done) & echo begun; while :; do :; done"
        done = await sandbox.execute(["sh", "-c", deaf], 2.0, 100)
        assert (done.output, done.timed_out, done.exit_code) == (b"begun\n", True, 137)
        alive = "for p in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$p; done 2>/dev/null | grep -c 'echo [b]egun'"
        # On a busy machine what is killed is gone once it gets a processor.
        gone = f"for i in $(seq 30); do n=$({alive}); [ $n = 0 ] && break; sleep 0.1; done; echo $n"
        assert (await sandbox.run(gone, 10, 100)).output == b"0\n" or anywhere.name == "plain"


async def test_what_a_program_left_ends_when_it_is_told_to(anywhere):
    """Daemons that left its group live on after it, and hold up no answer; `stop_processes` ends them."""
    async with await anywhere.start() as sandbox:
        tick = "while :; do echo x >>ticks; sleep 0.02; done"
        daemon = f"setsid sh -c 'setsid sh -c \"{tick}\" & exit 0' & wait; echo started"
        for last, deadline_s, expected in (("exit 3", 30, 3), ("sleep 1000", 2.0, 137)):
            done = await sandbox.execute(["sh", "-c", f"{daemon}; {last}"], deadline_s, 100)
            assert (done.output, done.exit_code) == (b"started\n", expected)
            while b"x" not in (await sandbox.run("cat ticks", 10, 1000)).output:
                await asyncio.sleep(0.02)
            await sandbox.stop_processes()
            size = (await sandbox.run("wc -c <ticks", 10, 100)).output
            await asyncio.sleep(0.1)
            assert (await sandbox.run("wc -c <ticks; rm ticks", 10, 100)).output == size


async def test_zombies_are_taken_in(anywhere):
    """A parent that waits for nobody leaves its dead children to process 1, which does not keep them."""
    async with await anywhere.start() as sandbox:
        orphans = "for i in `seq 50`; do (sh -c 'exit 1' & exec sh -c 'exit 2') & done; wait"
        assert (await sandbox.execute(["sh", "-c", orphans], 30, 100)).exit_code == 0
        left = "sleep 0.2; cat /proc/[0-9]*/stat 2>/dev/null | grep -c ' Z [01] '; true"
        assert (await sandbox.run(left, 10, 100)).output == b"0\n" or anywhere.name == "plain"


async def test_a_long_deadline_and_128_processes(anywhere):
    """Half an hour and a day are deadlines like others; a program may have as many processes as the limit says."""
    async with await anywhere.start(MANY) as sandbox:
        many = "for i in `seq 100`; do sleep 1000 & done; echo $(jobs -p | wc -l)"
        for deadline_s in (1800.0, 86_400.0):
            done = await sandbox.execute(["bash", "-c", many], deadline_s, 100)
            assert (done.output, done.exit_code, done.timed_out) == (b"100\n", 0, False)
            await sandbox.stop_processes()
