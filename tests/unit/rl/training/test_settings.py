from __future__ import annotations

import pytest
from tiny_policy_training import tiny_run

from gated_serving.rl.contrastive import ContrastiveLoss
from gated_serving.rl.recipes import RECIPES, find_recipe
from gated_serving.rl.training.schedule import Schedule


def test_fields_are_exchanged_and_the_rest_stays() -> None:
    run = tiny_run(
        "environment.id=my_module:Maze",
        'environment.kwargs={"size": 3}',
        "contrastive.loss=symmetric_infonce",
        "explore.learning_rate=2e-4",
        "actor.temperature=none",
        "evaluation.video=true",
        "runtime.num_threads=null",
    )
    assert run.environment.id == "my_module:Maze"
    assert run.environment.kwargs == {"size": 3}
    assert run.contrastive.loss is ContrastiveLoss.SYMMETRIC_INFONCE
    assert run.contrastive.energy == tiny_run().contrastive.energy
    assert run.explore.learning_rate == 2e-4
    assert run.explore.batch_size == tiny_run().explore.batch_size
    assert run.actor.temperature == "none"
    assert run.evaluation.video is True
    assert run.runtime.num_threads is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pretrain.batch_size=1", "pretrain.batch_size=1: must be at least 2"),
        ("pretrain.learning_rate=NaN", "pretrain.learning_rate=nan: must be a finite number above 0"),
        ("explore.learning_rate=Infinity", "explore.learning_rate=inf: must be a finite number above 0"),
        ("finetune.warmup_share=1.5", "finetune.warmup_share=1.5: must be from 0 to 1"),
        ("finetune.num_updates=0", "finetune.num_updates=0: must be above 0 where num_environment_steps is"),
        ("networks.actor_depth=6", "networks.actor_depth=6: must be a multiple of 4 from 4 to 1024"),
        ("networks.critic_depth=1028", "networks.critic_depth=1028: must be a multiple of 4 from 4 to 1024"),
        ("networks.width=0", "networks.width=0: must be at least 1"),
        ("networks.width=wide", "networks.width='wide': .*integer"),
        ("contrastive.loss=infonce", "contrastive.loss='infonce': .*'forward_infonce'"),
        ("contrastive.loss=nt_xent", "contrastive.energy='l2' with loss='nt_xent'"),
        ("contrastive.temperature=0", "contrastive.temperature=0.0: must be a finite number above 0"),
        ("actor.temperature=fixed", "actor.temperature='fixed': .*'learned' or 'none'"),
        ("actor.initial_alpha=0", "actor.initial_alpha=0.0: must be a finite number above 0"),
        ("actor.random_goal_share=2", "actor.random_goal_share=2.0: must be from 0 to 1"),
        ("actor.target_entropy_per_action=NaN", "actor.target_entropy_per_action=nan: must be a finite number"),
        ("collection.num_environments=0", "collection.num_environments=0: must be at least 1"),
        ("replay.gamma=0", "replay.gamma=0.0: must be above 0 and at most 1"),
        ("replay.capacity=3", "replay.capacity=3: must be at least collection.num_environments, which is 4"),
        ("optimisation.adam_beta2=1", "optimisation.adam_beta2=1.0: must be from 0 to below 1"),
        ("optimisation.max_grad_norm=-1", "optimisation.max_grad_norm=-1.0: must be a finite number, at least 0"),
        ("optimisation.seed=4294967296", "optimisation.seed=4294967296: must be from 0 to"),
        ("evaluation.num_episodes=0", "evaluation.num_episodes=0: must be at least 1"),
        ("runtime.num_processes=3", "runtime.num_processes=3: must be 0, or divide collection.num_environments"),
        ("runtime.checkpoint_segments=2", "runtime.checkpoint_segments=2: must be at most 1, the residual blocks"),
        ("runtime.log_rounds=4", "runtime.save_rounds=2: must be a multiple of log_rounds, which is 4"),
        ("environment.id=", "environment.id='': must be a Gymnasium id"),
        ('environment.kwargs={"render_mode": "human"}', "environment.kwargs=.*must be without render_mode"),
        ("finetun.batch_size=8", "finetun.batch_size: there is no section 'finetun'; did you mean 'finetune'"),
        ("finetune.batchsize=8", "finetune.batchsize: there is no field 'batchsize'; did you mean 'batch_size'"),
        ("finetune=8", "'finetune=8': an override is written section.field=value"),
    ],
)
def test_what_is_wrong_is_named(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_run(override)


def test_a_run_without_updates_is_refused() -> None:
    nothing = [f"{stage}.{field}=0" for stage in ("pretrain", "explore", "finetune")
               for field in ("num_updates", "num_environment_steps")]  # fmt: skip
    with pytest.raises(ValueError, match="no stage has updates"):
        tiny_run(*nothing)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_found_by_its_name_and_has_the_three_stages_of_practice(name: str) -> None:
    run = find_recipe(name)
    assert run.name == name
    assert [stage.batch_size for stage in run.stages.values()] == [2048, 1024, 512]
    assert [stage.learning_rate for stage in run.stages.values()] == [3e-4, 1e-4, 5e-5]
    assert [stage.warmup_share for stage in run.stages.values()] == [0.10, 0.05, 0.0]


def test_an_unknown_recipe_is_named() -> None:
    with pytest.raises(ValueError, match="there is no recipe 'fetch'; known are fetch-reach"):
        find_recipe("fetch")


def test_the_reaching_recipe_is_deep() -> None:
    networks = find_recipe("fetch-reach").networks
    assert networks.actor_depth >= 32
    assert networks.critic_depth >= 32


def test_rounds_follow_the_stages() -> None:
    run = tiny_run()  # 40 steps a round
    schedule = Schedule(run)
    rounds = [schedule.round(number) for number in range(schedule.num_rounds)]
    assert [each.stage for each in rounds] == ["pretrain"] * 3 + ["explore"] * 3 + ["finetune"] * 2
    assert [each.batch_size for each in rounds] == [64] * 3 + [32] * 3 + [16] * 2
    assert [len(each.learning_rates) for each in rounds] == [4] * 8
    assert schedule.num_updates == 32
    assert schedule.num_environment_steps == 100 + 8 * 40
    assert schedule.stage_bounds() == [("pretrain", 100, 220), ("explore", 220, 340), ("finetune", 340, 420)]
    with pytest.raises(ValueError, match="no round 8"):
        schedule.round(8)


def test_the_learning_rate_warms_up_in_each_stage_and_stays() -> None:
    schedule = Schedule(tiny_run("pretrain.learning_rate=6e-3"))  # 12 updates, half of them warm-up
    rates = [rate for number in range(3) for rate in schedule.round(number).learning_rates]
    assert rates == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3] + [6e-3] * 6)
    assert schedule.round(6).learning_rates == (5e-4,) * 4  # no warm-up


def test_updates_that_do_not_divide_are_spread_and_none_is_lost() -> None:
    schedule = Schedule(tiny_run("pretrain.num_updates=10", "pretrain.num_environment_steps=121"))
    counts = [len(schedule.round(number).learning_rates) for number in range(4)]  # 121 steps are 4 rounds
    assert sum(counts) == 10
    assert max(counts) - min(counts) <= 1


def test_a_stage_can_be_left_out() -> None:
    schedule = Schedule(tiny_run("explore.num_updates=0", "explore.num_environment_steps=0"))
    assert [name for name, _, _ in schedule.stage_bounds()] == ["pretrain", "finetune"]
    assert schedule.round(3).stage == "finetune"


def test_two_schedules_agree_until_they_differ() -> None:
    schedule = Schedule(tiny_run())
    longer = Schedule(tiny_run("finetune.num_updates=16", "finetune.num_environment_steps=160"))
    assert schedule.agrees_until(longer, 8)
    faster = Schedule(tiny_run("explore.learning_rate=1e-2"))
    assert schedule.agrees_until(faster, 3)
    assert not schedule.agrees_until(faster, 4)
    assert not schedule.agrees_until(Schedule(tiny_run("collection.num_random_steps=200")), 0)
