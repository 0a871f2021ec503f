"""Numbers on the command lines of the pipelines: what cannot be is told at once, and nothing is written."""

import importlib

import pytest

PIPELINES = {
    "arithmetic": ("--num=-5", "--demonstrations=-1", "--early_frac=80"),
    "fixes": ("--num=0", "--guess_frac=-0.1"),
    "geography": ("--num_cities=0", "--early_answer_frac=nan"),
    "long_geography": ("--chunk_tokens=0", "--forget_frac=2"),
    "orchestra": ("--num=-1", "--topk=0"),
    "python_tasks": ("--num=-5",),
    "speedup_tasks": ("--demonstrations=-1", "--slow_frac=70"),
    "tau_store.__main__": ("--users=0", "--curriculum=-1"),
    "terminal": ("--num=0", "--jobs=0", "--early_done_frac=50"),
    "text_worlds": ("--num=-5", "--flawed_frac=70"),
    "tool_calls": ("--num=1.5", "--first_only_frac=70"),
    "web_shop": ("--num=0", "--hasty_frac=70", "--careless_frac=-1"),
}


@pytest.mark.parametrize(
    ("name", "flag"), [(name, flag) for name, flags in PIPELINES.items() for flag in flags], ids=" ".join
)
def test_a_number_out_of_its_range_is_a_mistake(tmp_path, monkeypatch, capsys, name, flag):
    out = tmp_path / "out"
    argv = [f"--out={out}", flag]
    monkeypatch.setattr("sys.argv", [name, *argv])
    main = importlib.import_module(f"data_pipelines.{name}").main
    with pytest.raises(SystemExit) as ended:
        main() if name == "geography" else main(argv)
    assert ended.value.code == 2 and not out.exists()
    assert f"argument {flag.partition('=')[0]}: must be a" in capsys.readouterr().err
