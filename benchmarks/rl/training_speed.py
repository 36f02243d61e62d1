"""Updates and environment steps a second, and peak memory, by depth: the project's learner beside a plain PyTorch loop.

- ``plain``: the same network classes in the loop that is usually written: critic update, then an actor update that
  encodes the goals again and lets gradients flow into the critic's weights, torch's default Adam, all pairwise
  differences for the energies, hindsight goals by numpy's ``choice``, one environment stepped in the same process.
- ``gated-serving``: the project's learner, replay and vectorised environments, with nothing else switched on.
- ``+ checkpointing``: the same, activations computed again in as many segments as need the least memory.
- ``+ compile``: the same, with the residual blocks through torch.compile.

Each side of a depth is a process of its own; all are loaded before the first round and take turns while the rest sleep.
At depth 1,024 they would not fit into memory together, and each turn has a fresh process.

An update counts with the drawing of its batch, in CPU time of one thread, so that other work on the machine does not
count; environment steps count with acting and keeping, in wall time, because they are spread over processes. Peak
memory is the process's largest resident size (``VmHWM``), without the processes that only step environments.

    python benchmarks/rl/training_speed.py [--depths 4,32,64,256,1024] [--rounds 5] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: benchmarks/ is no package

ENVIRONMENT = "FetchReach-v4"
WIDTH, BATCH_SIZE, GAMMA, LEARNING_RATE = 256, 256, 0.99, 3e-4
NUM_ENVIRONMENTS, NUM_PROCESSES = 8, 2
EPISODE_LENGTH = 50
PLAIN, OURS, CHECKPOINTING, COMPILE = "plain", "gated-serving", "+ checkpointing", "+ compile"
SIDES = (PLAIN, OURS, CHECKPOINTING, COMPILE)
UPDATES_A_TURN = {4: 20, 32: 5, 64: 3}
ACTS_A_TURN = {4: 100, 32: 100, 64: 50, 256: 50}
"""How often a side acts in a turn; elsewhere ten times. ``plain`` takes one step each time, the others eight."""
DEPTH_OF_ONE_AT_A_TIME, ROUNDS_OF_ONE_AT_A_TIME = 1024, 2
"""From here on the sides do not fit into memory together: every turn has a process of its own, and rounds are few."""


class Learning(Protocol):
    """What a worker measures."""

    def draw(self) -> Any:
        """A batch with hindsight goals."""
        ...

    def update(self, batch: Any) -> None:
        """One step of critic, actor and temperature."""
        ...

    def collect(self, num_acts: int) -> int:
        """Acts so often and keeps what happened; returns the environment steps that were taken."""
        ...


class Side:
    """One side at one depth: a worker process that measures a turn when told to."""

    def __init__(self, name: str, depth: int, cache: str) -> None:
        self.name, self._depth, self._cache = name, depth, cache
        self.turns: list[dict[str, float]] = []
        self.warm_ups_s: list[float] = []
        self._log = Path(tempfile.gettempdir()) / f"training-speed-{depth}-{SIDES.index(name)}.log"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", self.name, str(self._depth)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": self._cache},
        )
        self.warm_ups_s.append(self._read()["warm_up_s"])

    def take_turn(self, num_updates: int, num_acts: int) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([num_updates, num_acts]) + "\n")
        self._process.stdin.flush()
        self.turns.append(self._read())

    def median(self, name: str) -> float:
        return statistics.median(turn[name] for turn in self.turns)

    def close(self) -> None:
        if self._process is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process = None

    def _read(self) -> dict[str, float]:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        raise SystemExit(f"the side {self.name!r} ended; see {self._log}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="4,32,64,256,1024")
    parser.add_argument("--rounds", type=int, default=5, help=f"at depth 1024 at most {ROUNDS_OF_ONE_AT_A_TIME}")
    parser.add_argument("--quick", action="store_true", help="depths 4 and 32, one round: shows that it runs")
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "DEPTH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve_turns(arguments.worker[0], int(arguments.worker[1]))
        return
    depths = [4, 32] if arguments.quick else list(map(int, arguments.depths.split(",")))
    rounds = 1 if arguments.quick else arguments.rounds
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:  # the first depth compiles anew, the others find what it compiled
        for depth in depths:
            num_rounds = min(rounds, ROUNDS_OF_ONE_AT_A_TIME) if depth >= DEPTH_OF_ONE_AT_A_TIME else rounds
            rows += compare(depth, num_rounds, cache)
            for row in rows[-len(SIDES) :]:
                print(json.dumps(row), flush=True)
    report(rows, rounds, quick=arguments.quick)


def compare(depth: int, rounds: int, cache: str) -> list[dict[str, Any]]:
    """One row a side: medians over the rounds, and medians of each round's ratio to the plain loop."""
    sides = [Side(name, depth, cache) for name in SIDES]
    one_at_a_time = depth >= DEPTH_OF_ONE_AT_A_TIME
    try:
        if not one_at_a_time:
            for side in sides:
                side.start()
        for number in range(rounds):
            for side in sides if number % 2 else sides[::-1]:
                if one_at_a_time:
                    side.start()
                side.take_turn(UPDATES_A_TURN.get(depth, 1), ACTS_A_TURN.get(depth, 10))
                if one_at_a_time:
                    side.close()
    finally:
        for side in sides:
            side.close()
    plain = sides[0]
    return [
        {
            "depth": depth,
            "side": side.name,
            "updates/s": side.median("updates_per_s"),
            "times plain": _median_ratio(side, plain, "updates_per_s"),
            "drawing a batch ms": side.median("drawing_ms"),
            "environment steps/s": side.median("steps_per_s"),
            "steps, times plain": _median_ratio(side, plain, "steps_per_s"),
            "peak MB": side.median("peak_mb"),
            "share of peak": side.median("peak_mb") / plain.median("peak_mb"),
            "first update s": side.warm_ups_s[0],
        }
        for side in sides
    ]


