"""Figures of the model of many hosts, by hand."""

import json

import pytest

from benchmarks import cluster_model as model

OF = model.Constants()


def test_the_rate_is_the_published_one():
    assert pytest.approx(49.5, abs=0.1) == 1 / (model.LLAMA_3 * 1024)  # hours


def test_a_whole_job_loses_every_device_for_restart_and_half_an_interval():
    assert model.whole_job_s(1024, OF) == 1024 * (1200 + 900)
    assert model.goodput(1024 * 2100, 1 / 1024) == pytest.approx(1 / (1 + 2100 / 3600))


def test_engines_wait_only_for_what_is_beyond_the_steps_they_were_given():
    no_engines_idle = model.by_role_s(64, 4, 60.0, OF)  # 240 s of outage, 240 s of work
    assert no_engines_idle == 0.375 * 24 * 240 + 0.625 * 8 * 180
    assert model.by_role_s(64, 2, 60.0, OF) == no_engines_idle + 0.375 * 40 * 120
    assert model.by_role_s(64, 4, 60.0, OF, found_s=60.0) > no_engines_idle


def test_weights_go_to_the_engines_that_want_them():
    assert model.engines(1024, OF) == 80
    times = model.weights_s(16.0, 1024, 2, OF)
    assert times["star"] == pytest.approx(27 * 5.12)  # a third of 80 hosts, one after another
    assert times["spread"] == pytest.approx(5.12)  # 48 trainer hosts: each engine's own link is the limit
    assert model.weights_s(16.0, 64, 0, OF)["spread"] == pytest.approx(5 / 3 * 5.12)
    assert times["relay"] == pytest.approx(5.12 + 5 * 0.064 / 3.125)


def test_the_last_line_is_json(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["cluster_model", "--devices=64"])
    model.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["64"]["goodput"]["whole job x100"] < figures["64"]["goodput"]["by role x100"] < 1
