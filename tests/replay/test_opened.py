"""What of a workdir can be made again, and what its record says against itself, by headers alone."""

import dataclasses
import json

import pytest

from configs.search_r1 import get_config
from jaxagent import config
from jaxagent.config import ConfigError, to_dict
from jaxagent.replay import recorded_run, stage_end
from jaxagent.replay.record_diff import Difference
from jaxagent.runs import provenance, record


def chain(steps, begins=(), cfg="c"):
    """Headers whose seals fit; those of `begins` know of no step before."""
    found, last = {}, "what is forgotten"
    for step in steps:
        header = {"record": 1, "step": step, "config": cfg, "code": provenance.code_digest(), "tasks": [], "rounds": []}
        header |= {"before": f"w{step}", "after": f"w{step + 1}", "previous": "" if step in begins else last}
        last = header["seal"] = record.seal_of(header)
        found[step] = header
    return found


def without(headers, *steps):
    return {step: header for step, header in headers.items() if step not in steps}


@pytest.mark.parametrize(
    ("headers", "differences"),
    [
        (chain(range(4), begins=[0]), []),
        (chain(range(2, 5)), []),  # older ones are forgotten
        (without(chain(range(6), begins=[0]), 2), ["step 2: the record's file"]),
        (without(chain(range(6), begins=[0]), 2, 3), ["step 3: the record's file"]),
        (without(chain(range(6), begins=[0, 3]), 2), []),  # recording was off for a while: told, and no damage
    ],
)
def test_a_missing_step_in_the_middle_is_damage(headers, differences):
    assert [f"{d.place}: {d.field}" for d in recorded_run._broken(headers)] == differences


def test_where_a_record_begins_again_is_told():
    told = recorded_run._notes([], without(chain(range(6), begins=[0, 3]), 2), {})
    assert told == ["steps were left out: the record begins again at 3, and its seals with it"]


def test_a_fleets_bundles_reach_the_steps_whose_weights_they_lead_to(tmp_path):
    """Their engines had weights of before the bundle, which nobody keeps: those steps need an older bundle."""
    cfg = config.parse(get_config("laptop"))
    cfg = dataclasses.replace(cfg, workdir=str(tmp_path), rl=dataclasses.replace(cfg.rl, staleness=2))
    headers = chain(range(6), begins=[0], cfg=provenance.config_digest(to_dict(cfg)))
    own = {provenance.config_digest(to_dict(cfg)): cfg, "another": "rl.steps 4 -> 6"}
    made = recorded_run.RecordedRun(cfg, "rl", tmp_path, headers, {0: 5, 3: 8}, {}, frozenset(), (), (), configs=own)
    assert [made.bundle_for(step) for step in range(6)] == [0, 0, 0, 3, 3, 3]
    made = dataclasses.replace(made, lagging=frozenset([3]))
    assert [made.bundle_for(step) for step in range(6)] == [0, 0, 0, 0, 0, 3]
    assert (made.first, made.end, made.sampled(0)) == (0, 6, list(range(6)))
    made = dataclasses.replace(made, bundles={3: 8})
    assert made.first == 3 and made.sampled(3) == [5]
    with pytest.raises(ConfigError, match=r"--step=4: no bundle is left .* Steps that can be made again: 5\."):
        made.bundle_for(4)
    other = {**headers, 4: headers[4] | {"config": "another"}}
    made = dataclasses.replace(made, bundles={0: 5, 3: 8, 5: 10}, headers=other, lagging=frozenset())
    assert made.first == 5 and made.left_out == {4: "rl.steps 4 -> 6"} and made.bundle_for(2) == 0
    with pytest.raises(ConfigError, match=r"--step=4 was made under another config .* \(rl.steps 4 -> 6\)"):
        made.bundle_for(4)


def test_a_step_is_made_again_with_the_settings_of_then_where_nothing_else_was_another():
    now = LAPTOP
    with_rl = dataclasses.replace(now, rl=dataclasses.replace(now.rl, steps=7, staleness=1))
    free = dataclasses.replace(now, workdir="elsewhere", engine=dataclasses.replace(now.engine, slots=3))
    other = dataclasses.replace(now, numerics="fast")
    digests = [provenance.config_digest(to_dict(cfg)) for cfg in (now, with_rl, free, other)]
    rows = [json.loads(json.dumps(to_dict(cfg))) for cfg in (now, with_rl, free, other)]
    found = recorded_run._configs(now, [*digests, "?"], rows)
    assert found[digests[0]] == found[digests[2]] == now and found["?"] == "nothing keeps what it was"
    assert found[digests[3]] == f"numerics {other.numerics} -> {now.numerics}"
    assert found[digests[1]] == dataclasses.replace(now, rl=with_rl.rl)
    rows[1]["rl"]["of_another_version"] = 1
    digest = provenance.config_digest(rows[1])
    assert "config.rl.of_another_version" in recorded_run._configs(now, [digest], rows)[digest]


