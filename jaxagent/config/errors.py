"""What ends a command, and the nearest valid name for a wrong one. On the lowest floor: every room raises these."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import errno
import os
import signal
import textwrap
import traceback
import typing


class ConfigError(ValueError):
    """A user's mistake, told in one line. `main` prints it and exits with code 2."""


class WaitedInVainError(RuntimeError):
    """What was waited for did not come in its time: one line that says who waited for what, and for how long.

    It is nobody's mistake that could be mended in a config: whoever started the process starts it again. Commands end
    with exit code `WAITED`.
    """


class AttemptLost(WaitedInVainError):
    """What an attempt was played in is gone, and nobody failed: it has no result, and is played again by its number."""


WAITED = 75  # as in sysexits.h: a failure for now


def nearest(name: str, valid: typing.Iterable[str]) -> str:
    """ " Did you mean 'x'?" for the closest valid name, or a list of all of them."""
    valid = list(valid) or ["none"]
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"Did you mean '{close[0]}'?" if close else f"Valid: {', '.join(valid)}."


# Our field: what TRL, verl and other trainers call it.
_ELSEWHERE = {
    "rl.optimizer.learning_rate": "lr learning_rate actor_lr",
    "rl.optimizer.grad_clip": "max_grad_norm gradient_clipping",
    "rl.kl.coefficient": "beta kl_coef kl_loss_coef",
    "rl.objective.clip_low": "epsilon clip_ratio clip_range",
    "rl.objective.clip_high": "epsilon_high clip_ratio_high",
    "rl.group_size": "num_generations rollout_n n",
    "rl.tasks_per_step": "batch_size train_batch_size per_device_train_batch_size",
    "rl.epochs": "num_iterations ppo_epochs",
    "rl.steps": "max_steps total_training_steps",
    "rl.sampling.temperature": "temperature",
    "env.turn_tokens": "max_completion_length max_response_length max_new_tokens",
    "env.context_tokens": "max_prompt_length max_model_len",
    "workdir": "output_dir",
}
_OURS = {name: ours for ours, names in _ELSEWHERE.items() for name in names.split()}


@dataclasses.dataclass(frozen=True)
class Removed:
    """A field of earlier versions that its section's class lists under its name in `removed`."""

    now: str  # what holds for all runs now
    value: typing.Any = None  # the value that means just that
    like: str = ""  # the field, from the config's root, whose value means just that
    true: tuple[str, typing.Any] = ("", None)  # the section's field and its value that mean what True meant


def history(cls: type, name: str) -> typing.Mapping[str, typing.Any]:
    """What a section's class says under `removed`, `moved` or `off` (see `parse.modern`); a user's field is none."""
    value = getattr(cls, name, None)
    return value if isinstance(value, dict) else {}


def unknown_field(path: str, name: str, cls: type, valid: typing.Iterable[str]) -> ConfigError:
    """What to say of a field that the section `cls` at `path` lacks: where it went, what we call it, the nearest."""
    if removed := history(cls, "removed").get(name):
        return ConfigError(f"Config field '{path}.{name}' exists no more: {removed.now}. Leave it out.")
    valid = list(valid)
    ours = "" if difflib.get_close_matches(name, valid, n=1, cutoff=0.8) else _OURS.get(name, "")
    own = ours.rpartition(".")[2]  # of another stage's section, perhaps
    advice = nearest(name, valid) if not ours else f"It is called 'config.{ours}' here."
    advice = f"Did you mean '{own}'?" if own in valid else advice
    return ConfigError(f"Unknown config field '{path}.{name}'. {advice}")


def failure_line(error: BaseException) -> str:
    """One line of what code of the user's raised, with the last line of it that was on the way there."""
    ours = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(os.__file__) + os.sep, "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    frames = [f for f in frames if f"{os.sep}site-packages{os.sep}" not in f.filename] or frames
    place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 400, placeholder=' ...')}{place}"


@contextlib.contextmanager
def as_config_error(place: str, *passing: type[Exception]) -> typing.Iterator[None]:
    """What other people's code raises in the `with` becomes a ConfigError that names the place; `passing` stay."""
    try:
        yield
    except (ConfigError, *passing):
        raise
    except Exception as error:
        raise ConfigError(f"{place}: {failure_line(error)}.") from error


EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}  # as the shell has them
NAMES = {signal.SIGINT: "interrupted", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


def ending_signals() -> list[signal.Signals]:
    """Those of `EXIT_CODES` that our parent (nohup, a shell's background job) has not had us ignore."""
    return [signum for signum in EXIT_CODES if signal.getsignal(signum) is not signal.SIG_IGN]


class Stopped(SystemExit):
    """Ends a run with the signal's exit code. `str` is the line that `main` prints."""

    def __init__(self, signum: signal.Signals, text: str):
        super().__init__(EXIT_CODES[signum])
        self.exit_code = EXIT_CODES[signum]
        self._text = f"{NAMES[signum]}{text}"

    def __str__(self) -> str:
        return self._text


_DISK_CODES = (errno.ENOSPC, errno.EDQUOT)


def is_full_disk(error: BaseException | None) -> bool:
    """Whether the error, or one that it was raised from, says that a disk or a quota is full.

    tensorstore raises a ValueError, safetensors an error of its own; both errors carry the operating system's message.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            if error.errno in _DISK_CODES:
                return True
        elif any(os.strerror(code) in str(error) for code in _DISK_CODES):
            return True
        error = error.__cause__ or error.__context__
    return False