def _median_ratio(side: Side, plain: Side, name: str) -> float:
    return statistics.median(mine[name] / peer[name] for mine, peer in zip(side.turns, plain.turns, strict=True))


def report(rows: list[dict[str, Any]], rounds: int, *, quick: bool) -> None:
    from record import keep_record  # beside this folder

    found = {(row["depth"], row["side"]): row for row in rows}
    depths = sorted({row["depth"] for row in rows})
    verdicts: list[str] = []
    for depth in depths:
        ours, checkpointed, compiled = (found[depth, name] for name in (OURS, CHECKPOINTING, COMPILE))
        verdicts.append(
            f"depth {depth}: updates {_speed(ours['times plain'])} the plain loop's, environment steps "
            f"{_speed(ours['steps, times plain'])} its, at {ours['share of peak']:.2f} of its peak memory. With "
            f"checkpointing updates are {_speed(checkpointed['times plain'])} the plain loop's, at "
            f"{checkpointed['share of peak']:.2f} of its memory. torch.compile makes "
            f"{compiled['updates/s'] / ours['updates/s']:.2f} times the updates/s of the side without it, after a "
            f"first update of {compiled['first update s']:.0f} s instead of {ours['first update s']:.0f} s."
        )
    method = (
        f"{ENVIRONMENT}, width {WIDTH}, batch {BATCH_SIZE}, float32; actor and both encoders of the depth given; one "
        f"thread of CPU a process. Median of {rounds} rounds (at most {ROUNDS_OF_ONE_AT_A_TIME} from depth "
        f"{DEPTH_OF_ONE_AT_A_TIME} on, each in a fresh process), sides alternating in every round; a turn is "
        f"{', '.join(f'{n} updates at depth {d}' for d, n in UPDATES_A_TURN.items())} and 1 "
        "beyond. `plain` is the same network in the usual loop, one environment in the same process; the others step "
        f"{NUM_ENVIRONMENTS} in {NUM_PROCESSES} processes. Updates are in CPU time and hold the drawing of the batch; "
        "environment steps are in wall time and hold acting. Peak memory is the learning process's, with Python, "
        "torch and the environments' packages; the first update is in wall time, with compilation and one acting. "
        "Checkpointing with torch.compile is left out: on a CPU recomputation runs its own arithmetic, not the blocks'."
    )
    keep_record("rl-training-speed" + "-quick" * quick, method=method, rows=rows, verdicts=verdicts)


def _speed(ratio: float) -> str:
    return f"{ratio:.2f} times" + (" (NOT faster)" if ratio <= 1 else "")