def test_a_step_of_before_episodes_were_a_section_is_made_again():
    """Its header has the digest of a config without `log_episodes`, which said then what `episodes` says now."""
    then = json.loads(json.dumps(to_dict(LAPTOP)))
    del then["episodes"], then["mesh"]["expert"]
    digest = provenance.config_digest(then)
    assert recorded_run._configs(LAPTOP, [digest], [then | {"log_episodes": True}]) == {digest: LAPTOP}


LAPTOP = config.parse(get_config("laptop"))


def hosts(*steps, replay="all", pinned=(4,)):
    return {step: {"step": step, "pinned": pinned, "config": {"checkpoint": {"replay": replay}}} for step in steps}


@pytest.mark.parametrize(
    ("recorded", "logged", "bundled", "over", "damaged", "told"),
    [
        (5, 5, 5, True, False, False),
        (3, 5, 5, True, True, False),
        (3, 5, 3, True, True, False),  # the newest bundle was taken away too
        (3, 0, 3, True, True, False),  # and metrics.jsonl
        (3, 5, 5, False, True, False),  # a bundle comes after the files of its steps
        (3, 5, 2, False, True, False),
        (4, 5, 2, False, False, True),  # killed between the line of a step and its file
        (5, 4, 2, False, False, False),  # killed before a power cut took the line
        (2, 5, 2, False, False, True),  # killed again, when it had removed what it would write anew
    ],
)
def test_a_record_that_ends_before_its_stage_is_damage_and_a_killed_run_is_none(
    recorded, logged, bundled, over, damaged, told
):
    came = stage_end.StageEnd(logged, bundled, over, 5 if over else bundled)
    found = stage_end.cut_off(came, chain(range(recorded), begins=[0]), hosts(0, bundled))
    assert (isinstance(found, Difference), isinstance(found, str)) == (damaged, told)
    off = {**hosts(0), **hosts(bundled, replay="none")}
    found = stage_end.cut_off(came, chain(range(recorded), begins=[0]), off)
    assert isinstance(found, str) if max(logged, bundled) > recorded else found is None


def test_a_record_without_its_first_steps_is_damage_where_all_were_to_be_kept():
    cfg, late, numbers = LAPTOP, chain(range(2, 5)), {0: 4, 3: 7}
    assert cfg.checkpoint.replay == "all"
    found = stage_end.begins_late(cfg, late, hosts(0, 3), numbers)
    assert str(found) == "step 1: the record's file is what is forgotte in the record, and not there now"
    newest = dataclasses.replace(cfg, checkpoint=dataclasses.replace(cfg.checkpoint, replay="newest"))
    for one, of in ((newest, hosts(3, replay="newest")), (cfg, hosts(3, pinned=()))):  # the second was "newest" before
        told = "the record begins with step 2: the steps before it were forgotten, or not recorded"
        assert stage_end.begins_late(one, late, of, numbers) == told
    assert stage_end.begins_late(cfg, chain(range(3), begins=[0]), hosts(0, 3), numbers) is None


