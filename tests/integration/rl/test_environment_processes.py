import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest

from gated_serving.rl.environments import EnvironmentFailedError, make_vector_environment, worker_pool

POINT = "tiny_goal_environment:PointReach"
FAULTY = "faulty_goal_environments"


def trajectory(environment_id: str, num_processes: int, num_steps: int) -> np.ndarray:
    rng = np.random.default_rng(2)
    with make_vector_environment(
        environment_id, num_environments=4, num_processes=num_processes, seed=9
    ) as environment:
        first = environment.reset()
        rows = [np.concatenate([first.observation, first.achieved_goal, first.desired_goal], axis=1)]
        for _ in range(num_steps):
            step = environment.step(rng.uniform(-1, 1, (4, environment.spec.action_size)))
            for moment in (step.observation, step.final):
                rows.append(np.concatenate([moment.observation, moment.achieved_goal, moment.desired_goal], axis=1))
    return np.array(rows)


@pytest.mark.parametrize(("environment_id", "num_steps"), [(POINT, 50), ("FetchReach-v4", 55)])
def test_trajectories_do_not_depend_on_the_number_of_processes(environment_id: str, num_steps: int):
    here = trajectory(environment_id, 0, num_steps)
    np.testing.assert_array_equal(trajectory(environment_id, 2, num_steps), here)


def test_a_killed_process_is_an_error_and_takes_the_others_with_it():
    environment = make_vector_environment(POINT, num_environments=2, num_processes=2)
    environment.reset()
    processes = [psutil.Process(pid) for pid in environment.process_ids]
    processes[1].kill()
    with pytest.raises(EnvironmentFailedError, match=rf"process 1 \(pid {processes[1].pid}\) ended with SIGKILL"):
        environment.step(np.zeros((2, 2)))
    assert not any(process.is_running() for process in processes)
    with pytest.raises(EnvironmentFailedError, match="its processes were ended"):
        environment.step(np.zeros((2, 2)))
    environment.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Dying", "process 0 .* ended with SIGKILL"),
        ("Raising", "environment 0 failed in step:\n(.|\n)*ValueError: the motor is stuck"),
        ("RaisingUnpicklable", "environment 0 failed in step:\n(.|\n)*UnpicklableError: the motor is stuck"),
    ],
)
def test_what_goes_wrong_in_a_process_is_said_here(name: str, message: str):
    environment = make_vector_environment(f"{FAULTY}:{name}", num_environments=1, num_processes=1)
    environment.reset()
    with pytest.raises(EnvironmentFailedError, match=message):
        environment.step(np.zeros((1, 2)))
    environment.close()


def test_a_process_that_ends_while_it_starts_is_said_here():
    environment = make_vector_environment(f"{FAULTY}:DyingAtTheStart", num_environments=1, num_processes=1)
    with pytest.raises(EnvironmentFailedError, match=r"process 0 \(pid \d+\) ended with exit code 3"):
        environment.reset()
    environment.close()


def test_a_process_that_is_stuck_is_given_up(monkeypatch):
    environment = make_vector_environment(POINT, num_environments=1, num_processes=1)
    environment.reset()
    [pid] = environment.process_ids
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(worker_pool, "ANSWER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(worker_pool, "CLOSE_TIMEOUT_S", 0.1)
    with pytest.raises(EnvironmentFailedError, match="gave no answer"):
        environment.step(np.zeros((1, 2)))
    assert not psutil.pid_exists(pid)


def test_ctrl_c_is_left_to_the_parent():
    with make_vector_environment(POINT, num_environments=1, num_processes=1) as environment:
        environment.reset()
        os.kill(environment.process_ids[0], signal.SIGINT)
        assert environment.step(np.zeros((1, 2))).final.observation.shape == (1, 2)


def test_each_process_takes_one_thread_and_the_parent_keeps_its_own(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with make_vector_environment(f"{FAULTY}:ThreadCount", num_environments=1, num_processes=1) as environment:
        environment.reset()
        assert (environment.step(np.zeros((1, 2))).final.observation == 1).all()
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_closing_leaves_no_process_behind_and_can_be_done_twice():
    environment = make_vector_environment(POINT, num_environments=2, num_processes=2)
    pids = environment.process_ids
    assert len(pids) == 2
    environment.close()
    environment.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


SCRIPT = """
import sys
from gated_serving.rl.environments import make_vector_environment

if __name__ == "__main__":
    environment = make_vector_environment("tiny_goal_environment:PointReach", num_environments=2, num_processes=2)
    environment.reset()
    print(*environment.process_ids, flush=True)
    sys.stdin.read()
"""


def test_a_parent_killed_with_9_leaves_no_process_behind_and_nothing_is_printed(tmp_path: Path):
    script = tmp_path / "parent.py"
    script.write_text(SCRIPT)
    parent = subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert parent.stdout is not None
    children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(children) == 2
    parent.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    _, said = parent.communicate()
    assert "Traceback" not in said


def test_processes_start_beside_threads_of_the_parent():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert trajectory(POINT, 2, 3).shape == (7, 4, 6)
    finally:
        stop.set()
        thread.join()