def serve_turns(name: str, depth: int) -> None:
    """The worker: one turn for every line of its input, until that ends."""
    import torch

    torch.set_num_threads(1)
    started = time.perf_counter()
    with make_side(name, depth) as learning:
        learning.update(learning.draw())
        learning.collect(1)
        print("RESULT", json.dumps({"warm_up_s": time.perf_counter() - started}), flush=True)
        for line in sys.stdin:
            print("RESULT", json.dumps(measure(learning, *json.loads(line))), flush=True)


def measure(learning: Learning, num_updates: int, num_acts: int) -> dict[str, float]:
    drawing_s = updating_s = 0.0
    for _ in range(num_updates):
        began = time.process_time()
        batch = learning.draw()
        drawn = time.process_time()
        learning.update(batch)
        drawing_s += drawn - began
        updating_s += time.process_time() - drawn
    began = time.perf_counter()
    num_steps = learning.collect(num_acts)
    return {
        "updates_per_s": num_updates / (drawing_s + updating_s),
        "drawing_ms": 1000 * drawing_s / num_updates,
        "steps_per_s": num_steps / (time.perf_counter() - began),
        "peak_mb": _peak_mb(),
    }


def _peak_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise SystemExit("/proc/self/status has no VmHWM: this benchmark needs Linux")


def make_side(name: str, depth: int) -> Any:
    if name == PLAIN:
        return PlainLoop(depth)
    from gated_serving.rl.networks import best_checkpoint_segments

    segments = best_checkpoint_segments(depth) if name == CHECKPOINTING else 0
    return ProjectLoop(depth, checkpoint_segments=segments, compile_blocks=name == COMPILE)


class ProjectLoop:
    """The project's own parts, put together as its trainer does."""

    def __init__(self, depth: int, *, checkpoint_segments: int, compile_blocks: bool) -> None:
        import torch

        from gated_serving.rl.environments import make_vector_environment
        from gated_serving.rl.replay import EpisodeReplay
        from gated_serving.rl.settings import (
            EnvironmentSettings,
            NetworkSettings,
            RuntimeSettings,
            StageSettings,
            TrainingRun,
        )
        from gated_serving.rl.training.collection import Collector
        from gated_serving.rl.training.learner import Learner

        self._rng = np.random.default_rng(0)
        self._environments = make_vector_environment(
            ENVIRONMENT, num_environments=NUM_ENVIRONMENTS, num_processes=NUM_PROCESSES
        )
        spec = self._environments.spec
        stage = StageSettings(
            num_environment_steps=1, num_updates=1, batch_size=BATCH_SIZE, learning_rate=LEARNING_RATE, warmup_share=0.0
        )
        run = TrainingRun(
            name="training-speed", environment=EnvironmentSettings(id=ENVIRONMENT), pretrain=stage, explore=stage,
            finetune=stage, networks=NetworkSettings(actor_depth=depth, critic_depth=depth, width=WIDTH),
            runtime=RuntimeSettings(checkpoint_segments=checkpoint_segments, compile=compile_blocks),
        )  # fmt: skip
        self._learner = Learner(run, spec, torch.device("cpu"))
        self._replay = EpisodeReplay(
            capacity_per_environment=10_000, num_environments=NUM_ENVIRONMENTS, gamma=GAMMA, goal_size=spec.goal_size,
            observation_size=spec.observation_size, action_size=spec.action_size,
        )  # fmt: skip
        self._collector = Collector(self._environments, self._replay)

    def __enter__(self) -> ProjectLoop:
        self._collector.begin_episodes()
        self._collector.take_random(2 * EPISODE_LENGTH, self._rng)
        return self

    def __exit__(self, *_: object) -> None:
        self._environments.close()

    def draw(self) -> Any:
        return self._replay.sample(BATCH_SIZE, self._rng)

    def update(self, batch: Any) -> None:
        self._learner.update(batch, LEARNING_RATE)

    def collect(self, num_acts: int) -> int:
        self._collector.take(num_acts, lambda observation, goal: self._learner.act(observation, goal, explore=True))
        return num_acts * NUM_ENVIRONMENTS