def test_a_run_is_over_when_its_policy_is_exported_and_it_has_not_gone_on(tmp_path):
    cfg = dataclasses.replace(LAPTOP, rl=dataclasses.replace(LAPTOP.rl, steps=5))
    lines = [{"stage": "warm_start", "step": 9}, {"stage": "rl", "step": 3}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert stage_end.read(tmp_path, cfg, "rl", {0: 4, 2: 6}) == stage_end.StageEnd(3, 2, False, 2)
    (tmp_path / "summary.json").write_text('{"steps": 3}')  # of a shorter run, which has gone on
    assert not stage_end.read(tmp_path, cfg, "rl", {}).over
    (tmp_path / "summary.json").write_text('{"steps": 5}')
    assert stage_end.read(tmp_path, cfg, "rl", {0: 4}) == stage_end.StageEnd(3, 0, True, 5)
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/config.json").write_text("{}")
    (tmp_path / "policy/OUTDATED").touch()
    assert not stage_end.read(tmp_path, cfg, "rl", {}).over


def test_who_goes_on_from_a_fleets_bundle_alone_samples_with_its_weights(tmp_path):
    fleet, one = {"command": "join.py --role=trainer"}, {"command": "main.py"}
    at = lambda step, stage="rl": {"resumed_at": {"stage": stage, "step": step}}  # noqa: E731

    def alone(*starts, without=()):
        return list(stage_end.begun_alone(list(starts), LAPTOP, "rl", dict(without)))

    begin = fleet | {"resumed_at": None}
    assert alone(begin, one | at(3)) == [3]
    assert alone(begin, one | at(3), without={3: False}) == []  # the bundle holds the versions before it
    assert alone(one | {"resumed_at": None}, one | at(3)) == [] == alone(begin, fleet | at(3))
    assert alone(begin, one | at(3), one | at(3)) == [3] and alone(begin, one | at(3), one | at(6)) == [3]
    assert alone(begin, one | at(3), fleet | at(6), one | at(8)) == [3, 8]
    assert alone(begin, one | at(3), fleet | at(2)) == [] == alone(begin, one | at(3), fleet | at(9, "warm_start"))


def test_what_a_process_alone_made_after_a_fleets_bundle_begins_anew_there(tmp_path):
    cfg = dataclasses.replace(LAPTOP, workdir=str(tmp_path), rl=dataclasses.replace(LAPTOP.rl, staleness=2))
    headers = chain(range(8), begins=[0], cfg=provenance.config_digest(to_dict(cfg)))
    own = {provenance.config_digest(to_dict(cfg)): cfg}
    made = recorded_run.RecordedRun(
        cfg, "rl", tmp_path, headers, {0: 4, 2: 6, 4: 8}, {}, frozenset([2, 4]), (), (), configs=own
    )
    assert [made.bundle_for(step) for step in range(8)] == [0, 0, 0, 0, 2, 2, 4, 4]
    made = dataclasses.replace(made, alone=frozenset([4]))
    assert [made.bundle_for(step) for step in range(8)] == [0, 0, 0, 0, 4, 4, 4, 4]
    parts = [(part.first, part.end, part.alone) for part in made.segments(0, made.end)]
    assert parts == [(0, 4, False), (4, 8, True)]  # from an older bundle the engine forgets there what it had
    assert made.first == 0 and made.sampled(0) == list(range(8))


@pytest.mark.parametrize(("fleet", "past", "lacks"), [(None, False, False), ({}, False, True), ({}, True, False)])
def test_a_bundle_says_itself_whether_a_fleet_made_it(tmp_path, fleet, past, lacks):
    (tmp_path / "7" / "past" if past else tmp_path / "7").mkdir(parents=True)
    assert recorded_run._without_past(tmp_path, 7, {"stage": "rl", "step": 3, "config": {"fleet": fleet}}) == lacks


def test_what_rounds_differently_is_told():
    here = recorded_run.provenance.machine()
    assert recorded_run._notes([here], {}, {}) == []
    told = recorded_run._notes([here | {"threads": 1_000, "cpu_features": "an older one"}, here], {}, {})
    assert len(told) == 2 and told[0].endswith(f": an older one when the run was made, {here['cpu_features']} here")
    assert "PJRT_NPROC" in told[1] and told[1].endswith(f": 1000 when the run was made, {here['threads']} here")
    few = recorded_run._notes([here | {"few_optimizations": "1"}, here | {"few_optimizations": ""}], {}, {})
    assert len(few) == 1 and few[0].startswith("JAX_DISABLE_MOST_OPTIMIZATIONS: ")
    flags = recorded_run._notes([here | {"xla_flags": "--a"}, here | {"xla_flags": ""}], {}, {})
    assert len(flags) == 1 and flags[0].startswith("XLA_FLAGS: ") and "--a" in flags[0]
    old = {name: value for name, value in here.items() if name not in recorded_run._ROUNDING}
    assert recorded_run._notes([old], {}, {}) == []  # a run of before said nothing of them
    went_on = {"other_rounding": "threads 2 -> 1", "resumed_at": {"stage": "rl", "step": 4}}
    assert recorded_run._notes([here, here | went_on], {}, {}) == [
        "the run went on with other bits: rl, from step 4 on: threads 2 -> 1"
    ]


def test_steps_that_other_code_of_ones_own_made_are_told():
    headers = chain(range(4), begins=[0])
    for step, digest in enumerate(("old", "old", "new")):
        headers[step]["own_code"] = {"game/nim.py": digest}  # step 3 is of a version that did not keep it
    own = {"game/nim.py": "new", "game/rules.py": "added"}
    assert recorded_run._notes([], headers, own) == [
        "steps 0-1 were made by another version of the code of game.nim (game/nim.py)",
        "steps 0-2 were made by another version of the code of game.rules (game/rules.py)",
    ]
