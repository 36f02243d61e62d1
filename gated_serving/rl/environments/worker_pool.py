"""Groups of environments in processes of their own, through Gymnasium's ``AsyncVectorEnv``.

Processes are spawned, not forked: a fork would copy a process in which torch has threads, whose locks stay locked in
the copy. A server of forks would avoid that too, but it keeps the environment variables of its own start, and these say
how many threads a process takes, which must be known before NumPy is loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import _async_worker

from gated_serving.rl.environments.errors import EnvironmentFailedError
from gated_serving.rl.environments.group import EnvironmentGroup, raise_failure

ANSWER_TIMEOUT_S = 300.0
"""How long a process may take over one step of its environments, or over making and resetting them."""

CLOSE_TIMEOUT_S = 5.0
"""How long a process may take to close its environments before it is ended."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class WorkerPool:
    """Groups of the same size, one in each process.

    Args:
        make_groups: Each makes a group; they are sent to the processes.
        name: Of the environment, for messages.

    Raises:
        EnvironmentFailedError: A process ended while it started.
    """

    def __init__(self, make_groups: Sequence[Callable[[], EnvironmentGroup]], name: str) -> None:
        self._name = name
        self._vector: AsyncVectorEnv[Any, Any] | None = None
        with self._failures_named(), _one_thread_each():
            self._vector = _Processes(
                make_groups, context="spawn", worker=_work, autoreset_mode=AutoresetMode.DISABLED, shared_memory=True
            )

    def reset(self, options: dict[str, Any]) -> npt.NDArray[np.float32]:
        """Resets every group; rows of all of them, [P, N, width]."""
        vector = self._open_vector()
        with self._failures_named():
            vector.reset_async(options=options)
            rows, info = vector.reset_wait(timeout=ANSWER_TIMEOUT_S)
            raise_failure(info)
            return rows

    def step(self, actions: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Steps every group with actions [P, N, A]; rows of all of them, [P, N, width]."""
        vector = self._open_vector()
        with self._failures_named():
            vector.step_async(actions)
            rows, *_, info = vector.step_wait(timeout=ANSWER_TIMEOUT_S)
            raise_failure(info)
            return rows

    @property
    def process_ids(self) -> list[int]:
        """Ids of the processes that run."""
        return [process.pid for process in self._vector.processes if process.pid] if self._vector else []

    def close(self) -> None:
        """Ends the processes; may be called again."""
        vector, self._vector = self._vector, None
        if vector is not None:
            vector.close()

    def _open_vector(self) -> AsyncVectorEnv[Any, Any]:
        if self._vector is None:
            raise EnvironmentFailedError(f"{self._name}: its processes were ended; make the environments anew")
        return self._vector

    @contextlib.contextmanager
    def _failures_named(self) -> Iterator[None]:
        """Ends all processes when one failed, and says which and how."""
        try:
            yield
        except multiprocessing.TimeoutError:
            self.close()
            raise EnvironmentFailedError(
                f"{self._name}: a process gave no answer for {ANSWER_TIMEOUT_S:.0f} s and was ended"
            ) from None
        except (EOFError, OSError) as error:
            ended = self._ended()
            self.close()
            raise EnvironmentFailedError(
                f"{self._name}: {ended or f'a process ended ({error!r})'}; look for what ended it (memory: dmesg), "
                "then go on with --resume"
            ) from None
        except BaseException:
            self.close()
            raise

    def _ended(self) -> str:
        """Which processes have ended by themselves, and by what."""
        ended: list[str] = []
        for number, process in enumerate(self._vector.processes if self._vector else []):
            process.join(timeout=0.1)
            if process.exitcode is not None:
                how = (
                    signal.Signals(-process.exitcode).name if process.exitcode < 0 else f"exit code {process.exitcode}"
                )
                ended.append(f"process {number} (pid {process.pid}) ended with {how}")
        return ", ".join(ended)


def _work(*arguments: Any) -> None:
    """Gymnasium's own loop of a process.

    Ctrl-C and SIGTERM are left to the parent, which may want to finish a step and save: terminals and service managers
    send them to all processes at once. When the parent is gone, there is nobody left to be told so.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        _async_worker(*arguments)


class _Processes(AsyncVectorEnv[Any, Any]):
    """Gymnasium's, but closing it never waits for a process that is gone or stuck."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # Before multiprocessing's own end, which would send SIGTERM and then wait for processes that ignore it.
        atexit.register(_end, weakref.ref(self))

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Asks every process to close, and ends those that have not after a while."""
        pipes = [pipe for pipe in self.parent_pipes if pipe is not None and not pipe.closed]
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send(("close", None))
        deadline = time.monotonic() + (0 if terminate else CLOSE_TIMEOUT_S)
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in pipes:
            pipe.close()


def _end(reference: weakref.ref[_Processes]) -> None:
    """Ends processes that nobody closed."""
    processes = reference()
    if processes is not None and not processes.closed:
        processes.close(terminate=True)


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes started meanwhile take one thread each for linear algebra; with more they would hinder one another."""
    before = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