class PlainLoop:
    """The loop that is usually written, over the same network classes; it computes the same losses."""

    def __init__(self, depth: int) -> None:
        import torch

        from gated_serving.rl.environments import make_goal_environment
        from gated_serving.rl.networks import ContrastiveCritic, GaussianActor, TrunkShape

        self._environment = make_goal_environment(ENVIRONMENT)
        observation, _ = self._environment.reset(seed=0)
        sizes = {"state_size": observation["observation"].size, "goal_size": observation["desired_goal"].size}
        shape = self._environment.action_space.shape
        assert shape is not None
        self._num_actions = shape[0]
        trunk = TrunkShape(input_size=sum(sizes.values()), depth=depth, width=WIDTH)
        self._actor = GaussianActor(trunk, self._num_actions)
        self._critic = ContrastiveCritic(**sizes, action_size=self._num_actions, depth=depth, width=WIDTH)
        self._log_alpha = torch.zeros((), requires_grad=True)
        self._actor_adam, self._critic_adam, self._alpha_adam = (
            torch.optim.Adam(parameters, lr=LEARNING_RATE)
            for parameters in (self._actor.parameters(), self._critic.parameters(), [self._log_alpha])
        )
        self._rng = np.random.default_rng(0)
        self._episodes: list[list[tuple[npt.NDArray[np.float32], ...]]] = []
        self._begin_episode()

    def __enter__(self) -> PlainLoop:
        for _ in range(2 * EPISODE_LENGTH * NUM_ENVIRONMENTS):
            self._take(lambda _observation: self._rng.uniform(-1, 1, self._num_actions).astype(np.float32))
        return self

    def __exit__(self, *_: object) -> None:
        self._environment.close()

    def draw(self) -> Any:
        import torch

        rows: list[tuple[npt.NDArray[np.float32], ...]] = []
        episodes = [episode for episode in self._episodes if episode]
        for _ in range(BATCH_SIZE):
            episode = episodes[self._rng.choice(len(episodes))]
            moment = self._rng.choice(len(episode))
            weights = GAMMA ** np.arange(1, len(episode) - moment + 1)
            later = self._rng.choice(np.arange(moment, len(episode)), p=weights / weights.sum())
            rows.append((episode[moment][0], episode[moment][1], episode[later][2]))
        return tuple(torch.as_tensor(np.stack(column)) for column in zip(*rows, strict=True))

    def update(self, batch: Any) -> None:
        import torch
        import torch.nn.functional as F

        state, action, goal = batch
        phi, psi = self._critic.encode_state_action(state, action), self._critic.encode_goal(goal)
        logits = -torch.sqrt((phi[:, None] - psi[None]).square().sum(-1) + 1e-6)
        penalty = logits.logsumexp(1).square().mean()
        self._step(self._critic_adam, F.cross_entropy(logits, torch.arange(len(logits))) + 0.1 * penalty)

        action, log_prob = self._actor.sample(torch.cat([state, goal], dim=-1))
        phi, psi = self._critic.encode_state_action(state, action), self._critic.encode_goal(goal)
        energy = -torch.sqrt((phi - psi).square().sum(-1) + 1e-6)
        self._step(self._actor_adam, (self._log_alpha.exp().detach() * log_prob - energy).mean())
        entropy_gap = (-log_prob.detach() + 0.5 * self._num_actions).mean()
        self._step(self._alpha_adam, self._log_alpha.exp() * entropy_gap)

    def collect(self, num_acts: int) -> int:
        for _ in range(num_acts):
            self._take(self._sample_action)
        return num_acts

    def _step(self, optimizer: Any, loss: Any) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def _sample_action(self, observation: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
        import torch

        x = np.concatenate([observation["observation"], observation["desired_goal"]]).astype(np.float32)
        with torch.no_grad():
            return self._actor.sample(torch.from_numpy(x)[None])[0][0].numpy()

    def _take(self, act: Callable[[dict[str, npt.NDArray[Any]]], npt.NDArray[np.float32]]) -> None:
        action = act(self._observation)
        observation, _, terminated, truncated, _ = self._environment.step(action)
        seen, achieved = self._observation["observation"], observation["achieved_goal"]
        self._episodes[-1].append((seen.astype(np.float32), action, achieved.astype(np.float32)))
        self._observation = observation
        if terminated or truncated:
            self._begin_episode()

    def _begin_episode(self) -> None:
        self._observation, _ = self._environment.reset()
        self._episodes.append([])


if __name__ == "__main__":
    main()
